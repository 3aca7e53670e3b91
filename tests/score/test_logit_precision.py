"""A score in bfloat16 is that of the same stream in double precision, by each way that caddie scores a text.

The head compiled is compared in `tests/model/test_parts.py`: a compiled model has another stream, rounded elsewhere.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from rich_models import TINY
from torch import Tensor

from caddie import ops
from caddie.model import Model, build
from caddie.model.embedding import TokenTable
from caddie.model.head import HeadModule
from caddie.score import SGD, ChunkSGD, DocumentLoRA, GlobalSGD, Scoring, Text, score
from caddie.score.ngram_tilt import NGramTilt

BOS = 1
LORA = DocumentLoRA(rank=2, alpha=4.0, lr=0.01, chunk_tokens=8, documents=3, targets=("value", "mlp", "head"))
PHASES = GlobalSGD(documents=4, phases=2, chunk_tokens=16, sgd=SGD(lr=0.01, epochs=1))
WHOLE = Scoring(sequence_length=16, stride=16, batch_tokens=64, precision="bfloat16")
WAYS = {
    "plain": WHOLE,
    "sliding": WHOLE.but(stride=8),
    "n-gram tilt": WHOLE.but(tilt=NGramTilt(order=3)),
    # At a rate of 0.01 bfloat16 weights round otherwise in later chunks for a last digit of the loss, on CPUs without
    # AVX-512 by more than `NEAR`: that is of learning, not of logits.
    "chunks": WHOLE.but(ttt=ChunkSGD(chunk_tokens=32, sgd=SGD(lr=0.001))),
    "documents": WHOLE.but(ttt=LORA),
    "documents in phases": WHOLE.but(ttt=LORA.but(phases=PHASES)),
}
NEAR = 1e-4
"""Nats per token."""


def lifted_model(caps: str | None) -> Model:
    """A model whose likely logits come near the cap, where rounding them costs most."""
    model = build(TINY.but({"head.learned_caps": caps}), 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name != "head.caps":
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        model.embedding.weight[2:5] *= 8.0
    return model


def text(tokens: int = 160) -> Text:
    ids = np.random.default_rng(0).integers(2, 16, tokens).astype(np.uint16)
    ids[::31] = BOS
    return Text(ids, BOS, tokens, tokens, tokens)


def replaced(capped: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """The head's forward with the values of `capped`, of stream, table and delta; what is learned is as before."""

    def head(self: HeadModule, x: Tensor, embedding: TokenTable) -> Tensor:
        seen: list[tuple[Tensor, Tensor, Tensor]] = []

        def product(h: Tensor, weight: Tensor) -> Tensor:
            y = ops.float32_linear(h, weight)
            seen.append((h.detach(), weight.detach(), y.detach()))
            return y

        logits = self.uncapped(x, embedding, product)
        ((h, weight, y),) = seen
        values = capped(h, weight.to(h.dtype), logits.detach() - y)
        logits = ops.softcap(logits, 30.0).to(values.dtype)
        return logits + (values - logits.detach())

    return head


def in_double(h: Tensor, weight: Tensor, delta: Tensor) -> Tensor:
    """Every operation after the norm in float64."""
    return 30.0 * torch.tanh((h.double() @ weight.double().mT + delta) / 30.0)


def rounded(h: Tensor, weight: Tensor, delta: Tensor) -> Tensor:
    """The records' head: product, delta, division, tanh and product in bfloat16."""
    logits = ops.linear(h, weight) + delta.bfloat16()
    assert logits.dtype == torch.bfloat16
    return (30.0 * torch.tanh(logits / 30.0)).float()


@pytest.mark.parametrize("caps", [None, "untrained"])
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.long] * (place > 0)) for place, way in enumerate(WAYS)]
)
def test_every_way_of_scoring_keeps_the_logits(way: str, caps: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = score(lifted_model(caps), text(), WAYS[way])
    scores = {}
    for head in (in_double, rounded):
        monkeypatch.setattr(HeadModule, "forward", replaced(head))
        scores[head] = score(lifted_model(caps), text(), WAYS[way])
    exact = scores[in_double].nats
    tokens = len(text().tokens) - 1
    assert abs(found.nats - exact) < NEAR * tokens
    assert abs(scores[rounded].nats - exact) > 2 * NEAR * tokens, "else the bound would say nothing"
