"""Ternary and binary weights, with a step for each group of columns."""

import math
from collections.abc import Mapping
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from caddie.config import Range
from caddie.pack.quantize.quantizer import Arrays, Calibration, Layout, Quantizer, Rounding, as_rows, plain, rows_shape
from caddie.pack.quantize.rows import half
from caddie.pack.quantize.scales import LARGEST_STEP

_TRITS = 5  # in a byte: 3^5 is 243
_POWERS = 3 ** np.arange(_TRITS, dtype=np.uint8)  # of the digits in a byte, the first the lowest


class Ternary(Quantizer):
    """-1, 0 or 1 times the mean |weight| of each group of columns (arXiv 2402.17764)."""

    group: Annotated[int, Range(1, 65_536)] = 128
    """Columns that share a step; rows are padded with zeros to whole groups. As in the record, the zeros count in the
    mean, so if the group does not divide the columns, the last step of each row is smaller."""
    keep_mean: bool = False
    """Restore the group's mean |weight|: a trit of 1 stands for the step divided by the fraction of nonzero trits.
    Better for weights that were not trained as trits. The record's file does so because its forward takes the mean
    again; its products and its training see the plain step."""
    packed: bool = False
    """Store five trits in a byte; otherwise one byte per trit, which entropy coders compress better."""

    def quantize(self, weight: Tensor, calibration: Calibration = Calibration()) -> Arrays:
        """Return `integers` (int8, the weight's shape) or `packed` (bytes, padded groups), and `steps` (groups,)."""
        groups = _groups(plain(weight), self.group)
        steps = _mean_steps(groups)
        trits = _in_steps(groups, steps).round().to(torch.int8)
        stored = steps.numpy().astype("<f2")
        if not self.packed:
            return {"integers": _ungrouped(trits, weight.shape).numpy(), "steps": stored}
        digits = F.pad(trits.reshape(-1) + 1, (0, -trits.numel() % _TRITS)).numpy().astype(np.uint8)
        return {"packed": (digits.reshape(-1, _TRITS) * _POWERS).sum(1, dtype=np.uint8), "steps": stored}

    def dequantize(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Tensor:
        steps = torch.from_numpy(arrays["steps"].astype(np.float32))
        if self.packed:  # a byte over 242, which packing never writes, decodes too
            trits = (arrays["packed"][:, None] // _POWERS % 3).reshape(-1)[: len(steps) * self.group]
            groups = torch.from_numpy(trits.astype(np.float32)).reshape(-1, self.group) - 1
        else:
            groups = _groups(torch.from_numpy(arrays["integers"].astype(np.float32)).reshape(shape), self.group)
        return _ungrouped(groups * self._factors(groups, steps), shape)

    def layout(self, shape: tuple[int, ...]) -> Layout:
        groups = _group_count(shape, self.group)
        steps = (np.dtype("<f2"), (groups,))
        if self.packed:
            return {"packed": (np.dtype(np.uint8), (-(-groups * self.group // _TRITS),)), "steps": steps}
        return {"integers": (np.dtype(np.int8), shape), "steps": steps}

    def fake(self, weight: Tensor, rounding: Rounding = torch.round) -> Tensor:
        groups = _groups(weight.float(), self.group)
        steps = _mean_steps(groups.detach())
        trits = _in_steps(groups.detach(), steps).round()
        return _ungrouped(rounding(_with_gradient(groups, steps)) * self._factors(trits, steps), weight.shape)

    def _factors(self, trits: Tensor, steps: Tensor) -> Tensor:
        """Return the weight that a trit of 1 stands for, (groups, 1)."""
        if not self.keep_mean:
            return steps[:, None]
        return steps[:, None] / trits.abs().mean(1, keepdim=True).clamp_min(1e-8)


class Binary(Quantizer):
    """-1 or 1 times the mean |weight| of each group of columns (arXiv 1603.05279): one bit a weight."""

    group: Annotated[int, Range(1, 65_536)] = 128
    """Columns that share a step; the last group of a row may have fewer."""

    def quantize(self, weight: Tensor, calibration: Calibration = Calibration()) -> Arrays:
        """Return `packed` (bytes, the first sign in the lowest bit, 1 for positive) and `steps` (groups,)."""
        groups = _groups(plain(weight), self.group)
        steps = _mean_steps(groups, self._sizes(weight.shape))
        positive = _ungrouped(_signs(_in_steps(groups, steps), torch.round) > 0, weight.shape)
        packed = np.packbits(positive.reshape(-1).numpy(), bitorder="little")
        return {"packed": packed, "steps": steps.numpy().astype("<f2")}

    def dequantize(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Tensor:
        positive = np.unpackbits(arrays["packed"], count=math.prod(shape), bitorder="little")
        signs = torch.from_numpy(positive.astype(np.float32) * 2 - 1).reshape(shape)
        steps = torch.from_numpy(arrays["steps"].astype(np.float32))
        return _ungrouped(_groups(signs, self.group) * steps[:, None], shape)

    def layout(self, shape: tuple[int, ...]) -> Layout:
        steps = (np.dtype("<f2"), (_group_count(shape, self.group),))
        return {"packed": (np.dtype(np.uint8), (-(-math.prod(shape) // 8),)), "steps": steps}

    def fake(self, weight: Tensor, rounding: Rounding = torch.round) -> Tensor:
        groups = _groups(weight.float(), self.group)
        steps = _mean_steps(groups.detach(), self._sizes(weight.shape))
        return _ungrouped(_signs(_with_gradient(groups, steps), rounding) * steps[:, None], weight.shape)

    def _sizes(self, shape: tuple[int, ...]) -> Tensor:
        """Return the columns of each group without padding, (groups,)."""
        rows, columns = rows_shape(shape)
        sizes = [min(self.group, columns - begin) for begin in range(0, columns, self.group)]
        return torch.tensor(sizes, dtype=torch.float32).repeat(rows)


def _signs(counts: Tensor, rounding: Rounding) -> Tensor:
    """Round to -1 or 1; `rounding` gets (counts - 1) / 2, from -1 to 0."""
    return 2 * rounding((counts - 1) / 2) + 1


def _groups(weight: Tensor, group: int) -> Tensor:
    """Return (groups, group); rows are padded with zeros."""
    rows = as_rows(weight)
    return F.pad(rows, (0, -rows.shape[1] % group)).reshape(-1, group)


def _group_count(shape: tuple[int, ...], group: int) -> int:
    rows, columns = rows_shape(shape)
    return rows * -(-columns // group)


def _ungrouped(groups: Tensor, shape: tuple[int, ...]) -> Tensor:
    rows, columns = rows_shape(shape)
    width = groups.numel() // rows if rows else columns
    return groups.reshape(rows, width)[:, :columns].reshape(shape)


def _mean_steps(groups: Tensor, sizes: Tensor | None = None) -> Tensor:
    """Return the mean |weight| of each group, rounded to half precision, (groups,)."""
    absolute = groups.abs()
    means = absolute.mean(1) if sizes is None else absolute.sum(1) / sizes.to(groups.device)
    return half(means.clamp(max=LARGEST_STEP))


def _in_steps(groups: Tensor, steps: Tensor) -> Tensor:
    """Return weights in units of their step, from -1 to 1."""
    return (groups / steps[:, None].clamp_min(2.0**-24)).clamp(-1, 1)


def _with_gradient(groups: Tensor, steps: Tensor) -> Tensor:
    """Return `_in_steps` with the gradient of the unclipped weights in units of their step."""
    values = groups.detach()
    return _in_steps(values, steps) + (groups - values) / steps[:, None].clamp_min(2.0**-24)
