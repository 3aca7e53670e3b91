"""Policies: which bytes count against the cap, and which seconds against which budget.

Contest rules change, so they are data here, and a run states its result under each policy.
`docs/policies.md` says where each rule comes from.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from caddie.config import Config, Count, Positive
from caddie.errors import UserError
from caddie.pack.artifact import Metadata
from caddie.pack.compress import Pack

Part = Literal[
    "weights",
    "tokenizer",
    "config",
    "manifest",
    "container",
    "source",
    "source_needed",
    "source_training",
    "text",
    "decoders",
]
"""Parts up to `source` are in the file, `source` only if the file carries it. Two are code, stripped and compressed, in
the file or not: `source_needed` is for scoring, `source_training` only for training. `text` is the scored text as the
model codes it: the score in bytes. `decoders` are the installed libraries that reading the file needs."""

Phase = Literal["prepare", "train_warmup", "calibrate", "train", "pack", "load", "warm_up", "score", "verify"]
"""Phases of a run. `load`, `warm_up` and `score` are those of the artifact in a fresh process, by its own scoring."""


class Allowance(Config):
    """Phases whose seconds are charged to one budget."""

    phases: tuple[Phase, ...]
    """Phases that are charged; a phase that a run does not have costs nothing."""
    seconds: Positive | None = None
    """Seconds that the phases may take in sum; none if the sum has no limit."""


class Policy(Config):
    """A named rule of which bytes and seconds count."""

    name: str
    """Short name."""
    why: str
    """Its purpose, in one sentence."""
    counts: tuple[Part, ...]
    """Parts whose bytes count; all others do not."""
    cap_bytes: Count | None = None
    """Bytes that the counted parts may have in sum; none if the sum has no limit."""
    training: Allowance
    """Phases charged to training, and their budget."""
    evaluation: Allowance
    """Phases charged to evaluation, and their budget; phases charged to neither are free."""
    hardware: str | None = None
    """Machine that the budgets are defined for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        phases = [*self.training.phases, *self.evaluation.phases]
        if len({*self.counts}) < len(self.counts) or len({*phases}) < len(phases):
            raise UserError(f"the policy {self.name} counts a part or a phase twice")
        if {"source", "source_needed"} <= {*self.counts}:
            raise UserError(f"the policy {self.name} counts the same code as source and as source_needed; take one")


_FILE: tuple[Part, ...] = ("weights", "tokenizer", "config", "manifest", "container")

CONTEST_2026 = Policy(
    name="contest-2026",
    why="Bytes of model and code; seconds to train, calibrate and score.",
    counts=("weights", "config", "manifest", "container", "source_needed", "source_training"),
    cap_bytes=16_000_000,
    training=Allowance(phases=("calibrate", "train"), seconds=600.0),
    evaluation=Allowance(phases=("score",), seconds=600.0),
    hardware="8xH100",
)

STRICT = Policy(
    name="strict",
    why="As contest-2026, and the tokenizer, warm-up, packing and loading.",
    counts=(*_FILE, "source_needed", "source_training"),
    cap_bytes=16_000_000,
    training=Allowance(phases=("train_warmup", "calibrate", "train", "pack"), seconds=600.0),
    evaluation=Allowance(phases=("load", "warm_up", "score"), seconds=600.0),
    hardware="8xH100",
)

HUTTER = Policy(
    name="hutter",
    why="All that restores the text: file, code that reads it, coded text.",
    counts=(*_FILE, "source_needed", "text"),
    training=Allowance(phases=STRICT.training.phases),
    evaluation=Allowance(phases=STRICT.evaluation.phases),
)

POLICIES = (CONTEST_2026, STRICT, HUTTER)
"""The policies that every run states its result under."""


def overrun_seconds(step_seconds: float) -> float:
    """Return the seconds that contest training may end late: two average steps, at most 1 s; 1 s if they are unknown.

    Training stops between steps, some scripts stop one step late, and the last steps are longer. No merged record was
    more than 0.137 s late.
    """
    return min(2 * step_seconds or 1.0, 1.0)


def apply_policies(result: Mapping[str, Any], policies: Sequence[Policy] = POLICIES) -> list[dict[str, Any]]:
    """Return the bytes and seconds of a run's result under each policy, as `result.json` keeps them.

    A figure that was not measured makes its sum and its verdict None. Seconds are those of the run's own machine,
    whatever machine a budget is defined for.
    """
    sizes = _sizes(result)
    # The run's phase of scoring scores every stage, so an evaluation has clocks of its own.
    unknown = dict.fromkeys(("load", "warm_up", "score"))
    seconds = {**result["seconds"], **unknown, **(result.get("evaluation") or {})}
    return [
        {
            "name": policy.name,
            "why": policy.why,
            "parts": (parts := {part: sizes[part] for part in policy.counts}),
            "bytes": (total := _sum(parts)),
            "cap_bytes": policy.cap_bytes,
            "under_cap": _within(total, policy.cap_bytes),
            "hardware": policy.hardware,
            "training": _clock(policy.training, seconds),
            "evaluation": _clock(policy.evaluation, seconds),
        }
        for policy in policies
    ]


@dataclass(frozen=True)
class FileCap:
    """The bytes that an artifact may have under the cap and the policy of its recipe."""

    cap_bytes: int
    """Cap on the sum of all counted bytes."""
    policy: str | None = None
    """Name of the policy; none if only the bytes of the file count."""
    code: Mapping[str, int] = field(default_factory=dict)
    """Bytes of code that count and are not in the file, by `Part`."""
    uncounted: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the parts of the file that do not count, by `Part`."""

    @property
    def file_bytes(self) -> int:
        """Bytes that the file may have."""
        return self.cap_bytes - sum(self.code.values()) + sum(self.uncounted.values())

    def __str__(self) -> str:
        """Return the ledger in one line."""
        uses = {"source_needed": "to score", "source_training": "to train"}
        code = " and ".join(f"{size:,} {uses[part]}" for part, size in self.code.items())
        left = f"{self.policy or 'cap'}: {self.cap_bytes:,} bytes" + (f", less code of {code}" if code else "")
        for part, size in self.uncounted.items():
            left += f", and {size:,} more for the {part}, which does not count"
        return f"{left}: {self.file_bytes:,} for the file"

    def to_json(self) -> dict[str, Any]:
        """Return the ledger as `result.json` keeps it."""
        return {
            "policy": self.policy,
            "bytes": self.cap_bytes,
            "code": dict(self.code),
            "uncounted": dict(self.uncounted),
        }


def file_cap(pack: Pack, code: Mapping[str, int | None], parts: Mapping[str, int] = MappingProxyType({})) -> FileCap:
    """Return the bytes that a file may have; `parts` holds the bytes of its parts (the weights' are not used).

    `code` holds the bytes of code that are not in the file, by `Part`. Raises `UserError` if they take the whole cap.
    """
    if pack.policy is None:
        return FileCap(pack.cap_bytes)
    counts: tuple[str, ...] = next(policy.counts for policy in POLICIES if policy.name == pack.policy)
    counted = {part: size for part, size in code.items() if part in counts and size is not None}
    uncounted = {part: size for part, size in parts.items() if part not in counts}
    found = FileCap(pack.cap_bytes, pack.policy, counted, uncounted)
    if sum(counted.values()) >= pack.cap_bytes:
        raise UserError(
            f"{pack.policy} counts {sum(counted.values()):,} bytes of code, which leaves nothing of "
            f"pack.cap_bytes={pack.cap_bytes} for the file; set a larger cap, or pack.policy=none"
        )
    return found


def counted_bytes(policy: Policy, ledger: Mapping[str, int]) -> int:
    """Return the bytes of a file that a policy counts, from the file's ledger."""
    return sum(size for part, size in ledger.items() if part in policy.counts)


def section_bytes(metadata: Metadata) -> dict[str, int]:
    """Return the bytes of the parts of a file besides its weights."""
    return {section.name: len(section.codec.encode(section.data)) for section in metadata.sections({})}


def code_bytes(source: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the bytes of code, by `Part`, from the source facts of `result.json`."""
    return {"source_needed": source.get("needed_bytes"), "source_training": source.get("training_bytes")}


def _sizes(result: Mapping[str, Any]) -> dict[str, int | None]:
    source = result.get("source") or {}
    bits, scored = result.get("bits_per_byte"), result["corpus"]["source_bytes"]["validation"]
    restored = result["corpus"].get("lossless") and bits is not None and math.isfinite(bits)
    return {
        "source": 0,
        **result["ledger"]["parts"],
        **code_bytes(source),
        "text": math.ceil(bits * scored / 8) if restored else None,  # a lossy tokenizer cannot restore it
        "decoders": _sum(source.get("decoders") or {"": None}),
    }


def _clock(allowance: Allowance, seconds: Mapping[str, float | None]) -> dict[str, Any]:
    phases = {phase: seconds[phase] for phase in allowance.phases if phase in seconds}
    total, budget = _sum(phases), allowance.seconds
    return {"phases": phases, "seconds": total, "budget_seconds": budget, "within": _within(total, budget)}


def _within(total: float | None, most: float | None) -> bool | None:
    return None if total is None or most is None else total <= most


def _sum(values: Mapping[Any, Any]) -> Any:
    return None if None in values.values() else sum(values.values())
