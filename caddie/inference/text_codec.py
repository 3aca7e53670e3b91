"""Compression with the model: any bytes into fewer and exactly back, by coding every token under its odds.

What the score promises, an arithmetic coder delivers: a text of n bytes at b bits per byte takes n · b / 8 bytes. So
this is the proof of a score that needs no trust, since the decoder has nothing but the artifact and the code. Encoder
and decoder run the same forwards on the same shapes, token after token with a cache of keys and values, in float64;
what little may differ between machines the coder absorbs (`coder.py`). A scorer that adapts does so here as well,
because the decoder can learn from what it has decoded.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from caddie.config import plain
from caddie.data.tokenizers.exact_spelling import exact_ids
from caddie.errors import UserError
from caddie.inference.range_coder import Decoder, Encoder
from caddie.model import Cache
from caddie.pack.artifact import Artifact
from caddie.report.units import whole_bytes
from caddie.runtime.progress import SILENT, Progress
from caddie.score import Layout, Scorer, Scoring, ScoringBatch, Step, Stream, Text, equal, score

Tokens = npt.NDArray[np.uint16]

_MAGIC = b"caddie:1"
_STORED, _FILE, _DOCUMENTS = 0, 1, 2
_HASH_BYTES = 8
_MOST_STREAMS, _STREAM_TOKENS = (
    64,
    2048,
)  # a stream costs about 6 bytes, and one step is little dearer for 64 than for 1
_MOST_TOKENS = 1 << 32


def compress(
    artifact: Artifact,
    documents: Sequence[bytes],
    *,
    scoring: Scoring | None = None,
    streams: int | None = None,
    progress: Progress = SILENT,
) -> bytes:
    """The documents, one or several, as few bytes; `decompress` gives back their concatenation.

    A single document is cut into streams that are coded side by side, several are dealt out among them; each stream
    begins without a past, which costs it some bytes. A scorer that learns along the whole text gets one stream alone,
    unless `streams` says otherwise, and takes the longer. `scoring` replaces the artifact's own.
    """
    whole = b"".join(documents)
    chosen = scoring or artifact.scoring
    scorer = _scorer(artifact, chosen)
    streams = streams or (1 if scorer.in_order else None)
    bos = artifact.tokenizer.bos
    ids = [exact_ids(artifact.tokenizer, document) for document in documents if document]
    if len(ids) <= 1:
        mode, lanes = _FILE, _pieces(ids, bos, streams)
    else:
        mode, lanes = _DOCUMENTS, _dealt(ids, bos, streams, scorer.per_document)
    encoder = Encoder()

    def price(logits: npt.NDArray[np.float64], targets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        encoder.encode(targets, logits)
        return targets

    _code(scorer, np.concatenate(lanes) if lanes else np.empty(0, np.uint16), list(map(len, lanes)), price, progress)
    head = _numbers(mode, len(lanes), *map(len, lanes))
    diff = {path: plain(value) for path, value in artifact.scoring.diff(chosen).items()}
    own = json.dumps(diff, separators=(",", ":")).encode() if diff else b""
    packed = head + _numbers(len(own)) + own + encoder.finish()
    body = packed if len(packed) < len(whole) + 1 else _numbers(_STORED) + whole
    identity = bytes.fromhex(artifact.sha256)[:_HASH_BYTES] + hashlib.sha256(whole).digest()[:_HASH_BYTES]
    return _MAGIC + identity + body


@dataclass(frozen=True)
class Measured:
    """A text compressed, decompressed and compared, beside what its score promises."""

    exact: bool
    """Whether the same bytes came back."""
    source_bytes: int
    compressed_bytes: int
    promised_bytes: float
    """Nats that the scorer charges for these very tokens, as bytes."""
    claimed_bytes: float
    """The same for the tokens that a score is taken of; less where the tokenizer loses something of the text."""
    streams: int
    head_bytes: int
    """Bytes before the coded tokens: format, hashes, lengths and a scoring other than the artifact's."""
    compress_seconds: float
    decompress_seconds: float

    @property
    def excess(self) -> float:
        """Compressed above promised bytes, as a fraction of the promised."""
        return self.compressed_bytes / self.promised_bytes - 1


def measure(
    artifact: Artifact,
    documents: Sequence[bytes],
    *,
    scoring: Scoring | None = None,
    progress: Progress = SILENT,
) -> Measured:
    """Compress documents, decompress them, and score the same tokens in bulk."""
    chosen, tokenizer = scoring or artifact.scoring, artifact.tokenizer
    start = time.perf_counter()
    packed = compress(artifact, documents, scoring=scoring, progress=progress)
    middle = time.perf_counter()
    whole = decompress(artifact, packed, progress=progress)
    end = time.perf_counter()
    spelled, own = [exact_ids(tokenizer, document) for document in documents], tokenizer.encode_many(documents)
    promised = _nats(artifact, chosen, spelled)
    same = all(map(np.array_equal, spelled, own))
    reader = _Reader(packed, len(_MAGIC) + 2 * _HASH_BYTES)
    lengths, _ = _head(reader) if reader.number() != _STORED else ([], b"")
    head_bytes = len(packed) - len(reader.rest())
    return Measured(
        exact=whole == b"".join(documents),
        source_bytes=len(whole),
        compressed_bytes=len(packed),
        promised_bytes=whole_bytes(promised),
        claimed_bytes=whole_bytes(promised if same else _nats(artifact, chosen, own)),
        streams=len(lengths),
        head_bytes=head_bytes,
        compress_seconds=middle - start,
        decompress_seconds=end - middle,
    )


def _nats(artifact: Artifact, scoring: Scoring, ids: Sequence[Tokens]) -> float:
    bos = artifact.tokenizer.bos
    tokens = np.concatenate([np.append(np.uint16(bos), document) for document in ids])
    return score(artifact.model, Text(tokens, bos, 1, 1, 1), scoring).nats


def decompress(artifact: Artifact, data: bytes, *, progress: Progress = SILENT) -> bytes:
    """What `compress` was given; `UserError` if the data is damaged or belongs to another artifact."""
    start = len(_MAGIC)
    if data[:start] != _MAGIC or len(data) < start + 2 * _HASH_BYTES:
        raise UserError("this is not a file that caddie compressed, or it was cut")
    model, digest = data[start : start + _HASH_BYTES], data[start + _HASH_BYTES : start + 2 * _HASH_BYTES]
    if model != bytes.fromhex(artifact.sha256)[:_HASH_BYTES]:
        raise UserError(f"this file was compressed with another artifact, whose SHA-256 begins with {model.hex()}")
    reader = _Reader(data, start + 2 * _HASH_BYTES)
    mode = reader.number()
    whole = reader.rest() if mode == _STORED else _decode(artifact, mode, reader, progress)
    if hashlib.sha256(whole).digest()[:_HASH_BYTES] != digest:
        raise UserError(
            "this file is damaged, or this machine computes too differently from the one that compressed it"
        )
    return whole


def _decode(artifact: Artifact, mode: int, reader: _Reader, progress: Progress) -> bytes:
    if mode not in (_FILE, _DOCUMENTS):
        raise UserError(f"this file is damaged, or from a later version (mode {mode})")
    lengths, own = _head(reader)
    try:
        diff = json.loads(own) if own else {}
    except (ValueError, RecursionError):
        diff = None
    if not isinstance(diff, dict):
        raise UserError("this file is damaged: its scoring cannot be read")
    scoring = artifact.scoring.but(diff)
    decoder, bos = Decoder(reader.rest()), artifact.tokenizer.bos
    tokens = np.zeros(sum(lengths), np.uint16)
    begins = np.cumsum([0, *lengths], dtype=np.int64)
    tokens[begins[:-1]] = bos

    def price(logits: npt.NDArray[np.float64], targets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return decoder.decode(logits)

    _code(_scorer(artifact, scoring), tokens, lengths, price, progress)
    if mode == _FILE:
        return artifact.tokenizer.decode(np.delete(tokens, begins[:-1]))
    cuts = np.append(np.flatnonzero(tokens == bos), len(tokens))
    return b"".join(artifact.tokenizer.decode(tokens[begin + 1 : end]) for begin, end in pairwise(cuts))


def _head(reader: _Reader) -> tuple[list[int], bytes]:
    """Tokens of each stream, and the settings in which the scoring differs from the artifact's."""
    lengths = [reader.number() for _ in range(reader.number(_MOST_TOKENS))]
    if sum(lengths) > _MOST_TOKENS or any(length < 1 for length in lengths):
        raise UserError("this file is damaged: it states lengths that no file has")
    return lengths, reader.take(reader.number())


class _Price(Protocol):
    def __call__(self, logits: npt.NDArray[np.float64], targets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]: ...


def _scorer(artifact: Artifact, scoring: Scoring) -> Scorer:
    """The scorer in float64, in which machines agree to about 1e-13."""
    model = copy.deepcopy(artifact.model).double().cpu()
    return scoring.but(precision="float64").scorer(model, artifact.tokenizer.bos)


def _code(scorer: Scorer, tokens: Tokens, lengths: Sequence[int], price: _Price, progress: Progress) -> None:
    """Run through the scorer's plan token by token; `price` codes a target under logits and says which it was.

    `tokens` are written as they become known, which for the encoder changes nothing.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    layout = Layout(ends - np.array(lengths, np.int64), ends - 1)
    stream, done, total = Stream(tokens, layout), 0, layout.predictions
    for step in scorer.plan(layout, len(lengths)):
        batches: list[ScoringBatch] = []
        waiting = list(zip(step.windows, step.slots, strict=True))
        while waiting:
            # A window waits for the one before it in its stream, whose tokens are its context.
            ready = [pair for pair in waiting if stream.ready(pair[0])]
            waiting = [pair for pair in waiting if pair not in ready]
            for question in equal(Step(*zip(*ready, strict=True)), stream, len(ready)):
                _code_windows(scorer, question, tokens, price)
                batches.append(question._replace(inputs=stream.inputs(question.windows)))
            for window, _ in ready:
                stream.mark(window)
                done += window.end - window.first
            progress.step({"event": "tokens", "done": done, "total": total})
        scorer.update(batches, stream.past)
    stream.check_complete()


def _code_windows(scorer: Scorer, question: ScoringBatch, tokens: Tokens, price: _Price) -> None:
    """The scored predictions of equally long windows, side by side."""
    first = np.array([window.first for window in question.windows])
    cache = Cache()
    inputs = question.inputs[:, : question.context + 1]
    for offset in range(1, question.inputs.shape[1] - question.context + 1):
        logits = scorer.logits(torch.from_numpy(inputs), question.slots, 1, cache)[:, -1]
        symbols = price(logits.numpy(), tokens[first + offset].astype(np.int64))
        tokens[first + offset] = symbols
        inputs = symbols[:, None]


def _pieces(ids: Sequence[Tokens], bos: int, streams: int | None) -> list[Tokens]:
    """One text in about equal pieces, each begun by `bos`."""
    if not ids:
        return []
    count = min(len(ids[0]), streams or _streams(len(ids[0])))
    return [np.append(np.uint16(bos), piece) for piece in np.array_split(ids[0], count)]


def _dealt(ids: Sequence[Tokens], bos: int, streams: int | None, apart: bool) -> list[Tokens]:
    """Documents, each begun by `bos`, in streams of about equal length, in order; or each in a stream of its own."""
    texts = [np.append(np.uint16(bos), document) for document in ids]
    total = sum(map(len, texts))
    count = len(texts) if apart else streams or _streams(total)
    lanes: list[list[Tokens]] = [[] for _ in range(count)]
    done = 0
    for index, text in enumerate(texts):
        lanes[index if apart else done * count // total].append(text)
        done += len(text)
    return [np.concatenate(lane) for lane in lanes if lane]


def _streams(tokens: int) -> int:
    return min(_MOST_STREAMS, 1 + tokens // _STREAM_TOKENS)


def _numbers(*values: int) -> bytes:
    """Numbers as bytes of seven bits, the lowest first, the last without the top bit (LEB128)."""
    found = bytearray()
    for value in values:
        while value > 127:
            found.append(value & 127 | 128)
            value >>= 7
        found.append(value)
    return bytes(found)


class _Reader:
    """Reads what `_numbers` and plain bytes make up; `UserError` where the data ends too early."""

    def __init__(self, data: bytes, place: int) -> None:
        self._data, self._place = data, place

    def number(self, most: int = 1 << 62) -> int:
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 127) << shift
            shift += 7
            if value > most:
                raise UserError("this file is damaged: it states a length that no file has")
            if byte < 128:
                return value

    def take(self, count: int) -> bytes:
        found = self._data[self._place : self._place + count]
        if len(found) < count:
            raise UserError("this file was cut; take it from where it came again")
        self._place += count
        return found

    def rest(self) -> bytes:
        return self._data[self._place :]
