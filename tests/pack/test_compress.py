"""From weights to sections and back, whatever quantizers are mixed; what is asked for, and what is refused."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from recording import Recorder
from samples import noisy
from torch import Tensor

from caddie.errors import UserError
from caddie.model import GPT, build
from caddie.pack import container
from caddie.pack.calibrate import calibrate
from caddie.pack.codecs import Stored, Zlib
from caddie.pack.coding import EntropyModel, Packed
from caddie.pack.compress import Compressed, Correction, Dequantizers, Pack, compress
from caddie.pack.container import Section
from caddie.pack.decompress import PREFIX, decompress
from caddie.pack.fit import CLOSE
from caddie.pack.quantize import (
    Binary,
    Calibration,
    Float8,
    Float16,
    Float32,
    Gptq,
    LowRank,
    Quantizer,
    Rotated,
    Rows,
    SigmaClip,
    Ternary,
    Waterfilling,
)

GPT_SMALL = GPT(vocabulary=64, width=16, depth=2).but(
    {"block.attention.heads": 2, "block.attention.key_value_heads": 1, "block.mlp.hidden": 16}
)
QUICK = Packed(codec=Zlib(level=1))
QUERY, UP = "blocks.0.attention.query.weight", "blocks.1.mlp.up.weight"
PLAIN: dict[str, Quantizer] = {"embedding": Rows(), "matrix": Rows(bits=4), "scalar": Float32()}
MIXED: dict[str, Quantizer] = {
    "embedding": Waterfilling(step=0.01),
    "matrix": Gptq(of=Rows(bits=6, scale=SigmaClip())),
    "scalar": Float16(),
    "blocks.0.*.weight": Rotated(of=Gptq(of=Rows(bits=5, packed=True))),
    "blocks.*.mlp.down.weight": Ternary(group=8, packed=True),
    "blocks.1.attention.*.weight": Binary(group=8),
    "blocks.1.attention.key.weight": Float8(),
    UP: LowRank(of=Waterfilling(step=0.1), rank=2),
}


def weights(gpt: GPT = GPT_SMALL) -> dict[str, Tensor]:
    """Those of a model all of whose parts are at work."""
    return {name: weight.detach() for name, weight in noisy(build(gpt, 0, "cpu"), 0.1).named_parameters()}


def known() -> dict[str, Calibration]:
    """What two rows of tokens tell."""
    model = build(GPT_SMALL, 0, "cpu")
    model.load_state_dict(weights())
    batches = [torch.randint(64, (1, 16), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    return calibrate(model, batches, bos=0)


def made(calibrated: bool = True, gpt: GPT = GPT_SMALL, **settings: Any) -> Compressed:
    config = Pack(**{"coding": QUICK, "fit": None, **settings})
    return compress(gpt, weights(gpt), config, known() if calibrated else {})


def sections_of(compressed: Compressed) -> dict[str, bytes]:
    """The sections, once through a file's bytes."""
    return container.unpack(container.pack([Section("config", b"{}"), *compressed.candidate.sections])).sections


def read(compressed: Compressed, gpt: GPT = GPT_SMALL) -> dict[str, Tensor]:
    return decompress(gpt.outline(), compressed.dequantizers, sections_of(compressed))


# There and back


@pytest.mark.long
@pytest.mark.parametrize(("coding", "calibrated"), [(QUICK, True), (QUICK, False), (EntropyModel(), True)])
def test_mixed_quantizers_come_back_to_the_bit(coding: Packed | EntropyModel, calibrated: bool) -> None:
    compressed = made(calibrated, quantizers=MIXED, coding=coding)
    back, told = read(compressed), known() if calibrated else {}
    assert list(compressed.candidate.weights) == list(weights()), "in the model's order"
    assert [section.name for section in compressed.candidate.sections] == [PREFIX + name for name in weights()]
    assert back.keys() == weights().keys()
    stored = compressed.candidate.weights
    for name, tensor in stored.items():
        weight = weights()[name]
        arrays = tensor.quantizer.quantize(weight, told.get(name, Calibration()))
        assert torch.equal(back[name], tensor.quantizer.dequantize(arrays, tensor.shape)), name
        error = float((back[name] - weight).norm() / weight.norm())
        assert tensor.relative_error == pytest.approx(error, rel=1e-5)
        assert (tensor.predicted_loss is not None) == calibrated
    kinds = {name: type(tensor.quantizer).__name__ for name, tensor in stored.items()}
    assert {kinds[QUERY], kinds[UP], kinds["embedding.weight"]} == {"Rotated", "LowRank", "Waterfilling"}
    assert len(set(kinds.values())) == 7
    losses = [tensor.predicted_loss for tensor in stored.values() if tensor.predicted_loss is not None]
    assert compressed.candidate.predicted_loss == (pytest.approx(sum(losses)) if calibrated else None)
    assert compressed.curve == []


def test_the_readers_are_all_that_is_needed_to_read() -> None:
    compressed = made(quantizers=MIXED, correction=Correction(matrices=2, rank=1))
    text = json.dumps({rule: reader.to_json() for rule, reader in compressed.dequantizers.items()})
    assert "step" in text
    readers = {rule: Quantizer.from_json(value) for rule, value in json.loads(text).items()}
    assert readers == compressed.dequantizers
    assert all(each.dequantizer == each for each in readers.values())
    found = decompress(GPT_SMALL.outline(), readers, sections_of(compressed))
    assert all(torch.equal(weight, found[name]) for name, weight in read(compressed).items())
    assert readers["embedding"] == Waterfilling(), "no setting that only the choice of integers needs"
    assert readers["matrix"] == Rows(bits=6)


@pytest.mark.long
def test_the_same_weights_give_the_same_bytes() -> None:
    for settings in ({}, {"quantizers": MIXED}, {"correction": Correction()}):
        first, second = made(**settings), made(**settings)
        stored, again = (
            [(s.section.name, s.section.data, s.quantizer, s.relative_error, s.predicted_loss) for s in found]
            for found in (first.candidate.weights.values(), second.candidate.weights.values())
        )
        assert stored == again


def test_weights_in_other_formats_and_places_of_memory() -> None:
    plain = compress(GPT_SMALL, weights(), Pack(quantizers=PLAIN, coding=QUICK, fit=None))
    turned = {name: weight.mT.contiguous().mT if weight.ndim > 1 else weight for name, weight in weights().items()}
    odd = {name: torch.nn.Parameter(weight.double()) for name, weight in reversed(turned.items())}
    again = compress(GPT_SMALL, odd, Pack(quantizers=PLAIN, coding=QUICK, fit=None))
    assert [(s.name, s.data) for s in plain.candidate.sections] == [(s.name, s.data) for s in again.candidate.sections]


# What is asked


def test_a_calibration_is_used_only_by_quantizers_that_ask_for_it() -> None:
    plain = Pack(quantizers=PLAIN, coding=QUICK, fit=None)
    unused, none = (compress(GPT_SMALL, weights(), plain, given).candidate for given in (known(), {}))
    assert unused.predicted_loss is None
    assert [section.data for section in unused.sections] == [section.data for section in none.sections]
    asked = compress(GPT_SMALL, weights(), plain.but({"quantizers": {**PLAIN, QUERY: Gptq()}}), known())
    assert asked.candidate.predicted_loss is not None


def test_progress_gets_every_candidate() -> None:
    events: list[Any] = []
    config = Pack(coding=QUICK, cap_bytes=3_500)
    compressed = compress(GPT_SMALL, weights(), config, known(), progress=Recorder(events.append))
    assert [event["number"] for event in events] == list(range(1, len(events) + 1))
    assert {(event["event"], event["cap_bytes"]) for event in events} == {("candidate", 3_500)}
    assert {size for size, _ in compressed.curve} <= {event["file_bytes"] for event in events}


@pytest.mark.long
def test_the_size_is_that_of_the_file_with_its_readers() -> None:
    seen: list[tuple[Dequantizers, list[Section]]] = []

    def size(readers: Dequantizers, sections: list[Section]) -> int:
        seen.append((dict(readers), list(sections)))
        return 500 + sum(len(section.data) for section in sections)

    config = Pack(coding=QUICK, cap_bytes=3_500, correction=Correction(matrices=1, rank=1))
    compressed = compress(GPT_SMALL, weights(), config, known(), size)
    assert seen[-1][0] == compressed.dequantizers
    assert sum("weight" in rule for rule in compressed.dequantizers) == 1
    assert compressed.candidate.sections in [sections for _, sections in seen]
    chosen = 500 + sum(len(section.data) for section in compressed.candidate.sections)
    assert chosen <= 3_500
    assert (chosen, compressed.candidate.predicted_loss) in compressed.curve


@pytest.mark.long
def test_the_default_fills_the_cap() -> None:
    gpt = GPT_SMALL.but({"vocabulary": 512, "width": 128, "block.mlp.hidden": 64, "depth": 1})
    chance = torch.Generator().manual_seed(2)

    rows = {name: len(weight) for name, weight in weights(gpt).items()}
    calibrations = {name: Calibration(rows=1e-4 * torch.rand(rows[name], generator=chance)) for name in rows}

    def whole(readers: Dequantizers, sections: list[Section]) -> int:
        return len(container.pack(sections))

    compressed = compress(gpt, weights(gpt), Pack(coding=QUICK, cap_bytes=70_000), calibrations, whole)
    size = len(container.pack(compressed.candidate.sections))
    assert CLOSE * 70_000 <= size <= 70_000
    assert (size, compressed.candidate.predicted_loss) in compressed.curve
    assert math.isclose(
        sum(t.predicted_loss or 0.0 for t in compressed.candidate.weights.values()),
        compressed.candidate.predicted_loss or 0.0,
    )


# Corrections


def test_the_matrices_of_the_largest_error_are_corrected() -> None:
    plain = made(quantizers={**PLAIN, UP: Rows(bits=2), QUERY: Rows(bits=2)})
    before = read(plain)
    errors = {name: float((before[name] - weight).norm()) for name, weight in weights().items() if weight.ndim == 2}
    largest = sorted(errors, key=lambda name: -errors[name])[:3]
    assert {UP, QUERY} & set(largest)
    found = made(quantizers={**PLAIN, UP: Rows(bits=2), QUERY: Rows(bits=2)}, correction=Correction(matrices=3, rank=2))
    kinds = {name: one.quantizer for name, one in found.candidate.weights.items()}
    assert {name for name, quantizer in kinds.items() if isinstance(quantizer, LowRank)} == set(largest)
    assert kinds[UP] in (LowRank(of=Rows(bits=2), rank=2), Rows(bits=2))
    after = read(found)
    for name in largest:
        assert float((after[name] - weights()[name]).norm()) < 0.95 * errors[name]
    assert all(torch.equal(after[name], before[name]) for name in set(before) - set(largest))


def test_corrections_are_chosen_by_error_or_by_what_they_gain_and_by_name() -> None:
    """A large error that no few vectors make gains nothing; a small one of rank one all of itself."""
    noise = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    outer = torch.outer(torch.linspace(-1, 1, 16), torch.linspace(1, 2, 16))
    restored = {name: torch.zeros(16, 16) for name in ("noise", "outer", "bias")} | {"bias": torch.zeros(16)}
    weights = {"noise": torch.linalg.qr(noise).Q * 6, "outer": outer, "bias": torch.ones(16) * 99}
    quantizers: dict[str, Quantizer] = {name: Rows() for name in weights}
    assert weights["noise"].norm() > weights["outer"].norm()
    for correction, chosen in (
        (Correction(matrices=1, rank=1), "noise"),
        (Correction(matrices=1, rank=1, choice="gain"), "outer"),
        (Correction(matrices=3, rank=1, pattern="out*"), "outer"),
    ):
        found = correction.corrected(weights, restored, quantizers)
        assert found == {chosen: LowRank(of=Rows(), rank=1)}
    with pytest.raises(UserError, match=r"pack\.correction\.pattern: no matrix has a name like x\*"):
        Correction(pattern="x*").corrected(weights, restored, quantizers)


def test_a_correction_is_read_whatever_rules_come_before() -> None:
    """A rule by name may stand before that of a role, which then wins: the correction must win over both."""
    quantizers = {UP: Rows(bits=2), **PLAIN}
    compressed = made(quantizers=quantizers, correction=Correction(matrices=20, rank=1))
    assert compressed.candidate.weights[UP].quantizer == LowRank(of=Rows(bits=4), rank=1)
    assert read(compressed)[UP].shape == weights()[UP].shape
    assert made(quantizers={**PLAIN, UP: LowRank()}, correction=Correction()).dequantizers[UP] == LowRank().dequantizer


# What is refused


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_refused(wrong: float) -> None:
    odd = weights()
    odd[UP][3, 4] = wrong
    with pytest.raises(UserError, match=rf"^{UP} has values that are not finite; the training run diverged, lower"):
        compress(GPT_SMALL, odd, Pack())


def test_weights_of_another_model_are_refused() -> None:
    for edit in (lambda w: w.pop(UP), lambda w: w.update(spare=w[UP]), lambda w: w.update({UP: w[UP][:-1]})):
        odd = weights()
        edit(odd)
        with pytest.raises(UserError, match=r"the weights are not those of this model: .* does not fit; train again"):
            compress(GPT_SMALL, odd, Pack())


def coded(array: np.ndarray) -> bytes:
    data = Packed(codec=Stored()).encode(array)
    return len(data).to_bytes(4, "little") + data


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda s: s.pop(PREFIX + UP), f"{UP} is missing"),
        (lambda s: s.update({PREFIX + "spare": b""}), "spare is unknown"),
        (lambda s: s.update({PREFIX + UP: b""}), f"the integers of the artifact's {UP}: the bytes are no coded array"),
        (lambda s: s.update({PREFIX + UP: b"\xff\xff\xff\xff"}), f"{UP} ends within its integers"),
        (lambda s: s.update({PREFIX + UP: s[PREFIX + UP][:-1]}), f"{UP} ends within its steps"),
        (lambda s: s.update({PREFIX + UP: s[PREFIX + UP] + b"xy"}), f"{UP} has 2 bytes too many"),
        (
            lambda s: s.update({PREFIX + UP: coded(np.zeros((16, 15), np.int8)) + s[PREFIX + UP]}),
            f"the integers of the artifact's {UP}: the bytes are not",
        ),
        (lambda s: s.update({PREFIX + UP: s[PREFIX + QUERY][:30] + bytes(300)}), "not"),
        (
            lambda s: s.update({PREFIX + UP: coded(np.ones((16, 16), np.int8)) + coded(np.full(16, np.inf, "<f2"))}),
            f"{UP} has values that are not finite",
        ),
        (
            lambda s: s.update({PREFIX + UP: coded(np.ones((16, 16), np.int8)) + coded(np.full(16, np.nan, "<f2"))}),
            f"{UP} has values that are not finite",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_not_read(edit: Any, says: str) -> None:
    compressed = made(quantizers=PLAIN)
    sections = {section.name: section.data for section in compressed.candidate.sections}
    edit(sections)
    with pytest.raises(UserError, match=says):
        decompress(GPT_SMALL.outline(), compressed.dequantizers, sections)


def test_another_model_or_other_readers_do_not_read() -> None:
    compressed = made(quantizers=PLAIN)
    for other in (GPT_SMALL.but({"depth": 3}), GPT_SMALL.but({"block.mlp.hidden": 8}), GPT_SMALL.but({"width": 32})):
        with pytest.raises(UserError):
            read(compressed, other)
    for readers in ({}, {"matrix": Rows()}, {**PLAIN, "nothing": Rows()}, {**PLAIN, "matrix": Float32()}):
        with pytest.raises(UserError):
            decompress(GPT_SMALL.outline(), readers, sections_of(compressed))


def test_sections_of_others_are_left_alone() -> None:
    compressed = made(quantizers=PLAIN)
    sections = {"config": b"x", "weight": b"", **sections_of(compressed)}
    assert set(decompress(GPT_SMALL.outline(), compressed.dequantizers, sections)) == set(weights())
