"""Trellis-coded quantization: the value of an integer depends on the integers before it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from caddie.pack.quantize.quantizer import Arrays, Layout, Quantizer, rows_shape
from caddie.pack.quantize.waterfilling import RoundColumn, WaterfillingSteps, nearest

Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

CHECKS = {4: (0o5, 0o2), 8: (0o13, 0o4), 16: (0o23, 0o4), 32: (0o45, 0o10), 64: (0o103, 0o24)}
"""Parity checks of Ungerboeck's codes, by number of states."""
CHAIN = 128
"""Most rows of a chain. It begins in state 0, which costs a tenth of a decibel; shorter chains cost more."""
_LEAST_ROWS = 16  # of a chain that gains more than its start costs
_LEAST_SIZE = 0.35  # root mean square of a row or column in steps, below which rounding to 0 costs less
_LARGEST = 32_000  # of a value in steps: integers are stored as int16
_ERROR = 0.0675  # mean squared error in squared steps: 0.9 dB below a twelfth


class ConvolutionalCode(NamedTuple):
    """States of a trellis. An integer k stands for k + 1/4 steps in an even state, for -(k + 1/4) in an odd one."""

    followers: Array
    """The next state, by state and parity of the integer, (states, 2)."""
    before: Array
    """The two states that may come before each state, (states, 2)."""
    branches: Array
    """Parity of each state in `before` plus twice the parity of the integer that leads from it, (states, 2)."""


@cache
def convolutional_code(states: int) -> ConvolutionalCode:
    """Return the systematic code of rate 1/2 by G. Ungerboeck, IEEE Trans. Information Theory 28(1), 1982, table I."""
    first, second = CHECKS[states]
    numbers, bits = np.arange(states)[:, None], np.arange(2)
    followers = (numbers >> 1) ^ (first >> 1) * (numbers & 1) ^ (second >> 1) * bits
    into: list[list[tuple[int, int]]] = [[] for _ in range(states)]
    for (state, bit), after in np.ndenumerate(followers):
        into[after].append((state, (state & 1) + 2 * bit))
    both = np.array(into)
    return ConvolutionalCode(followers.astype(np.uint8), both[..., 0], both[..., 1])


def best_path(costs: Floats, states: int) -> Array:
    """Return the branches of least total cost from state 0 on, (length, chains), by Viterbi's algorithm.

    `costs` of branches are (length, 4, chains).
    """
    _, before, branches = convolutional_code(states)
    length, _, chains = costs.shape
    so_far = np.full((states, chains), np.float32(1e9))
    so_far[0] = 0
    second = np.empty((length, states, chains), bool)
    for place, here in enumerate(costs[:, branches]):
        here += so_far[before]
        np.less(here[:, 1], here[:, 0], out=second[place])
        np.minimum(here[:, 0], here[:, 1], out=so_far)
    state, every = so_far.argmin(0), np.arange(chains)
    found = np.empty((length, chains), np.int64)
    for place in range(length - 1, -1, -1):
        taken = second[place, state, every].astype(np.int8)
        found[place] = branches[state, taken]
        state = before[state, taken]
    return found


class Trellis(WaterfillingSteps, Quantizer):
    """`Waterfilling` with trellis-coded quantization (TCQ) down the columns: a smaller error for the same bytes.

    Rounding to the nearest step with an entropy coder is a quarter of a bit per weight (1.53 dB) above the theoretical
    bound. Here an integer k stands for k + 1/4 steps or -(k + 1/4) steps, depending on a state that follows from the
    parities of the integers before it. So points half a step apart can be reached at the bits of whole steps. Viterbi's
    algorithm finds the path of least error (M. W. Marcellin and T. R. Fischer, IEEE Trans. Communications 38(1), 1990;
    with an entropy coder T. R. Fischer and M. Wang, IEEE Trans. Information Theory 38(1), 1992). Odd states have the
    points of even states with the opposite sign, so k has one distribution, and the entropy coder needs no state.

    A chain is every n-th row of a column. Each value t is first shrunk by t D / σ², by at most D / σ and not past 0,
    with D the mean squared error and σ² the variance in its row and column. This minimizes error plus bits: bits grow
    with the square of Gaussian values, and more slowly if tails are heavy. Rows and columns of few bits are rounded to
    integers.
    """

    states: Literal[4, 8, 16, 32, 64] = 32
    """Number of states. More states gain a little but quantize more slowly; decoding takes the same time."""

    def dequantize(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Tensor:
        integers = arrays["integers"].reshape(rows_shape(shape))
        along, across = np.split(arrays["chained"] != 0, [len(integers)])
        values, inside = integers.astype(np.float32), np.ix_(along, across)
        signs = 1 - 2 * self._parities(integers[inside]).astype(np.float32)
        values[inside] = (values[inside] + np.float32(0.25)) * signs
        return super().dequantize({**arrays, "integers": values}, shape)

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """Return the layout of `Waterfilling` and `chained`: for each row, then each column, 1 if it is in chains."""
        return {**super().layout(shape), "chained": (np.dtype(np.uint8), (sum(rows_shape(shape)),))}

    @property
    def dequantizer(self) -> Trellis:
        return Trellis(states=self.states)

    def _rounding(self, weights: Tensor) -> RoundColumn:
        squares = weights.square()
        along = squares.mean(1) > _LEAST_SIZE**2
        across = squares[along].mean(0) > _LEAST_SIZE**2
        if along.sum() < _LEAST_ROWS or not across.any():
            return super()._rounding(weights)
        by_row, by_column = squares[along][:, across].mean(1), squares[along].mean(0)
        by_column /= by_column[across].mean()
        deviations = (by_row[:, None] * by_column).sqrt()

        def rounded(column: int, values: Tensor) -> Tensor:
            points = nearest(column, values)
            if across[column]:
                chained, deviation = values[along], deviations[:, column]
                shift = (_ERROR / deviation * (chained / deviation).clamp(-1, 1)).nan_to_num(0)
                chained = chained - shift.clamp(-chained.abs(), chained.abs())
                points[along] = torch.from_numpy(self._nearest_path(chained.clamp(-_LARGEST, _LARGEST).numpy()))
            return points

        return rounded

    def _arrays(
        self, points: Tensor, row_steps: Tensor, column_steps: Tensor, step: float, shape: tuple[int, ...]
    ) -> Arrays:
        # k + 1/4 is stored as k, and so is -(k + 1/4).
        integers = torch.where(points - points.floor() > 0.5, -points.ceil(), points.floor())
        chained = integers != points
        both = torch.cat([chained.any(1), chained.any(0)]).to(torch.uint8).numpy()
        return {**super()._arrays(integers, row_steps, column_steps, step, shape), "chained": both}

    def _nearest_path(self, values: Floats) -> Floats:
        """Return the points, in steps, of the allowed paths that have the least squared distance to the values."""
        stride = -(-len(values) // CHAIN)
        length = -(-len(values) // stride)
        padded = np.zeros(length * stride, np.float32)
        padded[: len(values)] = values
        signs = np.array([[1], [-1], [1], [-1]], np.float32)  # by branch
        points = np.array([[0], [0], [1], [1]], np.float32) + np.float32(0.25)
        points = (2 * np.rint((signs * padded - points) / 2) + points) * signs
        costs = (padded - points) ** 2
        costs[:, len(values) :] = 0
        taken = best_path(np.ascontiguousarray(costs.reshape(4, length, stride).transpose(1, 0, 2)), self.states)
        found: Floats = np.take_along_axis(points, taken.reshape(1, -1), 0)[0, : len(values)]
        return found

    def _parities(self, integers: Array) -> Array:
        """Return the parity of the state before each integer of a matrix whose columns are chains."""
        followers, stride = convolutional_code(self.states).followers, max(1, -(-len(integers) // CHAIN))
        found = np.zeros((len(integers) + stride, integers.shape[1]), np.uint8)
        for top in range(0, len(integers), stride):
            block = integers[top : top + stride] & 1
            found[top + stride : top + stride + len(block)] = followers[found[top : top + len(block)], block]
        return found[: len(integers)] & 1
