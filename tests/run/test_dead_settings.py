"""Settings that do nothing are found; those that do something are left alone."""

from typing import Any

import pytest
import torch

from caddie.config import field_types
from caddie.config.schedules import IterationWarmdown, PiecewiseConstant, Ramp, StepRamp
from caddie.errors import UserError
from caddie.model import GPT, Block, Dense, GroupedQueryAttention, NTKRoPE, Recurrence, ReluSquared, SwiGLU
from caddie.model.parameters import Orthogonal
from caddie.pack.quantize import Rows
from caddie.recipes.catalog import shipped
from caddie.recipes.recipe import Recipe
from caddie.run.dead_settings import EXEMPT, check_settings_matter, dead_settings
from caddie.train.averaging import EMA, SWA
from caddie.train.optim import AdamW, Muon
from caddie.train.qat import StraightThrough, Views
from caddie.train.settings import Train
from caddie.train.trainer import Trainer

BASE = Recipe(
    model=GPT(
        vocabulary=64,
        width=32,
        depth=2,
        block=Block(attention=GroupedQueryAttention(heads=2, key_value_heads=1), mlp=ReluSquared(hidden=48)),
    ),
    train=Train(seconds=600, batch_tokens=2048, micro_batches=4, sequence_length=128, averaging=EMA(decay=0.9)),
).but({"score.sequence_length": 128, "score.stride": 128, "train.optimizers.matrix.steps": 2})
"""Small as it is, like a real run: its twin is smaller."""


def dead(diff: dict[str, Any], base: Recipe = BASE) -> dict[str, bool]:
    """Path to whether it is unread, of settings without effect."""
    return {finding.path: finding.unread for finding in dead_settings(base.but(diff), base)}


ALIVE: tuple[dict[str, Any], ...] = (
    {
        "model.vocabulary": 65,
        "model.block.mlp": SwiGLU(hidden=47, linear=Dense(initial=Orthogonal())),
        "model.block.mlp_norm.epsilon": 1e-6,
        "model.block.attention.rope": NTKRoPE(base=9999.0, native_length=64, length=65),
        "model.block.attention.scope": "document",
        "model.block.attention.longest": 127,
        "model.recurrence": Recurrence(first=0, last=1, passes=PiecewiseConstant(values=(1, 2), begins=(0.999,))),
        "model.head.softcap_form": "polynomial",
        "train.optimizers.matrix.momentum": StepRamp(start=0.84, end=0.95, steps=499),
        "train.optimizers.scalar.beta2": 0.99,
        "train.optimizers.embedding.epsilon": 1e-9,
        "train.lr_schedule.floor": 0.0001,
        "train.averaging": SWA(fraction=0.01, snapshots=23, lr_below=0.02),
        "train.clip_norm": 30,
        "train.z_loss": 1e-6,
        "train.loader.begin": "first shard",
        "train.qat": {"matrix": StraightThrough(strength=Ramp(start=0.0, end=1.0, begin=0.97, finish=0.97))},
        "train.batch_tokens": PiecewiseConstant(values=(512, 2048), begins=(0.33,)),
    },
    {
        "model.block.attention.window": 126,
        "model.layers": {"1": {"attention.window": 127}},
        "train.optimizers.matrix.momentum": Ramp(start=0.85, end=0.95, finish=0.01),
        "train.optimizers.matrix.steps": 1,
        "train.optimizers.matrix.precision": "float32",
        "train.optimizers.matrix.communication": "all_reduce",
        "train.optimizers.skips.*": AdamW(lr=0.04, weight_decay=0.1),
        "train.lr_schedule": IterationWarmdown(steps=3),
        "train.averaging": None,
        "train.sequence_length": PiecewiseConstant(values=(64, 128), begins=(0.33,)),
        "train.micro_batches": 2,
        "train.compile": "always",
    },
    {
        "model.block.attention.window": 127,
        "train.lr_schedule.fraction": 0.0,
        "train.prefix_loss": Ramp(start=0.001, end=0.0, finish=0.01),
        "train.qat": {"matrix": StraightThrough(quantizer=Rows(bits=4, packed=True), strength=1.0)},
    },
)


@pytest.mark.long
@pytest.mark.parametrize("diff", [pytest.param(ALIVE[0], marks=pytest.mark.slow), *ALIVE[1:]])
def test_what_acts_is_left_alone(diff: dict[str, Any]) -> None:
    assert dead(diff) == {}


def test_a_form_without_a_cap_is_unread() -> None:
    assert dead({"model.head.softcap": None, "model.head.softcap_form": "polynomial"}) == {
        "model.head.softcap_form": True
    }


@pytest.mark.long
def test_what_does_nothing_is_found() -> None:
    """No head, no documents, rows no longer than the window, no cap, a rate always below, no strength."""
    diff = {
        "train.optimizers.head.lr": 0.1,
        "model.block.attention.longest": 64,
        "model.block.attention.window": 128,
        "model.block.attention.rope": NTKRoPE(length=1024),
        "model.head.softcap": None,
        "model.head.softcap_form": "polynomial",
        "train.averaging": SWA(lr_below=5.0),
        "train.qat": {"matrix": StraightThrough(strength=0.0)},
    }
    assert dead(diff) == {
        "train.optimizers.head.lr": False,
        "model.block.attention.longest": False,
        "model.block.attention.window": False,
        "model.block.attention.rope": False,
        "model.head.softcap_form": True,
        "train.averaging.lr_below": False,
        "train.qat.matrix": False,
    }


@pytest.mark.long
def test_what_an_exception_covers_is_found() -> None:
    diff = {
        "model.block.attention.window": 100,
        "model.block.attention.xsa": True,
        "model.layers": {"0-1": {"attention.window": 50}, "1": {"attention.xsa": True}},
    }
    assert dead(diff) == {"model.block.attention.window": False, "model.layers.1.attention.xsa": False}


@pytest.mark.long
def test_what_nothing_reads_is_found() -> None:
    """Muon is named for a role that this model has not."""
    optimizers = {"matrix": AdamW(lr=0.01), "head": Muon(lr=0.02, beta2=0.9)}
    found = dead({f"train.optimizers.{rule}": optimizer for rule, optimizer in optimizers.items()})
    assert found == {"train.optimizers.head": False, "train.optimizers.head.beta2": True}


def test_a_change_that_another_covers_is_no_mistake_if_it_takes_away() -> None:
    """Once all layers are exclusive the exception for one is taken out."""
    base = BASE.but({"model.layers": {"1": {"attention.xsa": True}}})
    assert dead({"model.layers": {}, "model.block.attention.xsa": True}, base) == {}


@pytest.mark.long
def test_the_records_mistakes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantization that never reaches the forward, and an average that is collected and not handed on."""
    late = {"train.qat": {"matrix": StraightThrough()}}
    monkeypatch.setattr(Views, "attach", lambda self, on: None)
    assert set(dead(late)) == {"train.qat.matrix"}
    monkeypatch.setattr(Trainer, "update_average", lambda self, moment, lr_scale: None)
    monkeypatch.setattr("caddie.run.dead_settings._long_average", lambda train, last: b"")
    assert "train.averaging.decay" in dead({"train.averaging.decay": 0.5})


def test_the_message_is_one_line_that_says_what_to_do() -> None:
    base = BASE.but({"model.depth": 1})
    recipe = base.but({"train.optimizers.head.lr": 0.1, "model.block.attention.longest": 64})
    with pytest.raises(UserError) as caught:
        check_settings_matter(recipe, base)
    assert str(caught.value) == (
        "model.block.attention.longest=64 has no effect: with none instead the model, the losses and the weights are"
        " the same to the bit (nor have train.optimizers.head.lr); leave it out, or change what keeps it from acting"
    )


def test_nothing_is_left_changed() -> None:
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    check_settings_matter(BASE.but({"model.depth": 3}), BASE)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), random)
    assert "__getattribute__" not in vars(Train.__mro__[1])


@pytest.mark.long
def test_the_base_is_the_recipe_of_that_name_or_the_one_it_names() -> None:
    tiny = shipped()["tiny"]
    assert dead_settings(tiny) == []
    found = dead_settings(tiny.but({"train.optimizers.head.lr": 0.1}))
    assert [finding.path for finding in found] == ["train.optimizers.head.lr"]
    own = tiny.but({"train.optimizers.head.lr": 0.1}, name="own", base="tiny")
    assert dead_settings(own) == found


def test_exemptions_exist_and_have_reasons() -> None:
    for (owner, name), reason in EXEMPT.items():
        assert name in field_types(owner)
        assert reason


def test_a_short_trial_is_not_told_that_its_momentum_does_nothing() -> None:
    trial = BASE.but({"train.seconds": None, "train.steps": 1})
    assert dead({"train.optimizers.matrix.momentum": 0.9, "train.optimizers.scalar.beta1": 0.8}, trial) == {}


SHIPPED = [name for name, recipe in shipped().items() if recipe.base]


@pytest.mark.long
@pytest.mark.parametrize("name", ["lower_lr", *(pytest.param(name, marks=pytest.mark.slow) for name in SHIPPED)])
def test_every_setting_of_the_shipped_recipes_acts(name: str) -> None:
    recipe = shipped()[name]
    assert dead_settings(recipe, shipped()[recipe.base or ""]) == []
