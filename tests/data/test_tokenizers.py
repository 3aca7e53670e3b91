"""Tokenizers: nothing lost that is not measured, the contest's ids and byte counts reproduced, bad input refused."""

import argparse
import dataclasses
import inspect
import random
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import facts, matches, tensors
from real_text import contest, held_out_documents

from caddie.config import Config
from caddie.data.tokenizers import (
    ByteTable,
    CaseOps,
    CaseOpsTokenizer,
    RawBytes,
    SentencePieceBPE,
    SentencePieceFile,
    SentencePieceTokenizer,
    Tokenizer,
    TokenizerSource,
    deserialize,
)
from caddie.data.tokenizers.caseops import SYMBOLS
from caddie.errors import UserError

TEXT = [inspect.getsource(textwrap).encode(), inspect.getsource(argparse)[:40_000].encode()]
SPACELESS = ["中文文本没有空格数据集合测试\n".encode() * 20, "訓練與評分用的文字".encode() * 20]
HARD = [
    b"",
    b" ",
    b"\n",
    b"  two  spaces \t\r\n\n trailing ",
    b"nul \0 and \xff\xfe not UTF-8 \xed\xa0\x80",
    "a literal mark ▁ and ▁▁, a cut character ".encode() + "é".encode()[:1],
    "ﬁ Ａ \u3000 \u00a0 e\u0301 \ufeff \ufffd \U0010ffff 中文 😀 12345".encode(),
    b"<s></s><unk><pad><0x41>",
    "Capitals iPhone NASA É \ue001\ue004B ǅ ß İ".encode() + b"\xee\x80",
]

piecewise = st.lists(st.one_of(st.binary(max_size=4), st.sampled_from(HARD), st.text(max_size=8).map(str.encode)))
anything = st.one_of(st.binary(), st.text().map(str.encode), piecewise.map(b"".join))
TABLES = "tables_and_sequences"
LOSSLESS = ["bytes", "trained", "spaceless", "caseops"]
ALL = [*LOSSLESS, "contest 1024", "contest 8192", "caseops 1024"]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return SentencePieceBPE().build(400, lambda: TEXT)


@pytest.fixture(scope="module")
def tokenizers(trained: Tokenizer) -> dict[str, Tokenizer]:
    return {
        "bytes": RawBytes().build(257, lambda: []),
        "trained": trained,
        "spaceless": SentencePieceBPE().build(300, lambda: SPACELESS),
        "caseops": CaseOps().build(400, lambda: TEXT),
    }


@pytest.fixture(scope="module")
def tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    name = request.param
    if name not in tokenizers:
        model = contest(request.getfixturevalue("real_data"), int(name.split()[1]))
        tokenizers[name] = CaseOpsTokenizer(model) if name.startswith("caseops") else model
    return tokenizers[name]


# The contract of every tokenizer.


@pytest.mark.parametrize("tokenizer", LOSSLESS, indirect=True)
@settings(derandomize=True, deadline=None)
@given(data=anything)
def test_decode_gives_back_every_byte_string(tokenizer: Tokenizer, data: bytes) -> None:
    assert tokenizer.decode(tokenizer.encode(data)) == data


@pytest.mark.long
@pytest.mark.parametrize("tokenizer", ALL, indirect=True)
@settings(derandomize=True, deadline=None)
@given(datas=st.lists(anything, max_size=6))
def test_ids_are_small_and_batching_changes_nothing(tokenizer: Tokenizer, datas: list[bytes]) -> None:
    batch = tokenizer.encode_many(datas)
    assert len(batch) == len(datas)
    for data, ids in zip(datas, batch, strict=True):
        assert ids.dtype == np.uint16
        assert ids.tolist() == tokenizer.encode(data).tolist()
        assert all(index < tokenizer.vocabulary and index != tokenizer.bos for index in ids)


@pytest.mark.long
@pytest.mark.parametrize("tokenizer", ALL, indirect=True)
@settings(derandomize=True, deadline=None, max_examples=40)
@given(datas=st.lists(anything, max_size=6))
def test_bytes_of_a_stream_are_those_of_its_documents(tokenizer: Tokenizer, datas: list[bytes]) -> None:
    runs = [np.append(np.uint16(tokenizer.bos), ids) for ids in tokenizer.encode_many(datas)]
    decoded = [tokenizer.decode(run) for run in runs]
    stream = np.concatenate([*runs, np.empty(0, np.uint16)])
    assert tokenizer.decode(stream) == b"".join(decoded)
    lengths = tokenizer.byte_lengths(stream)
    assert (lengths.dtype, lengths.shape) == (np.int64, stream.shape)
    assert not lengths[stream == tokenizer.bos].any()
    assert lengths.tolist() == [length for run in runs for length in tokenizer.byte_lengths(run)]
    assert [tokenizer.byte_lengths(run).sum() for run in runs] == [len(text) for text in decoded]


@pytest.mark.long
@pytest.mark.parametrize("tokenizer", ALL, indirect=True)
@settings(derandomize=True, deadline=None, max_examples=40)
@given(data=st.data())
def test_whatever_a_model_samples_can_be_read(tokenizer: Tokenizer, data: st.DataObject) -> None:
    few = st.integers(0, min(8, tokenizer.vocabulary - 1))  # the ids of the marks are among them
    ids = data.draw(st.lists(st.one_of(few, st.integers(0, tokenizer.vocabulary - 1))))
    assert tokenizer.byte_lengths(ids).sum() == len(tokenizer.decode(ids))


@pytest.mark.parametrize("tokenizer", ALL, indirect=True)
def test_a_stored_tokenizer_is_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    copy = deserialize(tokenizer.kind, tokenizer.serialize())
    assert (copy.sha256, copy.bos, copy.token_bytes) == (tokenizer.sha256, tokenizer.bos, tokenizer.token_bytes)
    assert [ids.tolist() for ids in copy.encode_many(HARD)] == [ids.tolist() for ids in tokenizer.encode_many(HARD)]


@pytest.mark.parametrize("tokenizer", ALL, indirect=True)
def test_bos_stands_for_nothing(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.token_bytes) == tokenizer.vocabulary
    ids = [tokenizer.bos, *tokenizer.encode(b"word"), tokenizer.bos]
    assert tokenizer.decode(ids) == b"word"
    assert tokenizer.table_bytes(np.array(ids)) == 4


@pytest.mark.parametrize("tokenizer", ALL, indirect=True)
def test_the_longest_prefix_of_a_piece_is_a_piece(tokenizer: Tokenizer) -> None:
    pieces, prefixes = tokenizer.token_bytes, tokenizer.prefixes
    assert (prefixes.dtype, len(prefixes)) == (np.int64, tokenizer.vocabulary)
    known = set(pieces)
    for piece, prefix in zip(pieces, prefixes.tolist(), strict=True):
        shorter = [piece[:size] for size in range(1, len(piece)) if piece[:size] in known]
        assert (pieces[prefix] if prefix >= 0 else None) == max(shorter, key=len, default=None), piece


def test_prefixes_of_sentencepiece_by_hand() -> None:
    """A leading space stays, a piece goes before the byte that it equals, and control ids have no prefix."""
    made = SentencePieceBPE().build(279, lambda: [b"the then there hen " * 200])
    processor = made._processor  # type: ignore[attr-defined]
    for piece, prefix in (("\u2581then", "\u2581the"), ("\u2581the", "\u2581t"), ("\u2581t", "\u2581"), ("en", "e")):
        assert processor.id_to_piece(int(made.prefixes[processor.piece_to_id(piece)])) == prefix
    for piece in ("\u2581", "e", "<s>", "<0x41>"):
        assert made.prefixes[processor.piece_to_id(piece)] == -1


def test_many_documents_are_batched_in_order(trained: Tokenizer) -> None:
    datas = [b"document %d\0\xff" % index for index in range(1_000)]
    assert [trained.decode(ids) for ids in trained.encode_many(datas)] == datas


def test_different_tokenizers_have_different_names(tokenizers: dict[str, Tokenizer]) -> None:
    assert len({tokenizer.sha256 for tokenizer in tokenizers.values()}) == len(tokenizers)


@pytest.mark.parametrize("every", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_every_character_survives(trained: Tokenizer, every: int) -> None:
    """All of the first plane, and of the others each so many."""
    codes = [*range(0x10000), *range(0x10000, 0x110000, every)]
    characters = [chr(code) for code in codes if not 0xD800 <= code < 0xE000]
    chunks = [" ".join(characters[start : start + 4_096]).encode() for start in range(0, len(characters), 4_096)]
    assert [trained.decode(ids) for ids in trained.encode_many(chunks)] == chunks


# The contest's ids and byte counts.


def test_the_contest_shard_is_reproduced(real_data: Path) -> None:
    words = np.fromfile(real_data / "small" / "val_small_sp1024.bin", np.uint16)
    assert words[:512].view(np.int32)[:3].tolist() == [20240520, 1, len(words) - 512]
    tokenizer = contest(real_data, 1024)
    ids = tokenizer.encode_many(held_out_documents(real_data))
    stream = np.concatenate([part for document in ids for part in ([tokenizer.bos], document)])
    assert np.array_equal(stream, words[512:])
    assert tokenizer.table_bytes(stream) == sum(len(tokenizer.decode(document)) for document in ids)
    spaces = tokenizer.table.has_leading_space[stream[1:]] & ~tokenizer.table.is_boundary[stream[:-1]]
    by_table = tokenizer.table.base_bytes[stream[1:]] + spaces
    assert np.array_equal(tokenizer.byte_lengths(stream)[1:], by_table), "token by token"


def contest_tables(parity: Path) -> dict[int, ByteTable]:
    """Each vocabulary's table of the contest."""
    arrays = {name: tensor.numpy() for name, tensor in tensors(parity / "components" / "bytes" / TABLES).items()}
    columns = [field.name for field in dataclasses.fields(ByteTable)]
    found = [int(match[1]) for match in matches(arrays, rf"sp(\d+)\.{columns[0]}")]
    return {size: ByteTable(**{name: arrays[f"sp{size}.{name}"] for name in columns}) for size in found}


def test_the_byte_tables_are_the_contests(parity: Path, real_data: Path) -> None:
    for vocabulary, expected in contest_tables(parity).items():
        table = contest(real_data, vocabulary).table
        for field in dataclasses.fields(ByteTable):
            assert np.array_equal(getattr(table, field.name), getattr(expected, field.name)), field.name


def test_the_byte_totals_are_the_contests(parity: Path) -> None:
    """By the contest's own tables, which need no tokenizer."""
    folder = parity / "components" / "bytes"
    arrays, totals = tensors(folder / TABLES), facts(folder / "info")
    for vocabulary, table in contest_tables(parity).items():
        for expected in totals[f"sp{vocabulary}"]:
            ids = arrays[f"sp{vocabulary}.sequence{expected['sequence']}"].numpy()
            assert len(ids) - 1 == expected["tokens scored"]
            counted = Tokenizer.table_bytes(SimpleNamespace(table=table), ids)  # type: ignore[arg-type]
            assert counted == expected["bytes"], expected["what"]


# The byte table without outside files.


def test_a_space_after_a_control_id_counts_nothing(trained: Tokenizer) -> None:
    spaced = next(i for i, text in enumerate(trained.token_bytes) if text[:1] == b" " and text[1:].isalpha())
    length = len(trained.token_bytes[spaced])
    assert trained.table_bytes(np.array([trained.bos, spaced])) == length - 1
    assert trained.table_bytes(np.array([spaced, spaced])) == length


# Training.


def test_training_learns_pieces(trained: Tokenizer) -> None:
    assert (trained.vocabulary, trained.bos) == (400, 1)
    joined = b"".join(TEXT)
    assert len(joined) / len(trained.encode(joined)) > 1.5
    assert any(text.strip(b" ") == b"" and len(text) > 3 for text in trained.token_bytes[260:]), "indentation"
    assert b"\n" in trained.token_bytes[260:]


def test_digits_stay_apart_and_odd_characters_do_not_spoil_their_sentence() -> None:
    years = b"".join("in %d ▅ of ▁ 1984\t".encode() % year for year in range(1900, 2000))
    pieces = SentencePieceBPE().build(278, lambda: [years]).token_bytes[260:]
    assert b" of" in pieces
    assert not any(text.strip(b" ").isdigit() and len(text.strip(b" ")) > 1 for text in pieces)


@pytest.mark.long
def test_training_is_deterministic_and_quiet() -> None:
    program = (
        "from caddie.data.tokenizers import SentencePieceBPE\n"
        "text = [b'%d bottles stand on the wall\\n' % i for i in range(2000)]\n"
        "print(SentencePieceBPE(sample_bytes=20_000).build(300, lambda: text).sha256)"
    )
    root = Path(__file__).parent.parent.parent
    runs = [subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True) for _ in "12"]
    assert len(runs[0].stdout.split()) == 1
    assert [runs[0].stdout, ""] == [runs[1].stdout, runs[0].stderr]


def test_training_reads_no_more_than_the_sample() -> None:
    read: list[int] = []

    class Recording(list[bytes]):
        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            read.append(index)
            return super().__getitem__(index)

    texts = Recording(TEXT[0][start : start + 100] for start in range(0, 18_000, 100))
    SentencePieceBPE(sample_bytes=4_950).build(300, lambda: texts)
    assert len(read) == len(set(read)) == 50
    assert max(read) > 150, "drawn from all of the text"


@pytest.mark.parametrize("texts", [[], [b""], [b"\n\n"], [b"\xff\0\t"]])
def test_no_text_is_refused(texts: list[bytes]) -> None:
    with pytest.raises(UserError, match=r"too little training text for a vocabulary of 300; use RawBytes"):
        SentencePieceBPE().build(300, lambda: texts)


def test_too_little_text_names_the_largest_vocabulary_which_then_works() -> None:
    with pytest.raises(UserError, match=r"at most 289") as caught:
        SentencePieceBPE().build(1_024, lambda: [b"hello world hello"])
    assert "\n" not in str(caught.value)
    assert SentencePieceBPE().build(289, lambda: [b"hello world hello"]).vocabulary == 289


def test_room_that_pairs_cannot_fill_is_filled_with_characters() -> None:
    assert SentencePieceBPE().build(267, lambda: [b"ab\ncd\n\nef gh\r\n  ij\n"]).vocabulary == 267


@pytest.mark.parametrize("vocabulary", [1, 260, 65_537])
def test_impossible_vocabularies_are_refused(vocabulary: int) -> None:
    with pytest.raises(UserError, match=r"model.vocabulary from 261 to 65536"):
        SentencePieceBPE().build(vocabulary, lambda: TEXT)


@pytest.mark.parametrize("vocabulary", [261, 262, 280])
def test_small_vocabularies_train_on_text_with_many_characters(vocabulary: int) -> None:
    wide = ["".join(map(chr, range(0x4E00, 0x6E00))).encode(), *TEXT, "é▅▁\t\0 ".encode() * 9]
    tokenizer = SentencePieceBPE().build(vocabulary, lambda: wide)
    assert tokenizer.vocabulary == vocabulary
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_many([*wide, *HARD])] == [*wide, *HARD]


def test_caseops_learns_from_marked_text_and_keeps_the_marks_apart(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["caseops"]
    marks = [symbol.encode() for symbol in SYMBOLS]
    assert list(tokenizer.token_bytes[4:8]) == marks
    assert not any(mark in text for text in tokenizer.token_bytes[8:] for mark in marks)
    assert not any(text.lower() != text for text in tokenizer.token_bytes[264:]), "no capitals are learnt"
    capital, small = (tokenizer.encode(text).tolist() for text in (b"(Return", b"(return"))
    assert [index for index in capital if index != 4] == small
    assert tokenizer.byte_lengths(capital).sum() == 7
    assert tokenizer.table_bytes(np.array([tokenizer.bos, *capital])) == 10, "the table takes a mark for text"


def test_caseops_decodes_and_counts_documents_apart(tokenizers: dict[str, Tokenizer]) -> None:
    """The end of one document and the beginning of the next would form a mark in one text."""
    tokenizer = tokenizers["caseops"]
    documents = [b"a\xee\x80", b"\x84b", b"\xee", b"\x80\x81\xee\x80\x81C", b""]
    stream = [index for document in documents for index in (tokenizer.bos, *tokenizer.encode(document).tolist())]
    assert tokenizer.decode(stream) == b"".join(documents)
    assert tokenizer.byte_lengths(stream).sum() == sum(map(len, documents))


def test_caseops_builds_on_a_model_that_exists(tmp_path: Path, tokenizers: dict[str, Tokenizer]) -> None:
    (tmp_path / "own.model").write_bytes(tokenizers["caseops"].serialize())
    again = CaseOps(of=SentencePieceFile(path=str(tmp_path / "own.model"))).build(400, lambda: [])
    assert again.sha256 == tokenizers["caseops"].sha256 != again.of.sha256
    with pytest.raises(UserError, match=r"from 265 to 65536, not 264"):
        CaseOps().build(264, lambda: TEXT)
    assert CaseOps().build(265, lambda: TEXT).vocabulary == 265


# Sources and models that are wrong.


def test_sources_say_which_vocabulary_to_set(tmp_path: Path, trained: Tokenizer) -> None:
    (tmp_path / "own.model").write_bytes(trained.serialize())
    source = SentencePieceFile(path=str(tmp_path / "own.model"))
    assert source.build(400, lambda: []).sha256 == trained.sha256
    with pytest.raises(UserError, match=r"own.model has 400 ids; set model.vocabulary=400$"):
        source.build(1_024, lambda: [])
    with pytest.raises(UserError, match=r"RawBytes has 257 ids; set model.vocabulary=257$"):
        RawBytes().build(256, lambda: [])


@pytest.mark.parametrize("name", ["", "absent", "a\0b", "text"])
def test_files_that_are_no_model_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "text").write_text("not a model\n")
    with pytest.raises(UserError, match=r"^no tokenizer in .*$") as caught:
        SentencePieceFile(path=f"{tmp_path}/{name}").build(400, lambda: [])
    assert "\n" not in str(caught.value)


def test_sources_are_configs() -> None:
    bpe, file = SentencePieceBPE(sample_bytes=9), SentencePieceFile(path="x")
    for source in (RawBytes(), bpe, file, CaseOps(), CaseOps(of=bpe), CaseOps(of=file)):
        assert Config.from_json(source.to_json()) == source
        assert TokenizerSource.from_json(source.to_json()) == source
    with pytest.raises(UserError, match=r"CaseOps, HuggingFaceFile, RawBytes, SentencePieceBPE, SentencePieceFile"):
        TokenizerSource.from_json("TokenizerSource")
    for senseless in ("RawBytes", "CaseOps"):
        with pytest.raises(UserError, match=f"of must be one of SentencePieceBPE, SentencePieceFile, not {senseless}"):
            TokenizerSource.from_json({"kind": "CaseOps", "of": senseless})


def test_damaged_models_are_refused_or_still_work(trained: Tokenizer, capfd: pytest.CaptureFixture[str]) -> None:
    model, rng = trained.serialize(), random.Random(0)
    cases = [model[:length] for length in range(0, len(model), 97)]
    cases += [b"\x12\x00", *(rng.randbytes(rng.randrange(64)) for _ in range(100))]
    for place in rng.sample(range(len(model)), 300):
        cases.append(model[:place] + rng.randbytes(2) + model[place + 2 :])
    outcomes = [outcome(case) for case in cases]
    assert {type(found) for found in outcomes} == {str, int}
    assert all("\n" not in found if isinstance(found, str) else found < 400 for found in outcomes)
    assert capfd.readouterr() == ("", "")


def outcome(model: bytes) -> str | int:
    try:
        return int(max(SentencePieceTokenizer(model).encode(HARD[4])))
    except UserError as error:
        return str(error)


def test_models_outside_the_limits_are_refused(trained: Tokenizer) -> None:
    model = trained.serialize()
    extra = b"".join(b"\n\x0a\n\x08%08d" % index for index in range(65_137))
    with pytest.raises(UserError, match=r"65,536 ids; this SentencePiece model has 65,537"):
        SentencePieceTokenizer(model + extra)
    with pytest.raises(UserError, match=r"no BOS id"):
        SentencePieceTokenizer(model.replace(b"\n\x03<s>", b"\n\x03<q>"))
    with pytest.raises(UserError, match=r"no tokenizer of kind 'words'"):
        deserialize("words", b"")
    with pytest.raises(UserError, match=r"not a SentencePiece model, or a damaged one \(3 bytes\)"):
        deserialize("caseops", b"\0\1\2")


def test_a_model_that_changes_text_is_not_taken_for_lossless(trained: Tokenizer) -> None:
    model = trained.serialize()
    assert SentencePieceTokenizer(model).lossless
    for field in (3, 4):  # of the normalizer: a space put in front, white space collapsed
        off, on = (bytes([3 << 3, field == 3 and on, 4 << 3, field == 4 and on]) for on in (0, 1))
        assert model.count(off) == 1
        assert not SentencePieceTokenizer(model.replace(off, on)).lossless


def test_the_contest_models_are_not_taken_for_lossless(real_data: Path) -> None:
    for vocabulary in (1024, 2048, 4096, 8192):
        assert not contest(real_data, vocabulary).lossless  # type: ignore[attr-defined]


def test_text_goes_through_a_contest_model_unaltered(real_data: Path) -> None:
    import sentencepiece

    tokenizer = contest(real_data, 1024)
    plain = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.serialize())
    for text in ("a mark ▁ in text", "  spaces \n\n\t", "ﬁ Ａ \u3000 é \0 \ufffd", "中文 😀"):
        assert tokenizer.encode(text.encode()).tolist() == plain.encode(text)
