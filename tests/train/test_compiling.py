"""Compiling: as set, or if it wins back its time; a failure never stops a run."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from recording import Recorder
from torch import Tensor

from caddie.config.schedules import Budget, TrainProgress
from caddie.data.loaders import TrainingData
from caddie.errors import UserError
from caddie.model import GPT, Block, GroupedQueryAttention, Model, NTKRoPE, PlainRoPE, ReluSquared, build
from caddie.report.display import start_line
from caddie.runtime.autotune import COMPILE_SECONDS, COMPILED_GAIN, compiled_here, worth_compiling
from caddie.runtime.distributed import Ranks
from caddie.train import warmup as module
from caddie.train.loop import train
from caddie.train.settings import Train
from caddie.train.trainer import Trainer

TINY = GPT(
    vocabulary=32,
    width=16,
    depth=1,
    block=Block(attention=GroupedQueryAttention(heads=2, key_value_heads=1), mlp=ReluSquared(hidden=16)),
)
LONG = Train(seconds=1e6, batch_tokens=64, micro_batches=1, sequence_length=32, warmup_steps=1, precision="float32")
SHORT = LONG.but(seconds=60.0)
STEPS = LONG.but(seconds=None, steps=1_000_000)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Callable[..., Any]]:
    """Functions given to the compiler, which changes nothing; it exists whatever this machine has."""
    given: list[Callable[..., Any]] = []

    def compile_(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        given.append(function)
        return lambda *inputs: function(*inputs)

    monkeypatch.setattr(torch, "compile", compile_)
    dynamo = SimpleNamespace(
        config=SimpleNamespace(recompile_limit=8), utils=SimpleNamespace(counters={"stats": Counter()})
    )
    monkeypatch.setitem(vars(torch), "_dynamo", dynamo)  # the true one takes seconds to import
    monkeypatch.setattr("shutil.which", lambda name: name)
    return given


def warmed(config: Train) -> Trainer:
    trainer = Trainer(TINY, config, 7, Ranks())
    module.warm_up(trainer, (2, 32))
    return trainer


def test_break_even() -> None:
    even = COMPILE_SECONDS / COMPILED_GAIN
    assert not worth_compiling(even, 1)
    assert worth_compiling(1.01 * even, 1)
    assert not worth_compiling(1.01 * even, 2)
    assert not worth_compiling(60.0, 1), "the demonstration never waits for a compiler"


@pytest.mark.parametrize(("seconds", "patience"), [(None, 0.5), (10.0, 0.5), (60.0, 1.2), (600.0, 3.0)])
def test_a_long_run_is_chosen_for_with_patience(seconds: float | None, patience: float) -> None:
    assert module._choice_seconds(Budget(seconds, None if seconds else 10)) == pytest.approx(patience)


def test_a_run_of_ten_minutes_asks_the_compiler() -> None:
    assert worth_compiling(600.0, 1)


def test_kept_graphs_are_told_apart_by_the_instructions_of_the_cpu(
    asked: list[Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.compiler.config.patch(cache_key_tag="mine"):
        for capability in ("AVX2", "AVX2", "AVX512"):
            monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda name=capability: name)
            compiled_here(print)
        assert torch.compiler.config.cache_key_tag == "mineAVX2AVX512"
    assert asked == [print] * 3


@pytest.mark.long
def test_an_uncompiled_step_leaves_the_compiler_alone() -> None:
    """Importing the compiler takes a second and 150 MiB."""
    program = (
        "import sys; from caddie.recipes.catalog import find; from caddie.runtime.distributed import Ranks\n"
        "from caddie.train.warmup import warm_up; from caddie.train.trainer import Trainer\n"
        "recipe = find('baseline_mini')\n"
        "train = recipe.train.but(compile='never', steps=3, seconds=None)\n"
        "warm_up(Trainer(recipe.model, train, 0, Ranks()), (8, 128))\n"
        "print(sorted({'torch._dynamo', 'torch._inductor', 'sympy'} & {*sys.modules}))"
    )
    given = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert given.stdout == "[]\n", given.stderr


@pytest.mark.long
def test_a_graph_has_the_cosines_of_its_own_positions() -> None:
    """Tables are constants, not computed anew by each kernel; other positions are another graph."""
    torch.compiler.reset()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def logits(model: Model, ids: Tensor) -> Tensor:
        answer: Tensor = model(ids, ids == 1, torch.float32)
        return answer

    ids = torch.arange(32).reshape(2, 16) % 30
    compiled = torch.compile(logits, backend=keep, fullgraph=True, dynamic=False)
    every = (PlainRoPE(), PlainRoPE(base=100.0), NTKRoPE(native_length=8), PlainRoPE(dims=4))
    for number, positions in enumerate(every, 1):
        model = build(TINY.but({"block.attention.rope": positions}), 0)
        for parameter in model.parameters():
            parameter.detach().normal_(0.0, 0.3, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(compiled(model, ids), logits(model, ids), rtol=1e-4, atol=1e-4)
        assert len(graphs) == number
    assert not any(node.target in ("cos", torch.cos) for graph in graphs for node in graph.graph.nodes)


@pytest.mark.slow
def test_kept_graphs_of_other_instructions_give_the_same_numbers(tmp_path: Path) -> None:
    """Without the tag the second process is wrong by thousands, or ends with a broken heap (torch 2.13)."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not shutil.which("g++"):
        pytest.skip("needs a CPU with AVX-512 and g++")
    program = (
        "import torch; from caddie.runtime.autotune import compiled_here\n"
        "x = torch.randn(40, 1000); f = lambda x: (x.sigmoid() * x.relu() + 1).sum(1)\n"
        "print(torch.allclose(compiled_here(f)(x), f(x), atol=1e-2))"
    )
    for capability in ("avx2", "avx512"):
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "ATEN_CPU_CAPABILITY": capability}
        given = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert given.stdout == "True\n", given.stderr


@pytest.mark.parametrize("config", [SHORT, STEPS, LONG.but(compile="never")])
def test_what_cannot_pay_is_not_compiled(config: Train, asked: list[Callable[..., Any]]) -> None:
    trainer = warmed(config)
    assert not trainer.compiled
    assert not asked
    assert trainer.forward == trainer._losses


def test_always_is_always(asked: list[Callable[..., Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = warmed(STEPS.but(compile="always"))
    assert trainer.compiled
    assert len(asked) == 1
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UserError, match="needs a compiler"):
        Trainer(TINY, STEPS.but(compile="always"), 7, Ranks())
    assert not warmed(LONG).compilable


def test_threads_are_not_chosen_by_the_time_that_the_compiler_takes(
    asked: list[Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[int, bool]] = []

    def quickest(choices: list[Any], work: Callable[[Any], None], *seconds: float) -> Any:
        for choice in choices:
            work(choice)
            ran.append((choice.threads, trainer.compiled))
        return choices[-1]

    monkeypatch.setattr(module, "thread_counts", lambda: [1, 2])
    monkeypatch.setattr(module, "quickest", quickest)
    trainer = Trainer(TINY, LONG.but(compile="always"), 7, Ranks())
    compiled = trainer.forward
    threads = torch.get_num_threads()
    chosen, _ = module.warm_up(trainer, (2, 32))
    torch.set_num_threads(threads)
    assert ran == [(1, False), (2, False)]
    assert chosen.threads == 2
    assert trainer.compiled
    assert trainer.forward is compiled
    assert len(asked) == 1


@pytest.mark.parametrize("faster", [True, False])
def test_the_faster_is_kept(faster: bool, asked: list[Callable[..., Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[bool] = []

    def quickest(choices: list[Any], work: Callable[[Any], None], *seconds: float) -> Any:
        for choice in choices:
            work(choice)
        ran.extend(choice for choice in choices if isinstance(choice, bool))
        return faster if True in choices else choices[0]

    monkeypatch.setattr(module, "thread_counts", lambda: [1])
    monkeypatch.setattr(module, "quickest", quickest)
    trainer = warmed(LONG)
    assert ran == [True, False]
    assert trainer.compiled is faster
    assert (trainer.forward != trainer._losses) is faster
    assert len(asked) == 1


def test_a_broken_compiler_is_told_and_left(
    tmp_path: Path, asked: list[Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def fail(*inputs: Any) -> None:
            raise RuntimeError("no such header\nand much more")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr("caddie.train.warmup.worth_compiling", lambda seconds, shapes: True)
    events: list[dict[str, Any]] = []
    shards = [np.random.default_rng(0).integers(0, 32, 2000).astype(np.uint16)]
    config = LONG.but(steps=2, seconds=60.0)
    done = train(TINY, config, TrainingData(shards, 1), seed=7, folder=tmp_path, progress=Recorder(events.append))
    assert done.steps == 2
    assert [event["compiled"] for event in events if event["event"] == "start"] == [False]
    notes = [event["text"] for event in events if event["event"] == "note"]
    assert notes == ["compiling failed, so the model runs uncompiled: no such header"]


@dataclass(frozen=True)
class Pair(Ranks):
    """Two processes, of which the other says what it is asked to and sums are as they are."""

    world: int = 2
    other: float = 0.0
    told: list[float] = field(default_factory=list)
    """Return the value of this process; the other waits until there is one."""

    def maximum(self, *values: float) -> list[float]:
        self.told.extend(values)
        return [max(value, self.other) for value in values]

    def begin_sum(self, tensors: Any) -> Callable[[], None]:
        raise AssertionError("a rank whose compiler failed is not there to sum with")


@pytest.mark.parametrize(("here", "other"), [(True, 0.0), (False, 1.0)])
def test_a_compiler_that_is_broken_on_one_rank_is_left_on_all_before_they_exchange_anything(
    here: bool, other: float, asked: list[Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*inputs: Any) -> None:
        raise RuntimeError("no such header")

    if here:
        monkeypatch.setattr(torch, "compile", lambda function, **options: broken)
    ranks = Pair(other=other)
    trainer = Trainer(TINY, STEPS.but(micro_batches=2), 7, ranks)
    trainer.compile(True)  # as on a GPU, where nothing is timed
    warming = module._WarmUp(trainer, (1, 32))
    assert not warming.timed
    warming.points = [TrainProgress(0, 0.0, STEPS.budget)]
    warming.choose_compiling()
    assert ranks.told == [float(here)]
    assert not trainer.compiled
    assert trainer.forward == trainer._losses
    assert all(parameter.grad is None for parameter in trainer.parameters.values())
    why = "no such header" if here else "in another process"
    assert trainer.notes == [f"compiling failed, so the model runs uncompiled: {why}"]


@pytest.mark.parametrize("chosen", [True, False])
def test_a_compiler_that_is_broken_at_a_later_shape_is_left_too(
    chosen: bool, asked: list[Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the steps of the warm-up, where it would be a traceback; what was not chosen is not asked for again."""
    trained: list[TrainProgress] = []
    trainer = Trainer(TINY, STEPS, 7, Ranks())
    gradients = trainer.gradients

    def broken(batches: Any, moment: TrainProgress, bos: int) -> Any:
        trained.append(moment)
        if trainer.compiled and moment is late:
            raise RuntimeError("no lowering")
        return gradients(batches, moment, bos)

    monkeypatch.setattr(trainer, "gradients", broken)
    monkeypatch.setattr(module, "quickest", lambda choices, run, *seconds: choices[0 if chosen else 1])
    early, late = TrainProgress(0, 0.0, STEPS.budget), TrainProgress(1, 0.5, STEPS.budget)
    monkeypatch.setattr(module, "worth_compiling", lambda seconds, shapes: True)
    trainer.compilable = True
    warming = module._WarmUp(trainer, (2, 32))
    warming.timed, warming.points = True, [early, late]
    warming.choose_compiling()
    assert trained == ([early, late] if chosen else [early])
    assert not trainer.compiled
    assert trainer.forward == trainer._losses
    assert trainer.notes == (["compiling failed, so the model runs uncompiled: no lowering"] if chosen else [])


def test_the_choice_is_shown() -> None:
    event = {"precision": "bfloat16", "threads": 2, "compiled": False, "attention": "explicit matmuls"}
    assert start_line(event) == "bfloat16, 2 threads, not compiled, attention by explicit matmuls"
    assert start_line({**event, "threads": 1, "compiled": True, "attention": ""}) == "bfloat16, 1 thread, compiled"
