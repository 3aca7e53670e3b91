"""A forecast of the artifact before and during training: its bytes, and what quantization will cost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from caddie.compress import Compress, Readers
from caddie.container import Section
from caddie.decompress import LENGTH_BYTES, PREFIX
from caddie.drafts import Draft, Drafts, StoredWeight
from caddie.fit import FillCap, PruneOnes
from caddie.model import GPT
from caddie.parameters import assign, declarations
from caddie.quantize import Arrays, LowRank, Quantizer, Waterfilling
from caddie.schedules import Moment

Floats = npt.NDArray[np.float64]

_TIMES = 20
"""Forecasts over the budget, where they are quick enough."""
_CLOCK_SHARE = 0.004
"""Part of the time so far that may have gone into them."""
_SAMPLE = 1 << 18
"""Weights that are looked at of a group of tensors of the same shape and quantizer, whose rows are then coded together:
in all about those of one tensor, because a coder learns as it goes."""
_LEAST_ROWS = 8
_LEAST_ENTROPY = 1 / 16  # of an array's bytes: less is not what decides how many it takes
_REMEMBERED = 5
"""Gradients that the average of their squares goes back to."""
_UNTRAINED_NATS = 5.0
"""What losing all weights would cost by the second order, as long as no gradient is known: 4.4 to 4.8 nats per token in
three of four trained mini models, 24 in one. A half is for tables, a half for all else."""
_TABLE_BITS, _MATRIX_BITS = 0.1, 0.3
"""Bits a weight saved because later columns take up the errors of those before: 0.03 to 0.18 in tables and 0.2 to 0.5
in most matrices of these models."""
_STEP_BITS = 4.0
"""What the step of a row or column of `Waterfilling` takes in the file, about."""
_PER_OCTAVE, _LEAST_OCTAVE, _MOST_OCTAVE = 8, -60, 20  # deviations of Gaussian weights
_FEW_STEPS, _MANY_STEPS = -8, 4  # octaves of a deviation in steps beyond which nothing need be integrated


@dataclass(frozen=True)
class Forecast:
    """What the file would be if training ended now."""

    file_bytes: int
    gap_nats: float
    """Nats per token that quantization is expected to cost."""


class Forecaster:
    """Watches the weights and the gradients of a run.

    Sizes come from a sample of the rows of each weight, quantized as the recipe says and coded as it says, or by the
    entropy of what would be coded and what the coder made of the entropy the last time. What an error costs comes from
    gradients that the training has at hand: the squared gradient of a loss summed over N tokens is about N times the
    diagonal of the Fisher information, as long as tokens differ more than they agree. It is kept as a number for each
    row and each column (Adafactor, arXiv 1804.04235). Weights for `Waterfilling` are not rounded but counted as
    Gaussian, each with the deviation of its row and column.
    """

    def __init__(self, gpt: GPT, config: Compress, size: Callable[[Readers, list[Section]], int]) -> None:
        """`size` gives the bytes of the whole file that holds sections of weights."""
        with torch.device("meta"):
            model = gpt.build()
        self.config = config
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self.tables = {name for name, declared in declarations(model).items() if declared.role == "embedding"}
        self.quantizers = assign(config.quantizers, model, "compress.quantizers")
        readers = {rule: quantizer.reader for rule, quantizer in config.quantizers.items()}
        if config.correction is not None:  # of which matrices will be seen; here of the largest
            matrices = [name for name, shape in self.shapes.items() if len(shape) == 2]
            for name in sorted(matrices, key=lambda name: -math.prod(self.shapes[name]))[: config.correction.matrices]:
                self.quantizers[name] = LowRank(of=self.quantizers[name], rank=config.correction.rank)
                readers[name] = self.quantizers[name].reader
        # Checksums and lengths of the sections do not compress: names stand in for what would be in them.
        sections = [Section(PREFIX + name, name.encode()) for name in self.shapes]
        self.fixed_bytes = size(readers, sections) - sum(len(section.data) for section in sections) + 2 * len(sections)
        self.groups: dict[tuple[Quantizer, tuple[int, ...]], list[str]] = {}
        """Names of the weights of one shape and quantizer."""
        for name, quantizer in self.quantizers.items():
            self.groups.setdefault((quantizer, self.shapes[name]), []).append(name)
        self.ratios: dict[tuple[str, ...], tuple[dict[str, float], float]] = {}
        """Bytes of the coded arrays over their entropy, and seconds that it took to find out, of each group, the one
        that was looked at longest ago first."""
        self.squares: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        """Fisher information of rows and of columns, and how many rows a gradient reached, on the device."""
        self._gradients = self._place = 0
        self._spent = self._cost = 0.0

    def due(self, moment: Moment) -> bool:
        """Whether another twentieth of the budget has passed and there is time to `observe`."""
        before, self._place = self._place, int(moment.progress * _TIMES + 1e-9)
        return self._place > before and self._spent <= _CLOCK_SHARE * moment.seconds

    def affordable(self, moment: Moment) -> bool:
        """Whether the clock would hardly notice a forecast."""
        return self._spent + self._cost <= _CLOCK_SHARE * moment.seconds

    @torch.no_grad()
    def observe(self, parameters: Mapping[str, nn.Parameter], factor: float) -> None:
        """Take in gradients; `factor` times their squares is the Fisher information per token."""
        began = time.perf_counter()
        self._gradients += 1
        share = 1.0 / min(self._gradients, _REMEMBERED)
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                squares = _matrix(parameter.grad).float().square()
                rows, columns = squares.sum(1) * factor, squares.sum(0) * factor
                new = (rows, columns, (rows > 0).float().sum())
                before = self.squares.get(name, new)
                self.squares[name] = tuple(old.lerp(one, share) for old, one in zip(before, new, strict=True))  # type: ignore[assignment]
        self._spent += time.perf_counter() - began

    @torch.no_grad()
    def forecast(self, weights: Mapping[str, Tensor], seconds: float = 0.0, anew: bool = False) -> Forecast:
        """The file that these weights would make, on the clock after so many seconds.

        With `anew` it is off the clock and codes all that it looks at, which may take seconds.
        """
        began, allowed = time.perf_counter(), _CLOCK_SHARE * seconds
        if anew:
            self.ratios.clear()
        elif self.ratios:
            stalest = next(iter(self.ratios))
            if self._spent + self._cost + self.ratios[stalest][1] <= allowed:
                del self.ratios[stalest]
        sketches, fit = _Sketches(self, weights), self.config.fit
        if isinstance(fit, FillCap):
            draft = fit.fit(sketches, self.quantizers, self.config.cap_bytes).draft
        else:
            draft = sketches.make(self.quantizers)
        if not anew:
            spent = time.perf_counter() - began
            self._cost, self._spent = spent - sketches.coding_seconds, self._spent + spent
        size = min(draft.file_bytes, self.config.cap_bytes) if isinstance(fit, PruneOnes) else draft.file_bytes
        return Forecast(size, draft.predicted_loss or 0.0)

    def costs(self, name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Diagonals of R and C (see `Calibration`) of all rows and columns of a weight like `weight`."""
        height, width = _matrix(torch.empty(self.shapes[name], device="meta")).shape
        if name not in self.squares:
            alike = sum(
                math.prod(self.shapes[other])
                for other in self.shapes
                if (other in self.tables) == (name in self.tables)
            )
            mean = _UNTRAINED_NATS / alike / float(weight.square().mean().clamp_min(1e-20))
            return torch.full((height,), mean), torch.ones(width)
        rows, columns, reached = (tensor.cpu() for tensor in self.squares[name])
        total = rows.sum().clamp_min(1e-30)
        # A row that no token of the sample needed is not free; as in calibrating.
        floored = rows + total / (reached * min(self._gradients, _REMEMBERED)).clamp_min(1.0)
        return floored * (total / floored.sum()) / width, columns * (width / total)


class _Sketches(Drafts):
    """Drafts whose sizes and losses are estimates, and which hold no arrays."""

    def __init__(self, of: Forecaster, weights: Mapping[str, Tensor]) -> None:
        self.strides = dict.fromkeys(of.shapes, 1)
        for (_, shape), names in of.groups.items():
            if len(shape) > 1:
                wanted = max(len(names), -(-math.prod(shape) * len(names) // _SAMPLE))
                self.strides |= dict.fromkeys(names, max(1, min(wanted, shape[0] // _LEAST_ROWS)))
        sampled = {
            name: weights[name][:: self.strides[name]] if shape else weights[name] for name, shape in of.shapes.items()
        }
        super().__init__(
            sampled, {}, of.config.coding, lambda sections: of.fixed_bytes + sum(len(one.data) for one in sections)
        )
        self.of = of
        self.coding_seconds = 0.0
        generator = torch.Generator().manual_seed(0)
        self.weights = {name: _moved(weight, generator) for name, weight in self.weights.items()}
        self.costs = {name: self._costs(name, weight) for name, weight in self.weights.items()}
        self._gaussians: dict[str, Floats] = {}

    def make(self, quantizers: Mapping[str, Quantizer]) -> Draft:
        """The draft with these quantizers, by parameter name."""
        made = {}
        for names in self.of.groups.values():
            if isinstance(quantizers[names[0]], Waterfilling):
                found = {name: self._waterfilled(name, quantizers[name]) for name in names}
            else:
                found = self._rounded({name: quantizers[name] for name in names})
            for name, (size, loss) in found.items():
                section = Section(PREFIX + name, bytes(round(size)))
                made[name] = StoredWeight(quantizers[name], {}, self.weights[name], section, 0.0, loss)
        return self._draft(made)

    def _costs(self, name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = self.of.costs(name, weight)
        return rows[:: self.strides[name]], columns

    def _saved(self, name: str) -> float:
        if len(self.of.shapes[name]) < 2:
            return 0.0
        return _TABLE_BITS if name in self.of.tables else _MATRIX_BITS

    def _rounded(self, quantizers: Mapping[str, Quantizer]) -> dict[str, tuple[float, float]]:
        """Bytes and nats of a group by quantizing the sample."""
        drafts = {name: quantizer.quantize(self.weights[name]) for name, quantizer in quantizers.items()}
        ratios = self._ratios(drafts)
        found = {}
        for name, quantizer in quantizers.items():
            weight, shape, size = self.weights[name], self.of.shapes[name], 0.0
            whole = quantizer.layout(shape)
            for key, array in drafts[name].items():
                share = math.prod(whole[key][1]) / max(array.size, 1)
                size += LENGTH_BYTES + ratios[key] * _entropy_bytes(array) * share
            rows, columns = self.costs[name]
            errors = _matrix(quantizer.dequantize(drafts[name], tuple(weight.shape)) - weight).square()
            loss = 0.5 * float(rows @ errors @ columns) * math.prod(shape) / max(weight.numel(), 1)
            found[name] = (size, loss * 2.0 ** (-2 * self._saved(name)) if quantizer.calibrated else loss)
        return found

    def _ratios(self, drafts: Mapping[str, Arrays]) -> dict[str, float]:
        """Bytes over entropy for each array of a group; sampled rows of several tensors are coded as those of one."""
        group = tuple(drafts)
        if group not in self.of.ratios:
            began = time.perf_counter()
            ratios = {}
            for key, first in drafts[group[0]].items():
                arrays = [arrays[key] for arrays in drafts.values()]
                streams = arrays if self.strides[group[0]] == 1 or not first.ndim else [np.concatenate(arrays)]
                coded = sum(len(self._coding.encode(array)) for array in streams)
                ratios[key] = coded / sum(map(_entropy_bytes, arrays))
            seconds = time.perf_counter() - began
            self.coding_seconds += seconds
            self.of.ratios[group] = ratios, seconds
        return self.of.ratios[group][0]

    def _waterfilled(self, name: str, quantizer: Quantizer) -> tuple[float, float]:
        """Bytes and nats of the steps that cost alike, from how many weights have which deviation."""
        assert isinstance(quantizer, Waterfilling)
        if name not in self._gaussians:
            self._gaussians[name] = self._deviations(name)
        counts = self._gaussians[name]
        octaves = _octaves() - math.log2(quantizer.step)
        bits, errors = _gaussian(octaves)
        height, width = _matrix(self.weights[name]).shape
        sides = (height * self.strides[name] + width) * _STEP_BITS
        return float(counts @ bits + sides) / 8 + 3 * LENGTH_BYTES, 0.5 * quantizer.step**2 * float(counts @ errors)

    def _deviations(self, name: str) -> Floats:
        """How many weights of the whole tensor have each of `_octaves`, counted so that a step costs 1/2 nat."""
        rows, columns = self.costs[name]
        energy = rows[:, None] * _matrix(self.weights[name]).square() * columns
        over = energy.sum(1).clamp_min(2.0**-100).log2(), energy.sum(0).clamp_min(2.0**-100).log2()
        total = energy.sum().clamp_min(2.0**-100).log2()
        octaves = 0.5 * (over[0][:, None] + over[1] - total) - self._saved(name)
        places = ((octaves - _LEAST_OCTAVE) * _PER_OCTAVE).round().long().clamp(0, len(_octaves()) - 1)
        found = torch.bincount(places.reshape(-1), minlength=len(_octaves())).double().numpy()
        return np.asarray(found * (math.prod(self.of.shapes[name]) / max(places.numel(), 1)))


def _moved(weight: Tensor, generator: torch.Generator) -> Tensor:
    """The weight with rows that are constant, as they only are before training, drawn as most others are."""
    if not weight.numel():
        return weight
    rows = weight.reshape(-1, weight.shape[-1]) if weight.ndim > 1 else weight.reshape(1, -1)
    constant = rows.amax(1) == rows.amin(1)
    if not bool(constant.any()):
        return weight
    noise = torch.randn(rows.shape, generator=generator) * (3 * rows.shape[1]) ** -0.5
    return torch.where(constant[:, None], rows + noise, rows).reshape(weight.shape)


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, 1) if tensor.ndim < 2 else tensor.flatten(1)


def _entropy_bytes(array: npt.NDArray[np.generic]) -> float:
    """Bytes of the array if each of an element's bytes were coded by how common it is; never next to nothing."""
    bits = 0.0
    for plane in np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(-1, array.itemsize).T:
        counts = np.bincount(plane)
        counts = counts[counts > 0]
        bits += float(counts @ (math.log2(max(plane.size, 1)) - np.log2(counts)))
    return max(bits / 8, _LEAST_ENTROPY * array.nbytes, 1.0)


def _octaves() -> Floats:
    return np.arange(_LEAST_OCTAVE * _PER_OCTAVE, _MOST_OCTAVE * _PER_OCTAVE + 1) / _PER_OCTAVE


def _gaussian(octaves: Floats) -> tuple[Floats, Floats]:
    """Bits, and mean squared error in steps, of Gaussian numbers whose deviation is 2^octaves steps, when rounded."""
    table, bits, errors = _rounded()
    many, few = octaves > _MANY_STEPS, octaves < _FEW_STEPS
    found = np.where(few, 0.0, np.interp(octaves, table, bits))
    fine = octaves + 0.5 * math.log2(2 * math.pi * math.e)
    coarse = np.where(few, 4.0 ** np.minimum(octaves, 0), np.interp(octaves, table, errors))
    return np.where(many, fine, found), np.where(many, 1 / 12, coarse)


@cache
def _rounded() -> tuple[Floats, Floats, Floats]:
    """The curves of `_gaussian` at a sixteenth of an octave apart."""
    octaves = torch.arange(16 * _FEW_STEPS, 16 * _MANY_STEPS + 1, dtype=torch.float64) / 16
    deviations = 2.0 ** octaves[:, None]
    integers = torch.arange(-160, 161, dtype=torch.float64)
    edges = torch.cat([integers - 0.5, integers[-1:] + 0.5]) / deviations
    odds = torch.special.ndtr(edges).diff(dim=1)
    density = (-0.5 * edges.square()).exp() / math.sqrt(2 * math.pi)
    means = -deviations * density.diff(dim=1)  # of the part of each integer
    errors = deviations[:, 0] ** 2 - 2 * (means @ integers) + odds @ integers.square()
    bits = -torch.xlogy(odds, odds).sum(1) / math.log(2)
    return octaves.numpy(), bits.numpy(), errors.numpy()
