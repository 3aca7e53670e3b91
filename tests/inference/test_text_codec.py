"""Compression with a model: exactly back for any bytes and any scorer, and as small as the score promises."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from real_text import contest
from rich_models import RICH

from caddie.data.tokenizers import ByteTokenizer, Tokenizer
from caddie.errors import UserError
from caddie.inference import text_codec
from caddie.inference.range_coder import Decoder
from caddie.inference.text_codec import Measured, compress, decompress, measure
from caddie.model import GPT, build
from caddie.pack.artifact import Artifact, load
from caddie.score import SGD, ChunkSGD, DocumentLoRA, GlobalSGD, Scoring, Text, score

verification = import_module("caddie.verify.verify")

quick = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
SLIDING = Scoring(sequence_length=16, stride=8)
SCORINGS = {
    "plain": SLIDING.plain,
    "sliding": SLIDING,
    "chunks": SLIDING.but(ttt=ChunkSGD(chunk_tokens=64, sgd=SGD(lr=0.05, epochs=1, rows=8))),
    "documents": SLIDING.but(ttt=DocumentLoRA(rank=2, alpha=2.0, lr=0.01, chunk_tokens=8, documents=3)),
    "phases": SLIDING.but(
        ttt=DocumentLoRA(
            rank=2, alpha=2.0, lr=0.01, chunk_tokens=8, documents=2, phases=GlobalSGD(documents=4, chunk_tokens=32)
        )
    ),
}
TEXT = (b"the cat sat on the mat; the dog sat on the log. " * 12)[:500]


STORED = 8 + 8 + 8 + 1
"""Bytes before what is stored as it is, because it would be longer coded."""

PLAIN = GPT(width=16, depth=1).but(  # the models of `RICH` have several layers
    {"block.attention.heads": 2, "block.attention.key_value_heads": 1, "block.mlp.hidden": 16}
)


def artifact_of(
    tokenizer: Tokenizer, scoring: Scoring = SLIDING, seed: int = 0, steps: int = 40, gpt: GPT = PLAIN
) -> Artifact:
    """An artifact around a model that has learnt a little of `TEXT`."""
    gpt = gpt.but({"vocabulary": tokenizer.vocabulary})
    ids = torch.from_numpy(tokenizer.encode(TEXT)[:208].astype(np.int64)).reshape(-1, 16)
    model = build(gpt, seed)
    for step in range(steps):  # not by PyTorch's optimizers, which import its compiler
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        slopes = torch.autograd.grad(loss, [*model.parameters()], materialize_grads=True)
        with torch.no_grad():
            for parameter, slope in zip(model.parameters(), slopes, strict=True):
                parameter -= 0.02 * (1 - step / steps) * slope.sign()
    model.requires_grad_(False)
    return Artifact(
        path=Path("none"),
        sha256=f"{seed:02x}" * 32,
        model=model,
        tokenizer=tokenizer,
        scoring=scoring,
        manifest=cast(Any, None),
        ledger={},
        tensor_bytes={},
        load_seconds=0.0,
    )


@pytest.fixture(scope="module")
def small() -> Artifact:
    return artifact_of(ByteTokenizer())


@quick
@given(st.binary(max_size=60), st.integers(1, 5))
def test_any_bytes_come_back(small: Artifact, data: bytes, streams: int) -> None:
    packed = compress(small, [data], streams=streams)
    assert decompress(small, packed) == data
    assert len(packed) <= len(data) + 25, "never much longer than the file itself"


@pytest.mark.long
@pytest.mark.parametrize("data", [b"", b"\0", b"\xff" * 40, bytes(range(256))])
def test_short_and_odd_files(small: Artifact, data: bytes) -> None:
    assert decompress(small, compress(small, [data])) == data


@pytest.mark.long
@pytest.mark.parametrize("name", SCORINGS)
def test_every_scorer_compresses_to_what_it_scores(small: Artifact, name: str) -> None:
    """The file is as long as the sum of the nats, but for a few bytes of each stream; adaptation included."""
    own = replace(small, scoring=SCORINGS[name])
    check_compression(own, [TEXT[:40], TEXT[200:214], b"", TEXT[300:314], b"the cat"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("one of each", "sliding"),
        pytest.param("one of each", "chunks", marks=pytest.mark.slow),
        pytest.param("one of each", "phases", marks=pytest.mark.slow),
        ("the others", "phases"),
    ],
)
def test_every_technique_of_the_model_compresses(model: str, name: str) -> None:
    """At the end of a run whose last stage repeats layers; the model has not learnt enough to be sure of anything."""
    artifact = artifact_of(ByteTokenizer(), SCORINGS[name], steps=5, gpt=RICH[model])
    check_compression(artifact, [TEXT[:22], TEXT[200:206], b"", b"cat"])


def check_compression(artifact: Artifact, documents: Sequence[bytes]) -> None:
    """They come back, and take the bytes that scoring them in bulk promises."""
    packed = compress(artifact, documents, streams=1)
    assert len(packed) < STORED + sum(map(len, documents)), "they are coded, not stored as they are"
    assert decompress(artifact, packed) == b"".join(documents)
    ids = [np.append(ByteTokenizer.bos, ByteTokenizer().encode(document)) for document in documents if document]
    text = Text(np.concatenate(ids).astype(np.uint16), ByteTokenizer.bos, 1, 1, 1)
    promised = score(artifact.model, text, artifact.scoring).nats / math.log(2) / 8
    head = 8 + 8 + 8 + 12
    assert promised - 8 < len(packed) < promised * 1.005 + head


@pytest.mark.long
def test_adaptation_pays_in_bytes() -> None:
    """Also with its settings, which are not the artifact's own and stand in the file."""
    untaught, text = artifact_of(ByteTokenizer(), steps=0), b"zyxwvuts" * 28
    frozen = compress(untaught, [text], scoring=SLIDING, streams=1)
    learning = SLIDING.but(ttt=ChunkSGD(chunk_tokens=16, sgd=SGD(lr=1.0, epochs=2, rows=4)))
    adapted = compress(untaught, [text], scoring=learning, streams=1)
    assert decompress(untaught, adapted) == text
    assert len(adapted) < 0.8 * len(frozen)


@pytest.mark.slow
def test_streams_change_the_bytes_and_not_the_text(small: Artifact) -> None:
    sizes = {streams: len(compress(small, [TEXT], streams=streams)) for streams in (1, 4, 16)}
    assert sizes[1] <= sizes[4] <= sizes[16]
    assert all(decompress(small, compress(small, [TEXT], streams=streams)) == TEXT for streams in sizes)


@pytest.mark.long
def test_measure_says_what_the_score_predicts(small: Artifact) -> None:
    found = measure(small, [TEXT[:80], TEXT[80:200]])
    assert found.source_bytes == 200
    assert found.predicted_bytes == found.predicted_bytes_own_ids, "this tokenizer loses nothing"
    assert abs(found.compressed_bytes - found.predicted_bytes) < 0.005 * found.predicted_bytes + 40
    assert found.streams == 1


@pytest.mark.parametrize(
    ("compressed", "streams", "passes"),
    [(1000, 2, True), (1100, 2, False), (960, 0, False)],
)
def test_verification_compares_with_the_score(
    small: Artifact, monkeypatch: pytest.MonkeyPatch, compressed: int, streams: int, passes: bool
) -> None:
    found = Measured(
        source_bytes=4000,
        compressed_bytes=compressed,
        predicted_bytes=950.0,
        predicted_bytes_own_ids=950.0,
        streams=streams,
        head_bytes=24,
        compress_seconds=1.0,
        decompress_seconds=1.0,
    )
    monkeypatch.setattr(verification, "measure", lambda *given, **named: found)
    check = verification._compresses(small, SLIDING, [b"text"])
    assert check.passed is passes
    assert f"4,000 bytes became {compressed:,} in {streams} streams" in check.evidence
    assert check.evidence.endswith("stored without compression") == (streams == 0)


@pytest.mark.long
def test_a_tokenizer_that_loses_text_still_gives_it_back(real_data: Path) -> None:
    artifact = artifact_of(contest(real_data), steps=0)
    text = "A line.\nAnother  with ﬁ and ½,\ttabs\u2581 and \x00 bytes".encode() + b"\xff\xfe"
    assert decompress(artifact, compress(artifact, [text])) == text
    found = measure(artifact, [text * 3])
    assert found.predicted_bytes_own_ids < found.predicted_bytes, "the score is of a text that lost its line breaks"


def test_another_artifact_is_refused(small: Artifact) -> None:
    packed = compress(small, [TEXT[:9]])
    with pytest.raises(UserError, match="name the one whose SHA-256 begins with 0000000000000000"):
        decompress(artifact_of(ByteTokenizer(), seed=1, steps=0), packed)


@pytest.mark.parametrize("data", [b"", b"caddie", b"PK\3\4" * 30, b"caddie:1", b"caddie:1" + bytes(8)])
def test_what_is_no_compressed_file_is_refused(small: Artifact, data: bytes) -> None:
    with pytest.raises(UserError, match="not a file that caddie compressed"):
        decompress(small, data)


@pytest.mark.long
def test_damage_is_noticed(small: Artifact) -> None:
    packed = compress(small, [bytes(range(180, 250))], scoring=SCORINGS["plain"])  # what it has never seen is long
    assert len(packed) > 80
    rng = random.Random(0)
    for _ in range(8):
        damaged = bytearray(packed)
        damaged[rng.randrange(16, 60)] ^= 1 << rng.randrange(8)
        with pytest.raises(UserError):
            decompress(small, bytes(damaged))
    text = TEXT[:250]
    packed = compress(small, [text], scoring=SCORINGS["plain"])
    for place in range(len(packed) // 2, len(packed), 7):
        damaged = bytearray(packed)
        damaged[place] ^= 16
        with pytest.raises(UserError, match=r"damaged|ends before"):
            decompress(small, bytes(damaged))
    for length in (24, 40):
        with pytest.raises(UserError):
            decompress(small, packed[:length])


@pytest.mark.parametrize(
    "more",
    [
        b"\0",
        pytest.param(b"\1", marks=pytest.mark.long),
        pytest.param(bytes(60), marks=pytest.mark.long),
        pytest.param(bytes(range(255, 100, -1)), marks=pytest.mark.long),
    ],
    ids=lambda more: str(len(more)),
)
def test_what_follows_a_text_is_noticed(small: Artifact, more: bytes) -> None:
    packed = compress(small, [TEXT[:200]], scoring=SCORINGS["plain"])
    with pytest.raises(UserError, match="bytes follow the end of the text; copy or download"):
        decompress(small, packed + more)


def forged(artifact: Artifact, lengths: Sequence[int], coded: bytes, settings: bytes = b"") -> bytes:
    """A compressed file that states streams of these lengths before `coded`; its hash of the text is of nothing."""
    head = text_codec._leb128(text_codec._FILE, len(lengths), *lengths, len(settings)) + settings
    return text_codec._MAGIC + text_codec._hashes(artifact, b"") + head + coded


def test_windows_that_do_not_fit_are_refused(small: Artifact) -> None:
    with pytest.raises(UserError, match=r"score\.stride must be from 1 to score\.sequence_length"):
        decompress(small, forged(small, [300], bytes(range(200)), b'{"stride": 65536}'))


def test_a_file_that_states_more_than_it_holds_is_refused_at_once(small: Artifact) -> None:
    data = forged(small, [1 << 32], b"1234")
    assert len(data) < 40
    with pytest.raises(UserError, match=r"it states 4,294,967,296 tokens, more than 4 bytes hold"):
        decompress(small, data)


def test_the_decoder_stops_where_the_file_ends(small: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = recorded_rows(monkeypatch)
    with pytest.raises(UserError, match="ends before the tokens that it states"):
        decompress(small, forged(small, [20_000], b"12345678"))
    assert len(decoded) < 1000, "it went on with bytes that are not there"


def test_streams_run_side_by_side_in_bounded_memory(small: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = recorded_rows(monkeypatch)
    with pytest.raises(UserError):
        decompress(small, forged(small, [2] * 2000, bytes(range(256)) * 2))
    assert max(decoded) == 64


def recorded_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of every call of the decoder from now on."""
    rows, decode = list[int](), Decoder.decode

    def recording(self: Decoder, logits: Any) -> Any:
        rows.append(len(logits))
        return decode(self, logits)

    monkeypatch.setattr(Decoder, "decode", recording)
    return rows


@pytest.mark.long
def test_a_text_that_takes_almost_no_bits_comes_back(small: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream is filled up to the least that its tokens may have."""
    shortest = compress(small, [TEXT[:200]])
    monkeypatch.setattr(text_codec, "_TOKENS_PER_BYTE", 2)
    packed = compress(small, [TEXT[:200]])
    assert len(packed) > len(shortest)
    assert packed.startswith(shortest)
    assert decompress(small, packed) == TEXT[:200]


@pytest.mark.slow
def test_a_megabyte_of_real_text(real_data: Path) -> None:
    text = (real_data / "small" / "tinyshakespeare.txt").read_bytes()[:1_000_000]
    artifact = artifact_of(ByteTokenizer())
    assert decompress(artifact, compress(artifact, [text])) == text


def test_a_scoring_that_does_not_fit_the_memory_is_refused(tiny_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger's compressed text states its own scoring."""
    artifact = load(tiny_run.artifact)
    packed = forged(artifact, [3], bytes(64))
    monkeypatch.setattr("caddie.train.stage_memory.free_bytes", lambda *given: 1 << 20)
    for coded in (lambda: decompress(artifact, packed), lambda: compress(artifact, [b"a text"])):
        with pytest.raises(UserError, match=r"scoring needs about .* GiB, and this machine has 0.0 GiB free"):
            coded()
