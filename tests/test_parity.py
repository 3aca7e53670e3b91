"""Agreement with the public scripts: weights, tokens and expected values computed by them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from script_names import NAMES
from torch import Tensor

from caddie.distributed import Ranks
from caddie.model import GPT, Block, GroupedQueryAttention, Model, ReluSquared, build
from caddie.optim import AdamW, Muon
from caddie.parameters import assign
from caddie.recipes import baseline, fp16_embedding
from caddie.schedules import Budget, IterationWarmdown, Moment, StepRamp


def ours(name: str) -> str:
    """Our name of a script's parameter."""
    if name.startswith("blocks."):
        _, layer, rest = name.split(".", 2)
        return f"blocks.{layer}.{NAMES[rest]}"
    return NAMES[name]


class Golden:
    """One recipe's folder of the parity data, and our model with its weights."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.tokens = load_file(folder / "tokens.safetensors")
        self.expected = load_file(folder / "expected.safetensors")
        self.weights = load_file(folder / "weights.safetensors")
        full, tiny = self.config["settings_full_recipe"], self.config["settings_tiny_model_that_differ"]
        settings = {**full, **tiny}
        hidden = settings.get("mlp hidden") or settings["mlp mult"] * settings["model dim"]
        self.gpt = GPT(
            vocabulary=settings["vocab size"],
            width=settings["model dim"],
            depth=settings["num layers"],
            block=Block(
                attention=GroupedQueryAttention(
                    heads=settings["num heads"],
                    key_value_heads=settings["num kv heads"],
                    gain=settings["qk gain init"],
                    rotary_base=settings["rope base"],
                ),
                mlp=ReluSquared(hidden=hidden),
            ),
        ).but({"head.softcap": settings["logit softcap"]})

    def model(self) -> Model:
        model = build(self.gpt, seed=0)
        model.load_state_dict({ours(name): value.float() for name, value in self.weights.items()})
        return model


@pytest.fixture(scope="module", params=["BASE", "S003"])
def golden(request: pytest.FixtureRequest, parity: Path) -> Golden:
    return Golden(parity / request.param)


def loss_of(model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs.long()).float().flatten(0, 1), targets.long().flatten())


def test_forward(golden: Golden) -> None:
    model, expected = golden.model(), golden.expected
    logits = model(golden.tokens["inputs"].long())
    assert (logits - expected["logits"]).abs().max() < 5e-4
    nll = F.cross_entropy(logits.flatten(0, 1), golden.tokens["targets"].long().flatten(), reduction="none")
    assert (nll - expected["nll"].flatten()).abs().max() < 5e-4
    assert abs(nll.mean().item() - golden.config["results"]["plain"]["mean_loss"]) < 1e-4


def test_gradients(golden: Golden) -> None:
    model = golden.model()
    loss_of(model, golden.tokens["inputs"], golden.tokens["targets"]).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    summary = golden.config["results"]["plain"]["gradient_summary_of_mean_loss"]
    assert {ours(name) for name in summary} == set(gradients)
    for name, figures in summary.items():
        gradient = gradients[ours(name)]
        assert gradient is not None
        assert gradient.norm().item() == pytest.approx(figures["norm"], rel=1e-3)
    compared = 0
    for key, value in golden.expected.items():
        if not key.startswith("grad"):
            continue
        head, name = key.split(".", 1)
        gradient = gradients[ours(name)]
        assert gradient is not None
        stride = int(head.rsplit("_", 1)[1]) if head != "grad" else 1
        sample = gradient.flatten()[::stride][: value.numel()]
        assert (sample - value.flatten()).abs().max() < 1e-3 * max(1e-3, figures_of(summary, name))
        compared += 1
    assert compared == len(summary)


def figures_of(summary: dict[str, Any], name: str) -> float:
    return float(summary[name]["absmax"])


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-3), ("bfloat16", 5e-2)])
def test_short_training(golden: Golden, precision: str, tolerance: float) -> None:
    """Four steps of the scripts' Muon and Adam from the same weights on the same tokens."""
    variant = golden.config["training_trajectory"][
        "newton_schulz_in_" + {"float32": "fp32", "bfloat16": "bf16"}[precision]
    ]
    settings = golden.config["settings_full_recipe"]
    model = golden.model()
    rules: dict[str, Any] = {
        "embedding": AdamW(lr=settings["tied embed lr"]),
        "scalar": AdamW(lr=settings["scalar lr"]),
        "matrix": Muon(
            lr=settings["matrix lr"],
            precision=precision,
            momentum=StepRamp(start=settings["muon momentum warmup start"], end=settings["muon momentum"], steps=2),
        ),
    }
    chosen = assign(rules, model, "optimizers")
    updaters = [
        rule.build({n: p for n, p in model.named_parameters() if chosen[n] is rule}, Ranks()) for rule in rules.values()
    ]
    budget = Budget(steps=4)
    for step, figures in enumerate(variant["steps"]):
        loss = loss_of(model, golden.tokens["train_inputs"][step], golden.tokens["train_targets"][step])
        assert loss.item() == pytest.approx(figures["loss_before_update"], abs=tolerance)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        assert norm.item() == pytest.approx(figures["gradient_norm_before_clip"], rel=tolerance)
        for updater in updaters:
            updater.step(Moment(step, 0.0, budget), figures["learning_rate_multiplier"])
        model.zero_grad()
    final = loss_of(model, golden.tokens["train_inputs"][0], golden.tokens["train_targets"][0]).item()
    assert final == pytest.approx(variant["loss_on_batch_0_after_all_steps"], abs=tolerance)
    weights = dict(model.named_parameters())
    for name, norm in variant["final_parameter_norms"].items():
        assert weights[ours(name)].norm().item() == pytest.approx(norm, rel=tolerance)
    after = f"train4_{'fp32' if precision == 'float32' else 'bf16'}.after."
    compared = [name for name in golden.expected if name.startswith(after)]
    assert len(compared) == len(weights)
    for name in compared:
        weight, expected = weights[ours(name.removeprefix(after))].detach().flatten(), golden.expected[name].flatten()
        sample = weight[:: max(1, weight.numel() // 64)][: expected.numel()]
        assert (sample - expected).norm() < (1e-3 if precision == "float32" else 0.1) * expected.norm()


def test_the_recipes_have_the_settings_of_the_scripts(parity: Path) -> None:
    """Every number of the full recipes that the parity data states."""
    for recipe, folder in ((baseline, "BASE"), (fp16_embedding, "S003")):
        config = json.loads((parity / folder / "config.json").read_text())
        stated, model, train = config["settings_full_recipe"], recipe.model, recipe.train
        attention, muon, adam = model.block.attention, train.optimizers["matrix"], train.optimizers["embedding"]
        assert isinstance(attention, GroupedQueryAttention)
        assert isinstance(muon, Muon)
        assert isinstance(adam, AdamW)
        assert recipe.parameters == config["parameter_count_full_recipe"]
        assert (model.vocabulary, model.width, model.depth) == tuple(
            stated[name] for name in ("vocab size", "model dim", "num layers")
        )
        assert (attention.heads, attention.key_value_heads) == (stated["num heads"], stated["num kv heads"])
        assert (attention.gain, attention.rotary_base) == (stated["qk gain init"], stated["rope base"])
        assert (train.batch_tokens, train.sequence_length) == (stated["train batch tokens"], stated["train seq len"])
        assert (train.seconds, train.steps) == (stated["max wallclock seconds"], stated["iterations"])
        assert train.lr_schedule == IterationWarmdown(steps=stated["warmdown iters"])
        assert (muon.lr, muon.steps) == (stated["matrix lr"], stated["muon backend steps"])
        assert muon.momentum == StepRamp(
            start=stated["muon momentum warmup start"],
            end=stated["muon momentum"],
            steps=stated["muon momentum warmup steps"],
        )
        assert (adam.lr, adam.beta1, adam.beta2) == (stated["tied embed lr"], stated["beta1"], stated["beta2"])
        assert train.optimizers["scalar"].lr == stated["scalar lr"]
        assert train.rehearsal_steps == stated["warmup steps"]
        assert train.clip_norm is None
        assert stated["grad clip norm"] == 0.0
