"""Any bytes as ids: they come back, as few ids as the tokenizer's own, and what cannot be spelled is refused."""

import inspect
import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_text import contest, held_out_documents

from caddie.data.tokenizers import (
    ByteTokenizer,
    CaseOpsTokenizer,
    Ids,
    SentencePieceBPE,
    SentencePieceTokenizer,
    Tokenizer,
)
from caddie.data.tokenizers.exact_spelling import exact_ids
from caddie.errors import UserError

TEXT = inspect.getsource(textwrap).encode()
HARD = [
    b"",
    b"   \n",
    b"  two  spaces \t\r\n\n  trailing ",
    b"nul \0 and \xff\xfe not UTF-8 \xed\xa0\x80",
    "a literal mark ▁ and ▁▁, a cut character ".encode() + "é".encode()[:1],
    "ﬁ Ａ \u3000 \u00a0 e\u0301 \ufeff \ufffd \U0010ffff 中文 😀 ½ … 12345".encode(),
    b"<s></s><unk><pad><0x41>",
    b"\x85 \x1c word\x0bword",
    "NASA iPhone\nTHE \ue001 The\ue004\ue002\nA".encode(),
]
piecewise = st.lists(
    st.one_of(st.binary(max_size=4), st.sampled_from([*HARD, b" the", b"text", b" "]), st.text().map(str.encode))
)
anything = st.one_of(st.binary(), st.text().map(str.encode), piecewise.map(b"".join))


def folding(**options: Any) -> SentencePieceTokenizer:
    """A model that normalizes as the contest's do: NFKC, white space folded, line breaks lost."""
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.decode().splitlines()),
        model_writer=model,
        **({"model_type": "bpe", "vocab_size": 450, "byte_fallback": True, "minloglevel": 3} | options),
    )
    return SentencePieceTokenizer(model.getvalue())


MADE = {
    "bytes": ByteTokenizer,
    "lossless": lambda: SentencePieceBPE().build(400, lambda: [TEXT]),
    "folding": lambda: folding(add_dummy_prefix=False),
    "folding, with a space in front": folding,
    "folding, with pieces of several words": lambda: folding(split_by_whitespace=False, add_dummy_prefix=False),
    "unigram": lambda: folding(model_type="unigram"),
    "CaseOps before folding": lambda: CaseOpsTokenizer(folding()),
}


@pytest.fixture(scope="module")
def made() -> dict[str, Tokenizer]:
    return {}


@pytest.fixture(scope="module")
def tokenizer(request: pytest.FixtureRequest, made: dict[str, Tokenizer]) -> Tokenizer:
    name = request.param
    if name not in made:
        made[name] = MADE[name]() if name in MADE else contest(request.getfixturevalue("real_data"), int(name))
    return made[name]


@pytest.mark.parametrize("tokenizer", [*MADE, "1024"], indirect=True)
@settings(derandomize=True, deadline=None, max_examples=20)
@given(data=anything)
def test_all_bytes_come_back(tokenizer: Tokenizer, data: bytes) -> None:
    ids = exact_ids(tokenizer, data)
    assert ids.dtype == np.uint16
    assert tokenizer.decode(ids) == data
    assert tokenizer.bos not in ids


@pytest.mark.long
@pytest.mark.parametrize("tokenizer", [*MADE, "1024"], indirect=True)
def test_hard_bytes_come_back(tokenizer: Tokenizer) -> None:
    for data in [*HARD, b"\n".join(HARD), TEXT, bytes(range(256)), b"a" * 5_000, b" " * 5_000, b"\n" * 5_000]:
        assert tokenizer.decode(exact_ids(tokenizer, data)) == data


@pytest.mark.parametrize("tokenizer", ["bytes", "lossless"], indirect=True)
def test_a_lossless_tokenizer_has_its_own_ids(tokenizer: Tokenizer) -> None:
    for data in HARD:
        assert exact_ids(tokenizer, data).tolist() == tokenizer.encode(data).tolist()


@pytest.mark.parametrize("tokenizer", ["folding", "folding, with pieces of several words", "1024"], indirect=True)
def test_around_a_change_all_ids_are_the_tokenizers_own(tokenizer: Tokenizer) -> None:
    def own(text: bytes) -> list[int]:
        return tokenizer.encode(text).tolist()

    spelled = {byte: tokenizer.token_bytes.index(bytes([byte])) for byte in b"\n\xbd\xc2"}
    first, second = b"the words before it", b"and the words after it"
    assert exact_ids(tokenizer, first).tolist() == own(first)
    broken = exact_ids(tokenizer, first + b"\n" + second).tolist()
    assert broken == [*own(first), spelled[ord("\n")], *own(second)]
    changed = exact_ids(tokenizer, first + "½ ".encode() + second + b"\n" + second).tolist()
    assert changed[-len(own(second)) :] == own(second)
    if tokenizer.vocabulary == 1_024:
        halved = [*own(first), spelled[0xC2], spelled[0xBD], *own(b"it " + second)[len(own(b"it")) :]]
        assert changed == [*halved, spelled[ord("\n")], *own(second)]


@pytest.mark.long
def test_english_takes_nearly_as_few_ids_as_the_contest_model_gives(real_data: Path) -> None:
    """Of the ids that come on top, three in four are line breaks, which the model's own encoding does not have."""
    tokenizer, documents = contest(real_data), held_out_documents(real_data)
    exact = [exact_ids(tokenizer, document) for document in documents]
    assert [tokenizer.decode(ids) for ids in exact] == documents
    count, own = sum(map(len, exact)), sum(len(tokenizer.encode(document)) for document in documents)
    breaks = sum(document.count(b"\n") for document in documents)
    assert breaks < count - own < 1.5 * breaks < 0.015 * own


# A tokenizer whose bytes depend on what stands before them.


class Shifted(Tokenizer):
    """Lower-case letters, and an id that makes the next one upper case; `token_bytes` knows nothing of that."""

    kind, vocabulary, bos = "shifted", 258, 256
    token_bytes = (*(bytes([byte]) for byte in range(256)), b"", b"")
    shift = 257

    def __init__(self, loses: bytes = b"") -> None:
        self.loses = loses

    def encode_many(self, documents: Sequence[bytes]) -> list[Ids]:
        return [
            np.array(
                [index for byte in document if byte not in self.loses for index in self._ids(byte)],
                np.uint16,
            )
            for document in documents
        ]

    def _ids(self, byte: int) -> list[int]:
        return [self.shift, byte + 32] if 65 <= byte <= 90 else [byte]

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> bytes:
        text = bytearray()
        upper = False
        for index in np.asarray(ids).tolist():
            if index < 256:
                text.append(index - 32 if upper else index)
            upper = index == self.shift
        return bytes(text).replace(b"!", b"?") if self.loses else bytes(text)

    def serialize(self) -> bytes:
        return b""


def test_decode_is_the_truth() -> None:
    tokenizer = Shifted()
    assert exact_ids(tokenizer, b"One TWO\n").tolist() == tokenizer.encode(b"One TWO\n").tolist()
    assert Shifted(b"x").decode(exact_ids(Shifted(b"x"), b"Six\n")) == b"Six\n"
    with pytest.raises(UserError, match=r"^this tokenizer's pieces do not give back the bytes .*$"):
        exact_ids(Shifted(b"x"), b"six!")


def test_a_byte_without_an_id_is_refused() -> None:
    tokenizer = folding(byte_fallback=False, vocab_size=200)
    assert tokenizer.decode(exact_ids(tokenizer, b"the  text")) == b"the  text"
    with pytest.raises(UserError, match=r"^this tokenizer has no id for the byte 0xe9; use a model with byte ids$"):
        exact_ids(tokenizer, b"the \xe9")
