"""Gates on the outputs of attention heads."""

from abc import abstractmethod

import torch
from torch import Tensor

from caddie.config import Config, Count, NonNegative, Positive
from caddie.model.linear import Linear
from caddie.model.parameters import Constant, Normal, Part


class HeadGate(Config):
    """Socket: gate for each head and position, computed from the input of attention."""

    @abstractmethod
    def build(self, width: int, heads: int) -> Part:
        """Return the module; its forward takes the normed stream (B, T, width) and returns factors (B, T, heads)."""


class DenseGate(HeadGate):
    """Gated attention: σ(W h + b), W (heads, width) (arXiv 2505.06708)."""

    bias: float | None = 4.0
    """Initial b: at 4, heads start at σ(4) = 0.98; none for no bias, so that heads start at one half."""
    std: NonNegative = 0.0
    """Standard deviation of the initial weights; 0.005 in the record without bias."""

    def build(self, width: int, heads: int) -> Part:
        return _Gate(width, heads, self.std, self.bias)


class NarrowGate(HeadGate):
    """Attention output gate: height · σ(W h[:channels]), W (heads, channels) initially 0, so heads start at height/2.

    The records use height 2, which starts as the identity.
    """

    channels: Count = 12
    """Number of leading channels of the stream that the gate reads."""
    height: Positive = 2.0
    """Largest factor on a head."""

    def build(self, width: int, heads: int) -> Part:
        return _Gate(min(self.channels, width), heads, 0.0, None, height=self.height)


class SparseGate(HeadGate):
    """Sparse attention gate: σ(scale · W h[:channels]), W (heads, channels) initially 0, so heads start at one half."""

    channels: Count = 12
    """Number of leading channels of the stream that the gate reads."""
    scale: Positive = 0.5
    """Factor on the logits of the gate."""

    def build(self, width: int, heads: int) -> Part:
        return _Gate(min(self.channels, width), heads, 0.0, None, slope=self.scale)


class _Gate(Part):
    def __init__(
        self, channels: int, heads: int, std: float, bias: float | None, slope: float = 1.0, height: float = 1.0
    ) -> None:
        super().__init__()
        self.channels, self.slope, self.height = channels, slope, height
        self.logits = Linear(channels, heads, Normal(std=std), role="gate")
        self.bias = None if bias is None else self.declare("bias", (heads,), "gate", Constant(value=bias))

    def forward(self, h: Tensor) -> Tensor:
        logits = self.slope * self.logits(h[..., : self.channels].contiguous())
        if self.bias is not None:
            logits = logits + self.bias.to(h.dtype)
        return self.height * torch.sigmoid(logits)
