"""Lossless compression of any bytes with the model: code every token under its predicted probabilities.

A text of n bytes scored at b bits per byte takes about n * b / 8 bytes, which proves the score. Encoder and decoder run
the same forwards in float64, token after token; `range_coder` absorbs small differences between machines.
"""

import copy
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO

import numpy as np
import numpy.typing as npt
import torch

from caddie.config import plain
from caddie.data.shards import Tokens, split_documents
from caddie.data.tokenizers.exact_spelling import exact_ids
from caddie.errors import UserError
from caddie.inference.range_coder import Decoder, Encoder, Logits
from caddie.model import Cache
from caddie.pack.artifact import Artifact
from caddie.pack.compress import Pack
from caddie.report.units import whole_bytes
from caddie.runtime.distributed import Ranks
from caddie.runtime.progress import SILENT, Progress
from caddie.score import Layout, Scorer, Scoring, ScoringBatch, Step, Stream, Text, same_shape_batches, score
from caddie.score.windows import check_windows
from caddie.train.stage_memory import check_stages

Symbols = npt.NDArray[np.int64]
Coder = Callable[[Logits, Symbols], Symbols]
"""Codes symbols (rows,) under logits (rows, vocabulary) and returns them; a decoder ignores the symbols given."""

VERSION = 1
"""Version of the format."""
_NAME = b"caddie:"
_MAGIC = _NAME + b"%d" % VERSION
_STORED, _FILE, _DOCUMENTS = 0, 1, 2
_HASH_BYTES = 8
_BODY = len(_MAGIC) + 2 * _HASH_BYTES
"""Offset of the first byte after the hashes of artifact and text."""
# A stream costs about 6 bytes, and one step takes little longer for 64 streams than for 1.
_MOST_STREAMS, _STREAM_TOKENS = 64, 2048
_MOST_TOKENS = 1 << 32
# Most tokens per byte of the coded stream (0.002 bits each). A shorter stream is padded with zeros, and a file that
# states more tokens is refused before memory is allocated for them.
_TOKENS_PER_BYTE = 4096


def compress(
    artifact: Artifact,
    documents: Sequence[bytes],
    *,
    scoring: Scoring | None = None,
    streams: int | None = None,
    progress: Progress = SILENT,
) -> bytes:
    """Compress documents, one or several; `decompress` returns their concatenation.

    A single document is cut into streams that are coded in parallel; several documents are distributed among streams.
    Each stream starts without context, which costs some bytes. A scorer that learns along the whole text gets one
    stream, which takes longer, unless `streams` is given. `scoring` replaces the artifact's own. Raises `UserError` for
    a tokenizer that has no ids for some bytes.
    """
    text = b"".join(documents)
    chosen = scoring or artifact.scoring
    scorer = _scorer(artifact, chosen, len(text))
    ids = [exact_ids(artifact.tokenizer, document) for document in documents if document]
    mode = _DOCUMENTS if len(ids) > 1 else _FILE
    parts = _streams(ids, artifact.tokenizer.bos, streams or (1 if scorer.in_order else None), scorer.per_document)
    encoder = Encoder()

    def encode(logits: Logits, targets: Symbols) -> Symbols:
        encoder.encode(targets, logits)
        return targets

    lengths = list(map(len, parts))
    _code(scorer, np.concatenate(parts) if parts else np.empty(0, np.uint16), lengths, encode, progress)
    diff = {path: plain(value) for path, value in artifact.scoring.diff(chosen).items()}
    settings = json.dumps(diff, separators=(",", ":")).encode() if diff else b""
    coded = encoder.finish().ljust(sum(lengths) // _TOKENS_PER_BYTE, b"\0")
    coded = _leb128(mode, len(lengths), *lengths, len(settings)) + settings + coded
    body = coded if len(coded) < len(text) + 1 else _leb128(_STORED) + text
    return _MAGIC + _hashes(artifact, text) + body


def _hashes(artifact: Artifact, text: bytes) -> bytes:
    return bytes.fromhex(artifact.sha256)[:_HASH_BYTES] + hashlib.sha256(text).digest()[:_HASH_BYTES]


@dataclass(frozen=True)
class Measured:
    """Sizes of a text that was compressed and decompressed, and the sizes that its score predicts."""

    source_bytes: int
    compressed_bytes: int
    predicted_bytes: float
    """Loss of the coded tokens, converted to bytes."""
    predicted_bytes_own_ids: float
    """Loss of the tokenizer's own tokens, converted to bytes; less if the tokenizer is lossy."""
    streams: int
    head_bytes: int
    """Bytes before the coded tokens: format, hashes, lengths, and settings if `scoring` is not the artifact's."""
    compress_seconds: float
    decompress_seconds: float


def measure(artifact: Artifact, documents: Sequence[bytes], *, scoring: Scoring | None = None) -> Measured:
    """Compress documents, decompress them, and score the same tokens; `UserError` if they do not come back."""
    chosen, tokenizer = scoring or artifact.scoring, artifact.tokenizer
    start = time.perf_counter()
    packed = compress(artifact, documents, scoring=scoring)
    middle = time.perf_counter()
    text = decompress(artifact, packed)
    end = time.perf_counter()
    exact, own = [exact_ids(tokenizer, document) for document in documents], tokenizer.encode_many(documents)
    nats = _nats(artifact, chosen, exact)
    lossless = all(map(np.array_equal, exact, own))
    body = BytesIO(packed[_BODY:])
    lengths, _ = _read_header(body) if _read_number(body) != _STORED else ([], b"")
    return Measured(
        source_bytes=len(text),
        compressed_bytes=len(packed),
        predicted_bytes=whole_bytes(nats),
        predicted_bytes_own_ids=whole_bytes(nats if lossless else _nats(artifact, chosen, own)),
        streams=len(lengths),
        head_bytes=_BODY + body.tell(),
        compress_seconds=middle - start,
        decompress_seconds=end - middle,
    )


def _nats(artifact: Artifact, scoring: Scoring, ids: Sequence[Tokens]) -> float:
    bos = artifact.tokenizer.bos
    tokens = np.concatenate([np.append(np.uint16(bos), document) for document in ids])
    return score(artifact.model, Text(tokens, bos, 1, 1, 1), scoring).nats


def decompress(artifact: Artifact, data: bytes, *, progress: Progress = SILENT) -> bytes:
    """Return the text of compressed `data`; `UserError` if it is damaged or belongs to another artifact."""
    start = len(_MAGIC)
    version = data[len(_NAME) : start]
    if data.startswith(_NAME) and version.isdigit() and int(version) > VERSION:
        raise UserError(f"the file has format version {int(version)}, this caddie reads {VERSION}; upgrade caddie")
    if data[:start] != _MAGIC or len(data) < _BODY:
        raise UserError("this is not a file that caddie compressed, or it was cut; name one of `caddie compress`")
    model = data[start : start + _HASH_BYTES]
    if model != bytes.fromhex(artifact.sha256)[:_HASH_BYTES]:
        raise UserError(f"another artifact compressed this file; name the one whose SHA-256 begins with {model.hex()}")
    body = BytesIO(data[_BODY:])
    mode = _read_number(body)
    text, ends = (body.read(), True) if mode == _STORED else _decode(artifact, mode, body, progress)
    if _hashes(artifact, text) != data[start:_BODY]:
        raise UserError(
            "this file is damaged, or this machine computes too differently from the one that compressed it"
        )
    if not ends:
        raise UserError("bytes follow the end of the text; copy or download the file again")
    return text


def _decode(artifact: Artifact, mode: int, body: BytesIO, progress: Progress) -> tuple[bytes, bool]:
    """Return the text, and True if the file ends with it."""
    if mode not in (_FILE, _DOCUMENTS):
        raise UserError(f"this file is damaged, or from a later version (mode {mode})")
    lengths, settings = _read_header(body)
    try:
        diff = json.loads(settings) if settings else {}
    except (ValueError, RecursionError):
        diff = None
    if not isinstance(diff, dict):
        raise UserError("this file is damaged: its scoring cannot be read")
    scoring, coded = artifact.scoring.but(diff), body.read()
    if sum(lengths) >= _TOKENS_PER_BYTE * (len(coded) + 1):
        raise UserError(f"this file is damaged: it states {sum(lengths):,} tokens, more than {len(coded):,} bytes hold")
    decoder, bos = Decoder(coded), artifact.tokenizer.bos
    tokens = np.zeros(sum(lengths), np.uint16)
    begins = np.cumsum([0, *lengths], dtype=np.int64)
    tokens[begins[:-1]] = bos

    _code(_scorer(artifact, scoring, len(tokens)), tokens, lengths, lambda logits, _: decoder.decode(logits), progress)
    ends = coded == decoder.stream().ljust(len(tokens) // _TOKENS_PER_BYTE, b"\0")
    if mode == _FILE:
        return artifact.tokenizer.decode(np.delete(tokens, begins[:-1])), ends
    return b"".join(artifact.tokenizer.decode(ids[1:]) for ids in split_documents([tokens], bos)), ends


def _read_header(body: BytesIO) -> tuple[list[int], bytes]:
    """Read the number of tokens of each stream, and the settings that differ from the artifact's scoring, as JSON."""
    lengths = [_read_number(body) for _ in range(_read_number(body, _MOST_TOKENS))]
    if sum(lengths) > _MOST_TOKENS or any(length < 1 for length in lengths):
        raise UserError("this file is damaged: it states lengths that no file has")
    return lengths, _read(body, _read_number(body))


def _scorer(artifact: Artifact, scoring: Scoring, tokens: int) -> Scorer:
    """Return the scorer in float64, where machines agree to about 1e-13; `UserError` if windows or memory are unfit."""
    check_windows(scoring.sequence_length, scoring.stride)
    check_stages(artifact.model.config, Pack(), scoring, tokens, Ranks(), {"scoring": 1})
    model = copy.deepcopy(artifact.model).double().cpu()
    return scoring.but(precision="float64").scorer(model, artifact.tokenizer.bos)


def _code(scorer: Scorer, tokens: Tokens, lengths: Sequence[int], coder: Coder, progress: Progress) -> None:
    """Follow the scorer's plan token by token, coding each target with `coder` and writing it to `tokens`."""
    ends = np.cumsum(lengths, dtype=np.int64)
    layout = Layout(ends - np.array(lengths, np.int64), ends - 1)
    stream, done, total = Stream(tokens, layout), 0, layout.predictions
    for step in scorer.plan(layout, len(lengths)):
        batches: list[ScoringBatch] = []
        waiting = list(zip(step.windows, step.slots, strict=True))
        while waiting:
            # A window needs the tokens of the one before it in its stream as context.
            ready = [pair for pair in waiting if stream.ready(pair[0])]
            waiting = [pair for pair in waiting if not stream.ready(pair[0])]
            for batch in same_shape_batches(Step(*zip(*ready, strict=True)), stream, _MOST_STREAMS):
                _code_windows(scorer, batch, tokens, coder)
                batches.append(batch._replace(inputs=stream.inputs(batch.windows)))
            for window, _ in ready:
                stream.mark(window)
                done += window.end - window.first
            progress.step({"event": "tokens", "done": done, "total": total})
        scorer.update(batches, stream.prefix)
    stream.check_complete()


def _code_windows(scorer: Scorer, batch: ScoringBatch, tokens: Tokens, coder: Coder) -> None:
    """Code the scored predictions of equally long windows, side by side."""
    first = np.array([window.first for window in batch.windows])
    cache = Cache()
    inputs = batch.inputs[:, : batch.context + 1]
    for offset in range(1, batch.inputs.shape[1] - batch.context + 1):
        logits = scorer.logits(torch.from_numpy(inputs), batch.slots, 1, cache)[:, -1]
        symbols = coder(logits.numpy(), tokens[first + offset].astype(np.int64))
        tokens[first + offset] = symbols
        inputs = symbols[:, None]


def _streams(ids: Sequence[Tokens], bos: int, streams: int | None, per_document: bool) -> list[Tokens]:
    """Cut one document into streams of about equal length, or distribute several in order; each begins with `bos`.

    With `per_document`, each document is a stream of its own.
    """

    def count(tokens: int) -> int:
        return streams or min(_MOST_STREAMS, 1 + tokens // _STREAM_TOKENS)

    pieces = np.array_split(ids[0], min(len(ids[0]), count(len(ids[0])))) if len(ids) == 1 else ids
    texts = [np.append(np.uint16(bos), piece) for piece in pieces]
    if len(ids) <= 1 or per_document:
        return texts
    total, done = sum(map(len, texts)), 0
    parts: list[list[Tokens]] = [[] for _ in range(count(total))]
    for text in texts:
        parts[done * len(parts) // total].append(text)
        done += len(text)
    return [np.concatenate(part) for part in parts if part]


def _leb128(*values: int) -> bytes:
    """Encode numbers in LEB128: seven bits a byte, the lowest first, the top bit set in all bytes but the last."""
    encoded = bytearray()
    for value in values:
        while value > 127:
            encoded.append(value & 127 | 128)
            value >>= 7
        encoded.append(value)
    return bytes(encoded)


def _read_number(file: BytesIO, most: int = 1 << 62) -> int:
    """Read a LEB128 number; `UserError` if it is above `most`."""
    value = shift = 0
    while True:
        byte = _read(file, 1)[0]
        value |= (byte & 127) << shift
        shift += 7
        if value > most:
            raise UserError("this file is damaged: it states a length that no file has")
        if byte < 128:
            return value


def _read(file: BytesIO, count: int) -> bytes:
    """Read exactly `count` bytes; `UserError` if the data ends before."""
    data = file.read(count)
    if len(data) < count:
        raise UserError("this file was cut short; copy or download it again")
    return data
