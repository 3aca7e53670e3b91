"""Parameters declare what they are; rules find them; their first values depend on nothing but seed and name."""

import copy
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import SYSTEMS, facts
from script_names import NAMES
from torch import nn

from caddie.config import variants
from caddie.errors import UserError
from caddie.model import GPT, build
from caddie.model.parameters import (
    ROLES,
    Constant,
    Declaration,
    FanIn,
    FanInNormal,
    Initial,
    Normal,
    Orthogonal,
    Overtone,
    Part,
    RowConstants,
    assign,
    declarations,
    initialize,
)
from caddie.recipes.catalog import shipped

TINY = GPT(vocabulary=32, width=16, depth=3).but(
    {"block.attention.heads": 2, "block.attention.key_value_heads": 1, "block.mlp.hidden": 24}
)


class Pair(Part):
    """Two parameters of different roles, beside a plain child that has parts in it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = self.declare("table", (6, 4), "embedding", Normal(std=0.5))
        self.gain = self.declare("gain", (4,), "scalar", Constant(value=2.0))
        self.inner = nn.ModuleList([One(), One()])


class One(Part):
    """One matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.declare("weight", (4, 4), "matrix", FanIn())


# Declarations


def test_declarations_are_named_in_the_order_of_the_model() -> None:
    found = declarations(Pair())
    assert found == {
        "table": Declaration("embedding", Normal(std=0.5)),
        "gain": Declaration("scalar", Constant(value=2.0)),
        "inner.0.weight": Declaration("matrix", FanIn()),
        "inner.1.weight": Declaration("matrix", FanIn()),
    }
    assert list(found) == [name for name, _ in Pair().named_parameters()]


@pytest.mark.long
def test_declarations_survive_what_attributes_do_not() -> None:
    with torch.device("meta"):
        model = Pair()
    assert declarations(copy.deepcopy(model)) == declarations(model) == declarations(model.to_empty(device="cpu"))


def test_a_parameter_that_nobody_declared_is_our_mistake() -> None:
    model = Pair()
    model.inner[0].extra = nn.Parameter(torch.zeros(1))
    with pytest.raises(AssertionError, match=r"undeclared parameter inner\.0\.extra"):
        declarations(model)
    with pytest.raises(AssertionError, match="plain declares no parameters"):
        declarations(nn.ModuleDict({"plain": nn.Linear(2, 2)}))


def test_the_roles_of_the_model() -> None:
    roles = {name: declaration.role for name, declaration in declarations(TINY.build()).items()}
    assert set(roles.values()) <= set(ROLES)
    assert roles["embedding.weight"] == "embedding"
    assert roles["skips.weight"] == "scalar"
    block = {name.removeprefix("blocks.1."): role for name, role in roles.items() if name.startswith("blocks.1.")}
    assert block == {
        "attention.query.weight": "matrix",
        "attention.key.weight": "matrix",
        "attention.value.weight": "matrix",
        "attention.output.weight": "matrix",
        "attention.gain": "scalar",
        "mlp.up.weight": "matrix",
        "mlp.down.weight": "matrix",
        "mix": "scalar",
        "attention_scale": "scalar",
        "mlp_scale": "scalar",
    }
    assert len(roles) == 3 * len(block) + 2


# Rules

EVERYTHING = {"embedding": 1, "matrix": 2, "scalar": 3}


def test_every_parameter_follows_its_role() -> None:
    assert assign(EVERYTHING, Pair(), "rules") == {"table": 1, "gain": 3, "inner.0.weight": 2, "inner.1.weight": 2}


def test_the_last_match_wins() -> None:
    model = Pair()
    assert assign({**EVERYTHING, "inner.1.*": 4}, model, "rules")["inner.1.weight"] == 4
    assert assign({**EVERYTHING, "inner.1.*": 4}, model, "rules")["inner.0.weight"] == 2
    assert assign({**EVERYTHING, "inner.*": 4, "inner.0.weight": 5}, model, "rules") == {
        "table": 1,
        "gain": 3,
        "inner.0.weight": 5,
        "inner.1.weight": 4,
    }
    assert assign({"inner.1.*": 4, **EVERYTHING}, model, "rules")["inner.1.weight"] == 2, "the role came last"
    assert set(assign({"*": 9}, model, "rules").values()) == {9}


def test_a_role_is_no_pattern_and_a_pattern_no_substring() -> None:
    model = nn.ModuleDict({"matrix": One(), "other": One()})
    assert assign({"matrix": 1}, model, "rules") == {"matrix.weight": 1, "other.weight": 1}
    with pytest.raises(UserError, match="weight matches no parameter"):
        assign({"matrix": 1, "weight": 2}, model, "rules")
    with pytest.raises(UserError, match="MATRIX"):
        assign({"matrix": 1, "MATRIX.weight": 2}, model, "rules")


def test_a_pattern_for_nothing_suggests_what_there_is() -> None:
    with pytest.raises(UserError, match=r"^rules: inner\.0\.wieght matches .* \(did you mean inner\.0\.weight\?\)$"):
        assign({**EVERYTHING, "inner.0.wieght": 4}, Pair(), "rules")
    with pytest.raises(UserError, match=r"matrx matches no parameter \(did you mean matrix\?"):
        assign({**EVERYTHING, "matrx": 4}, Pair(), "rules")


def test_a_role_that_this_model_lacks_is_no_error() -> None:
    assert assign({**EVERYTHING, "head": 7, "gate": 8}, Pair(), "rules") == assign(EVERYTHING, Pair(), "rules")


def test_a_parameter_without_a_rule_is_an_error() -> None:
    with pytest.raises(UserError, match=r"^rules: no rule for gain; add one for its role, scalar$"):
        assign({"embedding": 1, "matrix": 2}, Pair(), "rules")
    with pytest.raises(UserError, match="no rule for table"):
        assign({}, Pair(), "rules")


# Initial values

SETTINGS: dict[str, dict[str, object]] = {
    "Constant": {"value": 1.5},
    "Normal": {"std": 0.02},
    "RowConstants": {"values": tuple(range(300))},
}
"""Required settings of a kind of initial values."""
OURS = [name for name, cls in variants(Initial).items() if cls.__module__.startswith("caddie.")]


@pytest.mark.parametrize("name", sorted(OURS))
def test_every_initial_value_sets_every_element_and_repeats(name: str) -> None:
    initial = variants(Initial)[name](**SETTINGS.get(name, {}))
    filled = []
    for start in (math.nan, 7.0):
        tensor = torch.full((300, 200), start)
        initial.fill(tensor, torch.Generator().manual_seed(1))
        assert torch.isfinite(tensor).all()
        filled.append(tensor)
    assert torch.equal(*filled)
    assert type(initial).from_json(initial.to_json()) == initial


def test_a_row_whose_value_is_not_finite_in_float32_is_a_mistake() -> None:
    with pytest.raises(UserError, match=r"values.1 must be from -1e\+30 to 1e\+30, not 9{5}"):
        RowConstants(values=(0.0, 1e39))


def test_initial_values_by_hand() -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.empty(2, 3)
    Constant(value=-0.25).fill(tensor, generator)
    assert tensor.tolist() == [[-0.25] * 3] * 2
    RowConstants(values=(1.0, 0.0)).fill(tensor, generator)
    assert tensor.tolist() == [[1.0] * 3, [0.0] * 3]
    big = torch.empty(500, 400)
    Normal(std=0.005).fill(big, generator)
    assert big.std().item() == pytest.approx(0.005, rel=0.01)
    assert abs(big.mean().item()) < 5e-5
    FanIn().fill(big, generator)  # uniform within 1/sqrt(400) = 0.05
    assert big.abs().max().item() == pytest.approx(0.05, rel=1e-3)
    assert big.abs().max().item() <= 0.05
    assert big.std().item() == pytest.approx(0.05 / math.sqrt(3), rel=0.01)


def test_a_normal_start_by_the_number_of_inputs() -> None:
    tensor = drawn(FanInNormal(), 500, 400)
    assert tensor.std().item() == pytest.approx(0.05, rel=0.01)
    assert tensor.abs().max() > 0.15


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (24, 24)])
def test_an_orthogonal_start_has_one_length_in_every_direction(shape: tuple[int, int]) -> None:
    tensor = drawn(Orthogonal(gain=0.5), *shape)
    smaller = tensor if shape[0] <= shape[1] else tensor.T
    torch.testing.assert_close(smaller @ smaller.T, 0.25 * torch.eye(24), rtol=0, atol=1e-5)


def test_the_spectrum_of_an_overtone_falls_like_one_over_the_root() -> None:
    plain, shaped = drawn(Normal(std=0.005), 60, 30), drawn(Overtone(), 60, 30)
    largest = torch.linalg.svdvals(plain)[0].item()
    expected = torch.tensor([largest / math.sqrt(number) for number in range(1, 31)])
    torch.testing.assert_close(torch.linalg.svdvals(shaped), expected, rtol=1e-4, atol=0)


def drawn(initial: Initial, *shape: int) -> torch.Tensor:
    """A tensor that starts like that."""
    tensor = torch.empty(shape)
    initial.fill(tensor, torch.Generator().manual_seed(0))
    return tensor


def values(config: GPT, seed: int) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in build(config, seed).named_parameters()}


def test_a_seed_gives_the_same_values_and_another_seed_others() -> None:
    first, pass_index, other = values(TINY, 1), values(TINY, 1), values(TINY, 2)
    drawn = 0
    for name, value in first.items():
        assert torch.equal(value, pass_index[name]), name
        if value.unique().numel() > 2:
            assert not torch.equal(value, other[name]), name
            drawn += 1
    assert drawn == 1 + 4 * 3, "embedding, and query, key, value and up of each layer"


def test_values_do_not_depend_on_the_global_generator_and_leave_it_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = values(TINY, 1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert torch.equal(values(TINY, 1)["embedding.weight"], first["embedding.weight"])


@pytest.mark.parametrize(
    "change",
    [
        {"depth": 5},
        {"skips": None},
        {"block.mlp.hidden": 40},
        {"layers.1": {"mlp.hidden": 8}},
        {"block.attention.rope.base": 100.0},
    ],
    ids=str,
)
def test_recipes_that_share_a_parameter_start_it_alike(change: dict[str, object]) -> None:
    base, changed = values(TINY, 3), values(TINY.but(change), 3)
    shared = [
        name
        for name in base
        if name in changed and base[name].shape == changed[name].shape and not name.startswith("skips")
    ]
    assert len(shared) > len(base) // 2
    for name in shared:
        assert torch.equal(base[name], changed[name]), name


def test_parameters_of_one_shape_start_differently() -> None:
    found = values(TINY, 0)
    up = [found[f"blocks.{layer}.mlp.up.weight"] for layer in range(3)]
    assert not torch.equal(up[0], up[1])
    assert not torch.equal(up[1], up[2])
    correlation = torch.corrcoef(torch.stack([weight.flatten() for weight in up]))
    assert (correlation - torch.eye(3)).abs().max() < 0.2


def test_values_stay_as_they_are() -> None:
    """Known answers: a change here changes every run, so it must be meant."""
    model = Pair()
    initialize(model, 0)
    assert model.gain.tolist() == [2.0] * 4
    known = torch.tensor(KNOWN)
    torch.testing.assert_close(model.table[0].detach(), known, rtol=1e-5, atol=1e-7)


KNOWN = [-0.44646692, 0.17238978, 0.05560233, 0.30320027]
"""First row of `table` under seed 0."""


def test_a_start_in_half_precision_is_the_rounded_one() -> None:
    single, half = Pair(), Pair().bfloat16()
    initialize(single, 0)
    initialize(half, 0)
    assert half.table.dtype == torch.bfloat16
    assert torch.equal(half.table, single.table.bfloat16())


# The public scripts


def sized(full: GPT, figures: dict[str, Any]) -> dict[str, Any]:
    """Return what makes a recipe's model as deep as that of the statistics.

    Where exceptions stand and which layers are repeated changes no parameter but the number of skips, so the
    exceptions are dropped and as many layers are repeated as the skips that the script had say.
    """
    depth = figures["layers used here"]
    shapes = {entry["name"]: entry["shape"] for entry in figures["parameters"]}
    diff: dict[str, Any] = {"depth": depth, "vocabulary": figures["vocabulary used here"], "layers": {}}
    embedded = sum(name.startswith("ve_layer_scales.") for name in shapes)
    if embedded:
        diff["value_embedding.layers"] = list(range(depth - embedded, depth))
    for path, initial in (
        ("embedding.bigrams.initial", full.embedding.bigrams and full.embedding.bigrams.initial),
        ("value_embedding.initial", full.value_embedding and full.value_embedding.initial),
    ):
        if isinstance(initial, Orthogonal) and initial.gain == (2 * full.depth) ** -0.5:
            diff[f"{path}.gain"] = (2 * depth) ** -0.5
    if full.recurrence is not None:
        extra = int(full.recurrence.passes.values[-1]) - 1  # type: ignore[union-attr]
        repeated = -(-(2 * shapes["skip_weights"][0] - depth) // extra)
        first = (depth - repeated) // 2
        diff["recurrence.first"], diff["recurrence.last"] = first, first + repeated - 1
    if full.parallel_streams is not None:
        diff["parallel_streams.first"] = depth - 1
    return diff


@cache
def first_values(initial: Initial, shape: tuple[int, ...]) -> torch.Tensor:
    """One tensor that starts like that; parameters of many layers are draws of the same."""
    return drawn(initial, *shape)


@pytest.mark.parametrize("system", SYSTEMS)
def test_recipes_start_like_the_public_scripts(system: str, parity: Path) -> None:
    statistics = facts(parity / "components" / "initialisation" / "initial_statistics")[system]
    full = shipped()[SYSTEMS[system]].model
    with torch.device("meta"):
        model = full.but(sized(full, statistics)).build()
    declared, compared = declarations(model), set()
    for figures in statistics["parameters"]:
        name, shape = figures["name"].removeprefix("blocks.*."), tuple(figures["shape"])
        if name.startswith("ve_layer_scales."):
            ours = "value_embedding.layer_scales"
            shape = (sum(other["name"].startswith("ve_layer_scales.") for other in statistics["parameters"]),)
        else:
            ours = NAMES[name]
        shape = () if name == "smear_lambda" else shape
        group = [key for key in declared if key == ours or (key.startswith("blocks.") and key.endswith(f".{ours}"))]
        assert len(group) == figures["count"], name
        assert {tuple(model.get_parameter(key).shape) for key in group} == {shape}, name
        (initial,) = {declared[key].initial for key in group}
        compare(first_values(initial, shape), figures)
        compared |= set(group)
    assert compared == set(declared)


def compare(tensor: torch.Tensor, figures: dict[str, Any]) -> None:
    """A tensor's statistics beside those of the script's, whose draws are others."""
    std, name = figures["std"], figures["name"]
    assert bool((tensor == 0).all()) == figures["all_zero"], name
    assert tensor.std(unbiased=False).item() == pytest.approx(std, rel=0.02, abs=1e-6), name
    assert tensor.mean().item() == pytest.approx(figures["mean"], abs=max(0.015 * std, 1e-6)), name
    normal = 0 < 3 * std < figures["largest"]  # the largest of half a million normal draws varies
    assert tensor.abs().max().item() == pytest.approx(figures["largest"], rel=0.25 if normal else 1e-3), name
    if figures.get("gram matrix is a multiple of the identity") is not None and not figures["all_zero"]:
        flat = tensor if tensor.shape[0] <= tensor.shape[1] else tensor.T
        gram = flat @ flat.T
        gain = gram.diagonal().mean().sqrt().item()
        off = (gram / gain**2 - torch.eye(len(gram))).abs().max().item()
        assert (off < 1e-4) == figures["gram matrix is a multiple of the identity"], name
        if "orthogonal gain" in figures:
            assert gain == pytest.approx(figures["orthogonal gain"], rel=1e-4), name
