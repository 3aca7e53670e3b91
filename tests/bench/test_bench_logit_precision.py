"""The bench of rounded logits: its paths by hand, and what it takes from a model."""

import logit_precision
import pytest
import torch
from rich_models import TINY

from caddie import ops
from caddie.model import build


def test_costs_are_those_of_the_same_stream_in_double() -> None:
    generator = torch.Generator().manual_seed(0)
    h, weight = (torch.randn(size, generator=generator).bfloat16() for size in ((600, 16), (50, 16)))
    targets = torch.randint(50, (600,), generator=generator)
    rows = {
        (row["lift"], row["path"]): row for row in logit_precision.costs(h, weight, targets, 30.0, [0.0, 14.0], False)
    }
    assert len(rows) == 8
    for lift in (0.0, 14.0):
        true = 30.0 * torch.tanh((h.double() @ weight.double().mT + lift) / 30.0)
        loss = float(torch.nn.functional.cross_entropy(true, targets))
        assert rows[lift, "float64"]["nats"] == pytest.approx(loss, rel=1e-9)
        assert rows[lift, "caddie"]["deviation"] < 1e-5 < 1e-3 < rows[lift, "records"]["deviation"]
        for name in ("nats", "mean", "deviation"):  # not compiled, equal caps are one
            assert rows[lift, "two caps"][name] == rows[lift, "records"][name]
    assert rows[14.0, "records"]["deviation"] > 1.5 * rows[0.0, "records"]["deviation"]


def test_the_stream_is_what_the_head_multiplies() -> None:
    model = build(TINY, 0)
    ids = torch.arange(32).view(2, 16) % 16
    h, weight = logit_precision.stream_of(model, ids, 1)
    assert (h.shape, weight.dtype) == ((32, TINY.width), torch.bfloat16)
    model = build(TINY, 0)
    expected = model(ids, ids == 1, torch.bfloat16, capped=False)
    torch.testing.assert_close(ops.linear(h, weight).view(expected.shape), expected)
