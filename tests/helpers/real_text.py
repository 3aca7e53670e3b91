"""The contest's tokenizers and held-out documents, from the folder of `--data`."""

import json
from pathlib import Path

from caddie.data.tokenizers import SentencePieceFile, SentencePieceTokenizer


def contest_file(real_data: Path, vocabulary: int = 1024) -> SentencePieceFile:
    return SentencePieceFile(path=str(real_data / "tokenizers" / f"fineweb_{vocabulary}_bpe.model"))


def contest(real_data: Path, vocabulary: int = 1024) -> SentencePieceTokenizer:
    return contest_file(real_data, vocabulary).build(vocabulary, list)


def held_out_documents(real_data: Path) -> list[bytes]:
    lines = (real_data / "small" / "val_small.jsonl").read_text().splitlines()
    return [json.loads(line)["text"].encode() for line in lines]
