"""The one linear layer."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from caddie.parameters import Initial, Part, Role

Delta = Callable[[Tensor], Tensor]
"""What test-time training adds to the output of a part, computed from the part's input."""


class LowRankDelta:
    """An addition x Aᵀ Bᵀ · scale to a part's output (LoRA, arXiv 2106.09685), kept outside its parameters.

    A is (rank, inputs) and B (outputs, rank) for all rows of x (B, T, inputs), or there is one of each for every row.
    """

    def __init__(self, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
        self.a = a
        self.b = b
        self.scale = scale

    def __call__(self, x: Tensor) -> Tensor:
        """x (B, T, inputs) to (B, T, outputs)."""
        return x @ self.a.to(x.dtype).mT @ self.b.to(x.dtype).mT * self.scale


def adapted(y: Tensor, delta: Delta | None, x: Tensor) -> Tensor:
    """The output y of a part on x, with what the delta adds."""
    return y if delta is None else y + delta(x)


class Linear(Part):
    """y = x Wᵀ with W (outputs, inputs) kept in float32 and cast to the stream's dtype; no bias.

    `view` replaces the weight by what the forward should see of it (quantization-aware training); `delta` adds to the
    output (test-time training). With both None, the identity case, this is a plain linear layer.
    """

    def __init__(self, inputs: int, outputs: int, initial: Initial, role: Role = "matrix") -> None:
        super().__init__()
        self.weight = self.declare("weight", (outputs, inputs), role, initial)
        self.view: Callable[[Tensor], Tensor] | None = None
        self.delta: Delta | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x (..., inputs) to (..., outputs)."""
        weight: Tensor = self.weight if self.view is None else self.view(self.weight)
        return adapted(F.linear(x, weight.to(x.dtype)), self.delta, x)
