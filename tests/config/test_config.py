"""Configs are frozen and valid; diffs say what is between them; whatever comes in as JSON is a config or a mistake."""

import dataclasses
import importlib
import json
import pkgutil
import re
import typing
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import caddie
from caddie.config import Config, Range, coerce, field_types, parse_assignment, paths, show, variants
from caddie.config.field_docs import descriptions
from caddie.config.hints import names_elsewhere
from caddie.config.schedules import Ramp, Schedule, StepRamp, Warmdown
from caddie.errors import UserError
from caddie.model import GPT, Block, GroupedQueryAttention, ReluSquared, UNet
from caddie.pack.codecs import Brotli, Codec, Lzma, Zlib
from caddie.pack.coding import EntropyModel, Packed, Smallest
from caddie.pack.compress import Correction
from caddie.pack.fit import FillCap, PruneOnes
from caddie.pack.quantize import Float16, Float32, Percentile, Quantizer, Rows
from caddie.recipes.catalog import shipped
from caddie.recipes.recipe import Figure, Recipe
from caddie.train.averaging import EMA
from caddie.train.loop import Train
from caddie.train.optim import AdamW, Muon, Optimizer

for _module in pkgutil.walk_packages(caddie.__path__, "caddie."):
    # Kernels import Triton, for a second, and what is shared imports other libraries, if they are there.
    if not _module.name.endswith(("__main__", "_kernels")) and not _module.name.startswith("caddie.share."):
        importlib.import_module(_module.name)

RECIPES = shipped()
BASE = RECIPES["baseline"]

quick = settings(derandomize=True, deadline=None, max_examples=40)


def configs(cls: type[Config] = Config) -> list[type[Config]]:
    """Every class of settings in caddie."""
    own = [sub for sub in cls.__subclasses__() if sub.__module__.startswith("caddie")]
    return sorted({sub for direct in own for sub in [direct, *configs(direct)]}, key=lambda sub: sub.__name__)


# Diffs

rates = st.one_of(
    st.floats(0, 1),
    st.builds(Ramp, start=st.floats(0, 1), end=st.floats(0, 1)),
    st.builds(Warmdown, fraction=st.floats(0, 1)),
)
optimizers = st.one_of(st.builds(AdamW, lr=rates), st.builds(Muon, lr=rates, momentum=rates))
quantizers = st.one_of(
    st.builds(Float16),
    st.builds(Float32),
    st.builds(Rows, bits=st.integers(2, 8)),
    st.builds(Rows, scale=st.builds(Percentile, fraction=st.just(1.0))),
)
exceptions = st.dictionaries(
    st.sampled_from(["0", "3", "0-1", "2-3"]),
    st.dictionaries(st.sampled_from(["mlp.hidden", "attention.key_value_heads"]), st.integers(1, 4), min_size=1),
    max_size=3,
)
changes: dict[str, st.SearchStrategy[Any]] = {
    "name": st.text(max_size=4),
    "base": st.sampled_from([None, "baseline"]),
    "public": st.lists(
        st.builds(Figure, label=st.text(), bits_per_byte=st.floats(0, 9), source=st.just("s")), max_size=2
    ),
    "model.depth": st.integers(4, 12),
    "model.skips": st.sampled_from([None, UNet()]),
    "model.head.softcap": st.sampled_from([None, 15.0]),
    "model.block.mlp": st.builds(ReluSquared, hidden=st.integers(1, 99)),
    "model.layers": exceptions,
    "train.seconds": st.one_of(st.none(), st.floats(1, 1e6)),
    "train.averaging": st.one_of(st.none(), st.builds(EMA, decay=st.floats(0, 1))),
    "train.lr_schedule": st.one_of(
        st.builds(Warmdown, fraction=st.floats(0, 1)),
        st.builds(StepRamp, start=st.just(0), end=st.just(1), steps=st.integers(0, 9)),
    ),
    "train.optimizers": st.dictionaries(
        st.sampled_from(["matrix", "scalar", "blocks.0.*", "blocks.0.mlp.up.weight", "embedding"]),
        optimizers,
        max_size=4,
    ),
    "train.optimizers.matrix.lr": rates,
    "pack.quantizers.head": quantizers,
    "pack.coding": st.sampled_from([Smallest(), EntropyModel(), Packed(codec=Zlib(level=3)), Packed(shuffle=True)]),
    "pack.cap_bytes": st.integers(1, 10**9),
    "pack.fit": st.sampled_from([None, FillCap(), PruneOnes()]),
    "pack.correction": st.one_of(st.none(), st.builds(Correction, rank=st.integers(1, 9))),
    "score.stride": st.integers(1, 64),
}
diffs = st.fixed_dictionaries({}, optional=changes)
ANY_DEPTH = sorted(
    name
    for name, recipe in RECIPES.items()
    if not (
        recipe.model.layers or recipe.model.recurrence or recipe.model.parallel_streams or recipe.model.value_embedding
    )
)
"""Recipes that name no layers, whose depth may change."""


@st.composite
def some_recipes(draw: st.DrawFn) -> Recipe:
    diff = draw(diffs)
    if "matrix" not in diff.get("train.optimizers", {"matrix": None}):
        diff.pop("train.optimizers.matrix.lr", None)
    base = RECIPES[draw(st.sampled_from(ANY_DEPTH))]
    if base.model.depth < 4:  # the layers that exceptions name must be there
        diff.setdefault("model.depth", 4)
    return base.but(diff)


@pytest.mark.long
@quick
@given(some_recipes(), some_recipes())
def test_a_diff_leads_from_one_recipe_to_the_other(a: Recipe, b: Recipe) -> None:
    diff = a.diff(b)
    assert a.but(diff) == b
    assert list(a.but(diff).train.optimizers) == list(b.train.optimizers), "the last match wins, so order counts"
    assert b.but(b.diff(a)) == a
    assert a.diff(a) == {}
    assert (a.settings.diff(b.settings) == {}) == (a.key() == b.key()), "names and reasons are no settings"


@pytest.mark.long
@quick
@given(some_recipes())
def test_json_leads_back(recipe: Recipe) -> None:
    text = json.dumps(recipe.to_json(), allow_nan=False)
    assert Recipe.from_json(json.loads(text)) == recipe
    assert Recipe.from_json(json.loads(text)).key() == recipe.key()


@pytest.mark.long
@quick
@given(some_recipes())
def test_every_path_can_be_read_back_and_set(recipe: Recipe) -> None:
    for path in paths(recipe):
        assert recipe.but({path: value_at_path(recipe, path)}) == recipe, path


def value_at_path(config: Config, path: str) -> Any:
    """Return the value at a path; of a mapping, that of the longest key that fits."""
    value: Any = config
    rest = path.split(".")
    while rest:
        if isinstance(value, Config):
            value, rest = getattr(value, rest[0]), rest[1:]
        else:
            length = next(n for n in range(len(rest), 0, -1) if ".".join(rest[:n]) in value)
            value, rest = value[".".join(rest[:length])], rest[length:]
    return value


def test_a_diff_says_only_what_differs() -> None:
    diff = {"model.block.mlp.hidden": 992, "train.optimizers.matrix.lr": 0.06, "pack.coding.codec": Brotli()}
    changed = BASE.but(diff)
    assert BASE.diff(changed) == diff
    assert changed.diff(BASE) == {
        "model.block.mlp.hidden": 1024,
        "train.optimizers.matrix.lr": 0.04,
        "pack.coding.codec": Zlib(level=9),
    }


def test_a_diff_needs_two_of_a_kind() -> None:
    with pytest.raises(TypeError, match="GPT and Recipe"):
        GPT().diff(BASE)


def test_a_diff_may_change_together_what_only_fits_together() -> None:
    deep = GPT(depth=9, layers={"8": {"mlp.hidden": 4}})
    shallow = GPT(depth=4)
    assert deep.but({"depth": 4, "layers": {}}) == shallow
    assert deep.but(deep.diff(shallow)) == shallow
    assert shallow.but(shallow.diff(deep)) == deep


def test_later_paths_win_over_earlier_ones() -> None:
    assert GPT().but({"block.mlp.hidden": 4, "block": Block()}).block.mlp == ReluSquared()
    assert GPT().but({"block": Block(), "block.mlp.hidden": 4}).block.mlp == ReluSquared(hidden=4)


def test_a_variant_and_its_settings_may_come_together() -> None:
    changed = BASE.but({"pack.coding.codec": "Lzma", "pack.coding.codec.preset": 3})
    assert changed.pack.coding == Packed(codec=Lzma(preset=3))
    changed = BASE.but({"pack.coding": "Packed", "pack.coding.codec": "Brotli", "pack.coding.shuffle": True})
    assert changed.pack.coding == Packed(codec=Brotli(), shuffle=True)
    assert BASE.but({"train.optimizers.x": {"kind": "AdamW", "lr": 1}, "train.optimizers.x.lr": 2}).train.optimizers[
        "x"
    ] == AdamW(lr=2)


def test_keywords_set_whole_fields() -> None:
    assert GPT().but(depth=3, width=64) == GPT(depth=3, width=64)
    assert GPT().but({"depth": 2}, depth=3).depth == 3


def test_a_mapping_without_kind_is_a_diff_of_what_is_there() -> None:
    changed = BASE.but({"model": {"depth": 3, "block.mlp": {"hidden": 7}}})
    assert changed.model == BASE.model.but({"depth": 3, "block.mlp.hidden": 7})
    rule = BASE.but({"train.optimizers.matrix": {"lr": 0.5}}).train.optimizers["matrix"]
    assert rule == BASE.train.optimizers["matrix"].but(lr=0.5)


@pytest.mark.parametrize(
    ("path", "right"),
    [
        ("modle.depth", "model.depth"),
        ("model.dept", "model.depth"),
        ("model.block.mlp.hiden", "model.block.mlp.hidden"),
        ("train.optimizers.matrix.lrr", "train.optimizers.matrix.lr"),
        ("train.optimizers.matrx.lr", "train.optimizers.matrix.lr"),
        ("model.depth.x", "model.depth"),
        ("model..depth", "model.depth"),
        ("compress.codec", "pack.coding"),
        ("pack.coding.codec.levels", "pack.coding.codec.level"),
        ("train.step", "train.steps"),
        ("softcap", "model.head.softcap"),
        ("batch_size", "train.batch_tokens"),
        ("train.lr", "train.optimizers.matrix.lr"),
        ("n_layer", "model.depth"),
        ("model.layers", "model.depth"),
    ],
)
def test_a_misspelt_path_suggests_the_right_one(path: str, right: str) -> None:
    with pytest.raises(UserError) as caught:
        BASE.but({path: 3})
    assert path in str(caught.value)
    assert f"did you mean {right}?" in str(caught.value)


@pytest.mark.parametrize(
    "path", ["", ".", "model.", ".model", "zzzzzzzzzz", "public.0.label", "why.x", "train.seconds.x"]
)
def test_a_path_to_nowhere_is_an_error(path: str) -> None:
    with pytest.raises(UserError, match="no setting"):
        BASE.but({path: 3})


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model.block.mlp.hidden", 0, "model.block.mlp.hidden must be from 1 to"),
        ("model.depth", "many", "model.depth must be a whole number, not many"),
        ("model.depth", [3, 0], r"model.depth must be a whole number, not \[3, 0\]; write numbers without commas"),
        ("train.lr_schedule.fraction", 2, "train.lr_schedule.fraction must be from 0 to 1, not 2"),
        ("score.precision", "float16", "score.precision must be one of float32, bfloat16, float64, not float16"),
        (
            "score.tilt",
            "NGramTlt(orders=[3])",
            "score.tilt must be one of NGramTilt, not NGramTlt .did you mean NGramTilt",
        ),
        ("train.seconds", -5.0, "train.seconds must be from 0.01 to 100,000,000, not -5$"),
        ("pack.coding", "Smalest", r"pack.coding must be one of .* \(did you mean Smallest"),
        ("pack.fit", "FillCup", r"pack.fit must be one of FillCap, PruneOnes, .* \(did you mean FillCap"),
        ("pack.cap_bytes", 0, "pack.cap_bytes must be from 1"),
        ("pack.coding", "gzip", "pack.coding must be one of .*; `caddie techniques gzip` looks the word up"),
        ("train.clip_norm", 0, "train.clip_norm must be above 0, not 0"),
    ],
)
def test_a_wrong_value_names_its_whole_path(path: str, value: object, message: str) -> None:
    with pytest.raises(UserError, match="^" + message):
        RECIPES["tiny"].but({path: value})


def test_a_list_of_a_fixed_length_is_held_to_it() -> None:
    with pytest.raises(UserError, match=r"short_chunks\.0 must be a list of 2, not \[256\]"):
        RECIPES["tiny"].but({"score.ttt": {"kind": "DocumentLoRA", "short_chunks": [[256]]}})


def test_the_original_is_untouched() -> None:
    before = json.dumps(BASE.to_json())
    BASE.but({"train.optimizers.matrix.lr": 1.0, "pack.quantizers.x": Rows(), "model.layers.0": {"mlp.hidden": 3}})
    assert json.dumps(BASE.to_json()) == before


# Exceptions of layers, rules of parameters


def test_exceptions_apply_to_their_layers_in_order() -> None:
    gpt = BASE.but({"model.layers.0-2": {"mlp.hidden": 64}, "model.layers.2": {"mlp.hidden": 32}}).model
    assert [gpt.blocks[layer].mlp for layer in range(5)] == [
        ReluSquared(hidden=hidden) for hidden in (64, 64, 32, 1024, 1024)
    ]
    assert gpt.block == Block()
    assert gpt.but({"layers.0-2.mlp.hidden": 16}).blocks[1].mlp == ReluSquared(hidden=16)


@pytest.mark.parametrize("path", ["dropout", "model.dropout"])
def test_a_setting_like_none_leads_to_the_glossary(path: str) -> None:
    with pytest.raises(UserError, match=rf"^no setting {path}; `caddie techniques dropout` looks the word up$"):
        BASE.but({path: 0.1})


def test_a_class_is_spelled_in_python_as_on_a_command_line() -> None:
    typed = BASE.but({"train.lr_schedule": "Warmdown(fraction=0.4)", "model.block.mlp": "SwiGLU(hidden=64)"})
    assert typed.train.lr_schedule == Warmdown(fraction=0.4)
    assert show(typed.model.block.mlp) == "SwiGLU(hidden=64)"
    with pytest.raises(UserError, match=r"Warmdown\(0.4\) is not of the form Warmdown\(fraction=VALUE\)"):
        BASE.but({"train.lr_schedule": "Warmdown(0.4)"})


def test_names_of_other_programs_lead_to_settings() -> None:
    assert names_elsewhere().keys() <= set(paths(BASE))
    names = [name for each in names_elsewhere().values() for name in each]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("key", ["9", "0-9", "3-2", "-1", "", "x", "1-", "0 - 2", "1,2", "00000"])
def test_an_exception_for_no_layer_is_an_error(key: str) -> None:
    with pytest.raises(UserError, match="names no layers"):
        GPT(layers={key: {"mlp.hidden": 4}})


def test_a_wrong_exception_is_an_error_at_once() -> None:
    with pytest.raises(UserError, match=r"no setting mlp.hiden \(did you mean mlp.hidden\?"):
        GPT(layers={"0": {"mlp.hiden": 4}})
    with pytest.raises(UserError, match=r"mlp\.hidden must be from 1"):
        BASE.but({"model.layers.0": {"mlp.hidden": 0}})


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("pack.quantizers.matrix", "Rows(bits=99)", "pack.quantizers.matrix.bits must be from 2 to 8"),
        ("pack.quantizers.matrix", "Gptq(of=Rows(bits=99))", "pack.quantizers.matrix.of.bits must be from 2 to 8"),
        ("train.lr_schedule", "Ramp(start=1, end=0, begin=0.9, finish=0.1)", "train.lr_schedule: Ramp begins at 0.9"),
    ],
)
def test_a_mistake_inside_a_class_is_named_by_its_whole_path(path: str, value: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"^{re.escape(message)}"):
        Recipe().but(dict([parse_assignment(f"{path}={value}")]))


def test_an_exception_may_hold_a_config_and_travels_as_json() -> None:
    gpt = GPT(layers={"0": {"attention": GroupedQueryAttention(heads=4)}})
    back = GPT.from_json(json.loads(json.dumps(gpt.to_json())))
    assert back.blocks[0].attention == GroupedQueryAttention(heads=4)
    assert back == gpt


@pytest.mark.parametrize("key", ["blocks.0.*", "blocks.0.mlp.up.weight", "embedding.weight", "head.*"])
def test_keys_with_dots_are_reached_and_added(key: str) -> None:
    added = Train().but({f"optimizers.{key}": AdamW(lr=0.5)})
    assert added.optimizers == {**Train().optimizers, key: AdamW(lr=0.5)}
    assert list(added.optimizers)[-1] == key
    assert added.but({f"optimizers.{key}.lr": 0.25}).optimizers[key] == AdamW(lr=0.25)
    assert Train().but(Train().diff(added)) == added


def test_the_order_of_rules_counts() -> None:
    a = Train(optimizers={"matrix": AdamW(lr=1), "blocks.0.*": AdamW(lr=2)})
    b = Train(optimizers={"blocks.0.*": AdamW(lr=2), "matrix": AdamW(lr=1)})
    assert list(a.but(a.diff(b)).optimizers) == ["blocks.0.*", "matrix"]
    assert a.key() != b.key()


# Variants


def test_variants_by_name_by_mapping_and_by_value_are_the_same() -> None:
    for value in ("Lzma", {"kind": "Lzma"}, Lzma()):
        assert BASE.but({"pack.coding.codec": value}).pack.coding == Packed(codec=Lzma())
    assert coerce({"kind": "Ramp", "start": 1, "end": 0}, float | Schedule, "lr") == Ramp(start=1.0, end=0.0)
    assert BASE.but({"model.skips": None}).but({"model.skips": "UNet"}).model.skips == UNet()


def test_kind_may_be_left_out_where_there_is_one() -> None:
    assert coerce({"hidden": 5}, ReluSquared, "mlp") == ReluSquared(hidden=5)
    with pytest.raises(UserError, match="codec must be one of Brotli, Lzma, Stored, Zlib, Zstd"):
        coerce({"level": 5}, Codec, "codec")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("Zlibb", r"did you mean Zlib\?"),
        ("Rows", "must be one of Brotli"),  # a variant, but of another socket
        ("Codec", "must be one of Brotli"),  # the socket itself is none
        ({"kind": "Zlib", "levle": 3}, r"Zlib has no setting levle \(did you mean level\?"),
        ({"kind": None}, "must be one of"),
        ({"kind": ["Zlib"]}, "must be one of"),
        (None, "must be one of"),
        (3, "must be one of"),
        ([], "must be one of"),
        (Rows(), "must be one of"),
    ],
)
def test_what_is_no_variant_is_an_error(value: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        coerce(value, Codec, "codec")


def test_a_variant_without_its_settings_names_them() -> None:
    with pytest.raises(UserError, match="AdamW needs lr"):
        coerce("AdamW", Optimizer, "matrix")


def test_variants_are_the_concrete_subclasses() -> None:
    assert {"Float16": Float16, "Float32": Float32, "Rows": Rows}.items() <= variants(Quantizer).items()
    assert variants(Block) == {"Block": Block}
    assert set(variants(Schedule)) >= {"Ramp", "Warmdown"}
    assert "Schedule" not in variants(Schedule)


# Values

IntSchedule = typing.Annotated[int, Range(1, 8)]


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (3, int, 3),
        (3.0, int, 3),
        (3, float, 3.0),
        (True, bool, True),
        ("x", str, "x"),
        (None, int | None, None),
        ([1, 2.0], tuple[int, ...], (1, 2)),
        ((), tuple[int, ...], ()),
        ({"a": 1}, typing.Mapping[str, float], {"a": 1.0}),
        ({1: 2}, typing.Mapping[str, int], {"1": 2}),
        (1, IntSchedule, 1),
        (8, IntSchedule, 8),
        ("float32", typing.Literal["float32", "bfloat16"], "float32"),
        (16.0, typing.Literal[8, 16], 16),
        (5, float | Schedule, 5.0),
    ],
)
def test_values_are_taken_as_what_is_asked_for(value: object, annotation: Any, expected: object) -> None:
    found = coerce(value, annotation, "x")
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (3.5, int),
        (True, int),
        (1, bool),
        (True, float),
        ("3", int),
        ("3", float),
        (3, str),
        (None, int),
        (float("nan"), float),
        (float("inf"), float),
        (float("inf"), int),
        (0, IntSchedule),
        (9, IntSchedule),
        ("ab", tuple[str, ...]),
        ([1, "a"], tuple[int, ...]),
        ([("a", 1)], typing.Mapping[str, int]),
        ({"a": "b"}, typing.Mapping[str, int]),
        ("float64", typing.Literal["float32", "bfloat16"]),
        ([], typing.Literal["float32", "bfloat16"]),
        (-1.0, typing.Annotated[float | Schedule, Range(0, 1)]),
        (10**400, int | None),
        (10**400, float),
        (10**400, IntSchedule),
        (-(10**400), typing.Annotated[float, Range(0, 1)]),
        (b"bytes", str),
        (object(), int),
    ],
)
def test_values_that_do_not_fit_are_mistakes_of_the_user(value: object, annotation: Any) -> None:
    if annotation == int | None:
        assert coerce(value, annotation, "x") == value, "without bounds, any whole number"
        return
    with pytest.raises(UserError, match=r"^x"):
        coerce(value, annotation, "x")


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_shipped_recipes_travel_as_json(name: str) -> None:
    recipe = RECIPES[name]
    text = json.dumps(recipe.to_json(), allow_nan=False)
    back = Recipe.from_json(json.loads(text))
    assert back == recipe
    assert json.dumps(back.to_json()) == text
    assert back.sha256 == recipe.sha256


def test_keys_name_values_and_stay() -> None:
    # A known answer, because run folders are named by keys: sha256 of '{"kind": "Zlib", "level": 9}'.
    assert Zlib(level=9).key() == Zlib().key() == "ae55e51b"
    keys = [recipe.key() for recipe in RECIPES.values()]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 8 and set(key) <= set("0123456789abcdef") for key in keys)


def test_labels_do_not_change_what_a_recipe_is() -> None:
    relabelled = BASE.but(name="x", why="Other.", base="tiny", public=())
    assert relabelled.sha256 == BASE.sha256
    assert BASE.but({"train.seconds": 601}).sha256 != BASE.sha256


def test_configs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        BASE.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Zlib(9)  # type: ignore[misc]
    given_rules = {"matrix": AdamW(lr=1.0)}
    train = Train(optimizers=given_rules)
    given_rules["scalar"] = AdamW(lr=2.0)
    assert list(train.optimizers) == ["matrix"], "a config keeps its own copy"


def test_show_is_one_line_to_type() -> None:
    assert show(None) == "none"
    assert show("word") == "word"
    assert show(0.5) == "0.5"
    assert show(True) == "true"
    assert show([1, 2]) == "[1, 2]"
    assert show(Zlib()) == "Zlib"
    assert show(Rows(bits=6)) == "Rows(bits=6)"
    assert show(AdamW(lr=0.1)) == "AdamW(lr=0.1)"


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("a=1", "a", 1),
        ("train.seconds=60.5", "train.seconds", 60.5),
        ("a=word", "a", "word"),
        ("a=None", "a", None),
        ("a=null", "a", None),
        ("a=true", "a", True),
        ('a="1"', "a", "1"),
        ("a=", "a", ""),
        ("a=b=c", "a", "b=c"),
        ('a={"kind": "Ramp"}', "a", {"kind": "Ramp"}),
        ("a=[1, 2", "a", "[1, 2"),
        ("a=Ramp(start=1, end=0.5)", "a", {"kind": "Ramp", "start": 1, "end": 0.5}),
        (
            'a=Muon(lr=Ramp(start=1, end=0), precision="float32", x=word, y=none)',
            "a",
            {
                "kind": "Muon",
                "lr": {"kind": "Ramp", "start": 1, "end": 0},
                "precision": "float32",
                "x": "word",
                "y": None,
            },
        ),
        ("a=Ramp(1, 0)", "a", "Ramp(1, 0)"),
        ("a=0-6", "a", "0-6"),
        ("a={[1]: 2}", "a", "{[1]: 2}"),
        ("a=__import__('os').getcwd()", "a", "__import__('os').getcwd()"),
        ("a=" + "[" * 100_000, "a", "[" * 100_000),
        ("a=" + "9" * 5000, "a", "9" * 5000),
    ],
)
def test_assignments_are_json_or_words(text: str, path: str, value: object) -> None:
    assert parse_assignment(text) == (path, value)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("tiny", "growing_rows", "ngram_tilt") else pytest.param(name, marks=pytest.mark.long)
        for name in sorted(RECIPES)
    ],
)
def test_what_is_shown_can_be_typed(name: str) -> None:
    recipe = RECIPES[name]
    for path in paths(recipe):
        assert recipe.but(dict([parse_assignment(f"{path}={show(value_at_path(recipe, path))}")])) == recipe, path
    typed = BASE.but({"train.optimizers.matrix": parse_assignment(f"x={show(recipe.train.optimizers['matrix'])}")[1]})
    assert typed.train.optimizers["matrix"] == recipe.train.optimizers["matrix"]


@pytest.mark.parametrize("text", ["", "a", "=1", "=", "--seed"])
def test_what_assigns_nothing_says_how(text: str) -> None:
    with pytest.raises(UserError, match="PATH=VALUE"):
        parse_assignment(text)


@pytest.mark.parametrize("value", ["Muon(lr=0.1, lr=0.2)", '{"lr": 0.1, "lr": 0.2}', "[{'lr': 0.1, 'lr': 0.2}]"])
def test_no_setting_within_a_value_stands_there_twice(value: str) -> None:
    with pytest.raises(UserError, match="lr is set twice; leave one out"):
        parse_assignment(f"train.optimizers.matrix={value}")


# Hostile JSON

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["GPT", "Block", "AdamW", "Rows", "Ramp", 10**400, -(10**400), 1e308, "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["kind", "model", "train", "layers", "0", "lr", "optimizers", "depth", "block", "mlp", "x"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@pytest.mark.long
@settings(derandomize=True, deadline=None, max_examples=150)
@given(json_values, st.sampled_from(configs()))
def test_any_json_is_a_config_or_a_mistake_of_the_user(value: object, cls: type[Config]) -> None:
    try:
        found = cls.from_json(value)
    except UserError:
        return
    assert isinstance(found, cls)
    assert cls.from_json(found.to_json()) == found


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.data(), json_values)
def test_any_json_at_any_path_is_a_setting_or_a_mistake(data: st.DataObject, value: object) -> None:
    path = data.draw(st.sampled_from(sorted(paths(RECIPES["tiny"]))))
    description = RECIPES["tiny"].to_json()
    node: Any = description
    *parents, last = path.split(".")
    for name in parents:
        node = node[name]
    node[last] = value
    try:
        found = Recipe.from_json(description)
    except UserError:
        return
    assert Recipe.from_json(found.to_json()) == found


def nested(depth: int, key: str | None) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if key is None else {key: value}
    return value


PLACES = ["name", "model.depth", "model.layers.0.mlp", "train.loader", "public", "pack.coding.codec"]


@pytest.mark.parametrize(
    ("path", "deepest"),
    [
        *((path, 5_000) for path in PLACES[:-1]),
        (PLACES[-1], 100_000),
        *(pytest.param(path, 100_000, marks=pytest.mark.slow) for path in PLACES[:-1]),
    ],
)
def test_deep_json_is_a_mistake_of_the_user(path: str, deepest: int) -> None:
    for depth, key in [(100, None), (900, "mlp"), (deepest, None)]:
        value = nested(depth, key)
        with pytest.raises(UserError):
            BASE.but({path: value})
        for name in reversed(path.split(".")):
            value = {name: value}
        with pytest.raises(UserError):
            Recipe.from_json(value)


def test_messages_stay_short() -> None:
    wrong = ("x" * 100_000, list(range(100_000)), {"kind": "x" * 100_000}, "[" + "1," * 100_000 + "1]", "1" * 3000)
    for path, value in product(("pack.coding.codec", "train.steps"), wrong):
        with pytest.raises(UserError) as caught:
            BASE.but({path: value})
        assert len(str(caught.value)) < 1000
        assert "\n" not in str(caught.value)


# Documentation


def test_every_field_is_described() -> None:
    for cls in configs():
        described = descriptions(cls)
        assert set(described) == set(field_types(cls)), cls
        for name, text in described.items():
            start = text[:1].isupper() or not text[:1].isalpha() or text.split()[0] in field_types(cls)
            assert start, f"{cls}.{name}: {text}"
            assert text.rstrip().endswith("."), f"{cls}.{name}: {text}"


def test_a_description_is_the_string_below_the_field() -> None:
    assert descriptions(Rows)["bits"] == "Bits of an integer; the largest is 2^(bits - 1) - 1."
    assert descriptions(Muon)["lr"] == descriptions(Optimizer)["lr"], "inherited fields keep theirs"


class Undescribed(Config):
    """A config whose second field lacks its string, for the test below."""

    first: int = 1
    """The first."""
    second: int = 2
    third: int = 3
    """The third."""


def test_a_missing_description_is_noticed() -> None:
    assert descriptions(Undescribed) == {"first": "The first.", "third": "The third."}


@pytest.mark.parametrize("diff", ["x", {1: 2}, [("train.steps", 1)]])
def test_changes_are_a_mapping_from_path_to_value(diff: Any) -> None:
    with pytest.raises(UserError, match="changes are a mapping from path to value, as"):
        Recipe().but(diff)


def test_numbers_of_libraries_are_numbers() -> None:
    diff = {"train.steps": 3, "train.z_loss": 0.5, "model.layers.0": {"attention.query_gain": 2.0}}
    others = {"train.steps": np.int64(3), "train.z_loss": torch.tensor(0.5)}
    found = Recipe().but({**others, "model.layers.0": {"attention.query_gain": np.float64(2.0)}})
    assert (found, found.sha256) == (Recipe().but(diff), Recipe().but(diff).sha256)
    assert type(found.train.steps) is int
