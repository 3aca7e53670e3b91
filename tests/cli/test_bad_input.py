"""Whatever is wrong with what the program is given: one line that says it, the right status, nothing half-written."""

import contextlib
import errno
import fnmatch
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import zstandard
from conftest import Ended
from processes import CONTEXT

from caddie.pack import container
from caddie.pack.codecs import Zlib
from caddie.pack.coding import ArrayCodec, EntropyModel, Packed

Call = Callable[..., Any]
HALF_WRITTEN = ("*.partial", "*.tmp", "*.unfinished", ".*")
SECONDS, MEMORY_BYTES = 5.0, 1_500_000_000
LOOP = "no such file or folder" if sys.version_info >= (3, 14) else "too many levels of symbolic links"


class Bench:
    """Builds what a case needs in the working directory, and the arguments that name it."""

    def __init__(self, tiny: Any) -> None:
        self.tiny = tiny

    def write(self, name: str, data: bytes | str) -> str:
        """A file."""
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return name

    def run(self, *settings: str, data: str | Path | None = None, out: str = "out") -> list[str]:
        """`caddie run` of the smallest recipe; these settings take the place of its own."""
        text, own = str(data or self.tiny.corpus), {setting.partition("=")[0] for setting in settings}
        kept = [setting for setting in self.tiny.settings if setting.partition("=")[0] not in own]
        return ["run", "tiny", *kept, *settings, "--data", text, "--out", out, "--quiet"]

    def text(self, name: str, data: bytes | str) -> list[str]:
        """A run on a text."""
        return self.run(data=self.write(name, data))

    def data(self, *arguments: str) -> list[str]:
        """`caddie data` of the text, in raw bytes if no tokenizer is named."""
        raw = [] if "--tokenizer" in arguments else ["data.tokenizer=RawBytes", "model.vocabulary=257"]
        return ["data", str(self.tiny.text), *raw, "--quiet", *arguments]

    def artifact(self, verb: str, edit: Callable[[bytes], bytes]) -> list[str]:
        """A verb on an edited artifact."""
        return [verb, self.write("artifact", edit(self.tiny.artifact.read_bytes()))]

    def score(self, data: str | Path) -> list[str]:
        """`caddie score` of the tiny run's artifact."""
        return ["score", str(self.tiny.artifact), "--data", str(data), "--quiet"]

    def corpus(self, name: str, edit: Callable[[bytes], bytes | str] | None) -> str:
        """A corpus with one file edited, or removed."""
        if not Path("corpus").exists():
            shutil.copytree(self.tiny.corpus, "corpus")
        path = Path("corpus", name)
        if edit is None:
            path.unlink(missing_ok=True)
        else:
            self.write(str(path), edit((self.tiny.corpus / name).read_bytes()))
        return "corpus"

    def manifest(self, edit: Callable[[Any], object]) -> str:
        """A corpus with its manifest edited."""
        return self.corpus("manifest.json", lambda data: edited(data, edit))

    def hashes(self, edit: Callable[[dict[str, Any]], object], seal: bool = False) -> str:
        """A corpus with its document hashes edited, and the manifest with them if sealed."""
        with np.load(self.tiny.corpus / "documents.npz") as arrays:
            held = dict(arrays)
        edit(held)

        def claim(manifest: dict[str, Any]) -> None:
            for split, array in held.items():
                rows = b"".join(sorted({row.tobytes() for row in array}))
                manifest[split]["document_set_sha256"] = hashlib.sha256(rows).hexdigest()

        folder = self.manifest(claim if seal else lambda manifest: None)
        np.savez(Path(folder, "documents.npz"), **held)
        return folder

    def compression(self, method: int, flags: int = 0) -> str:
        """A corpus whose document hashes are said to be compressed or encrypted by other methods."""

        def edit(data: bytes) -> bytes:
            method_bytes, flag_bytes = method.to_bytes(2, "little"), flags.to_bytes(2, "little")
            for at in (match.start() for match in re.finditer(b"PK\1\2", data)):  # of the central directory
                data = data[: at + 8] + flag_bytes + method_bytes + data[at + 12 :]
            for at in (match.start() for match in re.finditer(b"PK\3\4", data)):
                data = data[: at + 6] + flag_bytes + method_bytes + data[at + 10 :]
            return data

        return self.corpus("documents.npz", edit)

    def compress(self, *arguments: str) -> list[str]:
        """`caddie compress` with the tiny run's artifact."""
        return ["compress", str(self.tiny.artifact), *arguments, "--quiet"]

    def link(self, name: str, target: str) -> str:
        """A symbolic link."""
        if not os.path.lexists(name):
            os.symlink(target, name)
        return name

    def pipe(self, name: str) -> str:
        """A named pipe."""
        if not os.path.lexists(name):
            os.mkfifo(name)
        return name

    def copy(self, keep: str = "*") -> str:
        """A copy of the finished run, without its artifact."""
        if not Path("kept").exists():
            Path("kept").mkdir()
            for path in self.tiny.folder.iterdir():
                if path.name != "artifact.caddie" and fnmatch.fnmatch(path.name, keep):
                    shutil.copy(path, "kept")
        return "kept"

    def folder(self, name: str, edit: Callable[[bytes], bytes | str] | None, keep: str = "*") -> str:
        """Such a copy with one file edited or removed."""
        self.copy(keep)
        if edit is None:
            Path("kept", name).unlink(missing_ok=True)
        else:
            self.write(f"kept/{name}", edit((self.tiny.folder / name).read_bytes()))
        return "kept"

    def pack(self, *arguments: str) -> list[str]:
        """`caddie pack` of a copy of the run."""
        return ["pack", self.copy(), *arguments]

    def recipe(self, edit: Callable[[Any], object]) -> list[str]:
        """`caddie pack` of a run with its recipe edited."""
        return ["pack", self.folder("recipe.json", lambda data: edited(data, edit)), "--quiet"]

    def mine(self, source: str | bytes, name: str = "mine.py:mine") -> list[str]:
        """A run of a user's own recipe."""
        self.write("mine.py", source)
        return ["run", name, "--quiet", "--out", "out"]

    def tokenizer(self, data: bytes) -> list[str]:
        """`caddie data` with a tokenizer of these bytes."""
        return self.data("--tokenizer", self.write("own.model", data), "--out", "out")


def edited(data: bytes, edit: Callable[[Any], object]) -> bytes:
    """JSON, changed in place."""
    value = json.loads(data)
    edit(value)
    return json.dumps(value).encode()


def put(value: object, *path: str | int) -> Callable[[Any], None]:
    """The edit that sets a place in JSON."""

    def edit(node: Any) -> None:
        for step in path[:-1]:
            node = node[step]
        node[path[-1]] = value

    return edit


def patched(at: int, new: bytes) -> Callable[[bytes], bytes]:
    """The edit that overwrites bytes."""
    return lambda data: data[:at] + new + data[at + len(new) :]


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


@dataclass(frozen=True)
class Case:
    """One mistake: how to make it, and what the line must say."""

    label: str
    make: Callable[[Bench], list[str]]
    says: str
    status: int = 2
    out: str = ""
    """Part of what a failed check prints."""


def long_name(manifest: dict[str, Any]) -> None:
    """No system has a file of this name."""
    manifest["validation"]["shards"][0]["file"] = "x" * 3000


TEXT = "".join(f"Paragraph {number} of a text, and no two are alike.\n\n" for number in range(4000))

WORDS = [
    Case("unknown verb", lambda b: ["rum"], "no command rum (did you mean run?); see `caddie --help`"),
    Case("unknown option", lambda b: ["run", "tiny", "--fast"], "see `caddie run --help`"),
    Case("missing argument", lambda b: ["verify"], "Missing argument 'ARTIFACT'"),
    Case("missing runs", lambda b: ["submit"], "'RUN...'; needed are --out, --author and --github-id; see"),
    Case("missing options", lambda b: ["submit", "RUN"], "'--out'; needed are --out, --author and --github-id; see"),
    Case("seed of words", lambda b: b.run("--seed", "foo"), "'--seed': 'foo' is not a whole number; see"),
    Case("seconds of words", lambda b: b.run("--seconds", "abc"), "'--seconds': 'abc' is not a number; see"),
    Case("seed below zero", lambda b: b.run("--seed", "-1"), "'--seed': -1 is not in the range"),
    Case(
        "seconds not a number", lambda b: ["run", "tiny", "--seconds", "nan"], "train.seconds must be a number, not NaN"
    ),
    Case(
        "seconds twice",
        lambda b: b.run("--seconds", "5", "train.seconds=9"),
        "train.seconds is set twice, by --seconds",
    ),
    Case(
        "seconds and none",
        lambda b: b.run("--seconds", "5", "train.seconds=none"),
        "train.seconds is set twice, by --seconds",
    ),
    Case("shards of nothing", lambda b: ["data", "--shards", "3", "text"], "are for --fineweb; add --fineweb VARIANT"),
    Case("recipe without its name", lambda b: ["run", b.write("mine.py", "")], "names a file; name a recipe in it, as"),
    Case("no processes", lambda b: b.run("--gpus", "0"), "'--gpus': 0 is not in the range"),
    Case(
        "micro-batches", lambda b: b.run("--gpus", "2"), "train.micro_batches (1) must be a multiple of the 2 processes"
    ),
    Case("unknown recipe", lambda b: ["run", "tinny"], "no recipe tinny (did you mean tiny?)"),
    Case("empty recipe", lambda b: ["run", ""], "the name of the recipe is empty; `caddie recipes` lists them"),
    Case("empty text", lambda b: ["run", "tiny", "--data", ""], "'--data': it is empty; name a file or folder; see"),
    Case("empty path", lambda b: ["verify", ""], "it is empty; name a file or folder; see"),
    Case("seed as a setting", lambda b: b.run("seed=5"), "no setting seed; a run takes it by --seed"),
    Case(
        "documents nowhere",
        lambda b: [*b.score(b.tiny.corpus), "--documents", "none/documents.csv"],
        "no folder none; make it, or name another file with --documents",
    ),
    Case("unknown path", lambda b: b.run("model.widht=64"), "no setting model.widht (did you mean model.width?)"),
    Case("no equals sign", lambda b: b.run("model.width"), "'model.width' is not a setting; write PATH=VALUE"),
    Case(
        "setting first",
        lambda b: ["run", "model.depth=3", "tiny"],
        "model.depth=3 is a setting; the recipe comes first, as in: caddie run tiny model.depth=3",
    ),
    Case("setting first of a diff", lambda b: ["diff", "model.depth=3"], "as in: caddie diff tiny model.depth=3"),
    Case("wrong type", lambda b: b.run("model.width=wide"), "model.width must be a whole number, not wide"),
    Case("empty", lambda b: b.run("model.depth="), "model.depth must be a whole number, not ''"),
    Case("fraction of a layer", lambda b: b.run("model.depth=1.5"), "model.depth must be a whole number, not 1.5"),
    Case("out of range", lambda b: b.run("model.width=0"), "model.width must be from 1 to 65,536, not 0"),
    Case("out of a wide range", lambda b: b.run("score.stride=0"), "score.stride must be from 1 to 1,048,576, not 0"),
    Case("set twice", lambda b: b.run("model.depth=3", "model.depth=3"), "model.depth is set twice; leave one out"),
    Case(
        "scoring set twice", lambda b: ["score", str(b.tiny.artifact), *2 * ["score.stride=8"]], "score.stride is set"
    ),
    Case(
        "a layer set twice",
        lambda b: b.run('model.layers={"0": {}, "0": {}}'),
        "model.layers: 0 is set twice; leave one out",
    ),
    Case("data set twice", lambda b: b.data("data.tokenizer=RawBytes"), "data.tokenizer is set twice"),
    Case("swept twice", lambda b: ["sweep", "tiny", "model.depth=2", "model.depth=3..4"], "model.depth is set twice"),
    Case("no such word", lambda b: b.run("train.precision=fp8"), "train.precision must be one of auto, float32"),
    Case("no list", lambda b: b.run("train.float8=mlp"), "train.float8 must be a list, not mlp; write [mlp]"),
    Case("no such part", lambda b: b.run("train.float8=[tail]"), "train.float8.0 must be one of head, mlp, not tail"),
    Case(
        "no GPU",
        lambda b: b.run("train.cuda_graphs=always"),
        "train.cuda_graphs=always needs a GPU; auto takes them where there is one",
    ),
    Case("unknown variant", lambda b: b.run("pack.coding=Rar"), "pack.coding must be one of "),
    Case(
        "text not quoted",
        lambda b: b.run("data.tokenizer=SentencePieceFile(path=/a.model)"),
        "is not of the form SentencePieceFile(path=VALUE); put text in quotes",
    ),
    Case(
        "file without its class",
        lambda b: b.run("data.tokenizer=my.model"),
        'not my.model; for a file write HuggingFaceFile or TiktokenFile or SentencePieceFile(path="FILE")',
    ),
    Case("no bytes to fill", lambda b: b.run("pack.cap_bytes=0"), "pack.cap_bytes must be from 1 to"),
    Case("no budget", lambda b: b.run("train.steps=none"), "set train.seconds or train.steps"),
    Case("batch", lambda b: b.run("train.batch_tokens=100"), "train.batch_tokens (100) must be train.micro_batches"),
    Case("heads", lambda b: b.run("model.width=18"), "width of 18 does not divide into 2 heads of even size"),
    Case("layers", lambda b: b.run('model.layers.0-2={"mlp.hidden":8}'), "layers.0-2 names no layers; write a layer"),
    Case("stride", lambda b: b.run("score.stride=64"), "score.stride must be from 1 to score.sequence_length (32)"),
    Case(
        "stride of a score",
        lambda b: [*b.score(b.tiny.corpus), "score.stride=64"],
        "score.stride must be from 1 to score.sequence_length (32)",
    ),
    Case(
        "chunk",
        lambda b: b.run("score.ttt=DocumentLoRA(chunk_tokens=33)"),
        "score.ttt.chunk_tokens must be at most score.sequence_length (32)",
    ),
    Case(
        "optimizer for nothing",
        lambda b: b.run('train.optimizers.blocks.7.*={"kind":"AdamW","lr":0.1}'),
        "train.optimizers: blocks.7.* matches no parameter",
    ),
    Case(
        "no optimizer",
        lambda b: b.run('train.optimizers={"matrix":{"kind":"Muon","lr":0.1}}'),
        "train.optimizers: no rule for embedding.weight; add one for its role, embedding",
    ),
    Case(
        "quantizer for nothing",
        lambda b: b.run("pack.quantizers.blocks.7.*=Float16"),
        "pack.quantizers: blocks.7.* matches no parameter",
    ),
    Case(
        "no quantizer",
        lambda b: b.run('pack.quantizers={"matrix":"Rows"}'),
        "pack.quantizers: no rule for embedding.weight",
    ),
    Case("number beyond all", lambda b: b.run("model.width=1" + "0" * 400), "model.width must be"),
    Case("unhashable", lambda b: b.run("model.width={[1]: 2}"), "model.width must be"),
    Case("other setting", lambda b: ["verify", str(b.tiny.artifact), "seed=3"], "verify takes pack.cap_bytes=N"),
    Case("temperature", lambda b: ["sample", str(b.tiny.artifact), "--temperature", "-1"], "is not in the range 0<=x"),
    Case(
        "temperature not a number",
        lambda b: ["sample", str(b.tiny.artifact), "--temperature", "nan"],
        "'--temperature': nan is not a finite number; see `caddie sample --help`",
    ),
    Case("price of one run", lambda b: ["report", str(b.tiny.folder), "--price", "2"], "--price is for several runs"),
    Case("price not a number", lambda b: ["report", "none", "--price", "nan"], "'--price': nan is not a finite number"),
    Case(
        "price of a sweep",
        lambda b: ["sweep", "tiny", "model.depth=2", "--price", "nan"],
        "'--price': nan is not a finite number",
    ),
    Case("two texts", lambda b: b.data("--fineweb", "sp1024"), "--fineweb brings its own text and tokenizer"),
    Case("two texts, documents", lambda b: b.data("--fineweb", "documents"), "brings its own text; leave out PATH"),
    Case("no variant", lambda b: ["data", "--fineweb", "sp1O24"], "no variant sp1O24; there are byte260, "),
    Case(
        "no such variant", lambda b: ["data", "--fineweb", "sp9999"], "no variant sp9999; there are byte260, sp1024, "
    ),
    Case("a place for nothing", lambda b: ["data", "--local", "here"], "are for --fineweb; add --fineweb VARIANT"),
    Case(
        "two places",
        lambda b: ["data", "--fineweb", "sp1024", "--local", "here", "--revision", "main"],
        "--local takes the place of --repository and --revision",
    ),
    Case(
        "a tokenizer of one's own",
        lambda b: ["data", "--fineweb", "sp1024", "model.vocabulary=300"],
        "model.vocabulary has no effect with --fineweb or --against",
    ),
    Case(
        "two tokenizers",
        lambda b: ["data", "text.txt", "--tokenizer", "a.model", "model.vocabulary=300"],
        "--tokenizer takes the place of model.vocabulary; leave one of them out",
    ),
    Case(
        "a setting without its name",
        lambda b: ["run", "tiny", "train.optimizers.matrix=Muon(0.1)"],
        "train.optimizers.matrix: Muon(0.1) is not of the form Muon(lr=VALUE); put text in quotes",
    ),
    Case(
        "a fraction of a corpus",
        lambda b: ["data", b.tiny.corpus, "data.validation_fraction=0.1"],
        "is a corpus already; leave out data.validation_fraction, or name the text that it was made from",
    ),
    Case(
        "a fraction of the documents",
        lambda b: ["data", "--fineweb", "documents", "data.validation_fraction=0.1"],
        "has no effect: the first 50,000 documents are held out",
    ),
    Case(
        "a copy that is not there",
        lambda b: ["data", "--fineweb", "sp1024", "--local", "here"],
        "here: no such folder; name one that holds the repository's files",
    ),
    Case(
        "the contest's recipe without its text",
        lambda b: ["run", "best_record"],
        "ngram_tilt trains on the contest's text: fetch it with `caddie data --fineweb caseops8192 --shards 80`",
    ),
    *(
        Case(
            f"{words[0]} of the contest's recipe without its text",
            lambda b, words=words: list(words),
            "ngram_tilt trains on the contest's text: fetch it with `caddie data --fineweb caseops8192 --shards 80`",
        )
        for words in (("ablate", "best_record"), ("sweep", "best_record", "model.depth=10,12"))
    ),
    Case("unknown base", lambda b: ["diff", "tiny", "huge"], "no recipe huge"),
]

RECIPES = [
    Case(
        "recipe file missing",
        lambda b: ["run", "none.py:mine"],
        "; name a Python file that is there, as FILE.py or FILE.py:NAME",
    ),
    Case(
        "folder as a Python file",
        lambda b: (Path("adir").mkdir(exist_ok=True), ["run", "adir:mine"])[1],
        "adir is a folder",
    ),
    Case(
        "no name behind the colon", lambda b: b.mine("", "mine.py:"), "mine.py: names no recipe; write its name behind"
    ),
    Case("no recipe file here", lambda b: ["run", "none.py:mine"], f"no file none.py in {os.sep}"),
    Case(
        "no run folder",
        lambda b: ["pack", "runs/nope"],
        "runs/nope is not a run folder: no file runs/nope/recipe.json; name one that caddie train wrote",
    ),
    Case("recipe file broken", lambda b: b.mine("mine = ("), "mine.py does not run: SyntaxError"),
    Case("recipe file raises", lambda b: b.mine("1 / 0"), "mine.py does not run: ZeroDivisionError"),
    Case(
        "recipe file decorates a class of settings",
        lambda b: b.mine(
            "import dataclasses, caddie.config as c\n@dataclasses.dataclass(frozen=True)\nclass Mine(c.Config): pass"
        ),
        "a class of settings needs no @dataclass any more",
    ),
    Case("recipe file ends", lambda b: b.mine("raise SystemExit(3)"), "mine.py does not run"),
    Case(
        "recipe not in file",
        lambda b: b.mine("from caddie.recipes.catalog import find\ntiny = find('tiny')", "mine.py:tinny"),
        "mean tiny?",
    ),
    Case("not a recipe", lambda b: b.mine("mine = {'model.width': 8}"), "mine.py has no recipe mine"),
    Case(
        "recipe with a wrong path",
        lambda b: b.mine("from caddie.recipes.catalog import find\nmine = find('tiny').but({'model.widht': 8})"),
        "no setting model.widht (did you mean model.width?)",
    ),
]

TEXTS = [
    Case("text missing", lambda b: b.run(data="none.txt"), "none.txt: no such file or folder; give text, JSON lines"),
    Case("text of nobody", lambda b: b.run(data="~no-such-user/a.txt"), "~no-such-user/a.txt: no such file or folder"),
    Case("text a device", lambda b: b.run(data="/dev/null"), "/dev/null: not a regular file; save the text in one"),
    Case("text empty", lambda b: b.text("a.txt", ""), "a.txt: no documents"),
    Case("text too short", lambda b: b.text("a.txt", "One."), "a.txt: one document, and two or more are needed"),
    Case(
        "text without lines", lambda b: b.text("a.txt", "word " * 20_000), "64 KiB with line ends, at which it is cut"
    ),
    Case(
        "text of copies",
        lambda b: b.text("a.jsonl", 3 * '{"text": "a"}\n'),
        "one document (duplicates dropped: 2), and two or more are needed; give JSON lines",
    ),
    Case("text not UTF-8", lambda b: b.text("a.txt", b"caf\xe9 " * 9000), "a.txt: not UTF-8 text; give text"),
    Case("text binary", lambda b: b.run(data=b.tiny.artifact), "artifact.caddie: not UTF-8 text"),
    Case("folder empty", lambda b: (Path("empty").mkdir(exist_ok=True), b.run(data="empty"))[1], "holds no files"),
    Case(
        "JSON cut",
        lambda b: b.text("a.jsonl", '{"text": "a"}\n{"text": "b"\n'),
        "a.jsonl:2: not JSON (Expecting ',' delimiter at character 14)",
    ),
    Case("JSON without text", lambda b: b.text("a.jsonl", '{"text": "a"}\n\n{"body": ""}'), "a.jsonl:3: no text"),
    Case("JSON not UTF-8", lambda b: b.text("a.jsonl", b'{"text": "caf\xe9"}'), "byte 14 is not UTF-8; save"),
    Case("JSON too deep", lambda b: b.text("a.jsonl", "[" * 100_000), "a.jsonl:1: not JSON"),
    Case("gz truncated", lambda b: b.text("a.txt.gz", half(gzip.compress(TEXT.encode()))), "a.txt.gz: cannot be read"),
    Case("gz not compressed", lambda b: b.text("a.txt.gz", TEXT), "a.txt.gz: cannot be read ("),
    Case("xz truncated", lambda b: b.text("a.txt.xz", half(lzma.compress(TEXT.encode()))), "a.txt.xz: cannot be read"),
    Case("xz not compressed", lambda b: b.text("a.txt.xz", TEXT), "a.txt.xz: cannot be read"),
    Case(
        "zst truncated",
        lambda b: b.text("a.txt.zst", half(zstandard.compress(TEXT.encode(), 1))),
        "a.txt.zst: cannot be read",
    ),
    Case("zst not compressed", lambda b: b.text("a.txt.zst", TEXT), "a.txt.zst: cannot be read"),
    Case("too little to train on", lambda b: b.run("train.batch_tokens=131072"), "use more text or a smaller batch"),
    Case("validation too short", lambda b: b.run("score.sequence_length=60000"), "too few for one window of 60,000"),
    Case("vocabulary", lambda b: b.run("model.vocabulary=300"), "has 257 ids; set model.vocabulary=257"),
]

TOKENIZERS = [
    Case("tokenizer missing", lambda b: b.data("--tokenizer", "none.model"), "name a .model file"),
    Case("tokenizer empty", lambda b: b.tokenizer(b""), "own.model: not a SentencePiece model, or a damaged one"),
    Case("tokenizer garbage", lambda b: b.tokenizer(bytes(range(256))), "own.model: not a SentencePiece model"),
    Case("tokenizer text", lambda b: b.tokenizer(b"the a of to and\n" * 30), "own.model: not a SentencePiece model"),
    Case("tokenizer unknown", lambda b: b.data("--tokenizer", str(b.tiny.text)), "this is not a caddie file"),
]

CORPORA = [
    Case(
        "corpus missing",
        lambda b: ["data", str(b.tiny.text), "--against", "none", "--quiet"],
        "no corpus in none; make one with: caddie data",
    ),
    Case("manifest missing", lambda b: b.run(data=b.corpus("manifest.json", None)), "corpus without its manifest.json"),
    Case("manifest broken", lambda b: b.run(data=b.corpus("manifest.json", half)), "corpus/manifest.json: not JSON"),
    Case("manifest version", lambda b: b.run(data=b.manifest(put(9, "version"))), "manifest version 9"),
    Case("no bytes", lambda b: b.score(b.manifest(put(0, "validation", "source_bytes"))), "the manifest miscounts"),
    Case("miscounted", lambda b: b.score(b.manifest(put(9, "validation", "tokens"))), "the manifest miscounts"),
    Case("no validation", lambda b: b.score(b.manifest(put([], "validation", "shards"))), "the manifest miscounts"),
    Case("no training", lambda b: b.run(data=b.manifest(put([], "train", "shards"))), "for validation only"),
    Case("hashes missing", lambda b: b.run(data=b.corpus("documents.npz", None)), "manifest.json or documents.npz"),
    Case(
        "shard with a long name", lambda b: b.score(b.manifest(long_name)), "cannot read the shard (File name too long"
    ),
    Case("hashes of another compression", lambda b: b.score(b.compression(21)), "cannot read the document hashes"),
    Case("hashes encrypted", lambda b: b.score(b.compression(0, flags=1)), "cannot read the document hashes"),
    Case(
        "hashes broken", lambda b: b.score(b.corpus("documents.npz", lambda data: b"####")), "cannot read the document"
    ),
    Case(
        "hashes of others",
        lambda b: b.score(b.hashes(lambda held: held.update(validation=held["train"]))),
        "not the validation documents of the manifest",
    ),
    Case(
        "overlap",
        lambda b: b.run(data=b.hashes(lambda held: held.update(train=np.concatenate(list(held.values()))), seal=True)),
        "validation documents in corpus are training documents too",
    ),
    Case("other tokenizer", lambda b: b.run(data=b.corpus("tokenizer.bin", lambda data: b"x")), "no tokenizer of kind"),
    Case("shard missing", lambda b: b.run(data=b.corpus("train_000000.bin", None)), "bin: cannot read the shard"),
    Case("shard magic", lambda b: b.score(b.corpus("val_000000.bin", patched(0, b"####"))), "not a token shard"),
    Case("shard version", lambda b: b.score(b.corpus("val_000000.bin", patched(4, b"\2"))), "shard version 2"),
    Case("shard over", lambda b: b.score(b.corpus("val_000000.bin", patched(8, b"\xff" * 3))), "copy it again"),
    Case("shard under", lambda b: b.score(b.corpus("val_000000.bin", patched(8, bytes(4)))), "holds no tokens"),
    Case("shard odd", lambda b: b.score(b.corpus("val_000000.bin", lambda data: data[:-1])), "copy it again"),
    Case("shard cut", lambda b: b.score(b.corpus("val_000000.bin", lambda data: data[:99])), "it has 99 bytes"),
    Case(
        "validation changed",
        lambda b: b.score(b.corpus("val_000000.bin", patched(2000, b"\1\0"))),
        "val_000000.bin: changed since it was prepared",
    ),
    Case(
        "training changed",
        lambda b: b.run(data=b.corpus("train_000000.bin", patched(2000, b"\xff\xff"))),
        "train_000000.bin: changed since it was prepared",
    ),
]

SCORING = [
    Case("foreign text", lambda b: b.score(b.write("a.txt", TEXT)), "caddie data TEXT --tokenizer"),
    Case(
        "training text alone",
        lambda b: b.score(b.write("a.txt", b.tiny.text.read_bytes()[:80_000])),
        "own, --data",
    ),
    Case("no training split", lambda b: b.score(b.manifest(put(None, "train"))), "manifest.train must have exactly"),
    Case(
        "unproven corpus",
        lambda b: b.score(b.manifest(put("0" * 64, "train", "document_set_sha256"))),
        "the artifact may have been trained on this text; ",
    ),
    Case(
        "tokenizer of another",
        lambda b: b.score(b.manifest(put("0" * 64, "tokenizer", "sha256"))),
        "another tokenizer than the artifact's",
    ),
]

RUNS = [
    Case("run recipe nested", lambda b: ["pack", b.folder("recipe.json", lambda d: "[" * 100_000)], "not a run folder"),
    Case("run folder missing", lambda b: ["pack", "none"], "none is not a run folder: no file none/recipe.json"),
    Case("recipe broken", lambda b: ["pack", b.folder("recipe.json", half)], "kept is not a run folder"),
    Case(
        "artifact as a run",
        lambda b: ["pack", b.write("a/b.caddie", "")],
        "a/b.caddie is a file; name the folder of a run",
    ),
    Case(
        "artifact of a run as the run",
        lambda b: ["pack", Path(b.folder("recipe.json", lambda d: d), "recipe.json")],
        "recipe.json is a file; name the folder of a run, as ",
    ),
    Case(
        "text compared",
        lambda b: ["compare", b.write("a.txt", "a"), "--against", b.write("b.txt", "b")],
        "a.txt is not JSON; name the folder of a finished run",
    ),
    Case(
        "other file compared",
        lambda b: ["compare", b.write("a.json", "{}"), "--against", b.write("b.json", "{}")],
        "a.json is no result of a run; name the folder of a finished run",
    ),
    Case(
        "sweep over what it has",
        lambda b: ["sweep", "tiny", "train.batch_tokens=2048"],
        "tiny has batch_tokens=2048 already; name another value",
    ),
    Case("weights missing", lambda b: ["pack", b.folder("weights.safetensors", None)], "train again with: caddie"),
    Case("weights cut", lambda b: ["pack", b.folder("weights.safetensors", half)], "safetensors cannot be read"),
    Case(
        "weights too few", lambda b: b.recipe(put(3, "recipe", "model", "depth")), "holds the weights of another model"
    ),
    Case(
        "weights too narrow",
        lambda b: b.recipe(put(32, "recipe", "model", "width")),
        "holds the weights of another model",
    ),
    Case("not of compress", lambda b: b.pack("model.depth=3"), "pack takes cap=N and settings of pack"),
    Case("no setting", lambda b: b.pack("16000"), "'16000' is not a setting; write PATH=VALUE"),
    Case("cap of words", lambda b: b.pack("cap=small"), "pack.cap_bytes"),
    Case("caps", lambda b: b.pack("cap=9", "cap=8"), "pack.cap_bytes is set twice"),
    Case(
        "policy of another run",
        lambda b: b.pack("pack.policy=strict", "cap=900000"),
        "pack.policy is not the run's, which verify applies to files in its folder; add --out FILE",
    ),
    Case("cap of nothing", lambda b: b.pack("cap=0"), "pack.cap_bytes"),
    Case("compare settings", lambda b: b.pack("--compare", "pack.fit=none"), "takes cap=N alone"),
    Case("compare into a file", lambda b: b.pack("--compare", "--out", "a"), "writes no file"),
    Case("compare nothing", lambda b: ["pack", "none", "--compare"], "none is not a run folder"),
    Case("corpus gone", lambda b: b.recipe(put("gone", "corpus")), "no corpus in gone"),
    Case(
        "no result",
        lambda b: ["report", b.folder("result.json", None)],
        "do what is left, to the score, with: caddie run kept --out kept",
    ),
    Case(
        "report of a file",
        lambda b: ["report", b.write("a.txt", "")],
        "no a.txt/result.json; name the folder",
    ),
    Case("result broken", lambda b: ["report", b.folder("result.json", half)], "kept/result.json is not JSON"),
    Case(
        "result empty",
        lambda b: ["report", b.folder("result.json", lambda data: '{"version": 1}')],
        "kept/result.json",
    ),
    Case(
        "finished",
        lambda b: b.run("--seed", "3", out=b.copy()),
        "kept holds a finished run of seed 1337, not 3; name another folder with --out or remove it",
    ),
    Case(
        "checkpoint broken",
        lambda b: b.run(out=b.folder("checkpoint.safetensors", half, keep="checkpoint*")),
        "kept/checkpoint.safetensors is not a readable checkpoint",
    ),
    Case(
        "checkpoint of another seed",
        lambda b: b.run("--seed", "2", out=b.copy("checkpoint*")),
        "kept/checkpoint.safetensors is of another recipe, text or seed",
    ),
    Case("out is a file", lambda b: b.run(out=b.write("file", "")), "file is a file; name a folder"),
    Case("out is below a file", lambda b: b.run(out=b.write("file", "") + "/x"), "file is a file; name a folder"),
    Case(
        "out cannot be made", lambda b: b.run(out="/proc/x"), "/proc/x: cannot be written (No such file or directory);"
    ),
    Case(
        "out is too long a name", lambda b: b.run(out="x" * 300), "cannot be written (File name too long); name another"
    ),
    Case(
        "out holds texts",
        lambda b: ["train", *b.run(out=str(Path(b.write("texts/a.txt", TEXT)).parent), data="texts")[1:]],
        "texts holds other files, such as a.txt; name an empty folder",
    ),
    Case("out is read-only", lambda b: b.data("--out", "/proc/x"), "/proc/x: cannot be written"),
    Case("out holds other files", lambda b: b.data("--out", b.copy()), "kept holds other files, such as"),
]

ARTIFACTS = [
    Case(
        "artifact missing",
        lambda b: ["verify", "none"],
        "cannot read none: No such file or directory; name an artifact",
    ),
    Case(
        "artifact a folder",
        lambda b: ["sample", "."],
        "has no artifact.caddie; name the folder of a finished run",
    ),
    Case(
        "artifact of a run not packed", lambda b: ["sample", b.folder("result.json", None)], "make it with: caddie pack"
    ),
    Case(
        "compress to nowhere", lambda b: b.compress("a.txt", "--out", "none/a.cz"), "no folder none; make it, or name"
    ),
    Case(
        "pack onto a file",
        lambda b: ["pack", str(b.tiny.folder), "--out", b.write("mine.caddie", "")],
        "mine.caddie exists; name another file with --out",
    ),
    Case(
        "documents onto a file",
        lambda b: [*b.score(b.tiny.corpus), "--documents", b.write("mine.csv", "")],
        "mine.csv exists; name another file with --documents",
    ),
    Case("corpus onto a file", lambda b: b.data("--out", b.write("mine.txt", "")), "mine.txt is a file; name a folder"),
    Case(
        "report among files of another",
        lambda b: ["report", str(b.tiny.folder), "more", "--out", b.folder("result.json", None)],
        "kept holds other files, such as",
    ),
    Case("text to compress this folder", lambda b: b.compress("."), ".: cannot be read ("),
    Case("text to compress a device", lambda b: b.compress("/dev/zero"), "/dev/zero: cannot be read (not a regular"),
    Case("text to compress a pipe", lambda b: b.compress(b.pipe("pipe")), "pipe: cannot be read (not a regular file)"),
    Case("text to compress a loop", lambda b: b.compress(b.link("loop", "loop")), "Too many levels of symbolic links"),
    Case(
        "compressed to a link to nothing",
        lambda b: b.compress(b.write("a.txt", "a"), "--out", b.link("link", "nothing")),
        "link exists; name another file",
    ),
    Case("artifact a loop", lambda b: ["sample", b.link("loop", "loop")], "Too many levels of symbolic links"),
    Case("artifact empty", lambda b: b.artifact("verify", lambda data: b""), "this is not a caddie file"),
    Case("artifact cut", lambda b: b.artifact("score", half), "artifact: the file is cut short"),
    Case("artifact text", lambda b: ["sample", str(b.tiny.text)], "text.txt: this is not a caddie file"),
    Case("artifact changed", lambda b: b.artifact("verify", patched(2000, b"####")), "the file is damaged"),
    Case("artifact longer", lambda b: b.artifact("verify", lambda data: data + b"x"), "follow the end of the file"),
]

LOOPS = [
    Case("run folder a loop", lambda b: ["pack", b.link("loop", "loop")], "loop is not a run folder"),
    Case("result a loop", lambda b: ["report", b.link("loop", "loop")], "loop"),
    Case("data a loop", lambda b: ["data", b.link("loop", "loop"), "--quiet"], LOOP),
    Case("text a loop", lambda b: b.run(data=b.link("loop", "loop")), f"loop: {LOOP}"),
    Case("out a loop", lambda b: b.run(out=b.link("loop", "loop")), "loop is a link to no folder; name another"),
    Case("out a link to nothing", lambda b: b.run(out=b.link("link", "none")), "link is a link to no folder; name"),
    Case("study a loop", lambda b: ["study", b.link("loop.py", "loop.py")], "loop.py"),
    Case("recipe file a loop", lambda b: ["run", b.link("loop.py", "loop.py") + ":mine"], "loop.py"),
    Case("corpus a loop", lambda b: ["data", str(b.tiny.text), "--against", b.link("loop", "loop")], "loop"),
    Case("tokenizer a loop", lambda b: b.data("--tokenizer", b.link("loop", "loop")), "Too many levels of symbolic"),
]

CHECKS = [
    Case(
        "over the cap",
        lambda b: ["verify", str(b.tiny.artifact), "pack.cap_bytes=1000", "--quiet"],
        "file is under the cap",
        status=1,
        out="of 1,000 bytes",
    ),
    Case(
        "packed over the cap",
        lambda b: b.recipe(lambda held: held["recipe"]["pack"].update(cap_bytes=1000, coding={"kind": "Packed"})),
        "over the cap",
        status=1,
        out="weights",
    ),
    Case(
        "diverged",
        lambda b: b.run("train.steps=9", "train.optimizers.matrix.lr=1e30", "train.optimizers.embedding.lr=1e30"),
        "the weights of step 0 are in out/checkpoint.safetensors; lower train.optimizers.*.lr",
        status=1,
    ),
]

CASES = [*WORDS, *RECIPES, *TEXTS, *TOKENIZERS, *CORPORA, *SCORING, *RUNS, *ARTIFACTS, *LOOPS, *CHECKS]


def marked(cases: list[Any]) -> list[Any]:
    """The cases as parameters, by their labels."""
    return [pytest.param(case, id=case.label) for case in cases]


@pytest.fixture
def bench(tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alive_once: None) -> Bench:
    monkeypatch.chdir(tmp_path)
    return Bench(tiny_run)


def check(ended: Any, says: str, status: int = 2, out: str = "") -> None:
    """One clear line, the right status, and nothing but a failed check's findings on standard output."""
    lines = ended.err.splitlines()
    assert len(lines) == 1, ended.err
    assert lines[0].startswith("caddie: ")
    assert says in lines[0]
    assert len(lines[0]) < 700
    assert "Traceback" not in ended.err
    assert ended.status == status
    assert out in ended.out if out else not ended.out


def check_folder(folder: Path, made: bool = False) -> None:
    """Nothing half-written, and neither artifact nor result of a run that failed."""
    left = [path for path in folder.rglob("*") if any(fnmatch.fnmatch(path.name, form) for form in HALF_WRITTEN)]
    assert not left
    assert not (folder / "out" / "result.json").exists()
    assert made or not any(path.name == "artifact.caddie" for path in folder.rglob("*"))


@pytest.mark.parametrize("case", marked(CASES))
def test_one_line_says_what_is_wrong(case: Case, bench: Bench, unprobed: None, caddie: Call, tmp_path: Path) -> None:
    arguments = case.make(bench)
    check(caddie(*arguments), case.says, case.status, case.out)
    ended = caddie(*arguments, "--json")
    check(ended, case.says, case.status, "{" if case.out else "")
    assert not case.out or isinstance(json.loads(ended.out), dict)
    check_folder(tmp_path, made=bool(case.out))
    assert (tmp_path / "out" / "checkpoint.safetensors").exists() == (case.label == "diverged")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(WORDS[0], id=WORDS[0].label),
        pytest.param(ARTIFACTS[0], id=ARTIFACTS[0].label, marks=pytest.mark.slow),
    ],
)
def test_a_process_of_its_own_does_the_same(case: Case, bench: Bench) -> None:
    """The quick one ends before PyTorch is imported."""
    command = [sys.executable, "-m", "caddie", *case.make(bench)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    check(Ended(done.returncode, done.stdout, done.stderr), case.says, case.status)


@pytest.mark.long
def test_a_run_over_the_cap_ends_in_status_1_and_the_ledger(
    bench: Bench,
    caddie: Call,
    tmp_path: Path,
    one_process: None,
    unprobed: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "caddie.run.result.sample", lambda artifact: b""
    )  # what it writes has nothing to do with the cap
    check(
        caddie(*bench.run("pack.cap_bytes=1000", "pack.coding=Packed(codec=Zlib)")),
        "file is under the cap",
        status=1,
        out="weights",
    )
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["artifact_bytes"] == (tmp_path / "out" / "artifact.caddie").stat().st_size > 1000
    assert (result["under_cap"], result["verified"]) == (False, False)


@contextlib.contextmanager
def small_disk(size: int) -> Iterator[None]:
    """Lets no file grow over some bytes: the system call that fails is the one that fails on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:  # before the test's outcome is written, perhaps to a file
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


FULL = [
    (0, Case("at the recipe", lambda b: ["train", *b.run()[1:]], "large")),
    (9000, Case("at the checkpoint", lambda b: ["train", *b.run()[1:]], "out/checkpoint")),
    (9000, Case("at the corpus", lambda b: b.data("--out", "corpus"), "corpus/train_000000.bin: File too large")),
    (
        3000,
        Case(
            "at the artifact",
            lambda b: b.recipe(put({"kind": "Packed"}, "recipe", "pack", "coding")),
            "write kept/artifact.caddie",
        ),
    ),
    (9000, Case("at the report", lambda b: ["report", b.folder("report.html", None)], "File too large")),
]
"""Sizes of disks, and what is written there."""


@pytest.mark.parametrize(("size", "case"), FULL, ids=[case.label for _, case in FULL])
def test_a_full_disk_leaves_no_trace(size: int, case: Case, bench: Bench, caddie: Call, tmp_path: Path) -> None:
    arguments = case.make(bench)
    with small_disk(size):
        ended = caddie(*arguments)
    check(ended, case.says)
    check_folder(tmp_path)
    assert not (tmp_path / "kept" / "report.html").exists() or case.label == "at the artifact"
    assert not (tmp_path / "corpus").exists()


@pytest.mark.parametrize(
    ("at", "error", "says"),
    [
        ("os.fsync", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device"),
        ("os.replace", OSError(errno.EROFS, os.strerror(errno.EROFS)), "Read-only file system"),
        ("pathlib.Path.write_bytes", PermissionError(errno.EACCES, os.strerror(errno.EACCES)), "Permission denied"),
    ],
)
def test_an_artifact_that_cannot_be_written_leaves_no_trace(
    at: str, error: OSError, says: str, bench: Bench, caddie: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = bench.recipe(put({"kind": "Packed"}, "recipe", "pack", "coding"))

    def refuse(*arguments: object) -> NoReturn:
        raise error

    monkeypatch.setattr(at, refuse, raising=False)
    check(caddie(*arguments), f"cannot write kept/artifact.caddie: {says}")
    check_folder(tmp_path)


# Hostile artifacts: made from a good one, checksums and all.

Sections = dict[str, bytes]


def config(*edits: Callable[[Any], object]) -> Callable[[Sections], None]:
    """The edit of the artifact's config."""

    def edit(sections: Sections) -> None:
        for change in edits:
            sections["config"] = edited(sections["config"], change)

    return edit


def manifest(value: object, *path: str) -> Callable[[Sections], None]:
    """The edit of the artifact's manifest."""
    return lambda sections: sections.update(manifest=edited(sections["manifest"], put(value, *path)))


def section(name: str, edit: Callable[[bytes], bytes]) -> Callable[[Sections], None]:
    """The edit of one section; a new one starts empty."""
    return lambda sections: sections.update({name: edit(sections.get(name, b""))})


def kind(name: str) -> Callable[[Sections], None]:
    """A quantizer of another class."""
    return config(put({"kind": name, "lr": 0.1}, "quantizers", "matrix"))


def exceptions(count: int, depth: float) -> Callable[[Sections], None]:
    """A config with that many exceptions for its layers."""
    spans = (f"{first}-{last}" for first in range(100) for last in range(100, 1000))
    layers = {span: {"mlp.hidden": 8} for span in islice(spans, count)}
    return config(put(layers, "model", "layers"), put(depth, "model", "depth"))


QUERY, MIX = "weights/blocks.0.attention.query.weight", "weights/blocks.0.mix"


def coded(array: np.ndarray, coding: ArrayCodec = Packed(codec=Zlib())) -> bytes:
    """An array as it stands in a section."""
    data = coding.encode(array)
    return len(data).to_bytes(4, "little") + data


def wide(coding: ArrayCodec, edit: Callable[[bytes], bytes], size: int = 16) -> Callable[[Sections], None]:
    """Steps of 1 and noise of that many rows and columns for the query, the stream of the noise edited."""
    noise = np.random.default_rng(0).integers(-99, 99, (size, size)).astype("<i2")
    data = edit(coding.encode(noise))
    steps = coded(np.zeros(16, np.int8))
    return section(QUERY, lambda _: steps + steps + len(data).to_bytes(4, "little") + data)


def rows(step: float) -> Callable[[Sections], None]:
    """Rows of ones with that step for the query."""

    def edit(sections: Sections) -> None:
        config(put({"kind": "Rows"}, "quantizers", QUERY.removeprefix("weights/")))(sections)
        sections[QUERY] = coded(np.ones((16, 16), np.int8)) + coded(np.full(16, step, "<f2"))

    return edit


def huge(sections: Sections) -> None:
    """An MLP of a quarter of a million channels, from streams that do not say how much they hold."""
    config(put(1 << 18, "model", "block", "mlp", "hidden"))(sections)
    sections["weights/blocks.0.mlp.up.weight"] = 3 * coded(np.ones(16, np.int8), EntropyModel())


DEEP = {"depth": b"[" * 900 + b"]" * 900, "block": b'{"mlp":' * 400 + b"1" + b"}" * 400}


def deep(field: str) -> Callable[[Sections], None]:
    return config(put(json.loads(DEEP[field]), "model", field))


@dataclass(frozen=True)
class Hostile:
    """One hostile artifact, and what is said of it."""

    label: str
    edit: Callable[[Sections], object]
    says: str
    verb: str = "verify"


HOSTILE = [
    Hostile("depth over all", config(put(10**9, "model", "depth")), "depth must be from 1 to 1,024"),
    Hostile("depth of 400 digits", config(put(10**400, "model", "depth")), "depth must be"),
    Hostile(
        "largest of all models",
        config(
            put(1024, "model", "depth"), put(65536, "model", "width"), put(1 << 20, "model", "block", "mlp", "hidden")
        ),
        "model has 1,024 layers, too many for its 24 weights",
    ),
    Hostile(
        "largest of all layers",
        config(put(65536, "model", "width"), put(1 << 20, "model", "block", "mlp", "hidden")),
        "parameters, too many for its",
    ),
    Hostile("vocabulary", config(put(65536, "model", "vocabulary")), "tokenizer has 257 ids and its model 65,536"),
    Hostile("nesting of 100,000", section("config", lambda data: b"[" * 100_000), "config is not JSON"),
    Hostile("list in a number", deep("depth"), "artifact's config is"),
    Hostile("config in a config", deep("block"), "artifact's config is"),
    Hostile("class of Python", kind("os.system"), "quantizers.matrix must be one of Binary, Float16, Float32"),
    Hostile("class of another socket", kind("Muon"), "quantizers.matrix must be one of Binary, Float16, Float32"),
    Hostile("setting unknown", config(put("x", "model", "__class__")), "GPT has no setting __class__"),
    Hostile("10,000 exceptions", exceptions(10_000, 1024), "10,000 exceptions for 1024 layers"),
    Hostile("exceptions to a fraction", exceptions(100, 1024.0), "exceptions for 1024.0 layers"),
    Hostile(
        "10,000 rules",
        config(put({"*" * (number % 99) + str(number): "Float16" for number in range(10_000)}, "quantizers")),
        "10,000 rules for quantizers",
    ),
    Hostile("section missing", lambda sections: sections.pop(QUERY), "query.weight is missing"),
    Hostile("manifest missing", lambda sections: sections.pop("manifest"), "it has no manifest"),
    Hostile("weight spare", section("weights/spare", lambda data: b"x" * 9), "spare is unknown"),
    Hostile("section spare", section("code.py", lambda data: b"import os"), "a section code.py, which nothing reads"),
    Hostile("weight short", section(QUERY, lambda data: data[:-1]), "query.weight ends within its step"),
    Hostile("weight empty", section(QUERY, lambda data: b""), "no coded array that this version knows"),
    Hostile("weight longer", section(QUERY, lambda data: data + b"x"), "query.weight has 1 bytes too many"),
    Hostile("length beyond all", section(QUERY, patched(0, b"\xff" * 4)), "query.weight ends within its row_steps"),
    Hostile("kind of coding", section(QUERY, patched(4, b"\xfe")), "no coded array that this version knows"),
    Hostile("array of floats", section(QUERY, lambda data: coded(np.ones(16, "<f4")) + data), "not one whole"),
    Hostile("damaged integers", wide(EntropyModel(), lambda data: data[:-9] + b"\xaa" * 9), "not one whole array"),
    Hostile(
        "damaged bytes",
        wide(Packed(codec=Zlib()), lambda data: data[:-9] + b"\xaa" * 9),
        "integers of the artifact's blocks.0.attention.query.weight",
    ),
    Hostile("integers cut", wide(EntropyModel(), lambda data: data[:40]), "not one whole array of 16 x 16 int16"),
    Hostile("array of another shape", wide(EntropyModel(), lambda data: data, 17), "not one whole array of 16 x 16"),
    Hostile("steps not a number", rows(np.nan), "query.weight has values that are not finite"),
    Hostile("steps infinite", rows(np.inf), "query.weight has values that are not finite"),
    Hostile("halves not a number", section(MIX, lambda data: coded(np.full((2, 16), np.nan, "<f2"))), "not finite"),
    Hostile("10 million from 100 bytes", huge, "not one whole array of 262144 int8"),
    Hostile(
        "a billion zeros from a few bytes",
        config(put(1 << 20, "model", "block", "mlp", "hidden"), put(24, "model", "depth")),
        "parameters, too many for its",
    ),
    Hostile(
        "quantizer of quantizers",
        config(put({"kind": "LowRank", "of": {"kind": "LowRank"}}, "quantizers", "matrix")),
        "LowRank cannot be of LowRank",
    ),
    Hostile(
        "rank beyond all",
        config(put({"kind": "LowRank", "rank": 10**9}, "quantizers", "matrix")),
        "rank must be from 1 to 256",
    ),
    Hostile("tokenizer of another", manifest("0" * 64, "tokenizer_sha256"), "not the one its manifest names"),
    Hostile("tokenizer unknown", manifest("pickle", "tokenizer"), "no tokenizer of kind 'pickle'"),
    Hostile("tokenizer spare", section("tokenizer", lambda data: b"x"), "no tokenizer of kind 'bytes' with 1 bytes"),
    Hostile("seed a text", manifest("\x1b[2J" * 9999, "seed"), "seed must be a whole number"),
    Hostile("windows", config(put(1 << 20, "score", "sequence_length")), "too long for a vocabulary", verb="score"),
    Hostile("stride", config(put(1 << 20, "score", "stride")), "score.stride must be from 1"),
    Hostile("bomb", section("weights/bomb", lambda data: bytes((64 << 20) + 1)), "over the limit of"),
]


def hostile(sections: Sections, edit: Callable[[Sections], object]) -> bytes:
    """The artifact of edited sections."""
    sections = dict(sections)
    edit(sections)
    return container.pack([container.Section(name, data, Zlib(level=1)) for name, data in sections.items()])


Reading = tuple[object, str, str, float, int]
"""Status, what was printed to both streams, seconds, and the most memory of the process in bytes."""


def read_all(folder: Path, asked: dict[str, list[str]], told: Connection) -> None:
    """What one process with little memory, all of them read one after the other, says of each."""
    import caddie.pack.artifact
    import caddie.run.resolve_corpus  # noqa: F401  # so that no case waits for PyTorch

    os.chdir(folder)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES,) * 2)
    for label, arguments in asked.items():
        told.send((label, read(arguments)))


def read(arguments: list[str]) -> Reading:
    """The reading of one, by the command line as a user calls it."""
    from caddie import cli

    sys.argv, status = ["caddie", *arguments], None
    signal.alarm(20)
    out, err, begin = io.StringIO(), io.StringIO(), time.perf_counter()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as exit:
            status = exit.code
        except Exception as error:
            status = repr(error)
    seconds, memory = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return status, out.getvalue(), err.getvalue(), seconds, memory


@pytest.fixture(scope="module")
def readings(tiny_run: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reading]:
    """What a process of its own says of each."""
    folder = tmp_path_factory.mktemp("hostile")
    good = container.read(tiny_run.artifact).sections
    asked = {}
    for case in HOSTILE:
        path = folder / case.label.replace(" ", "_")
        path.write_bytes(hostile(good, case.edit))
        asked[case.label] = [case.verb, path.name, *(["--data", str(tiny_run.corpus)] if case.verb == "score" else [])]
        asked[case.label] += ["--quiet"] if case.verb == "score" else []
    told, tells = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=read_all, args=(folder, asked, tells))
    process.start()
    tells.close()
    found: dict[str, Reading] = {}
    with contextlib.suppress(EOFError):  # also where it ended early: whoever looks for the others will say so
        while told.poll(60):
            label, reading = told.recv()
            found[label] = reading
    process.kill()
    process.join()
    return found


@pytest.mark.parametrize("case", marked(HOSTILE))
def test_a_hostile_artifact_is_refused_quickly_and_in_little_memory(
    case: Hostile, readings: dict[str, Reading]
) -> None:
    assert case.label in readings, "the process ended before"
    status, out, err, seconds, memory = readings[case.label]
    check(Ended(status, out, err), case.says)
    assert "\x1b" not in err
    assert seconds < SECONDS
    assert memory < MEMORY_BYTES


def test_the_good_artifact_repacked_is_not_refused(tiny_run: Any, unprobed: None, caddie: Call, tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.write_bytes(hostile(container.read(tiny_run.artifact).sections, lambda sections: None))
    assert caddie("verify", good).status == 0


def test_batches_are_cut_to_what_memory_holds(tiny_run: Any, tmp_path: Path) -> None:
    from caddie.pack import artifact

    greedy = tmp_path / "greedy"
    sections = container.read(tiny_run.artifact).sections
    greedy.write_bytes(hostile(sections, config(put(1 << 40, "score", "batch_tokens"))))
    loaded = artifact.load(greedy)
    assert loaded.scoring.batch_tokens * loaded.model.config.vocabulary <= 1 << 28
