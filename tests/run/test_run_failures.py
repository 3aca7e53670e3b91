"""A run that fails writes why, and one that begins again forgets it."""

import json
import re
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from caddie.errors import UserError
from caddie.model import RandomMap
from caddie.model.parameters import FanInNormal
from caddie.pack.coding import Smallest
from caddie.pack.compress import Correction
from caddie.pack.quantize import BestPercentile, Protection
from caddie.recipes.catalog import find
from caddie.run import run_folder
from caddie.run.run import check_recipe
from caddie.run.run_lock import locked
from caddie.train.loop import Interrupted

line = import_module("caddie.run.run")


@pytest.mark.long
@pytest.mark.usefixtures("alive_once", "unprobed", "one_process")
@pytest.mark.parametrize(
    ("at", "phase"),
    [("open_corpus", "prepare"), ("train_recipe", "train"), ("calibrate_recipe", "calibrate"), ("pack", None)],
)
def test_the_reason_phase_and_time_of_a_failure_are_written(
    at: str,
    phase: str | None,
    tiny_run: Any,
    caddie: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*given: Any, **named: Any) -> None:
        raise MemoryError("no more")

    folder = tmp_path / "out"
    arguments = ("run", "tiny", *tiny_run.settings, "--data", tiny_run.corpus, "--out", folder, "--quiet")
    with monkeypatch.context() as patch:
        patch.setattr(line, at, fail)
        assert caddie(*arguments).status == 2
    told = json.loads((folder / "error.json").read_text())
    assert told["state"] == "failed"
    assert told["error"].startswith(f"not enough memory in the phase {told['phase']}")
    assert told["phase"] == phase or (phase is None and told["phase"] in ("pack", "compress"))
    assert told["seconds"] >= 0
    assert told["when"].startswith("20")
    assert {path.name[0] for path in folder.iterdir()}.isdisjoint("."), "neither lock nor unfinished files are left"
    if phase is None:
        assert caddie(*arguments).status == 0
        assert not (folder / "error.json").exists()


@pytest.mark.usefixtures("alive_once", "unprobed", "one_process")
@pytest.mark.parametrize("verb", ["run", "train"])
def test_a_command_that_is_refused_leaves_no_folder(
    verb: str, tiny_run: Any, caddie: Callable[..., Any], tmp_path: Path
) -> None:
    folder, text = tmp_path / "runs" / "out", tmp_path / "text.txt"
    text.write_text("one document alone")
    arguments = (verb, "tiny", *tiny_run.settings, "--data", text, "--out", folder, "--quiet")
    ended = caddie(*arguments)
    assert (ended.status, "two or more are needed" in ended.err) == (2, True)
    assert not folder.parent.exists()
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text("{}")  # of a run that had begun
    assert caddie(*arguments).status == 2
    assert [path.name for path in folder.iterdir()] == ["recipe.json"], "that run stays as it was"
    (folder / "error.json").write_text('{"state": "failed"}')
    assert caddie(*arguments).status == 2
    assert (folder / "error.json").read_text() == '{"state": "failed"}'


@pytest.mark.parametrize("verb", ["run", "train"])
def test_a_cap_below_tokenizer_and_settings_is_refused_before_training(
    verb: str, tiny_run: Any, caddie: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    ended = caddie(verb, "tiny", *tiny_run.settings, "cap=10", "--data", tiny_run.corpus, "--out", folder, "--quiet")
    assert ended.status == 2
    assert re.fullmatch(
        r"caddie: tokenizer and settings alone take [\d,]+ of the 10 bytes that the file may have; give a larger cap, "
        r"as cap=1000000\n",
        ended.err,
    )
    assert not folder.exists()


@pytest.mark.parametrize("verb", ["run", "train"])
def test_a_fit_without_steps_is_refused_before_training(
    verb: str, tiny_run: Any, caddie: Callable[..., Any], tmp_path: Path
) -> None:
    rows = [f"pack.quantizers.{role}=Rows(bits=6)" for role in ("embedding", "matrix", "head")]
    folder, settings = tmp_path / "out", [one for one in tiny_run.settings if one != "pack.fit=none"]
    ended = caddie(verb, "tiny", *settings, *rows, "--data", tiny_run.corpus, "--out", folder, "--quiet")
    assert ended.status == 2
    assert "none of pack.quantizers has steps to choose" in ended.err
    assert not folder.exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pack.protection": Protection()}, "none of pack.quantizers is Gptq of fewer than 8 bits, not packed"),
        ({"pack.correction": Correction(pattern="blocks.99.*")}, "no matrix has a name like blocks.99.*"),
        (
            {"pack.cap_bytes": 1_000, "model.block.mlp.hidden": 1 << 15},
            "a file of 1,000 bytes may hold 67,108,864 parameters, and the model has 309,612,616; make it smaller",
        ),
        (
            {"score.sequence_length": 1 << 20, "score.stride": 1 << 20},
            "are too long for a vocabulary of 1,024: score.sequence_length may be 262,144 at most",
        ),
        (
            {"model.block.mlp.linear": RandomMap(rank=4, initial=FanInNormal()), "model.block.mlp.hidden": 1 << 15},
            "random constants, over the limit of 67,108,864, or more than 8,388,608 in one matrix",
        ),
    ],
    ids=["nothing to protect", "nothing to correct", "small file", "windows", "constants"],
)
def test_what_packing_or_its_reader_would_refuse_is_refused_before_training(
    settings: dict[str, Any], message: str
) -> None:
    check_recipe(find("baseline"))
    with pytest.raises(UserError, match=re.escape(message)):
        check_recipe(find("baseline").but(settings))


@pytest.mark.parametrize(
    ("make", "message"),
    [(lambda: Smallest(of=()), "no codec to try"), (lambda: BestPercentile(fractions=()), "no quantile to try")],
)
def test_a_choice_among_nothing_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def test_a_second_run_is_refused_by_one_line_and_changes_nothing(
    tiny_run: Any, caddie: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    with locked(folder):
        before = {path.name for path in folder.iterdir()}
        for verb in ("run", "train"):
            ended = caddie(verb, "tiny", *tiny_run.settings, "--data", tiny_run.corpus, "--out", folder, "--quiet")
            assert ended.status == 2
            assert ended.err.startswith(f"caddie: {folder} is in use by process ")
            assert ended.err.count("\n") == 1
        assert {path.name for path in folder.iterdir()} == before
    kept = Path(shutil.copytree(tiny_run.folder, tmp_path / "run"))
    artifact = (kept / "artifact.caddie").read_bytes()
    with locked(kept):
        ended = caddie("pack", kept, "cap=100000", "--quiet")
        assert (ended.status, ended.err.startswith(f"caddie: {kept} is in use by process ")) == (2, True)
    assert (kept / "artifact.caddie").read_bytes() == artifact


def test_what_comes_after_the_first_failure_is_not_written(tmp_path: Path) -> None:
    run_folder.write_error(tmp_path, "the first")
    from caddie.runtime.progress import Phases

    with pytest.raises(RuntimeError), run_folder.failure_recorded(tmp_path, Phases(), first=False):
        raise RuntimeError("the second")
    assert json.loads((tmp_path / "error.json").read_text())["error"] == "the first"
    with pytest.raises(Interrupted), run_folder.failure_recorded(tmp_path, Phases(), first=True):
        raise Interrupted(2, 1)
    assert not (tmp_path / "error.json").exists(), "it began again, and was interrupted, which is no failure"


@pytest.mark.parametrize(("cause", "written"), [("invalid shape", False), ("can't allocate memory", True)])
def test_a_mistake_is_written_down_if_memory_was_the_cause(cause: str, written: bool, tmp_path: Path) -> None:
    from caddie.runtime.progress import Phases

    mistake = UserError("the checkpoint cannot be read")
    mistake.__context__ = RuntimeError(cause)
    with pytest.raises(UserError), run_folder.failure_recorded(tmp_path, Phases(), first=True):
        raise mistake
    assert (tmp_path / "error.json").exists() == written
