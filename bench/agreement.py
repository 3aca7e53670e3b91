"""Run public training scripts beside caddie's own models: python bench/agreement.py CHECKOUT [NAME …]

CHECKOUT is a clone of https://github.com/openai/parameter-golf. Each script named below is loaded from there, its own
model is built at a small size with random weights, the same weights are given to the recipe that is the same system,
and both give logits, losses, gradients and some steps of their own optimizers on the same tokens. One line of
differences is printed for each script. Exit status 1: some differ by more than the tolerance; 2: a script could not be
loaded.

A CPU is enough. What the scripts need a GPU for is replaced by plain functions that give the same: FlashAttention by
PyTorch's attention, the fused MLP by its two products, streams by nothing, and bfloat16 in the optimizers by float32,
so that rounding hides no mistake. Nothing is copied from the checkout.
"""

import argparse
import contextlib
import importlib.util
import inspect
import lzma
import os
import re
import statistics
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))
from parity import model_diff
from script_names import load_script_weights, script_view

from caddie.config.schedules import Budget, TrainProgress
from caddie.model import Model, build
from caddie.model.parameters import assign
from caddie.recipes.catalog import shipped
from caddie.runtime.distributed import Ranks
from caddie.train.optim import Muon

RECORDS = "records/track_10min_16mb/"
BOS, ROWS, STEPS = 1, 2, 4
TOLERANCES = {"logits": 5e-4, "loss": 1e-4, "gradients": 1e-3, "trained loss": 1e-3, "median": 3e-4, "worst": 1e-2}
"""Largest difference of a logit, of the first loss and of one after a step; of a gradient, as a share of it; and of
parameters after all steps, as a share: the median of all, and the worst, in which AdamW's first steps may go either way
where a gradient is near zero."""
SMALL = {
    "VOCAB_SIZE": "256",
    "NUM_LAYERS": "6",
    "MODEL_DIM": "64",
    "EMBEDDING_DIM": "64",
    "NUM_HEADS": "4",
    "NUM_KV_HEADS": "2",
    "TRAIN_SEQ_LEN": "48",
    "EVAL_SEQ_LEN": "48",
    "ROPE_TRAIN_SEQ_LEN": "48",
}
"""Settings of all scripts, by the names of their environment variables."""


@dataclass(frozen=True)
class Script:
    """A script of the checkout, and the recipe that is the same system."""

    path: str
    recipe: str
    settings: dict[str, str] = field(default_factory=dict)
    native_length: int | None = None
    """Length above which its rotary base is raised."""


LOOPS = {"ROPE_DIMS": "4", "XSA_LAST_N": "6", "LOOP_START": "2", "LOOP_END": "3"}
SCRIPTS = {
    "baseline": Script("train_gpt.py", "baseline"),
    "naive record": Script(RECORDS + "2026-03-17_NaiveBaseline/train_gpt.py", "baseline"),
    "fp16_embedding": Script(
        RECORDS + "2026-03-18_FP16Embed_WD3600/train_gpt.py", "fp16_embedding", {"MLP_HIDDEN": "124"}
    ),
    "exclusive_everywhere": Script(
        RECORDS + "2026-03-25_ValCalib_GPTQ_XSA_BigramHash3072/train_gpt.py",
        "exclusive_everywhere",
        {
            **{"ROPE_DIMS": "4", "XSA_LAST_N": "6", "VE_LAYERS": "4,5", "VE_DIM": "16"},
            **{"BIGRAM_VOCAB_SIZE": "151", "BIGRAM_DIM": "28"},
        },
        native_length=1024,
    ),
    "three_layer_recurrence": Script(
        RECORDS + "2026-04-09_SP8192_3LayerRecur_ParResid_QK525_LegalTTT/train_gpt.py",
        "three_layer_recurrence",
        {**LOOPS, "PARALLEL_RESIDUAL_START": "4"},
    ),
    "longer_warmdown": Script(
        RECORDS + "2026-04-27_SP8192_LQER_SparseGate_BOSSmearFix_9HpStack_1.0611/train_gpt.py",
        "longer_warmdown",
        {
            **LOOPS,
            **{"PARALLEL_START_LAYER": "4", "SMEAR_GATE_ENABLED": "1", "SPARSE_ATTN_GATE_ENABLED": "1"},
            **{"SPARSE_ATTN_GATE_SCALE": "0.5", "GATE_WINDOW": "12"},
        },
    ),
}


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, **_: object) -> Tensor:
    """FlashAttention's function of (batch, length, heads, width)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)


def readable(decompress: Callable[..., bytes]) -> Callable[..., bytes]:
    """Let a script that unpacks itself do so; quotes within an f-string's quotes, for Python 3.12, are made others."""

    def unpack(*given: Any, **options: Any) -> bytes:
        source = decompress(*given, **options)
        if sys.version_info < (3, 12):
            source = re.sub(rb"\{[^{}'\n]*\}", lambda field: field[0].replace(b'"', b"'"), source)
        return source

    return unpack


def uncompiled(function: Any = None, **_: object) -> Any:
    """Leave a function as it is, as `torch.compile` itself or as a decorator with options."""
    return (lambda decorated: decorated) if function is None else function


def load(path: Path, settings: dict[str, str]) -> types.ModuleType:
    """Load a script as a module, with settings in its environment and stand-ins for what needs a GPU."""
    flash = types.ModuleType("flash_attn_interface")
    flash.flash_attn_func = flash.flash_attn_varlen_func = attention  # type: ignore[attr-defined]
    specification = importlib.util.spec_from_file_location("public_script", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["flash_attn_interface"] = flash
    sys.modules["public_script"] = module  # which its custom operators look up
    with (
        mock.patch.dict(os.environ, {**SMALL, **settings}),
        mock.patch.object(lzma, "decompress", readable(lzma.decompress)),
        mock.patch.object(torch, "compile", uncompiled),
    ):
        specification.loader.exec_module(module)
    if hasattr(module, "BOS_ID"):  # set by the script's loaders
        module.BOS_ID = BOS  # type: ignore[attr-defined]
    if hasattr(module, "FusedLeakyReLUSquareMLP"):
        module.FusedLeakyReLUSquareMLP = lambda x, up, down: F.linear(  # type: ignore[attr-defined]
            F.leaky_relu(F.linear(x, up), 0.5).square(), down
        )
    return module


@contextlib.contextmanager
def float32_alone() -> Iterator[None]:
    """Give the scripts' optimizers float32 wherever they ask for bfloat16, and streams that are none."""
    nothing = mock.MagicMock()
    with (
        mock.patch.object(torch, "bfloat16", torch.float32),
        mock.patch.object(Tensor, "bfloat16", Tensor.float),
        mock.patch.multiple(torch.cuda, Stream=nothing, current_stream=nothing, stream=nothing),
    ):
        yield


def public_model(module: types.ModuleType, given: Any) -> nn.Module:
    """Build the script's model in float32."""
    names = list(inspect.signature(module.GPT.__init__).parameters)[1:]
    if names == ["h"]:
        model = module.GPT(given)
    else:
        aliases = {"dtg": "dtg_enabled"}
        values = {n: getattr(given, aliases.get(n, n)) for n in names if hasattr(given, aliases.get(n, n))}
        model = module.GPT(**values)
    model = model.float().train()
    if hasattr(model, "looping_active"):
        model.looping_active = True
    return model  # type: ignore[no-any-return]


def draw(model: nn.Module) -> None:
    """Give every parameter random values, so that none is left where it has no effect."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name == "tok_emb.weight":
                parameter.copy_(noise)
            elif parameter.ndim >= 2 and parameter.numel() > 1000:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.3 * noise)


def public_logits(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the script's logits; of a model that gives a loss alone, what it takes the loss of."""
    if hasattr(model, "forward_logits"):
        return model.forward_logits(inputs)  # type: ignore[no-any-return, operator]
    seen: list[Tensor] = []

    def note(logits: Tensor, *arguments: Any, **options: Any) -> Tensor:
        seen.append(logits)
        return logits.sum()

    with mock.patch.object(F, "cross_entropy", note):
        model(inputs, targets)
    return seen[0].view(*inputs.shape, -1)


def public_optimizers(module: types.ModuleType, given: Any, model: Any) -> list[torch.optim.Optimizer]:
    """Build the script's optimizers, as its `Optimizers` or, where it has none, its `main` divides the parameters."""
    if hasattr(module, "Optimizers"):
        return list(module.Optimizers(given, model))
    control = module.CONTROL_TENSOR_NAME_PATTERNS
    matrices, tables, scalars = [], [], []
    for name, parameter in model.named_parameters():
        if name in ("tok_emb.weight", "bigram.embed.weight", "ve_shared.embed.weight"):
            tables.append(parameter)
        elif name.endswith("_bank") or (
            name.startswith("blocks.") and parameter.ndim == 2 and not any(part in name for part in control)
        ):
            matrices.append(parameter)
        else:
            scalars.append(parameter)
    decay = getattr(given, "adam_wd", 0.0)
    adam = {"betas": (given.beta1, given.beta2), "eps": given.adam_eps, "weight_decay": decay}
    muon = {"momentum": given.muon_momentum, "backend_steps": given.muon_backend_steps}
    if hasattr(given, "muon_wd"):
        muon["weight_decay"] = given.muon_wd
    return [
        torch.optim.AdamW(tables, lr=given.tied_embed_lr, **adam),
        module.Muon(matrices, lr=given.matrix_lr, **muon),
        torch.optim.AdamW(scalars, lr=given.scalar_lr, **adam),
    ]


def our_optimizers(recipe: str, settings: dict[str, Any], model: Model) -> list[Any]:
    """Build the recipe's optimizers with the script's rates."""
    decay = settings.get("adam wd", 0.0)
    diff: dict[str, Any] = {}
    rules = shipped()[recipe].train.optimizers
    for name, rule in rules.items():
        path = f"optimizers.{name}"
        if isinstance(rule, Muon):
            diff |= {f"{path}.lr": settings["matrix lr"], f"{path}.weight_decay": settings.get("muon wd", 0.0)}
            diff |= {f"{path}.momentum": settings["muon momentum"], f"{path}.precision": "float32"}
        else:
            embedding = name == "embedding"
            diff[f"{path}.lr"] = settings["tied embed lr" if embedding else "scalar lr"]
            diff[f"{path}.weight_decay"] = settings.get("embed wd", decay) if embedding else decay
            diff |= {f"{path}.beta1": settings["beta1"], f"{path}.beta2": settings["beta2"]}
    rules = shipped()[recipe].train.but(diff).optimizers
    chosen, parameters = assign({name: name for name in rules}, model, "optimizers"), dict(model.named_parameters())
    return [
        rule.build(members, Ranks())
        for name, rule in rules.items()
        if (members := {key: parameters[key] for key in parameters if chosen[key] == name})
    ]


def share(found: Tensor, expected: Tensor) -> float:
    """Return the size of a difference as a share of what is expected."""
    return float((found - expected).norm() / expected.norm().clamp(min=1e-6))


def compare(checkout: Path, script: Script) -> dict[str, float]:
    """Return the largest differences of a script and its recipe."""
    module = load(checkout / script.path, script.settings)
    given = module.Hyperparameters()
    settings = {name.replace("_", " "): getattr(given, name) for name in dir(given) if not name.startswith("_")}
    recipe = shipped()[script.recipe]
    extra = {"length above which the rotary base is rescaled (tiny model)": script.native_length}
    diff = model_diff(recipe.model, settings, extra if script.native_length else {})
    masked = recipe.model.block.attention.scope == "document"
    if masked:  # whole rows, as the scripts have them without a list of segments
        diff |= {"block.attention.scope": "row", "block.attention.longest": None}
    theirs = public_model(module, given)
    draw(theirs)
    ours = build(recipe.model.but(diff), seed=0)
    script_parameters, parameters = dict(theirs.named_parameters()), dict(ours.named_parameters())
    load_script_weights(parameters, {name: p.detach() for name, p in script_parameters.items()})
    clip = settings["grad clip norm"]
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, given.vocab_size, (STEPS + 1, ROWS, given.train_seq_len + 1), generator=generator)
    tokens[:, :, ::17] = BOS
    found = dict.fromkeys(TOLERANCES, 0.0)
    with float32_alone():
        their_updates = public_optimizers(module, given, theirs)
        our_updates = our_optimizers(script.recipe, settings, ours)
        for step, rows in enumerate(tokens):
            inputs, targets = rows[:, :-1], rows[:, 1:]
            logits = [ours(inputs, inputs == BOS if masked else None), public_logits(theirs, inputs, targets)]
            losses = [F.cross_entropy(one.float().flatten(0, 1), targets.flatten()) for one in logits]
            if step == 0:
                found["logits"] = float((logits[0] - logits[1]).detach().abs().max())
            column = "trained loss" if step else "loss"
            found[column] = max(found[column], abs(losses[0].item() - losses[1].item()))
            for loss in losses:
                loss.backward()
            zero = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()}
            if step == 0:
                for name, parameter in script_parameters.items():
                    if parameter.grad is not None:
                        found["gradients"] = max(found["gradients"], share(script_view(name, zero), parameter.grad))
            if step == STEPS:
                break
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters.values() if p.grad is not None])
            scale = (clip / (norm + 1e-6)).clamp(max=1.0) if clip else None
            if clip:
                torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip)
            for update in our_updates:
                update.launch()
                update.step(TrainProgress(step, 0.0, Budget(steps=STEPS)), 1.0, scale)
            for update in their_updates:
                getattr(update, "launch_reduce_scatters", lambda: None)()
            for update in their_updates:
                update.step()
            ours.zero_grad()
            theirs.zero_grad()
    final = {name: p.detach() for name, p in parameters.items()}
    shares = [share(script_view(name, final), parameter.detach()) for name, parameter in script_parameters.items()]
    found["median"], found["worst"] = statistics.median(shares), max(shares)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one or more of: {', '.join(SCRIPTS)}; all without")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    status = 0
    print(f"{'script':<26}" + "".join(f"{name:>14}" for name in TOLERANCES))
    for name in chosen.names or SCRIPTS:
        try:
            found = compare(chosen.checkout, SCRIPTS[name])
        except (OSError, ImportError, SyntaxError, KeyError) as error:
            print(f"{name:<26}  not compared: {type(error).__name__}: {error}")
            status = 2
            continue
        agrees = all(found[key] < limit for key, limit in TOLERANCES.items())
        print(f"{name:<26}" + "".join(f"{value:>14.1e}" for value in found.values()) + ("" if agrees else "  DIFFERS"))
        status = status if agrees else max(status, 1)
    return status


if __name__ == "__main__":
    sys.exit(main())
