"""The one linear layer."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from caddie.parameters import Initial, Part, Role


class LowRankDelta:
    """An addition x Aᵀ Bᵀ · scale to a linear layer's output (LoRA, arXiv 2106.09685), kept outside its parameters."""

    def __init__(self, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
        self.a = a
        self.b = b
        self.scale = scale

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., inputs) to (..., outputs)."""
        return F.linear(F.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype)) * self.scale


class Linear(Part):
    """y = x Wᵀ with W (outputs, inputs) kept in float32 and cast to the stream's dtype; no bias.

    `view` replaces the weight by what the forward should see of it (quantization-aware training); `delta` adds to the
    output (test-time training). With both None, the identity case, this is a plain linear layer.
    """

    def __init__(self, inputs: int, outputs: int, initial: Initial, role: Role = "matrix") -> None:
        super().__init__()
        self.weight = self.declare("weight", (outputs, inputs), role, initial)
        self.view: Callable[[Tensor], Tensor] | None = None
        self.delta: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x (..., inputs) to (..., outputs)."""
        weight: Tensor = self.weight if self.view is None else self.view(self.weight)
        y = F.linear(x, weight.to(x.dtype))
        return y if self.delta is None else y + self.delta(x)
