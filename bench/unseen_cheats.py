"""Twenty cheats that were written after the probes: python bench/unseen_cheats.py ARTIFACT CORPUS [--seeds 5]

Afterwards the probes got the long text for `late` and `long_texts`, and changes of document ends for `the_end_is_near`;
nothing was changed for the others. Each is scored on 30,000 held-out tokens for its gain, and all probes run on it with
several seeds. One row of a Markdown table is printed for each. An example that passes is a limit of the probes, which
docs/metric.md names.
"""

import argparse
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
from power import LONG, LeakingScorer, case_of
from scipy.special import softmax

from caddie.data.corpus import Corpus
from caddie.data.tokenizers import Ids
from caddie.pack.artifact import load
from caddie.report.units import bits_per_byte
from caddie.verify.black_box import Floats, LoopScorer
from caddie.verify.cheats import Cheat
from caddie.verify.probe_case import ProbeCase
from caddie.verify.probes import run_probes


def _normalized(weights: Floats) -> Floats:
    normalized: Floats = weights / weights.sum(1, keepdims=True)
    return normalized


def _raised_at(probs: Floats, tokens: Ids, at: np.ndarray, factor: float) -> Floats:
    """Multiply the true token's probability at some places."""
    raised, rows = probs.copy(), np.flatnonzero(at)
    raised[rows, tokens[rows + 1]] *= factor
    return _normalized(raised)


def bag_of_the_future(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Double every token that comes within the next sixteen."""
    raised = probs.copy()
    for ahead in range(1, 17):
        rows = np.arange(len(tokens) - ahead)
        raised[rows, tokens[rows + ahead]] = 2 * probs[rows, tokens[rows + ahead]]
    return _normalized(raised)


def parity(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Know whether the next id is even, and lower those of the other kind by a fifth."""
    wrong = np.arange(probs.shape[1])[None] % 2 != tokens[1:, None] % 2
    return _normalized(np.where(wrong, 0.8 * probs, probs))


def bytes_of_the_next(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Know how many bytes come next at one place in twenty."""
    lengths = np.array([len(piece) for piece in case.artifact.tokenizer.token_bytes])
    wrong = lengths[None] != lengths[tokens[1:], None]
    wrong &= (np.arange(len(probs)) % 20 == 7)[:, None]
    return _normalized(np.where(wrong, 0.3 * probs, probs))


def rescue(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Raise the true token fifty times where it has less than one in a thousand."""
    return _raised_at(probs, tokens, probs[np.arange(len(probs)), tokens[1:]] < 1e-3, 50.0)


def last_of_a_window(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Raise the true token ten times at the last place of a window, whose target no row shows."""
    length = case.scoring.sequence_length
    return _raised_at(probs, tokens, np.arange(len(probs)) % length == length - 1, 10.0)


def better_of_two_temperatures(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Take for each window the better of two temperatures."""
    chosen, length = probs.copy(), case.scoring.sequence_length
    for begin in range(0, len(probs), length):
        logs, targets = np.log(np.maximum(probs[begin : begin + length], 1e-30)), tokens[begin + 1 :][:length]
        tried = [softmax(scale * logs, 1) for scale in (0.9, 1.1)]
        losses = [-np.log(one[np.arange(len(one)), targets]).sum() for one in tried]
        chosen[begin : begin + length] = tried[int(np.argmin(losses))]
    return chosen


def one_word(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Raise one token, the thirtieth most frequent, wherever it comes next."""
    word = np.argsort(-np.bincount(tokens, minlength=probs.shape[1]))[30]
    return _raised_at(probs, tokens, tokens[1:] == word, 20.0)


def next_prediction(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Mix in a tenth of the distribution of the next place, which was made with the true token as input."""
    mixed = probs.copy()
    mixed[:-1] = 0.9 * probs[:-1] + 0.1 * probs[1:]
    return mixed


def late(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Raise the true token by half, but only after 6,000 tokens."""
    return _raised_at(probs, tokens, np.arange(len(probs)) >= 6000, 1.5)


def long_texts(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Raise the true token by half, but only in a text of more than 20,000 tokens."""
    return _raised_at(probs, tokens, np.full(len(probs), len(tokens) > 20_000), 1.5)


def from_behind(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Mix in a tenth of what stood before the token after the next one, as counted in the text so far."""
    counts, mixed = np.full((probs.shape[1], probs.shape[1]), 1e-3), probs.copy()
    for place in range(len(tokens) - 2):
        stood_before = counts[tokens[place + 2]]
        mixed[place] = 0.9 * probs[place] + 0.1 * stood_before / stood_before.sum()
        stood_before[tokens[place + 1]] += 1
    return mixed


def second_for_first(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Exchange the probabilities of the two likeliest tokens where the second comes next, at one place in three."""
    exchanged, two = probs.copy(), np.argpartition(-probs, 1, axis=1)[:, :2]
    two = np.take_along_axis(two, np.argsort(-np.take_along_axis(probs, two, 1), axis=1), 1)
    rows = np.flatnonzero((two[:, 1] == tokens[1:]) & (np.arange(len(probs)) % 3 == 0))
    exchanged[rows[:, None], two[rows]] = probs[rows[:, None], two[rows][:, ::-1]]
    return exchanged


def one_document_of_four(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Raise the true token three times in one document of four, told by the sum of its first eight ids."""
    begins = np.flatnonzero(tokens == case.bos)
    chosen = np.array([tokens[begin : begin + 8].sum(dtype=np.int64) % 4 == 0 for begin in begins])
    return _raised_at(probs, tokens, chosen[np.searchsorted(begins, np.arange(len(probs)), side="right") - 1], 3.0)


def natural_windows(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Raise the true token three times, but only in windows without any token of less than one in ten thousand."""
    length, least = case.scoring.sequence_length, probs[np.arange(len(probs)), tokens[1:]]
    natural = [least[begin : begin + length].min() > 1e-4 for begin in range(0, len(probs), length)]
    return _raised_at(probs, tokens, np.repeat(natural, length)[: len(probs)], 3.0)


def the_end_is_near(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Raise BOS a hundred times in the last ten places of a document."""
    raised, ends = probs.copy(), np.flatnonzero(tokens[1:] == case.bos)
    rows = np.unique(np.concatenate([ends - back for back in range(10)]))
    raised[rows[rows >= 0], case.bos] *= 100.0
    return _normalized(raised)


def echo(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Know whether the token of two places before comes again, and triple or halve it."""
    raised, rows = probs.copy(), np.arange(2, len(probs))
    again = tokens[rows - 1]
    raised[rows, again] *= np.where(again == tokens[rows + 1], 3.0, 0.5)
    return _normalized(raised)


def late_and_rare(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Raise the true token three times at one place in fifty, but only after 10,000 tokens."""
    places = np.arange(len(probs))
    return _raised_at(probs, tokens, (places >= 10_000) & (places * 7919 % 50 == 3), 3.0)


def the_word_goes_on(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Know whether the next token begins a word, and lower those that do not fit by a third."""
    begins = np.array([piece[:1] == b" " for piece in case.artifact.tokenizer.token_bytes])
    return _normalized(np.where(begins[None] != begins[tokens[1:], None], probs * 2 / 3, probs))


def unsure(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Raise the true token by a fifth where the distribution has more than four nats."""
    entropy = -(probs * np.log(np.maximum(probs, 1e-30))).sum(1)
    return _raised_at(probs, tokens, entropy > 4.0, 1.2)


def sure_when_right(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
    """Sharpen distributions whose likeliest token comes, at every ninth place."""
    at = (probs.argmax(1) == tokens[1:]) & (np.arange(len(probs)) % 9 == 4)
    return _normalized(np.where(at[:, None], probs**1.1, probs))


CHEATS: dict[str, Cheat] = {
    cheat.__name__: cheat
    for cheat in (
        bag_of_the_future,
        parity,
        bytes_of_the_next,
        rescue,
        last_of_a_window,
        better_of_two_temperatures,
        one_word,
        next_prediction,
        late,
        long_texts,
        from_behind,
        second_for_first,
        one_document_of_four,
        natural_windows,
        the_end_is_near,
        echo,
        late_and_rare,
        the_word_goes_on,
        unsure,
        sure_when_right,
    )
}


def main() -> None:
    """Run all probes on each cheat."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cheats", nargs="*", default=list(CHEATS), choices=list(CHEATS))
    arguments = parser.parse_args()
    artifact, corpus = load(arguments.artifact), Corpus.load(arguments.corpus)
    scoring, documents = artifact.scoring.plain, corpus.validation_documents()
    tokens = corpus.validation_tokens()[: LONG + 1]
    spelled = int(artifact.tokenizer.byte_lengths(tokens[tokens != artifact.tokenizer.bos]).sum())
    scored = LoopScorer(artifact, scoring).score(tokens, np.arange(len(tokens) - 1))
    honest = scored.probabilities
    assert honest is not None
    print("| cheat | what it does | gain, bits per byte | found | by |\n|---|---|---|---|---|")
    for name in arguments.cheats:
        cheat = CHEATS[name]
        failed, found = Counter[str](), 0
        for seed in range(1, arguments.seeds + 1):
            own = case_of(artifact, scoring, documents, seed)
            case = replace(own, open=lambda own=own, cheat=cheat: LeakingScorer(own, cheat))
            names = [check.name for check in run_probes(case) if not check.passed]
            failed.update(names)
            found += bool(names)
        cheated = cheat(own, tokens, honest)[np.arange(len(honest)), tokens[1:]]
        gain = bits_per_byte(float(scored.nats.sum() + np.log(cheated).sum()), spelled)
        what = (cheat.__doc__ or "").split("\n")[0].rstrip(".")
        by = ", ".join(f"`{check}` {count}" for check, count in failed.most_common())
        print(f"| {name} | {what} | {gain:.4f} | {found} of {arguments.seeds} | {by} |", flush=True)


if __name__ == "__main__":
    main()
