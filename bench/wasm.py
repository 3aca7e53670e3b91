"""Build what the page of `caddie export --to html` computes with: `caddie/share/html/engine.wasm` and `brotli.bin`.

    python bench/wasm.py            # needs clang 14 or later with wasm-ld
    python bench/wasm.py --words    # also takes Brotli's words and transforms anew from the installed library

`engine.wasm` is compiled from the C beside it. `brotli.bin` holds the data of RFC 7932, appendices A and B, as the
library `brotli` has them: words, affixes and transforms, deflated.
"""

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "caddie" / "share" / "html"
ENGINE = FOLDER / "engine.wasm"
WORDS = FOLDER / "brotli.bin"
FLAGS = (
    *(
        "--target=wasm32",
        "-std=c11",
        "-Os",
        "-msimd128",
        "-mbulk-memory",
        "-fno-builtin",
        "-nostdlib",
        "-Wall",
        "-Wextra",
    ),
    *("-Wl,--no-entry", "-Wl,--strip-all", "-Wl,-z,stack-size=262144"),
)
COMPILER = "Debian clang version 14.0.6"
"""Compiler of the `engine.wasm` that is here; another one may write other bytes."""
_WORD_BYTES, _WORDS_CRC = 122_784, 0x5136_CB04
_AFFIX_BYTES, _TRANSFORM_BYTES = 217, 3 * 121


def compiler() -> str | None:
    """Return the first line of clang's version, or None without clang and its linker for WebAssembly."""
    if not shutil.which("clang") or not shutil.which("wasm-ld"):
        return None
    return subprocess.run(["clang", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]


def engine() -> bytes:
    """Return the module that clang makes of the C files."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "engine.wasm"
        names = [path.name for path in sorted(FOLDER.glob("*.c"))]
        subprocess.run(["clang", *FLAGS, "-o", str(target), *names], cwd=FOLDER, check=True)
        return target.read_bytes()


def words() -> bytes:
    """Return Brotli's words, affixes and transforms, one after the other."""
    spec = importlib.util.find_spec("_brotli")
    assert spec is not None, "the library brotli is not installed"
    assert spec.origin is not None
    library = Path(spec.origin).read_bytes()
    parts = []
    for begin, size in (
        (b"timedownlifeleft", _WORD_BYTES),
        (b"\x01 \x02, \x08 of the \x04 of ", _AFFIX_BYTES),
        (bytes([49, 0, 49, 49, 0, 0, 0, 0, 0, 49, 12, 49]), _TRANSFORM_BYTES),
    ):
        place = library.index(begin)
        parts.append(library[place : place + size])
    assert zlib.crc32(parts[0]) == _WORDS_CRC, "these are not the words of RFC 7932"
    return b"".join(parts)


def main() -> int:
    """Write the files."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--words", action="store_true")
    if compiler() is None:
        print("clang and wasm-ld are needed, as in: apt-get install clang lld", file=sys.stderr)
        return 2
    if arguments.parse_args().words:
        packer = zlib.compressobj(9, wbits=-15)
        WORDS.write_bytes(packer.compress(words()) + packer.flush())
        print(WORDS, len(WORDS.read_bytes()))
    ENGINE.write_bytes(engine())
    print(ENGINE, len(ENGINE.read_bytes()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
