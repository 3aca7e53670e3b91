"""Prior distributions of integers, by integer arithmetic alone, so that they are the same on every machine.

A context is an expected magnitude E|q|; contexts are a quarter of an octave apart. Its prior is a mixture of discrete
Gaussians of neighbouring magnitudes, in one of several widths, because the magnitude is an estimate: from n magnitudes
it has a relative error of about 1 / sqrt(2 n). A mixture costs less than a wrong scale (Student's t is such a mixture).
"""

from bisect import bisect_left
from decimal import Context, Decimal, localcontext
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

PER_OCTAVE = 64
"""Steps of `log2` per octave."""
FRACTION_BITS = 12
"""Fraction bits of magnitudes and their ratios, which are fixed-point numbers."""
LARGEST = 255
"""Largest magnitude with a probability of its own."""
CONTEXTS = 64
"""Number of contexts; the first expects a magnitude of 2^-8."""
PRIOR_BITS = 20
"""Prior probabilities are multiples of 2^-PRIOR_BITS."""

_LEAST_OCTAVE = -8
_CONTEXT_STEPS = PER_OCTAVE // 4
_MANTISSAS = 1 << 10
_BITS_IGNORED = 53 - _MANTISSAS.bit_length()  # low bits of a double's mantissa that `log2` ignores
_BITS_OF_ONE = int(np.float64(1).view(np.int64))
_BITS = 30
_DEVIATIONS = 16 * 12  # standard deviations, a sixteenth of an octave apart
# Neighbours at these distances are mixed, one after another.
_MIXED = (4, 4, 6, 8, 12, 16)
# Variances of ln E|q| in thousandths, from the third mixture to the last but one: each mixing adds a half of ln(2)**2
# times the square of the distance in octaves. No estimate is as certain as the first two.
_VARIANCES_PER_THOUSAND = (64, 124, 259)
_BORDERS = [1.5 * variance for variance in _VARIANCES_PER_THOUSAND]


def log2(numbers: npt.NDArray[Any]) -> Integers:
    """Return base-2 logarithms of integers below 2^53, in units of 1 / PER_OCTAVE, rounded down; 0 for 0."""
    bits = np.maximum(numbers, 1).astype(np.float64).view(np.int64)  # exact
    logs: Integers = _logs()[(bits - _BITS_OF_ONE) >> _BITS_IGNORED]  # by exponent and first bits of the mantissa
    return logs


def contexts(logs: Integers) -> npt.NDArray[np.uint8]:
    """Return the contexts nearest to `log2` of fixed-point magnitudes."""
    steps = logs - (FRACTION_BITS + _LEAST_OCTAVE) * PER_OCTAVE + _CONTEXT_STEPS // 2
    return np.minimum(np.maximum(steps // _CONTEXT_STEPS, 0), CONTEXTS - 1).astype(np.uint8)  # np.clip is slower


def width(rows: int, columns: int) -> int:
    """Return the index of the mixture for a magnitude estimated from `rows` of its column and `columns` of its row."""
    return 2 + bisect_left(_BORDERS, 60 + 800 // rows + 800 // columns)


@cache
def priors() -> Integers:
    """Return the prior of each magnitude, the same for both signs, by width and context: (widths, contexts, 256)."""
    with localcontext(Context(prec=40)):
        exponentials = [int((1 << _BITS) * (Decimal(-step) / 64).exp()) for step in range(1332)]  # to 0
        # 64 / (2 s**2) in 2**-16, for s = 2**(place / 16 - 3)
        factors = [int(Decimal(2) ** (27 - Decimal(place) / 8)) for place in range(_DEVIATIONS)]
    magnitudes = np.arange(LARGEST + 1)
    exponents = np.array(factors)[:, None] * magnitudes**2 >> 16
    mixture = _normalized(np.array(exponentials).take(exponents, mode="clip"), _BITS)
    wanted = np.arange(CONTEXTS) * _CONTEXT_STEPS + (_BITS + _LEAST_OCTAVE) * PER_OCTAVE
    result = []
    for distance in _MIXED:
        padded = np.pad(mixture, ((distance, distance), (0, 0)), mode="edge")
        mixture = (padded[: -2 * distance] + 2 * mixture + padded[2 * distance :]) >> 2
        means = log2(2 * (mixture * magnitudes).sum(axis=1))
        nearest = np.abs(means - wanted[:, None]).argmin(axis=1)
        # No integer has probability 0.
        result.append(_normalized(mixture[nearest], PRIOR_BITS) + 1)
    return np.stack(result)


def _normalized(weights: Integers, bits: int) -> Integers:
    """Scale weights (below 2^30) of magnitudes 0, 1, ... so that the weights of both signs sum to 2^bits."""
    shares: Integers = (weights << bits) // (2 * weights.sum(axis=1, keepdims=True) - weights[:, :1])
    return shares


@cache
def _logs() -> Integers:
    """Return logarithms of numbers from 1 up, by exponent and mantissa."""
    # The bits of number**64 are 64 times those of the number.
    logs = [(number**PER_OCTAVE).bit_length() - 1 for number in range(_MANTISSAS, 2 * _MANTISSAS)]
    octaves = np.arange(53)[:, None] - (_MANTISSAS.bit_length() - 1)
    return (np.array(logs, np.int64) + PER_OCTAVE * octaves).ravel()
