"""The forward of a model as a list of operations, for programs that are not Python: the page of `html_page.py`.

An operation is a list: its name, the register it writes, and what it reads; `share/html/model.js` has a method of the
same name for each. A register is a matrix (positions, width). Factors are lists of numbers and of parts of parameters,
[name, first element, elements, form], that are multiplied by channel.
"""

from typing import Any

import torch

from caddie.errors import UserError
from caddie.model import GPT, Model
from caddie.model.attention import GroupedQueryAttention
from caddie.model.block import BlockModule
from caddie.model.context import reach
from caddie.model.embedding import TokenEmbedding
from caddie.model.gates import DenseGate, NarrowGate, SparseGate
from caddie.model.head import TiedHead, UntiedHead
from caddie.model.linear import Dense
from caddie.model.mlp import LeakyReluSquared, ReluSquared, SwiGLU
from caddie.model.norm import Norm
from caddie.model.parallel_streams import RoutedStreams, SeparateStreams
from caddie.model.skips import GatedUNet, UNet
from caddie.model.smear import ChannelSmear, TokenSmear
from caddie.model.values import GatedValueResidual, MixedValueResidual

Factor = float | tuple[str, int, int, str]
Terms = list[tuple[str, list[Factor]]]
_KNOWN = (
    *(GPT, TokenEmbedding, ChannelSmear, TokenSmear, GroupedQueryAttention, Dense, DenseGate, NarrowGate, SparseGate),
    *(ReluSquared, LeakyReluSquared, SwiGLU, UNet, GatedUNet, RoutedStreams, SeparateStreams, TiedHead, UntiedHead),
    *(MixedValueResidual, GatedValueResidual),
)


def program(model: Model, bos: int, length: int) -> dict[str, Any]:
    """Return the model's forward over rows of up to `length` ids, float32, causal, as at the end of its training.

    Raises `UserError` for a part without operations, such as any part of a user's own.
    """
    writer = _Writer(model)
    writer.write()
    return {"registers": writer.registers, "operations": writer.operations, "bos": bos, "length": length}


class _Writer:
    def __init__(self, model: Model) -> None:
        self.model, self.gpt = model, model.config
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self.registers: dict[str, int] = {}
        self.operations: list[list[Any]] = []
        self.passes = [0] * self.gpt.depth

    # Operations

    def emit(self, name: str, to: str, width: int, *rest: Any) -> str:
        """Add an operation that writes the register `to`; return `to`."""
        assert self.registers.setdefault(to, width) == width, to
        self.operations.append([name, to, *rest])
        return to

    def part(self, name: str, row: int = 0, width: int | None = None, form: str = "") -> tuple[str, int, int, str]:
        """Return row number `row` of a parameter in rows of `width` elements, by default its last dimension."""
        shape = self.shapes[name]
        width = width or (shape[-1] if shape else 1)
        return name, row * width, width, form

    def sum(self, to: str, terms: Terms) -> str:
        """Write the sum of terms to `to`; `to` itself may only be the first term, since the operation overwrites it."""
        assert to not in [source for source, _ in terms[1:]], to
        return self.emit("sum", to, self.registers[terms[0][0]], terms)

    def copy(self, to: str, source: str) -> str:
        return self.sum(to, [(source, [])])

    def linear(self, to: str, source: str, name: str, begin: int = 0, outputs: int | None = None) -> str:
        outputs = outputs or self.shapes[f"{name}.weight"][0] - begin
        return self.emit("linear", to, outputs, source, f"{name}.weight", begin, outputs)

    def norm(self, to: str, source: str, norm: Norm | None = None, layer: int = 0) -> str:
        epsilon, scale = (norm.epsilon, norm.scale(layer)) if norm else (None, 1.0)
        return self.emit("norm", to, self.registers[source], source, epsilon, scale)

    # Parts of the model, in the order of its forward

    def write(self) -> None:
        gpt, model = self.gpt, self.model
        if gpt.dense_connections:
            raise _refused("model.dense_connections")
        self.embedding()
        self.copy("x0", "x")
        if values := gpt.value_embedding:
            self.emit("rows", "value rows", values.dims, "value_embedding.weight")
            self.linear("value embedding", "value rows", "value_embedding.projection")
        order, saved = model.orders[-1], list[str]()
        half, streams = len(order) // 2, False
        for number, layer in enumerate(order):
            if model.lanes is not None and not streams and layer >= model.lanes.first:
                streams = True
                self.copy("x1", "x")
            if gpt.skips is not None and number >= half and saved:
                self.skip(number - half, saved.pop())
            passed = self.passes[layer]
            self.passes[layer] += 1
            if model.passes is not None and layer == model.passes.first:
                self.emit("add", "x", gpt.width, self.part("passes.weight", passed))
            if streams:
                self.two_streams(layer, passed)
            else:
                self.block(layer, passed)
            if number < half and gpt.skips is not None:
                saved.append(self.copy(f"saved {number}", "x"))
        if streams:
            self.merge()
        self.head()

    def embedding(self) -> None:
        config: TokenEmbedding = known(self.gpt.embedding, "model.embedding")
        width, dims = self.gpt.width, config.dims
        self.emit("rows", "row" if dims else "x", dims or width, "embedding.weight")
        if dims:
            self.linear("x", "row", "embedding.projection")
        for order, name in ((2, "bigrams"), (3, "trigrams")):
            if table := getattr(config, name):
                if table.signs:
                    raise _refused(f"model.embedding.{name}.signs")
                base = f"embedding.{name}"
                rows = self.emit("grams", name, table.dims or width, f"{base}.weight", order)
                if table.dims:
                    rows = self.linear("h", rows, f"{base}.projection")
                self.sum("x", [("x", []), (rows, [self.part(f"{base}.scale")])])
        smear = config.smear and known(config.smear, "model.embedding.smear")
        if not isinstance(smear, TokenSmear):
            self.norm("x", "x")
        if smear:
            self.emit("previous", "before", width, "x")
        if isinstance(smear, ChannelSmear):
            gate = "embedding.smear.gate"
            kept, taken = self.part(gate, form="closed"), self.part(gate, form="sigmoid")
            self.sum("x", [("x", [kept]), ("before", [taken])])
        elif smear:
            self.linear("share", "x", "embedding.smear.gate")
            self.emit("sigmoid", "share", 1, "share", None, 1.0, 1.0)
            self.emit("gated", "before", width, "before", "share", [self.part("embedding.smear.scale")])
            self.sum("x", [("x", []), ("before", [])])
            self.norm("x", "x")

    def skip(self, number: int, saved: str) -> None:
        weight = self.part("skips.weight", number)
        if isinstance(known(self.gpt.skips, "model.skips"), GatedUNet):
            kept, taken = (self.part("skips.gate", number, form=form) for form in ("sigmoid", "closed"))
            self.sum("x", [("x", [kept]), (saved, [weight, taken])])
        else:
            self.sum("x", [("x", []), (saved, [weight])])

    def block(self, layer: int, passed: int) -> None:
        block = self.gpt.blocks[layer]
        self.mixed("x", layer)
        if block.parallel:
            self.mlp("m", "x", layer, passed)
        if block.attention:
            self.attention("a", "x", layer)
            self.sum("x", [("x", []), ("a", [self.part(f"blocks.{layer}.attention_scale")])])
        if not block.parallel:
            self.mlp("m", "x", layer, passed)
        self.sum("x", [("x", []), ("m", [self.part(f"blocks.{layer}.mlp_scale")])])

    def mixed(self, to: str, layer: int) -> str:
        if self.gpt.blocks[layer].residual_mix:
            mix = f"blocks.{layer}.mix"
            self.sum(to, [(to, [self.part(mix, 0)]), ("x0", [self.part(mix, 1)])])
        return to

    def two_streams(self, layer: int, passed: int) -> None:
        config, base = known(self.gpt.parallel_streams, "model.parallel_streams"), f"blocks.{layer}"
        attention, mlp = (self.part(f"{base}.{name}_scale") for name in ("attention", "mlp"))
        if isinstance(config, SeparateStreams):
            self.mixed("x", layer)
            self.attention("a", "x", layer)
            self.mlp("m", "x1", layer, passed)
            self.sum("x", [("x", []), ("a", [attention])])
            self.sum("x1", [("x1", []), ("m", [mlp])])
            return
        routes = [[self.part("lanes.routes", 4 * layer + 2 * source + j, 1) for j in range(2)] for source in range(2)]
        gains = [self.part("lanes.gains", 2 * layer + j, 1) for j in range(2)]
        streams = ("x", "x1")
        self.mixed(self.copy("mixed", "x"), layer)
        self.attention("a", "mixed", layer)
        if config.sequential:
            for j, stream in enumerate(streams):
                self.sum(stream, [(stream, [gains[0]]), ("a", [routes[0][j], attention])])
            self.mlp("m", self.mixed(self.copy("mixed", "x1"), layer), layer, passed)
            for j, stream in enumerate(streams):
                self.sum(stream, [(stream, [gains[1]]), ("m", [routes[1][j], mlp])])
        else:
            self.mlp("m", "x1", layer, passed)
            for j, stream in enumerate(streams):
                written: Terms = [("a", [routes[0][j], attention]), ("m", [routes[1][j], mlp])]
                self.sum(stream, [(stream, [gains[j]]), *written])

    def merge(self) -> None:
        if isinstance(self.gpt.parallel_streams, SeparateStreams):
            share = "lanes.share"
            self.sum("x", [("x", [self.part(share)]), ("x1", [self.part(share, form="rest")])])
        else:
            self.sum("x", [("x", [0.5]), ("x1", [0.5])])

    def attention(self, to: str, source: str, layer: int) -> None:
        """Write the output of attention, before its scale."""
        block, base, gpt = self.gpt.blocks[layer], f"blocks.{layer}.attention", self.gpt
        config: GroupedQueryAttention = known(block.attention, "model.block.attention")
        dense: Dense = known(config.linear, "model.block.attention.linear")
        values, heads, shared = config.value_width(gpt.width), config.heads, config.key_value_heads
        h = self.norm("h", source, block.attention_norm, layer)
        begin = 0
        for name, long, outputs in (("q", "query", gpt.width), ("k", "key", values), ("v", "value", values)):
            if config.fused:
                self.linear(name, h, f"{base}.query_key_value", begin, outputs)
                begin += outputs
            else:
                self.linear(name, h, f"{base}.{long}")
        self.values(layer, config)
        size = gpt.width // heads
        dims = config.rope.rotated_dims(size)
        frequencies = config.rope.frequencies(dims, torch.device("cpu"), torch.float32).tolist()
        self.emit("rotate", "q", gpt.width, "q", heads, frequencies, f"{base}.gain")
        self.emit("rotate", "k", values, "k", shared, frequencies, None)
        window, longest = (reach(None, length, 1.0, torch.device("cpu")) for length in (config.window, config.longest))
        document = config.scope == "document"
        self.emit("attention", "y", gpt.width, "q", "k", "v", heads, shared, window, document, longest)
        if config.xsa:
            if config.xsa_gate is not None:
                raise _refused("model.block.attention.xsa_gate")
            self.emit("exclude", "y", gpt.width, "v", heads, shared)
        if config.gate:
            gate = known(config.gate, "model.block.attention.gate")
            bias = f"{base}.gate.bias" if isinstance(gate, DenseGate) and gate.bias is not None else None
            slope = gate.scale if isinstance(gate, SparseGate) else 1.0
            height = gate.height if isinstance(gate, NarrowGate) else 1.0
            self.linear(f"gate {heads}", h, f"{base}.gate.logits")
            self.emit("sigmoid", f"gate {heads}", heads, f"gate {heads}", bias, slope, height)
            self.emit("gated", "y", gpt.width, "y", f"gate {heads}")
        if dense.normed:
            self.norm("y", "y")
        self.linear(to, "y", f"{base}.output")

    def values(self, layer: int, config: GroupedQueryAttention) -> None:
        """Add value embeddings and the first layer's values to the values."""
        embedding = self.gpt.value_embedding
        if embedding and layer in embedding.layers:
            scales: list[Factor] = [
                self.part("value_embedding.scale"),
                self.part("value_embedding.layer_scales", embedding.layers.index(layer), 1),
            ]
            self.sum("v", [("v", []), ("value embedding", scales)])
        if not config.value_residual:
            return
        residual = known(config.value_residual, "model.block.attention.value_residual")
        base = f"blocks.{layer}.attention.value_residual"
        written = "first values" in self.registers
        if layer and written:
            if isinstance(residual, MixedValueResidual):
                first, own = (self.part(f"{base}.shares", j, 1) for j in range(2))
                self.sum("v", [("v", [own]), ("first values", [first])])
            else:
                self.sum("v", [("v", []), ("first values", [self.part(f"{base}.gate", form="sigmoid")])])
        elif not written:
            self.copy("first values", "v")

    def mlp(self, to: str, source: str, layer: int, passed: int) -> None:
        """Write the output of the MLP, before its scale."""
        block = self.gpt.blocks[layer]
        module = self.model.blocks[layer]
        assert isinstance(module, BlockModule)
        config = known(block.mlp, "model.block.mlp")
        dense: Dense = known(config.linear, "model.block.mlp.linear")
        base = f"blocks.{layer}.later_mlps.{passed - 1}" if passed and module.later_mlps else f"blocks.{layer}.mlp"
        h, hidden = self.norm("h", source, block.mlp_norm, layer), config.hidden
        up = self.linear(f"up {hidden}", h, f"{base}.up")
        if isinstance(config, SwiGLU):
            gate = self.linear(f"gate of up {hidden}", h, f"{base}.gate")
            self.emit("swiglu", up, hidden, gate, up)
        else:
            slope = config.slope if isinstance(config, LeakyReluSquared) else 0.0
            self.emit("squared", up, hidden, up, slope)
        if dense.normed:
            self.norm(up, up)
        self.linear(to, up, f"{base}.down")

    def head(self) -> None:
        config, vocabulary = known(self.gpt.head, "model.head"), self.gpt.vocabulary
        h = self.norm("h", "x")
        if isinstance(config, UntiedHead):
            self.linear("logits", h, "head.table")
        else:
            if self.model.head.projection is not None:
                h = self.linear("row", h, "head.projection")
            self.linear("logits", h, "embedding")
        if config.bias:
            self.emit("add", "logits", vocabulary, self.part("head.bias"))
        if config.learned_caps == "trained":
            raise _refused("model.head.learned_caps=trained")
        if config.softcap is not None:
            self.emit("softcap", "logits", vocabulary, config.softcap, config.softcap_form == "polynomial")


def known(config: Any, path: str) -> Any:
    """Return the setting at a path; `UserError` for a class that the operations do not cover."""
    if type(config) not in _KNOWN:
        raise _refused(f"{path}={type(config).__name__}")
    return config


def _refused(setting: str) -> UserError:
    return UserError(f"the page cannot run {setting}; share the artifact itself")
