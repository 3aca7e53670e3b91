"""A public training script beside ours: started unmodified at a recipe's shape, paced by what it prints.

Its process is stopped by a signal while others have their turn. Two kinds of scripts and logs are known: the contest's
(openai/parameter-golf; environment variables, `step:K/N train_loss:… train_time:…ms`) and nanoGPT's (arguments,
`iter K: loss …, time …ms`). The script and its neighbours are copied to a temporary folder, where its data are written.
"""

import ctypes
import os
import pickle
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from contenders import documents, step_facts
from laps import WHOLE, Lap, resident_peak
from stages import tokenizer_of

from caddie.config.schedules import TrainProgress, int_at
from caddie.data.shards import open_shard, write_shard
from caddie.data.tokenizers import SentencePieceTokenizer
from caddie.doctor.pace import named
from caddie.errors import UserError
from caddie.recipes.recipe import Recipe
from caddie.report.tables import one_line

CONTEST, NANOGPT = "contest", "nanoGPT"
PATIENCE_SECONDS = 300.0
"""For the first line of a step; it may compile before."""
WARM_STEPS = 3
"""Steps whose time does not count, in the first block."""
FOREVER = 1_000_000
_CONTEST_LINE = re.compile(r"step:(\d+)/\d+ train_loss:(\S+) train_time:([\d.]+)ms")
_NANOGPT_LINE = re.compile(r"iter (\d+): loss (\S+), time ([\d.]+)ms")
_PARAMETERS = re.compile(r"model_params:\s*(\d+)|number of parameters: ([\d.]+)M")
_SCRIPTS = ("train_gpt.py", "train.py")


def _end_with_parent() -> None:
    """Have Linux kill this process when the one that started it ends, even one that was killed or stands still.

    Else a peer that is stopped for another's turn would wait, and hold its GPU's memory, for ever.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, man 2 prctl


@dataclass(frozen=True)
class Line:
    """What a line of a log says of a step."""

    step: int
    """Its number, the first is 1 for the contest's scripts and 0 for nanoGPT."""
    loss: float
    seconds: float
    """Of the step; where `total`, of all steps so far."""
    total: bool


def read_line(text: str) -> Line | None:
    """The step that a line tells of, or None where it tells of something else."""
    for pattern, total in ((_CONTEST_LINE, True), (_NANOGPT_LINE, False)):
        if found := pattern.search(text):
            return Line(int(found[1]), float(found[2]), float(found[3]) / 1e3, total)
    return None


def spans(lines: Sequence[Line]) -> list[float]:
    """Seconds of a step by each line but the first, which may tell of a pause."""
    return [
        (after.seconds - before.seconds) / (after.step - before.step) if after.total else after.seconds
        for before, after in pairwise(lines)
    ]


@dataclass(frozen=True)
class Shape:
    """What a peer is told of a recipe: its shape at the start of the run."""

    vocabulary: int
    width: int
    depth: int
    heads: int
    shared: int
    hidden: int
    length: int
    tokens: int
    """Of a step."""
    parts: int
    """Micro-batches of a step."""
    cap: float | None


def shape_of(recipe: Recipe) -> Shape:
    """The shape, or a `UserError` where the recipe's model has none that a script would understand."""
    gpt, train = recipe.model, recipe.train
    attention, moment = gpt.block.attention, TrainProgress(0, 0.0, recipe.train.budget)
    heads = getattr(attention, "heads", None)
    if heads is None:
        raise UserError(f"{recipe.name} has no attention that a peer could be told of; take the recipe baseline")
    return Shape(
        vocabulary=gpt.vocabulary,
        width=gpt.width,
        depth=gpt.depth,
        heads=heads,
        shared=getattr(attention, "key_value_heads", heads),
        hidden=gpt.block.mlp.hidden,
        length=int_at(train.sequence_length, moment),
        tokens=int_at(train.batch_tokens, moment),
        parts=train.micro_batches_at(moment),
        cap=gpt.head.softcap,
    )


def contest_environment(shape: Shape, data: Path, tokenizer: Path) -> dict[str, str]:
    """What the contest's scripts read; steps without end, every one logged, no validation before."""
    multiple, rest = divmod(shape.hidden, shape.width)
    if rest:
        raise UserError(f"the peer's MLP is a whole multiple of its width; {shape.hidden} is none of {shape.width}")
    settings = {
        "DATA_PATH": data,
        "TOKENIZER_PATH": tokenizer,
        "VOCAB_SIZE": shape.vocabulary,
        "NUM_LAYERS": shape.depth,
        "MODEL_DIM": shape.width,
        "NUM_HEADS": shape.heads,
        "NUM_KV_HEADS": shape.shared,
        "MLP_MULT": multiple,
        "LOGIT_SOFTCAP": shape.cap or 1e4,
        "TRAIN_SEQ_LEN": shape.length,
        "TRAIN_BATCH_TOKENS": shape.tokens,
        "ITERATIONS": FOREVER,
        "MAX_WALLCLOCK_SECONDS": 0,
        "VAL_LOSS_EVERY": 0,
        "TRAIN_LOG_EVERY": 5,
        "SEED": 1337,
    }
    return {name: str(value) for name, value in settings.items()}


def nanogpt_arguments(shape: Shape, device: str) -> list[str]:
    """What nanoGPT is told; its MLP is always four times as wide as the stream, and its heads share nothing."""
    settings: dict[str, Any] = {
        "dataset": "bench",
        "device": device,
        "compile": device != "cpu",
        "dtype": "float32" if device == "cpu" else "bfloat16",  # on a CPU it makes no use of it
        "n_layer": shape.depth,
        "n_head": shape.heads,
        "n_embd": shape.width,
        "block_size": shape.length,
        "batch_size": shape.tokens // shape.parts // shape.length,
        "gradient_accumulation_steps": shape.parts,
        "dropout": 0.0,
        "max_iters": FOREVER,
        "log_interval": 1,
        "eval_interval": FOREVER,
        "eval_iters": 1,
        "always_save_checkpoint": False,
    }
    return [f"--{name}={value}" for name, value in settings.items()]


def peer_flops(kind: str, shape: Shape) -> float:
    """FLOPs per token of the peer's own model, by the formula of `caddie.model.flops`."""
    keys = shape.width * shape.shared // shape.heads if kind == CONTEST else shape.width
    hidden = shape.hidden if kind == CONTEST else 4 * shape.width
    layer = 2 * shape.width * (shape.width + keys + hidden)
    products = shape.depth * layer + shape.vocabulary * shape.width
    return 6.0 * products + 12.0 * shape.depth * shape.width * (shape.length + 1) / 2


def script_of(path: Path) -> tuple[Path, str]:
    """The script that a path names, itself or in a folder, and its kind by what it reads."""
    script = next((path / name for name in _SCRIPTS if (path / name).is_file()), path)
    try:
        source = script.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"no peer at {path} ({error.strerror}); name a training script or its folder") from None
    return script, NANOGPT if "configurator.py" in source else CONTEST


class Peer:
    """The script at work; a contender."""

    def __init__(
        self,
        path: Path,
        name: str,
        settings: tuple[str, ...] = (),
        threads: int | None = None,
        shards: Path | None = None,
    ) -> None:
        script, self.kind = script_of(path)
        recipe = named(name, settings)
        shape = shape_of(recipe)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.script = script
        self._folder = tempfile.TemporaryDirectory(prefix="peer-")
        folder = Path(self._folder.name)
        for file in script.parent.glob("*.py"):
            shutil.copy(file, folder)
        self._told: queue.Queue[str | None] = queue.Queue()
        self._last = ""
        environment, arguments = dict(os.environ), list[str]()
        if self.kind == NANOGPT:
            arguments = nanogpt_arguments(shape, device)
            write_nanogpt_data(folder / "data" / "bench", shape, shards)
        else:
            data, tokenizer = shards or folder / "shards", folder / "made_up.model"
            environment |= contest_environment(shape, data.resolve(), tokenizer)
            write_contest_data(folder, shape, write_shards=shards is None)
        environment["PYTHONUNBUFFERED"] = "1"
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        self._process = subprocess.Popen(
            [sys.executable, script.name, *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.facts: dict[str, Any] = {
            **step_facts(
                tokens=shape.tokens,
                parameters=None,
                precision="bfloat16" if device == "cuda" else "float32",
                threads=threads or torch.get_num_threads(),
                attention="its own",
                compiled="torch.compile(" in script.read_text(errors="replace") and device == "cuda",
            ),
            "flops_per_token": peer_flops(self.kind, shape),
            "losses": dict[int, float](),
        }
        self._first = True

    def block(self, seconds: float) -> list[Lap]:
        """Steps for so long; the first line after a pause tells of the pause and does not count."""
        self._signal(signal.SIGCONT)
        patience = PATIENCE_SECONDS if self._first else PATIENCE_SECONDS + seconds
        wanted = 2 + (WARM_STEPS if self._first else 0)
        lines, begin = list[Line](), time.monotonic()
        while len(lines) < wanted or time.monotonic() < begin + seconds:
            if (line := self._next(begin + patience)) is not None:
                if not lines:
                    begin = time.monotonic()
                lines.append(line)
        self._first = False
        self.facts["peak_bytes"] = None if torch.cuda.is_available() else resident_peak(self._process.pid)
        self._signal(signal.SIGSTOP)
        time.sleep(0.02)
        while not self._told.empty():  # said before it was stopped
            self._understood(self._told.get())
        return [{WHOLE: span} for span in spans(lines[wanted - 2 :])]

    def close(self) -> None:
        """End it and all that it started, and remove its folder."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        self._folder.cleanup()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for text in lines:
                self._told.put(text)
        self._told.put(None)

    def _next(self, deadline: float) -> Line | None:
        """The step of the next line, if it tells of one; a peer that has ended or says nothing is a `UserError`."""
        try:
            text = self._told.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            self.close()
            raise UserError(
                f"the peer {self.script} printed no step in {PATIENCE_SECONDS:,.0f} seconds; known are the lines "
                "`step:K/N train_loss:… train_time:…ms` and `iter K: loss …, time …ms`"
            ) from None
        return self._understood(text)

    def _understood(self, text: str | None) -> Line | None:
        if text is None:
            status = self._process.wait()
            self.close()
            if status:
                raise UserError(one_line(f"the peer {self.script} failed with status {status}: {self._last}"))
            raise UserError(
                f"the peer {self.script} has ended; its log is not known, or it takes no notice of ITERATIONS: known "
                "are the lines `step:K/N train_loss:… train_time:…ms` and `iter K: loss …, time …ms`"
            )
        self._last = text.strip() or self._last
        if found := _PARAMETERS.search(text):
            self.facts["parameters"] = int(found[1]) if found[1] else round(float(found[2]) * 1e6)
        if (line := read_line(text)) is not None:
            self.facts["losses"][line.step] = line.loss
        return line


def write_nanogpt_data(folder: Path, shape: Shape, shards: Path | None) -> None:
    """Tokens as nanoGPT reads them, made up or those of the first training shard, and the size of the vocabulary."""
    folder.mkdir(parents=True)
    tokens = open_shard(training_shards(shards)[0]) if shards else documents(shape.vocabulary, 8 * shape.tokens + 1)
    for name in ("train.bin", "val.bin"):
        tokens.astype("<u2").tofile(folder / name)
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": shape.vocabulary}))


def write_contest_data(folder: Path, shape: Shape, write_shards: bool) -> None:
    """A tokenizer with so many ids, which is asked for its pieces alone, and shards of made-up tokens."""
    tokenizer = tokenizer_of(shape.vocabulary)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    (folder / "made_up.model").write_bytes(tokenizer.serialize())
    if write_shards:
        (folder / "shards").mkdir()
        write_shard(
            folder / "shards" / "fineweb_train_000000.bin", documents(shape.vocabulary, 16 * (shape.tokens + 8))
        )
        write_shard(folder / "shards" / "fineweb_val_000000.bin", documents(shape.vocabulary, 8 * shape.length + 1))


def training_shards(folder: Path) -> list[Path]:
    """The training shards in a folder of the contest's layout, in order; none is a `UserError`."""
    found = sorted(folder.glob("*_train_*.bin"))
    if not found:
        raise UserError(
            f"{folder} holds no shards *_train_*.bin; name the folder of a dataset prepared for the contest"
        )
    return found
