"""Norms of the stream before attention and MLP."""

import math
from abc import abstractmethod
from collections.abc import Callable

from torch import Tensor

from caddie.config import Config, Positive
from caddie.ops import rms_norm


class Norm(Config):
    """Socket: norm before attention or MLP."""

    epsilon: Positive | None = None
    """Added to the mean square; none for PyTorch's own, a machine epsilon. Public system 001's attention has 1e-6."""

    @abstractmethod
    def scale(self, layer: int) -> float:
        """Return the factor on the normed stream in `layer`."""

    def build(self, layer: int) -> Callable[[Tensor], Tensor]:
        """Return the norm of `layer`, a function of the stream (..., width)."""
        epsilon, scale = self.epsilon, self.scale(layer)
        if scale == 1.0:
            return lambda x: rms_norm(x, epsilon)
        return lambda x: rms_norm(x, epsilon) * scale


class RMSNorm(Norm):
    """RMSNorm: x over its root mean square, without a learned gain (arXiv 1910.07467)."""

    def scale(self, layer: int) -> float:
        return 1.0


class DepthScaledNorm(Norm):
    """RMSNorm over the root of the layer's number, from 1, so deep layers get smaller inputs ("LN scale")."""

    def scale(self, layer: int) -> float:
        return 1.0 / math.sqrt(layer + 1)
