"""Estimated arithmetic: by hand, against what public runs state, and against PyTorch's own counter."""

import pytest
import torch

from caddie.config.schedules import PiecewiseConstant
from caddie.model import (
    GPT,
    Block,
    Dense,
    GroupedQueryAttention,
    HashedNGrams,
    NarrowGate,
    RandomMap,
    Recurrence,
    ReluSquared,
    SwiGLU,
    TokenEmbedding,
    UntiedHead,
    ValueEmbedding,
    build,
)
from caddie.model.flops import flops_per_token
from caddie.recipes.catalog import find

LENGTH = 16
SMALL = GPT(
    vocabulary=48,
    width=32,
    depth=3,
    block=Block(attention=GroupedQueryAttention(heads=4, key_value_heads=2), mlp=ReluSquared(hidden=40)),
)


def test_by_hand() -> None:
    """Per layer 32² (queries, output) twice, 32·16 (keys, values) twice, 32·40 twice; 48·32 for the head."""
    products = 3 * (2 * 32 * 32 + 2 * 32 * 16 + 2 * 32 * 40) + 48 * 32
    attended = 3 * 2 * 32 * (1 + 16) / 2  # scores and weighted values over 8.5 positions
    assert flops_per_token(SMALL, LENGTH) == 3 * 2 * (products + attended)


@pytest.mark.parametrize(
    ("name", "row", "before", "after"),
    [
        ("baseline", 1024, 130.5, 130.5),
        ("exclusive_everywhere", 2048, 228.4, 228.4),
        ("three_layer_recurrence", 2048, 284.7, 426.2),
        (
            "longer_warmdown",
            2 * 677 - 1,
            261.2,
            390.0,
        ),  # 677 positions seen on average, as its documents are taken to be
    ],
)
def test_public_runs(name: str, row: int, before: float, after: float) -> None:
    """MFLOP per token of public runs, counted from their scripts: 6 by product and 12·layers·width·seen."""
    gpt = find(name).model
    assert flops_per_token(gpt, row, 0.0) / 1e6 == pytest.approx(before, rel=0.003)
    assert flops_per_token(gpt, row, 1.0) / 1e6 == pytest.approx(after, rel=0.003)


def counted(gpt: GPT, dtype: torch.dtype = torch.float32) -> float:
    """FLOPs per token of a forward, by PyTorch's counter; rows of `LENGTH`."""
    model = build(gpt, 0)
    from torch.utils.flop_counter import FlopCounterMode  # which imports Triton

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(2, LENGTH, dtype=torch.long), dtype=dtype)
    return float(counter.get_total_flops()) / (2 * LENGTH)


@pytest.mark.long
@pytest.mark.parametrize(
    "diff",
    [
        {},
        {"head": UntiedHead()},
        {"embedding": TokenEmbedding(dims=12, bigrams=HashedNGrams(buckets=50, dims=9))},
        {"embedding": TokenEmbedding(dims=SMALL.vocabulary)},
        {"block.mlp": SwiGLU(hidden=20)},
        {"block.mlp.linear": RandomMap(rank=5)},
        {"recurrence": Recurrence(first=1, last=1, passes=3)},
        {"recurrence": Recurrence(first=1, last=1, passes=3, own_mlps=True)},
        {"layers": {"1": {"mlp.hidden": 8, "mlp.linear": Dense(normed=True)}}},
    ],
)
def test_products_are_those_that_pytorch_counts(diff: dict[str, object]) -> None:
    gpt = SMALL.but({"block.attention": None, **diff})
    assert flops_per_token(gpt, LENGTH) / 3 == counted(gpt)


@pytest.mark.long
@pytest.mark.parametrize(
    "diff",
    [
        {},
        {"value_embedding": ValueEmbedding(layers=(2,), dims=6)},
        {"block.attention.fused": True, "block.attention.gate": NarrowGate()},
        {"layers": {"1": {"attention": None}}},
    ],
)
def test_attention_counts_what_is_seen(diff: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter's explicit matmuls (bfloat16, short rows) attend to all pairs, of which causality leaves half."""
    monkeypatch.setattr("caddie.ops.products.BFLOAT16_ON_CPU", True)
    gpt = SMALL.but(diff)
    layers = sum(gpt.blocks[layer].attention is not None for layer in range(gpt.depth))
    unseen = layers * 2 * 2 * 32 * (LENGTH - (LENGTH + 1) / 2)
    assert flops_per_token(gpt, LENGTH) / 3 == counted(gpt, torch.bfloat16) - unseen


def test_windows_and_documents() -> None:
    """A window of 4 in a row of 16: 1, 2, 3, then 4 thirteen times."""
    everything = flops_per_token(SMALL, LENGTH)
    seen = (1 + 2 + 3 + 13 * 4) / 16
    saved = 3 * 3 * 4 * 32 * (8.5 - seen)
    assert everything - flops_per_token(SMALL.but({"block.attention.window": 4}), LENGTH) == pytest.approx(saved)
    pieces = SMALL.but({"block.attention.scope": "document", "block.attention.longest": 8})
    assert flops_per_token(pieces, LENGTH) == flops_per_token(SMALL, 8)
    assert flops_per_token(SMALL.but({"block.attention.window": 64}), LENGTH) == everything


def test_layers_that_run_again_count_again() -> None:
    looped = SMALL.but(
        {"recurrence": Recurrence(first=0, last=1, passes=PiecewiseConstant(values=(1, 3), begins=(0.25,)))}
    )
    assert flops_per_token(looped, LENGTH, 0.0) == flops_per_token(SMALL, LENGTH) < flops_per_token(looped, LENGTH, 0.9)
