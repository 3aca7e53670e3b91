"""Parallel residual streams: one that attention writes, one that the MLP writes."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated

import torch
from torch import Tensor

from caddie.config import Config, Positive, Range
from caddie.model.block import BlockModule
from caddie.model.context import Context
from caddie.model.parameters import Constant, Part

Streams = tuple[Tensor, Tensor]


class ParallelStreams(Config):
    """Socket: two residual streams from layer `first` on, and their merge at the end."""

    first: Annotated[int, Range(0, 1023)] = 8
    """First layer with two streams, which both start as the one before. Skip connections enter stream 0 alone."""

    @abstractmethod
    def build(self, depth: int) -> ParallelStreamsModule:
        """Return the module."""


class ParallelStreamsModule(Part):
    """Module that runs a block on two streams (B, T, width), and merges them at the end."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    @abstractmethod
    def step(self, layer: int, block: BlockModule, streams: Streams, x0: Tensor, context: Context) -> Streams:
        """Return the streams after `block` of `layer`: attention reads stream 0 and x0, the MLP stream 1."""

    def merge(self, streams: Streams) -> Tensor:
        """Return the two streams merged into one."""
        return (streams[0] + streams[1]) * 0.5


class RoutedStreams(ParallelStreams):
    """Routed streams: s_j ← r_j s_j + p_0j·attention + p_1j·MLP, r and p learned in each layer; merged by their mean.

    Parallel residuals as in openai/parameter-golf #1204, #1529 and the record at 1.0611. As there, the tensors have
    rows for all layers; nothing reads the rows of layers before the first.
    """

    gain: Positive = 1.1
    """Initial r, the factor on the stream itself."""
    sequential: bool = False
    """True if the MLP reads stream 1 after attention wrote to it; each has its own r (#1204, gain √1.1)."""

    def build(self, depth: int) -> ParallelStreamsModule:
        return _RoutedStreams(self, depth)


class SeparateStreams(ParallelStreams):
    """Separate streams: attention writes s₀ alone, the MLP s₁; merged as m·s₀ + (1 - m)·s₁, m learned from ½.

    As in openai/parameter-golf #1334 and #1477. The embedded input is mixed into stream 0 alone.
    """

    def build(self, depth: int) -> ParallelStreamsModule:
        return _SeparateStreams(self)


class _RoutedStreams(ParallelStreamsModule):
    def __init__(self, config: RoutedStreams, depth: int) -> None:
        super().__init__(config.first)
        self.sequential = config.sequential
        self.routes = self.declare("routes", (depth, 2, 2), "scalar", Constant(value=1.0))  # layer, source, stream
        self.gains = self.declare("gains", (depth, 2), "scalar", Constant(value=config.gain))

    def step(self, layer: int, block: BlockModule, streams: Streams, x0: Tensor, context: Context) -> Streams:
        dtype = x0.dtype
        from_attention, from_mlp = self.routes[layer].to(dtype)
        gains = self.gains[layer].to(dtype)
        attention = block.attention_output(block.mixed(streams[0], x0), context)
        if self.sequential:
            s0, s1 = (gains[0] * stream + from_attention[j] * attention for j, stream in enumerate(streams))
            mlp = block.mlp_output(block.mixed(s1, x0), context)
            return gains[1] * s0 + from_mlp[0] * mlp, gains[1] * s1 + from_mlp[1] * mlp
        mlp = block.mlp_output(streams[1], context)
        s0, s1 = (
            gains[j] * stream + from_attention[j] * attention + from_mlp[j] * mlp for j, stream in enumerate(streams)
        )
        return s0, s1


class _SeparateStreams(ParallelStreamsModule):
    def __init__(self, config: SeparateStreams) -> None:
        super().__init__(config.first)
        self.share = self.declare("share", (), "scalar", Constant(value=0.5))

    def step(self, layer: int, block: BlockModule, streams: Streams, x0: Tensor, context: Context) -> Streams:
        x = block.mixed(streams[0], x0)
        return x + block.attention_output(x, context), streams[1] + block.mlp_output(streams[1], context)

    def merge(self, streams: Streams) -> Tensor:
        return torch.lerp(streams[1], streams[0], self.share.to(streams[0].dtype))
