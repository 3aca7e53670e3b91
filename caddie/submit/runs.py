"""Finished runs for a submission, and what each track refuses."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caddie.data.corpus import Corpus
from caddie.data.manifest import MANIFEST
from caddie.errors import UserError
from caddie.files import file_sha256
from caddie.pack.source_bundle import describe_source
from caddie.recipes.recipe import Recipe
from caddie.report.read import final_score, pick, read_steps, result_errors
from caddie.report.run_files import ARTIFACT, LOG, PARTS, RECIPE, RESULT
from caddie.run.contest_sets import CURRENT
from caddie.run.policy import CONTEST_2026, counted_bytes, overrun_seconds
from caddie.run.run_folder import read_finished

RECORD, NON_RECORD = "10min_16mb", "non-record-unlimited-compute-16mb"
"""Tracks: with limits of time on the contest's machine, and without."""


@dataclass(frozen=True)
class Run:
    """A finished run that may be submitted."""

    folder: Path
    seed: int
    result: dict[str, Any]
    recipe: Recipe
    corpus: Corpus | None
    """None if it is gone or has changed since."""
    steps: list[dict[str, Any]]

    @property
    def score(self) -> dict[str, Any]:
        """The last score of the file, which is the run's."""
        return final_score(self.result)[1]

    @property
    def counted_bytes(self) -> int:
        """Bytes of the file that the contest counts: without the tokenizer."""
        return counted_bytes(CONTEST_2026, self.result["ledger"]["parts"])

    @property
    def contest_seconds(self) -> dict[str, float | None]:
        """Seconds of `training` and `evaluation` as the contest counts them, on the run's machine."""
        policy = next(one for one in self.result["policies"] if one["name"] == CONTEST_2026.name)
        return {clock: policy[clock]["seconds"] for clock in ("training", "evaluation")}

    def over_time(self, clock: str) -> str:
        """Return how the run exceeds the contest's time limit, or that it was not timed; empty if it is within it."""
        most = getattr(CONTEST_2026, clock).seconds
        late = overrun_seconds(self.result["seconds"]["train"] / self.result["training"]["steps"])
        if (seconds := self.contest_seconds[clock]) is None:
            return "was not timed"
        return f"took {seconds:,.1f} s of {most:,.0f}" if seconds > most + late * (clock == "training") else ""

    @property
    def on_contest_machine(self) -> bool:
        """True if it was made on eight H100."""
        return bool(self.result["world"] == 8 and "H100" in self.result["device"])

    @property
    def on_contest_text(self) -> bool:
        """True if it was scored on the contest's validation set, by its totals."""
        corpus = self.result["corpus"]
        return CURRENT.fits(corpus["source_bytes"]["validation"], corpus["documents"]["validation"])


def read_submitted(place: Path) -> Run:
    """Return the run in a folder; `UserError` unless its recipe and artifact are those of its result."""
    folder = place if place.is_dir() else place.parent
    path = folder / RESULT
    with result_errors(path, "a submission"):
        result, about = read_finished(folder)
        if pick(about, PARTS):
            raise UserError(f"{folder}: its recipe has classes in a user's file, which the script does not hold")
        if not (isinstance(result["device"], str) and isinstance(result["world"], int) and result["world"] > 0):
            raise TypeError("device must be text and world a number above 0")
        recipe = Recipe.from_json(about["recipe"])
        if recipe.sha256 != result["sha256"]["recipe"]:
            raise UserError(f"{folder / RECIPE} is not the recipe of {path}; run the recipe again")
        if not (steps := read_steps(folder / LOG)):
            raise UserError(f"{folder / LOG} holds no steps; run the recipe again")
        corpus = _corpus(about.get("corpus"), result["sha256"]["corpus"])
        return Run(folder, int(result["seed"]), result, recipe, corpus, steps)


def _corpus(place: object, sha256: str) -> Corpus | None:
    with suppress(OSError, ValueError, UserError):
        folder = Path(str(place))
        if file_sha256(folder / MANIFEST) == sha256:
            return Corpus.load(folder)
    return None


def check_run(run: Run, track: str, code_bytes: int) -> None:
    """Raise `UserError` if a run may not be submitted to the track with a script of `code_bytes`."""
    result, folder, cap = run.result, run.folder, CONTEST_2026.cap_bytes or 0
    if result["verified"] is False or not result["under_cap"]:
        raise UserError(f"{folder} did not pass verification; caddie verify {folder / ARTIFACT} says why")
    if run.recipe.pack.carry_source:
        raise UserError(f"{folder}: its file carries its source, as the script does; set pack.carry_source=false")
    source = describe_source(run.recipe.to_json())
    counted = result["source"]["needed_bytes"] + result["source"]["training_bytes"]
    if result["source"].get("script_sha256") != source["script_sha256"] or counted != code_bytes:
        made = f" (commit {result['code'][:12]})" if result.get("code") else ""
        raise UserError(
            f"{folder} was run by another version of caddie{made}; submit with that version, or run the recipe again"
        )
    if (total := run.counted_bytes + code_bytes) > cap:
        raise UserError(f"{folder}: file and script have {total:,} bytes, {total - cap:,} over {cap:,}; lower cap=N")
    if track == NON_RECORD:
        return
    for clock in run.contest_seconds:
        if over := run.over_time(clock):
            raise UserError(f"{folder}: {clock} {over}; --non-record has no limit of time")
    if not run.on_contest_text:
        raise UserError(f"{folder} was scored on another text than {CURRENT.name}; --non-record takes any")
