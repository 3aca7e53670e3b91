"""Results that were edited: what the run's own files and a new scoring say against them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import fresh, probe_nothing

from caddie.errors import UserError
from caddie.pack.artifact import load
from caddie.run.policy import apply_policies
from caddie.run.run import score_in_new_process
from caddie.submit import recheck
from caddie.submit import runs as submitted
from caddie.submit import submit as module
from caddie.submit.recheck import check_result, score_again
from caddie.submit.runs import read_submitted
from caddie.submit.submit import submit
from caddie.verify import Verdict
from caddie.verify.probes import Check

Result = dict[str, Any]


@pytest.fixture
def run(tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder that can be submitted; the script is of the right length, and is nothing else."""
    source = tiny_run.printed["source"]
    monkeypatch.setattr(module, "script", lambda recipe: b"#" * (source["needed_bytes"] + source["training_bytes"]))
    monkeypatch.setattr(submitted, "describe_source", lambda recipe: source)
    monkeypatch.setattr(module, "source_needed", lambda roots: SimpleNamespace(libraries=("numpy", "torch")))
    monkeypatch.setattr(recheck, "score_in_new_process", fresh)
    probe_nothing(monkeypatch)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_run.folder, "run")
    return Path("run")


def edit(folder: Path, change: Callable[[Result], object]) -> Result:
    """Change a run's result as its owner could, with an editor."""
    result = dict(json.loads((folder / "result.json").read_text()))
    change(result)
    (folder / "result.json").write_text(json.dumps(result))
    return result


def scale(result: Result, by: float) -> None:
    """Lower every score of the artifact, and all that follows from it."""
    for name, score in result["scores"].items():
        if score and name.startswith("quantized"):
            score |= {field: score[field] * by for field in score if field.startswith(("bits", "nats"))}
    result["bits_per_byte"] *= by
    result["policies"] = apply_policies(result)


def put(**fields: Any) -> Callable[[Result], None]:
    """Write values at the places named, with __ between the names of a place."""

    def change(result: Result) -> None:
        for place, value in fields.items():
            *parents, last = place.split("__")
            held: Any = result
            for name in parents:
                held = held[int(name) if name.isdigit() else name]
            held[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put(artifact_bytes=1), "states artifact_bytes as 1; by artifact.caddie it is "),
        (put(ledger__parts__weights=1), "states ledger.parts.weights as 1; by artifact.caddie it is "),
        (put(ledger__parts__source_needed=-900), "states ledger.parts.source_needed as -900; by"),
        (put(under_cap=True, cap_bytes=100), "states under_cap as true; by artifact.caddie it is false"),
        (lambda result: result["policies"].append(result["policies"][0]), "states the length of policies as 4; by"),
        (put(seed=7), "states seed as 7; by artifact.caddie it is 1337"),
        (put(training__parameters=1), "states training.parameters as 1; by artifact.caddie it is 7845"),
        (put(sha256__tokenizer="0"), "states sha256.tokenizer as 0; by artifact.caddie it is "),
        (put(sha256__train_documents="0"), "states sha256.train_documents as 0; by artifact.caddie it is "),
        (put(why="Best."), "states why as Best.; by recipe.json it is "),
        (put(training__steps=9), "states training.steps as 9; by log.jsonl it is 2"),
        (put(seconds__train=9.5), "states seconds.train as 9.5; by log.jsonl it is 0."),
        (put(bits_per_byte=1.0), "states 1.0000 bits per byte, and its sums come to 5.3"),
        (put(scores__quantized_sliding__bits_per_byte=1.0), "states scores.quantized_sliding.bits_per_byte as 1.0"),
        (put(scores__trained_plain__nats_per_token=1.0), "states scores.trained_plain.nats_per_token as 1.0; by"),
        (put(checks__0__passed=False), "states verified as true; by its other fields it is false"),
        (put(checks__0__passed=None), "states verified as true; by its other fields it is none"),
        (put(policies__0__training__seconds=1.0), "states policies.0.training.seconds as 1.0; by its other"),
        (put(corpus__tokens__validation=1), "states corpus.tokens.validation as 1; by its text it is 16415"),
        (put(sha256__validation_documents="0"), "states sha256.validation_documents as 0; by its text it is "),
        (lambda result: scale(result, 0.9), "; by a new scoring it is 5.3"),
        (lambda result: scale(result, 0.9999), "; by a new scoring it is 5.3"),
        (put(device=5), "lacks what a submission needs (TypeError: device must be text and world a number above 0)"),
        (put(world="8"), "lacks what a submission needs (TypeError: device must be text and world a number above 0)"),
        (put(world=0), "lacks what a submission needs (TypeError: device must be text and world a number above 0)"),
        (put(scores__quantized_adaptive={"tokens": 1, "bits_per_byte": 1.0}), "lacks what a score needs"),
    ],
)  # fmt: skip
def test_an_edited_result_is_refused_in_one_line(
    change: Callable[[Result], object], said: str, run: Path, caddie: Callable[..., Any]
) -> None:
    edit(run, change)
    ended = caddie("submit", run, "--out", "out", "--author", "Ada", "--github-id", "ada", "--quiet")
    assert (ended.status, ended.err.count("\n")) == (2, 1), ended.err
    assert said in ended.err
    assert not Path("out").exists()


def test_a_score_that_the_artifact_has_not_is_refused(run: Path) -> None:
    def adapt(result: Result) -> None:
        score = result["scores"]["quantized_sliding"]
        result["scores"]["quantized_adaptive"] = {**score, "ttt": "ChunkSGD"}

    edit(run, adapt)
    with pytest.raises(UserError, match=r"states scores.quantized_adaptive as .*; by a new scoring it is none"):
        submit([run], Path("out"), author="Ada", github_id="ada")


def test_an_honest_run_is_scored_again_and_the_readme_says_how_far_off_that_was(
    run: Path, caddie: Callable[..., Any]
) -> None:
    ended = caddie("submit", run, "--out", "out", "--author", "Ada", "--github-id", "ada")
    assert ended.status == 0, ended.err
    assert "scoring run/artifact.caddie again" in ended.err
    assert "verifying run/artifact.caddie again" in ended.err
    track, lacking = ended.out.splitlines()[-2:]
    assert track == "track non-record-unlimited-compute-16mb, because it was not run on eight H100"
    assert lacking == "for a record it lacks: three seeds, a score on the contest's validation set"
    page = Path("out/README.md").read_text()
    assert "- Scored again from the artifact, in a new process: seeds 1337, at most " in page
    assert "Not scored again" not in page
    assert json.loads(Path("out/submission.json").read_text())["compliance"]["scored_again"] is True


def test_what_fails_a_new_verification_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's list of checks may have been edited."""
    failed = Verdict(checks=(Check("file is intact", True, ""), Check("no look-ahead", False, "it looked")))
    monkeypatch.setattr(recheck, "verify", lambda *given, **named: failed)
    with pytest.raises(UserError, match="run does not pass verification: no look-ahead: it looked"):
        submit([run], Path("out"), author="Ada", github_id="ada")
    assert not Path("out").exists()


def test_rounding_is_no_disagreement(run: Path) -> None:
    edit(run, lambda result: scale(result, 1 - 1e-6))
    assert score_again(read_submitted(run)) == pytest.approx(5.3e-6, rel=0.1)


@pytest.mark.parametrize("lacks", ["text", "gpu"])
def test_what_cannot_be_scored_again_is_submitted_and_says_so(lacks: str, run: Path) -> None:
    about = json.loads((run / "recipe.json").read_text())
    if lacks == "text":
        (run / "recipe.json").write_text(json.dumps(about | {"corpus": "gone"}))
    else:
        edit(run, put(device="NVIDIA H100 80GB HBM3"))
    facts = submit([run], Path("out"), author="Ada", github_id="ada")
    assert facts["compliance"]["scored_again"] is False
    page = Path("out/README.md").read_text()
    assert "- Not scored again: seeds 1337, for want of the held-out text or a GPU." in page


@pytest.mark.slow
def test_the_new_scoring_is_by_a_process_of_its_own(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recheck, "score_in_new_process", score_in_new_process)
    one = read_submitted(run)
    check_result(one, load(run / "artifact.caddie"))
    off = score_again(one)
    assert off is not None
    assert off < 1e-6
