"""Output head: stream to logits over the vocabulary, and the training loss."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

from torch import Tensor

from caddie.config import Config, Positive
from caddie.errors import UserError
from caddie.model.embedding import TokenTable
from caddie.model.linear import Delta, Linear, Product, adapted
from caddie.model.parameters import Constant, FanIn, Part
from caddie.ops import SOFTCAPS, Softcap, asymmetric_softcap, cross_entropy, float32_linear, linear, rms_norm, softcap


class Head(Config):
    """Socket: output head, stream to logits."""

    softcap: Positive | None = 30.0
    """Largest magnitude of the logits (logit softcapping), or none."""
    softcap_form: Softcap = "tanh"
    """Function that caps the logits."""
    learned_caps: Literal["trained", "untrained"] | None = None
    """Asymmetric softcap (AsymLogit): two learned caps, for logits above and below 0, both initially `softcap`.

    In the records no optimizer updates them and the training loss does not read them; "untrained" reproduces that: two
    parameters that stay at `softcap`.
    """
    bias: bool = False
    """True for a learned bias per id, as in the ternary record."""

    @abstractmethod
    def build(self, embedding: TokenTable, vocabulary: int, width: int) -> HeadModule:
        """Return the module."""


class HeadModule(Part):
    """Head that maps the stream (B, T, width) and the embedding to logits (B, T, vocabulary).

    Without a `table` of its own it uses the embedding's, after a `projection` if the rows are narrower than the stream.
    `product` is the matrix product. The delta of test-time training reads the normed stream and adds to the logits
    before the softcap.
    """

    def __init__(
        self, config: Head, vocabulary: int, *, table: Linear | None = None, projection: Linear | None = None
    ) -> None:
        super().__init__()
        self.table, self.projection = table, projection
        self.bias = self.declare("bias", (vocabulary,), "scalar", Constant(value=0.0)) if config.bias else None
        self.caps: Tensor | None = None
        if config.learned_caps:
            if config.softcap is None or config.softcap_form != "tanh":
                raise UserError("model.head.learned_caps needs a softcap of the form tanh to start from")
            self.caps = self.declare("caps", (2,), "scalar", Constant(value=config.softcap))
            self.caps.requires_grad_(config.learned_caps == "trained")
        self.delta: Delta | None = None
        self.product: Product = linear
        self.config = config

    def uncapped(self, x: Tensor, embedding: TokenTable, product: Product | None = None) -> Tensor:
        """Return logits of the stream before the softcap: norm, product, delta, bias."""
        h = rms_norm(x)
        projected = h if self.projection is None else self.projection(h)
        weight = embedding.weight if self.table is None else self.table.viewed
        logits = adapted((product or self.product)(projected, weight), self.delta, h)
        return logits if self.bias is None else logits + self.bias.to(logits.dtype)

    def forward(self, x: Tensor, embedding: TokenTable) -> Tensor:
        """Return the logits of the stream, in float32 at least, because scores are sums of log-probabilities."""
        logits, cap = self.uncapped(x, embedding, float32_linear), self.config.softcap
        if cap is None:
            return logits
        if self.caps is not None:
            return asymmetric_softcap(logits, *self.caps)
        form = self.config.softcap_form
        return softcap(logits, cap) if form == "tanh" else SOFTCAPS[form](logits, cap)

    def losses(
        self,
        logits: Tensor,
        targets: Tensor,
        z_loss: float = 0.0,
        others: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the training objective and the cross-entropy in it, both (B · T,) in float32, from uncapped logits.

        `targets` are ids (B, T), and so are `others`, whose cross-entropy times `weights` is added to the objective.
        The softcap, the loss and their gradient are one operation (`caddie.ops.cross_entropy`), so training never
        computes capped logits.
        """
        logits, targets, cap = logits.flatten(0, 1), targets.flatten(), self.config.softcap
        second = (None, None) if others is None or weights is None else (others.flatten(), weights.flatten())
        if self.caps is not None and self.config.learned_caps == "trained":
            logits, cap = asymmetric_softcap(logits.float(), *self.caps), None
        # Without a cap the form is left unread, so that `caddie.run.dead_settings` finds it dead.
        form: Softcap = "tanh" if cap is None else self.config.softcap_form
        return cross_entropy(logits, targets, cap, form, z_loss, *second)


class TiedHead(Head):
    """Head that shares the embedding's table (weight tying, arXiv 1608.05859).

    If the table's rows are narrower than the stream, the head projects the stream to them first.
    """

    def build(self, embedding: TokenTable, vocabulary: int, width: int) -> HeadModule:
        dims = embedding.weight.shape[1]
        projection = None if dims == width else Linear(width, dims, FanIn())
        return HeadModule(self, vocabulary, projection=projection)


class UntiedHead(Head):
    """Head with a table of its own, initially zero, so that the first predictions are uniform."""

    def build(self, embedding: TokenTable, vocabulary: int, width: int) -> HeadModule:
        return HeadModule(self, vocabulary, table=Linear(width, vocabulary, Constant(value=0.0), role="head"))
