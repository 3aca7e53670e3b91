"""Forecast the artifact before and during training: its bytes, and the loss that quantization adds."""

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from caddie.config.schedules import TrainProgress
from caddie.model import GPT
from caddie.model.parameters import assign, declarations
from caddie.pack.calibrate import as_matrix, floored
from caddie.pack.candidates import Candidate, Candidates, StoredWeight
from caddie.pack.compress import Dequantizers, Pack
from caddie.pack.container import Section
from caddie.pack.decompress import LENGTH_BYTES, PREFIX
from caddie.pack.fit import FillCap, PruneOnes
from caddie.pack.quantize import Arrays, Quantizer, WaterfillingSteps
from caddie.pack.quantize.quantizer import as_rows

Floats = npt.NDArray[np.float64]

_TIMES = 20  # forecasts over the budget, where they are quick enough
_FORECAST_SHARE, _CODING_SHARE, _OBSERVE_SHARE = 0.002, 0.001, 0.001
"""Largest parts of the training time so far: for forecasts, for coding in them, and for reading gradients."""
_SAMPLE = 1 << 18
"""Weights to sample from a group of tensors of one shape and quantizer. The sampled rows are coded together, about as
many as one tensor has, because a coder adapts as it codes."""
_PREFIX = 1 << 13  # first elements of an array that are coded on the clock
_LEAST_ROWS = 8
_LEAST_ENTROPY = 1 / 16  # of an array's bytes: below that, its coded size depends on other things than entropy
_MEMORY = 0.25  # part of the run so far that squared gradients are averaged over: the early ones are much larger
_UNTRAINED_NATS = 5.0
"""Nats per token that losing all weights is assumed to cost, to second order, until a gradient is known. It was 4.4 to
4.8 in three of four trained mini models, 24 in one. Half of it is for tables, half for all else."""
_TABLE_BITS, _MATRIX_BITS = 0.1, 0.3
"""Bits saved per weight because later columns compensate the errors of earlier ones: 0.03 to 0.18 in tables and 0.2 to
0.5 in most matrices of these models."""
_STEP_BITS = 4.0  # bits that the step of a row or column of `Waterfilling` takes in the file, about
_SURELY, _PERHAPS = 1.02, 0.99  # parts of the cap from which a file is too big, surely or perhaps
_PER_OCTAVE, _LEAST_OCTAVE, _MOST_OCTAVE = 8, -60, 20  # grid of deviations of Gaussian weights
_OCTAVES = np.arange(_LEAST_OCTAVE * _PER_OCTAVE, _MOST_OCTAVE * _PER_OCTAVE + 1) / _PER_OCTAVE
_FEW_STEPS, _MANY_STEPS = -8, 4  # octaves of a deviation in steps beyond which nothing need be integrated


@dataclass(frozen=True)
class _Ratios:
    """Bytes of coded arrays over their entropy, by array."""

    whole: dict[str, float]
    prefix: dict[str, float]
    """The same for the first elements of the arrays alone."""
    seconds: float
    """Seconds that coding the first elements took."""


class Forecaster:
    """Forecasts from the weights and gradients of a run.

    Sizes come from a sample of the rows of each weight, quantized as in the recipe. The sample is coded, or its size is
    its entropy times the ratio of bytes to entropy when it was last coded. The cost of an error comes from gradients of
    the training: if the loss is summed over N tokens, the variance of its gradient is about N times the diagonal of the
    Fisher information. The squared gradient also has N² times the squared mean gradient, so the variance is taken from
    the difference of two steps. It is kept as one number for each row and each column (Adafactor, arXiv 1804.04235).
    Weights for `Waterfilling` are not rounded but counted as Gaussian, with the deviation of their row and column.
    """

    def __init__(self, gpt: GPT, config: Pack, size: Callable[[Dequantizers, list[Section]], int]) -> None:
        """Take `size`, which returns the bytes of the whole file that holds given sections of weights."""
        model = gpt.outline()
        self.config = config
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self.tables = {name for name, declared in declarations(model).items() if declared.role == "embedding"}
        self.quantizers = assign(config.quantizers, model, "pack.quantizers")
        dequantizers = {rule: quantizer.dequantizer for rule, quantizer in config.quantizers.items()}
        if config.correction is not None:  # packing chooses the matrices; here the largest
            matrices = config.correction.eligible(dict(model.named_parameters()), self.quantizers)
            for name in sorted(matrices, key=lambda name: -math.prod(self.shapes[name]))[: config.correction.matrices]:
                self.quantizers[name] = config.correction.of(self.quantizers[name])
                dequantizers[name] = self.quantizers[name].dequantizer
        # Checksums and lengths of the sections do not compress: names stand in for their contents.
        sections = [Section(PREFIX + name, name.encode()) for name in self.shapes]
        self.fixed_bytes = size(dequantizers, sections) + sum(2 - len(section.data) for section in sections)
        self.groups: dict[tuple[Quantizer, tuple[int, ...]], list[str]] = {}
        """Names of the weights of one shape and quantizer."""
        for name, quantizer in self.quantizers.items():
            self.groups.setdefault((quantizer, self.shapes[name]), []).append(name)
        self.ratios: dict[tuple[str, ...], _Ratios] = {}  # of each group; the one measured longest ago first
        self.squares: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        """Fisher information of rows and of columns, and how many rows a gradient reached, on the device."""
        self.learned: Collection[str] = ()
        """Names of the weights that training sees quantized; quantizing them adds no loss."""
        self._first: dict[str, Tensor] | None = None  # gradients of the first step of a pair
        self._gradients = 0.0  # number of gradients in the average, by weight
        self._now = self._observed = 0.0
        self._spent = self._coding = self._observing = self._cost = 0.0
        self._warned = False

    def due(self, train_progress: TrainProgress) -> bool:
        """Return True if another twentieth of the budget has passed, and there is time to `observe` two steps."""
        before, now = int(self._now * _TIMES), int(train_progress.progress * _TIMES)
        self._now = train_progress.progress
        if self._first is not None:
            return True
        # The last forecast is always made, because earlier ones say little about the end.
        return now > before and (self._observing <= _OBSERVE_SHARE * train_progress.seconds or now == _TIMES - 1)

    def affordable(self, train_progress: TrainProgress) -> bool:
        """Return True if a forecast would take a negligible share of the time so far."""
        return self._first is None and self._spent + self._cost <= _FORECAST_SHARE * train_progress.seconds

    @torch.no_grad()
    def observe(self, parameters: Mapping[str, Tensor], factor: float) -> None:
        """Take in gradients; `factor` times their variance is the Fisher information per token.

        Calls come in pairs, for two nearby steps; the second of a pair updates the running averages.
        """
        began = time.perf_counter()
        gradients = {
            name: as_matrix(parameter.grad).float() * math.sqrt(factor)
            for name, parameter in parameters.items()
            if parameter.grad is not None
        }
        if self._first is None:
            self._first = gradients
        else:
            share = -math.expm1((self._observed - self._now) / max(_MEMORY * self._now, 1e-6))
            self._observed, self._gradients = self._now, 1.0 + (1.0 - share) * self._gradients
            for name in gradients.keys() & self._first.keys():
                squares = (gradients[name] - self._first[name]).square() / 2
                rows, columns = squares.sum(1), squares.sum(0)
                new = (rows, columns, (rows > 0).float().sum())
                before = self.squares.get(name, new)
                self.squares[name] = tuple(old.lerp(one, share) for old, one in zip(before, new, strict=True))  # type: ignore[assignment]
            self._first = None
        self._observing += time.perf_counter() - began

    def events(
        self, weights: Mapping[str, Tensor], train_progress: TrainProgress, anew: bool = False
    ) -> list[dict[str, Any]]:
        """Return a `forecast` event, and a note the first time that the file is too big, perhaps or surely."""
        found = self.forecast(weights, train_progress.seconds, anew)
        fit, cap = self.config.fit, self.config.cap_bytes
        sizes = {"file_bytes": found.file_bytes, "cap_bytes": cap, "gap": found.predicted_loss}
        where = {"step": train_progress.step, "progress": round(train_progress.progress, 6)}
        event = {"event": "forecast", **sizes, **where}
        if self._warned or found.file_bytes <= (_PERHAPS if fit is None else _SURELY) * cap:
            return [event]
        self._warned = True
        way = "a smaller model or a larger pack.cap_bytes"
        if not isinstance(fit, FillCap):
            stepped = any(quantizer.coarser(2.0) != quantizer for quantizer in self.quantizers.values())
            finer = "pack.quantizers of fewer bits, Waterfilling with pack.fit=FillCap"
            way = f"{'pack.fit=FillCap' if stepped else finer}, or {way}"
        over = found.file_bytes - cap
        size = f"{'over the cap by ' if over > 0 else ''}about {abs(over):,} bytes"
        size += "" if over > 0 else " under the cap, and may exceed it"
        return [event, {"event": "note", "text": f"the artifact would be {size}; set {way}"}]

    @torch.no_grad()
    def forecast(self, weights: Mapping[str, Tensor], seconds: float = 0.0, anew: bool = False) -> Candidate:
        """Forecast bytes and loss of these weights' file, on the clock after `seconds`; the candidate has no arrays.

        With `anew`, off the clock, it codes all samples again, which may take seconds.
        """
        began = time.perf_counter()
        if anew:
            self.ratios.clear()
        estimates, fit = _Estimates(self, weights, _CODING_SHARE * seconds - self._coding), self.config.fit
        if isinstance(fit, FillCap):
            candidate = fit.fit(estimates, self.quantizers, self.config.cap_bytes).candidate
        else:
            candidate = estimates.make(self.quantizers)
        self._cost = time.perf_counter() - began - estimates.coding_seconds
        if not anew:
            self._spent, self._coding = self._spent + self._cost, self._coding + estimates.coding_seconds
        if isinstance(fit, PruneOnes):  # which prunes until the file fits
            candidate = replace(candidate, file_bytes=min(candidate.file_bytes, self.config.cap_bytes))
        return candidate

    def costs(self, name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the diagonals of R and C (see `Calibration`) of a weight like `weight`."""
        height, width = as_matrix(torch.empty(self.shapes[name], device="meta")).shape
        if name not in self.squares:
            table = name in self.tables
            alike = sum(math.prod(shape) for other, shape in self.shapes.items() if (other in self.tables) == table)
            mean = _UNTRAINED_NATS / alike / float(weight.square().mean().clamp_min(1e-20))
            return torch.full((height,), mean), torch.ones(width)
        rows, columns, reached = (tensor.cpu() for tensor in self.squares[name])
        total = rows.sum().clamp_min(1e-30)
        return floored(rows, reached * self._gradients) / width, columns * (width / total)


class _Estimates(Candidates):
    """Candidates with estimated sizes and losses, and without arrays."""

    def __init__(self, of: Forecaster, weights: Mapping[str, Tensor], spare_seconds: float) -> None:
        self.renewed = next((group for group, known in of.ratios.items() if known.seconds <= spare_seconds), None)
        """Group of weights whose compression is measured again, if there is time."""
        self.strides = dict.fromkeys(of.shapes, 1)
        for (_, shape), names in of.groups.items():
            if len(shape) > 1 and math.prod(shape) * len(names) > _SAMPLE // 4:
                wanted = max(len(names), -(-math.prod(shape) * len(names) // _SAMPLE))
                self.strides |= dict.fromkeys(names, max(1, min(wanted, shape[0] // _LEAST_ROWS)))
        sampled = {
            name: weights[name][:: self.strides[name]] if of.shapes[name] else weights[name] for name in of.shapes
        }
        super().__init__(
            sampled, {}, of.config.coding, lambda ones: of.fixed_bytes + sum(len(one.data) for one in ones)
        )
        self.of, self.coding_seconds = of, 0.0
        generator = torch.Generator().manual_seed(0)
        self.weights = {name: _moved(weight, generator) for name, weight in self.weights.items()}
        self.costs = {}
        for name, weight in self.weights.items():
            rows, columns = of.costs(name, weight)
            self.costs[name] = rows[:: self.strides[name]], columns
        self._gaussians: dict[str, Floats] = {}

    def make(self, quantizers: Mapping[str, Quantizer]) -> Candidate:
        made = {}
        for names in self.of.groups.values():
            if isinstance(quantizers[names[0]], WaterfillingSteps):
                found = {name: self._waterfilled(name, quantizers[name]) for name in names}
            else:
                found = self._rounded({name: quantizers[name] for name in names})
            for name, (size, loss) in found.items():
                section = Section(PREFIX + name, bytes(round(size)))
                loss = 0.0 if name in self.of.learned else loss
                made[name] = StoredWeight(quantizers[name], {}, self.of.shapes[name], section, 0.0, loss)
        return self._candidate(made)

    def _saved(self, name: str) -> float:
        bits = _TABLE_BITS if name in self.of.tables else _MATRIX_BITS
        return bits if len(self.of.shapes[name]) > 1 else 0.0

    def _rounded(self, quantizers: Mapping[str, Quantizer]) -> dict[str, tuple[float, float]]:
        """Return bytes and nats of each weight of a group, from its quantized sample."""
        quantized = {name: quantizer.quantize(self.weights[name]) for name, quantizer in quantizers.items()}
        ratios = self._ratios(quantized)
        found = {}
        for name, quantizer in quantizers.items():
            weight, shape, size = self.weights[name], self.of.shapes[name], 0.0
            whole = quantizer.layout(shape)
            for key, array in quantized[name].items():
                share = math.prod(whole[key][1]) / max(array.size, 1)
                size += LENGTH_BYTES + ratios[key] * _entropy_bytes(array) * share
            rows, columns = self.costs[name]
            errors = as_matrix(quantizer.dequantize(quantized[name], tuple(weight.shape)) - weight).square()
            loss = 0.5 * float(rows @ errors @ columns) * math.prod(shape) / max(weight.numel(), 1)
            found[name] = (size, loss * 2.0 ** (-2 * self._saved(name)) if quantizer.calibrated else loss)
        return found

    def _ratios(self, quantized: Mapping[str, Arrays]) -> dict[str, float]:
        """Return bytes over entropy for each array of a group; sampled rows are coded as one tensor."""
        group = tuple(quantized)
        known = self.of.ratios.get(group)
        if known is None or self.renewed == group:
            began = time.perf_counter()
            prefix = self._coded(quantized, _PREFIX)
            seconds = time.perf_counter() - began
            if known is None:
                whole = self._coded(quantized)
            else:  # a prefix takes more than its share of bytes, each time alike
                whole = {key: known.whole[key] * prefix[key] / known.prefix[key] for key in prefix}
            self.of.ratios.pop(group, None)
            self.of.ratios[group] = known = _Ratios(whole, prefix, seconds)
            self.renewed = None
            self.coding_seconds += time.perf_counter() - began
        return known.whole

    def _coded(self, quantized: Mapping[str, Arrays], most: int | None = None) -> dict[str, float]:
        """Return coded bytes over entropy of a group's arrays, or of about the first `most` elements alone."""
        ratios, first = {}, next(iter(quantized))
        for key in quantized[first]:
            arrays = [np.atleast_1d(arrays[key]) for arrays in quantized.values()]
            together = np.concatenate(arrays)
            if most is not None:
                arrays = [together[: max(1, most * len(together) // max(together.size, 1))]]
            streams = [together] if self.strides[first] > 1 and most is None else arrays
            ratios[key] = sum(len(self._coding.encode(stream)) for stream in streams) / sum(map(_entropy_bytes, arrays))
        return ratios

    def _waterfilled(self, name: str, quantizer: Quantizer) -> tuple[float, float]:
        """Return bytes and nats of a weight under `Waterfilling`, from its counts of deviations."""
        assert isinstance(quantizer, WaterfillingSteps)
        if name not in self._gaussians:
            self._gaussians[name] = self._deviations(name)
        counts = self._gaussians[name]
        bits, errors = _gaussian(_OCTAVES - math.log2(quantizer.step))
        height, width = as_matrix(self.weights[name]).shape
        sides = (height * self.strides[name] + width) * _STEP_BITS
        return float(counts @ bits + sides) / 8 + 4 * LENGTH_BYTES + 8, 0.5 * quantizer.step**2 * float(counts @ errors)

    def _deviations(self, name: str) -> Floats:
        """Count the whole tensor's weights by octave of their deviation; its unit is an error that costs 1/2 nat."""
        rows, columns = self.costs[name]
        energy = rows[:, None] * as_matrix(self.weights[name]).square() * columns
        over = [part.clamp_min(2.0**-100).log2() for part in (energy.sum(1), energy.sum(0), energy.sum())]
        octaves = 0.5 * (over[0][:, None] + over[1] - over[2]) - self._saved(name)
        places = ((octaves - _LEAST_OCTAVE) * _PER_OCTAVE).round().long().clamp(0, len(_OCTAVES) - 1)
        found = torch.bincount(places.reshape(-1), minlength=len(_OCTAVES)).double().numpy()
        return np.asarray(found * (math.prod(self.of.shapes[name]) / max(places.numel(), 1)))


def _moved(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Return the weight, with noise of the usual size if each row is constant, as only before training."""
    rows = as_rows(weight)
    if not rows.numel() or not torch.equal(rows.amax(1), rows.amin(1)):
        return weight
    return weight + torch.randn(weight.shape, generator=generator) * float((3 * rows.shape[1]) ** -0.5)


def _entropy_bytes(array: npt.NDArray[np.generic]) -> float:
    """Return an array's entropy in bytes, each byte plane on its own; at least `_LEAST_ENTROPY` of its size."""
    bits = 0.0
    for plane in np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(-1, array.itemsize).T:
        counts = np.bincount(plane)
        counts = counts[counts > 0]
        bits += float(counts @ (math.log2(max(plane.size, 1)) - np.log2(counts)))
    return max(bits / 8, _LEAST_ENTROPY * array.nbytes, 1.0)


def _gaussian(octaves: Floats) -> tuple[Floats, Floats]:
    """Return bits and mean squared error, in steps², of rounded Gaussian numbers of deviation 2^octaves steps."""
    table, bits, errors = _rounded()
    fine = octaves + 0.5 * math.log2(2 * math.pi * math.e)
    found = np.where(octaves > _MANY_STEPS, fine, np.interp(octaves, table, bits, left=0.0))
    coarse = 4.0 ** np.minimum(octaves, 0)
    return found, np.where(octaves < _FEW_STEPS, coarse, np.interp(octaves, table, errors, right=1 / 12))


@cache
def _rounded() -> tuple[Floats, Floats, Floats]:
    """Return octaves, a sixteenth apart, and the bits and errors of `_gaussian` there."""
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
