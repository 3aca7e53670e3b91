"""The README of a submission, in Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from caddie.config import ABSENT, differences, show
from caddie.errors import count
from caddie.recipes.catalog import find_shipped
from caddie.report.tables import markdown_table
from caddie.report.verification import verified
from caddie.run.contest_sets import identify
from caddie.run.policy import CONTEST_2026
from caddie.submit.against import Base
from caddie.submit.runs import Run

_VERIFIED = {
    "yes": "Verified by caddie's probes",
    "inconclusive": "Probed by caddie without a decision by every check",
    "not probed": "Not probed, for want of a sandbox",
}
"""Outcome of a run's verification to what the README says of it; a run that failed is refused."""


def readme(runs: Sequence[Run], facts: Mapping[str, Any], base: Base | None, off: Mapping[int, float | None]) -> str:
    """Return the README: results by seed, comparison, settings, bytes, and how to run it again.

    `facts` are those of `submission.json`. `off` maps each seed to the difference when it was scored again, in bits per
    byte; None if it was not.
    """
    first = runs[0].result
    seeds = count(len(runs), "seed")
    spread = f" (sample standard deviation {facts['val_bpb_std']:.5f})" if "val_bpb_std" in facts else ""
    commands = (f"    {run.result['command']}" for run in runs if run.result.get("command"))
    paragraphs = [
        f"# {facts['name']}",
        first["why"],
        f"**{facts['val_bpb']:.5f} bits per byte**, mean of {seeds}{spread}, on {facts['hardware']}.",
        "## Results",
        _results(runs, facts),
        "Training and evaluation are seconds of this machine, as the contest counts them: calibration is training,\n"
        "warm-up and packing are neither. Bytes are those of file and script.",
        *(_comparison(base, len(runs), facts["val_bpb"]) if base else []),
        "## Recipe",
        *_settings(runs[0]),
        "## Bytes",
        *_bytes(max(runs, key=lambda run: run.counted_bytes), facts["bytes_code"]),
        "## Run it",
        f"    pip install -r requirements.txt\n    DATA_PATH=DIR SEED={runs[0].seed} {_launcher(first)} train_gpt.py",
        "`train_gpt.py` trains, packs and scores, and says in its head how it finds the data. caddie wrote it; the\n"
        f"runs here were made by caddie {first['versions']['caddie']} with the same source:\n\n" + "\n".join(commands),
        "## Facts",
        "\n".join([*_facts(runs), *_scored_again(off)]),
    ]
    return "\n\n".join(paragraphs) + "\n"


def _launcher(result: Mapping[str, Any]) -> str:
    """Return what starts the script with as many processes as the run had."""
    single = result["world"] == 1 and result["device"].startswith("cpu")
    return "python" if single else f"torchrun --standalone --nproc_per_node={result['world']}"


def _results(runs: Sequence[Run], facts: Mapping[str, Any]) -> str:
    names = ("seed", "steps", "training", "before packing", "val_bpb", "val_loss", "bytes", "evaluation")
    fields = ("val_bpb", "val_loss")
    rows = []
    for run in runs:
        of = facts["seed_results"][str(run.seed)]
        seconds = [f"{value:.1f}" if value is not None else "" for value in run.contest_seconds.values()]
        scores = (f"{of['pre_quant_val_bpb']:.5f}", *(f"{of[name]:.8f}" for name in fields))
        rows.append((run.seed, f"{of['steps']:,}", seconds[0], *scores, f"{of['artifact_bytes']:,}", seconds[1]))
    rows.append(
        ("mean", "", "", "", *(f"{facts[name]:.8f}" for name in fields), f"{facts['artifact_bytes_mean']:,}", "")
    )
    if len(runs) > 1:
        rows.append(("std (sample)", "", "", "", *(f"{facts[f'{name}_std']:.8f}" for name in fields), "", ""))
    return markdown_table(names, rows)


def _comparison(base: Base, seeds: int, mean: float) -> list[str]:
    theirs = sum(base.scores) / len(base.scores)
    p = f"p = {base.p:.3g}" if base.p is not None else "no p-value, which needs scores that vary on both sides"
    return [
        f"## Against {base.name}",
        f"{mean:.5f} (n = {seeds}) against {theirs:.5f} (n = {len(base.scores)}): {base.difference:+.5f} bits per byte"
        f"\nin favour of this one; {p} (Welch's test, one-sided, of any improvement).",
    ]


def _settings(run: Run) -> list[str]:
    """Return the changes to the base, which may be one that caddie does not ship."""
    settings, base = run.recipe.settings, run.recipe.base
    if (origin := find_shipped(base or "")) is None:
        return [f"It has {f'the base `{base}`' if base else 'no base'}; `train_gpt.py` holds every setting."]
    changes = differences(origin.settings, settings)
    rows = ((f"`{path}`", "" if old is ABSENT else f"`{show(old)}`", f"`{show(new)}`") for path, old, new in changes)
    table = markdown_table(("setting", str(base), "here"), rows)
    return [f"Changes to `{base}`; `train_gpt.py` holds every setting.", table]


def _bytes(run: Run, code_bytes: int) -> list[str]:
    parts = run.result["ledger"]["parts"]
    cap, total = CONTEST_2026.cap_bytes or 0, run.counted_bytes + code_bytes
    rows = [*parts.items(), ("train_gpt.py", code_bytes), ("together", total)]
    return [
        f"Seed {run.seed}, the largest; the cap is {cap:,}. The contest does not count the tokenizer.",
        markdown_table(("part", "bytes"), ((name, f"{size:,}") for name, size in rows)),
    ]


def _facts(runs: Sequence[Run]) -> list[str]:
    first = runs[0].result
    corpus, sha256 = first["corpus"], first["sha256"]
    tokens, size, count = (corpus[name]["validation"] for name in ("tokens", "source_bytes", "documents"))
    known = identify(tokens, size, count, runs[0].recipe.model.vocabulary) or "Held-out text: not the contest's."
    seeds: dict[str, list[int]] = {}
    for run in runs:
        seeds.setdefault(_VERIFIED[str(verified(run.result))], []).append(run.seed)
    told = " ".join(f"{text}: {_seeds(found)}." for text, found in seeds.items())
    documents = " and ".join(f"{corpus['documents'][split]:,} {split}" for split in ("train", "validation"))
    return [
        f"- {known}",
        f"- Documents: {documents}; SHA-256 of the sets {sha256['train_documents']}, {sha256['validation_documents']}.",
        f"- Tokenizer: SHA-256 {sha256['tokenizer']}.",
        *(f"- Artifact of seed {run.seed}: SHA-256 {run.result['sha256']['artifact']}." for run in runs),
        f"- {first['precision']} products, PyTorch {first['versions']['torch']}, Python {first['versions']['python']}.",
        f"- {told}",
    ]


def _scored_again(off: Mapping[int, float | None]) -> list[str]:
    """Return which artifacts were scored again for this submission, and how far off that was."""
    again = {seed: difference for seed, difference in off.items() if difference is not None}
    lines = []
    if again:
        most = f"at most {max(again.values()):.1g} bits per byte off"
        lines.append(f"- Scored again from the artifact, in a new process: {_seeds(again)}, {most}.")
    if len(again) < len(off):
        others = _seeds(seed for seed in off if seed not in again)
        lines.append(f"- Not scored again: {others}, for want of the held-out text or a GPU.")
    return lines


def _seeds(seeds: Iterable[object]) -> str:
    return f"seeds {', '.join(map(str, seeds))}"
