"""Several processes, joined by gloo: late steps that end alike, what is told in a step, and a shared score."""

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import taped
import torch
import torch.distributed as dist
from communication import Cluster, Exchange, exchanges, sent_bytes
from processes import CONTEXT, together
from recording import Recorder
from test_async_steps import be_late
from test_loop import RANKS, SHARDS, TINY, go

from caddie.config.schedules import TrainProgress
from caddie.data.loaders import SequentialStream
from caddie.errors import UserError
from caddie.model import build
from caddie.ops import IMPLEMENTATIONS, use_implementations
from caddie.runtime.distributed import SHARES_CORES, Ranks, join, launch
from caddie.runtime.progress import Event
from caddie.score import SGD, ChunkSGD, DocumentLoRA, GlobalSGD, Score, Scoring, Text, score
from caddie.train import warmup as warmup
from caddie.train.loop import Interrupted
from caddie.train.optim import Muon
from caddie.train.settings import Train
from caddie.train.trainer import Trainer

WORLD = 2
MUONS = [Muon(lr=0.02), Muon(lr=0.02, precision="float32", communication="all_reduce")]
TEXT = Text(SHARDS[0][:740], 1, 2500, 2500, 2500)
SLIDING = Scoring(sequence_length=32, stride=8, batch_tokens=96)
FEW = SLIDING.but(batch_tokens=256)
"""Two threads take four windows each at once, one takes all eight."""
CHUNKS = ChunkSGD(chunk_tokens=192, sgd=SGD(lr=0.3, rows=5, epochs=2))
PHASES = GlobalSGD(documents=12, phases=2, chunk_tokens=96, sgd=SGD(lr=0.1, rows=3, epochs=1))
LORA = DocumentLoRA(rank=2, lr=0.01, chunk_tokens=16, documents=5, targets=("query", "mlp", "head"), phases=PHASES)
SCORINGS = [SLIDING.plain, SLIDING, *(SLIDING.but(ttt=one) for one in (CHUNKS, LORA))]
ODD = TINY.but({"vocabulary": 67, "width": 36, "block.mlp.hidden": 50})
"""Its sizes are no multiples of what a CPU works on at once; what is left over at the end may be rounded otherwise."""


def trains(ranks: Ranks, folder: Path) -> list[Any]:
    """A late run by time in which the second process alone is told to stop, and one by steps."""
    with pytest.MonkeyPatch.context() as patch:
        be_late(patch)

        def stop(event: Event) -> None:
            if event["event"] == "step" and event["step"] == 6 and not ranks.first:
                os.kill(os.getpid(), signal.SIGTERM)

        config = RANKS.but(steps=None, seconds=60.0, warmup_steps=0)
        with pytest.raises(Interrupted) as caught:
            go(folder / "timed", config, ranks=ranks, progress=Recorder(stop))
        with pytest.raises(UserError, match="leaves nothing to train") as refused:
            go(folder / "timed", config.but(seconds=0.01), ranks=ranks)
        trained = re.search(r"trained for (\d+) steps in ([\d.]+) seconds", str(refused.value))
        assert trained
        on = go(folder / "timed", config.but(seconds=float(trained[2]) + 0.2), ranks=ranks)
        stepped = go(folder / "steps", RANKS, ranks=ranks)
    return [str(caught.value), int(trained[1]), on.steps, on.seconds, on.last, stepped.last]


def replays(ranks: Ranks, folder: Path) -> list[dict[str, torch.Tensor]]:
    """Weights of a run whose micro-batches are replayed, and of the same run without."""
    found = []
    with pytest.MonkeyPatch.context() as patch, use_implementations(**dict.fromkeys(IMPLEMENTATIONS, "plain")):
        patch.setattr(warmup, "recorder", lambda device: taped.record)
        patch.setattr(warmup, "quickest", lambda choices, work, *seconds: choices[0])
        for name in ("auto", "never"):
            found.append(go(folder / name, RANKS.but(cuda_graphs=name), ranks=ranks).last)
    return found


def counts(ranks: Ranks, muon: Muon) -> list[tuple[str, int]]:
    """Collectives of a step: kinds, and bytes of the whole tensors."""
    seen: list[tuple[str, int]] = []
    trainer = Trainer(TINY, _with(muon), 7, ranks)
    stream = SequentialStream().build(SHARDS, tokens=64, sequence_length=32, seed=0, bos=1)
    with pytest.MonkeyPatch.context() as patch:
        for kind, name, whole in (
            ("all_reduce", "all_reduce", 0),
            ("reduce_scatter", _newest("reduce_scatter_single", "reduce_scatter_tensor"), 1),
            ("all_gather", _newest("all_gather_single", "all_gather_into_tensor"), 0),
        ):
            patch.setattr(dist, name, _counting(getattr(dist, name), kind, whole, seen))
        trainer.launch(map(stream.micro_batch, range(9)), TrainProgress(0, 0.0, RANKS.budget), 1).read()
        ranks.maximum(0.0, 0.0)
    return seen


def _newest(name: str, older: str) -> str:
    return name if hasattr(dist, name) else older


def _counting(operation: Any, kind: str, whole: int, seen: list[tuple[str, int]]) -> Any:
    def counted(*tensors: torch.Tensor, **options: Any) -> Any:
        seen.append((kind, tensors[whole].nbytes))
        return operation(*tensors, **options)

    return counted


def _with(muon: Muon) -> Train:
    return RANKS.but({"optimizers": {**RANKS.optimizers, "matrix": muon}})


def scores(ranks: Ranks) -> list[tuple[Score, list[int]]]:
    """Scores, and how many rows this process asked the model for each time."""
    found = []
    for scoring in SCORINGS:
        model, rows = build(TINY, 0), list[int]()
        model.register_forward_hook(lambda module, given, output, rows=rows: rows.append(len(given[0])))
        found.append((score(model, TEXT, scoring, ranks=ranks), rows))
    return found


def work(ranks: Ranks, folder: Path) -> None:
    """All that one process does for this file."""
    told = {"trains": trains(ranks, folder), "counts": [counts(ranks, muon) for muon in MUONS], "scores": scores(ranks)}
    told["replays"] = replays(ranks, folder)
    torch.set_num_threads(1 + ranks.rank)
    told["unequal"] = score(build(TINY, 0), TEXT, FEW, ranks=ranks).nats
    torch.save(told, folder / f"{ranks.rank}.pt")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    together(work, WORLD, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


@pytest.mark.long
def test_every_process_stops_at_the_same_late_step(told: list[dict[str, Any]], tmp_path: Path) -> None:
    (first, over, on, seconds, timed, stepped), other = told[0]["trains"], told[1]["trains"]
    assert [first, over, on, seconds] == other[:4]
    assert first == f"stopped after step {over}"
    assert 7 <= over < on
    one = go(tmp_path, RANKS).last
    for name, weight in one.items():
        assert torch.equal(timed[name], other[4][name])
        assert torch.equal(stepped[name], other[5][name])
        assert (stepped[name] - weight).norm() <= 1e-4 * weight.norm().clamp_min(1e-3), name


@pytest.mark.long
def test_gradients_that_a_recording_made_are_exchanged_like_others(told: list[dict[str, Any]]) -> None:
    (replayed, launched), (others, _) = told[0]["replays"], told[1]["replays"]
    for name, weight in launched.items():
        assert torch.equal(replayed[name], weight)
        assert torch.equal(replayed[name], others[name])


@pytest.mark.long
def test_the_model_of_communication_counts_what_is_exchanged(told: list[dict[str, Any]]) -> None:
    for number, muon in enumerate(MUONS):
        expected = sorted((one.kind, one.whole_bytes) for one in exchanges(TINY, _with(muon), WORLD))
        assert [sorted(one["counts"][number]) for one in told] == [expected] * WORLD
        reductions = [one.whole_bytes for one in exchanges(TINY, _with(muon), WORLD) if one.kind == "all_reduce"]
        assert number or len(reductions) == 3  # small gradients and the loss, the norm, the clock: one for each


@pytest.mark.long
def test_processes_share_a_score_to_the_bit(told: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    nats = []
    for number, (alone, rows) in enumerate(scores(Ranks())):
        nats.append(alone.nats)
        both = [one["scores"][number] for one in told]
        assert [one[0].nats for one in both] == [alone.nats] * WORLD
        assert sorted(both[0][1] + both[1][1]) == sorted(rows)
        assert all(0 < sum(one[1]) < 0.7 * sum(rows) for one in both)
    assert len(set(nats[1:])) == len(SCORINGS) - 1, "those that learn, do"


@pytest.mark.long
def test_processes_of_unequal_threads_share_a_score(told: list[dict[str, Any]]) -> None:
    alone = score(build(TINY, 0), TEXT, FEW).nats
    assert [one["unequal"] for one in told] == [pytest.approx(alone, rel=1e-6)] * WORLD


def odd_score(ranks: Ranks) -> float:
    """The nats of a model of odd sizes with adapters of odd ones."""
    return score(build(ODD, 0), TEXT, SLIDING.but(ttt=LORA.but(rank=1, documents=9)), ranks=ranks).nats


def scores_oddly(ranks: Ranks, folder: Path) -> None:
    """Write it down."""
    (folder / f"{ranks.rank}").write_text(repr(odd_score(ranks)))


@pytest.mark.long
def test_odd_sizes_come_to_the_same_score_in_three_processes(tmp_path: Path) -> None:
    together(scores_oddly, 3, tmp_path)
    torch.set_num_threads(1)
    assert [(tmp_path / f"{rank}").read_text() for rank in range(3)] == [repr(odd_score(Ranks()))] * 3


def test_more_processes_than_documents_have_nothing_to_do() -> None:
    """Each slot belongs to one process, those of a process lie side by side, and those of one question together."""
    for documents, world in ((64, 8), (64, 3), (11, 2), (3, 8), (1, 2), (20, 16)):
        scorer = LORA.but(documents=documents).build(build(TINY, 0), 1, 32, 8, torch.float32)
        owned = []
        for rank in range(world):
            assert scorer.share(Ranks(rank, world))
            owned.append(list(scorer._adapters.documents))
        assert [slot for slots in owned for slot in slots] == list(range(documents))
        per = scorer.together
        assert all(
            len({rank for rank, slots in enumerate(owned) for slot in slots if slot // per == part}) == 1
            for part in range(-(-documents // per))
        )
        if (documents, world) == (64, 8):
            assert [len(slots) for slots in owned] == [8] * 8


def test_bytes_and_seconds_by_hand() -> None:
    """A ring of four: each sends three quarters of the whole once, or twice to have it all."""
    assert Exchange("", "reduce_scatter", 1000).sent_bytes(4) == 750
    assert Exchange("", "all_reduce", 1000).sent_bytes(4) == 1500
    assert sent_bytes([Exchange("a", "all_gather", 8), Exchange("a", "all_reduce", 8)], 2) == {"a": 12.0}
    assert exchanges(TINY, RANKS, 1) == []
    assert Cluster(1, 1).seconds(0.0) == 0.0
    assert Cluster(1, 8).seconds(450e6) == pytest.approx(1e-3)
    assert Cluster(2, 8).seconds(450e6) == pytest.approx(450e6 / 8 / 50e9)  # the cards are slower
    assert Cluster(4, 1).seconds(50e6) == pytest.approx(1e-3)


def launches(program: str) -> None:
    """Start two processes of a program, and wait for them."""
    sys.executable = program
    launch(2, [])


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells a process that its parent died")
def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/started\nexec sleep 60\n")
    program.chmod(0o755)
    launcher = CONTEXT.Process(target=launches, args=(str(program),))
    launcher.start()
    deadline = time.monotonic() + 30
    while not (started := _numbers(tmp_path / "started")) and time.monotonic() < deadline:
        time.sleep(0.02)
    launcher.kill()
    launcher.join()
    assert len(started) == 2
    while any(map(_runs, started)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(_runs, started))


@pytest.mark.long
@pytest.mark.parametrize(("end", "status"), [("kill -TERM $$", 143), ("kill -KILL $$", 137), ("exit 3", 3), ("", 0)])
def test_a_launcher_ends_as_a_shell_would_say(
    end: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{end}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr("caddie.runtime.distributed._GRACE_SECONDS", 0.1)
    assert launch(2, []) == status


@pytest.mark.parametrize("error", [dist.DistStoreError("no libuv\nand a stack of C++"), ValueError("no libuv")])
def test_processes_that_cannot_join_say_why(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **settings: object) -> None:
        raise error

    monkeypatch.setattr(dist, "init_process_group", refuse)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"^process 0 of 2 cannot join the others: no libuv$"), join():
        pass


@pytest.mark.parametrize(("batches", "given"), [(None, "5 1"), ("3", "3 ")])
def test_a_share_of_the_cores_is_told_from_what_the_user_asked_for(
    batches: str | None, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho "$OMP_NUM_THREADS ${SHARES_CORES}" > {tmp_path}/given$RANK\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(10)), raising=False)  # as `taskset` leaves it
    if batches:
        monkeypatch.setenv("OMP_NUM_THREADS", batches)
    else:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch(2, []) == 0
    assert {(tmp_path / f"given{rank}").read_text() for rank in range(2)} == {f"{given}\n"}


def _numbers(path: Path) -> list[int]:
    words = path.read_text().split() if path.exists() else []
    return list(map(int, words)) if len(words) == 2 else []


def _runs(number: int) -> bool:
    """Return True if a process runs and is no zombie."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
