"""Runs whose recipes have classes in a user's file: what of them an artifact needs, and who may supply it."""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, probe_nothing, score_here

from caddie.config import userfile
from caddie.doctor import pace
from caddie.errors import UserError
from caddie.pack import artifact as artifacts
from caddie.pack.artifact import load, load_tokenizer
from caddie.pack.source_bundle import describe_source, with_parts
from caddie.recipes.recipe import Recipe
from caddie.run.cap import cap_of_recipe, source_of_recipe
from caddie.run.policy import code_bytes, file_cap
from caddie.run.run_folder import cap_of

pytestmark = pytest.mark.long  # two runs, in sandboxes of their own

MINE = '''
import os

from torch import Tensor

import caddie
from caddie.config import Count
from caddie.model.gates import HeadGate
from caddie.model.linear import Linear
from caddie.model.parameters import Constant, Part
from caddie.pack.quantize import Float16
from caddie.score import ChunkSGD
from caddie.train.optim import AdamW

if "FAIL" in os.environ:
    raise ValueError("as asked")


class SignedGate(HeadGate):
    channels: Count = 12
    """Leading channels of the stream that decide."""

    def build(self, width: int, heads: int) -> Part:
        return _SignedGate(min(self.channels, width), heads)


class _SignedGate(Part):
    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.channels = channels
        self.map = Linear(channels, heads, Constant(value=0.0), role="gate")

    def forward(self, h: Tensor) -> Tensor:
        return 1.0 + self.map(h[..., : self.channels].contiguous())


class MyAdam(AdamW):
    pass


class MyHalf(Float16):
    pass


class MyLearning(ChunkSGD):
    pass


tiny = caddie.find("tiny")
optimizer = tiny.but({"train.optimizers.scalar": MyAdam(lr=0.01)})
reading = optimizer.but(
    {
        "model.block.attention.gate": SignedGate(),
        "pack.quantizers.scalar": MyHalf(),
        "score.ttt": MyLearning(chunk_tokens=64),
    }
)
'''
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def runs(tiny_run: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `mine.py` and finished runs of its recipes, scored in this process."""
    from conftest import call

    folder = tmp_path_factory.mktemp("parts")
    (folder / "mine.py").write_text(MINE)
    with pytest.MonkeyPatch.context() as patch:
        score_here(patch)
        probe_nothing(patch)
        patch.setattr("caddie.run.run.check_settings_matter", lambda recipe: None)
        for name in ("optimizer", "reading"):
            recipe = f"{folder}/mine.py:{name}"
            ended = call("run", recipe, *TINY, "--data", tiny_run.corpus, "--out", folder / name, "--quiet", "--json")
            assert (ended.status, ended.err) == (0, "")
    return folder


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were run do not count, as in a process that has run none."""
    monkeypatch.setattr(userfile, "_run", {})


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, caddie: Run) -> Run:
    """A command as in a process of its own, which has run no file."""

    def called(*arguments: object) -> Any:
        monkeypatch.setattr(userfile, "_run", {})
        userfile._executed.cache_clear()
        return caddie(*arguments)

    return called


def config(path: Path) -> dict[str, Any]:
    return dict(json.loads(artifacts._read(path).sections["config"]))


def test_all_of_a_file_counts_also_what_is_not_run() -> None:
    known = {"needed_bytes": 10, "training_bytes": 20}
    comment = b"# " + bytes(random.Random(0).choices(range(97, 123), k=4000)) + b"\n"
    for needed, key in (([MINE.encode() + comment], "needed_bytes"), ([], "training_bytes")):
        bare = with_parts(known, [MINE.encode()] if needed else [], [MINE.encode()])
        found = with_parts(known, needed, [MINE.encode() + comment])
        assert found[key] > bare[key] + 2000, "code can read its own comments"


def test_the_run_keeps_its_files_and_the_artifact_names_them(runs: Path) -> None:
    stated = {"name": "mine.py", "sha256": load(runs / "reading" / "artifact.caddie").parts[0].stated.sha256}
    for name, needed in (("reading", True), ("optimizer", False)):
        recipe, result = (json.loads((runs / name / f"{what}.json").read_text()) for what in ("recipe", "result"))
        assert recipe["parts"] == [stated]
        assert (runs / name / "parts" / "mine.py").read_text() == MINE
        assert result["parts"] == [{**stated, "needed_to_score": needed}]
        known, found = describe_source(recipe["recipe"]), result["source"]
        assert (found["needed_bytes"] > known["needed_bytes"]) is needed, "the file counts as code"
        assert (found["training_bytes"] > known["training_bytes"]) is not needed
    assert config(runs / "reading" / "artifact.caddie")["parts"] == [stated]


@pytest.mark.usefixtures("new_process")
def test_an_optimizer_is_not_needed_to_read(runs: Path) -> None:
    assert "parts" not in config(runs / "optimizer" / "artifact.caddie")
    assert load(runs / "optimizer" / "artifact.caddie").parts == ()


def test_the_file_must_be_given_and_be_the_one(
    runs: Path, tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anew: Run
) -> None:
    artifact, mine, other = runs / "reading" / "artifact.caddie", runs / "mine.py", tmp_path / "mine.py"
    other.write_text(MINE + "# changed\n")

    def refused(*arguments: object) -> str:
        ended = anew("sample", *arguments)
        assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1), ended.err
        return str(ended.err)

    assert f"{artifact} needs mine.py (SHA-256 " in (said := refused(artifact))
    assert f"add --parts {artifact.parent / 'parts' / 'mine.py'}" in said
    assert f"needs mine.py (SHA-256 {load(artifact, parts=mine).parts[0].stated.sha256[:16]}" in (
        said := refused(artifact, "--parts", other)
    )
    assert f"{other} is another file" in said
    assert "no file" in refused(artifact, "--parts", tmp_path / "none.py")
    assert f"needs no file of a user's; leave out --parts {mine}" in refused(tiny_run.artifact, "--parts", mine)
    for more, end in (((), "add --parts"), (("--parts", mine), str(tmp_path / "written"))):
        ended = anew("export", artifact, "--to", "safetensors", "--out", tmp_path / "written", *more)
        assert (ended.status, end in f"{ended.err}{ended.out}") == (0 if more else 2, True)
    monkeypatch.setenv("FAIL", "1")
    assert "does not run: ValueError: as asked" in refused(artifact, "--parts", mine)
    monkeypatch.delenv("FAIL")
    assert anew("sample", artifact, "--tokens", 2, "--parts", mine).status == 0
    monkeypatch.setattr(userfile, "_run", {})
    assert load_tokenizer(artifact).vocabulary == 257, "the tokenizer needs no file"


@pytest.mark.parametrize(
    "parts",
    [
        5,
        [5],
        [{"name": "mine.py"}],
        [{"name": "../mine.py", "sha256": "0" * 64}],
        [{"name": "mine.py", "sha256": "0"}],
        [{"name": "mine.py", "sha256": "0" * 64}] * 17,
    ],
)
def test_statements_of_files_that_are_none(parts: object) -> None:
    with pytest.raises(UserError, match="parts"):
        userfile.read_stated(parts)


def test_classes_of_another_file_do_not_pass_for_those_named(runs: Path, tmp_path: Path) -> None:
    """As where two files have classes of one name: the later would be taken for the earlier."""
    artifact, other = runs / "reading" / "artifact.caddie", tmp_path / "mine.py"
    load(artifact)
    other.write_text(MINE + "# changed\n")
    userfile.execute(other)
    with pytest.raises(UserError, match="otherwise under the same names"):
        load(artifact)
    userfile._executed.cache_clear()
    userfile.execute(runs / "mine.py")
    load(artifact)


def test_packing_a_run_again_takes_its_file(runs: Path, tmp_path: Path, anew: Run) -> None:
    """The copy in the folder is named, not run: the folder may be a stranger's."""
    folder, copy = tmp_path / "run", tmp_path / "run" / "parts" / "mine.py"
    shutil.copytree(runs / "reading", folder)
    ended = anew("pack", folder)
    assert (ended.status, ended.err.count("\n")) == (2, 1)
    assert f"{folder} needs mine.py" in ended.err
    assert f"--parts {copy}" in ended.err
    (folder / "artifact.caddie").unlink()
    ended = anew("pack", folder, "--parts", copy, "--json")
    assert ended.status == 0, ended.err
    assert (folder / "artifact.caddie").read_bytes() == (runs / "reading" / "artifact.caddie").read_bytes()
    assert f"--parts {copy}" in json.loads(ended.out)["next"][0]


@pytest.mark.usefixtures("one_process", "alive_once", "unprobed")
def test_a_run_is_done_again_with_its_file(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anew: Run
) -> None:
    folder, copy = tmp_path / "run", tmp_path / "run" / "parts" / "mine.py"
    shutil.copytree(runs / "optimizer", folder)
    monkeypatch.setattr("caddie.run.run.check_settings_matter", lambda recipe: None)
    monkeypatch.setattr("caddie.run.dead_settings.check_settings_matter", lambda recipe: None)
    for verb in ("replay", "train"):
        again = (verb, folder, "--out", tmp_path / verb, "--quiet", "--json")
        ended = anew(*again)
        assert (ended.status, ended.err.count("\n")) == (2, 1), ended.err
        assert f"{folder} needs mine.py" in ended.err
        assert f"--parts {copy}" in ended.err
        ended = anew(*again, "--parts", copy)
        assert ended.status == 0, ended.err
        assert (tmp_path / verb / "parts" / "mine.py").read_text() == MINE
        if verb == "replay":
            facts = json.loads(ended.out)
            assert (facts["identity_promised"], facts["identical"], facts["causes"]) == (True, True, [])
    ended = anew("train", "tiny", "--parts", copy, "--quiet")
    assert f"tiny needs no file of a user's; leave out --parts {copy}" in ended.err


def test_runs_are_compared_and_ablated_with_their_files(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anew: Run
) -> None:
    copies = [runs / name / "parts" / "mine.py" for name in ("optimizer", "reading")]
    other = tmp_path / "other.py"
    other.write_text("x = 1\n")
    studies: list[Any] = []
    monkeypatch.setattr("caddie.cli.study._run", lambda study, *_, **__: studies.append(study) or 0)
    for command in (
        ("diff", "tiny", runs / "reading"),
        ("diff", runs / "optimizer", runs / "reading"),
        ("diff", runs / "optimizer", "tiny"),
        ("ablate", runs / "reading"),
        ("sweep", runs / "reading", "train.optimizers.scalar.lr=0.02,0.03"),
    ):
        ended = anew(*command)
        assert (ended.status, ended.err.count("\n")) == (2, 1), ended.err
        assert "add --parts " in ended.err
        ended = anew(*command, "--parts", copies[1])
        assert ended.status == 0, ended.err
        ended = anew(*command, "--parts", copies[1], "--parts", other)
        assert (ended.status, ended.err.count("\n")) == (2, 1), ended.err
        assert f"{other} is another file" in ended.err or f"leave out --parts {other}" in ended.err
    assert [study.name.split("-")[0] for study in studies] == ["ablate", "sweep"]
    assert f"tiny needs no file of a user's; leave out --parts {other}" in anew("diff", "tiny", "--parts", other).err


def test_the_doctor_takes_a_run_with_its_file(runs: Path, anew: Run) -> None:
    run, copy = runs / "reading", runs / "reading" / "parts" / "mine.py"
    assert "add --parts " in anew("doctor", run, "--quick").err
    ended = anew("doctor", run, "--quick", "--parts", copy)
    assert (ended.status in (0, 1), ended.err) == (True, "")  # by what else is done on this machine
    assert "GO: " in ended.out
    assert not isinstance(pace.measured(str(run), (), [copy], 1, lambda: None), str), "its steps are timed"


def test_the_cap_counts_the_file(runs: Path) -> None:
    from caddie.recipes.catalog import find

    for name in ("optimizer", "reading"):
        recipe = find(f"{runs}/mine.py:{name}").but({"pack.policy": "contest-2026", "pack.cap_bytes": 16_000_000})
        without = file_cap(recipe.pack, code_bytes(describe_source(recipe.to_json())))
        left = without.file_bytes - cap_of_recipe(recipe).file_bytes
        assert left == sum(cap_of_recipe(recipe).code.values()) - sum(without.code.values())
        assert 300 < left < len(MINE), "the file, stripped and compressed"


@pytest.mark.usefixtures("new_process")
@pytest.mark.parametrize("name", ["optimizer", "reading"])
def test_a_file_packed_alone_is_held_against_the_cap_that_it_was_packed_for(
    name: str, runs: Path, tmp_path: Path
) -> None:
    """The copy of what only training needs is counted and not run, and no result states the cap."""
    folder = tmp_path / "run"
    shutil.copytree(runs / name, folder)
    (folder / "result.json").unlink()
    about = json.loads((folder / "recipe.json").read_text())
    about["recipe"]["pack"] |= {"policy": "contest-2026", "cap_bytes": 16_000_000}
    (folder / "recipe.json").write_text(json.dumps(about))
    artifact = load(folder / "artifact.caddie", parts=[runs / "mine.py"] if name == "reading" else [])
    kept = cap_of(artifact)
    assert name == "reading" or not userfile._run, "nothing was run"
    userfile.execute(runs / "mine.py")
    recipe = Recipe.from_json(about["recipe"])
    assert kept == file_cap(recipe.pack, code_bytes(source_of_recipe(recipe)), artifact.ledger).file_bytes
    alone = file_cap(recipe.pack, code_bytes(describe_source(about["recipe"])), artifact.ledger).file_bytes
    assert 300 < alone - kept < len(MINE), "the file counts"
    (folder / "parts" / "mine.py").write_text("changed")
    with pytest.raises(UserError, match=r"mine.py is not the file that .* needs, and its code counts"):
        cap_of(artifact)
    (folder / "parts" / "mine.py").unlink()
    with pytest.raises(UserError, match="name the cap by cap=N"):
        cap_of(artifact)


def test_a_submission_does_not_hold_the_file(runs: Path, tmp_path: Path, caddie: Run) -> None:
    names = ("--author", "A", "--github-id", "a")
    ended = caddie("submit", runs / "reading", "--out", tmp_path / "out", *names, "--quiet")
    assert (ended.status, ended.err.count("\n")) == (2, 1), ended.err
    assert "its recipe has classes in a user's file, which the script does not hold" in ended.err
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("alive_once")
def test_a_run_goes_on_with_the_file_it_began_with(runs: Path, tiny_run: Any, tmp_path: Path, caddie: Run) -> None:
    folder, mine = tmp_path / "run", tmp_path / "mine.py"
    shutil.copytree(runs / "optimizer", folder)
    (folder / "result.json").unlink()
    mine.write_text(MINE + "# changed\n")
    command = (*TINY, "--data", tiny_run.corpus, "--out", folder, "--quiet", "--json")
    ended = caddie("train", f"{mine}:optimizer", *command)
    assert (ended.status, ended.err.count("\n")) == (2, 1)
    assert f"{mine} has changed since {folder} was begun; go on with {folder}/parts/mine.py" in ended.err
    ended = caddie("train", f"{folder}/parts/mine.py:optimizer", *command)
    assert ended.status == 0, ended.err
    assert (folder / "parts" / "mine.py").read_text() == MINE


def test_a_file_that_needs_others_is_refused_before_training(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caddie: Run
) -> None:
    """Here its neighbour is found; where the artifact is verified it would not be."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("caddie.run.run.check_settings_matter", lambda recipe: None)
    (tmp_path / "neighbour.py").write_text("x = 1\n")
    (tmp_path / "mine.py").write_text("import neighbour\n" + MINE)
    command = (f"{tmp_path}/mine.py:reading", *TINY, "--data", tiny_run.corpus, "--out", tmp_path / "run", "--json")
    ended = caddie("run", *command)
    assert ended.status == 2
    assert "running mine.py in a sandbox, as verification will" in ended.err
    assert "must run without other files of yours" in ended.err.splitlines()[-1]
    assert "No module named 'neighbour'" in ended.err
    assert not (tmp_path / "run" / "weights.safetensors").exists()
    (tmp_path / "mine.py").write_text(MINE)
    ended = caddie("run", *command, "--quiet", "pack.carry_source=true")
    assert (ended.status, ended.err.count("\n")) == (2, 1), ended.err
    assert "carries caddie's own source alone, and not mine.py" in ended.err


def test_files_are_found_by_the_classes_of_a_recipe(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from caddie.recipes.catalog import find

    assert userfile.user_files(find("tiny")) == ()
    recipe = find(f"{runs}/mine.py:reading")
    assert recipe == find(f"{runs}/mine.py:reading"), "the file runs once"
    assert [file.path for file in userfile.user_files(recipe)] == [runs / "mine.py"]
    (tmp_path / "mine.py").write_text(MINE + "# another\n")
    other = find(f"{tmp_path}/mine.py:optimizer")
    with pytest.raises(UserError, match="have the same name"):
        userfile.user_files(recipe, other)
    gate = type(recipe.model.block.attention.gate)
    monkeypatch.setattr(gate, "__module__", "nowhere")
    userfile._file_of.cache_clear()
    with pytest.raises(UserError, match=f"{gate.__name__} is defined in no file"):
        userfile.user_files(recipe)


@pytest.mark.long
def test_the_whole_line_in_processes_of_their_own(tiny_run: Any, tmp_path: Path) -> None:
    """It is scored by a new process, verified in a sandbox, and used from a file that only `--parts` names."""

    def caddie(*arguments: object, status: int = 0) -> Any:
        command = [sys.executable, "-m", "caddie", *map(str, arguments)]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert ended.returncode == status, ended.stderr
        return ended.stdout or ended.stderr

    (tmp_path / "mine.py").write_text(MINE)
    data = ("--data", tiny_run.corpus)
    result = json.loads(caddie("run", "mine.py:reading", *TINY, *data, "--out", "run", "--quiet", "--json"))
    assert result["verified"] is True
    (sandbox,) = [check for check in result["checks"] if check["name"] == "runs in a sandbox"]
    assert "mine.py (SHA-256 " in sandbox["evidence"]
    artifact, parts = "run/artifact.caddie", ("--parts", "mine.py")
    assert "needs mine.py" in caddie("score", artifact, *data, status=2)
    again = json.loads(caddie("score", artifact, *data, *parts, "--quiet", "--json"))
    assert again["bits_per_byte"] == pytest.approx(result["bits_per_byte"], abs=1e-6)
    assert again["adaptive"] is not None
    assert "mine.py" in caddie("verify", artifact, *parts, "--lossless")
    (tmp_path / "text.txt").write_text("A text to compress.\n" * 5)
    caddie("compress", artifact, "text.txt", *parts, "--quiet")
    caddie("decompress", artifact, "text.txt.cz", "--out", "again.txt", *parts, "--quiet")
    assert (tmp_path / "again.txt").read_text() == (tmp_path / "text.txt").read_text()
    (tmp_path / "own.py").write_text(
        "from caddie.score import Scorer, Step, windows\n"
        "class Plain(Scorer):\n"
        "    def __init__(self, model, tokenizer): self.model, self.bos = model, tokenizer.bos\n"
        "    def plan(self, layout, rows):\n"
        "        for begin, end in zip(layout.begins.tolist(), layout.ends.tolist()):\n"
        "            yield from (Step([window], [0]) for window in windows(begin, end, 32, 32))\n"
        "    def logits(self, inputs, slots, last, cache=None):\n"
        "        return self.model(inputs, inputs == self.bos, last=last).detach()\n"
    )
    own = json.loads(caddie("score", artifact, *data, *parts, "--scorer", "own.py:Plain", "--quiet", "--json"))
    assert own["user"]["nats"] == pytest.approx(own["plain"]["nats"], rel=1e-6)
