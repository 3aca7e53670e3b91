"""The whole line from the command line: real text in, one verified and scored file out.

Two runs are the same but for who does what: one in this process, and one by two processes of its own. A third, among
the slow tests, is a user's: the program starts the two, and the file is scored and probed in fresh ones.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import call, fresh, probe_nothing, score_here
from pretended_gpu import GPU, pretended_gpu
from processes import CONTEXT
from recording import RecordedProgress

from caddie import cli
from caddie.cli.options import named_recipe
from caddie.config import assignments
from caddie.data.corpus import Corpus
from caddie.data.shards import write_shard
from caddie.data.tokenizers import SentencePieceTokenizer
from caddie.errors import CheckFailed, UserError
from caddie.inference.sample import sample
from caddie.pack.artifact import load
from caddie.pack.codecs import Zlib
from caddie.report.display import Display
from caddie.report.documents import read_documents, run_documents
from caddie.run import run as line
from caddie.run import stages
from caddie.run.policy import apply_policies
from caddie.run.resolve_corpus import open_for_scoring
from caddie.run.run_folder import check_folder
from caddie.runtime.distributed import SHARES_CORES, Ranks

SMALL = (
    "model.width=32",
    "model.depth=2",
    "model.block.attention.heads=2",
    "model.block.attention.key_value_heads=1",
    "model.block.mlp.hidden=32",
    "model.embedding.bigrams.buckets=256",
    "train.seconds=none",
    "train.steps=4",
    "train.batch_tokens=512",
    "train.micro_batches=2",
    "train.sequence_length=64",
    "train.precision=float32",
    "train.optimizers.matrix.precision=float32",
    "pack.calibration.tokens=1024",
    "pack.calibration.batch_tokens=64",
    "pack.fit=none",
    "pack.coding=Packed(codec=Zlib)",
    "score.sequence_length=64",
    "score.stride=32",
)
"""A model that trains in a second; what is tested is the line, not the score."""


def caddie(folder: Path, *arguments: str, status: int = 0) -> Any:
    """What `caddie ARGUMENTS --json` prints in this process, with `folder` as its working directory."""
    with contextlib.chdir(folder):
        ended = call(*arguments, "--json")
    assert ended.status == status, ended.err
    return json.loads(ended.out) if ended.out else ended.err


def started(folder: Path, *arguments: str) -> None:
    """The same by processes that the program starts and waits for; what they print goes to `printed.json`."""
    kept = os.dup(1)  # theirs is that of the operating system
    try:
        with (folder / "printed.json").open("w") as printed:
            os.dup2(printed.fileno(), 1)
        with contextlib.chdir(folder):
            ended = call(*arguments, "--json")
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    assert (ended.status, ended.out) == (0, ""), ended.err


def rank(rank: int, port: int, folder: Path, arguments: Sequence[str]) -> None:
    """What one of two processes does that were started by another program, as torchrun starts them."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)

    def one_of_one(*asked: Any) -> dict[str, Any]:
        """The score, by a process that is not told to be one of two."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("RANK", "WORLD_SIZE"):
                patch.delenv(name)
            return fresh(*asked)

    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder), Path(f"printed{rank}.json").open("w") as out:
        alone(patch)
        patch.setattr(line, "score_in_new_process", one_of_one)
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "argv", ["caddie", *arguments, "--json"])
        cli.main()  # which ends this process


def alone(patch: pytest.MonkeyPatch) -> None:
    """A run without processes besides its own, and without what other tests ask; what it writes is short."""
    score_here(patch)
    probe_nothing(patch)
    patch.setattr("caddie.run.result.sample", partial(sample, tokens=8))
    patch.setattr("caddie.run.run.check_settings_matter", lambda recipe: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a folder of text files of a user's own, and a run on them in this process."""
    folder = tmp_path_factory.mktemp("line")
    (folder / "texts").mkdir()
    for path in (Path(__file__).parent.parent.parent / "caddie").rglob("[bd]*.py"):
        shutil.copy(path, folder / "texts" / f"{path.parent.name}-{path.stem}.txt")
    with pytest.MonkeyPatch.context() as patch:
        alone(patch)
        caddie(folder, "run", "tiny", *SMALL, "model.vocabulary=400", "--data", "texts", "--out", "run")
    return folder


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "run" / "result.json").read_text()))


RUN_BY_TWO = ("run", "tiny", *SMALL, "model.vocabulary=400", "--out", "run", "--gpus", "2")


@pytest.fixture(scope="module")
def by_two(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the same run by two processes of its own; beside it is what was printed."""
    elsewhere = tmp_path_factory.mktemp("by_two")
    run = (*RUN_BY_TWO, "--data", str(next((folder / "data").glob("texts-*"))))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [CONTEXT.Process(target=rank, args=(number, port, elsewhere, run)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0, 0]
    return elsewhere / "run"


def test_run_folder_is_complete(folder: Path, result: dict[str, Any], by_two: Path) -> None:
    for run in (folder / "run", by_two):
        check_run_folder(run, json.loads((run / "result.json").read_text()))
    assert {path.name for path in folder.iterdir()} == {"texts", "run", "data"}


def check_run_folder(run: Path, result: dict[str, Any]) -> None:
    names = {path.name for path in run.iterdir()}
    kept = {
        "recipe.json",
        "log.jsonl",
        "weights.safetensors",
        "artifact.caddie",
        "result.json",
        "report.html",
        "documents.csv",
    }
    assert names == kept | {"checkpoint.safetensors"}
    assert result["verified"] is True
    assert result["under_cap"] is True
    assert result["artifact_bytes"] == (run / "artifact.caddie").stat().st_size
    assert result["artifact_bytes"] == sum(result["ledger"]["parts"].values())
    assert result["corpus"]["lossless"] is True
    assert result["bits_per_byte"] == result["scores"]["quantized_sliding"]["bits_per_byte"]
    assert result["bits_per_byte"] < 7, "four steps; `test_quality.py` asks more of more steps"
    assert result["scores"]["quantized_adaptive"] is None
    assert result["policies"] == apply_policies(result)
    assert result["evaluation"]["load"] > 0


@pytest.mark.usefixtures("unprobed")  # `test_probes.py` probes a copy
def test_a_finished_run_shows_its_result_and_stays(folder: Path, result: dict[str, Any], tmp_path: Path) -> None:
    (folder / "run" / "report.html").unlink()
    before = {path.name: path.stat().st_mtime_ns for path in (folder / "run").iterdir()}
    same = ("tiny", *SMALL, "model.vocabulary=400", "--data", "texts", "--out", "run")
    assert caddie(folder, "run", *same) == {"folder": "run", **result}
    with contextlib.chdir(folder):
        ended = call("run", *same)
    assert ended.out.startswith(f"tiny, seed {result['seed']}: {result['bits_per_byte']:.4f} bits per byte")
    assert ended.err.endswith("run holds this run, finished before; its result:\n")
    shutil.copytree(folder / "texts", tmp_path / "other")
    (tmp_path / "other" / "more.txt").write_text("One more document. " * 500)
    for other, says in (
        (("--seed", "2"), f"run holds a finished run of seed {result['seed']}, not 2; name another folder"),
        (("cap=900000",), "run holds a finished run of other settings; name another folder"),
        (("--data", str(tmp_path / "other")), "is not the text of run: the SHA-256 of its"),
    ):
        assert says in caddie(folder, "run", *same, *other, status=2)
    (folder / "run" / "report.html").stat()  # made anew, and nothing else
    after = {path.name: path.stat().st_mtime_ns for path in (folder / "run").iterdir() if path.name != "report.html"}
    assert after == before


@pytest.mark.long
def test_scores_anywhere_without_the_training_data(folder: Path, by_two: Path, tmp_path: Path) -> None:
    """The artifact and a corpus without its training shards, copied elsewhere, give the number of the run."""
    result = json.loads((by_two / "result.json").read_text())  # its score is of another process
    shutil.copy(by_two / "artifact.caddie", tmp_path / "copy.caddie")
    corpus = next((folder / "data").glob("texts-*"))
    shutil.copytree(corpus, tmp_path / "corpus", ignore=shutil.ignore_patterns("train_*"))
    again = caddie(tmp_path, "score", "copy.caddie", "--data", "corpus")
    assert abs(again["bits_per_byte"] - result["bits_per_byte"]) < 1e-6
    assert again["artifact_bytes"] == result["artifact_bytes"]
    assert caddie(tmp_path, "verify", "copy.caddie")["passed"] is True


@pytest.mark.parametrize(("world", "new", "apart"), [(1, True, 1), (1, False, 0), (2, False, 2)])
def test_several_processes_always_score_in_new_ones(
    world: int, new: bool, apart: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this one alone, the GPUs of the others would stand still."""
    started = Mock(return_value={"here": False})
    monkeypatch.setattr(line, "score_in_new_process", started)
    monkeypatch.setattr(line, "score_artifact", Mock(return_value={"here": True}))
    corpus = Corpus.load(next((folder / "data").glob("texts-*")))
    text = stages.held_out_text(corpus)
    _, scored = line.score_packed(folder / "run", corpus, text, Ranks(0, world), Display(), new_process=new)
    assert scored == {"here": not apart}
    assert [call.args[2] for call in started.mock_calls] == [apart] * bool(apart)


@pytest.mark.long
def test_scores_the_text_itself_but_no_other(folder: Path, result: dict[str, Any], tmp_path: Path) -> None:
    """The same text splits the same way again; of another text nothing proves that it was not trained on."""
    shutil.copytree(folder / "texts", tmp_path / "texts")
    artifact = str(folder / "run" / "artifact.caddie")
    again = caddie(tmp_path, "score", artifact, "--data", "texts")
    assert again["bits_per_byte"] == pytest.approx(result["bits_per_byte"], abs=1e-6)
    assert not list((tmp_path / "data").rglob("train_*")), "training documents were encoded"
    alone = tmp_path / "alone"
    alone.mkdir()
    assert caddie(alone, "score", artifact)["bits_per_byte"] == again["bits_per_byte"], "not on the run's own text"
    assert not list(alone.iterdir()), "another text was prepared"
    (tmp_path / "texts" / "new.txt").write_text("A text that was not there before.\n" * 10)
    assert "may have been trained on" in caddie(tmp_path, "score", artifact, "--data", "texts", status=2)
    corpus = str(next((folder / "data").glob("texts-*")))
    made = caddie(tmp_path, "data", "texts", "--tokenizer", artifact, "--against", corpus, "--out", "fair")
    assert made["manifest"]["training_documents_removed"] == result["corpus"]["documents"]["train"]
    fair = caddie(tmp_path, "score", artifact, "--data", "fair")
    assert fair["plain"]["source_bytes"] == result["corpus"]["source_bytes"]["validation"] + 340


@pytest.mark.long
@pytest.mark.parametrize("ttt", ["none", "ChunkSGD"])
def test_no_part_mixes_what_a_gpu_has_with_what_the_cpu_has(ttt: str, tiny_run: Any, tmp_path: Path) -> None:
    settings = (
        "train.averaging=SWA",
        "pack.fit=FillCap",
        "pack.cap_bytes=30000",
        f"score.ttt={ttt}",
    )
    recipe, ranks = named_recipe("tiny", tiny_run.settings).but(assignments(settings)), Ranks(device=GPU)
    with pretended_gpu() as gpu:
        result = line.run(recipe, str(tiny_run.text), folder=tmp_path / "run", ranks=ranks, study={"label": "GPU"})
    assert result is not None
    assert result["verified"] is True
    assert len(gpu.storages) > 1000


@pytest.mark.long
@pytest.mark.usefixtures("alive_once")
def test_train_and_pack_are_arrows_of_their_own(folder: Path, result: dict[str, Any], tmp_path: Path) -> None:
    corpus = str(next((folder / "data").glob("texts-*")))
    caddie(tmp_path, "train", "tiny", *SMALL, "model.vocabulary=400", "--data", corpus, "--out", "alone")
    packed = caddie(tmp_path, "pack", "alone")
    assert packed["artifact_bytes"] == result["artifact_bytes"]
    assert (tmp_path / "alone" / "artifact.caddie").read_bytes() == (folder / "run" / "artifact.caddie").read_bytes()


@pytest.mark.long
def test_real_text_with_the_contest_tokenizer(real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FineWeb text under the contest's 1,024 ids: a lossy tokenizer, whose loss is counted and whose bytes are not."""
    alone(monkeypatch)
    monkeypatch.setattr("caddie.pack.artifact.Brotli", Zlib)  # at its best it takes a second for this tokenizer
    model = real_data / "tokenizers" / "fineweb_1024_bpe.model"
    lines = (real_data / "small" / "train_small.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "fineweb.jsonl").write_text("".join(lines[:180]))
    source = f'data.tokenizer=SentencePieceFile(path="{model}")'
    result = caddie(tmp_path, "run", "tiny", *SMALL, source, "--data", "fineweb.jsonl", "--out", "run")
    plain = result["scores"]["quantized_plain"]
    assert result["corpus"]["lossless"] is False
    assert result["corpus"]["changed_documents"] > 0
    assert plain["source_bytes"] > plain["normalized_bytes"]
    assert plain["table_bytes"] == plain["normalized_bytes"]
    assert plain["bits_per_byte"] < plain["bits_per_normalized_byte"]


@pytest.mark.slow
@pytest.mark.usefixtures("alive_once", "one_process")
def test_published_shards_without_their_text(real_data: Path, tmp_path: Path) -> None:
    """The contest's layout: token shards alone, whose bytes the contest's own table counts."""
    model = real_data / "tokenizers" / "fineweb_1024_bpe.model"
    tokenizer = SentencePieceTokenizer(model.read_bytes())
    lines = (real_data / "small" / "train_small.jsonl").read_text().splitlines()[:90]
    ids = [np.append(np.uint16(1), tokenizer.encode(json.loads(line)["text"].encode())) for line in lines]
    (tmp_path / "shards").mkdir()
    write_shard(tmp_path / "shards" / "fineweb_train_000000.bin", np.concatenate(ids[10:]).astype(np.uint16))
    write_shard(tmp_path / "shards" / "fineweb_val_000000.bin", np.concatenate(ids[:10]).astype(np.uint16))
    source = f'data.tokenizer=SentencePieceFile(path="{model}")'
    result = caddie(tmp_path, "run", "tiny", *SMALL, source, "--data", "shards", "--out", "run")
    assert result["byte_source"] == "table"
    assert result["corpus"]["documents"] == {"train": 80, "validation": 10}
    assert result["corpus"]["origin"] is None
    again = caddie(tmp_path, "score", "run/artifact.caddie", "--data", "shards")
    assert again["bits_per_byte"] == pytest.approx(result["bits_per_byte"], abs=1e-6)


def test_counts_edited_by_hand_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(next((folder / "data").glob("texts-*")), tmp_path / "corpus")
    manifest = json.loads((tmp_path / "corpus" / "manifest.json").read_text())
    artifact = str(folder / "run" / "artifact.caddie")
    for name in ("source_bytes", "normalized_bytes", "table_bytes"):
        split = manifest["validation"] | {name: manifest["validation"][name] + 1}
        (tmp_path / "corpus" / "manifest.json").write_text(json.dumps(manifest | {"validation": split}))
        assert f"{name} for validation; there are" in caddie(tmp_path, "score", artifact, "--data", "corpus", status=2)


@pytest.mark.slow
def test_the_program_starts_two_processes_and_fresh_ones(folder: Path, tmp_path: Path, result: dict[str, Any]) -> None:
    """As a user's run: nothing is in this process, the score is of a fresh one, and the file is probed in another."""
    started(tmp_path, *RUN_BY_TWO, "--data", str(next((folder / "data").glob("texts-*"))))
    check_run_folder(tmp_path / "run", json.loads((tmp_path / "run" / "result.json").read_text()))
    two = json.loads((tmp_path / "printed.json").read_text())
    assert two["world"] == 2
    assert two["bits_per_byte"] == pytest.approx(result["bits_per_byte"], abs=1e-5)


def test_the_memory_of_training_is_free_before_other_processes_score(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trains:
        def __init__(self) -> None:
            self.forward = self.losses  # a cycle, as in `Trainer`

        def losses(self) -> None: ...

    kept: list[bool] = []
    monkeypatch.setattr(stages, "build", Mock())
    monkeypatch.setattr(stages, "score", Mock())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: kept.append(trains() is not None))
    trains = weakref.ref(Trains())
    stages.score_trained(Mock(), Mock(last={}, weights={}), Mock(), Ranks(device=torch.device("cuda")))
    assert kept == [False]


def test_a_fresh_process_knows_nothing_of_who_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked as a user would, is not told to be one of several, and what goes wrong in it is said."""
    program = tmp_path / "python"
    says = """#!/bin/sh
[ "$6" = --fail ] && echo 'first' >&2 && echo 'Error: last' >&2 && exit 3
printf '{"asked": "%s", "rank": "%s", "threads": "%s"}' "$*" "$RANK$WORLD_SIZE$LOCAL_RANK" "$OMP_NUM_THREADS"
"""
    program.write_text(says)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    command = "-m caddie score a.caddie --data c --gpus 1 --events --json"
    scored = line.score_in_new_process(Path("a.caddie"), Path("c"), 2)
    assert scored == {"asked": command, "rank": "", "threads": "3"}
    monkeypatch.setenv(SHARES_CORES, "1")
    assert line.score_in_new_process(Path("a.caddie"), Path("c"))["threads"] == "", (
        "a share of the cores is for one of several"
    )
    with pytest.raises(CheckFailed, match="score in a fresh process failed: Error: last"):
        line.score_in_new_process(Path("a.caddie"), Path("--fail"))
    asked = line.score_in_new_process(Path("a.caddie"), Path("c"), documents=Path("d.csv"))["asked"]
    assert asked == command.replace("--gpus", "--documents d.csv --gpus")


def test_hashes_of_another_kind_prove_nothing(tiny_run: Any, tmp_path: Path) -> None:
    """Held-out ids are not found among hashes of text, even if they are those of training documents."""
    artifact, own = load(tiny_run.artifact), Corpus.load(tiny_run.corpus)
    shutil.copytree(tiny_run.corpus, tmp_path / "other")
    path = tmp_path / "other" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest |= {"hashed": "tokens", "byte_source": "tokens"}
    manifest["train"]["shards"] = []
    path.write_text(json.dumps(manifest))
    assert artifact.manifest.train_documents_sha256 == own.manifest.training_set
    with pytest.raises(UserError, match="may have been trained on this text"):
        open_for_scoring(artifact, tmp_path / "other")


def test_a_run_keeps_the_bits_of_each_held_out_document(tiny_run: Any, tmp_path: Path, caddie: Any) -> None:
    """They add up to its score, and `caddie score --documents` writes the same file."""
    sizes, bits = run_documents(tiny_run.folder) or pytest.fail("no file")
    corpus = Corpus.load(tiny_run.corpus)
    assert sizes.tolist() == [len(document) for document in corpus.validation_documents()]
    assert bits.sum() / sizes.sum() == pytest.approx(tiny_run.printed["bits_per_byte"], abs=1e-5)
    ended = caddie("score", tiny_run.artifact, "--data", tiny_run.corpus, "--documents", tmp_path / "d.csv", "--quiet")
    assert ended.status == 0
    assert read_documents(tmp_path / "d.csv")[1]["bits"] == pytest.approx(bits, abs=0.002)
    ended = caddie(
        "score", tiny_run.artifact, "--data", tiny_run.corpus, "--documents", tmp_path / "no" / "d", "--quiet"
    )
    assert (ended.status, ended.out) == (2, "")
    assert "make it, or name another file with --documents" in ended.err


def test_the_bytes_of_documents_add_up_whatever_they_are_counted_from(
    tiny_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A corpus of bytes: its tokens, and counts beside them, tell the same as its text."""
    corpus = Corpus.load(tiny_run.corpus)
    tokens, of_text = corpus.validation_tokens(), corpus.document_bytes(corpus.validation_tokens()).tolist()
    counts = corpus.tokenizer().byte_lengths(tokens).astype(np.uint16)
    shards = replace(corpus.manifest, byte_source="tokens")
    assert Corpus(corpus.folder, shards).document_bytes(tokens).tolist() == of_text
    assert Corpus(corpus.folder, shards).document_bytes(tokens[5:]).tolist() == [of_text[0] - 5, *of_text[1:]]
    split = replace(corpus.manifest.validation, byte_counts=corpus.manifest.validation.shards)
    beside = Corpus(corpus.folder, replace(corpus.manifest, byte_source="sidecar", validation=split))
    monkeypatch.setattr(beside, "_joined", lambda shards: 2 * counts)
    assert beside.document_bytes(tokens).tolist() == [2 * size for size in of_text]


@pytest.mark.long
def test_the_progress_of_the_fresh_process_is_shown_as_it_comes(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First a line before the other process has begun; then what that one scores, while it scores."""
    progress = RecordedProgress()
    started = subprocess.Popen

    def start(*given: Any, **how: Any) -> Any:
        assert [event["event"] for event in progress.events] == ["doing"], "said before the process begins"
        return started(*given, **how)

    monkeypatch.setattr(subprocess, "Popen", start)
    scored = line.score_in_new_process(tiny_run.artifact, tiny_run.corpus, progress=progress)
    assert scored["bits_per_byte"] == pytest.approx(tiny_run.printed["bits_per_byte"], abs=1e-6)
    tokens = [event for event in progress.events if event["event"] == "tokens"]
    assert tokens[-1]["done"] == tokens[-1]["total"] == scored["sliding"]["tokens"]


def test_two_processes_give_the_result_of_one(result: dict[str, Any], by_two: Path) -> None:
    told, nothing = ((by_two.parent / f"printed{rank}.json").read_text() for rank in range(2))
    two = json.loads(told)
    assert two["world"] == 2
    assert nothing == ""
    assert two["bits_per_byte"] == pytest.approx(result["bits_per_byte"], abs=1e-5)


def test_terminated_run_says_how_to_go_on_and_does(
    folder: Path, result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone(monkeypatch)
    corpus = str(next((folder / "data").glob("texts-*")))
    longer = [setting.replace("train.steps=4", "train.steps=8") for setting in SMALL]
    arguments = ["run", "tiny", *longer, "model.vocabulary=400", "--data", corpus, "--out", "killed"]

    def terminate(display: Display, event: Mapping[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Display, "step", terminate)
        errors = caddie(tmp_path, *arguments, status=128 + signal.SIGTERM)
    assert "go on with: caddie run tiny" in errors.splitlines()[-1]
    assert "--out killed" in errors.splitlines()[-1]
    done = caddie(tmp_path, *arguments)
    log = tmp_path / "killed" / "log.jsonl"
    assert done["training"]["steps"] == 8
    starts = [json.loads(line) for line in log.read_text().splitlines() if '"start"' in line]
    assert starts[0]["step"] == 0
    assert starts[1]["step"] >= 3


@pytest.mark.parametrize("left", [[], ["log.jsonl"], ["checkpoint.safetensors", "notes.txt"], [".caddie-a-1-0.tmp"]])
def test_a_run_that_was_interrupted_early_can_go_on(left: list[str], tmp_path: Path) -> None:
    for name in left:
        (tmp_path / name).write_text("")
    check_folder(tmp_path)
    check_folder(tmp_path / "new" / "run")


def test_sampling_refuses_what_the_verb_refuses(tiny_run: Any) -> None:
    artifact = load(tiny_run.artifact)
    for wrong in ({"tokens": -4}, {"temperature": float("nan")}, {"temperature": -1.0}):
        with pytest.raises(UserError, match=r"(tokens|temperature) must"):
            sample(artifact, **wrong)


def test_a_score_names_its_text(tiny_run: Any) -> None:
    """Without --data the text is named by the folder's recipe.json, which a stranger may have written."""
    *_, last = call("score", tiny_run.folder, "--quiet").out.splitlines()
    assert last == f"text           {tiny_run.text}, prepared in {tiny_run.corpus}"
