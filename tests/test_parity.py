"""The public scripts' numbers: logits, gradients and four steps of training, for the seeds and the records.

The models are the shipped recipes' own, made small; so what agrees here is what a recipe runs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from script_names import load_script_weights, script_view
from torch import Tensor

from caddie.config.schedules import Budget, StepRamp, TrainProgress
from caddie.model import GPT, Model, build
from caddie.model.parameters import assign
from caddie.pack.quantize import Percentile, Rows
from caddie.recipes.catalog import shipped
from caddie.recipes.recipe import Recipe
from caddie.runtime.distributed import Ranks
from caddie.train.qat import StraightThrough, Views

EXCLUSIVE = {"attention.xsa": True}
SMALL: dict[str, dict[str, Any]] = {
    "baseline": {},
    "fp16_embedding": {},
    "single_gpu": {"block.attention.rope.dims": 8, "layers": {"3-4": EXCLUSIVE}},
    "gold6": {"layers": {"3-5": EXCLUSIVE}, "block.attention.rope.native_length": 32},
    "parallel_muon": {"layers": {"4-5": EXCLUSIVE}, "block.attention.rope.native_length": 24},
    "exclusive_everywhere": {"block.attention.rope.native_length": 32},
    "three_layer_recurrence": {
        "layers": {"5-6": {"parallel": True}},
        "recurrence.first": 2,
        "recurrence.last": 3,
        "block.attention.rope.dims": 4,
    },
    "best_record": {
        "parallel_streams.first": 5,
        "recurrence.first": 2,
        "recurrence.last": 3,
        "block.attention.rope.dims": 4,
    },
}
FOLDERS = {
    "BASE": "baseline",
    "S003": "fp16_embedding",
    "S001": "single_gpu",
    "S002": "gold6",
    "S000": "parallel_muon",
    "ARG": "exclusive_everywhere",
    "L3": "three_layer_recurrence",
    "TOP": "best_record",
}
"""Folder of the parity data to recipe."""
EVERY_TIME = ("BASE", "S003")
"""Folders whose short training is repeated in every run of the tests; of the others, logits and gradients are."""


class Golden:
    """One folder of the parity data, and our recipe at its size."""

    def __init__(self, folder: Path, recipe: str) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.tokens = load_file(folder / "tokens.safetensors")
        self.expected = load_file(folder / "expected.safetensors")
        self.weights = load_file(folder / "weights.safetensors")
        self.recipe: Recipe = shipped()[recipe]
        tiny = self.config["settings_tiny_model_that_differ"]
        settings = {**self.config["settings_full_recipe"], **tiny}
        self.settings = settings
        hidden = settings.get("mlp hidden") or int(settings["mlp mult"] * settings["model dim"])
        diff: dict[str, Any] = {
            "vocabulary": settings["vocab size"],
            "width": settings["model dim"],
            "depth": settings["num layers"],
            "block.attention.heads": settings["num heads"],
            "block.attention.key_value_heads": settings["num kv heads"],
            "block.mlp.hidden": hidden,
            **SMALL[recipe],
        }
        if "bigram dim" in tiny:
            diff["embedding.bigrams.buckets"] = tiny["bigram vocab size"]
            diff["embedding.bigrams.dims"] = tiny["bigram dim"]
            diff["value_embedding.dims"] = tiny["ve dim"]
            diff["value_embedding.layers"] = [int(layer) for layer in tiny["ve layers"].split(",")]
            diff["block.attention.rope.dims"] = tiny["rope dims"]
            diff["block.attention.rope.length"] = tiny["train seq len"]
        self.gpt: GPT = self.recipe.model.but(diff)

    def model(self, diff: tuple[tuple[str, Any], ...] = ()) -> Model:
        model = build(self.gpt.but(dict(diff)), seed=0)
        load_script_weights(dict(model.named_parameters()), {n: w.float() for n, w in self.weights.items()})
        return model


@dataclass(frozen=True)
class Case:
    """One forward that the parity data recorded."""

    name: str = "plain"
    prefix: str = ""
    tokens: str = ""
    stage: int = -1
    starts: bool = False
    diff: tuple[tuple[str, Any], ...] = ()


WHOLE_ROW = (("block.attention.scope", "row"), ("block.attention.longest", None))
PACKED = (("block.attention.longest", 24),)
LONG = (("block.attention.rope", "NTKRoPE"), ("block.attention.rope.dims", 4))
LENGTHS = (("block.attention.rope.native_length", 64), ("block.attention.rope.length", 96))
CASES = {
    "L3": [
        Case("loop_off", "loop_off.", stage=0),
        Case("loop_on", "loop_on."),
        Case("long_row_with_rotary_rescaling", "long_row_with_rotary_rescaling.", "long_", diff=(*LONG, *LENGTHS)),
    ],
    "TOP": [
        Case("loop_off", "loop_off.", stage=0, starts=True, diff=WHOLE_ROW),
        Case("loop_on", "loop_on.", starts=True, diff=WHOLE_ROW),
        Case("packed_loop_off", "packed_loop_off.", "packed_", stage=0, starts=True, diff=PACKED),
        Case("packed_loop_on", "packed_loop_on.", "packed_", starts=True, diff=PACKED),
    ],
}
EVERY_CASE = [(folder, case) for folder in FOLDERS for case in CASES.get(folder, [Case()])]


@pytest.fixture(scope="module")
def goldens(parity: Path) -> dict[str, Golden]:
    return {folder: Golden(parity / folder, recipe) for folder, recipe in FOLDERS.items()}


def losses_of(model: Model, inputs: Tensor, targets: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    """Logits and the loss of each position."""
    ids = inputs.long()
    logits = model(ids, ids == 1 if case.starts else None, stage=case.stage).float()
    return logits, F.cross_entropy(logits.flatten(0, 1), targets.long().flatten(), reduction="none")


@pytest.mark.parametrize(("folder", "case"), EVERY_CASE, ids=lambda value: getattr(value, "name", value))
def test_logits_and_gradients(folder: str, case: Case, goldens: dict[str, Golden]) -> None:
    golden = goldens[folder]
    model, expected = golden.model(case.diff), golden.expected
    results = golden.config["results"][case.name]
    stage = model.stages[case.stage]
    assert model.config.order(stage) == results["layer_execution_order"]
    inputs, targets = golden.tokens[case.tokens + "inputs"], golden.tokens[case.tokens + "targets"]
    seen: dict[str, Tensor] = {}
    model.embedding.register_forward_hook(lambda module, arguments, output: seen.update(x0=output))
    logits, losses = losses_of(model, inputs, targets, case)
    assert (seen["x0"] - expected[case.prefix + "x0"]).abs().max() < 1e-5
    assert (logits - expected[case.prefix + "logits"]).abs().max() < 5e-4
    assert (losses - expected[case.prefix + "nll"].flatten()).abs().max() < 5e-4
    assert abs(losses.mean().item() - results["mean_loss"]) < 1e-4
    if "gradient_summary_of_mean_loss" in results:
        losses.mean().backward()
        compare_gradients(model, results["gradient_summary_of_mean_loss"], expected, case.prefix)


def compare_gradients(model: Model, summary: dict[str, Any], expected: dict[str, Tensor], prefix: str) -> None:
    """Norms of all gradients, and the elements that were recorded."""
    zero = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    for name, figures in summary.items():
        assert script_view(name, zero).norm().item() == pytest.approx(figures["norm"], rel=1e-3)
    compared = 0
    for key, value in expected.items():
        if not key.startswith(prefix + "grad"):
            continue
        head, name = key.removeprefix(prefix).split(".", 1)
        stride = int(head.rsplit("_", 1)[1]) if head != "grad" else 1
        sample = script_view(name, zero).flatten()[::stride][: value.numel()]
        assert (sample - value.flatten()).abs().max() < 1e-3 * max(1e-3, float(summary[name]["absmax"]))
        compared += 1
    assert compared == len(summary)


@pytest.mark.parametrize(
    ("folder", "precision", "tolerance"),
    [
        *(
            pytest.param(folder, "float32", 1e-3, marks=() if folder in EVERY_TIME else pytest.mark.long)
            for folder in FOLDERS
        ),
        *(pytest.param(folder, "bfloat16", 5e-2, marks=pytest.mark.long) for folder in ("S000", "TOP")),
        *(
            pytest.param(folder, "bfloat16", 5e-2, marks=pytest.mark.slow)
            for folder in FOLDERS
            if folder not in ("S000", "TOP")
        ),
    ],
)
def test_short_training(folder: str, precision: str, tolerance: float, goldens: dict[str, Golden]) -> None:
    """Four steps of the recipe's optimizers from the scripts' weights on the scripts' tokens."""
    golden = goldens[folder]
    short = {"float32": "fp32", "bfloat16": "bf16"}[precision]
    variant = golden.config["training_trajectory"][f"newton_schulz_in_{short}"]
    case = next((c for c in CASES.get(folder, []) if c.name == "loop_on"), Case())
    model = golden.model(case.diff)
    momentum = golden.recipe.train.optimizers["matrix"].momentum  # type: ignore[attr-defined]
    assert isinstance(momentum, StepRamp)
    muon = {"matrix.precision": precision, "matrix.momentum": momentum.but(steps=2)}
    rules = golden.recipe.train.but({f"optimizers.{path}": value for path, value in muon.items()}).optimizers
    chosen = assign({rule: rule for rule in rules}, model, "optimizers")
    parameters = dict(model.named_parameters())
    updaters = [
        optimizer.build(members, Ranks())
        for rule, optimizer in rules.items()
        if (members := {name: parameters[name] for name in parameters if chosen[name] == rule})
    ]
    clip = golden.recipe.train.clip_norm
    assert (clip or 0.0) == golden.settings["grad clip norm"]
    for step, figures in enumerate(variant["steps"]):
        _, losses = losses_of(model, golden.tokens["train_inputs"][step], golden.tokens["train_targets"][step], case)
        assert losses.mean().item() == pytest.approx(figures["loss_before_update"], abs=tolerance)
        losses.mean().backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters.values() if p.grad is not None])
        assert norm.item() == pytest.approx(figures["gradient_norm_before_clip"], rel=tolerance)
        scale = None if clip is None else (clip / (norm + 1e-6)).clamp(max=1.0)
        for updater in updaters:
            updater.step(TrainProgress(step, 0.0, Budget(steps=4)), figures["learning_rate_multiplier"], scale)
        model.zero_grad()
    _, losses = losses_of(model, golden.tokens["train_inputs"][0], golden.tokens["train_targets"][0], case)
    assert losses.mean().item() == pytest.approx(variant["loss_on_batch_0_after_all_steps"], abs=tolerance)
    final = {name: parameter.detach() for name, parameter in parameters.items()}
    for name, norm in variant["final_parameter_norms"].items():
        assert script_view(name, final).norm().item() == pytest.approx(norm, rel=tolerance)
    after = f"train4_{short}.after."
    compared = [name for name in golden.expected if name.startswith(after)]
    assert len(compared) == len(variant["final_parameter_norms"])
    for name in compared:
        weight, expected = script_view(name.removeprefix(after), final).flatten(), golden.expected[name].flatten()
        sample = weight[:: max(1, weight.numel() // 64)][: expected.numel()]
        assert (sample - expected).norm() < (1e-3 if precision == "float32" else 0.1) * expected.norm()


LATE = StraightThrough(
    quantizer=Rows(bits=6, scale=Percentile(fraction=1.0, floor="absolute"), steps="float32"), strength=1.0
)
PROJECTIONS = {"embedding.bigrams.projection.weight": LATE, "value_embedding.projection.weight": LATE}
QUANTIZED = [
    ("S001", "qat_on", None),
    ("S002", "late_qat_on", {"matrix": LATE}),
    ("S000", "late_qat_on", PROJECTIONS),
    ("ARG", "late_qat_on", PROJECTIONS),
]
"""What the scripts' flags reach: in those with banks the two projections alone, as the parity data say."""


@pytest.mark.parametrize(("folder", "case", "rules"), QUANTIZED, ids=[folder for folder, _, _ in QUANTIZED])
def test_quantized_weights(
    folder: str, case: str, rules: dict[str, StraightThrough] | None, goldens: dict[str, Golden]
) -> None:
    """Logits, and where recorded gradients, with weights seen as the quantizer will leave them."""
    golden = goldens[folder]
    model = golden.model()
    chosen = rules or golden.recipe.train.qat
    Views(chosen, model, "rules").set(TrainProgress(1, 1.0, Budget(seconds=1.0)))
    logits, losses = losses_of(model, golden.tokens["inputs"], golden.tokens["targets"], Case())
    assert (logits - golden.expected[f"{case}.logits"]).abs().max() < 5e-4
    assert (logits - golden.expected["logits"]).abs().max() > 1e-2, "the switch does something"
    results = golden.config["results"][case]
    assert losses.mean().item() == pytest.approx(results["mean_loss"], abs=1e-4)
    if "gradient_summary_of_mean_loss" in results:
        losses.mean().backward()
        compare_gradients(model, results["gradient_summary_of_mean_loss"], golden.expected, f"{case}.")
