"""Training steps of a recipe as the program makes them, and the rate of matrix products that the device reaches."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from laps import WHOLE, Lap, Repeated

from caddie.config.schedules import int_at
from caddie.data.loaders import Integers
from caddie.data.shards import Tokens, open_shard
from caddie.doctor.pace import named
from caddie.model.flops import Flops, count
from caddie.ops import product_dtype
from caddie.runtime.distributed import Ranks
from caddie.train.prefetch import AsyncScalar, prefetch
from caddie.train.trainer import Trainer
from caddie.train.warmup import warm_up

BOS = 1
DOCUMENT_TOKENS = 600
"""Mean length of the made-up documents, about that of web pages."""


def documents(vocabulary: int, length: int, bos: int = BOS, seed: int = 0) -> Tokens:
    """Random tokens in documents of random lengths; constant data would be timed 25 to 50 % too quick."""
    chance = np.random.default_rng(seed)
    tokens = chance.integers(bos + 1, vocabulary, length, dtype=np.uint16)
    tokens[chance.random(length) < 1 / DOCUMENT_TOKENS] = bos
    tokens[0] = bos
    return tokens


def step_facts(
    *, tokens: int, parameters: int | None, precision: str, threads: int, attention: str, compiled: bool
) -> dict[str, Any]:
    """What is known of training steps beside their time; `tokens` are those of one step."""
    return {
        "tokens": tokens,
        "parameters": parameters,
        "precision": precision,
        "threads": threads,
        "attention": attention,
        "compiled": compiled,
        "peak_bytes": None,
    }


def formula(work: Flops) -> str:
    """The sum of a step's FLOPs per token, for people."""
    return f"6 x {work.products:,} + 12 x {work.attention:,.0f} = {work.per_token / 1e6:,.2f} MFLOP per token"


class OurSteps(Repeated):
    """Steps of the trainer of real runs after its warm-up, with the recipe's loader; the facts have their losses.

    `at` is the shape of the graph: 0 that of the start of the run, -1 that of its end. `mode` compiles in one of
    PyTorch's modes what the trainer would compile in the default one.
    """

    first = "batch"

    def __init__(
        self,
        name: str,
        settings: tuple[str, ...] = (),
        threads: int | None = None,
        at: int = 0,
        *,
        shards: Sequence[Path] = (),
        seed: int = 0,
        mode: str | None = None,
    ) -> None:
        super().__init__(threads)
        recipe = named(name, settings)
        train = recipe.train
        self.trainer = trainer = Trainer(recipe.model, train, seed, Ranks(device=self.device))
        if mode is not None:
            trainer.compiled_losses = torch.compile(trainer._losses, dynamic=False, mode=mode)
            trainer.compile(True)
        self._flying: AsyncScalar | None = None
        text = [open_shard(path) for path in shards]
        text = text or [documents(recipe.model.vocabulary, 8 * trainer.micro_tokens + 1)]
        stream = train.loader.build(
            text, tokens=trainer.micro_tokens, sequence_length=train.longest_row, seed=seed, bos=BOS
        )
        rows = stream.micro_batch(0).inputs.shape
        execution, _ = warm_up(trainer, rows)
        self._open = ExitStack()
        self.batches = self._open.enter_context(prefetch(stream, trainer.indices(0), self.device, BOS))
        self._cut()
        self._recipe, self._seen = recipe, mean_seen(stream.micro_batch(0).inputs, train.longest_row)
        self.facts = step_facts(
            tokens=0,
            parameters=recipe.parameters,
            **execution._asdict(),
            attention=trainer.attention(rows[1]),
            compiled=bool(trainer.compiled),
        )
        self.facts["losses"] = list[float]()
        self.turn_to(at)

    def turn_to(self, at: int) -> None:
        """Go on with the shape number `at` of the run."""
        train = self._recipe.train
        self.moment = list(self.trainer.shapes().values())[at]
        work = count(self._recipe.model, train.sequence_length, self.moment.progress, self._seen)
        self.facts |= {
            "tokens": int_at(train.batch_tokens, self.moment),
            "progress": self.moment.progress,
            "flops_per_token": work.per_token,
            "formula": formula(work),
        }
        self._pace = None

    def _cut(self) -> None:
        """Marks where the parts of a step meet: around each forward, and before the first exchange of gradients."""
        forward, first = self.trainer.forward, next(iter(self.trainer.updaters.values()))
        launch, mark = first.launch, self.watch.mark

        def cut_forward(*given: Any) -> Any:
            mark("forward")
            found = forward(*given)
            mark("backward")
            return found

        def cut_launch() -> None:
            mark("optimizer")
            launch()

        self.trainer.forward = cut_forward
        first.launch = cut_launch  # type: ignore[method-assign]

    def once(self) -> None:
        """A step as a run makes it, and what follows it; the loss is read when the next step has been launched."""
        self.watch.mark("batch")
        launched = self.trainer.launch(self.batches, self.moment, BOS)
        if self._flying is not None:
            self.facts["losses"].append(self._flying.read())
        self._flying = launched
        self.trainer.zero_grad()
        self.trainer.update_average(self.moment, 1.0)
        later = replace(self.moment, step=self.moment.step + 1)  # rates follow the steps, the clock stands still
        if later.progress < 1.0 and self.trainer.shape(later) == self.trainer.shape(self.moment):
            self.moment = later

    def close(self) -> None:
        """End the thread that reads ahead."""
        self._open.close()


def mean_seen(inputs: Integers, longest: int) -> float:
    """Positions of its own document that a token of these rows sees on average, itself included, at most `longest`."""
    place = np.broadcast_to(np.arange(inputs.shape[1]), inputs.shape)
    begins = np.maximum.accumulate(np.where(inputs == BOS, place, 0), axis=1)
    return float(((place - begins) % longest + 1).mean())


class MatrixProducts(Repeated):
    """Square matrix products, the roof that steps are held against: floating-point operations of one are `flops`."""

    first = "float32"

    def __init__(self, size: int | None = None, threads: int | None = None) -> None:
        super().__init__(threads)
        size = size or (8192 if self.device.type == "cuda" else 1024)
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        formats = {name: product_dtype(self.device, getattr(torch, name)) for name in ("float32", "bfloat16")}
        self.pairs = {
            name: (
                torch.randn(size, size, device=self.device).to(dtype),
                torch.randn(size, size, device=self.device).to(dtype),
            )
            for name, dtype in formats.items()
        }
        self.facts = {"flops": 2 * size**3, "threads": torch.get_num_threads()}

    def once(self) -> None:
        """One product in each number format."""
        for name, (a, b) in self.pairs.items():
            self.watch.mark(name)
            a @ b


def rates(rounds: Sequence[Sequence[Lap]], flops: float) -> dict[str, float]:
    """FLOP per second by number format: the best of all products, since it is a roof."""
    laps = [lap for laps in rounds for lap in laps]
    return {part: flops / min(lap[part] for lap in laps) for part in laps[0] if part != WHOLE}
