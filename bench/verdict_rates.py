"""Rates of wrong verdicts where nothing differs, and of right ones where something does: simulated runs.

    python bench/verdict_rates.py       # some minutes: a table for `docs/log.md`

A run's bits of a document are bytes times a rate. The rate has what its seed does to all documents, what its label does
to this document whatever the seed, and what is left. `ratio` is the first's standard deviation over the standard error
that the second gives to a difference. 299 documents of log-normal length and Student's t of three degrees for
everything that belongs to a document: as unequal and as heavy-tailed as what was measured on web text.
"""

import argparse
import math
from collections.abc import Iterator

import numpy as np

from caddie.lab.stats import Estimate, paired
from caddie.lab.verdicts import Documents, measure

DOCUMENTS = 299
SEED = 0.003
"""Standard deviation that seeds give to a difference, bits per byte."""
LEFT = 0.12
"""Standard error of what is left, over `SEED`; 0.12 was measured."""
RATIOS = (10.0, 5.0, 2.0, 1.0, 0.3)
METHODS = ("seeds and documents", "seeds alone", "documents alone", "all independent", "Satterthwaite")


def draw(chance: np.random.Generator, seeds: int, ratio: float, effect: float = 0.0) -> tuple[Documents, Documents]:
    """Return runs of a base and of an entry whose true difference, over all documents there are, is `effect`."""
    sizes = np.minimum(np.ceil(chance.lognormal(7.3, 1.0, DOCUMENTS)), 24_000.0)
    weight = math.sqrt((sizes**2).sum()) / sizes.sum()

    def tailed(error: float, shape: tuple[int, ...]) -> np.ndarray:
        return chance.standard_t(3, shape) / math.sqrt(3.0) * error / weight

    hard = chance.normal(2.8, 0.25, DOCUMENTS) + chance.normal(0.0, 3 * SEED, (seeds, 1))  # of document and seed alike
    moved = effect + chance.normal(0.0, SEED, (seeds, 1)) + tailed(SEED / ratio, (DOCUMENTS,))
    moved = moved + tailed(LEFT * SEED, (seeds, DOCUMENTS))
    return Documents(sizes, dict(enumerate(hard * sizes))), Documents(sizes, dict(enumerate((hard + moved) * sizes)))


def p_values(base: Documents, entry: Documents) -> Iterator[float]:
    """Yield p of no difference by each of the methods."""
    from scipy.special import ndtr

    scores = [{seed: float(bits.sum() / one.sizes.sum()) for seed, bits in one.bits.items()} for one in (base, entry)]
    found = measure(*scores, tuple(scores[0]), (base, entry))
    assert found.estimate is not None
    yield found.estimate.p_beyond()
    by_seed = paired(list(scores[1].values()), list(scores[0].values()))
    yield by_seed.p_beyond()
    seeds, total = len(scores[0]), base.sizes.sum()
    differences = np.array([entry.bits[seed] - base.bits[seed] for seed in base.bits])
    residuals = (differences - by_seed.value * base.sizes) / total
    for squares in ((residuals.mean(0) ** 2).sum(), (residuals**2).sum() / seeds**2):
        yield float(2 * ndtr(-abs(by_seed.value) / math.sqrt(squares)))
    own, other = by_seed.standard_error**2, found.estimate.second.standard_error**2 if found.estimate.second else 0.0
    degrees = (own + other) ** 2 / (own**2 / (seeds - 1))
    yield Estimate(by_seed.value, math.sqrt(own + other), degrees).p_beyond()


def rates(seeds: int, ratio: float, trials: int, effect: float = 0.0, level: float = 0.05) -> dict[str, float]:
    """Return the share of trials with p below the level, for each method."""
    chance = np.random.default_rng(1)
    p = np.array([list(p_values(*draw(chance, seeds, ratio, effect))) for _ in range(trials)])
    return dict(zip(METHODS, (p < level).mean(0).tolist(), strict=True))


def main(trials: int = 2000) -> None:
    """Print the table: nothing differs, and a difference of five standard errors."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"p < 0.05, percent of {trials:,}; in brackets where the difference is five standard errors")
    print(f"{'seeds':>5} {'ratio':>5}  " + "  ".join(f"{name:>19}" for name in METHODS))
    for seeds in (2, 3, 5):
        for ratio in RATIOS:
            error = SEED * math.sqrt((1 + LEFT**2) / seeds + 1 / ratio**2)
            null, found = rates(seeds, ratio, trials), rates(seeds, ratio, trials // 4, 5 * error)
            cells = (f"{100 * null[name]:.1f} ({100 * found[name]:.0f})" for name in METHODS)
            print(f"{seeds:5} {ratio:5g}  " + "  ".join(f"{cell:>19}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
