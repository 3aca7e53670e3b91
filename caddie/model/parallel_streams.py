"""Two streams beside each other: one that attention writes, one that the MLP writes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from caddie.config import Config, Positive, Range, Technique
from caddie.model.block import BlockModule
from caddie.model.context import Context
from caddie.model.parameters import Constant, Part


@dataclass(frozen=True, kw_only=True)
class ParallelStreams(Config):
    """Socket: from which layer on there are two streams, who writes where, and how they end."""

    first: Annotated[int, Range(0, 1023)] = 8
    """First layer with two lanes, which both start as the stream. Connections from before enter lane 0 alone."""

    @abstractmethod
    def build(self, depth: int) -> ParallelStreamsModule:
        """The module."""


class ParallelStreamsModule(Part):
    """Steps two lanes (B, T, width) through a block, and merges them at the end."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    @abstractmethod
    def step(
        self, layer: int, block: BlockModule, lanes: tuple[Tensor, Tensor], x0: Tensor, context: Context
    ) -> tuple[Tensor, Tensor]:
        """The lanes behind `block`, which stands in `layer`: attention reads lane 0 and x0, the MLP lane 1."""

    def merge(self, lanes: tuple[Tensor, Tensor]) -> Tensor:
        """One stream of two."""
        return (lanes[0] + lanes[1]) * 0.5


@dataclass(frozen=True, kw_only=True)
class RoutedStreams(ParallelStreams):
    """lane_j ← r_j lane_j + p_0j·attention + p_1j·MLP, all learned in each layer; the end is the mean.

    Parallel residuals as in openai/parameter-golf #1204, #1529 and the record at 1.0611. As there, the tensors have
    rows for all layers, those before the first included, which nothing reads.
    """

    techniques: ClassVar = {
        "": Technique(
            "Attention and MLP stop writing over each other; learned routes cross.",
            "openai/parameter-golf #1204, #1529, #1855 (layers 8 to 10)",
            "-0.0022 (#1204, one seed); forbidding the MLP to write to lane 0 was slightly worse",
        )
    }

    gain: Positive = 1.1
    """Start of r, the factor on the lane itself."""
    sequential: bool = False
    """Whether the MLP reads lane 1 after attention wrote to it, each with a factor of its own (#1204, gain √1.1)."""

    def build(self, depth: int) -> ParallelStreamsModule:
        """The module."""
        return _RoutedStreams(self, depth)


@dataclass(frozen=True, kw_only=True)
class SeparateStreams(ParallelStreams):
    """Attention writes lane 0 alone and the MLP lane 1; the end is m·lane₀ + (1 - m)·lane₁, m learned, ½ at the start.

    As in openai/parameter-golf #1334 and #1477. Lane 0 keeps what was mixed into it; lane 1 gets nothing mixed in.
    """

    techniques: ClassVar = {
        "": Technique(
            "Two streams without routes.",
            "openai/parameter-golf, 2026-04-08_SP8192_ParallelResid_ScoreFirstTTT (#1477, layers 7 to 10)",
            "1.0828 to 1.0822, with test-time training in both",
        )
    }

    def build(self, depth: int) -> ParallelStreamsModule:
        """The module."""
        return _SeparateStreams(self)


class _RoutedStreams(ParallelStreamsModule):
    def __init__(self, config: RoutedStreams, depth: int) -> None:
        super().__init__(config.first)
        self.sequential = config.sequential
        self.routes = self.declare("routes", (depth, 2, 2), "scalar", Constant(value=1.0))  # layer, source, lane
        self.gains = self.declare("gains", (depth, 2), "scalar", Constant(value=config.gain))

    def step(
        self, layer: int, block: BlockModule, lanes: tuple[Tensor, Tensor], x0: Tensor, context: Context
    ) -> tuple[Tensor, Tensor]:
        dtype = x0.dtype
        from_attention, from_mlp = self.routes[layer].to(dtype)
        gains = self.gains[layer].to(dtype)
        attended = block.attention_output(block.mixed(lanes[0], x0), context)
        if self.sequential:
            lane0, lane1 = (gains[0] * lane + from_attention[j] * attended for j, lane in enumerate(lanes))
            thought = block.mlp_output(block.mixed(lane1, x0), context)
            return gains[1] * lane0 + from_mlp[0] * thought, gains[1] * lane1 + from_mlp[1] * thought
        thought = block.mlp_output(lanes[1], context)
        lane0, lane1 = (
            gains[j] * lane + from_attention[j] * attended + from_mlp[j] * thought for j, lane in enumerate(lanes)
        )
        return lane0, lane1


class _SeparateStreams(ParallelStreamsModule):
    def __init__(self, config: SeparateStreams) -> None:
        super().__init__(config.first)
        self.share = self.declare("share", (), "scalar", Constant(value=0.5))

    def step(
        self, layer: int, block: BlockModule, lanes: tuple[Tensor, Tensor], x0: Tensor, context: Context
    ) -> tuple[Tensor, Tensor]:
        x = block.mixed(lanes[0], x0)
        return x + block.attention_output(x, context), lanes[1] + block.mlp_output(lanes[1], context)

    def merge(self, lanes: tuple[Tensor, Tensor]) -> Tensor:
        return torch.lerp(lanes[1], lanes[0], self.share.to(lanes[0].dtype))
