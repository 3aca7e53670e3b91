"""Formats that are fuzzed: damage to a good file of each, with checksums put right, and its reader."""

import hashlib
import json
import random
import shutil
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from mutations import EXTREMES, mutated_arrays, mutated_bytes, mutated_json

from caddie.board.folders import Folders
from caddie.config import variants
from caddie.data.corpus import DOCUMENTS, VALIDATION_TEXT, Corpus
from caddie.data.manifest import MANIFEST, TOKENIZER
from caddie.data.shards import open_shard, split_documents
from caddie.data.tokenizers import deserialize
from caddie.errors import UserError
from caddie.inference import text_codec
from caddie.pack import artifact as artifacts
from caddie.pack import container
from caddie.pack.codecs import Codec, Stored
from caddie.pack.container import Section
from caddie.recipes.recipe import Recipe
from caddie.report.page import write_report
from caddie.report.read import read_scored_result, result_errors
from caddie.report.tables import result_table
from caddie.run.run import check_recipe
from caddie.run.run_folder import read_run
from caddie.run.stages import held_out_text, training_data
from caddie.runtime.distributed import Ranks
from caddie.runtime.progress import SILENT
from caddie.train.checkpoint import checkpoint_identity, load_weights, weights_identity
from caddie.train.hooks import Log
from caddie.train.loop import TimedRun
from caddie.train.trainer import Trainer

GOLDEN = Path(__file__).parent.parent / "golden" / "formats"
Case = Callable[[], object]
"""Reads a damaged file; a `UserError` or `CheckFailed` is a right answer."""


@dataclass(frozen=True)
class Good:
    """Good files to damage: a finished run, and a folder to work in."""

    run: Path
    work: Path

    def written(self, name: str, data: bytes) -> Path:
        """A file in the working folder."""
        path = self.work / name
        path.write_bytes(data)
        return path


def artifact(good: Good) -> Callable[[random.Random], Case]:
    """Artifacts of every codec, coding, quantizer, tokenizer and scoring: config, streams, table and raw bytes."""
    files = [path.read_bytes() for path in [good.run / "artifact.caddie", *sorted(GOLDEN.glob("*.artifact"))]]
    files = [data for data in files if len(data) < 200_000]
    held = [container.unpack(data) for data in files]
    plain = Stored()

    def make(chance: random.Random) -> Case:
        number = chance.randrange(len(files))
        kind = chance.random()
        if kind < 0.1:
            data = resealed(chance, files[number])
        else:
            sections = dict(held[number].sections)
            damage_sections(chance, sections, kind)
            data = packed([Section(name, content, plain) for name, content in sections.items()], chance)
        path = good.written("artifact", data)

        def read() -> None:
            found = artifacts.load(path)
            for name, parameter in found.model.named_parameters():
                assert parameter.isfinite().all(), f"{name} is not finite"
            with torch.inference_mode():
                ids = torch.arange(min(8, found.model.config.vocabulary))[None]
                found.model(ids, ids == found.tokenizer.bos)

        return read

    return make


def damage_sections(chance: random.Random, sections: dict[str, bytes], kind: float) -> None:
    """Change sections of an artifact; a changed tokenizer has its hash put right."""
    weights = [name for name in sections if name.startswith("weights/")]
    if kind < 0.45:
        sections["config"] = mutated_json(chance, sections["config"])
    if kind < 0.15 or 0.45 < kind < 0.5:
        sections["manifest"] = mutated_json(chance, sections["manifest"])
    if 0.5 < kind < 0.55:
        sections["tokenizer"] = mutated_bytes(chance, sections["tokenizer"])
        manifest = json.loads(sections["manifest"])
        try:
            manifest["tokenizer_sha256"] = deserialize(manifest["tokenizer"], sections["tokenizer"]).sha256
        except UserError:
            return
        sections["manifest"] = json.dumps(manifest).encode()
    if kind > 0.4:
        for name in chance.choices(weights, k=chance.choice((1, 1, 2, 5))):
            mutated = mutated_arrays if chance.random() < 0.8 else mutated_bytes
            sections[name] = mutated(chance, sections[name])
    if kind > 0.95:
        name = chance.choice(list(sections))
        if chance.random() < 0.5:
            sections[chance.choice(["weights/x", "source", "x", name + "x"])] = sections.pop(name)
        else:
            sections[name] = sections[chance.choice(list(sections))]


def packed(sections: list[Section], chance: random.Random) -> bytes:
    """A file with these sections, now and then under the name of another codec."""
    if chance.random() < 0.1:
        at = chance.randrange(len(sections))
        codec = chance.choice([cls for name, cls in variants(Codec).items() if name != "Brotli"])
        sections[at] = replace(sections[at], codec=codec())
    return container.pack(sections)


def resealed(chance: random.Random, data: bytes) -> bytes:
    """The bytes of an artifact damaged anywhere, its table too, with the checksums put right."""
    if chance.random() < 0.5:
        header, end = container._HEADER, container._HEADER.size
        magic, version, packed_bytes, table_bytes, _ = header.unpack_from(data)
        table = container._TABLE_CODEC.decode(data[end : end + packed_bytes], table_bytes)
        table = mutated_bytes(chance, table)
        stored = container._TABLE_CODEC.encode(table)
        body = header.pack(magic, version, len(stored), len(table), zlib.crc32(table)) + stored
        body += data[end + packed_bytes : -32]
    else:
        body = mutated_bytes(chance, data[:-32])
    return body + hashlib.sha256(body).digest()


def text(good: Good) -> Callable[[random.Random], Case]:
    """Compressed texts of every scoring: the numbers of the head, the settings and the coded stream."""
    found, words = [], b"the cat sat on the mat; the dog sat on the log. "
    for path in [good.run / "artifact.caddie", *sorted(GOLDEN.glob("[st]*.artifact"))]:
        own = artifacts.load(path)
        found += [(own, text_codec.compress(own, documents)) for documents in ([words], [words[:20], words[:9], b"x"])]
    settings = [b'{"stride":8}', b'{"ttt":{"kind":"ChunkSGD"}}', b'{"ttt":{"kind":"DocumentLoRA"}}']

    def make(chance: random.Random) -> Case:
        artifact, data = chance.choice(found)
        start = text_codec._BODY
        if chance.random() < 0.5:
            data = data[:start] + mutated_bytes(chance, data[start:])
        else:
            lengths = [chance.choice((1, 2, 3, 40, 300, 2**16, 2**32)) for _ in range(chance.choice((1, 2, 9, 300)))]
            diff = mutated_json(chance, chance.choice(settings)) if chance.random() < 0.6 else b""
            head = text_codec._leb128(chance.randrange(4), len(lengths), *lengths, len(diff)) + diff
            data = data[:start] + head + chance.randbytes(chance.choice((0, 3, 9, 24)))
        return lambda: text_codec.decompress(artifact, data)

    return make


def corpus(good: Good) -> Callable[[random.Random], Case]:
    """Corpora: manifest, hashes of the documents, tokenizer, text and shards."""
    source = Path(json.loads((good.run / "recipe.json").read_text())["corpus"])
    names = [MANIFEST, MANIFEST, DOCUMENTS, TOKENIZER, VALIDATION_TEXT, "val_000000.bin"]
    files = {name: (source / name).read_bytes() for name in names}
    folder = good.work / "corpus"
    shutil.copytree(source, folder, dirs_exist_ok=True)

    def make(chance: random.Random) -> Case:
        name = chance.choice(names)
        mutated = mutated_json if name == MANIFEST else mutated_bytes
        damaged = mutated(chance, files[name])
        (folder / name).write_bytes(damaged)

        def read() -> None:
            try:
                Corpus._counted.clear()
                found = Corpus.load(folder)
                held_out_text(found)
                found.check_disjoint()
                training_data(found)
                found.check_shards("validation")
            finally:
                (folder / name).write_bytes(files[name])

        return read

    return make


def shard(good: Good) -> Callable[[random.Random], Case]:
    """Token shards."""
    source = Path(json.loads((good.run / "recipe.json").read_text())["corpus"])
    data = (source / "val_000000.bin").read_bytes()[: 1024 + 2000]

    def make(chance: random.Random) -> Case:
        body = data[1024:]
        head = bytearray(data[:12] + bytes(1012))
        if chance.random() < 0.7:
            body = mutated_bytes(chance, body)
            struct.pack_into("<i", head, 8, len(body) // 2)  # the count put right
        else:
            head = bytearray(mutated_bytes(chance, bytes(head)))
        path = good.written("shard.bin", bytes(head) + body)
        return lambda: list(split_documents([open_shard(path)], chance.choice((0, 256, 65_535))))

    return make


def checkpoint(good: Good) -> Callable[[random.Random], Case]:
    """Checkpoints and weights: the header with its length put right, metadata, and the numbers."""
    recipe, seed, found = read_run(good.run)
    trainer = Trainer(recipe.model, recipe.train, seed, Ranks())
    identity = checkpoint_identity(recipe.model, recipe.train, training_data(found), seed)
    documents = found.manifest.train.document_set_sha256 if found.manifest.train else ""
    own = weights_identity(recipe.model, recipe.train, documents)
    files = [(good.run / f"{name}.safetensors").read_bytes() for name in ("checkpoint", "weights")]
    log = Log(good.work, None, False, SILENT)  # a checkpoint of another budget is noted

    def make(chance: random.Random) -> Case:
        number = chance.randrange(2)
        data = files[number]
        size = int.from_bytes(data[:8], "little")
        header, body = data[8 : 8 + size], data[8 + size :]
        kind = chance.random()
        if kind < 0.4:
            header = mutated_json(chance, header.rstrip())
        elif kind < 0.6:
            told = json.loads(header)
            held = told["__metadata__"]
            for name in chance.choices(list(held), k=chance.choice((1, 2))):
                if name not in identity or chance.random() < 0.1:
                    held[name] = str(chance.choice(EXTREMES))
            header = json.dumps(told).encode()
        elif kind < 0.8:
            body = mutated_bytes(chance, body)
        data = len(header).to_bytes(8, "little") + header + body
        path = good.written("tensors.safetensors", mutated_bytes(chance, data) if kind > 0.8 else data)

        def read() -> None:
            if number:
                load_weights(path, own)
            else:
                TimedRun(trainer, path, identity, log, None).restore()

        return read

    return make


def recipe(good: Good) -> Callable[[random.Random], Case]:
    """Recipes of a run folder."""
    data = (good.run / "recipe.json").read_bytes()
    folder = good.work / "recipe"
    folder.mkdir(exist_ok=True)

    def make(chance: random.Random) -> Case:
        (folder / "recipe.json").write_bytes(mutated_json(chance, data))

        def read() -> None:
            found: Recipe = read_run(folder)[0]
            check_recipe(found)

        return read

    return make


def result(good: Good) -> Callable[[random.Random], Case]:
    """Results and logs: the report of a run and its table."""
    folder = good.work / "result"
    folder.mkdir(exist_ok=True)
    files = {name: (good.run / name).read_bytes() for name in ("result.json", "log.jsonl")}

    def make(chance: random.Random) -> Case:
        name = chance.choice(("result.json", "result.json", "log.jsonl"))
        for other, data in files.items():
            (folder / other).write_bytes(damaged_file(chance, other, data) if other == name else data)

        def read() -> None:
            write_report(folder)
            with result_errors(folder / "result.json", "a table"):
                result_table(read_scored_result(folder / "result.json"), folder / "report.html")

        return read

    return make


def board(good: Good) -> Callable[[random.Random], Case]:
    """Run folders that the board shows."""
    root = good.work / "board"
    folder = root / "run"
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: (good.run / name).read_bytes() for name in ("recipe.json", "result.json", "log.jsonl")}
    files["error.json"] = b'{"state": "failed", "error": "why", "phase": "train", "when": "now", "seconds": 1.5}'
    files["task.json"] = b'{"study": "s", "label": "l", "seed": 1, "key": "k"}'
    files[".lock"] = b'{"host": "h", "pid": 1, "name": "x-1", "since": "2026-01-01 00:00:00"}'

    def make(chance: random.Random) -> Case:
        for name, data in files.items():
            path = folder / name
            path.unlink(missing_ok=True)
            if chance.random() < 0.6:
                path.write_bytes(damaged_file(chance, name, data) if chance.random() < 0.6 else data)

        def read() -> None:
            folders = Folders(root)
            json.dumps(folders.rows(), allow_nan=False).encode()
            json.dumps(folders.details("run"), allow_nan=False).encode()

        return read

    return make


def damaged_file(chance: random.Random, name: str, data: bytes) -> bytes:
    """A JSON file or log, damaged."""
    if not name.endswith(".jsonl"):
        return mutated_json(chance, data)
    lines = data.splitlines()
    for at in {chance.randrange(len(lines)) for _ in range(chance.choice((1, 2, 5)))}:
        lines[at] = mutated_json(chance, lines[at])
    return b"\n".join(chance.sample(lines, len(lines)) if chance.random() < 0.1 else lines) + b"\n"


FORMATS = {make.__name__: make for make in (artifact, text, corpus, shard, checkpoint, recipe, result, board)}
