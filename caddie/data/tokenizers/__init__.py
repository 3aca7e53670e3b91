"""Text to token ids and back, each tokenizer behind one interface."""

from caddie.data.tokenizers.tokenizers import (
    MARK,
    ByteTable,
    ByteTokenizer,
    CaseOps,
    CaseOpsTokenizer,
    Ids,
    RawBytes,
    SentencePieceBPE,
    SentencePieceFile,
    SentencePieceSource,
    SentencePieceTokenizer,
    Tokenizer,
    TokenizerSource,
    deserialize,
)

__all__ = [
    "ByteTable",
    "ByteTokenizer",
    "CaseOps",
    "CaseOpsTokenizer",
    "Ids",
    "MARK",
    "RawBytes",
    "SentencePieceBPE",
    "SentencePieceFile",
    "SentencePieceSource",
    "SentencePieceTokenizer",
    "Tokenizer",
    "TokenizerSource",
    "deserialize",
]
