"""The script of a submission, alone: it gives the file of the run byte for byte, without caddie."""

import ast
import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caddie.config import plain
from caddie.data.shards import open_shard, write_shard
from caddie.data.tokenizers import CaseOps, SentencePieceBPE
from caddie.pack import source_bundle
from caddie.pack.source_bundle import script
from caddie.recipes.catalog import find, shipped
from caddie.recipes.recipe import Recipe
from caddie.run.stages import metadata_without_source
from caddie.runtime.distributed import Ranks
from caddie.submit import script as module

ROOT = Path(__file__).parent.parent.parent
Call = Callable[..., Any]

ALONE = """
import runpy, sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
sys.path = [path for path in sys.path if path and not __import__("pathlib").Path(path, "caddie").exists()]
try:
    import caddie
except ImportError:
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    raise SystemExit("caddie can be imported")
"""
"""Runs a script in a Python that cannot import caddie; all other libraries are there."""


def alone(folder: Path, recipe: Any, *launcher: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script of a recipe in a folder of its own, without caddie; its own folder is `out`."""
    folder.mkdir(exist_ok=True)
    (folder / "train_gpt.py").write_bytes(script(recipe))
    (folder / "alone.py").write_text(ALONE)
    (folder / "tmp").mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [sys.executable, *launcher, "alone.py", "train_gpt.py"],
        cwd=folder,
        env=kept | {"OUT": "out", "TMPDIR": str(folder / "tmp")} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def recipe_of(run: Path) -> Any:
    return json.loads((run / "recipe.json").read_text())["recipe"]


@pytest.mark.long
def test_it_gives_the_file_of_the_run_byte_for_byte(tiny_run: Any, tmp_path: Path) -> None:
    done = alone(tmp_path / "lone", recipe_of(tiny_run.folder), "-I", DATA_PATH=str(tiny_run.corpus))
    assert (done.returncode, done.stderr) == (0, "")
    made, printed = tmp_path / "lone" / "out" / "artifact.caddie", tiny_run.printed
    assert made.read_bytes() == tiny_run.artifact.read_bytes()
    code_bytes = (tmp_path / "lone" / "train_gpt.py").stat().st_size
    parts = printed["policies"][0]["parts"]
    assert code_bytes == parts["source_needed"] + parts["source_training"], "the ledger's code"
    score = printed["scores"]["quantized_sliding"]
    final = f"val_loss:{score['nats_per_token']:.8f} val_bpb:{score['bits_per_byte']:.8f}"
    lines = done.stdout.splitlines()
    assert f"final_caddie_roundtrip_exact {final}" in lines
    assert f"Code size: {code_bytes} bytes" in lines
    assert not list((tmp_path / "lone" / "tmp").iterdir()), "the source that it unpacked is removed"
    again = alone(tmp_path / "lone", recipe_of(tiny_run.folder), "-I", DATA_PATH=str(tiny_run.corpus))
    assert (again.returncode, again.stderr) == (
        2,
        "train_gpt.py: out holds a finished run; name another folder by OUT=DIR or remove it\n",
    )


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_torchrun_gives_the_file_of_a_run_on_as_many_processes(processes: int, tiny_run: Any, tmp_path: Path) -> None:
    cap = tiny_run.printed["policies"][0]["bytes"] + 3000  # most of which the code takes
    share = ("pack.policy=contest-2026", "pack.fit=FillCap", f"pack.cap_bytes={cap}")
    own = [setting for setting in tiny_run.settings if not setting.startswith("pack.fit=")]
    settings = (*own, *share, f"train.micro_batches={processes}", "--data", str(tiny_run.corpus), "--quiet")
    command = [sys.executable, "-m", "caddie", "run", "tiny", *settings, "--out", "run", "--gpus", str(processes)]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}")
    done = alone(tmp_path / "lone", recipe_of(tmp_path / "run"), *launcher, DATA_PATH=str(tiny_run.corpus))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert f"world_size:{processes}" in done.stdout.splitlines()
    made, run = (tmp_path / folder / "artifact.caddie" for folder in ("lone/out", "run"))
    assert made.read_bytes() == run.read_bytes()


@pytest.mark.long
def test_its_bytes_do_not_depend_on_the_process(tmp_path: Path) -> None:
    program = (
        "import sys; from caddie.pack.source_bundle import script; sys.stdout.buffer.write(script({'kind': 'Recipe'}))"
    )
    made = [
        subprocess.run(
            [sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert made[0] == made[1]


@pytest.mark.long
def test_its_source_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "train_gpt.py").write_bytes(script(find("tiny").to_json()))
    subprocess.run([sys.executable, "-I", "train_gpt.py", "--unpack", "source"], cwd=tmp_path, check=True)
    for arguments in (["--help"], ["--unpack"]):
        told = subprocess.run([sys.executable, "-I", "train_gpt.py", *arguments], cwd=tmp_path, capture_output=True)
        assert (told.returncode, b"DATA_PATH=DIR SEED=" in told.stderr) == (1, True)
    names = {path.relative_to(tmp_path / "source").as_posix() for path in (tmp_path / "source").rglob("*.py")}
    assert names == set(source_bundle.source_needed(source_bundle.TRAINING).files)


@pytest.mark.parametrize("why", ["", "It's '''quoted''' \\ \"so\", $recipe and é."])
def test_every_recipe_stands_in_the_head_as_it_is(why: str) -> None:
    for recipe in shipped().values() if not why else [find("tiny").but(why=why)]:
        tree = ast.parse(source_bundle.script(recipe.to_json(), "x"))
        assert "torchrun" in (ast.get_docstring(tree) or "")
        (literal,) = [
            node.value.args[0]
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RECIPE"
        ]
        assert Recipe.from_json(json.loads(ast.literal_eval(literal))) == recipe.but(public=())
    own = [one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom) and str(one.module).startswith("caddie")]
    assert own
    for one in own:
        assert all(hasattr(importlib.import_module(str(one.module)), alias.name) for alias in one.names)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"data": None}, "name the folder of the data by DATA_PATH=DIR"),
        ({"seed": "x"}, "SEED must be a number from 0 to 4,294,967,295, not x"),
        ({"data": "gone"}, "gone is no corpus; with a folder of shards, name their tokenizer by TOKENIZER_PATH=FILE"),
        ({"tokenizer": "gone.model", "data": "."}, "no train shards"),
        ({"recipe": {"kind": "Recipe", "model": {"kind": "Mine"}}}, "Mine"),
        ({"recipe": {"kind": "Recipe"}}, "has 257 ids, and the model 1,024"),
        ({"out": "run"}, "run holds a finished run; name another folder by OUT=DIR"),
    ],
)
def test_a_mistake_is_one_line(
    given: dict[str, Any], said: str, tiny_run: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_run.folder.parent)
    usual = {"recipe": recipe_of(tiny_run.folder), "data": str(tiny_run.corpus), "tokenizer": None, "seed": "1"}
    status = module.main(**{**usual, "out": "new", "code_bytes": 1, **given})
    printed = capsys.readouterr()
    assert (status, printed.out, printed.err.count("\n")) == (2, "", 1)
    assert said in printed.err
    assert not Path("new").exists()


def contest_shards(folder: Path, text: Path, vocabulary: int) -> Path:
    """Write shards, side-cars and tokenizer (`small.model`) as the contest's CaseOps export has them."""
    documents = [part.encode() for part in text.read_text().split("\n\n") if part.strip()]
    tokenizer = CaseOps().build(vocabulary, lambda: documents)
    shards = folder / "shards"
    shards.mkdir()
    (folder / "small.model").write_bytes(tokenizer.serialize())
    held = tokenizer.encode_many(documents[:20])
    for name, encoded in {"val": held, "train": tokenizer.encode_many(documents[20:])}.items():
        ids = np.array([part for one in encoded for part in (tokenizer.bos, *one.tolist())], np.uint16)
        for number, shard in enumerate(np.array_split(ids, 2)):
            write_shard(shards / f"fineweb_{name}_{number:06d}.bin", shard)
    ids = np.array([part for one in held for part in (tokenizer.bos, *one.tolist())], np.uint16)
    for number, part in enumerate(np.array_split(tokenizer.byte_lengths(ids).astype(np.uint16), 2)):
        write_shard(shards / f"fineweb_val_bytes_{number:06d}.bin", part)
    return shards


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_it_gives_the_file_of_a_records_run_on_shards_of_the_contest(
    processes: int, tiny_run: Any, tmp_path: Path
) -> None:
    """The best record's twin, smaller still, on CaseOps shards with side-cars; on one process with its adapters."""
    shards, model = contest_shards(tmp_path, tiny_run.text, 400), tmp_path / "small.model"
    tokenizer = {"kind": "CaseOps", "of": {"kind": "SentencePieceFile", "path": str(model)}}
    ttt = find("best_record").score.ttt.but({"rank": 4, "documents": 8, "phases.documents": 8})
    settings = {"model.vocabulary": 400, "model.width": 64, "train.seconds": "none", "train.steps": 2}
    settings |= {"data.tokenizer": json.dumps(tokenizer), "pack.calibration.tokens": 4096}
    where, launcher = ["--data", str(shards), "--out", "run", "--quiet"], ["-I"]
    commands = [["train"], ["pack", "run"]]  # as `run` does, without scoring and probing
    if processes == 1:
        settings["score.ttt"] = json.dumps(plain(ttt))
    else:  # `pack` calibrates on one process, and `run` on both
        settings["train.micro_batches"] = processes
        launcher, commands = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"], [["run"]]
        where += ["--gpus", str(processes)]
    commands[0] += ["best_record_mini", *(f"{name}={value}" for name, value in settings.items()), *where]
    for words in commands:
        command = [sys.executable, "-m", "caddie", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    recipe, given = recipe_of(tmp_path / "run"), {"DATA_PATH": str(shards), "TOKENIZER_PATH": str(model)}
    done = alone(tmp_path / "lone", recipe, *launcher, **given)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {"train_shards:2", f"world_size:{processes}"} <= set(lines)
    assert any(line.startswith("quantized_ttt val_loss:") for line in lines), "by adapters, or by tilt alone"
    made, run = (tmp_path / folder / "artifact.caddie" for folder in ("lone/out", "run"))
    assert made.read_bytes() == run.read_bytes()


@pytest.mark.slow
def test_its_requirements_are_all_that_it_needs(tiny_run: Any, tmp_path: Path, caddie: Call) -> None:
    """A virtual environment with what `requirements.txt` names and nothing else."""
    out = tmp_path / "submission"
    ended = caddie("submit", tiny_run.folder, "--out", out, "--author", "Ada", "--github-id", "ada")
    assert ended.status == 0, ended.err
    subprocess.run([sys.executable, "-m", "venv", "venv"], cwd=tmp_path, check=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [str(tmp_path / "venv" / "bin" / "python"), *words]
        return subprocess.run(command, cwd=out, env=kept | environment, capture_output=True, text=True, check=False)

    wanted = ("-c", str(ROOT / "constraints.txt"), "-r", "requirements.txt")
    installed = python("-m", "pip", "install", "--quiet", "--no-compile", *wanted)
    if "connection" in installed.stderr.lower():
        pytest.skip("pip reaches no index of packages")
    assert installed.returncode == 0, installed.stderr
    assert "No module named 'caddie'" in python("-c", "import caddie").stderr
    done = python("train_gpt.py", DATA_PATH=str(tiny_run.corpus), OUT="out")
    assert (done.returncode, done.stderr) == (0, "")
    assert (out / "out" / "artifact.caddie").read_bytes() == tiny_run.artifact.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, False])
def test_machines_that_share_no_disk_prepare_their_own_data(same: bool, tiny_run: Any, tmp_path: Path) -> None:
    """Each machine describes its shards and gets the file; other text on one of them is refused in a line."""
    small = {"model.vocabulary": 400, "model.width": 32, "model.depth": 2, "train.seconds": None, "train.steps": 2}
    small |= {"train.batch_tokens": 512, "train.sequence_length": 64, "train.micro_batches": 2}
    small |= {"score.sequence_length": 64, "score.stride": 32}
    program = script(find("tiny").but(small).to_json())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agents, folders = [], [tmp_path / "first", tmp_path / "second"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        contest_shards(folder, tiny_run.text, 400)
        (folder / "train_gpt.py").write_bytes(program)
        (folder / "alone.py").write_text(ALONE)
        if number and not same:
            ids = np.array(open_shard(folder / "shards" / "fineweb_train_000000.bin"))
            ids[5] = ids[6]
            write_shard(folder / "shards" / "fineweb_train_000000.bin", ids)
        launcher = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}")
        where = ("--master-addr=127.0.0.1", f"--master-port={port}", "alone.py", "train_gpt.py")
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        own = {"OUT": "out", "DATA_PATH": "shards", "TOKENIZER_PATH": "small.model", "OMP_NUM_THREADS": "1"}
        with (folder / "out.txt").open("w") as out, (folder / "err.txt").open("w") as err:
            command = [sys.executable, *launcher, *where]
            agents.append(subprocess.Popen(command, cwd=folder, env=kept | own, stdout=out, stderr=err))
    statuses = [agent.wait(600) for agent in agents]
    printed = [(folder / "err.txt").read_text() for folder in folders]
    if not same:
        assert 0 not in statuses
        assert all("train_gpt.py: shards is other text on another machine; copy one" in text for text in printed)
        return
    assert statuses == [0, 0], printed
    made = [(folder / "out" / "artifact.caddie").read_bytes() for folder in folders]
    assert made[0] == made[1]
    assert "world_size:2" in (folders[0] / "out.txt").read_text()
    assert not (folders[1] / "out.txt").read_text(), "the first process prints"


def test_shards_of_the_contest_are_described_as_caddie_data_describes_them(
    tiny_run: Any, tmp_path: Path, caddie: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    documents = [line.encode() for line in tiny_run.text.read_text().split("\n\n")]
    tokenizer = SentencePieceBPE().build(400, lambda: documents)
    Path("small.model").write_bytes(tokenizer.serialize())
    Path("shards").mkdir()
    for name, held in {"train": documents[20:], "val": documents[:20]}.items():
        ids = [part for document in tokenizer.encode_many(held) for part in (tokenizer.bos, *document.tolist())]
        write_shard(Path(f"shards/fineweb_{name}_000000.bin"), np.array(ids, np.uint16))
    recipe = Recipe().but({"model.vocabulary": 400})
    found = module._open(recipe, Path("shards"), "small.model", Path("out"), Ranks())
    source = {"kind": "SentencePieceFile", "path": "small.model"}
    ended = caddie("data", "shards", f"data.tokenizer={json.dumps(source)}", "model.vocabulary=400", "--out", "ours")
    assert ended.status == 0, ended.err
    ours = json.loads(Path("ours/manifest.json").read_text())
    theirs = json.loads(Path("out/corpus/manifest.json").read_text())
    for split in ("train", "validation"):
        assert theirs[split]["document_set_sha256"] == ours[split]["document_set_sha256"]
    manifest = metadata_without_source(recipe, 1, found).manifest
    assert manifest.train_documents_sha256 == f"tokens:{ours['train']['document_set_sha256']}"
    assert manifest.tokenizer_sha256 == ours["tokenizer"]["sha256"]
