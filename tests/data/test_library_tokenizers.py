"""Tokenizers of other libraries: nothing lost that is not measured, texts that spell special tokens, bad files."""

import base64
import json
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caddie.data.round_trip_audit import audit
from caddie.data.tokenizers import (
    HuggingFaceFile,
    HuggingFaceTokenizer,
    TiktokenFile,
    Tokenizer,
    deserialize,
)
from caddie.data.tokenizers.exact_spelling import exact_ids
from caddie.errors import UserError
from caddie.recipes.recipe import Recipe
from caddie.run import resolve_corpus as corpora
from caddie.run.stages import held_out_text

library = pytest.importorskip("tokenizers", reason="needs tokenizers")
pytest.importorskip("tiktoken", reason="needs tiktoken")

TEXT = ["The cat sat on the mat; the dog sat on the log.\n Then it rained. " * 20, "naïve café\n\n\t1984 " * 20]
HARD = [
    b"",
    b" ",
    b"  two  spaces \t\r\n\n trailing ",
    b"nul \0 and \xff\xfe not UTF-8 \xed\xa0\x80",
    "ﬁ Ａ \u3000 e\u0301 \ufeff \ufffd \U0010ffff 中文 😀 ▁ Ġ".encode(),
    b"<s></s><unk><|endoftext|><0x41> ##a",
]
anything = st.one_of(st.binary(), st.text().map(str.encode), st.lists(st.sampled_from(HARD)).map(b"".join))


def byte_level() -> Any:
    """A tokenizer as GPT-2's, untrained."""
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    return made


def trained(made: Any, trainer: Any, **options: Any) -> bytes:
    made.train_from_iterator(TEXT, trainer(vocab_size=330, show_progress=False, **options))
    return str(made.to_str()).encode()


def gpt2_like() -> bytes:
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    return trained(byte_level(), library.trainers.BpeTrainer, special_tokens=special, initial_alphabet=alphabet)


def llama_like(*, bytes_added: bool = False) -> bytes:
    """BPE over characters, with marks for spaces, one put in front, and ids of bytes for what has no piece.

    With `bytes_added` these are added tokens, as a training leaves them that was given them as special ones.
    """
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    made = library.Tokenizer(library.models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.normalizer = library.normalizers.Sequence(
        [library.normalizers.Prepend("▁"), library.normalizers.Replace(" ", "▁")]
    )
    fuse = [library.decoders.Replace("▁", " "), library.decoders.ByteFallback(), library.decoders.Fuse()]
    made.decoder = library.decoders.Sequence([*fuse, library.decoders.Strip(" ", 1, 0)])
    data = json.loads(trained(made, library.trainers.BpeTrainer, special_tokens=["<unk>", "<s>", "</s>", *bytes_]))
    if not bytes_added:
        data["added_tokens"] = [token for token in data["added_tokens"] if not token["content"].startswith("<0x")]
    return json.dumps(data).encode()


def bert_like() -> bytes:
    made = library.Tokenizer(library.models.WordPiece(unk_token="[UNK]"))
    made.normalizer = library.normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer, made.decoder = library.pre_tokenizers.BertPreTokenizer(), library.decoders.WordPiece()
    return trained(made, library.trainers.WordPieceTrainer, special_tokens=["[UNK]", "[CLS]", "[SEP]"])


def unigram() -> bytes:
    """A model that has its special token as a piece, which a text may spell."""
    pieces = [("<unk>", 0.0), ("<s>", -0.1), *((character, -5.0) for character in "<s>▁abcdeht"), ("▁the", -3.0)]
    made = library.Tokenizer(library.models.Unigram(pieces, 0))
    made.pre_tokenizer = library.pre_tokenizers.Metaspace(prepend_scheme="never")
    made.decoder = library.decoders.Metaspace(prepend_scheme="never")
    return str(made.to_str()).encode()


def ranks(*merges: bytes) -> bytes:
    tokens = [*(bytes([byte]) for byte in range(256)), *merges]
    return b"\n".join(b"%s %d" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))


MADE = {
    "gpt2": gpt2_like,
    "llama": llama_like,
    "llama_added": partial(llama_like, bytes_added=True),
    "bert": bert_like,
    "unigram": unigram,
}
NAMES = [*MADE, "tiktoken"]
LOSSLESS = ["gpt2", "tiktoken"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for name, make in MADE.items():
        (folder / f"{name}.json").write_bytes(make())
    (folder / "tiktoken.tiktoken").write_bytes(ranks(b"th", b"the", b" t", b" the", b"at"))
    return folder


@pytest.fixture(scope="module")
def tokenizers(folder: Path) -> dict[str, Tokenizer]:
    found: dict[str, Tokenizer] = {name: HuggingFaceTokenizer((folder / f"{name}.json").read_bytes()) for name in MADE}
    return {**found, "tiktoken": TiktokenFile(path=str(folder / "tiktoken.tiktoken")).build(262, list)}


@pytest.fixture(scope="module")
def tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers[request.param]


def test_prefixes_of_byte_pairs_by_hand(tokenizers: dict[str, Tokenizer]) -> None:
    found = tokenizers["tiktoken"]
    pieces = dict(zip(found.token_bytes, found.prefixes.tolist(), strict=True))
    known = {piece: found.token_bytes[prefix] if prefix >= 0 else b"" for piece, prefix in pieces.items() if piece}
    assert {piece: prefix for piece, prefix in known.items() if prefix} == {
        b"th": b"t", b"the": b"th", b" t": b" ", b" the": b" t", b"at": b"a"
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("tokenizer", LOSSLESS, indirect=True)
@settings(derandomize=True, deadline=None, max_examples=60)
@given(data=anything)
def test_bytes_come_back(tokenizer: Tokenizer, data: bytes) -> None:
    assert tokenizer.decode(tokenizer.encode(data)) == data
    assert not any(rule.lossy for rule in audit(tokenizer, [data]))


@pytest.mark.parametrize("tokenizer", NAMES, indirect=True)
@settings(derandomize=True, deadline=None, max_examples=40)
@given(datas=st.lists(anything, max_size=4))
def test_streams_are_counted_and_hold_bos_only_before_a_document(tokenizer: Tokenizer, datas: list[bytes]) -> None:
    batch = tokenizer.encode_many([*datas, *HARD])
    for ids in batch:
        assert ids.dtype == np.uint16
        assert all(index < tokenizer.vocabulary and index != tokenizer.bos for index in ids)
    stream = np.concatenate([part for ids in batch for part in ([tokenizer.bos], ids)]).astype(np.uint16)
    lengths = tokenizer.byte_lengths(stream)
    assert lengths.sum() == len(tokenizer.decode(stream))
    assert not lengths[stream == tokenizer.bos].any()


@pytest.mark.parametrize("tokenizer", NAMES, indirect=True)
def test_a_stored_tokenizer_is_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    copy = deserialize(tokenizer.kind, tokenizer.serialize())
    assert (copy.sha256, copy.bos, copy.token_bytes) == (tokenizer.sha256, tokenizer.bos, tokenizer.token_bytes)
    assert copy.serialize() == tokenizer.serialize()
    assert [ids.tolist() for ids in copy.encode_many(HARD)] == [ids.tolist() for ids in tokenizer.encode_many(HARD)]


@pytest.mark.parametrize("tokenizer", NAMES, indirect=True)
def test_the_tokenizer_of_an_artifact_is_made_a_source_again(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = corpora._tokenizer_source(tokenizer)
    assert source.build(tokenizer.vocabulary, list).sha256 == tokenizer.sha256
    assert corpora._given_tokenizer(Path(source.path)).sha256 == tokenizer.sha256  # type: ignore[attr-defined]


def test_a_pattern_that_leaves_text_out_is_refused(folder: Path) -> None:
    words = TiktokenFile(path=str(folder / "tiktoken.tiktoken"), pattern="[a-z]+").build(262, list)
    assert words.decode(words.encode(b"the")) == b"the"
    with pytest.raises(UserError, match="leaves out parts of the text"):
        words.encode(b"the cat")


def test_ids_are_those_of_the_library(tokenizers: dict[str, Tokenizer], folder: Path) -> None:
    texts = [text for text in (*TEXT, "a the\nmat </s>") if "<" not in text]
    for name in MADE:
        plain = library.Tokenizer.from_str((folder / f"{name}.json").read_text())
        ids = tokenizers[name].encode_many([text.encode() for text in texts])
        assert [found.tolist() for found in ids] == [plain.encode(text, add_special_tokens=False).ids for text in texts]


def test_what_a_library_loses_has_a_name(tokenizers: dict[str, Tokenizer]) -> None:
    rules = {name: {rule.name for rule in audit(tokenizers[name], [b"A  b\n"]) if rule.lossy} for name in NAMES}
    assert rules["gpt2"] == rules["tiktoken"] == set()
    assert (
        rules["llama"] == {"space put in front", "SentencePiece's mark", "bytes that are not UTF-8"} or rules["llama"]
    )
    assert {"capitals", "line breaks"} <= rules["bert"]


def test_text_that_spells_the_begin_is_text(tokenizers: dict[str, Tokenizer]) -> None:
    for name, begin in (("gpt2", b"<|endoftext|>"), ("llama", b"<s>"), ("unigram", b"<s>")):
        ids = tokenizers[name].encode(b"a" + begin + b"a")
        assert tokenizers[name].bos not in ids.tolist()
        assert tokenizers[name].decode(ids).strip() == b"a" + begin + b"a"


def test_any_text_can_be_spelled_exactly(tokenizers: dict[str, Tokenizer]) -> None:
    for name in ("gpt2", "tiktoken", "llama"):
        for data in HARD:
            assert tokenizers[name].decode(exact_ids(tokenizers[name], data)) == data


def test_a_text_that_no_tokens_spell_is_not_scored(folder: Path, tmp_path: Path) -> None:
    """One unknown token may stand for many characters, and then bits per byte are absurdly few."""
    text = tmp_path / "text.jsonl"
    said = (f"The cat sat on the mat, {number} times: 数学 naïve." for number in range(200))
    text.write_text("".join(json.dumps({"text": one}) + "\n" for one in said))
    told = {"llama": None, "gpt2": None, "unigram": "of the held-out tokens and decode to nothing"}
    for name, message in told.items():
        data = (folder / f"{name}.json").read_bytes()
        size = HuggingFaceTokenizer(data).vocabulary
        source = HuggingFaceFile(path=f"{folder}/{name}.json")
        recipe = Recipe().but(
            {"data.tokenizer": source, "model.vocabulary": size, "data.validation_fraction": 0.2},
        )
        corpus = corpora.open_corpus(recipe, str(text), folder=tmp_path / name)
        with pytest.raises(UserError, match=message) if message else nullcontext():
            held_out_text(corpus)


def test_an_unknown_token_spells_nothing(folder: Path) -> None:
    """A model may have every character, and still make one unknown token of a word that it calls too long."""
    data = json.loads((folder / "bert.json").read_bytes())
    data["model"]["max_input_chars_per_word"] = 1
    bert = HuggingFaceTokenizer(json.dumps(data).encode())
    assert [bert.token_bytes[one] for one in bert.encode(b"the").tolist()] == [b""]


def test_a_begin_that_a_normalizer_makes_is_refused(folder: Path) -> None:
    data = json.loads((folder / "unigram.json").read_bytes())
    data["normalizer"] = {"type": "Replace", "pattern": {"String": "<S>"}, "content": "<s>"}
    unigram = HuggingFaceTokenizer(json.dumps(data).encode())
    assert unigram.bos not in unigram.encode(b"the<s>")
    with pytest.raises(UserError, match="makes <s> of text; name another token by bos="):
        unigram.encode(b"the<S>")


def test_files_say_which_vocabulary_to_set(folder: Path) -> None:
    for source in (HuggingFaceFile(path=f"{folder}/gpt2.json"), TiktokenFile(path=f"{folder}/tiktoken.tiktoken")):
        with pytest.raises(UserError, match=r"(json|tiktoken) has \d+ ids; set model.vocabulary=\d+$"):
            source.build(7, list)


def test_another_begin_can_be_named(folder: Path) -> None:
    source = HuggingFaceFile(path=f"{folder}/bert.json", bos="[SEP]")
    size = HuggingFaceTokenizer((folder / "bert.json").read_bytes()).vocabulary
    assert source.build(size, list).bos == 2
    with pytest.raises(UserError, match=r"no token for the start of a document; name one by bos="):
        HuggingFaceFile(path=f"{folder}/bert.json", bos="<none>").build(330, list)


def test_a_file_that_is_nested_too_deeply_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_bytes(b"[" * 100_000)
    for bos in ("", "<s>"):
        with pytest.raises(UserError, match=r"^no tokenizer in .*deep.json.*: .*(recursion|Stack overflow)") as caught:
            HuggingFaceFile(path=str(path), bos=bos).build(330, list)
        assert "\n" not in str(caught.value)


def test_another_pattern_can_be_named(folder: Path) -> None:
    path = f"{folder}/tiktoken.tiktoken"
    assert TiktokenFile(path=path).build(262, list).encode(b"athe").tolist() == [*b"a", 257]
    single = TiktokenFile(path=path, pattern=".|\n").build(262, list)
    assert single.encode(b"athe").tolist() == list(b"athe")
    assert deserialize("tiktoken", single.serialize()).encode(b"athe").tolist() == list(b"athe")


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        ("hugging_face", b"", "not a tokenizer.json"),
        ("hugging_face", b"[]", "not a tokenizer.json"),
        ("hugging_face", b"{}", "not a tokenizer.json"),
        ("hugging_face", b"[" * 100_000, "not a tokenizer.json"),
        ("tiktoken", b"", "not a file of ranks"),
        ("tiktoken", b'{"pattern": "."}\nYQ== x', "not a file of ranks"),
        ("tiktoken", b'{"pattern": "."}\nYQ== 1', "these ranks lack a byte"),
        ("tiktoken", b'{"pattern": "."}\nYWE= -999\n' + ranks(), "a rank is below 0"),
        ("tiktoken", b'{"pattern": "."}\nYWE= 97\n' + ranks(), "or two tokens share one"),
        ("tiktoken", b'{"pattern": "("}\n' + ranks(), "tiktoken does not take these ranks or this pattern"),
        ("tiktoken", b'{"pattern": "."}\nYWFhYQ== 70000\n' + ranks(), "65,536 ids; these ranks and BOS are 70,002"),
    ],
)
def test_damaged_files_are_one_line(kind: str, data: bytes, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=message) as caught:
        deserialize(kind, data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "absent", "a\0b"])
def test_files_that_are_not_there_are_one_line(tmp_path: Path, name: str) -> None:
    for source in (HuggingFaceFile(path=f"{tmp_path}/{name}"), TiktokenFile(path=f"{tmp_path}/{name}")):
        with pytest.raises(UserError, match=r"^no tokenizer in .*$") as caught:
            source.build(400, list)
        assert "\n" not in str(caught.value)


def test_an_encoding_by_name_comes_from_the_library(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    import tiktoken

    made = {bytes([byte]): byte for byte in range(256)}
    encoding = tiktoken.Encoding("gpt2", pat_str=".", mergeable_ranks=made, special_tokens={})
    monkeypatch.setattr("tiktoken.get_encoding", {"gpt2": encoding}.__getitem__)
    assert TiktokenFile(path="gpt2").build(257, list).encode(b"ab").tolist() == [97, 98]

    def offline(name: str) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("tiktoken.get_encoding", offline)
    with pytest.raises(UserError, match=r"cannot be fetched; without a network, copy .* \(no route\)") as caught:
        TiktokenFile(path="gpt2").build(257, list)
    assert "\n" not in str(caught.value)


def test_the_libraries_are_optional(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tokenizers", "tiktoken"):
        monkeypatch.setitem(sys.modules, name, None)
    for source in (HuggingFaceFile(path=f"{folder}/gpt2.json"), TiktokenFile(path=f"{folder}/tiktoken.tiktoken")):
        with pytest.raises(UserError, match=r"pip install (tokenizers|tiktoken)$"):
            source.build(400, list)
