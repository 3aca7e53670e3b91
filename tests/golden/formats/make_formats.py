"""Write the files of this folder: artifacts and compressed texts that every later version must read alike.

    python tests/golden/formats/make_formats.py

Run it only for a new version of a format, into a new folder beside this one: these files are never written anew.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from caddie.data.tokenizers import (
    ByteTokenizer,
    ByteTokenizer260,
    CaseOps,
    HuggingFaceTokenizer,
    SentencePieceBPE,
    TiktokenTokenizer,
    Tokenizer,
)
from caddie.data.tokenizers.library_files import _PRINTED
from caddie.inference.text_codec import compress
from caddie.model import GPT, Block, GroupedQueryAttention, ReluSquared, build
from caddie.pack import artifact as artifacts
from caddie.pack.codecs import Brotli, Lzma, Stored, Zlib, Zstd
from caddie.pack.coding import ArrayCodec, EntropyModel, Packed, Smallest
from caddie.pack.compress import Pack, pack
from caddie.pack.quantize import (
    Binary,
    Float8,
    Float16,
    Float32,
    Gptq,
    LowRank,
    Protected,
    Quantizer,
    Rotated,
    Rows,
    SigmaClip,
    Ternary,
    Trellis,
    Waterfilling,
)
from caddie.score import SGD, ChunkSGD, DocumentLoRA, GlobalSGD, Scoring, Text, score

FOLDER = Path(__file__).parent
TEXT = ("The cat sat on the mat; the dog sat on the log. Then IT RAINED, and both went home.\n" * 8)[:600].encode()
DOCUMENTS = [TEXT[:200], TEXT[200:230], b"", TEXT[230:]]
SMALL = GPT(
    vocabulary=256,
    width=32,
    depth=1,
    block=Block(attention=GroupedQueryAttention(heads=2, key_value_heads=1), mlp=ReluSquared(hidden=64)),
)
WIDE = SMALL.but({"vocabulary": 256, "width": 512, "block.mlp.hidden": 2048, "block.attention.heads": 8})
"""Its largest matrix has a million elements: counts of the entropy model are halved, and tiles reach their largest."""
SLIDING = Scoring(sequence_length=32, stride=8, precision="float64")

QUANTIZERS: dict[str, Quantizer] = {
    "float16": Float16(),
    "float32": Float32(),
    "float8": Float8(),
    "rows8": Rows(),
    "rows6": Rows(bits=6, scale=SigmaClip(k=12.85)),
    "rows4_packed": Rows(bits=4, packed=True, steps="float32"),
    "gptq5": Gptq(of=Rows(bits=5)),
    "ternary": Ternary(group=16),
    "ternary_packed": Ternary(group=16, packed=True, keep_mean=True),
    "binary": Binary(group=16),
    "protected": Protected(of=Gptq(of=Rows(bits=4)), start=4, columns=8),
    "low_rank": LowRank(of=Rows(bits=3), rank=2),
    "low_rank_symmetric": LowRank(of=Rows(bits=3), rank=2, form="symmetric"),
    "rotated": Rotated(of=Rows(bits=4)),
    "waterfilling": Waterfilling(step=0.02),
    "trellis": Trellis(step=0.02),
}
CODINGS: dict[str, ArrayCodec] = {
    "entropy_model": EntropyModel(),
    "smallest": Smallest(),
    "stored": Packed(codec=Stored(), shuffle=True),
    "zlib": Packed(codec=Zlib(), columns=True),
    "lzma": Packed(codec=Lzma(), sort_rows=True),
    "zstd": Packed(codec=Zstd(), shuffle=True, columns=True),
    "brotli": Packed(codec=Brotli(), shuffle=True, sort_rows=True),
}
SCORINGS = {
    "plain": SLIDING.plain,
    "sliding": SLIDING,
    "chunks": SLIDING.but(ttt=ChunkSGD(chunk_tokens=64, sgd=SGD(lr=0.05, epochs=1, rows=8))),
    "documents": SLIDING.but(ttt=DocumentLoRA(rank=2, alpha=2.0, lr=0.01, chunk_tokens=8, documents=3)),
    "phases": SLIDING.but(
        ttt=DocumentLoRA(
            rank=2, alpha=2.0, lr=0.01, chunk_tokens=8, documents=2, phases=GlobalSGD(documents=2, chunk_tokens=32)
        )
    ),
}


def random_weights(gpt: GPT, sparse: bool) -> dict[str, Tensor]:
    """Return weights of chance; sparse ones are nearly all zero, so that a million of them take few bytes."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, parameter in build(gpt, 0).named_parameters():
        drawn = 0.2 * torch.randn(parameter.shape, generator=generator)
        if sparse and drawn.ndim > 1:
            drawn *= torch.rand(parameter.shape, generator=generator) < 0.01
        weights[name] = drawn
    return weights


def tokenizers() -> dict[str, Tokenizer]:
    """Return one tokenizer of each kind."""
    documents = [TEXT[start : start + 60] for start in range(0, 600, 60)]
    made = {"sentencepiece": SentencePieceBPE(), "caseops": CaseOps()}
    return {
        "bytes": ByteTokenizer(),
        "bytes260": ByteTokenizer260(),
        **{name: one.build(290, lambda: documents) for name, one in made.items()},
        "hugging_face": HuggingFaceTokenizer(hugging_face_file()),
        "tiktoken": TiktokenTokenizer(tiktoken_file()),
    }


def hugging_face_file() -> bytes:
    """Return a `tokenizer.json` of bytes and three merges."""
    characters = [chr(byte) for byte in _PRINTED] + [chr(256 + place) for place in range(256 - len(_PRINTED))]
    tokens = ["<s>", *characters, "th", "the", "\u0120the"]
    merges = [["t", "h"], ["th", "e"], ["\u0120", "the"]]
    of_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    begin = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    value = {
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": "<s>", **begin, "special": True}],
        "normalizer": None,
        "pre_tokenizer": of_bytes,
        "decoder": of_bytes,
        "model": {"type": "BPE", "vocab": {token: index for index, token in enumerate(tokens)}, "merges": merges},
    }
    return json.dumps(value).encode()


def tiktoken_file() -> bytes:
    """Return ranks of bytes and three merges, after their pattern."""
    tokens = [*(bytes([byte]) for byte in range(256)), b"th", b"the", b" the"]
    ranks = [b"%s %d" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    return b"\n".join([json.dumps({"pattern": " ?[^ ]+| +"}).encode(), *ranks])


def write(
    name: str,
    gpt: GPT,
    quantizers: Mapping[str, Quantizer],
    coding: ArrayCodec,
    tokenizer: Tokenizer,
    scoring: Scoring = SLIDING,
    sparse: bool = False,
) -> Path:
    """Write an artifact of random weights."""
    gpt, weights = gpt.but({"vocabulary": tokenizer.vocabulary}), {}
    weights = random_weights(gpt, sparse)
    manifest = artifacts.Manifest(
        caddie="0.1.0",
        recipe=name,
        recipe_sha256="",
        seed=0,
        parameters=sum(weight.numel() for weight in weights.values()),
        tokenizer=tokenizer.kind,
        tokenizer_sha256=tokenizer.sha256,
        train_documents_sha256="",
        validation_fraction=None,
    )
    path = FOLDER / f"{name}.artifact"
    config = Pack(quantizers=quantizers, coding=coding, fit=None, calibration=Pack().calibration)
    pack(artifacts.Metadata(gpt, tokenizer, scoring, manifest), weights, config, path)
    return path


def all_as(quantizer: Quantizer) -> dict[str, Quantizer]:
    """Return rules under which one quantizer has all matrices."""
    return {"embedding": quantizer, "matrix": quantizer, "head": quantizer, "gate": Float16(), "scalar": Float16()}


def expected(path: Path, scored: bool) -> dict[str, Any]:
    """Return what an artifact must give: hashes of its weights and, if `scored`, nats on `TEXT`."""
    read = artifacts.load(path)
    hashes = {
        name: hashlib.sha256(weight.detach().numpy().tobytes()).hexdigest()[:16]
        for name, weight in read.model.named_parameters()
    }
    return {"weights": hashes, **({"nats": nats(read)} if scored else {})}


def nats(read: artifacts.Artifact) -> float:
    """Return the nats of `DOCUMENTS` under an artifact's own scoring."""
    tokenizer = read.tokenizer
    ids = [[tokenizer.bos, *map(int, tokenizer.encode(document))] for document in DOCUMENTS]
    tokens = torch.tensor([one for document in ids for one in document], dtype=torch.int32).numpy().astype("uint16")
    return score(read.model, Text(tokens, tokenizer.bos, 1, 1, 1), read.scoring).nats


def main() -> None:
    """Write all files and `expected.json`."""
    known, byte = tokenizers(), ByteTokenizer()
    found: dict[str, Any] = {}
    for name, quantizer in QUANTIZERS.items():
        found[f"quantizer-{name}"] = (SMALL, all_as(quantizer), EntropyModel(), byte, SLIDING, False)
    for name, coding in CODINGS.items():
        found[f"coding-{name}"] = (SMALL, all_as(Rows(bits=4)), coding, byte, SLIDING, False)
    for name, tokenizer in known.items():
        found[f"tokenizer-{name}"] = (SMALL, all_as(Rows(bits=4)), EntropyModel(), tokenizer, SLIDING, False)
    for name, scoring in SCORINGS.items():
        found[f"scoring-{name}"] = (SMALL, all_as(Rows(bits=5)), EntropyModel(), byte, scoring, False)
    found["large-rows"] = (WIDE, all_as(Rows(bits=3)), EntropyModel(), byte, SLIDING, True)
    found["large-ternary"] = (WIDE, all_as(Ternary()), Packed(codec=Lzma(), columns=True), byte, SLIDING, True)
    results: dict[str, Any] = {"artifacts": {}, "texts": {}}
    for name, given in found.items():
        path = write(name, *given)
        results["artifacts"][name] = expected(path, scored=not name.startswith("large"))
    for name in SCORINGS:
        read = artifacts.load(FOLDER / f"scoring-{name}.artifact")
        (FOLDER / f"scoring-{name}.text").write_bytes(compress(read, DOCUMENTS))
        results["texts"][f"scoring-{name}"] = f"scoring-{name}"
    for name in known:
        read = artifacts.load(FOLDER / f"tokenizer-{name}.artifact")
        (FOLDER / f"tokenizer-{name}.text").write_bytes(compress(read, [TEXT], streams=3))
        results["texts"][f"tokenizer-{name}"] = f"tokenizer-{name}"
    read = artifacts.load(FOLDER / "scoring-plain.artifact")
    (FOLDER / "stored.text").write_bytes(compress(read, [bytes(range(256))]))
    results["texts"]["stored"] = "scoring-plain"
    (FOLDER / "expected.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
