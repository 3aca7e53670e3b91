"""Verbs that use the model of an artifact: sample, compress, decompress."""

from __future__ import annotations

from pathlib import Path

import click

from caddie.cli.options import Finite, load_artifact, options, path_argument, tell
from caddie.errors import UserError
from caddie.files import reason, replacing

ENDING = ".cz"
"""Suffix of compressed files."""


@click.command()
@path_argument("artifact")
@click.option("--prompt", default="", help="Text to continue.")
@click.option("--tokens", type=click.IntRange(1, 100_000), default=120, show_default=True, help="Tokens to generate.")
@click.option(
    "--temperature", type=Finite(0, 100), default=0.8, show_default=True, help="0 takes the most likely token."
)
@options("seed", "json")
def sample(artifact: Path, prompt: str, tokens: int, temperature: float, seed: int, as_json: bool) -> int:
    """Generate text."""
    from caddie.inference.sample import sample as write
    from caddie.report.tables import printable

    model = load_artifact(artifact)
    text = write(model, prompt.encode(errors="replace"), tokens, temperature, seed).decode("utf-8", "replace")
    tell({"text": text}, as_json, "\n".join(map(printable, text.split("\n"))))
    return 0


@click.command()
@path_argument("artifact")
@path_argument("file")
@click.option("--out", type=click.Path(path_type=Path), help=f"File to write, else FILE with {ENDING} added.")
@options("json", "quiet")
def compress(artifact: Path, file: Path, out: Path | None, as_json: bool, quiet: bool) -> int:
    """Compress FILE with the model of ARTIFACT, which decompressing needs too."""
    from caddie.inference.text_codec import compress as pack
    from caddie.report.display import Display

    target = _unwritten(out or file.with_name(file.name + ENDING))
    model, data = load_artifact(artifact), _read(file)
    with Display(quiet=quiet) as display:
        display.phase("compress")
        packed = pack(model, [data], progress=display)
    _write(target, packed)
    rate = 8 * len(packed) / len(data) if data else 0.0
    facts = {"file": str(target), "bytes": len(packed), "source_bytes": len(data), "bits_per_byte": rate}
    tell(facts, as_json, f"{target}: {len(packed):,} bytes from {len(data):,}, {rate:.3f} bits per byte")
    return 0


@click.command()
@path_argument("artifact")
@path_argument("file")
@click.option("--out", type=click.Path(path_type=Path), help=f"File to write, else FILE without {ENDING}.")
@options("json", "quiet")
def decompress(artifact: Path, file: Path, out: Path | None, as_json: bool, quiet: bool) -> int:
    """Decompress FILE."""
    from caddie.inference.text_codec import decompress as unpack
    from caddie.report.display import Display

    if out is None and file.suffix != ENDING:
        raise UserError(f"{file} does not end in {ENDING}; name the file to write with --out")
    target = _unwritten(out or file.with_suffix(""))
    model, data = load_artifact(artifact), _read(file)
    with Display(quiet=quiet) as display:
        display.phase("decompress")
        whole = unpack(model, data, progress=display)
    _write(target, whole)
    tell({"file": str(target), "bytes": len(whole)}, as_json, f"{target}: {len(whole):,} bytes")
    return 0


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({reason(error)})") from None


def _unwritten(file: Path) -> Path:
    if file.exists():
        raise UserError(f"{file} exists; name another file with --out or remove it")
    return file


def _write(file: Path, data: bytes) -> None:
    with replacing(file) as temporary:
        temporary.write_bytes(data)
