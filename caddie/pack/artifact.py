"""The artifact: one file that holds everything needed to score it."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from caddie.config import Config, coerce
from caddie.config.userfile import UserFile, read_stated, supply, user_files
from caddie.data.tokenizers import Tokenizer, deserialize
from caddie.errors import UserError, check_kind, first_line
from caddie.model import GPT, Model
from caddie.model.parameters import draw_constants
from caddie.pack import container
from caddie.pack.codecs import Brotli
from caddie.pack.container import Section
from caddie.pack.decompress import PREFIX, decompress
from caddie.pack.quantize import Quantizer
from caddie.runtime.memory import keep_freed_memory, out_of_memory
from caddie.score import Scoring, check_windows

PARTS = "parts"
"""Key in the config: name and hash of each user file whose classes the config names; absent if there are none."""
CONFIG, TOKENIZER, MANIFEST = "config", "tokenizer", "manifest"
SOURCE = "source"
"""Optional section with the source code that scores the artifact; `load` never parses it."""
# Limits for untrusted files. A trained model compresses 16-fold at the very most; a decompression bomb, a thousandfold.
_RATIO, _SMALLEST_BOMB = 16, 64 << 20
_RULES, _EXCEPTIONS = 256, 1 << 16
_LOGITS = 1 << 28
_CONSTANTS = 1 << 26
_CONSTANT = 1 << 23
_SOURCE_BYTES = 1 << 20


class Manifest(Config):
    """Origin of an artifact. Hashes are SHA-256 in hexadecimal."""

    caddie: str
    """Version of caddie that packed it."""
    recipe: str
    """Name of the recipe."""
    recipe_sha256: str
    """Hash of the recipe's settings."""
    seed: int
    """Seed of the initial weights and of the data order."""
    parameters: int
    """Number of parameters."""
    tokenizer: str
    """Kind of tokenizer."""
    tokenizer_sha256: str
    """Hash of the tokenizer."""
    train_documents_sha256: str
    """Hash of the set of training documents, after `tokens:` if they are identified by their token ids."""
    validation_fraction: float | None
    """Fraction of documents held out by hash, which fixes the split; none if the split came with the data."""


AS_ARTIFACT = 'read one, as caddie.load("a.caddie")'
"""Advice to a caller that gave something else."""


@dataclass(frozen=True)
class Artifact:
    """Artifact loaded in `load_seconds`: `ledger` has the file's bytes by part, `tensor_bytes` the bytes by weight."""

    path: Path
    sha256: str
    model: Model
    tokenizer: Tokenizer
    scoring: Scoring
    manifest: Manifest
    ledger: dict[str, int]
    tensor_bytes: dict[str, int]
    load_seconds: float
    parts: tuple[UserFile, ...] = ()
    """Users' files with classes of model, quantizers or scoring; every process that loads the artifact needs them."""

    @property
    def file_bytes(self) -> int:
        """Bytes of the file on disk."""
        return sum(self.ledger.values())


@dataclass(frozen=True)
class Metadata:
    """Everything in an artifact except its weights: only data, no pickle, nothing that `load` runs."""

    gpt: GPT
    tokenizer: Tokenizer
    scoring: Scoring
    manifest: Manifest
    source: Section | None = None
    """Section `SOURCE`, if the artifact carries the code that scores it."""

    def sections(self, dequantizers: Mapping[str, Quantizer]) -> list[Section]:
        """Return the sections before the weights; `dequantizers` maps a role or name pattern to a dequantizer."""
        rules = {rule: quantizer.to_json() for rule, quantizer in dequantizers.items()}
        config: dict[str, Any] = {"model": self.gpt.to_json(), "quantizers": rules, "score": self.scoring.to_json()}
        if files := user_files(self.gpt, self.scoring, *dequantizers.values()):
            config[PARTS] = [asdict(file.stated) for file in files]
        parts = {CONFIG: _dump(config), MANIFEST: _dump(self.manifest.to_json()), TOKENIZER: self.tokenizer.serialize()}
        sections = [Section(name, data, Brotli()) for name, data in parts.items()]
        return [*sections, self.source] if self.source else sections

    def file_bytes(self, dequantizers: Mapping[str, Quantizer], weights: Sequence[Section]) -> int:
        """Return the size in bytes of the file with these weight sections."""
        return len(container.pack([*self.sections(dequantizers), *weights]))


def load(
    path: str | Path, device: torch.device | str = "cpu", parts: str | Path | Iterable[str | Path] = ()
) -> Artifact:
    """Load an artifact from a file.

    `parts` are the user files that it needs; no other file is run. Raises `UserError` for anything wrong with the file
    or with its parts.
    """
    check_kind(path, (str, Path), "the path", "name the file of an artifact")
    begin, path = time.perf_counter(), Path(path)
    device = _device(device)
    if device.type == "cpu":
        keep_freed_memory()
    contents = _read(path)
    sections = contents.sections
    config = _parse(sections[CONFIG], CONFIG)
    held = sum(name.startswith(PREFIX) for name in sections)
    _check_rules(config, held)
    with _valid(CONFIG):
        stated = read_stated(config.get(PARTS, []))
    given = [Path(one) for one in ([parts] if isinstance(parts, (str, Path)) else parts)]
    files = tuple(supply(stated, given, path, path.parent / PARTS))
    manifest, tokenizer = _tokenizer(sections)
    gpt = _describe(GPT, config.get("model"), CONFIG)
    scoring = _describe(Scoring, config.get("score"), CONFIG)
    with _valid(CONFIG):
        check_windows(scoring.sequence_length, scoring.stride)
        quantizers = coerce(config.get("quantizers"), dict[str, Quantizer], "quantizers")
    if {file.stated for file in user_files(gpt, scoring, *quantizers.values())} != {*stated}:
        raise UserError(
            f"{path} needs classes that this process has defined otherwise under the same names; load it in a new one"
        )
    if tokenizer.vocabulary != gpt.vocabulary:
        raise UserError(f"the artifact's tokenizer has {tokenizer.vocabulary:,} ids and its model {gpt.vocabulary:,}")
    # The score does not depend on how many windows run at once; the memory does.
    scoring = scoring.but(batch_tokens=min(scoring.batch_tokens, _LOGITS // gpt.vocabulary))
    # Each layer has weights of its own, and a thousand layers take a second to build.
    if gpt.depth > held:
        raise UserError(f"the artifact's model has {gpt.depth:,} layers, too many for its {held:,} weights")
    model = gpt.outline()
    check_readable(model, scoring)
    parameters, size = sum(parameter.numel() for parameter in model.parameters()), contents.file_bytes
    if parameters > most_parameters(size):
        raise UserError(f"the artifact's model has {parameters:,} parameters, too many for its {size:,} bytes")
    weights = decompress(model, quantizers, sections)
    model.load_state_dict(weights, assign=True)
    draw_constants(model)
    model.requires_grad_(False)
    stored = {entry.name: entry.stored_bytes for entry in contents.entries}
    tensor_bytes = {name.removeprefix(PREFIX): size for name, size in stored.items() if name.startswith(PREFIX)}
    ledger = {
        "weights": sum(tensor_bytes.values()),
        **{name: stored[name] for name in (TOKENIZER, CONFIG, MANIFEST, SOURCE) if name in stored},
        "container": contents.file_bytes - sum(stored.values()),
    }
    model = model.to(device)
    seconds = time.perf_counter() - begin
    return Artifact(path, contents.sha256, model, tokenizer, scoring, manifest, ledger, tensor_bytes, seconds, files)


def _device(device: torch.device | str) -> torch.device:
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise UserError(f"the device cannot be {device!r:.80}; write cpu, cuda or cuda:1") from None
    try:
        torch.empty(0, device=device)
    except (AssertionError, ImportError, RuntimeError) as error:
        if out_of_memory(error):
            raise
        raise UserError(f"the device {device} cannot be used here ({first_line(error)}); take cpu") from None
    return device


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Return the tokenizer of the artifact in a file, without its model. Raises `UserError` as `load` does."""
    return _tokenizer(_read(Path(path)).sections)[1]


def _read(path: Path) -> container.Contents:
    contents = container.read(path, most_parameters)
    for name in (CONFIG, MANIFEST, TOKENIZER):
        if name not in contents.sections:
            raise UserError(f"{path} is not a complete artifact: it has no {name}")
    for name in contents.sections:
        if name not in (CONFIG, MANIFEST, TOKENIZER, SOURCE) and not name.startswith(PREFIX):
            raise UserError(f"{path} is not an artifact: it has a section {name}, which nothing reads")
    if (carried := len(contents.sections.get(SOURCE, b""))) > _SOURCE_BYTES:
        raise UserError(f"{path} carries {carried:,} bytes of source, over the limit of {_SOURCE_BYTES:,}")
    return contents


def _tokenizer(sections: Mapping[str, bytes]) -> tuple[Manifest, Tokenizer]:
    manifest: Manifest = _describe(Manifest, _parse(sections[MANIFEST], MANIFEST), MANIFEST)
    tokenizer = deserialize(manifest.tokenizer, sections[TOKENIZER])
    if tokenizer.sha256 != manifest.tokenizer_sha256:
        raise UserError("the artifact's tokenizer is not the one its manifest names")
    return manifest, tokenizer


def _check_rules(config: Mapping[str, Any], weights: int) -> None:
    """Refuse configs that would take minutes to apply: each rule and exception is tried on each layer."""
    rules, model = config.get("quantizers"), config.get("model")
    if isinstance(rules, dict) and len(rules) > _RULES + weights:  # packing may add one for each weight
        limit = f"over the limit of {_RULES + weights:,}"
        raise UserError(f"the artifact's {CONFIG} has {len(rules):,} rules for quantizers, {limit}")
    layers, depth = (model.get("layers"), model.get("depth")) if isinstance(model, dict) else (None, None)
    count = depth if isinstance(depth, (int, float)) else GPT().depth
    if isinstance(layers, dict) and len(layers) * count > _EXCEPTIONS:
        raise UserError(f"the artifact's {CONFIG} has {len(layers):,} exceptions for {depth} layers, too many to read")


def most_parameters(file_bytes: int) -> int:
    """Return the limit on a model's parameters, and on the bytes of all sections, in a file of this size.

    A few bytes can decompress to any number of zeros, and a stranger's file must not fill the memory.
    """
    return max(_SMALLEST_BOMB, _RATIO * file_bytes)


def check_readable(model: Model, scoring: Scoring) -> None:
    """Raise `UserError` for a model that `load` refuses: its windows are too long or its random constants too many."""
    tokens, vocabulary = scoring.sequence_length, model.config.vocabulary
    if tokens * vocabulary > _LOGITS:
        long = f"windows of {tokens:,} tokens are too long for a vocabulary of {vocabulary:,}"
        raise UserError(f"{long}: score.sequence_length may be {_LOGITS // vocabulary:,} at most")
    sizes = [buffer.numel() for buffer in model.buffers()]
    if sum(sizes) > _CONSTANTS or any(size > _CONSTANT for size in sizes):
        raise UserError(
            f"the model has {sum(sizes):,} random constants, over the limit of {_CONSTANTS:,}, "
            f"or more than {_CONSTANT:,} in one matrix"
        )


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _parse(data: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise UserError(f"the artifact's {name} is not JSON") from None
    if not isinstance(value, dict):
        raise UserError(f"the artifact's {name} is not a JSON object")
    return value


def _describe(cls: type[Any], value: object, name: str) -> Any:
    with _valid(name):
        if not isinstance(value, dict):
            raise UserError(f"no {cls.__name__}")
        return cls.from_json(value)


@contextmanager
def _valid(name: str) -> Iterator[None]:
    """Name the section in the error messages of a block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"the artifact's {name} is not valid: {error}") from None
    except RecursionError:
        raise UserError(f"the artifact's {name} is nested too deeply") from None
