"""Whole model: settings, construction and the forward."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import field
from functools import cached_property
from typing import Annotated, Any, Literal, cast

import torch
from torch import Tensor, nn

from caddie.config import Config, Range, plain, show
from caddie.config.schedules import changes, int_at, progress_at
from caddie.errors import UserError
from caddie.model.block import Block, BlockModule
from caddie.model.context import Cache, Context
from caddie.model.embedding import Embedding, TokenEmbedding
from caddie.model.head import Head, HeadModule, TiedHead
from caddie.model.linear import Linear, Product
from caddie.model.mudd import DenseConnections
from caddie.model.parallel_streams import ParallelStreams
from caddie.model.parameters import Part, initialize
from caddie.model.recurrence import NO_RECURRENCE, PassEmbeddings, Recurrence
from caddie.model.skips import Skips, UNet
from caddie.model.values import ValueEmbedding, ValueTable

MOST_LAYER_PASSES = 1024
"""Largest number of layer passes in a forward."""
ModelPart = Literal["head", "mlp"]
"""Parts of a model whose linear layers can multiply in float8."""


class GPT(Config):
    """Decoder-only transformer. The defaults are the contest's baseline, 17,059,912 parameters."""

    vocabulary: Annotated[int, Range(2, 65_536)] = 1024
    """Number of token ids; the tokenizer must have as many."""
    width: Annotated[int, Range(1, 65_536)] = 512
    """Channels of the residual stream."""
    depth: Annotated[int, Range(1, 1024)] = 9
    """Number of layers."""
    embedding: Embedding = TokenEmbedding()
    """Embedding of token ids."""
    block: Block = Block()
    """Settings of every layer."""
    layers: Mapping[str, Any] = field(default_factory=dict)
    """Exceptions: a layer or range (`3`, `0-6`) to the diff of its block; written as a path, `layers.0-6.parallel`."""
    skips: Skips | None = UNet()
    """U-Net connections from early to late layers, or none."""
    recurrence: Recurrence | None = None
    """Depth recurrence: layers with several passes, or none."""
    parallel_streams: ParallelStreams | None = None
    """Two parallel streams from some layer on, or none."""
    dense_connections: DenseConnections | None = None
    """Dense connections (MUDD): earlier outputs mixed into later layers with weights per token, or none."""
    value_embedding: ValueEmbedding | None = None
    """Value embeddings: token embeddings added to the values of some layers, or none."""
    head: Head = TiedHead()
    """Output head: stream to logits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "layers", _by_layer(plain(self.layers)))  # the same value from Python, JSON and paths
        blocks, last = self.blocks, self.depth - 1
        if self.recurrence:
            if self.recurrence.last > last:
                raise UserError(f"recurrence.last must be at most {last}, not {self.recurrence.last}")
            if (passes := len(self.longest_order)) > MOST_LAYER_PASSES:
                raise UserError(
                    f"layers would run {passes:,} times in a forward, over the limit of {MOST_LAYER_PASSES:,}"
                )
        if self.parallel_streams:
            first = self.parallel_streams.first
            if first > last:
                raise UserError(f"parallel_streams.first must be at most {last}, not {first}")
            if self.recurrence and first <= self.recurrence.last:
                problem = "must be behind recurrence.last; layers with two streams run once"
                raise UserError(f"parallel_streams.first {problem}")
            if not all(block.attention for block in blocks[first:]):
                raise UserError(
                    "parallel_streams need attention in every layer from parallel_streams.first on, "
                    "where it writes the first stream"
                )
        if self.dense_connections and self.parallel_streams:
            raise UserError("dense_connections mix the outputs of one stream: set parallel_streams to none")
        if self.value_embedding:
            layers = self.value_embedding.layers
            if not layers or len(set(layers)) < len(layers) or not all(0 <= layer <= last for layer in layers):
                raise UserError(f"value_embedding.layers must name layers from 0 to {last}, each once")
            widths = {self.value_width(layer) for layer in layers}
            if len(widths) != 1 or 0 in widths:
                raise UserError("the layers of value_embedding must have attention, with values of one width")
        mixing = [layer for layer, block in enumerate(blocks) if getattr(block.attention, "value_residual", None)]
        heads = {(self.value_width(layer), getattr(blocks[layer].attention, "key_value_heads", 0)) for layer in mixing}
        if mixing and (mixing[0] != 0 or len(heads) > 1):
            raise UserError(
                "attention.value_residual takes up the values of layer 0: set it there too, with equal heads"
            )

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Settings of each layer: `block` with every diff in `layers` that names the layer, in order."""
        found = [self.block] * self.depth
        for key, diff in self.layers.items():
            for layer in _layer_range(key, self.depth):
                try:
                    found[layer] = found[layer].but(diff)
                except UserError as error:
                    raise UserError(f"layers.{key}: {error}") from None
        return tuple(found)

    def build(self) -> Model:
        """Return the model with uninitialized weights, on the default device."""
        return Model(self)

    def outline(self) -> Model:
        """Return the model without memory for its weights, which are on the device "meta"."""
        with torch.device("meta"):
            return Model(self)

    @property
    def stages(self) -> tuple[float, ...]:
        """Progress at which each stage of the run begins, 0 first; within a stage the graph stays the same."""
        numbers = [getattr(block.attention, name, None) for block in self.blocks for name in ("window", "longest")]
        return 0.0, *changes([*numbers, self.recurrence.passes if self.recurrence else None])

    def order(self, progress: float = 1.0) -> list[int]:
        """Return the layers in the order of their passes at that progress of the run."""
        again = self.recurrence or NO_RECURRENCE
        return again.order(self.depth, int_at(again.passes, progress_at(progress)))

    @property
    def longest_order(self) -> list[int]:
        """Layers in the order of their passes, with the largest number of passes in the run."""
        again = self.recurrence or NO_RECURRENCE
        return again.order(self.depth, again.most)

    def places(self, progress: float = 1.0) -> list[range]:
        """Return for each pass at that progress its place in `longest_order`, then the places left out after it."""
        again = self.recurrence or NO_RECURRENCE
        return again.places(self.depth, int_at(again.passes, progress_at(progress)))

    def own_mlps(self, layer: int) -> int:
        """Return the number of further MLPs that a layer has for its repeated passes."""
        again = self.recurrence
        return again.most - 1 if again and again.own_mlps and again.first <= layer <= again.last else 0

    def value_width(self, layer: int) -> int:
        """Return the channels of the values of a layer's attention, 0 if it has none."""
        attention = self.blocks[layer].attention
        return attention.value_width(self.width) if attention else 0


def _by_layer(layers: Any) -> dict[str, dict[str, Any]]:
    """Return layers to diff; the path after the layers of a key, as in `0-6.parallel`, goes into their diff."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in layers.items():
        layer, dot, path = key.partition(".")
        if not dot and not isinstance(value, Mapping):
            raise UserError(f"layers.{key} must be a mapping from setting to value, not {show(value)}")
        found.setdefault(layer, {}).update({path: value} if dot else value)
    return found


def _layer_range(key: str, depth: int) -> range:
    match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", key)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
    if first > last or last >= depth:
        raise UserError(
            f"layers.{key} names no layers; write a layer or a range from 0 to {depth - 1}, as in 0-{depth - 1}"
        )
    return range(first, last + 1)


class Model(Part):
    """GPT that maps ids (B, T) to logits (B, T, vocabulary)."""

    def __init__(self, config: GPT) -> None:
        super().__init__()
        self.config = config
        self.stages = config.stages
        self.orders = [config.order(progress) for progress in self.stages]
        width, depth = config.width, config.depth
        self.embedding = config.embedding.build(config.vocabulary, width)
        self.blocks = nn.ModuleList(
            BlockModule(block, width, layer, depth, config.own_mlps(layer)) for layer, block in enumerate(config.blocks)
        )
        self.connections = max(len(order) // 2 for order in self.orders)
        self.skips = config.skips.build(self.connections, width) if config.skips and self.connections else None
        again = config.recurrence
        self.passes = PassEmbeddings(again, width) if again and again.embeddings else None
        self.lanes = config.parallel_streams.build(depth) if config.parallel_streams else None  # named as in files
        self.places = [config.places(progress) for progress in self.stages]
        self.dense_connections = None
        if dense := config.dense_connections:
            bigrams = getattr(config.embedding, "bigrams", None) is not None
            layers = config.value_embedding.layers if config.value_embedding else ()
            self.dense_connections = dense.build(width, config.longest_order, config.blocks, bigrams, layers)
        self.value_embedding: ValueTable | None = None
        if values := config.value_embedding:
            self.value_embedding = ValueTable(values, config.vocabulary, config.value_width(values.layers[0]))
        self.head = config.head.build(self.embedding, config.vocabulary, width)

    def set_product(self, part: ModelPart, product: Product) -> None:
        """Set the matrix product that the linear layers of a part use."""
        for name, module in self.named_modules():
            inside = name.startswith("head") if part == "head" else re.match(r"blocks\.\d+\.(mlp|later_mlps)\b", name)
            if inside and isinstance(module, Linear | HeadModule):
                module.product = product

    def stage(self, progress: float) -> int:
        """Return the index of the stage of a run at that progress."""
        return bisect_right(self.stages, progress) - 1

    def forward(
        self,
        ids: Tensor,
        starts: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        last: int | None = None,
        cache: Cache | None = None,
        stage: int = -1,
        capped: bool = True,
        segments: int = 0,
    ) -> Tensor:
        """Return logits, in float32 at least; `starts` (B, T) is true where a document begins.

        `last` limits them to that many last positions. With a `cache`, which the forward extends, the ids continue
        those of the previous call. `stage` is the index of the run's stage; the last stage is packed and scored.
        `capped=False` returns logits before the softcap, in `dtype`, as `HeadModule.losses` takes them. `segments` is
        an upper bound on the documents in the rows, each counted once for every row that it reaches; 0 means unknown
        and rules out attention that needs the number.
        """
        context = Context(ids, starts, dtype, cache, self.stages[stage], segments)
        x = self.embedding(context)
        if self.value_embedding is not None:
            context.values = self.value_embedding.by_layer(context)
        x = self._run_blocks(x, context, stage, last if last and last < ids.shape[1] else None)
        head = self.head if capped else self.head.uncapped
        return head(x if last is None else x[:, max(0, x.shape[1] - last) :], self.embedding)

    def _run_blocks(self, x: Tensor, context: Context, stage: int, last: int | None) -> Tensor:
        """Return the stream after all layers in the order of `stage`, or its `last` positions alone."""
        x0, stream1, order = x, None, self.orders[stage]
        context.outputs = [x]
        saved: list[Tensor] = []
        half, passes = len(order) // 2, [0] * len(self.blocks)
        for number, layer in enumerate(order):
            if self.lanes is not None and stream1 is None and layer >= self.lanes.first:
                stream1 = x
            if self.skips is not None and number >= half and saved:
                x = self.skips(number - half, x, saved.pop())
            context.pass_index = passes[layer]
            passes[layer] += 1
            if self.passes is not None and layer == self.passes.first:
                x = self.passes(context.pass_index, x)
            block = cast(BlockModule, self.blocks[layer])
            if self.lanes is None or stream1 is None:
                context.last = last if number == len(order) - 1 else None
                if self.dense_connections is None:
                    x = block(x, x0, context)
                else:
                    x = self.dense_connections.step(self.places[stage][number], block, x, context)
            else:
                x, stream1 = self.lanes.step(layer, block, (x, stream1), x0, context)
            if number < half:
                saved.append(x)
        return x if stream1 is None or self.lanes is None else self.lanes.merge((x, stream1))


def build(config: GPT, seed: int, device: torch.device | str = "cpu") -> Model:
    """Return the model with its initial weights, which depend on the seed and not on the device."""
    with torch.device(device):  # not through "meta", whose `empty_like` imports sympy: half a second per process
        model = config.build()
    initialize(model, seed)
    return model


def parameter_count(config: GPT) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in config.outline().parameters())
