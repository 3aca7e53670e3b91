"""Artifacts of two revisions: with fixed seeds and a budget of steps they must be the same byte for byte.

    python bench/same_artifacts.py REVISION [RECIPE[=OLD_NAME]...] [--steps N]

checks REVISION out into a temporary folder, trains and packs each recipe there and here on Python's own library, and
compares the two artifacts section by section. Sections that hold settings may differ in the settings' names alone:
those of REVISION are read with today's names first. Quantizers are used as they are set (pack.fit=none), because steps
that fill a cap also depend on the length of those names. Exit status 1 where anything else differs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from caddie.config.renamed import modernized
from caddie.pack import container
from caddie.pack.artifact import CONFIG, MANIFEST
from caddie.report.tables import table

ROOT = Path(__file__).resolve().parent.parent
RECIPES = (
    "tiny",
    "parallel_muon_mini",
    "single_gpu_mini",
    "gold6_mini",
    "three_layer_recurrence_mini",
    "longer_warmdown_mini",
)
"""The demo, a twin of each public system, and the best record's."""
CODING = {"longer_warmdown_mini": "coding=Packed(shuffle=true)"}
"""Codings of recipes that have another one since."""
NAMED_BY_SETTINGS = ("recipe", "recipe_sha256", "caddie")
"""Entries of a manifest that change with the name of a recipe, of a setting, or with the version."""


def packed(tree: Path, recipe: str, steps: int, folder: Path) -> dict[str, bytes]:
    """Return the sections of the artifact that the program in `tree` makes, and the trained weights."""
    folder.mkdir(parents=True)
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "caddie"]

    def caddie(*arguments: str) -> str:
        done = subprocess.run([*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
        return done.stderr.strip() if done.returncode else ""

    error = caddie("train", recipe, "train.seconds=none", f"train.steps={steps}", "--out", "run", "--quiet")
    if not error:
        settings = "pack" if (tree / "caddie" / "pack").is_dir() else "compress"  # its name since and before 0.2
        packing = [f"{settings}.{one}" for one in ("fit=none", CODING.get(recipe)) if one]
        error = caddie("pack", "run", *packing, "--out", "artifact", "--quiet")
    if error and "over the cap" not in error:
        raise SystemExit(f"{tree}: {recipe}: {error}")
    weights = (folder / "run" / "weights.safetensors").read_bytes()
    tensors = weights[8 + int.from_bytes(weights[:8], "little") :]  # without the header, which has keys of settings
    return {**container.read(folder / "artifact").sections, "trained weights": tensors}


def settings(section: str, content: bytes) -> Any:
    """Return the settings in a section, under today's names."""
    value = modernized(json.loads(content))
    if section == MANIFEST:
        return {name: entry for name, entry in value.items() if name not in NAMED_BY_SETTINGS}
    return value


def differences(old: dict[str, bytes], new: dict[str, bytes]) -> list[str]:
    """Return the names of sections that differ in more than the names of settings."""
    found = sorted(old.keys() ^ new.keys())
    for name in old.keys() & new.keys():
        same = old[name] == new[name]
        if not same and name in (CONFIG, MANIFEST):
            same = settings(name, old[name]) == settings(name, new[name])
        found += [] if same else [name]
    return found


def main() -> int:
    """Compare and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args()
    rows, failed = [], False
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place) / "revision"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), given.revision], check=True)
        try:
            for recipe in given.recipes:
                name, _, former = recipe.partition("=")
                old = packed(tree, former or name, given.steps, Path(place) / "old" / name)
                new = packed(ROOT, name, given.steps, Path(place) / "new" / name)
                wrong = differences(old, new)
                sizes = [sum(map(len, sections.values())) for sections in (old, new)]
                same = sum(old[section] == new.get(section) for section in old)
                rows.append([name, f"{same} of {len(new)}", *sizes, ", ".join(wrong) or "the same"])
                failed |= bool(wrong)
                print(" ".join(map(str, rows[-1])), file=sys.stderr, flush=True)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    print(table(rows, ["recipe", "equal sections", "bytes before", "bytes now", "but for names of settings"]))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
