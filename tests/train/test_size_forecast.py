"""The forecast of the artifact: near the real file, from real gradients, and off the clock."""

import io
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recording import Recorder

from caddie.config.schedules import Budget, TrainProgress
from caddie.data.loaders import TrainingData
from caddie.model import GPT, Block, GroupedQueryAttention, HashedNGrams, ReluSquared, build
from caddie.pack import container
from caddie.pack.candidates import Candidate
from caddie.pack.codecs import Brotli, Zlib
from caddie.pack.coding import ArrayCodec, Packed
from caddie.pack.compress import Correction, Dequantizers, Pack, compress
from caddie.pack.container import Section
from caddie.pack.fit import FillCap, Fit
from caddie.pack.quantize import Float16, Gptq, LowRank, Quantizer, Rows, SigmaClip, Ternary, Waterfilling
from caddie.report.display import Display
from caddie.train.loop import Trained, train
from caddie.train.settings import Train
from caddie.train.size_forecast import Forecaster, _entropy_bytes, _gaussian
from caddie.train.trainer import Trainer

SMALL = GPT(
    vocabulary=512,
    width=64,
    depth=4,
    block=Block(attention=GroupedQueryAttention(heads=2, key_value_heads=1), mlp=ReluSquared(hidden=192)),
).but({"embedding.bigrams": HashedNGrams(buckets=4096)})
TINY = SMALL.but({"vocabulary": 64, "width": 32, "depth": 2, "embedding.bigrams": None})
STEPS = Train(steps=10, batch_tokens=256, micro_batches=2, sequence_length=32, warmup_steps=2)
SHARDS = [np.random.default_rng(0).integers(0, 64, 5000).astype(np.uint16)]
DATA = TrainingData(SHARDS, 1)


STEPPED = Gptq(of=Rows(bits=6, scale=SigmaClip()))


def file_bytes(readers: Dequantizers, sections: list[Section]) -> int:
    return len(container.pack([Section("config", bytes(1000)), *sections]))


def trained_like(gpt: GPT) -> dict[str, torch.Tensor]:
    """Weights whose rows, columns and tensors differ in scale."""
    generator = torch.Generator().manual_seed(1)
    found = {}
    for name, parameter in build(gpt, 3).named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scales = (
            torch.rand(noise.shape[:1], generator=generator).reshape(noise.shape[:1] + (1,) * (noise.ndim - 1)) + 0.2
        )
        found[name] = noise * scales * 0.1
    return found


def config(matrix: Quantizer, coding: ArrayCodec, **settings: Any) -> Pack:
    rules: dict[str, Quantizer] = dict.fromkeys(("embedding", "matrix", "head"), matrix)
    return Pack(quantizers=rules | {"gate": Float16(), "scalar": Float16()}, coding=coding, **{"fit": None, **settings})


def test_the_forecast_corrects_what_packing_would() -> None:
    """Not the embedding: it has a correction already, and the pattern leaves it out."""
    settings = config(Rows(), Packed(codec=Zlib()), correction=Correction(matrices=2, pattern="blocks.0.*"))
    settings = settings.but({"quantizers.embedding": LowRank(of=Rows())})
    found = Forecaster(SMALL, settings, file_bytes).quantizers
    corrected = Counter(name.split(".")[0] for name, quantizer in found.items() if isinstance(quantizer, LowRank))
    assert corrected == {"embedding": 2, "blocks": 2}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(config(Rows(), Packed(codec=Zlib())), marks=pytest.mark.long),
        pytest.param(
            config(Gptq(of=Rows(bits=6, scale=SigmaClip())), Packed(codec=Brotli(quality=5), shuffle=True)),
            marks=pytest.mark.long,
        ),
        config(Ternary(), Packed(codec=Zlib(level=4)), correction=Correction(matrices=2, group=32)),
        pytest.param(config(Rows(bits=5, packed=True), Packed(codec=Zlib())), marks=pytest.mark.long),
    ],
    ids=["int8-zlib", "gptq-brotli", "ternary-corrected", "packed"],
)
def test_the_size_is_within_two_percent(settings: Pack) -> None:
    weights = trained_like(SMALL)
    forecaster = Forecaster(SMALL, settings, file_bytes)
    found = compress(SMALL, weights, settings, size=file_bytes)
    real = file_bytes(found.dequantizers, found.candidate.sections)
    exact = forecaster.forecast(weights, anew=True).file_bytes
    by_entropy = forecaster.forecast(weights).file_bytes
    print(f"real {real:,}, coded {exact / real - 1:+.3%}, by entropy {by_entropy / real - 1:+.3%}")
    assert exact == pytest.approx(real, rel=0.02)
    assert by_entropy == exact
    on_the_clock = forecaster.forecast(weights, seconds=1e6).file_bytes
    assert forecaster._coding > 0
    assert on_the_clock == exact, "a glance at the same weights changes nothing"


def test_before_training_matrices_of_zeros_count_as_what_they_will_be() -> None:
    settings = config(Gptq(of=Rows(bits=6, scale=SigmaClip())), Packed(codec=Zlib()))
    weights = {name: parameter.detach() for name, parameter in build(SMALL, 3).named_parameters()}
    zeros = [name for name, weight in weights.items() if weight.ndim == 2 and not weight.any()]
    assert zeros
    before = Forecaster(SMALL, settings, file_bytes).forecast(weights, anew=True).file_bytes
    after = Forecaster(SMALL, settings, file_bytes).forecast(trained_like(SMALL), anew=True).file_bytes
    assert before == pytest.approx(after, rel=0.03)


def test_a_filled_cap_costs_more_the_smaller_it_is() -> None:
    weights = trained_like(SMALL)
    gaps = []
    for cap in (150_000, 250_000, 400_000):
        settings = config(Waterfilling(), Packed(codec=Zlib()), fit=FillCap(), cap_bytes=cap)
        found = Forecaster(SMALL, settings, file_bytes).forecast(weights, anew=True)
        assert 0.99 * cap < found.file_bytes <= cap
        gaps.append(found.predicted_loss)
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 4 * gaps[1] > 0


def test_the_gap_follows_the_gradients() -> None:
    """Rounding of Float16 apart, noise of step²/12 on every weight costs 1/2 of the Fisher information."""
    weights = trained_like(TINY)
    settings = config(Rows(bits=4), Packed(codec=Zlib()))
    forecaster = Forecaster(TINY, settings, file_bytes)
    parameters = {name: torch.nn.Parameter(weight) for name, weight in weights.items()}
    for shared in (2.0, 3.0):  # in what both have nothing is learned: a deviation of 0.5 around 2.5
        for name, parameter in parameters.items():
            parameter.grad = torch.full_like(parameter, shared if name.endswith("mlp.up.weight") else 7.0)
        assert forecaster.due(TrainProgress(1, 1.0, Budget(steps=2)))
        forecaster.observe(parameters, 8.0)
    chosen = [name for name in weights if name.endswith("mlp.up.weight")]
    rounding = Rows(bits=4)
    errors = [rounding.dequantize(rounding.quantize(weights[n]), tuple(weights[n].shape)) - weights[n] for n in chosen]
    expected = sum(0.5 * 8.0 * 0.5 * float(error.square().sum()) for error in errors)
    assert forecaster.forecast(weights, anew=True).predicted_loss == pytest.approx(expected, rel=0.1)  # of a sample
    forecaster.learned = chosen
    assert forecaster.forecast(weights).predicted_loss < 1e-6


def test_newer_gradients_count_more() -> None:
    forecaster = Forecaster(TINY, config(Rows(), Packed()), file_bytes)
    name, weight = next((n, w) for n, w in trained_like(TINY).items() if w.ndim == 2)
    for step, size in ((10, 3.0), (80, 1.0)):
        for sign in (1.0, -1.0):
            parameter = torch.nn.Parameter(weight)
            parameter.grad = torch.full_like(weight, sign * size)
            forecaster.due(TrainProgress(step, float(step), Budget(steps=100)))
            forecaster.observe({name: parameter}, 0.5)
    share = 1 - math.exp(-0.7 / (0.25 * 0.8))
    rows, columns = forecaster.costs(name, weight)
    assert torch.allclose(torch.outer(rows, columns), torch.tensor(9 - share * 8.0), rtol=1e-4)


def test_a_micro_batch_is_observed_on_its_own() -> None:
    def gradients(batches: int) -> dict[str, torch.Tensor]:
        trainer = Trainer(TINY, STEPS.but(micro_batches=batches, batch_tokens=128 * batches), 7, ranks)
        stream = STEPS.loader.build(SHARDS, tokens=128, sequence_length=32, seed=7, bos=1)
        seen: dict[str, torch.Tensor] = {}

        def observe(parameters: Any, factor: float) -> None:
            assert not seen, "once"
            seen.update({name: p.grad * factor**0.5 for name, p in parameters.items() if p.grad is not None})

        trainer.observe = observe
        trainer.step((stream.micro_batch(i) for i in range(9)), TrainProgress(0, 0.0, Budget(steps=9)), bos=1)
        return seen

    from caddie.runtime.distributed import Ranks

    ranks = Ranks()
    alone, first_of_two = gradients(1), gradients(2)
    assert alone
    assert all(torch.allclose(first_of_two[name], gradient, atol=1e-5) for name, gradient in alone.items())


def test_gaussian_numbers_rounded() -> None:
    octaves = np.array([-20.0, -2.0, 0.0, 1.5, 10.0])
    bits, errors = _gaussian(octaves)
    assert bits[[0, 4]] == pytest.approx([0, 10 + 0.5 * math.log2(2 * math.pi * math.e)])
    assert errors[[0, 4]] == pytest.approx([4.0**-20, 1 / 12])
    generator = torch.Generator().manual_seed(0)
    for octave, bit, error in zip(octaves[1:4], bits[1:4], errors[1:4], strict=True):
        drawn = torch.randn(1_000_000, generator=generator) * 2.0**octave
        odds = drawn.round().unique(return_counts=True)[1] / len(drawn)
        assert bit == pytest.approx(float(-(odds * odds.log2()).sum()), rel=0.015)
        assert error == pytest.approx(float((drawn - drawn.round()).square().mean()), rel=0.01)


def test_entropy_of_bytes() -> None:
    assert _entropy_bytes(np.array([0, 1, 2, 3] * 8, np.int8)) == 32 * 2 / 8
    assert _entropy_bytes(np.array([256, 0] * 32, np.int16)) == 64 / 8
    assert _entropy_bytes(np.zeros(1600, np.int8)) == 100
    assert _entropy_bytes(np.zeros(0, np.float16)) == 1


def test_the_clock_hardly_notices() -> None:
    forecaster = Forecaster(TINY, config(Rows(), Packed()), file_bytes)
    weights = trained_like(TINY)
    forecaster.forecast(weights, anew=True)
    assert forecaster._spent == 0
    budget = Budget(seconds=100.0)
    assert not forecaster.affordable(TrainProgress(0, 0.0, budget))
    forecaster._cost, forecaster._spent = 0.1, 0.05
    assert not forecaster.affordable(TrainProgress(0, 74.0, budget))
    assert forecaster.affordable(TrainProgress(0, 76.0, budget))
    assert [second for second in range(101) if forecaster.due(TrainProgress(0, float(second), budget))] == list(
        range(5, 101, 5)
    )


def go(folder: Path, settings: Pack | None) -> tuple[Trained, list[dict[str, Any]]]:
    folder.mkdir(exist_ok=True)
    events: list[dict[str, Any]] = []
    forecaster = Forecaster(TINY, settings, file_bytes) if settings else None
    trained = train(
        TINY,
        STEPS,
        DATA,
        seed=7,
        folder=folder,
        progress=Recorder(events.append),
        forecaster=forecaster,
    )
    return trained, [event for event in events if event["event"] in ("forecast", "note")]


@pytest.mark.long
def test_a_run_says_what_its_file_would_be(tmp_path: Path) -> None:
    settings = config(Rows(), Packed(codec=Zlib()), cap_bytes=9_000)
    trained, events = go(tmp_path / "a", settings)
    forecasts = [event for event in events if event["event"] == "forecast"]
    assert [forecasts[0]["progress"], forecasts[-1]["progress"]] == [0.0, 1.0]
    found = compress(TINY, trained.weights, settings, size=file_bytes)
    real = file_bytes(found.dequantizers, found.candidate.sections)
    assert forecasts[-1]["file_bytes"] == pytest.approx(real, rel=0.02)
    assert forecasts[-1]["gap"] > 0
    (note,) = [event["text"] for event in events if event["event"] == "note"]
    assert note.startswith("the artifact would be over the cap by about")
    assert "pack.quantizers" in note
    _, again = go(tmp_path / "a", settings)
    assert [event["text"] for event in again] == ["training was done before: 10 steps"], (
        "no forecast without its gradients"
    )
    without, nothing = go(tmp_path / "b", None)
    assert not nothing
    assert all(torch.equal(without.last[name], trained.last[name]) for name in without.last)


@pytest.mark.parametrize(
    ("quantizer", "fit", "share", "said"),
    [
        (STEPPED, None, 1.001, "about 20 bytes under the cap, and may exceed it; set pack.fit=FillCap, or a"),
        (STEPPED, None, 0.9, "the artifact would be over the cap by about 2,0"),
        (
            Rows(),
            None,
            0.9,
            "set pack.quantizers of fewer bits, Waterfilling with pack.fit=FillCap, or a smaller model",
        ),
        (STEPPED, None, 1.1, ""),
        (STEPPED, FillCap(), 1.001, ""),
    ],
)
def test_a_file_that_nothing_makes_fit_is_named_before_it_is_over_the_cap(
    quantizer: Quantizer, fit: Fit | None, share: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 20_000
    forecaster = Forecaster(TINY, config(quantizer, Packed(), fit=fit, cap_bytes=round(size * share)), file_bytes)
    monkeypatch.setattr(forecaster, "forecast", lambda *given: Candidate({}, size))
    notes = [
        event["text"]
        for _ in range(2)
        for event in forecaster.events({}, TrainProgress(0, 0.0, Budget(steps=1)))
        if event["event"] == "note"
    ]
    assert len(notes) == bool(said)
    assert said in "".join(notes)


def test_off_a_terminal_three_lines_are_enough() -> None:
    stream = io.StringIO()
    display = Display(stream=stream)
    for twentieth in range(21):
        event = {"file_bytes": 15_860_000, "cap_bytes": 16_000_000, "gap_bits_per_byte": 0.0041}
        display.step({"event": "forecast", **event, "progress": twentieth / 20})
    lines = stream.getvalue().splitlines()
    early = "forecast: file about 15.86 of 16.00 MB"  # the first weights round badly, which says nothing of the last
    said = f"{early}, quantization gap about 0.0041 bpb before calibration"
    assert [line.strip() for line in lines] == [early, said, said]
