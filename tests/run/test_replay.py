"""Replays: a run done again is the same to the bit where that is promised; what differs is told, and why."""

import json
import math
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from caddie.config import plain
from caddie.report.read import final_score

Call = Callable[..., Any]
Edit = Callable[[Any], object]
LINE = import_module("caddie.run.run")


@pytest.fixture
def copy(tiny_run: Any, tmp_path: Path) -> Path:
    """A finished run that may be changed."""
    return Path(shutil.copytree(tiny_run.folder, tmp_path / "run"))


@pytest.fixture
def untrained(tiny_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay is a copy of the first run, at once."""

    def run(recipe: Any, source: Any, *, folder: Path, **given: Any) -> dict[str, Any]:
        shutil.copytree(tiny_run.folder, folder)
        return dict(tiny_run.printed)

    monkeypatch.setattr("caddie.run.replay.run", run)


def edit(path: Path, change: Edit) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def put(value: object, *path: str) -> Edit:
    def change(node: Any) -> None:
        for step in path[:-1]:
            node = node[step]
        node[path[-1]] = value

    return change


def move_weights(folder: Path) -> None:
    """Change one weight of a run by a little."""
    path = folder / "weights.safetensors"
    with safe_open(path, "pt") as file:
        notes, weights = file.metadata(), {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    weights[min(weights)].view(-1)[0] += 1e-3
    save_file(weights, path, notes)


@pytest.mark.usefixtures("one_process", "alive_once", "unprobed")
def test_a_replay_is_the_same_to_the_bit(copy: Path, caddie: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copy.parent)
    ended = caddie("replay", "run", "--json", "--quiet")
    facts = json.loads(ended.out)
    assert (ended.status, facts["replay"]) == (0, str(copy.parent / "run-replay"))
    assert facts["identity_promised"]
    assert facts["identical"]
    assert facts["differs"] == facts["causes"] == []
    assert facts["loss"] == {
        "steps_compared": 2,
        "first_difference": None,
        "largest_difference": 0.0,
        "largest_at": 1,
    }
    for name in ("weights_sha256", "artifact_sha256", "artifact_bytes", "steps"):
        assert facts[name]["run"] == facts[name]["replay"]
    again = json.loads((copy.parent / "run-replay" / "result.json").read_text())
    assert again["sha256"] == json.loads((copy / "result.json").read_text())["sha256"]
    assert again["command"].endswith("replay run --json --quiet")
    ended = caddie("replay", "run")
    assert (ended.status, "run-replay holds a finished run; name another" in ended.err) == (2, True)


@pytest.mark.usefixtures("untrained")
def test_weights_and_losses_that_differ_break_the_promise(copy: Path, caddie: Call, tmp_path: Path) -> None:
    move_weights(copy)
    lines = [json.loads(line) for line in (copy / "log.jsonl").read_text().splitlines()]
    for event in lines:
        if event["event"] == "step" and event["step"] == 2:
            event["loss"] += 0.25
    (copy / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    ended = caddie("replay", copy, "--out", tmp_path / "again", "--quiet")
    assert ended.status == 1
    assert ended.err == f"caddie: the replay in {tmp_path / 'again'} differs where it must not: weights, loss\n"
    assert "Loss of 2 logged steps: differs from step 2 on, by 0.25 at most." in ended.out
    rows = {line.split("  ")[0]: line for line in ended.out.splitlines()}
    assert rows["weights, SHA-256"].endswith("differ")
    assert rows["artifact, SHA-256"].endswith("same")


@pytest.mark.usefixtures("untrained")
def test_a_score_within_rounding_is_the_same(copy: Path, caddie: Call, tmp_path: Path) -> None:
    result = json.loads((copy / "result.json").read_text())
    kind, final = final_score(result)
    for more, status in ((1e-9, 0), (1e-4, 1)):
        score = result["bits_per_byte"] + more
        edit(copy / "result.json", put(score, "bits_per_byte"))
        nats = score * math.log(2) * final["source_bytes"]
        edit(copy / "result.json", put(nats, "scores", f"quantized_{kind}", "nats"))
        ended = caddie("replay", copy, "--out", tmp_path / f"{status}", "--json", "--quiet")
        facts = json.loads(ended.out)
        assert (ended.status, facts["differs"]) == (status, ["score"] if status else [])
        assert facts["bits_per_byte"]["difference"] == pytest.approx(-more, rel=1e-3)


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize(
    ("file", "change", "why"),
    [
        ("recipe.json", put(60.0, "recipe", "train", "seconds"), "a budget of 60 seconds ends where the clock does"),
        ("result.json", put("NVIDIA H100", "device"), "a GPU adds in no fixed order"),
        ("result.json", put("1.0", "versions", "torch"), "the replay differs from the run in: torch"),
        ("result.json", put("0" * 64, "source", "program_sha256"), "the replay differs from the run in: program"),
        ("result.json", put(["train.steps=1"], "training", "earlier_budgets"), "the run was begun with train.steps=1"),
        ("result.json", put(None, "processor"), "the replay differs from the run in: processor"),
    ],
)
def test_what_differs_without_a_promise_is_no_failure(
    file: str, change: Edit, why: str, copy: Path, caddie: Call, tmp_path: Path
) -> None:
    edit(copy / file, change)
    move_weights(copy)
    told = caddie("replay", copy, "--out", tmp_path / "b", "--quiet")
    assert told.status == 0
    assert f"Identity was not promised: {why}" in " ".join(told.out.split())
    if "torch" in why:
        assert f"  torch: 1.0 -> {torch.__version__}" in told.out.splitlines()
    shutil.rmtree(tmp_path / "b")
    facts = json.loads(caddie("replay", copy, "--out", tmp_path / "b", "--json", "--quiet").out)
    assert (facts["identical"], facts["differs"]) == (False, ["weights"])
    assert facts["why_not_promised"].startswith(why)


@pytest.mark.usefixtures("untrained")
def test_weights_that_were_removed_are_not_compared(copy: Path, caddie: Call, tmp_path: Path) -> None:
    (copy / "weights.safetensors").unlink()
    (copy / "log.jsonl").unlink()
    ended = caddie("replay", copy, "--out", tmp_path / "again", "--quiet")
    assert ended.status == 0
    assert ended.out.count("not kept by the run") == 2


@pytest.mark.usefixtures("untrained")
def test_the_text_may_lie_elsewhere_but_is_the_same(
    tiny_run: Any, copy: Path, caddie: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy.parent)
    edit(copy / "recipe.json", put("gone", "corpus"))
    ended = caddie("replay", "run", "--quiet")
    assert (ended.status, ended.err.count("\n")) == (2, 1)
    assert "the corpus of run is no longer in gone; name it, or its text, with --data" in ended.err
    for number, data in enumerate((tiny_run.text, tiny_run.corpus)):
        assert caddie("replay", "run", "--data", data, "--out", f"again{number}", "--quiet").status == 0
    Path("other.txt").write_text(tiny_run.text.read_text().replace("a", "b"))
    ended = caddie("replay", "run", "--data", "other.txt", "--out", "other", "--quiet")
    assert (ended.status, ended.err.count("\n")) == (2, 1)
    assert "is not the text of run: the SHA-256 of its training documents is " in ended.err
    assert not Path("other").exists()


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize(
    ("change", "given", "says"),
    [
        (lambda run: shutil.rmtree(run), [], "no folder run; name that of a finished run"),
        (lambda run: (run / "result.json").unlink(), [], "run is not finished: it has no result.json"),
        (lambda run: (run / "recipe.json").unlink(), [], "no file run/recipe.json"),
        (lambda run: (run / "recipe.json").write_text("[" * 10**5), [], "run/recipe.json is not JSON: nested too deep"),
        (lambda run: edit(run / "recipe.json", put("x", "seed")), [], "run/recipe.json: seed must be a whole number"),
        (lambda run: edit(run / "recipe.json", put(9, "recipe", "model", "dept")), [], "did you mean depth?"),
        (lambda run: edit(run / "recipe.json", put("../x", "recipe", "name")), [], "a short word without slashes"),
        (lambda run: edit(run / "result.json", put("2", "world")), [], "run/result.json: world must be a whole"),
        (lambda run: edit(run / "result.json", put({}, "training")), [], "run/result.json: training.steps must be"),
        (lambda run: edit(run / "result.json", put({}, "sha256")), [], "is not the text of run"),
        (lambda run: edit(run / "result.json", put(None, "bits_per_byte")), [], "holds no score"),
        (lambda run: (run / "weights.safetensors").write_bytes(b"0" * 99), [], "run/weights.safetensors cannot be"),
        (lambda run: None, ["--out", "run"], "run is in the folder of the run itself"),
        (lambda run: None, ["--out", "run/again"], "run/again is in the folder of the run itself"),
        (lambda run: None, ["--data", "nothing"], "nothing"),
    ],
)
def test_what_cannot_be_replayed_is_told_in_a_line(
    change: Any, given: list[str], says: str, copy: Path, caddie: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy.parent)
    change(Path("run"))
    ended = caddie("replay", "run", *given, "--quiet")
    assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert says in ended.err
    assert not Path("run-replay").exists()


def test_a_run_begins_as_another_did(
    tiny_run: Any, copy: Path, caddie: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[Any, ...]] = []

    def run(recipe: Any, source: Any, *, seed: int, **given: Any) -> None:
        begun.append((plain(recipe), source, seed))

    monkeypatch.setattr(LINE, "run", run)
    edit(copy / "recipe.json", put(7, "seed"))
    held = json.loads((copy / "recipe.json").read_text())["recipe"]
    for name in (copy, copy / "recipe.json"):
        assert caddie("run", name, "--out", tmp_path / "new").status == 0
    assert caddie("run", copy, "--seed", 1337, "--data", "text", "--out", tmp_path / "new").status == 0
    corpus = str(tiny_run.corpus)
    assert begun == [(held, corpus, 7), (held, corpus, 7), (held, "text", 1337)]
