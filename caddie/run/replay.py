"""Run a finished run again from its `recipe.json`, and say how far the two are alike."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from caddie.config import Count, coerce
from caddie.data.corpus import is_corpus
from caddie.errors import UserError
from caddie.recipes.recipe_file import RunStart, read_start
from caddie.report.read import known_number, pick, read_scored_result, read_steps
from caddie.report.run_files import LOG, RESULT, WEIGHTS
from caddie.report.tables import printable, table
from caddie.run.resolve_corpus import open_corpus
from caddie.run.run import run
from caddie.run.run_folder import check_text
from caddie.runtime.distributed import Ranks
from caddie.runtime.progress import SILENT, Progress

SAME_SCORE = 1e-6
"""Difference in bits per byte up to which two scores of a file are the same: timing chooses the thread count."""

_CAUSES = {
    "recipe": ("sha256", "recipe"),
    "text": ("sha256", "corpus"),
    "program": ("source", "program_sha256"),
    **{library: ("versions", library) for library in ("python", "caddie", "torch", "numpy")},
    "device": ("device",),
    "processor": ("processor",),
    "precision": ("precision",),
    "processes": ("world",),
}
"""Conditions besides the seed that change the last digits of a run, and their places in `result.json`."""
_COUNTS = (("world",), ("training", "steps"), ("artifact_bytes",))


@dataclass(frozen=True)
class FinishedRun:
    """A run that can be done again."""

    folder: Path
    start: RunStart
    result: Mapping[str, Any]

    def count(self, *path: str) -> int:
        """Return the count at `path` in the result; `UserError` if the value there is no count."""
        return int(coerce(pick(self.result, *path), Count, f"{self.folder / RESULT}: {'.'.join(path)}"))


def read_run_to_replay(folder: Path, parts: Sequence[Path] = ()) -> FinishedRun:
    """Return the finished run in a folder; `UserError` if there is none. `parts` are the users' files that it needs."""
    if not folder.is_dir():
        raise UserError(f"no folder {folder}; name that of a finished run")
    start = read_start(folder, parts)
    if not (folder / RESULT).is_file():
        raise UserError(f"{folder} is not finished: it has no {RESULT}; the command that began it completes it")
    found = FinishedRun(folder, start, read_scored_result(folder / RESULT))
    for path in _COUNTS:
        found.count(*path)
    _weights_sha256(folder / WEIGHTS)  # a damaged file is an error before hours of training, not after
    return found


def replay_folder(folder: Path, out: Path | None) -> Path:
    """Return the folder of a replay: `out`, or RUN-replay beside the run; `UserError` if it is inside the run."""
    place = folder.resolve()
    chosen = out or place.with_name(f"{place.name}-replay")
    if chosen.resolve().is_relative_to(place):
        raise UserError(f"{chosen} is in the folder of the run itself; name another folder with --out")
    return chosen


def replay(
    first: FinishedRun,
    out: Path,
    data: str | None = None,
    ranks: Ranks = Ranks(),
    progress: Progress = SILENT,
    command: str = "",
) -> dict[str, Any] | None:
    """Repeat a run in the folder `out`, and return the comparison of the two, or None on all but rank 0.

    The text is read where the run found it, or from `data`. Raises `UserError` if its hashes are not those of the run.
    """
    recipe, seed, found = first.start.recipe, first.start.seed, first.start.corpus
    if data is None and not is_corpus(found):
        raise UserError(f"the corpus of {first.folder} is no longer in {found}; name it, or its text, with --data")
    corpus = open_corpus(recipe, data or found, progress, ranks=ranks)
    check_text(first.folder, first.result, corpus)
    result = run(recipe, corpus.folder, seed=seed, folder=out, ranks=ranks, progress=progress, command=command)
    return None if result is None else compare(first, FinishedRun(out, first.start, result))


def compare(first: FinishedRun, second: FinishedRun) -> dict[str, Any]:
    """Return how far two runs of one recipe and seed are identical, and whether they had to be.

    A run on a CPU with a budget in steps repeats to the bit if all of `_CAUSES` are the same. No other run promises to.
    """
    sides = {"run": first, "replay": second}
    weights = {side: _weights_sha256(one.folder / WEIGHTS) for side, one in sides.items()}
    artifacts = {side: pick(one.result, "sha256", "artifact") for side, one in sides.items()}
    scores = {side: float(one.result["bits_per_byte"]) for side, one in sides.items()}
    causes = [
        {"what": what, **found}
        for what, path in _CAUSES.items()
        if (found := {side: pick(one.result, *path) for side, one in sides.items()})["run"] != found["replay"]
        or found["run"] is None
    ]
    train = first.start.recipe.train
    if train.seconds is not None:
        promise = f"a budget of {train.seconds:g} seconds ends where the clock does, so only means over seeds are alike"
    elif not str(first.result.get("device")).startswith("cpu"):
        promise = "a GPU adds in no fixed order"
    elif earlier := pick(first.result, "training", "earlier_budgets"):
        promise = f"the run was begun with {' and then '.join(map(str, earlier))}"
    elif causes:
        promise = f"the replay differs from the run in: {', '.join(cause['what'] for cause in causes)}"
    else:
        promise = None
    loss, difference = _compare_losses(first.folder / LOG, second.folder / LOG), scores["replay"] - scores["run"]
    alike = {
        "weights": weights["run"] == weights["replay"] or weights["run"] is None,
        "loss": not loss["first_difference"],
        "artifact": artifacts["run"] == artifacts["replay"],
        "score": abs(difference) <= SAME_SCORE,
    }
    differs = [name for name, same in alike.items() if not same]
    return {
        "run": str(first.folder),
        "replay": str(second.folder),
        "identical": not differs,
        "differs": differs,
        "identity_promised": promise is None,
        "why_not_promised": promise,
        "weights_sha256": weights,
        "loss": loss,
        "bits_per_byte": {**scores, "difference": difference},
        "steps": {side: one.count("training", "steps") for side, one in sides.items()},
        "artifact_bytes": {side: one.count("artifact_bytes") for side, one in sides.items()},
        "artifact_sha256": artifacts,
        "causes": causes,
    }


def _weights_sha256(path: Path) -> str | None:
    """Return a hash of the weights in a file, without its metadata, whose order is random; None without a file."""
    if not path.is_file():
        return None
    digest = hashlib.sha256()
    try:
        with safe_open(path, "pt") as file:
            for name in sorted(file.keys()):
                weight = file.get_tensor(name)
                digest.update(f"{name} {weight.dtype} {[*weight.shape]}\n".encode())
                digest.update(weight.reshape(-1).view(torch.uint8).numpy())
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}); remove it to compare the rest") from None
    return digest.hexdigest()


def _compare_losses(first: Path, second: Path) -> dict[str, Any]:
    """Compare losses at the steps in both logs; a log keeps the first ten steps, then at most one a second."""
    curves = [
        {
            event["step"]: loss
            for event in (read_steps(log) if log.is_file() else ())
            if (loss := known_number(event.get("loss"))) is not None
        }
        for log in (first, second)
    ]
    common = sorted(curves[0].keys() & curves[1].keys())
    gaps = {step: abs(curves[1][step] - curves[0][step]) for step in common}
    return {
        "steps_compared": len(common),
        "first_difference": next((step for step in common if gaps[step]), None),
        "largest_difference": max(gaps.values(), default=None),
        "largest_at": max(gaps, key=gaps.__getitem__, default=None),
    }


def summary(facts: Mapping[str, Any]) -> str:
    """Return the comparison as lines for a terminal."""
    loss, bits = facts["loss"], facts["bits_per_byte"]
    rows = []
    for name, key in (("weights, SHA-256", "weights_sha256"), ("artifact, SHA-256", "artifact_sha256")):
        both = facts[key]
        equal = "not kept by the run" if both["run"] is None else "same" if both["run"] == both["replay"] else "differ"
        rows.append((name, *(_short(both[side])[:12] for side in ("run", "replay")), equal))
    for name, key in (("artifact bytes", "artifact_bytes"), ("steps", "steps")):
        both = facts[key]
        rows.append((name, f"{both['run']:,}", f"{both['replay']:,}", f"{both['replay'] - both['run']:+,}"))
    rows.append(("bits per byte", f"{bits['run']:.6f}", f"{bits['replay']:.6f}", f"{bits['difference']:+.2g}"))
    if loss["first_difference"]:
        curve = f"differs from step {loss['first_difference']:,} on, by {loss['largest_difference']:.2g} at most"
    else:
        curve = "the same" if loss["steps_compared"] else "not kept by the run"
    lines = [table(rows, ["", "run", "replay", "difference"]), ""]
    lines.append(f"Loss of {loss['steps_compared']:,} logged steps: {curve}.")
    if facts["identical"]:
        lines.append("The replay is identical" + (", as it had to be." if facts["identity_promised"] else "."))
    if facts["why_not_promised"]:
        lines.append(f"Identity was not promised: {facts['why_not_promised']}.")
    for cause in facts["causes"]:
        lines.append(f"  {cause['what']}: {_short(cause['run'])} -> {_short(cause['replay'])}")
    return "\n".join(lines)


def _short(value: object) -> str:
    return "not stated" if value is None else printable(str(value)[:60])
