"""Quantization-aware training: linear layers that see their weights as the quantizer will leave them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from caddie.config import Config, Range, Technique
from caddie.config.schedules import Number, Ramp, TrainProgress, value_at
from caddie.errors import UserError
from caddie.model.linear import Linear
from caddie.model.parameters import assign
from caddie.pack.quantize import Quantizer, Rows


@dataclass(frozen=True, kw_only=True)
class QAT(Config):
    """Socket: what the forward sees of a weight W that will be quantized, W + strength · (Q(W) - W)."""

    quantizer: Quantizer = Rows()
    """Q; should be that of `pack.quantizers`."""
    strength: Annotated[Number, Range(0.0, 1.0)] = Ramp(start=0.0, end=1.0, begin=0.85, finish=0.85)
    """Between the plain weight, 0, and the quantized, 1. As in #1559 the last 15 % of the budget are quantized."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.quantizer.fake(torch.zeros(1, 1))  # a quantizer that cannot says so

    @abstractmethod
    def build(self, device: torch.device) -> View:
        """The view, at strength 0."""


class View(ABC):
    """What a linear layer sees of its weight.

    What changes over the run is held in tensors. A Python number would become a constant of the compiled model, as the
    records' switch did, which therefore never acted.
    """

    def __init__(self, config: QAT, device: torch.device) -> None:
        self.config = config
        self.strength = torch.zeros((), device=device)

    def set(self, moment: TrainProgress) -> None:
        """Take the numbers of `moment`."""
        self.strength.fill_(value_at(self.config.strength, moment))

    @abstractmethod
    def __call__(self, weight: Tensor) -> Tensor:
        """The float32 weight of any shape as it is seen."""


@dataclass(frozen=True, kw_only=True)
class StraightThrough(QAT):
    """Rounded weights forward, the identity backward: the straight-through estimator (arXiv 1308.3432)."""

    techniques: ClassVar = {
        "": Technique(
            "Weights settle where rounding does them little harm.",
            "arXiv 1308.3432 and 1712.05877; openai/parameter-golf #374 and #1559, late in the run",
            "-0.01 for late over early (#1559, its author's estimate); whole run +0.005 (#375); about 0 beside GPTQ",
        )
    }

    def build(self, device: torch.device) -> View:
        """The view, at strength 0."""
        return _StraightThrough(self, device)


class _StraightThrough(View):
    def __call__(self, weight: Tensor) -> Tensor:
        plain = weight.detach()
        return weight + self.strength * (self.config.quantizer.fake(plain) - plain)


@dataclass(frozen=True, kw_only=True)
class SoftRound(QAT):
    """Rounding by a smooth stair that grows sharper over the run, with its own gradient (arXiv 2006.09952)."""

    techniques: ClassVar = {
        "": Technique(
            "A gradient that knows of the rounding draws weights toward the levels.",
            "arXiv 2006.09952; openai/parameter-golf #670, #589",
            "-0.0002, less than the noise between seeds; 500 steps were thought too few (#670)",
        )
    }

    sharpness: Annotated[Number, Range(0.01, 1e4)] = Ramp(start=1.0, end=16.0, begin=0.85)
    """How steep the stair is (see `soft_round`); never below 0.01, where it is a straight line already."""

    def build(self, device: torch.device) -> View:
        """The view, at strength 0."""
        return _SoftRound(self, device)


class _SoftRound(View):
    config: SoftRound

    def __init__(self, config: SoftRound, device: torch.device) -> None:
        super().__init__(config, device)
        self.sharpness = torch.ones((), device=device)

    def set(self, moment: TrainProgress) -> None:
        super().set(moment)
        self.sharpness.fill_(max(0.01, value_at(self.config.sharpness, moment)))

    def __call__(self, weight: Tensor) -> Tensor:
        seen = self.config.quantizer.fake(weight, lambda y: soft_round(y, self.sharpness))
        return weight + self.strength * (seen - weight)


def soft_round(y: Tensor, sharpness: Tensor) -> Tensor:
    """⌊y⌋ + 1/2 + tanh(alpha r) / (2 tanh(alpha/2)) with r = y - ⌊y⌋ - 1/2 and alpha = `sharpness` > 0, 0-dimensional.

    Whole and half numbers stay. Toward alpha = 0 this is y, toward infinity it is round(y).
    """
    floor = y.floor()
    return floor + 0.5 + 0.5 * torch.tanh(sharpness * (y - floor - 0.5)) / torch.tanh(0.5 * sharpness)


@dataclass(frozen=True, kw_only=True)
class Noisy(QAT):
    """Uniform noise as wide as a step in place of rounding, and the identity backward (arXiv 1611.01704).

    The noise follows from the step of the run, the weight and its place: a run that repeats meets it again.
    """

    techniques: ClassVar = {
        "": Technique(
            "Weights learn to bear errors as large as those of rounding, whichever way they fall.",
            "arXiv 1611.01704 and 2004.07320; openai/parameter-golf #363",
            "errors that repeated layers amplify fall from 0.37 to 0.002 (#363)",
        )
    }

    def build(self, device: torch.device) -> View:
        """The view, at strength 0."""
        return _Noisy(self, device)


class _Noisy(View):
    def __init__(self, config: Noisy, device: torch.device) -> None:
        super().__init__(config, device)
        self.step = torch.zeros((), device=device, dtype=torch.int64)

    def set(self, moment: TrainProgress) -> None:
        super().set(moment)
        self.step.fill_(moment.step)

    def __call__(self, weight: Tensor) -> Tensor:
        seen = self.config.quantizer.fake(weight, lambda y: y + noise(y.detach(), self.step))
        return weight + self.strength * (seen - weight)


def noise(y: Tensor, step: Tensor) -> Tensor:
    """Numbers of the shape of y (float32), uniform from -1/2 to 1/2, that look random but follow from y and `step`.

    Value, place and step are mixed by the multiplications and shifts of C. Wellons' lowbias32.
    """
    place = torch.arange(y.numel(), device=y.device).reshape(y.shape)
    mixed = y.float().contiguous().view(torch.int32) + place * 0x9E3779B1 + step * 0x85EBCA77
    for factor, shift in ((1, 16), (0x7FEB352D, 15), (0x846CA68B, 16)):
        mixed = mixed * factor & 0xFFFF_FFFF
        mixed = mixed ^ mixed >> shift
    return mixed.float() * 2.0**-32 - 0.5


class Views:
    """The views of a model's linear layers, attached only while one of them has strength.

    So there are two graphs to compile, with views and without; whatever changes within a graph is a tensor.
    """

    def __init__(self, rules: Mapping[str, QAT], model: nn.Module, what: str) -> None:
        """Views by role or pattern of parameter names, the last match wins; a rule reaches linear weights alone.

        A rule that reaches none is a `UserError`: it would do nothing, unnoticed.
        """
        linears = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, Linear)}
        self.by_name: dict[str, View] = {}
        """Parameter name to view."""
        for rule, config in rules.items():
            chosen = assign({"**": False, rule: True}, model, what)  # ** matches every name
            reached = [name for name in linears if chosen[name]]
            if not reached:
                raise UserError(f"{what}: {rule} reaches no linear layer, and only their weights have a view")
            self.by_name.update(dict.fromkeys(reached, config.build(linears[reached[0]].weight.device)))
        self._linears = {name: linears[name] for name in self.by_name}

    def active(self, moment: TrainProgress) -> bool:
        """Whether any view has strength at `moment`."""
        return any(value_at(view.config.strength, moment) > 0 for view in self.by_name.values())

    def attach(self, on: bool) -> None:
        """Hang the views into their layers, or take them out."""
        for name, linear in self._linears.items():
            linear.view = self.by_name[name] if on else None

    def set(self, moment: TrainProgress) -> None:
        """Attach the views if they are active at `moment`, with its numbers."""
        self.attach(self.active(moment))
        for view in set(self.by_name.values()):
            view.set(moment)
