"""Quantization-aware training (QAT): linear layers compute with fake-quantized weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated

import torch
from torch import Tensor, nn

from caddie.config import Config
from caddie.config.schedules import Number, NumberRange, Ramp, TrainProgress, value_at
from caddie.errors import UserError
from caddie.model.linear import Linear
from caddie.model.parameters import assign
from caddie.pack.quantize import Quantizer, Rows


class QAT(Config):
    """Socket: fake quantization of a weight W in the forward, W + strength · (Q(W) - W)."""

    quantizer: Quantizer = Rows()
    """Quantizer Q; should be the one in `pack.quantizers`."""
    strength: Annotated[Number, NumberRange(0.0, 1.0)] = Ramp(start=0.0, end=1.0, begin=0.85, finish=0.85)
    """From 0, the plain weight, to 1, the quantized weight; by default 1 in the last 15 % of the budget (#1559)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.quantizer.fake(torch.zeros(1, 1))  # raises `UserError` if the quantizer cannot do it

    @abstractmethod
    def quantized(self, weight: Tensor, view: View) -> Tensor:
        """Return the fake-quantized float32 weight of any shape, at the strength of the view."""

    def sharpness_at(self, train_progress: TrainProgress) -> float:
        """Return the sharpness of soft rounding, 1 for kinds that have none."""
        return 1.0


class View:
    """Fake-quantized view that a linear layer has of its weight, at first of strength 0.

    Numbers that change over the run are tensors. A Python number would become a constant of the compiled model: for
    that reason the records' switch never acted.
    """

    def __init__(self, config: QAT, device: torch.device) -> None:
        self.config = config
        self.strength = torch.zeros((), device=device)
        self.sharpness = torch.ones((), device=device)
        self.step = torch.zeros((), device=device, dtype=torch.int64)

    def set(self, train_progress: TrainProgress) -> None:
        """Set the numbers for the step at `train_progress`."""
        self.strength.fill_(value_at(self.config.strength, train_progress))
        self.sharpness.fill_(self.config.sharpness_at(train_progress))
        self.step.fill_(train_progress.step)

    def __call__(self, weight: Tensor) -> Tensor:
        """Return the fake-quantized weight."""
        return self.config.quantized(weight, self)


class StraightThrough(QAT):
    """Straight-through estimator (STE): rounded weights forward, the identity backward (arXiv 1308.3432)."""

    def quantized(self, weight: Tensor, view: View) -> Tensor:
        """Return W plus the rounding error as a constant."""
        plain = weight.detach()
        return weight + view.strength * (self.quantizer.fake(plain) - plain)


class SoftRound(QAT):
    """Soft rounding: a smooth step function that grows sharper over the run, with its gradient (arXiv 2006.09952)."""

    sharpness: Annotated[Number, NumberRange(0.01, 1e4)] = Ramp(start=1.0, end=16.0, begin=0.85)
    """Sharpness α of `soft_round`; at 0.01 the function is a straight line already."""

    def sharpness_at(self, train_progress: TrainProgress) -> float:
        """Return the scheduled sharpness."""
        return value_at(self.sharpness, train_progress)

    def quantized(self, weight: Tensor, view: View) -> Tensor:
        """Return W moved toward its softly rounded version."""
        rounded = self.quantizer.fake(weight, lambda y: soft_round(y, view.sharpness))
        return weight + view.strength * (rounded - weight)


def soft_round(y: Tensor, sharpness: Tensor) -> Tensor:
    """Return ⌊y⌋ + 1/2 + tanh(α r) / (2 tanh(α/2)) with r = y - ⌊y⌋ - 1/2 and α = `sharpness` > 0, 0-dimensional.

    Whole and half numbers stay. Toward α = 0 this is y, toward infinity round(y) (arXiv 2006.09952).
    """
    floor = y.floor()
    return floor + 0.5 + 0.5 * torch.tanh(sharpness * (y - floor - 0.5)) / torch.tanh(0.5 * sharpness)


class Noisy(QAT):
    """Uniform noise as wide as a quantization step in place of rounding, the identity backward (arXiv 1611.01704).

    The noise is a function of the step of the run, the weight and its index, so runs repeat.
    """

    def quantized(self, weight: Tensor, view: View) -> Tensor:
        noisy = self.quantizer.fake(weight, lambda y: y + noise(y.detach(), view.step))
        return weight + view.strength * (noisy - weight)


def noise(y: Tensor, step: Tensor) -> Tensor:
    """Return pseudorandom numbers of the shape of y (float32), uniform from -1/2 to 1/2, hashed from y and `step`.

    Value, index and step are mixed by the multiplications and shifts of C. Wellons' lowbias32.
    """
    index = torch.arange(y.numel(), device=y.device).reshape(y.shape)
    mixed = y.float().contiguous().view(torch.int32) + index * 0x9E3779B1 + step * 0x85EBCA77
    for factor, shift in ((1, 16), (0x7FEB352D, 15), (0x846CA68B, 16)):
        mixed = mixed * factor & 0xFFFF_FFFF
        mixed = mixed ^ mixed >> shift
    return mixed.float() * 2.0**-32 - 0.5


class Views:
    """Views of a model's linear layers, attached only while one of them has strength.

    So there are two graphs to compile, with views and without; numbers that change within a graph are tensors.
    """

    def __init__(self, rules: Mapping[str, QAT], model: nn.Module) -> None:
        """Build the views by role or pattern of parameter names; the last match wins.

        Only weights of linear layers have views. Raises `UserError` for a rule that matches none of them.
        """
        linears = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, Linear)}
        self.by_name: dict[str, View] = {}
        """Parameter name to view."""
        for rule, config in rules.items():
            chosen = assign({"**": False, rule: True}, model, "train.qat")  # ** matches every name
            reached = [name for name in linears if chosen[name]]
            if not reached:
                raise UserError(f"train.qat: {rule} reaches no linear layer, and only their weights have a view")
            self.by_name.update(dict.fromkeys(reached, View(config, linears[reached[0]].weight.device)))
        self._linears = {name: linears[name] for name in self.by_name}

    def active(self, train_progress: TrainProgress) -> bool:
        """Return True if any view has strength at `train_progress`."""
        return any(value_at(view.config.strength, train_progress) > 0 for view in self.by_name.values())

    def attach(self, on: bool) -> None:
        """Attach the views to their layers, or detach them."""
        for name, linear in self._linears.items():
            linear.view = self.by_name[name] if on else None

    def set(self, train_progress: TrainProgress) -> None:
        """Attach the views if they are active at `train_progress`, and set their numbers."""
        self.attach(self.active(train_progress))
        for view in set(self.by_name.values()):
            view.set(train_progress)
