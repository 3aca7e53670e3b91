"""Claims of a `submission.json`: its fields, types and scores, in the spellings of merged records."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import islice, product
from typing import Any

from caddie.report.read import pick
from caddie.submit.review_rules import Findings

_MOST_SEEDS = 200
"""Mentions of seeds that are read."""
FIELDS = ("author", "date", "name", "github_id")
"""Fields that nearly every merged record has, beside `val_bpb`."""
_NUMBER = (int, Decimal)
TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys((*FIELDS, "blurb", "track", "hardware", "pytorch_version", "technique_summary"), (str,)),
    **dict.fromkeys(("val_loss", "val_bpb_std", "val_loss_std", "pre_quant_val_bpb", "pre_quant_val_loss"), _NUMBER),
    **dict.fromkeys(("bytes_total", "bytes_code", "artifact_bytes_max", "base_pr", "model_params"), (int,)),
    **dict.fromkeys(("artifact_bytes_mean", "step_avg_ms_mean", "train_steps_mean"), _NUMBER),
    **dict.fromkeys(("attribution", "compliance"), (dict, str)),
    "seeds": (list, dict),
    "seed_results": (dict,),
}
"""Types of the fields of merged records; other fields may have any. A null is no value, not a wrong one."""

_MEANS = ("mean_val_bpb", "mean_bpb", "val_bpb_mean", "val_bpb_3seed_mean")
"""Older spellings of `val_bpb`."""
_BY_SEED = ("seed_results", "seeds", "per_seed_results", "val_bpb_by_seed", "val_bpb_seeds", "seed_scores")
_SCORES = ("val_bpb", "val_bpb_exact", "bpb", "ttt_val_bpb", "ppm_mixer_val_bpb", "sliding_window_bpb")
"""Spellings of the score of one seed."""
_SIZES = ("artifact_bytes", "bytes_total", "submission_size_bytes")
_LIMITED: Mapping[str, tuple[str, int]] = {
    "train_wallclock_ms": ("training-clock", 1_000),
    "train_time_s": ("training-clock", 1),
    "eval_time_s": ("evaluation-clock", 1),
    "eval_time_ms": ("evaluation-clock", 1_000),
    "eval_time_seconds": ("evaluation-clock", 1),
    **dict.fromkeys(_SIZES, ("size-cap", 1)),
}
"""Fields that the contest limits: the rule, and the divisor from field to limit."""


@dataclass
class Claims:
    """Numbers that the JSON claims, by seed where it names seeds."""

    file: str
    score: Decimal | None = None
    std: Decimal | None = None
    p_value: Decimal | None = None
    seeds: list[int] = field(default_factory=list)
    scores: dict[int, Decimal] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    """Bytes of each seed, code included."""
    tokens: dict[int, int] = field(default_factory=dict)
    """Tokens of validation of each seed."""
    limited: list[tuple[str, str, Decimal]] = field(default_factory=list)
    """Limited fields: the field's name in the JSON, its rule, and its number of seconds or bytes."""
    base: list[float] = field(default_factory=list)
    """Scores of the base's seeds, where it states them."""
    own_set: bool = False
    """True if `compliance` says that the set is not the contest's."""


def read_claims(data: Mapping[str, Any], file: str, found: Findings) -> Claims:
    """Return what the JSON claims; odd fields and types become findings."""
    for name in FIELDS:
        if not data.get(name):
            found.add("json-field", file, f"{name} is missing")
    for name, types in TYPES.items():
        if data.get(name) is not None and (not isinstance(data[name], types) or isinstance(data[name], bool)):
            wanted = " or ".join(one.__name__.replace("Decimal", "float") for one in types)
            found.add("json-type", file, f"{name} is {_kind(data[name])}, where merged records have {wanted}")
        elif isinstance(data.get(name), _NUMBER) and data[name] < 0:
            found.add("json-type", file, f"{name} is {data[name]}, below 0")
    inner = data.get("results")
    data = {**(inner if isinstance(inner, dict) else {}), **data}
    std, p_value = _decimal(data.get("val_bpb_std")), _decimal(data.get("p_value"))
    claims = Claims(file, _score(data, file, found), std, p_value)
    for seed, value in islice(_seeds(data), _MOST_SEEDS):
        claims.seeds += [] if seed in claims.seeds else [seed]
        fields = value if isinstance(value, dict) else {"val_bpb": value}
        if (score := _first(fields, _SCORES)) is not None:
            claims.scores[seed] = score
        if (size := _first(fields, _SIZES)) is not None:
            claims.sizes[seed] = int(size)
        if (tokens := _first(fields, ("val_tokens",))) is not None:
            claims.tokens[seed] = int(tokens)
        claims.limited += _limited(fields, f"seed {seed}: ")
    claims.limited += _limited(data)
    claims.own_set = pick(data, "compliance", "contest_validation_set") is False
    bases = [value for name, value in data.items() if re.search(r"(?<![a-z])base(lines?)?(?![a-z])", name)]
    claims.base = next(filter(None, map(_base, bases)), [])
    return claims


def _score(data: Mapping[str, Any], file: str, found: Findings) -> Decimal | None:
    names = [name for name in ("val_bpb", *_MEANS) if name in data]
    if not names:
        found.add("json-score", file, "val_bpb is missing")
        return None
    if names[0] != "val_bpb":
        found.add("json-spelling", file, f"the score is called {names[0]}; merged records say val_bpb")
    score = _decimal(data[names[0]])
    if score is None:
        found.add("json-score", file, f"{names[0]} is {_kind(data[names[0]])}, not a number")
    return score


def _seeds(data: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
    """Yield each seed with what the JSON says of it; with None where it only lists it."""
    listed = data.get("seeds")
    listed = [seed for seed in listed if type(seed) is int] if isinstance(listed, list) else []
    yield from ((seed, None) for seed in listed)
    for name in _BY_SEED:
        value = data.get(name)
        pairs = [*value.items()] if isinstance(value, dict) else []
        if isinstance(value, list):
            pairs = [(str(one.get("seed")), one) for one in value if isinstance(one, dict)]
            if not pairs and name != "seeds":
                yield from zip(listed, value, strict=False)
        for seed, one in pairs:
            if re.fullmatch(r"(?:seed_?)?\d{1,18}", seed):
                yield int(re.sub(r"\D", "", seed)), one


def _first(fields: Mapping[str, Any], names: tuple[str, ...]) -> Decimal | None:
    return next((number for name in names if (number := _decimal(fields.get(name))) is not None), None)


def _limited(fields: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str, Decimal]]:
    """Yield the fields of `_LIMITED` that are numbers, those of the mean or largest seed too."""
    for (name, (rule, per)), of in product(_LIMITED.items(), ("", "_mean", "_max")):
        if (number := _decimal(fields.get(name + of))) is not None:
            yield before + name + of, rule, number / per


def _base(value: Any) -> list[float]:
    """Return the scores of a list or mapping of at least two numbers between 0 and 5."""
    values = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    scores = [float(one) for one in values if isinstance(one, Decimal) and 0 < one < 5]
    return scores if len(scores) == len(values) > 1 else []


def _decimal(value: Any) -> Decimal | None:
    """Return a number as a decimal of sensible size, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, Decimal)):
        return None
    number = Decimal(value) or Decimal(0)  # a zero may have any exponent
    return number if -30 <= int(number.as_tuple().exponent) <= number.adjusted() < 18 else None


def _kind(value: Any) -> str:
    return {type(None): "null", Decimal: "float"}.get(type(value), type(value).__name__)
