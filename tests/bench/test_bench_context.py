"""The bench of context: what a model that copies from a known distance gains by it."""

import math
import sys

import context
import numpy as np
import pytest
import torch
from conftest import TinyRun
from torch import Tensor, nn

BACK, IDS, LENGTH = 100, 50, 256


class Copies(nn.Module):
    """Expects the token that stands `BACK` before the next one, and all alike where the row is too short."""

    def forward(self, inputs: Tensor, begins: Tensor) -> Tensor:
        logits = torch.zeros(*inputs.shape, IDS)
        guess = torch.nn.functional.one_hot(inputs[:, : -BACK + 1], IDS).float() * 20
        logits[:, BACK - 1 :] = guess
        return logits


def test_a_model_gains_where_its_row_is_shorter_than_what_it_looks_back() -> None:
    tokens = torch.arange(4000) % BACK % IDS
    below, to_64, third, fourth, last = context.gains(Copies(), tokens, 0, LENGTH)
    assert below == to_64 == third == pytest.approx(math.log(IDS), abs=1e-5)
    assert fourth == pytest.approx(math.log(IDS) * (BACK - 1 - 64) / 64, abs=1e-5)
    assert last == 0
    losses = context.losses(Copies(), tokens, 0, LENGTH, LENGTH)
    assert np.isnan(losses[-LENGTH:]).any()
    assert np.allclose(losses[LENGTH : LENGTH + BACK - 1], math.log(IDS))


def test_places_beyond_the_row_are_not_known() -> None:
    assert [math.isnan(gain) for gain in context.gains(Copies(), torch.zeros(2000, dtype=torch.long), 0, 128)] == [
        *[False] * 4,
        True,
    ]


@pytest.mark.long
def test_a_run_has_a_line(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["context.py", str(tiny_run.folder), "--tokens", "2000"])
    context.main()
    said, head, line = capsys.readouterr().out.splitlines()
    assert said.startswith("nats per token")
    assert head.split()[0] == "recipe"
    assert line.split()[0] == "tiny"
    monkeypatch.setattr(sys, "argv", ["context.py", "nowhere"])
    with pytest.raises(SystemExit) as ended:
        context.main()
    assert (ended.value.code, *map(len, map(str.splitlines, capsys.readouterr()))) == (2, 0, 1)
