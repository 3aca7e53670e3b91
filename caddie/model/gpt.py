"""The whole model: its settings, its one forward, and how it is made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from caddie.config import Config, Range, plain
from caddie.errors import UserError
from caddie.model.block import Block
from caddie.model.context import Cache, Context
from caddie.model.embedding import Embedding, TokenEmbedding
from caddie.model.head import Head, TiedHead
from caddie.model.skips import Skips, UNet
from caddie.parameters import Part, initialize


@dataclass(frozen=True, kw_only=True)
class GPT(Config):
    """A decoder-only transformer. The defaults are the contest's baseline, 17,059,912 parameters."""

    vocabulary: Annotated[int, Range(2, 65_536)] = 1024
    """Number of token ids; the tokenizer must have as many."""
    width: Annotated[int, Range(1, 65_536)] = 512
    """Channels of the stream."""
    depth: Annotated[int, Range(1, 1024)] = 9
    """Number of layers."""
    embedding: Embedding = TokenEmbedding()
    """How ids enter the stream."""
    block: Block = Block()
    """What every layer is."""
    layers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Exceptions: a layer or a range of layers (`3`, `0-6`) to a diff on its block."""
    skips: Skips | None = UNet()
    """Connections from early to late layers, or none."""
    head: Head = TiedHead()
    """How the stream becomes logits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "layers", plain(self.layers))  # the same from Python and from JSON
        for layer in self._exceptions():
            self.block_of(layer)

    def block_of(self, layer: int) -> Block:
        """The settings of one layer: `block` with every exception that names the layer, in order."""
        block = self.block
        for key, diff in self.layers.items():
            if layer in _layer_range(key, self.depth):
                try:
                    block = block.but(diff)
                except UserError as error:
                    raise UserError(f"layers.{key}: {error}") from None
        return block

    def build(self) -> Model:
        """The model with uninitialized weights, on the default device."""
        return Model(self)

    def _exceptions(self) -> set[int]:
        return {layer for key in self.layers for layer in _layer_range(key, self.depth)}


def _layer_range(key: str, depth: int) -> range:
    match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", key)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
    if first > last or last >= depth:
        raise UserError(
            f"layers.{key} names no layers; write a layer or a range from 0 to {depth - 1}, as in 0-{depth - 1}"
        )
    return range(first, last + 1)


class Model(Part):
    """ids (B, T) to logits (B, T, vocabulary)."""

    def __init__(self, config: GPT) -> None:
        super().__init__()
        self.config = config
        self.embedding = config.embedding.build(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(config.block_of(layer).build(config.width) for layer in range(config.depth))
        self.skips = config.skips.build(config.depth, config.width) if config.skips else None
        self.head = config.head.build(config.vocabulary, config.width)

    def forward(
        self,
        ids: Tensor,
        starts: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        last: int | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Logits in `dtype`; `starts` (B, T) is true where a document begins.

        With `last`, logits of that many last positions alone. With a `cache`, which the forward extends, the ids go on
        where those of the call before ended.
        """
        context = Context(ids, starts, dtype, cache)
        x = x0 = self.embedding(context)
        saved: list[Tensor] = []
        for layer, block in enumerate(self.blocks):
            if self.skips is not None:
                x = self.skips.enter(layer, x, saved)
            x = block(x, x0, context)
            if self.skips is not None:
                self.skips.leave(layer, x, saved)
        logits: Tensor = self.head(x if last is None else x[:, x.shape[1] - last :], self.embedding)
        return logits


def build(config: GPT, seed: int, device: torch.device | str = "cpu") -> Model:
    """The model with its initial weights, the same for a seed on every device."""
    with torch.device("meta"):
        model = config.build()
    model = model.to_empty(device=device)
    initialize(model, seed)
    return model


def parameter_count(config: GPT) -> int:
    """Number of parameters, by building the model without memory."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in config.build().parameters())
