"""Recipes side by side at mini scale: same text, same seconds, several seeds.

    python bench/recipes.py TEXT --out runs.jsonl --seconds 20 --seeds 3 --workers 2 [VARIANT ...]

A variant is a recipe, whose twin for two cores is trained, or `LABEL: NAME PATH=VALUE ...`, the twin with changes.
Without variants all shipped recipes run. Each worker has one thread; recipes take turns and seeds come last, so that
noise of the machine falls on all alike. What stands in the file already is not run again. The table goes to standard
output: bits per byte of the packed weights on held-out text, plain windows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HELD_OUT = 0.01
"""Part of the text that is scored: enough for differences of 0.01, little enough to take seconds."""


def variant(words: str) -> Any:
    """The twin that a variant names."""
    from caddie.config import parse_assignment
    from caddie.recipe import find

    name, *changes = words.partition(": ")[2].split() or [words]
    return find(name if name.endswith("_mini") or name == "tiny" else f"{name}_mini").but(
        {"data.validation_fraction": HELD_OUT, **dict(parse_assignment(change) for change in changes)}
    )


def one_run(words: str, text: str, seconds: float, seed: int) -> dict[str, Any]:
    """Train, pack and score one variant with one seed."""
    import torch

    from caddie.compress import compress
    from caddie.corpora import open_corpus, text_of
    from caddie.decompress import decompress
    from caddie.line import calibrated
    from caddie.model import build
    from caddie.scoring import score
    from caddie.train import train

    torch.set_num_threads(1)
    recipe = variant(words)
    recipe = recipe.but({"train.seconds": seconds} if seconds else {})
    corpus = open_corpus(recipe, text)
    held_out = text_of(corpus)
    with tempfile.TemporaryDirectory() as folder:
        trained = train(
            recipe.model,
            recipe.train,
            corpus.train_shards(),
            bos=corpus.manifest.tokenizer.bos,
            seed=seed,
            folder=Path(folder),
        )
    begin = time.perf_counter()
    packed = compress(
        recipe.model, trained.weights, recipe.compress, lambda: calibrated(recipe, trained.weights, corpus)
    )
    stored = {section.name: section.data for section in packed.sections}
    weights = decompress(recipe.model, packed.readers, stored)
    scores = {}
    for kind, held in (("handed_on", trained.weights), ("packed", weights)):
        model = build(recipe.model, 0)
        model.load_state_dict(dict(held))
        scores[kind] = score(model, held_out, recipe.score.plain).bits_per_byte
    return {
        "variant": words,
        "seed": seed,
        "seconds": seconds,
        **scores,
        "parameters": recipe.parameters,
        "steps": trained.steps,
        "tokens": trained.tokens,
        "tokens_per_second": trained.tokens / trained.seconds,
        "weight_bytes": sum(len(section.codec.encode(section.data)) for section in packed.sections),
        "precision": trained.precision,
        "after_seconds": time.perf_counter() - begin,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, best first."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["variant"], []).append(row)
    lines = [
        "| variant | seeds | bits per byte, packed | spread | before packing | parameters | steps | tokens/s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, group in sorted(groups.items(), key=lambda item: statistics.mean(row["packed"] for row in item[1])):
        packed = [row["packed"] for row in group]
        spread = f"{statistics.stdev(packed):.4f}" if len(packed) > 1 else "-"
        before = statistics.mean(row["handed_on"] for row in group)
        steps, speed = (statistics.mean(row[key] for row in group) for key in ("steps", "tokens_per_second"))
        lines.append(
            f"| {name} | {len(group)} | {statistics.mean(packed):.4f} | {spread} | {before:.4f} "
            f"| {group[0]['parameters']:,} | {steps:,.0f} | {speed:,.0f} |"
        )
    return "\n".join(lines)


def work(text: str, seconds: float) -> None:
    """Run the variants that come on standard input, one JSON line for each on standard output."""
    for line in sys.stdin:
        words, seed = json.loads(line)
        try:
            row = one_run(words, text, seconds, seed)
        except Exception as error:
            row = {"variant": words, "seed": seed, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text")
    parser.add_argument("variants", nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=20.0, help="0 leaves the budget to the variant")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    if options.work:
        work(options.text, options.seconds)
        return
    from caddie.corpora import open_corpus
    from caddie.recipe import find, shipped

    asked = options.variants or [name for name in shipped() if name != "tiny"]
    alike: dict[str, list[str]] = {}
    for words in asked:  # some records differ in how they are scored alone, which twins are not
        twin = variant(words)
        alike.setdefault(twin.but(score=find("baseline_mini").score).settings.key(), []).append(words)
    for first, *others in alike.values():
        if others:
            print(f"{first}, also for {', '.join(others)}", file=sys.stderr)
    variants = [names[0] for names in alike.values()]
    for words in variants:
        open_corpus(variant(words), options.text, lambda line: print(line, file=sys.stderr))
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {(row["variant"], row["seed"]) for row in rows if "error" not in row}
    tasks = [(words, seed) for seed in range(1, options.seeds + 1) for words in variants if (words, seed) not in done]
    command = [sys.executable, __file__, options.text, "--out", str(options.out), "--work", "--seconds"]
    pools = [
        subprocess.Popen([*command, str(options.seconds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(options.workers)
    ]
    import threading

    lock, pending = threading.Lock(), iter(tasks)

    def serve(pool: subprocess.Popen[str]) -> None:
        assert pool.stdin is not None
        assert pool.stdout is not None
        while True:
            with lock:
                task = next(pending, None)
            if task is None:
                pool.stdin.close()
                return
            pool.stdin.write(json.dumps(task) + "\n")
            pool.stdin.flush()
            row = json.loads(pool.stdout.readline())
            with lock:
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(row["variant"], row["seed"], row.get("packed", row.get("error")), file=sys.stderr, flush=True)

    threads = [threading.Thread(target=serve, args=(pool,)) for pool in pools]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = [json.loads(line) for line in options.out.read_text().splitlines()]
    print(table([row for row in rows if "error" not in row and row["variant"] in variants]))


if __name__ == "__main__":
    main()
