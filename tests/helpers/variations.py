"""Every one-step variation of a model, found from the types of its settings: a new technique is in because it exists.

A class whose defaults do not fit `BASE` needs a line in `SETTINGS`, a number that may be none one in `VALUES`.
"""

import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import torch
from torch import Tensor

from caddie.config import Config, field_types, paths, variants
from caddie.errors import UserError
from caddie.model import GPT
from caddie.model.parameters import Constant, Initial, RowConstants
from caddie.recipes.catalog import shipped

VOCABULARY, WIDTH, DEPTH = 64, 32, 3
ROWS, LENGTH = 2, 16
SIZES: dict[str, Any] = {
    "vocabulary": VOCABULARY,
    "width": WIDTH,
    "block.attention.heads": 4,
    "block.attention.key_value_heads": 2,
    "block.attention.longest": 5,
    "block.attention.rope.native_length": 8,
    "block.attention.rope.length": 16,
    "block.mlp.hidden": 40,
    "embedding.bigrams.buckets": 61,
    "embedding.bigrams.dims": 8,
    "dense_connections.hidden": 8,
    "value_embedding.dims": 8,
}
"""What is small in every model of the tests, where the model has it."""
BASE = GPT(depth=DEPTH).but(
    {path: SIZES[path] for path in set(SIZES) & set(paths(GPT())) - {"block.attention.longest"}}
)

SETTINGS: dict[str, dict[str, Any]] = {
    "HashedNGrams": {"buckets": 61, "dims": 8},
    "NTKRoPE": {"native_length": 8, "length": 16},
    "LastLayerMUDD": {"hidden": 8, "early": 1, "first": 0},
    "MUDD": {"after": (0, 1, 2), "values": (1,), "windows": ((1, 2),)},
    "Normal": {"std": 0.02},
    "RandomMap": {"rank": 4},
    "Recurrence": {"first": 1, "last": 1, "passes": 2},
    "RoutedStreams": {"first": 2},
    "SeparateStreams": {"first": 2},
    "PiecewiseConstant": {"values": (1, 3), "begins": (0.5,)},
    "ValueEmbedding": {"layers": (0, 2), "dims": 8},
    "YaRNRoPE": {"native_length": 8, "length": 16},
}
"""Class to settings that fit `BASE`, for those whose defaults do not."""
VALUES: dict[str, Any] = {
    "GroupedQueryAttention.longest": 3,
    "GroupedQueryAttention.window": 4,
    "GroupedQueryAttention.xsa_gate": 0.5,
    "HashedNGrams.dims": 8,
    "HashedNGrams.signs": 16,
    "Norm.epsilon": 1e-3,
    "RoPE.dims": 4,
    "TokenEmbedding.dims": 12,
}
"""Field, under the class that has it or a base, to the number tried where it is none."""
WITH: dict[str, dict[str, Any]] = {
    "block.attention.longest": {"block.attention.scope": "document"},
    "block.attention.xsa_gate": {"block.attention.xsa": True},
    "dense_connections": {"block.attention.key_value_heads": 4},
}
"""Path to what must be set beside it for it to matter."""
UNFIT = (Constant, RowConstants)
"""Starts that tell no two tokens or channels apart."""
EXTRA: dict[str, dict[str, Any]] = {
    "one layer": {"depth": 1},
    "layers differ": {"layers": {"0-1": {"mlp.hidden": 8, "parallel": True}, "2": {"attention": None}}},
    "windows in some layers": {"layers": {"0": {"attention.window": 2}, "2": {"attention.window": 9}}},
    "documents and windows": {"block.attention.scope": "document", "block.attention.window": 4},
    "a layer of its own": {"recurrence": {"kind": "Recurrence", "first": 0, "last": 0, "passes": 3}},
    "all layers again": {"recurrence": {"kind": "Recurrence", "first": 0, "last": 2, "passes": 2, "own_mlps": True}},
    "all lanes": {"parallel_streams": {"kind": "RoutedStreams", "first": 0}},
}
"""What no single setting says."""


def some_ids(seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def some_starts(second: int = 7) -> Tensor:
    """Documents begin at 0, 5 and 11 in the first row and at `second` in the other, whose first document goes on."""
    starts = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    starts[0, [0, 5, 11]] = True
    starts[1, second] = True
    return starts


def variations(config: Config, path: str = "", seen: set[str] | None = None) -> Iterator[dict[str, Any]]:
    """Diffs of `config`: each switch turned, each word, each variant of each socket, and the same inside of these.

    What stands in several places is varied in the first.
    """
    seen = set() if seen is None else seen
    for name, annotation in field_types(type(config)).items():
        here, value = f"{path}.{name}" if path else name, getattr(config, name)
        for other in _alternatives(config, name, annotation, value):
            key = f"{type(config).__name__}.{name}={other!r}"
            if isinstance(other, Initial):
                key = type(other).__name__
            if key in seen:
                continue
            seen.add(key)
            diff = {here: other, **WITH.get(here, {})}
            yield diff
            if isinstance(other, Config):
                yield from ({**diff, **inner} for inner in variations(other, here, seen))
        if isinstance(value, Config):
            yield from variations(value, here, seen)


def _alternatives(config: Config, name: str, annotation: Any, value: Any) -> Iterator[Any]:
    """Other values of one field that its type allows."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _alternatives(config, name, arguments[0], value)
    elif origin in (Union, types.UnionType):
        for choice in arguments:
            yield from _alternatives(config, name, choice, value)
    elif annotation is type(None):
        yield from () if value is None else (None,)
    elif annotation is bool:
        yield not value
    elif origin is Literal:
        yield from (word for word in arguments if word != value)
    elif isinstance(annotation, type) and issubclass(annotation, Config):
        for variant in variants(annotation).values():
            ours = variant.__module__.startswith("caddie.")  # other tests may have made some
            if ours and type(value) is not variant and variant not in UNFIT:
                yield _made(variant, annotation, value)
    elif value is None:
        yield _number(type(config), name)


def _made(variant: type[Config], socket: type[Config], value: Any) -> Config:
    """The variant, with what the one that it replaces has in common with it."""
    shared = {name: getattr(value, name) for name in field_types(socket)} if isinstance(value, socket) else {}
    try:
        return variant(**{**shared, **SETTINGS.get(variant.__name__, {})})
    except (TypeError, UserError) as error:
        raise AssertionError(f"tests/variations.py: add settings for {variant.__name__} to SETTINGS: {error}") from None


def _number(cls: type[Config], name: str) -> Any:
    for base in cls.__mro__:
        if f"{base.__name__}.{name}" in VALUES:
            return VALUES[f"{base.__name__}.{name}"]
    raise AssertionError(f"tests/variations.py: add a value for {cls.__name__}.{name} to VALUES")


def label(diff: dict[str, Any]) -> str:
    """The diff in short."""
    return ", ".join(
        f"{path}={type(value).__name__ if isinstance(value, Config) else value}" for path, value in diff.items()
    )


def changed(diff: dict[str, Any]) -> GPT:
    """`BASE` with the diff; one that does not fit is a mistake in the tables above."""
    try:
        gpt = BASE.but(diff)
        with torch.device("meta"):
            gpt.build()
    except UserError as error:
        raise AssertionError(f"tests/variations.py: {label(diff)} does not fit BASE, see SETTINGS: {error}") from None
    return gpt


def packed(diffs: list[dict[str, Any]]) -> list[GPT]:
    """As few models as hold every variation, each beside others that it does not touch."""
    packs: list[dict[str, Any]] = []
    for diff in diffs:
        for pack in packs:
            if _fits(pack, diff):
                pack.update(diff)
                break
        else:
            packs.append(dict(diff))
    return [changed(pack) for pack in packs]


def _fits(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether no setting of one stands inside a setting of the other, and a model can have both."""
    if any(f"{x}.".startswith(f"{y}.") or f"{y}.".startswith(f"{x}.") for x in a for y in b):
        return False
    try:
        changed({**a, **b})
    except AssertionError:
        return False
    return True


_GROUPS = "block.attention.key_value_heads"


def small(gpt: GPT, most: int = 5) -> GPT:
    """A recipe's model at the sizes of the tests, with at most so many layers, which keep their places in the depth."""
    depth = min(gpt.depth, most)

    def place(layer: int) -> int:
        return (2 * layer * (depth - 1) + gpt.depth - 1) // (2 * (gpt.depth - 1))

    known = {path for path in paths(gpt) if not path.startswith("layers.") and _at(gpt, path) is not None}
    diff = {path: value for path, value in SIZES.items() if path in known}
    if "block.attention.heads" in known and _at(gpt, "block.attention.heads") == _at(gpt, _GROUPS):
        diff[_GROUPS] = SIZES["block.attention.heads"]
    diff["depth"] = depth
    diff["layers"] = {"-".join(str(place(int(end))) for end in key.split("-")): gpt.layers[key] for key in gpt.layers}
    for path in {"recurrence.first", "recurrence.last", "parallel_streams.first"} & known:
        diff[path] = place(_at(gpt, path))
    if gpt.value_embedding:
        diff["value_embedding.layers"] = sorted({place(layer) for layer in gpt.value_embedding.layers})
    if gpt.dense_connections:
        again = gpt.recurrence and replace(
            gpt.recurrence, **{end: diff[f"recurrence.{end}"] for end in ("first", "last")}
        )
        passes, fewer = len(gpt.longest_order), len(again.order(depth, again.most)) if again else depth
        dense = gpt.dense_connections.renumbered(lambda number: round(number * (fewer - 1) / (passes - 1)))
        diff |= {f"dense_connections.{name}": value for name, value in gpt.dense_connections.diff(dense).items()}
    if "block.attention.rope.dims" in known:
        head, full = WIDTH // SIZES["block.attention.heads"], gpt.width // _at(gpt, "block.attention.heads")
        diff["block.attention.rope.dims"] = max(2, _at(gpt, "block.attention.rope.dims") * head // full)
    return gpt.but(diff)


def _at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def different(named: dict[str, GPT]) -> dict[str, GPT]:
    """Each different model once."""
    found: dict[str, GPT] = {}
    for name, gpt in named.items():
        if gpt not in found.values():
            found[name] = gpt
    return found


DIFFS = list(variations(BASE))
ALONE = {"as it comes": BASE, **{label(diff): changed(diff) for diff in DIFFS}}
TOGETHER = {f"together_{number}": gpt for number, gpt in enumerate(packed(DIFFS))}
SHIPPED = {name: small(recipe.model) for name, recipe in sorted(shipped().items())}
MODELS = different(ALONE | {name: changed(diff) for name, diff in EXTRA.items()} | TOGETHER | SHIPPED)
