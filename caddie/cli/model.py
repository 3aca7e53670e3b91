"""Verbs that use the model of an artifact: sample, compress, decompress."""

from __future__ import annotations

from pathlib import Path

import click

from caddie.cli.options import FILE, Finite, load_artifact, options, path_argument, tell
from caddie.errors import UserError
from caddie.files import check_new_file, read_file, replacing
from caddie.report.display import Display
from caddie.report.tables import printable
from caddie.runtime.interrupt import ends_on_interrupt

Parts = tuple[Path, ...]
ENDING = ".cz"
"""Suffix of compressed files."""


@click.command()
@path_argument("artifact")
@click.option("--prompt", default="", help="Text to continue.")
@click.option("--tokens", type=click.IntRange(1, 100_000), default=120, show_default=True, help="Tokens to generate.")
@click.option(
    "--temperature", type=Finite(0, 100), default=0.8, show_default=True, help="0 takes the most likely token."
)
@options("parts", "seed", "json")
@ends_on_interrupt
def sample(
    artifact: Path, prompt: str, tokens: int, temperature: float, parts: Parts, seed: int, as_json: bool
) -> None:
    """Generate text."""
    from caddie.inference.sample import sample as write

    model = load_artifact(artifact, parts)
    text = write(model, prompt, tokens, temperature, seed).decode("utf-8", "replace")
    tell({"text": text}, as_json, "\n".join(map(printable, text.split("\n"))))


@click.command()
@path_argument("artifact")
@path_argument("file")
@click.option("--out", type=FILE, help=f"File to write, else FILE with {ENDING} added.")
@options("parts", "json", "quiet")
@ends_on_interrupt
def compress(artifact: Path, file: Path, out: Path | None, parts: Parts, as_json: bool, quiet: bool) -> None:
    """Compress FILE with the model of ARTIFACT. Decompressing needs the same ARTIFACT."""
    target = out or file.with_name(file.name + ENDING)
    source, packed = _coded("compress", artifact, parts, file, target, quiet)
    rate = 8 * packed / source if source else 0.0
    facts = {"file": str(target), "bytes": packed, "source_bytes": source, "bits_per_byte": rate}
    tell(facts, as_json, f"{target}: {packed:,} bytes from {source:,}, {rate:.3f} bits per byte")


@click.command()
@path_argument("artifact")
@path_argument("file")
@click.option("--out", type=FILE, help=f"File to write, else FILE without {ENDING}.")
@options("parts", "json", "quiet")
@ends_on_interrupt
def decompress(artifact: Path, file: Path, out: Path | None, parts: Parts, as_json: bool, quiet: bool) -> None:
    """Decompress FILE."""
    if out is None and file.suffix != ENDING:
        raise UserError(f"{file} does not end in {ENDING}; name the file to write with --out")
    target = out or file.with_suffix("")
    _, size = _coded("decompress", artifact, parts, file, target, quiet)
    tell({"file": str(target), "bytes": size}, as_json, f"{target}: {size:,} bytes")


def _coded(verb: str, artifact: Path, parts: Parts, file: Path, target: Path, quiet: bool) -> tuple[int, int]:
    """Compress or decompress a file to `target`. Return the bytes of both."""
    from caddie.inference import text_codec

    check_new_file(target)
    data = read_file(file)
    model = load_artifact(artifact, parts)
    with Display(quiet=quiet) as display:
        display.phase(verb)
        if verb == "compress":
            coded = text_codec.compress(model, [data], progress=display)
        else:
            coded = text_codec.decompress(model, data, progress=display)
    with replacing(target) as temporary:
        temporary.write_bytes(coded)
    return len(data), len(coded)
