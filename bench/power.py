"""Measure which leaks `caddie verify` finds: python bench/power.py ARTIFACT CORPUS [--seeds 10] [--out FILE]

Each leak raises the logit of the true token at some places, as a scorer does that knows it: at a share of the places,
by some nats, on a trigger. It hides in plain scoring, or in a scorer that also mixes in honest counts of what followed
the last token in its window, so that not all that it gains is a leak. What the leak adds is measured on 30,000 held-out
tokens, in bits per byte. Then the three checks for leaks run with several seeds, each on its own text of 4,096 tokens,
and what they miss is looked for in a long text. One JSON row is printed for each leak and seed, and appended to --out;
what stands there is not tried again. At the end a table says how often leaks were found, by their gain; `--gains LOW
HIGH` leaves out those that gain less or more.
"""

import argparse
import itertools
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from caddie.data.corpus import Corpus
from caddie.data.tokenizers import Ids
from caddie.pack.artifact import Artifact, load
from caddie.score import Scoring
from caddie.verify.black_box import Floats, LoopScorer, Positions, ScoredText
from caddie.verify.cheats import CheatScorer
from caddie.verify.probe_case import LONG_TOKENS, ProbeCase, probe_case_of
from caddie.verify.probe_text import excerpts, in_order_from, text_in_order
from caddie.verify.probes import PROBES

TOKENS, LONG = 4096, 30_000
CHECKS = ("no look-ahead", "drawn text is not predicted", "random tokens are not predicted")
IN_LONG_TEXT = "no look-ahead in the long text"
SHARES = (1.0, 1 / 8, 1 / 100, 1 / 1000)
NATS = (20.0, 3.0, 0.5)
BINS = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 10.0)
LATE = 1000

Trigger = Callable[[ProbeCase, Ids, Floats], np.ndarray]


def _true(tokens: Ids, probs: Floats) -> Floats:
    return probs[np.arange(len(probs)), tokens[1:]]


def _word_starts(case: ProbeCase, tokens: Ids, probs: Floats) -> np.ndarray:
    spaces = np.array([piece[:1] == b" " for piece in case.artifact.tokenizer.token_bytes])
    return np.asarray(spaces[tokens[1:]])


TRIGGERS: dict[str, Trigger] = {
    "always": lambda case, tokens, probs: np.ones(len(probs), np.bool_),
    "likeliest comes next": lambda case, tokens, probs: probs.argmax(1) == tokens[1:],
    "true token is rare": lambda case, tokens, probs: _true(tokens, probs) < math.exp(-5),
    "word starts": _word_starts,
    "second half of a window": lambda case, tokens, probs: (
        np.arange(len(probs)) % case.scoring.sequence_length >= case.scoring.sequence_length // 2
    ),
    f"after {LATE:,} tokens": lambda case, tokens, probs: np.arange(len(probs)) >= LATE,
}


def _plain(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    return probs


def _counts(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Mix in, with a weight of a fifth, how often each token followed the last one before in the window."""
    length, mixed = case.scoring.sequence_length, probs.copy()
    for begin in range(0, len(probs), length):
        window = tokens[begin : begin + length][: len(probs) - begin]
        same = np.tril(window[:, None] == window[None, :-1], -1)
        counts = same.astype(np.float64) @ np.eye(probs.shape[1])[window[1:]]
        total = counts.sum(1, keepdims=True)
        seen = np.flatnonzero(total[:, 0])
        mixed[begin + seen] = 0.8 * mixed[begin + seen] + 0.2 * counts[seen] / total[seen]
    return mixed


HIDES: dict[str, Callable[[ProbeCase, Ids, Floats], Floats]] = {"plain scoring": _plain, "mixed with counts": _counts}


@dataclass(frozen=True)
class Leak:
    """A way to use the true token."""

    hides_in: str
    trigger: str
    share: float
    """Share of the places at which it may act."""
    nats: float
    """Nats by which it raises the logit of the true token."""

    def __call__(self, case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
        """Return the distributions with the leak."""
        probs = HIDES[self.hides_in](case, tokens, probs)
        at = TRIGGERS[self.trigger](case, tokens, probs)
        at &= np.random.default_rng(0).random(len(probs)) < self.share
        leaking, rows = probs.copy(), np.flatnonzero(at)
        leaking[rows, tokens[rows + 1]] *= math.exp(self.nats)
        leaking[rows] /= leaking[rows].sum(1, keepdims=True)
        return leaking


class LeakingScorer(CheatScorer):
    """Claims that its windows are independent, as those of plain scoring are."""

    def score(self, tokens: Ids, positions: Positions) -> ScoredText:
        """Return the losses of the leaking distributions."""
        context = np.arange(len(tokens) - 1) // self.scoring.sequence_length * self.scoring.sequence_length
        return replace(super().score(tokens, positions), context=context)


def gain(case: ProbeCase, tokens: Ids, honest: Floats, leak: Leak) -> float:
    """Return what a leak gains on tokens, in bits per byte."""
    without = HIDES[leak.hides_in](case, tokens, honest)
    nats = float(np.log(_true(tokens, leak(case, tokens, honest)) / _true(tokens, without)).sum())
    spelled = case.artifact.tokenizer.byte_lengths(tokens[tokens != case.bos]).sum()
    return nats / math.log(2) / float(spelled)


def case_of(artifact: Artifact, scoring: Scoring, documents: list[bytes], seed: int) -> ProbeCase:
    """Return a case as `verify` makes it of documents whose scoring is quick."""
    case = probe_case_of(artifact, scoring, excerpts(documents, scoring, seed), seed=seed, length=TOKENS)
    text = text_in_order(artifact.tokenizer, in_order_from(documents, seed), LONG_TOKENS)
    return replace(case, long_text=text)


def found_by(artifact: Artifact, scoring: Scoring, documents: list[bytes], seed: int, leak: Leak) -> str | None:
    """Return the first check that finds a leak with texts and places drawn by `seed`, the long text last."""
    honest = case_of(artifact, scoring, documents, seed)
    case = replace(honest, open=lambda: LeakingScorer(honest, leak))
    for name in CHECKS:
        outcome = PROBES[name](replace(case, long_text=None))
        if outcome is not None and not outcome[0]:
            return name
    assert case.long is not None
    outcome = PROBES[CHECKS[0]](case.long)
    return IN_LONG_TEXT if outcome is not None and not outcome[0] else None


def table(rows: list[dict[str, Any]]) -> str:
    """Return how often leaks were found, by where they hide and by their gain, as a table in Markdown."""
    lines = [
        "| hidden in | gain, bits per byte | leaks | found | by the first check that did |",
        "|---|---|---|---|---|",
    ]
    for hides_in, (low, high) in itertools.product(HIDES, itertools.pairwise((0.0, *BINS))):
        within = [row for row in rows if row["hides_in"] == hides_in and low < row["gain"] <= high]
        if within:
            found = Counter(row["by"] for row in within if row["by"])
            each = ", ".join(f"{found[name]:,} by {name}" for name in (*CHECKS, IN_LONG_TEXT))
            leaks = len({(row["trigger"], row["share"], row["nats"]) for row in within})
            share = f"{found.total():,} of {len(within):,} ({found.total() / len(within):.1%})"
            lines.append(f"| {hides_in} | {low:g} to {high:g} | {leaks} | {share} | {each} |")
    return "\n".join(lines)


def main() -> None:
    """Measure all leaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--gains", type=float, nargs=2, default=(0.0, math.inf), help="bits per byte, least and most")
    parser.add_argument("--out", type=Path, help="file that the rows are appended to")
    arguments = parser.parse_args()
    artifact, corpus = load(arguments.artifact), Corpus.load(arguments.corpus)
    scoring, documents = artifact.scoring.plain, corpus.validation_documents()
    tokens = corpus.validation_tokens()[: LONG + 1]
    whole = probe_case_of(artifact, scoring, excerpts(documents, scoring, 0), seed=0)
    honest = LoopScorer(artifact, scoring).score(tokens, np.arange(len(tokens) - 1)).probabilities
    assert honest is not None
    leaks = {
        leak: gain(whole, tokens, honest, leak)
        for leak in itertools.starmap(Leak, itertools.product(HIDES, TRIGGERS, SHARES, NATS))
    }
    known = arguments.out.read_text().splitlines() if arguments.out and arguments.out.exists() else []
    rows: list[dict[str, Any]] = list(map(json.loads, known))
    for seed, (leak, gained) in itertools.product(range(1, arguments.seeds + 1), leaks.items()):
        trial, begin = {**asdict(leak), "seed": seed}, time.perf_counter()
        if not arguments.gains[0] < gained <= arguments.gains[1] or any(trial.items() <= row.items() for row in rows):
            continue
        found = found_by(artifact, scoring, documents, seed, leak)
        rows.append({**trial, "gain": gained, "by": found, "seconds": round(time.perf_counter() - begin, 1)})
        print(json.dumps(rows[-1]), flush=True)
        if arguments.out:
            with arguments.out.open("a") as out:
                out.write(json.dumps(rows[-1]) + "\n")
    print(table(rows), file=sys.stderr)


if __name__ == "__main__":
    main()
