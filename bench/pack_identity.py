"""Pack a run with each quantizer, correction and coding, and hash the files: shows that a change left every byte.

    python bench/pack_identity.py RUN HASHES

The first time HASHES is written: a JSON object of settings and the SHA-256 of the file that `caddie pack` makes with
them. After a change of the program the same command packs again, prints the settings whose file differs, and ends with
status 1 if any does.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

MATRIX = "pack.quantizers.matrix="
SETTINGS = (
    "pack.fit=FillCap",
    "pack.fit=none",
    f"{MATRIX}Rows(bits=4)",
    f"{MATRIX}Rows(bits=6,packed=true,steps=float32)",
    f"{MATRIX}Rows(bits=6,scale=BestPercentile)",
    f"{MATRIX}Gptq",
    f"{MATRIX}Gptq(of=Rows(bits=6,scale=SigmaClip(importance=0.2)))",
    f"{MATRIX}Rotated(of=Gptq(of=Rows(bits=6)))",
    f"{MATRIX}Ternary",
    f"{MATRIX}Ternary(packed=true,keep_mean=true)",
    f"{MATRIX}Binary",
    f"{MATRIX}Float8",
    f"{MATRIX}LowRank",
    f"{MATRIX}LowRank(form=symmetric,of=Rows)",
    "pack.correction=Correction",
    f"{MATRIX}Rows(bits=6) pack.fit=PruneOnes cap=400000",
    "pack.coding=EntropyModel",
    "pack.coding=Packed",
    "pack.coding=Packed(codec=Lzma,shuffle=true,columns=true)",
    "pack.coding=Packed(codec=Zlib)",
)
"""Settings of `caddie pack`; unless they name a fit, steps are left as set."""


def packed(run: Path, settings: str) -> str:
    """SHA-256 of the file that `caddie pack` makes of the run folder with these settings."""
    fit = [] if "pack.fit" in settings else ["pack.fit=none"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "artifact.caddie"
        command = [sys.executable, "-m", "caddie", "pack", str(run), *settings.split(), *fit]
        subprocess.run([*command, "--out", str(out), "--quiet"], check=True, stdout=subprocess.DEVNULL)
        return hashlib.sha256(out.read_bytes()).hexdigest()


def main() -> int:
    """Write or compare the hashes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("hashes", type=Path, metavar="HASHES")
    arguments = parser.parse_args()
    found = {settings: packed(arguments.run, settings) for settings in SETTINGS}
    if not arguments.hashes.exists():
        arguments.hashes.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    before = json.loads(arguments.hashes.read_text())
    different = [settings for settings in SETTINGS if before.get(settings) != found[settings]]
    print("\n".join(different) or f"{len(found)} files, all the same")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
