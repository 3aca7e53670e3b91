"""Value residuals (VRL) and value embeddings: additions to the values of attention."""

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from caddie.config import Channels, Config
from caddie.model.context import Context
from caddie.model.linear import Linear
from caddie.model.parameters import Constant, FanIn, Initial, Normal, Part


class ValueResidual(Config):
    """Socket: value residual, the values of the first layer mixed into later ones (ResFormer, arXiv 2410.17897)."""

    @abstractmethod
    def build(self) -> Part:
        """Return the module of a later layer: forward(values, first), both (B, K, T, D), gives the mixed values."""


class MixedValueResidual(ValueResidual):
    """Value residual v ← a·v₀ + b·v, both learned in each layer from ½ (openai/parameter-golf #670, #1019's flag)."""

    def build(self) -> Part:
        return _MixedValues()


class GatedValueResidual(ValueResidual):
    """Value residual v ← v + σ(α)·v₀, α learned in each layer from 0 (openai/parameter-golf #569)."""

    def build(self) -> Part:
        return _GatedValues()


class _MixedValues(Part):
    def __init__(self) -> None:
        super().__init__()
        self.shares = self.declare("shares", (2,), "scalar", Constant(value=0.5))

    def forward(self, values: Tensor, first: Tensor) -> Tensor:
        shares = self.shares.to(values.dtype)
        return shares[0] * first + shares[1] * values


class _GatedValues(Part):
    def __init__(self) -> None:
        super().__init__()
        self.gate = self.declare("gate", (), "scalar", Constant(value=0.0))

    def forward(self, values: Tensor, first: Tensor) -> Tensor:
        return values + torch.sigmoid(self.gate).to(values.dtype) * first


class ValueEmbedding(Config):
    """Value embedding: a second token table added to the values of some layers, v ← v + c_l · s · P U[token]."""

    layers: tuple[int, ...] = (9, 10)
    """Layers to whose values the embedding is added."""
    dims: Channels = 128
    """Channels of a row."""
    initial: Initial = FanIn()
    """Initial values of the projection; orthogonal in the scripts, though their code reads as if it were zero."""


class ValueTable(Part):
    """Table (vocabulary, dims), its projection to `values` channels, and a scale for each layer."""

    def __init__(self, config: ValueEmbedding, vocabulary: int, values: int) -> None:
        super().__init__()
        self.layers = config.layers
        self.weight = self.declare("weight", (vocabulary, config.dims), "embedding", Normal(std=0.01))
        self.projection = Linear(config.dims, values, config.initial)
        self.scale = self.declare("scale", (), "scalar", Constant(value=0.1))
        self.layer_scales = self.declare("layer_scales", (len(config.layers),), "scalar", Constant(value=1.0))

    def by_layer(self, context: Context) -> dict[int, Tensor]:
        """Return layer to the addition to its values, (B, T, values)."""
        rows = self.projection(F.embedding(context.ids, self.weight).to(context.dtype)) * self.scale.to(context.dtype)
        scales = self.layer_scales.to(context.dtype).unbind()
        return {layer: scale * rows for layer, scale in zip(self.layers, scales, strict=True)}
