"""Choice of the steps of rows of integers: quantiles (clipping) and standard deviations (SDClip)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from caddie.config import Config, Fraction, Positive, Range
from caddie.errors import UserError
from caddie.pack.quantize.quantizer import Calibration, Rounding

LARGEST_STEP = 65_504
"""The largest number in half precision."""


@dataclass(frozen=True)
class Grid:
    """A step for each row: its integers are round(clamp(weight / step, ±limit))."""

    steps: Tensor
    """(rows,), float32, above 0."""
    limits: Tensor
    """Clip of each row in units of its step, (rows,)."""

    def clipped(self, rows: Tensor) -> Tensor:
        """Return clipped weights in units of their row's step, (rows, columns)."""
        limits = self.limits[:, None]
        return (rows / self.steps[:, None]).clamp(-limits, limits)


class Scale(Config):
    """Socket: the choice of each row's step."""

    @property
    def calibrated(self) -> bool:
        """True if the steps depend on `Calibration.inputs`."""
        return False

    def coarser(self, factor: float) -> Scale:
        """Return the same for steps `factor` times as large, or itself if they follow from the weights alone."""
        return self

    @abstractmethod
    def grids(self, rows: Tensor, largest: int, stored: Rounding, calibration: Calibration) -> list[Grid]:
        """Return one or several candidates for rows (rows, columns), float32, and integers up to `largest`.

        `stored` rounds steps to the number format they are stored in. Of several candidates the quantizer takes the one
        with the least squared error over the whole matrix, the first of equals.
        """


Floor = Literal["relative", "absolute"]


class Percentile(Scale):
    """The largest integer stands for a quantile of the row's |weight|, as in the contest's baseline.

    The baseline's script is `Percentile(floor="absolute")`. That floor, 1/127 for every row, destroys models whose
    weights are small; the default floor follows the tensor's own largest step instead.
    """

    fraction: Annotated[float, Range(0.5, 1.0)] = 0.9999984
    """Quantile of |weight| that maps to the largest integer; weights beyond it are clipped."""
    floor: Floor = "relative"
    """Least step: 1/1024 of the tensor's largest step (relative), or the scripts' 1/(largest integer) (absolute)."""

    def grids(self, rows: Tensor, largest: int, stored: Rounding, calibration: Calibration) -> list[Grid]:
        clip = _quantile(rows.abs(), self.fraction)
        steps = _at_least(clip / largest, largest, self.floor)
        if self.floor == "relative":  # integers that fit the step as stored; the scripts round the step afterwards
            steps = stored(steps)
        return [Grid(steps, (clip / steps).clamp(max=largest))]


class BestPercentile(Scale):
    """`Percentile` with the quantile, one of five for the whole matrix, that has the least squared error.

    The records' scripts are `BestPercentile(floor="absolute")`.
    """

    fractions: tuple[Annotated[float, Range(0.5, 1.0)], ...] = (0.999, 0.9995, 0.9999, 0.99999, 1.0)
    """Quantiles to try."""
    floor: Floor = "relative"
    """Least step, as in `Percentile`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.fractions:
            raise UserError("BestPercentile has no quantile to try; name some in `fractions`, as in [0.999, 1.0]")

    def grids(self, rows: Tensor, largest: int, stored: Rounding, calibration: Calibration) -> list[Grid]:
        clips = [_quantile(rows.abs(), fraction) for fraction in self.fractions]
        steps = [stored(_at_least(clip / largest, largest, self.floor)) for clip in clips]
        return [Grid(each, torch.full_like(each, largest)) for each in steps]


class SigmaClip(Scale):
    """The largest integer stands for k standard deviations of the row: openai/parameter-golf, 2026-04-05 SDClip.

    With k as large as in the records nothing is clipped. It is a uniform quantizer for an entropy coder, and doubling k
    saves about one bit per weight.
    """

    k: Positive = 12.85
    """Standard deviations that map to the largest integer."""
    importance: Fraction = 0.0
    """Strength λ of the row's importance i: clips are multiplied by 1 + λ(i - 1). Importance is the row's mean of
    |weight| times the mean square of that weight's input, divided by its average over rows; 1 without calibration."""

    @property
    def calibrated(self) -> bool:
        return self.importance > 0

    def coarser(self, factor: float) -> SigmaClip:
        return self.but(k=self.k * factor)

    def grids(self, rows: Tensor, largest: int, stored: Rounding, calibration: Calibration) -> list[Grid]:
        """Return one candidate. The clip is at least the row's |mean|, so that constant rows survive."""
        spread = rows.new_zeros(len(rows))
        if rows.numel():
            deviation = rows.std(dim=1, correction=min(1, rows.shape[1] - 1))
            spread = torch.maximum(self.k * deviation, rows.mean(1).abs())
        if self.importance and calibration.inputs is not None:
            squares = calibration.inputs.diagonal().to(rows)
            important = (rows.abs() * squares).mean(1)
            spread = spread * (1 + self.importance * (important / important.mean().clamp_min(1e-30) - 1))
        # the scripts' floor, 1e-10, is 0 in half precision; this is the smallest half
        steps = stored((spread / largest).nan_to_num(nan=LARGEST_STEP).clamp(2.0**-24, LARGEST_STEP))
        return [Grid(steps, torch.full_like(steps, largest))]


def _at_least(steps: Tensor, largest: int, floor: Floor) -> Tensor:
    if floor == "absolute":
        return steps.clamp(1.0 / largest, LARGEST_STEP)
    widest = steps.amax() if len(steps) else steps.new_zeros(())
    # 2^-20 is a safe distance above the smallest half
    return torch.maximum(steps, (widest / 1024).clamp_min(2.0**-20)).clamp(max=LARGEST_STEP)


def _quantile(rows: Tensor, fraction: float) -> Tensor:
    """Return `torch.quantile(rows, fraction, dim=1)` by sorting only the largest few of each row; 0 for empty rows."""
    if not rows.numel():
        return rows.new_zeros(len(rows))
    last = rows.shape[1] - 1
    below = int(fraction * last)
    largest = rows.topk(last + 1 - below, dim=1).values
    weight = torch.full((), fraction, device=rows.device) * last - below  # in float32, as in `torch.quantile`
    return largest[:, -1].lerp(largest[:, max(last - below - 1, 0)], weight)
