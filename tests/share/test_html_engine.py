"""Decoders and kernels of the page, in a browser, against the package's own."""

import base64
import hashlib
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import wasm
from browser import Browser
from sentencepiece import SentencePieceTrainer

from caddie.data.tokenizers import (
    ByteTokenizer,
    ByteTokenizer260,
    CaseOps,
    SentencePieceTokenizer,
    Tokenizer,
    bpe,
)
from caddie.pack.codecs import Brotli, Codec, Lzma, Stored, Zlib, Zstd
from caddie.pack.coding import EntropyModel, Packed
from caddie.pack.coding.array_codec import ArrayCodec
from caddie.pack.coding.priors import priors
from caddie.pack.quantize import (
    Binary,
    Float8,
    Float16,
    Float32,
    LowRank,
    Quantizer,
    Rotated,
    Rows,
    Ternary,
    Trellis,
    Waterfilling,
)
from caddie.share.html_page import SCRIPTS

pytestmark = pytest.mark.long  # a browser

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENTS = [path.read_bytes() for path in sorted((ROOT / "docs").glob("*.md"))]
CODECS = (Stored(), Zlib(), Lzma(), Lzma(preset=0, extreme=False), Zstd(), Zstd(level=1), Brotli(), Brotli(quality=4))
TEXTS = (
    *("", "a", " ", "  two  spaces ", "Hello World! THE The tHe THEy's aB", "def f(x):\n\treturn [\u2581]\0 x\r\n"),
    *(
        "naïve café — “quotes” … ½ ﬁ Å Ⅷ ①",
        "日本語のテキスト 한국어",
        "👩‍👩‍👧 🇩🇪 n\u0303 \u00a0wide\u3000",
        "\ue001mark\ue004",
    ),
    *("x" * 300, "\x7f", "ab\u200bcd \ufeffbom", "\n\n\n   \t", "ＦＵＬＬ ｶﾀｶﾅ", DOCUMENTS[0][:3000].decode()),
)

MARKED = ("\ufeffimport os\n\ufeff# coding\nprint('\ufeff')\n" * 50).encode()
"""A text of which the byte order mark becomes a piece, and stands at the beginning of others."""


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A page without content in which the page's own scripts are, and an open `engine`."""
    sources = "\n".join((wasm.FOLDER / name).read_text() for name in SCRIPTS)
    size = len(zlib.decompress(wasm.WORDS.read_bytes(), wbits=-15))
    with Browser(tmp_path_factory.mktemp("browser") / "profile") as browser:
        browser.run(sources + "\n;1")
        module, words = b64(wasm.ENGINE.read_bytes()), b64(wasm.WORDS.read_bytes())
        browser.run(
            f"(async () => {{ globalThis.engine = await Engine.open(decodeBase64('{module}'),"
            f" await inflate(decodeBase64('{words}'), {size})); }})()"
        )
        yield browser


def test_the_engine_is_what_its_source_gives() -> None:
    version = wasm.compiler()
    if version is None:
        pytest.skip("no clang with wasm-ld")
    if version != wasm.COMPILER:
        pytest.skip(f"another compiler than the file's, {wasm.COMPILER}")
    assert wasm.engine() == wasm.ENGINE.read_bytes(), "run: python bench/wasm.py"


def test_brotli_words_are_those_of_the_library() -> None:
    assert len(zlib.decompress(wasm.WORDS.read_bytes(), wbits=-15)) == len(wasm.words())
    assert zlib.decompress(wasm.WORDS.read_bytes(), wbits=-15) == wasm.words()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_every_codec(codec: Codec, engine: Browser) -> None:
    chance = np.random.default_rng(0)
    given = [b"", b"x", DOCUMENTS[0], bytes(70_000), chance.bytes(3000), b"abcabcabd" * 99]
    given += [chance.normal(0, 6, size).astype(np.int8).tobytes() for size in (1, 7, 100, 40_000)]
    given += [chance.normal(0, 1, 300).astype("<f2").tobytes()]
    cases = [[type(codec).__name__, b64(codec.encode(data)), len(data)] for data in given]
    found = engine.run(
        f"Promise.all({json.dumps(cases)}.map(async ([name, stream, size]) =>"
        " { const bytes = await engine.decode(name, decodeBase64(stream), size);"
        " return [bytes.length, engine.crc32(bytes)]; }))"
    )
    assert found == [[len(data), zlib.crc32(data)] for data in given]


@pytest.mark.parametrize("codec", CODECS[1:], ids=repr)
def test_a_stream_that_is_not_whole_is_refused(codec: Codec, engine: Browser) -> None:
    whole = codec.encode(DOCUMENTS[0][:5000])
    cases = [b64(whole[: len(whole) // 2]), b64(whole[:-1]), b64(b"\xff" * 40), b64(b"")]
    found = engine.run(
        f"Promise.all({json.dumps(cases)}.map((stream) => engine.decode('{type(codec).__name__}',"
        " decodeBase64(stream), 5000).then(() => 'read', (error) => error instanceof Damaged)))"
    )
    assert found == [True] * 4


def test_checksums(engine: Browser) -> None:
    for size in (0, 1, 55, 56, 63, 64, 1000):
        data = np.random.default_rng(size).bytes(size)
        found = engine.run(
            f"[engine.crc32(decodeBase64('{b64(data)}')), ...engine.sha256(decodeBase64('{b64(data)}'))]"
        )
        assert found == [zlib.crc32(data), *hashlib.sha256(data).digest()]


def test_priors(engine: Browser) -> None:
    found = engine.run(f"Array.from(engine.i32(engine.run.entropy_priors(), {priors().size}))")
    assert found == priors().reshape(-1).tolist()


def arrays() -> Iterator[np.ndarray]:
    """Arrays of all kinds that the entropy coder tells apart."""
    chance = np.random.default_rng(1)
    yield chance.normal(0, 4, (90, 130)).round().astype(np.int8)
    yield (chance.normal(0, 4, (70, 90)) * np.linspace(0.1, 3, 90)).round().astype(np.int16)
    yield (chance.normal(0, 4, (300, 20)) * np.linspace(0.1, 3, 300)[:, None]).round().astype(np.int8)
    yield chance.normal(0, 300, (40, 50)).round().astype(np.int16)  # beyond the largest magnitude
    yield np.abs(chance.normal(0, 9, 500)).round().astype(np.uint8)
    yield np.cumsum(chance.integers(-2, 3, (200, 3)), axis=0).astype(np.int16)
    yield chance.integers(100, 104, 64).astype(np.int8)
    yield np.zeros((5, 7), np.int8)
    yield np.zeros((0, 7), np.int8)
    yield np.array([[-128]], np.int8)
    yield chance.normal(0, 1, (600, 500)).round().astype(np.int8)


def decoded(engine: Browser, stream: bytes, array: np.ndarray) -> Any:
    shape = json.dumps(list(array.shape))
    return engine.run(
        f"readArray(engine, decodeBase64('{b64(stream)}'), '{array.dtype.str}', {shape})"
        ".then((found) => engine.crc32(bytesOf(found)), () => 'damaged')"
    )


def test_arrays_by_the_entropy_coder(engine: Browser) -> None:
    for array in arrays():
        stream = EntropyModel().encode(array)
        assert decoded(engine, stream, array) == zlib.crc32(array.tobytes()), array.shape
        if array.size > 1000:
            changed = bytearray(stream)
            changed[len(changed) // 2] ^= 1
            assert decoded(engine, bytes(changed), array) == "damaged"
            assert decoded(engine, stream[:-8], array) == "damaged"


@pytest.mark.parametrize(
    "coding",
    [
        Packed(codec=Zlib()),
        Packed(codec=Brotli(), shuffle=True),
        Packed(columns=True, codec=Zstd()),
        Packed(sort_rows=True, codec=Lzma()),
        Packed(columns=True, shuffle=True, sort_rows=True, codec=Stored()),
    ],
    ids=repr,
)
def test_arrays_by_general_compressors(coding: ArrayCodec, engine: Browser) -> None:
    chance = np.random.default_rng(2)
    for array in (
        chance.normal(0, 4, (30, 40)).round().astype(np.int8),
        chance.normal(0, 400, (20, 5)).round().astype(np.int16),
        chance.normal(0, 1, 33).astype("<f2"),
        chance.normal(0, 1, (3, 4, 5)).astype("<f4"),
    ):
        stream = coding.encode(array)
        assert decoded(engine, stream, array) == zlib.crc32(array.tobytes())
        changed = bytes([stream[0], stream[1] ^ 1, *stream[2:]])
        assert decoded(engine, changed, array) == "damaged"


@pytest.mark.parametrize(
    "quantizer",
    [
        *(Float32(), Float16(), Float8(), Rows(), Rows(bits=6, packed=True), Rows(bits=5, steps="float32")),
        *(Waterfilling(step=1e-2), Ternary(group=16), Ternary(group=16, packed=True, keep_mean=True), Binary(group=16)),
        *(Trellis(step=1e-2), Trellis(step=0.5, states=4)),
        *(LowRank(of=Rows(bits=4)), LowRank(of=Rows(bits=4), form="symmetric"), Rotated(of=Rows(bits=6))),
    ],
    ids=repr,
)
@pytest.mark.parametrize("shape", [(24, 40), (7, 64), (12,), (150, 6), ()], ids=str)
def test_dequantizers(quantizer: Quantizer, shape: tuple[int, ...], engine: Browser) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    if not shape and not isinstance(quantizer, Float32 | Float16):
        shape, weight = (1,), weight.reshape(1)
    stored = quantizer.quantize(weight)
    wanted = quantizer.dequantizer.dequantize(stored, shape).reshape(-1)
    given = {
        name: f"new {'Uint16Array' if array.dtype == np.float16 else _TYPES[array.dtype.str]}"
        f"(decodeBase64('{b64(array.tobytes())}').buffer)"
        for name, array in stored.items()
    }
    inside = ", ".join(f"{name}: {value}" for name, value in given.items())
    config = json.dumps(quantizer.dequantizer.to_json())
    found = engine.run(f"Array.from(dequantize({config}, {{{inside}}}, {json.dumps(list(shape))}))")
    assert np.allclose(found, wanted.numpy(), rtol=1e-6, atol=1e-6)


_TYPES = {"|i1": "Int8Array", "|u1": "Uint8Array", "<i2": "Int16Array", "<f4": "Float32Array"}


def tokenizers() -> dict[str, Tokenizer]:
    """Tokenizers that the page reads from the artifact itself."""
    return {
        "bytes": ByteTokenizer(),
        "260 ids": ByteTokenizer260(),
        "BPE": SentencePieceTokenizer(bpe.train(DOCUMENTS, 600, 300_000)),
        "CaseOps": CaseOps().build(600, lambda: DOCUMENTS[:5]),
        "BPE with a byte order mark": SentencePieceTokenizer(bpe.train([MARKED], 300, 100_000)),
    }


def held_alike(tokenizer: Tokenizer, engine: Browser) -> None:
    chance = np.random.default_rng(4)
    any_ids = chance.integers(0, tokenizer.vocabulary, 40).tolist()
    facts = json.dumps({"vocabulary": tokenizer.vocabulary})
    opened = f"openTokenizer('{tokenizer.kind}', decodeBase64('{b64(tokenizer.serialize())}'), {facts})"
    engine.run(f"globalThis.tokens = {opened}; 1")
    for text in TEXTS:
        ids = tokenizer.encode(text.encode()).tolist()
        assert engine.run(f"tokens.encode({json.dumps(text)})") == ids, text
    for ids in (tokenizer.encode(TEXTS[4].encode()).tolist(), any_ids):
        assert bytes(engine.run(f"Array.from(tokens.decode({ids}))")) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["bytes", "260 ids", "BPE", "CaseOps", "BPE with a byte order mark"])
def test_tokenizers(name: str, engine: Browser) -> None:
    held_alike(tokenizers()[name], engine)


@pytest.mark.parametrize("size", [1024, 2048, 4096, 8192])
def test_tokenizers_of_the_contest(size: int, engine: Browser, request: pytest.FixtureRequest) -> None:
    path = Path(request.config.getoption("--data")) / "tokenizers" / f"fineweb_{size}_bpe.model"
    if not path.exists():
        pytest.skip(f"no {path.name}")
    held_alike(SentencePieceTokenizer(path.read_bytes()), engine)


def trained(**settings: Any) -> SentencePieceTokenizer:
    """A SentencePiece model with settings that the program's own training leaves alone."""
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(DOCUMENTS[0].decode().splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        minloglevel=2,
        **settings,
    )
    return SentencePieceTokenizer(model.getvalue())


def test_settings_of_sentencepiece(engine: Browser) -> None:
    held_alike(trained(remove_extra_whitespaces=False), engine)
    assert not engine.run("tokens.note")
    for settings in ({"treat_whitespace_as_suffix": True}, {"user_defined_symbols": ["  "]}):
        data = b64(trained(**settings).serialize())
        engine.run(f"globalThis.tokens = openTokenizer('sentencepiece', decodeBase64('{data}'), {{ bos: 1 }}); 1")
        assert engine.run("tokens.note.includes('upper bound')"), settings


def test_pieces_of_another_library_are_cut_by_length(engine: Browser) -> None:
    pieces = json.dumps([b64(piece) for piece in (b"", b"a", b"b", b"ab", b"abb")])
    facts = f"{{bos: 0, vocabulary: 5, pieces: {pieces}}}"
    engine.run(f"globalThis.tokens = openTokenizer('tiktoken', null, {facts}, decodeBase64); 1")
    assert engine.run("tokens.encode('abbab')") == [4, 3]
    assert engine.run("tokens.note.includes('upper bound')")
    assert "no id for the byte 122" in engine.run(
        "(() => { try { tokens.encode('z'); } catch (e) { return e.message; } })()"
    )
