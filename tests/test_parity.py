"""The public scripts' numbers: logits, gradients and four steps of training, for the public systems and the records.

The models are the shipped recipes' own, made small; so what agrees here is what a recipe runs.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity import SYSTEMS, Case, Golden, cases, matches, recorded, tensors, trained_case
from script_names import script_view
from torch import Tensor

from caddie.config.schedules import Budget, StepRamp, TrainProgress
from caddie.model import Model
from caddie.model.parameters import assign
from caddie.pack.quantize import Percentile, Rows
from caddie.runtime.distributed import Ranks
from caddie.train.qat import StraightThrough, Views

EVERY_TIME = ("BASE", "S003")
"""Folders whose short training is repeated in every run of the tests; of the others, logits and gradients are."""


EVERY_CASE = [(system, case) for system in SYSTEMS for case in cases(system)]


@pytest.fixture(scope="module")
def goldens(parity: Path) -> dict[str, Golden]:
    return {system: Golden(parity / system) for system in SYSTEMS}


def losses_of(golden: Golden, model: Model, inputs: Tensor, targets: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    """Logits and the loss of each position."""
    ids = inputs.long()
    logits = model(ids, golden.starts(ids), stage=case.stage).float()
    return logits, F.cross_entropy(logits.flatten(0, 1), targets.long().flatten(), reduction="none")


@pytest.mark.parametrize(("folder", "case"), EVERY_CASE, ids=lambda value: getattr(value, "name", value))
def test_logits_and_gradients(folder: str, case: Case, goldens: dict[str, Golden]) -> None:
    golden = goldens[folder]
    model, expected = golden.model(case), golden.expected
    results = golden.config["results"][case.name]
    stage = model.stages[case.stage]
    assert model.config.order(stage) == results["layer_execution_order"]
    inputs, targets = golden.tokens[case.tokens + "inputs"], golden.tokens[case.tokens + "targets"]
    seen: dict[str, Tensor] = {}
    model.embedding.register_forward_hook(lambda module, arguments, output: seen.update(x0=output))
    logits, losses = losses_of(golden, model, inputs, targets, case)
    for name, found, tolerance in (("x0", seen["x0"], 1e-5), ("logits", logits, 5e-4), ("nll", losses, 5e-4)):
        ours, script = recorded(expected, case.prefix + name, found)
        assert (ours - script).abs().max() < tolerance, name
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
            for folder in SYSTEMS
        ),
        *(pytest.param(folder, "bfloat16", 5e-2, marks=pytest.mark.long) for folder in ("S000", "TOP")),
        *(
            pytest.param(folder, "bfloat16", 5e-2, marks=pytest.mark.slow)
            for folder in SYSTEMS
            if folder not in ("S000", "TOP")
        ),
    ],
)
def test_short_training(folder: str, precision: str, tolerance: float, goldens: dict[str, Golden]) -> None:
    """Four steps of the recipe's optimizers from the scripts' weights on the scripts' tokens."""
    golden = goldens[folder]
    short = {"float32": "fp32", "bfloat16": "bf16"}[precision]
    variant = golden.config["training_trajectory"][f"newton_schulz_in_{short}"]
    case = trained_case(folder)
    model = golden.model(case)
    momentum = golden.recipe.train.optimizers["matrix"].momentum  # type: ignore[attr-defined]
    assert isinstance(momentum, StepRamp)
    warmup = golden.config["training_trajectory"]["muon momentum warm-up length used here (steps)"]
    muon = {"matrix.precision": precision, "matrix.momentum": momentum.but(steps=warmup)}
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
    budget = Budget(steps=len(variant["steps"]))
    inputs, targets = golden.tokens["train_inputs"], golden.tokens["train_targets"]
    for step, figures in enumerate(variant["steps"]):
        _, losses = losses_of(golden, model, inputs[step], targets[step], case)
        assert losses.mean().item() == pytest.approx(figures["loss_before_update"], abs=tolerance)
        losses.mean().backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters.values() if p.grad is not None])
        assert norm.item() == pytest.approx(figures["gradient_norm_before_clip"], rel=tolerance)
        scale = None if clip is None else (clip / (norm + 1e-6)).clamp(max=1.0)
        for updater in updaters:
            updater.launch()
            updater.step(TrainProgress(step, 0.0, budget), figures["learning_rate_multiplier"], scale)
        model.zero_grad()
    _, losses = losses_of(golden, model, inputs[0], targets[0], case)
    assert losses.mean().item() == pytest.approx(variant["loss_on_batch_0_after_all_steps"], abs=tolerance)
    final = {name: parameter.detach() for name, parameter in parameters.items()}
    for name, norm in variant["final_parameter_norms"].items():
        assert script_view(name, final).norm().item() == pytest.approx(norm, rel=tolerance)
    compared = matches(golden.expected, rf"train\d+_{short}\.after\.(.+)")
    assert len(compared) == len(variant["final_parameter_norms"])
    for match in compared:
        weight, expected = script_view(match[1], final).flatten(), golden.expected[match[0]].flatten()
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
    Views(chosen, model).set(TrainProgress(1, 1.0, Budget(seconds=1.0)))
    logits, losses = losses_of(golden, model, golden.tokens["inputs"], golden.tokens["targets"], Case())
    ours, script = recorded(golden.expected, f"{case}.logits", logits)
    assert (ours - script).abs().max() < 5e-4
    ours, plain = recorded(golden.expected, "logits", logits)
    assert (ours - plain).abs().max() > 1e-2, "the switch does something"
    results = golden.config["results"][case]
    assert losses.mean().item() == pytest.approx(results["mean_loss"], abs=1e-4)
    if "gradient_summary_of_mean_loss" in results:
        losses.mean().backward()
        compare_gradients(model, results["gradient_summary_of_mean_loss"], golden.expected, f"{case}.")


# The set that comes with the tests

TENSORS = {
    "ARG": 158,
    "BASE": 187,
    "L3": 337,
    "S000": 158,
    "S001": 240,
    "S002": 256,
    "S003": 153,
    "TOP": 413,
    "components": 914,
}
"""Tensors of each folder of the compact set: tests take names from a set, and would not miss one that is gone."""


def test_the_compact_set_is_whole() -> None:
    folder = Path(__file__).parent / "golden" / "parity"
    found = dict.fromkeys(TENSORS, 0)
    for path in folder.rglob("*.safetensors.xz"):
        found[path.relative_to(folder).parts[0]] += len(tensors(path.with_name(path.name.split(".")[0])))
    assert found == TENSORS
