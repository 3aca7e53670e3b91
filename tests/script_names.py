"""The public scripts' parameter names beside ours."""

from __future__ import annotations

NAMES = {
    "tok_emb.weight": "embedding.weight",
    "skip_weights": "skips.weight",
    "resid_mix": "mix",
    "attn_scale": "attention_scale",
    "mlp_scale": "mlp_scale",
    "attn.q_gain": "attention.gain",
    "attn.c_q.weight": "attention.query.weight",
    "attn.c_k.weight": "attention.key.weight",
    "attn.c_v.weight": "attention.value.weight",
    "attn.proj.weight": "attention.output.weight",
    "mlp.fc.weight": "mlp.up.weight",
    "mlp.proj.weight": "mlp.down.weight",
}
"""The scripts' parameter names, without `blocks.N.`, to ours."""
