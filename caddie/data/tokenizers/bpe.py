"""Byte pair encoding trained by SentencePiece, lossless and deterministic."""

import io
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from caddie.data.tokenizers.tokenizer import MOST_IDS
from caddie.errors import UserError

RAW = "\0\u2581\udc80-\udcff"
"""Characters that SentencePiece cannot represent, as the inside of a regular expression's set: NUL, its mark for a
space, and bytes that are not UTF-8 (surrogates from surrogateescape)."""
_RESERVED = 4 + 256  # pad, BOS, EOS, unknown and the bytes
_COVERAGE = 0.999  # of the characters of the text; the rest are left to byte ids
_LONGEST = 10_000  # characters of training text that SentencePiece takes as one sentence


def train(documents: Sequence[bytes], vocabulary: int, sample_bytes: int, symbols: Sequence[str] = ()) -> bytes:
    """Return the file of a model of `vocabulary` ids, trained on at most `sample_bytes` of the documents.

    Each of `symbols`, single characters, is a piece of its own and part of no other. Raises `UserError` for a
    vocabulary that is too large for the text.
    """
    reserved = _RESERVED + len(symbols)
    room = vocabulary - reserved
    if not 0 < room <= MOST_IDS - reserved:
        raise UserError(f"SentencePieceBPE needs model.vocabulary from {reserved + 1} to {MOST_IDS}, not {vocabulary}")
    texts = [data.decode(errors="surrogateescape") for data in _draw(documents, sample_bytes)]
    # Skipped in training: tabs, SentencePiece's sign for the unknown, and what must not become part of a piece.
    untrained = re.compile(f"[\t\u2585{RAW}{''.join(symbols)}]+")
    counts = Counter(untrained.sub("", "".join(texts)))
    largest = reserved
    for characters in (max(1, room // 2), room):  # second try: all characters, if the text has too few pairs
        sentences = _sentences(texts, _alphabet(counts, characters))
        model, largest = _train(sentences, vocabulary, symbols) if sentences else (b"", largest)
        if model:
            return model
    advice = f"set model.vocabulary to at most {largest}, or " if largest > reserved else ""
    raise UserError(f"too little training text for a vocabulary of {vocabulary}; {advice}use RawBytes")


def _draw(documents: Sequence[bytes], size: int) -> Iterator[bytes]:
    """Yield documents in a fixed random order, at most `size` bytes of them."""
    for index in random.Random(0).sample(range(len(documents)), min(len(documents), size)):
        document = documents[index][:size]
        yield document
        size -= len(document)
        if not size:
            return


def _alphabet(counts: Counter[str], most: int) -> str:
    """Return the most frequent characters, enough for `_COVERAGE` of the text and at most `most`."""
    ordered = sorted(counts, key=lambda character: (-counts[character], character))
    covered = np.cumsum([counts[character] for character in ordered])
    enough = int(np.searchsorted(covered, _COVERAGE * counts.total())) + 1
    return "".join(ordered[: min(enough, most)])


def _sentences(texts: list[str], alphabet: str) -> list[str]:
    """Return the runs of `alphabet`, cut to the trainer's length; the trainer would drop characters by other rules."""
    outside = re.compile(f"[^{re.escape(alphabet)}]+") if alphabet else re.compile(".+", re.DOTALL)
    runs = (run for text in texts for run in outside.split(text) if run.strip("\r\n"))
    return [run[start : start + _LONGEST] for run in runs for start in range(0, len(run), _LONGEST)]


def _train(sentences: list[str], vocabulary: int, symbols: Sequence[str]) -> tuple[bytes, int]:
    """Return the model file, or no bytes if it failed; and the largest vocabulary possible for these sentences."""
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocabulary,
            normalization_rule_name="identity",
            character_coverage=1.0,
            byte_fallback=True,
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            split_by_unicode_script=False,  # 0.7 % more bytes per token on web text, 3 % on Python (November 2026)
            user_defined_symbols=list(symbols),
            max_sentence_length=8 * _LONGEST,
            pad_id=0,
            bos_id=1,
            eos_id=2,
            unk_id=3,
            num_threads=1,
            minloglevel=3,
        )
    except RuntimeError as error:
        largest = re.search(r"too high .* <= (\d+)", str(error))
        if not largest:
            raise
        return b"", int(largest[1])
    return model.getvalue(), vocabulary
