"""The public scripts' parameters beside ours: other names, and in some scripts matrices of all layers in one bank."""

from collections.abc import Mapping

import torch
from torch import Tensor

NAMES = {
    "tok_emb.weight": "embedding.weight",
    "skip_weights": "skips.weight",
    "skip_gates": "skips.gate",
    "parallel_post_lambdas": "lanes.routes",
    "parallel_resid_lambdas": "lanes.gains",
    "smear.gate": "embedding.smear.gate",
    "smear_gate.weight": "embedding.smear.gate.weight",
    "smear_lambda": "embedding.smear.scale",
    "bigram.embed.weight": "embedding.bigrams.weight",
    "bigram.proj.weight": "embedding.bigrams.projection.weight",
    "bigram.scale": "embedding.bigrams.scale",
    "ve_shared.embed.weight": "value_embedding.weight",
    "ve_shared.proj.weight": "value_embedding.projection.weight",
    "ve_shared.scale": "value_embedding.scale",
    "resid_mix": "mix",
    "attn_scale": "attention_scale",
    "mlp_scale": "mlp_scale",
    "attn.q_gain": "attention.gain",
    "attn.attn_gate_w": "attention.gate.logits.weight",
    "attn.c_q.weight": "attention.query.weight",
    "attn.c_k.weight": "attention.key.weight",
    "attn.c_v.weight": "attention.value.weight",
    "attn.proj.weight": "attention.output.weight",
    "mlp.fc.weight": "mlp.up.weight",
    "mlp.proj.weight": "mlp.down.weight",
}
"""The scripts' parameter names, without `blocks.N.`, to ours."""

BANKS = {
    "qo_bank": ("attention.query.weight", "attention.output.weight"),
    "kv_bank": ("attention.key.weight", "attention.value.weight"),
    "mlp_up_bank": ("mlp.up.weight",),
    "mlp_down_bank": ("mlp.down.weight",),
}
"""The scripts' banks to our names, each of which all layers have, one behind the other."""


def script_view(name: str, ours: Mapping[str, Tensor]) -> Tensor:
    """What the script calls `name`, in its shape, made of our tensors."""
    if name in BANKS:
        layers = sum(key.endswith(BANKS[name][0]) for key in ours)
        return torch.stack([ours[f"blocks.{layer}.{part}"] for part in BANKS[name] for layer in range(layers)])
    if name.startswith("ve_layer_scales."):
        return ours["value_embedding.layer_scales"][int(name.rpartition(".")[2])].reshape(1)
    if name.startswith("blocks."):
        _, layer, part = name.split(".", 2)
        return ours[f"blocks.{layer}.{NAMES[part]}"]
    tensor = ours[NAMES[name]]
    return tensor.reshape(1) if name == "smear_lambda" else tensor


def load_script_weights(ours: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Write the scripts' weights into our parameters, all of which they must fill."""
    with torch.no_grad():
        for tensor in ours.values():
            tensor.fill_(torch.nan)
        for name, value in weights.items():
            if name in BANKS:
                layers = len(value) // len(BANKS[name])
                for number, matrix in enumerate(value):
                    part = BANKS[name][number // layers]
                    ours[f"blocks.{number % layers}.{part}"].copy_(matrix)
            else:
                view = script_view(name, ours)
                assert view.shape == value.shape, name
                view.copy_(value)
    for name, tensor in ours.items():
        assert bool(torch.isfinite(tensor).all()), f"the script has nothing for {name}"
