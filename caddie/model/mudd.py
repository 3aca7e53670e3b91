"""Multiway dynamic dense connections (MUDD): layers read earlier outputs with weights that each token computes."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caddie.config import Config, Count, NonNegative, Positive, Range
from caddie.errors import UserError
from caddie.model.block import Block, BlockModule
from caddie.model.context import Context
from caddie.model.linear import Linear
from caddie.model.parameters import Constant, FanIn, Initial, Normal, Part, RowConstants
from caddie.ops import rms_norm

Pass = Annotated[int, Range(0, 1023)]
FACTOR = 0.1
"""Factor on the coefficients of `LastLayerMUDD`."""


class DenseConnections(Config):
    """Socket: dense connections, from the outputs of all passes of layers to later ones.

    Passes are numbered from 0 in the longest order of the layers under depth recurrence. A pass that a stage leaves out
    returns its input.
    """

    @abstractmethod
    def build(
        self, width: int, order: Sequence[int], blocks: Sequence[Block], bigrams: bool, value_layers: Sequence[int]
    ) -> DenseConnectionsModule:
        """Return the module for layers with `blocks`, in the longest `order` of their passes.

        `bigrams` is True if the model embeds bigrams; `value_layers` are the layers with value embeddings. Raises
        `UserError` if the model lacks a part that the connections read or write.
        """

    @abstractmethod
    def renumbered(self, place: Callable[[int], int]) -> Self:
        """Return the connections for a model with fewer passes; `place` maps a pass to its new number."""


class DenseConnectionsModule(Part):
    """Module that runs the blocks and mixes earlier outputs into their inputs and outputs."""

    @abstractmethod
    def step(self, passes: range, block: BlockModule, x: Tensor, context: Context) -> Tensor:
        """Return the stream after `block`, the first of `passes`; this stage leaves out the others.

        `context.outputs` holds the embedded input and the outputs of all earlier passes; the call appends those of
        `passes`.
        """


class MUDD(DenseConnections):
    """Light MUDD: after some passes x ← x + m₀ with m_c = s_c · n(Σ_l w_cl h_l) over the outputs h_l so far.

    The weights are w = W2 gelu(W1 n(x)) + b, with W2 and b initially zero, and n is RMSNorm. The h_l are the embedded
    input, the outputs of all passes but the first, and the latest output once more, as in openai/parameter-golf #1936.

    At zero the slope of n is one over the root of its epsilon: 2,896 in float32 and 11 in bfloat16. So the first steps
    depend on the number format.
    """

    after: tuple[Pass, ...] = (2, 4, 6, 8, 10, 12, 15, 16)
    """Passes after which outputs are mixed into the stream; the defaults are for 17 passes."""
    values: tuple[Pass, ...] = (12, 15)
    """Passes of `after` with a second mixture: the next pass computes its values from n(x) + m₁, without m₀.

    This n leaves out a layer's own factor, such as `DepthScaledNorm` has.
    """
    windows: tuple[tuple[Pass, Count], ...] = ((2, 2), (6, 2), (10, 2))
    """Passes that mix fewer outputs, as pairs (pass, outputs): the embedded input and the latest ones."""
    std: NonNegative = 0.006
    """Standard deviation of the initial W1."""
    scale: Positive = 0.01
    """Initial s, one for each channel of the stream."""

    def build(
        self, width: int, order: Sequence[int], blocks: Sequence[Block], bigrams: bool, value_layers: Sequence[int]
    ) -> DenseConnectionsModule:
        windowed = [number for number, _ in self.windows]
        for name, numbers, allowed in (
            ("after", self.after, range(len(order))),
            ("values", self.values, set(self.after) - {len(order) - 1}),
            ("windows", windowed, set(self.after)),
        ):
            if len({*numbers}) < len(numbers) or not {*numbers} <= {*allowed} or not self.after:
                known = f"passes from 0 to {len(order) - 1}" if name == "after" else "passes of `after`"
                last = " but the last" if name == "values" else ""
                raise UserError(f"dense_connections.{name} must name {known}{last}, each once, not {numbers}")
        for number, count in self.windows:
            if count > number + 2:
                raise UserError(f"dense_connections.windows: after pass {number} there are {number + 2} outputs to mix")
        if idle := [number for number in self.values if blocks[order[number + 1]].attention is None]:
            raise UserError(f"dense_connections.values: the pass behind {idle[0]} has no attention")
        return _MUDD(self, width)

    def renumbered(self, place: Callable[[int], int]) -> Self:
        """Return the connections with new numbers; passes that become one keep the window of the last."""
        after = tuple(sorted({place(number) for number in self.after}))
        windows = {place(number): min(count, place(number) + 2) for number, count in self.windows}
        values = {place(number) for number in self.values} - {place(max(self.after))}
        return self.but(after=after, values=tuple(sorted(values)), windows=tuple(windows.items()))


class LastLayerMUDD(DenseConnections):
    """MUDD of the last layer: coefficients 0.1 (W2 gelu(W1 x) + b), computed for each token, not constant.

    Before the layer they mix the embedded input, the `early` output and x into its values and its stream. In the layer
    they are the factors on the stream, the outputs of attention and MLP, the embedded input and, if the model has them,
    bigrams and each half of the value embeddings. After it they mix the embedded input, the outputs `early` and
    `first`, the layer's input and value embeddings into the stream. W2 starts at zero, b so that each
    coefficient has its constant.
    """

    hidden: Count = 64
    """Rows of W1; there are two, for the coefficients before and in the layer and for those after it."""
    early: Pass = 7
    """Pass whose output goes to the values, to the layer's input and to the head."""
    first: Pass = 3
    """Pass whose output goes to the head alone."""
    backout: NonNegative = 0.5
    """Initial share of the early output that is subtracted from the stream after the layer."""

    def build(
        self, width: int, order: Sequence[int], blocks: Sequence[Block], bigrams: bool, value_layers: Sequence[int]
    ) -> DenseConnectionsModule:
        last, attention = len(blocks) - 1, blocks[-1].attention
        if len(order) < 2:
            raise UserError("LastLayerMUDD mixes the outputs of earlier layers; set model.depth to 2 or more")
        if order.count(last) > 1:
            raise UserError("LastLayerMUDD needs a last layer that runs once: end recurrence.last before it")
        if attention is None or attention.value_width(width) != width:
            raise UserError(
                "LastLayerMUDD adds outputs to the last layer's values, which must be as wide as the stream: "
                f"set layers.{last}.attention.key_value_heads to the number of heads"
            )
        if max(self.early, self.first) > len(order) - 2:
            raise UserError(
                f"dense_connections.early and .first must be at most {len(order) - 2}, before the last pass"
            )
        return _LastLayerMUDD(self, width, last, len(order), last in value_layers, bigrams)

    def renumbered(self, place: Callable[[int], int]) -> Self:
        return self.but(early=place(self.early), first=place(self.first))


class MixedOutputs(Part):
    """Mixtures m_c = s_c · n(Σ_l w_cl h_l) of the outputs so far: `channels` of them, of `sources` outputs each."""

    def __init__(self, width: int, sources: int, channels: int, std: float, scale: float) -> None:
        super().__init__()
        self.sources, self.channels = sources, channels
        weights = sources * channels
        self.up = Linear(width, weights, Normal(std=std), role="scalar")
        self.down = Linear(weights, weights, Constant(value=0.0), role="scalar")
        self.bias = self.declare("bias", (weights,), "scalar", Constant(value=0.0))
        self.scale = self.declare("scale", (channels, width), "scalar", Constant(value=scale))

    def weights(self, x: Tensor) -> Tensor:
        """Map the stream x (B, T, width) to the weights (B, T, channels, sources)."""
        weights = self.down(F.gelu(self.up(_norm(x)))) + self.bias.to(x.dtype)
        return weights.view(*x.shape[:-1], self.channels, self.sources)

    def forward(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return the mixtures (channels, B, T, width) of outputs, the last of which is the stream.

        Earlier outputs may have more positions than the stream; then only their last ones are used.
        """
        x, count = outputs[-1], self.sources
        chosen = [outputs[0], *outputs[len(outputs) - (count - 2) :], x][:count]
        weights, mixed = self.weights(x)[..., None], []
        for channel, scale in enumerate(self.scale.to(x.dtype)):
            terms = (weights[..., channel, source, :] * _latest(h, x) for source, h in enumerate(chosen))
            mixed.append(_norm(_sum(terms)) * scale)
        return torch.stack(mixed)


class Coefficients(Part):
    """Named coefficients 0.1 (W2 gelu(W1 x) + b) of each token, with given initial values."""

    def __init__(self, width: int, hidden: int, initial: Mapping[str, float]) -> None:
        super().__init__()
        self.names = tuple(initial)
        start: Initial = RowConstants(values=tuple(value / FACTOR for value in initial.values()))
        self.up = Linear(width, hidden, FanIn(), role="scalar")
        self.down = Linear(hidden, len(initial), Constant(value=0.0), role="scalar")
        self.bias = self.declare("bias", (len(initial),), "scalar", start)

    def named(self, x: Tensor) -> dict[str, Tensor]:
        """Return name to coefficient for the stream x (B, T, width), each (B, T, 1)."""
        coefficients = (self.down(F.gelu(self.up(x))) + self.bias.to(x.dtype)) * FACTOR
        return dict(zip(self.names, torch.split(coefficients, 1, -1), strict=True))


def _norm(x: Tensor) -> Tensor:
    """Apply RMSNorm with the epsilon of x's dtype, which sets the slope at zero; PyTorch's on a CPU is float32's."""
    return rms_norm(x, torch.finfo(x.dtype).eps)


def _sum(terms: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)


def _latest(h: Tensor, x: Tensor) -> Tensor:
    """Return the last positions of h (B, T, width), as many as x has."""
    return h[:, h.shape[1] - x.shape[1] :]


class _MUDD(DenseConnectionsModule):
    def __init__(self, config: MUDD, width: int) -> None:
        super().__init__()
        windows = dict(config.windows)
        self.after = nn.ModuleDict()
        for number in config.after:
            sources, channels = windows.get(number, number + 2), 2 if number in config.values else 1
            self.after[str(number)] = MixedOutputs(width, sources, channels, config.std, config.scale)

    def step(self, passes: range, block: BlockModule, x: Tensor, context: Context) -> Tensor:
        x = block(x, context.outputs[0], context)
        for number in passes:
            context.outputs.append(x)
            context.value_input = None
            if str(number) in self.after:
                mixed = self.after[str(number)](context.outputs)
                if len(mixed) > 1:
                    context.value_input = _norm(x) + mixed[1]
                x = x + mixed[0]
        return x


class _LastLayerMUDD(DenseConnectionsModule):
    def __init__(self, config: LastLayerMUDD, width: int, layer: int, passes: int, values: bool, bigrams: bool) -> None:
        super().__init__()
        self.early, self.first, self.layer, self.passes = config.early, config.first, layer, passes
        before = {f"{to}.{of}": 0.0 for to in ("values", "stream") for of in ("embedded", "early", "stream")}
        behind = {"embedded": 0.0, "early": -config.backout, "before": 0.0, "first": 0.0}
        if values:
            before |= {"values.first_half": 1.0, "values.second_half": 1.0}
            behind["values"] = 0.0
        before |= {"attention.stream": 1.0, "attention.written": 1.0, "attention.embedded": 0.0}
        if bigrams:
            before["attention.bigrams"] = 0.0
        before |= {"mlp.stream": 1.0, "mlp.written": 1.0}
        self.before = Coefficients(width, config.hidden, before)
        self.behind = Coefficients(width, config.hidden, behind)

    def step(self, passes: range, block: BlockModule, x: Tensor, context: Context) -> Tensor:
        outputs = context.outputs
        if passes.stop < self.passes:
            x = block(x, outputs[0], context)
            outputs.extend([x] * len(passes))
            return x
        embedded, early, values = outputs[0], outputs[1 + self.early], context.values.get(self.layer)
        sources = {"embedded": embedded, "early": early, "stream": x}
        k = self.before.named(x)
        added = _sum(k[f"values.{name}"] * source for name, source in sources.items())
        if values is not None:
            halves = torch.cat((k["values.first_half"], k["values.second_half"]), -1)
            added = added + halves.repeat_interleave(values.shape[-1] // 2, -1) * values
        context.values[self.layer] = added
        x = x + _sum(k[f"stream.{name}"] * source for name, source in sources.items())
        x = block.mixed(x, embedded)
        attended, k = block.attention_output(x, context), {n: context.query_positions(c) for n, c in k.items()}
        x = context.query_positions(x)
        y = k["attention.stream"] * x + k["attention.written"] * attended
        y = y + k["attention.embedded"] * _latest(embedded, x)
        if context.bigrams is not None:
            y = y + k["attention.bigrams"] * _latest(context.bigrams, x)
        written = block.mlp_output(x if block.parallel else y, context)
        x = k["mlp.stream"] * y + k["mlp.written"] * written
        sources = {"embedded": embedded, "early": early, "before": outputs[-1], "first": outputs[1 + self.first]}
        if values is not None:
            sources["values"] = values
        k = self.behind.named(x)
        return x + _sum(k[name] * _latest(source, x) for name, source in sources.items())
