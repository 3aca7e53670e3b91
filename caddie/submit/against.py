"""The record that a submission is compared with: a recipe's published scores, or another submission's."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from statistics import fmean

from caddie.errors import UserError
from caddie.files import reason
from caddie.recipes.catalog import find
from caddie.report.read import pick, read_object
from caddie.submit.review_claims import read_claims
from caddie.submit.review_rules import Findings
from caddie.submit.review_runs import p_value
from caddie.submit.runs import Run

JSON = "submission.json"
_EARLIER = "earlier validation export"
"""Words in the note of a public result whose scores do not compare with those of today's set."""


@dataclass(frozen=True)
class Base:
    """The record that a submission is compared with, by the scores of its seeds."""

    name: str
    scores: list[float]
    difference: float
    """Bits per byte by which the mean of the runs is lower."""
    p: float | None
    """Welch's one-sided p, if there is one."""


def compare_with(against: str, runs: Sequence[Run]) -> Base:
    """Return the comparison with a recipe's published scores or another submission, on the same held-out text."""
    path = Path(against)
    if path.exists() or path.suffix == ".json":
        path = path / JSON if path.is_dir() else path
        name, scores, text, own = _submitted(path)
    else:
        recipe, text, own = find(against), None, False
        name = recipe.name
        public = [one for one in recipe.public if _EARLIER not in one.note]
        scores = [one.bits_per_byte for one in public if one.source == public[0].source]
    if not scores:
        raise UserError(f"{against} has no scores to compare with; name a recipe or a submission that has")
    ours = runs[0].result["sha256"]["validation_documents"]
    if text != ours and (text is not None or own or not runs[0].on_contest_text):
        raise UserError(f"the runs were scored on another text than {against}; their scores do not compare")
    bits = [run.result["bits_per_byte"] for run in runs]
    return Base(name, scores, fmean(scores) - fmean(bits), p_value(scores, bits))


def _submitted(path: Path) -> tuple[str, list[float], str | None, bool]:
    """Return what a `submission.json` states: name, scores of the seeds, hash of the held-out text if stated, a flag.

    The flag is True if the file says that the text is not the contest's.
    """
    try:
        known = json.loads(json.dumps(read_object(path)), parse_float=Decimal)  # numbers as `read_claims` takes them
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({reason(error)}); name a submission or its {JSON}") from None
    claims = read_claims(known, JSON, Findings())
    scores = [float(score) for score in claims.scores.values() or [claims.score] if score is not None]
    text, name = pick(known, "sha256", "validation_documents"), str(known.get("name") or path.parent.name)
    return name, scores, text if isinstance(text, str) else None, claims.own_set
