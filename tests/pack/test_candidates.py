"""Drafts: what one weighs and is expected to cost, and that nothing is done twice."""

import numpy as np
import pytest
import torch

from caddie.pack import coding as weight_coding
from caddie.pack.candidates import Candidates
from caddie.pack.codecs import Stored
from caddie.pack.coding import EntropyModel, Packed, entropy_model
from caddie.pack.container import Section
from caddie.pack.quantize import Calibration, Float16, Percentile, Rows, SigmaClip

WHOLE = Rows(bits=3, scale=Percentile(fraction=1.0))
WEIGHTS = {"a": torch.tensor([[3.0, 0.75, -1.0]]), "b": torch.tensor([1.0, 0.0])}
KNOWN = {"a": Calibration(rows=torch.tensor([4.0])), "b": Calibration()}


def total(sections: list[Section]) -> int:
    return 1000 + sum(len(section.data) for section in sections)


def drafts(known: dict[str, Calibration] = KNOWN) -> Candidates:
    return Candidates(WEIGHTS, known, Packed(codec=Stored()), total)


def test_a_draft_by_hand() -> None:
    draft = drafts().make({"a": WHOLE, "b": Float16()})
    a, b = draft.weights["a"], draft.weights["b"]
    assert a.arrays["integers"].tolist() == [[3, 1, -1]]
    assert a.restored.tolist() == [[3.0, 1.0, -1.0]]
    assert a.relative_error == pytest.approx(0.25 / (9 + 0.5625 + 1) ** 0.5)
    assert a.predicted_loss == pytest.approx(0.5 * 4 * 0.25**2)
    assert (b.relative_error, b.predicted_loss) == (0.0, 0.0)
    assert draft.predicted_loss == a.predicted_loss
    assert [section.name for section in draft.sections] == ["weights/a", "weights/b"]
    # Each array has its length in four bytes, the stream's kind in one, a checksum in three, and itself: 3 integers and
    # a step; 2 halves.
    assert [len(section.data) for section in draft.sections] == [8 + 3 + 8 + 2, 8 + 4]
    assert draft.file_bytes == 1000 + 21 + 12
    data = draft.sections[0].data
    assert int.from_bytes(data[:4], "little") == 7
    assert weight_coding.decode(data[4:11], np.int8, (1, 3)).tolist() == [[3, 1, -1]]


def test_what_was_not_calibrated_has_no_predicted_loss() -> None:
    draft = drafts({"a": KNOWN["a"]}).make({"a": WHOLE, "b": Float16()})
    assert draft.weights["a"].predicted_loss is not None
    assert draft.weights["b"].predicted_loss is None
    assert draft.predicted_loss is None
    assert drafts({}).make({"a": WHOLE, "b": WHOLE}).predicted_loss is None


def test_nothing_is_done_twice() -> None:
    made = drafts()
    first = made.make({"a": WHOLE, "b": Float16()})
    second = made.make({"a": WHOLE, "b": WHOLE})
    assert second.weights["a"] is first.weights["a"]
    assert second.weights["b"] is not first.weights["b"]
    assert made.make({"a": WHOLE.but(bits=4), "b": WHOLE}).weights["b"] is second.weights["b"]
    assert first.weights["b"].quantizer == Float16(), "drafts stay what they were"


def test_with_other_steps_arrays_are_coded_like_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 3.0, 48)
    fine, coarse = Rows(bits=6, scale=SigmaClip(k=8.0)), Rows(bits=6, scale=SigmaClip(k=16.0))
    alone = Candidates({"a": weight}, {}, EntropyModel(), total).make({"a": coarse})
    made = Candidates({"a": weight}, {}, EntropyModel(), total)
    made.make({"a": fine})
    monkeypatch.setattr(entropy_model, "_best", lambda *given: pytest.fail("settings are tried again"))
    assert made.make({"a": coarse}).file_bytes == pytest.approx(alone.file_bytes, abs=10)


def test_other_arrays_of_the_same_quantizers() -> None:
    made = drafts()
    draft = made.make({"a": WHOLE, "b": Float16()})
    arrays = {**draft.weights["a"].arrays, "integers": np.array([[3, 0, 0]], np.int8)}
    changed = made.changed(draft, {"a": arrays})
    assert list(changed.weights) == ["a", "b"]
    assert changed.weights["a"].restored.tolist() == [[3.0, 0.0, 0.0]]
    assert changed.weights["a"].predicted_loss == pytest.approx(0.5 * 4 * (0.75**2 + 1))
    assert changed.weights["b"] is draft.weights["b"]
    assert draft.weights["a"].restored.tolist() == [[3.0, 1.0, -1.0]]
    assert made.make({"a": WHOLE, "b": Float16()}).weights["a"] is draft.weights["a"]


def test_weights_may_be_parameters_in_any_format() -> None:
    weights = {"a": torch.nn.Parameter(WEIGHTS["a"].clone()), "b": WEIGHTS["b"].bfloat16()}
    found = Candidates(weights, {}, Packed(codec=Stored()), total).make({"a": WHOLE, "b": Float16()})
    assert [section.data for section in found.sections] == [
        section.data for section in drafts().make({"a": WHOLE, "b": Float16()}).sections
    ]
    assert not found.weights["a"].restored.requires_grad
