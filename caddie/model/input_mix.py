"""Mix of the embedded input into the stream before each layer (residual mixing)."""

import math
from abc import abstractmethod

from caddie.config import Config
from caddie.model.parameters import Initial, RowConstants


class ResidualMix(Config):
    """Socket: initial a and b of x ← a·x + b·x0; both are learned, by channel."""

    @abstractmethod
    def initial(self, layer: int, depth: int) -> Initial:
        """Return the initial a and b, the rows of (2, width), in `layer` of `depth`."""


class StreamMix(ResidualMix):
    """Start from the stream alone: a = 1, b = 0 (the contest's baseline)."""

    def initial(self, layer: int, depth: int) -> Initial:
        return RowConstants(values=(1.0, 0.0))


class PhaseMix(ResidualMix):
    """Start from the input in early layers, from the stream in late ones: a = σ(3(l/(depth - 1) - ½)), b = 1 - a."""

    def initial(self, layer: int, depth: int) -> Initial:
        a = 1.0 / (1.0 + math.exp(-3.0 * (layer / max(depth - 1, 1) - 0.5)))
        return RowConstants(values=(a, 1.0 - a))
