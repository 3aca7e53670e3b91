"""Orders in which training reads token shards, by random access, so the position of a run is one integer.

Ranks need no communication: in accumulation step a of training step s, rank r reads the micro-batch with the index
(s * accumulation + a) * world + r.
"""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from caddie.config import Config, Count
from caddie.data.shards import Tokens, read
from caddie.errors import UserError

Integers = npt.NDArray[np.int64]
T = TypeVar("T")

BOS_SCAN = 1 << 20
"""Tokens that are searched at once for the first document of a shard."""


@dataclass(frozen=True)
class TrainingData:
    """Token shards to train on; documents begin with `bos`."""

    shards: Sequence[Tokens]
    bos: int
    documents_sha256: str = ""
    """Hash of the set of documents; see `corpus.set_sha256`."""
    tokenizer_sha256: str = ""
    """Hash of the tokenizer."""
    bits_per_nat: float | None = None
    """Bits per byte of the text that equal one nat per token; None where its bytes are unknown."""
    check_unchanged: Callable[[], None] | None = None
    """Raises an error if the shards have been changed."""
    prefixes: Callable[[], Integers] | None = None
    """Returns the tokenizer's `prefixes`, for `train.prefix_loss`."""

    @property
    def identity(self) -> str:
        """Hash that a checkpoint stores, to refuse other training data."""
        return self.documents_sha256 + self.tokenizer_sha256


@dataclass(frozen=True)
class Batch:
    """Inputs, and targets one token later; both int64 (rows, sequence length)."""

    inputs: Integers
    targets: Integers

    def begun(self, bos: int) -> int:
        """Return the number of documents that begin in the inputs."""
        return int(np.count_nonzero(self.inputs == bos))


def hold_out(shards: Sequence[Tokens], tokens: int) -> tuple[list[Tokens], Tokens]:
    """Return the shards without their last `tokens` tokens, and these; `UserError` if nothing is left to train on.

    The held-out tokens may begin within a document; training then reads the start of that document.
    """
    kept, held = list(shards), np.empty(0, np.uint16)
    while kept and len(held) < tokens:
        shard = kept.pop()
        cut = max(0, len(shard) - (tokens - len(held)))
        held = np.concatenate([read(shard, cut, len(shard)), held])
        kept += [shard[:cut]] if cut else []
    if not kept:
        raise UserError(f"train.held_out_tokens: the training shards hold {len(held):,} tokens in all; hold out fewer")
    return kept, held


class Stream(ABC):
    """Endless training batches, read by random access."""

    @abstractmethod
    def micro_batch(self, index: int) -> Batch:
        """Return batch number `index`, from 0."""


class Loader(Config):
    """The order in which training reads its shards."""

    @abstractmethod
    def build(self, shards: Sequence[Tokens], *, tokens: int, sequence_length: int, seed: int, bos: int) -> Stream:
        """Return the stream whose micro-batches hold `tokens` tokens in rows of `sequence_length`.

        `bos` is the id that begins every document. Raises `UserError` if `tokens` is no multiple of `sequence_length`,
        or if the shards are too small for one micro-batch.
        """


Begin = Literal["seed", "first shard"]


class SequentialStream(Loader):
    """Read the shards one after the other, endlessly: the contest baseline's order.

    A micro-batch advances by tokens + 1, so one token in tokens + 1 is never predicted.
    """

    begin: Begin = "seed"
    """First position: drawn from the seed, so seeds are independent, or the first shard's start, as in the contest."""

    def build(self, shards: Sequence[Tokens], *, tokens: int, sequence_length: int, seed: int, bos: int) -> Stream:
        _row_count(tokens, sequence_length)
        _check_enough(total := sum(map(len, shards)), tokens)
        stream = _Sequential(shards, tokens, sequence_length)
        return stream if self.begin == "first shard" else _RandomStart(stream, seed, total // (tokens + 1), 1)


class ShuffledSequences(Loader):
    """Read the rows of all shards in random order, each once per epoch.

    Every epoch cuts each shard into rows at a new random offset. This is the records' ShuffledSequenceLoader, except
    that the order follows the run's seed, not the rank.
    """

    def build(self, shards: Sequence[Tokens], *, tokens: int, sequence_length: int, seed: int, bos: int) -> Stream:
        return _Epochs(shards, tokens, sequence_length, seed, _shuffled)


class CoprimeStride(Loader):
    """Walk each shard by a random stride coprime to its number of blocks, mixing shards at random (#726).

    The k-th read of a shard is block (start + k * stride) modulo its blocks, so each block is read once per epoch. The
    next shard is drawn in proportion to the blocks it has left. #726 and #1060 also limit a batch to 8 shards at first
    and 32 after 1,800 batches, drawn by powers from 0.9 to 0.5 of the blocks left; here a batch may mix any shards.
    """

    def build(self, shards: Sequence[Tokens], *, tokens: int, sequence_length: int, seed: int, bos: int) -> Stream:
        return _Epochs(shards, tokens, sequence_length, seed, _coprime)


class PackedDocuments(Loader):
    """Pack consecutive documents into one long row, for an attention with the scope `document`.

    The order is sequential, except that a shard is read from its first document on and its tail is skipped.
    """

    begin: Begin = "seed"
    """First position: drawn from the seed, so seeds are independent, or the first shard's start, as in the contest."""

    group: Count = 1
    """Consecutive micro-batches that must fit one shard together. The contest's scripts use the number of ranks."""

    def build(self, shards: Sequence[Tokens], *, tokens: int, sequence_length: int, seed: int, bos: int) -> Stream:
        """Return a stream of one row per micro-batch; `sequence_length` is ignored."""
        stream = _Packed(shards, tokens, bos, self.group)
        return stream if self.begin == "first shard" else _RandomStart(stream, seed, int(stream.ends[-1]), self.group)


@contextmanager
def prefetched(make: Callable[[int], T], indices: Iterable[int], ready: int) -> Iterator[Generator[T]]:
    """Yield an iterator over `make(index)` in order, computed by a background thread, `ready` results ahead.

    An exception of `make` is raised where its result is taken. Leaving the block waits for the call in progress and
    cancels the others.
    """
    executor, remaining = ThreadPoolExecutor(1, "prefetch"), iter(indices)
    pending = deque(executor.submit(make, index) for index in islice(remaining, ready))

    def results() -> Generator[T]:
        while pending:
            future = pending.popleft()
            pending.extend(executor.submit(make, index) for index in islice(remaining, 1))
            yield future.result()

    try:
        yield results()
    finally:
        executor.shutdown(cancel_futures=True)


class _Sequential(Stream):
    def __init__(self, shards: Sequence[Tokens], tokens: int, sequence_length: int) -> None:
        self.shards, self.tokens, self.sequence_length = shards, tokens, sequence_length
        self.ends = np.cumsum([len(shard) for shard in shards])

    def micro_batch(self, index: int) -> Batch:
        offset = index * (self.tokens + 1) % int(self.ends[-1])
        number = int(np.searchsorted(self.ends, offset, "right"))
        position = offset - int(self.ends[number]) + len(self.shards[number])
        pieces: list[Tokens] = []
        missing = self.tokens + 1
        while missing:
            pieces.append(read(self.shards[number], position, position + missing))
            missing -= len(pieces[-1])
            number, position = (number + 1) % len(self.shards), 0
        span = np.concatenate(pieces).astype(np.int64)
        return Batch(span[:-1].reshape(-1, self.sequence_length), span[1:].reshape(-1, self.sequence_length))


class _RandomStart(Stream):
    """A stream read from a random start on: one of `starts` positions, `size` micro-batches apart."""

    def __init__(self, stream: Stream, seed: int, starts: int, size: int) -> None:
        self.stream, self.first = stream, int(np.random.default_rng(seed).integers(starts)) * size

    def micro_batch(self, index: int) -> Batch:
        return self.stream.micro_batch(self.first + index)


class _Packed(Stream):
    def __init__(self, shards: Sequence[Tokens], tokens: int, bos: int, group: int) -> None:
        self.shards, self.tokens, self.group = shards, tokens, group
        self.first = [_first_document(shard, bos) for shard in shards]
        available = [len(shard) - first for shard, first in zip(shards, self.first, strict=True)]
        self.ends = np.cumsum([count // (group * (tokens + 1)) for count in available])
        _check_enough(
            max(available, default=0), group * (tokens + 1) - 1, "no shard holds more than {} from a document on"
        )

    def micro_batch(self, index: int) -> Batch:
        span, member = divmod(index, self.group)
        span %= int(self.ends[-1])
        number = int(np.searchsorted(self.ends, span, "right"))
        span -= int(self.ends[number - 1]) if number else 0
        begin = self.first[number] + (span * self.group + member) * (self.tokens + 1)
        row = read(self.shards[number], begin, begin + self.tokens + 1)[None].astype(np.int64)
        return Batch(row[:, :-1], row[:, 1:])


Order = Callable[[np.random.Generator, Integers], tuple[Integers, Integers]]
"""Generator and number of blocks of each shard -> shard and block of every row of an epoch."""


class _Epochs(Stream):
    """Epochs of rows, each in an order drawn by `order`."""

    def __init__(self, shards: Sequence[Tokens], tokens: int, sequence_length: int, seed: int, order: Order) -> None:
        self.shards, self.sequence_length, self.seed, self.draw_order = shards, sequence_length, seed, order
        self.rows = _row_count(tokens, sequence_length)
        _check_enough(sum(map(len, shards)), tokens)
        # Any phase below the sequence length leaves this many blocks, so every epoch has the same number of rows.
        sizes = np.array([len(shard) for shard in shards], np.int64)
        self.blocks = np.where(sizes > sequence_length, np.maximum(sizes // sequence_length - 1, 1), 0)
        self.phases = np.minimum(sizes - self.blocks * sequence_length, sequence_length)
        self.epoch_rows = int(self.blocks.sum())
        _check_enough(int(sizes.max()), sequence_length, "no shard holds more than {}")
        self.order = lru_cache(2)(self._order)

    def micro_batch(self, index: int) -> Batch:
        rows: list[Tokens] = []
        for number in range(index * self.rows, (index + 1) * self.rows):
            epoch, row = divmod(number, self.epoch_rows)
            shards, begins = self.order(epoch)
            rows.append(read(self.shards[shards[row]], begins[row], begins[row] + self.sequence_length + 1))
        stacked = np.stack(rows).astype(np.int64)
        return Batch(np.ascontiguousarray(stacked[:, :-1]), np.ascontiguousarray(stacked[:, 1:]))

    def _order(self, epoch: int) -> tuple[Integers, Integers]:
        generator = np.random.default_rng([self.seed, epoch])
        phases = generator.integers(self.phases)
        shards, blocks = self.draw_order(generator, self.blocks)
        return shards, phases[shards] + blocks * self.sequence_length


def _shuffled(generator: np.random.Generator, blocks: Integers) -> tuple[Integers, Integers]:
    ends = np.cumsum(blocks)
    shards = np.searchsorted(ends, rows := generator.permutation(int(ends[-1])), "right")
    return shards, rows - (ends - blocks)[shards]


def _coprime(generator: np.random.Generator, blocks: Integers) -> tuple[Integers, Integers]:
    # Drawing shards in proportion to the blocks they have left is the same as shuffling all the draws.
    shards = generator.permutation(np.repeat(np.arange(len(blocks)), blocks))
    walked = np.empty_like(shards)
    walked[np.argsort(shards, kind="stable")] = np.concatenate([_walk(generator, int(count)) for count in blocks])
    return shards, walked


def _walk(generator: np.random.Generator, count: int) -> Integers:
    if count == 0:
        return np.empty(0, np.int64)
    start, stride = int(generator.integers(count)), int(generator.integers(count))
    while math.gcd(stride, count) != 1:
        stride = int(generator.integers(count))
    return (start + np.arange(count, dtype=np.int64) * stride) % count


def _row_count(tokens: int, sequence_length: int) -> int:
    if tokens < sequence_length or tokens % sequence_length:
        raise UserError(f"{tokens:,} tokens per micro-batch are not whole rows of {sequence_length:,}")
    return tokens // sequence_length


def _check_enough(available: int, tokens: int, held: str = "the training shards hold {}") -> None:
    if available <= tokens:
        needed = f"a micro-batch needs {tokens + 1:,}; use more text or a smaller batch"
        raise UserError(f"{held.format(f'{available:,} tokens')}, and {needed}")


def _first_document(shard: Tokens, bos: int) -> int:
    begins = range(0, len(shard), BOS_SCAN)
    found = ((begin, np.flatnonzero(read(shard, begin, begin + BOS_SCAN) == bos)) for begin in begins)
    return next((begin + int(places[0]) for begin, places in found if len(places)), len(shard))
