"""Filling the cap: never above it, close below it, and finer only where that is worth something."""

import math
from collections.abc import Callable, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from samples import sample
from torch import Tensor

from caddie.errors import UserError
from caddie.pack.candidates import Candidates
from caddie.pack.codecs import Stored, Zlib
from caddie.pack.coding import ArrayCodec, EntropyModel, Packed, decode
from caddie.pack.container import Section
from caddie.pack.fit import CLOSE, FillCap, Fitted, PruneOnes, _next, without_ones
from caddie.pack.quantize import (
    Binary,
    Calibration,
    Float16,
    Gptq,
    LowRank,
    Percentile,
    Quantizer,
    Rows,
    SigmaClip,
    Waterfilling,
)

FIXED = 2_000
"""Bytes of the file beside the weights."""
QUICK = Packed(codec=Zlib(level=1))
CLIPPED = Gptq(of=Rows(bits=6, scale=SigmaClip()))


def whole_file(sections: list[Section]) -> int:
    return FIXED + sum(len(section.data) for section in sections)


@cache
def weights(seed: int) -> dict[str, Tensor]:
    """Three matrices of 17,500 weights of unequal sizes, and a vector."""
    shapes = [(700, 25), (250, 70), (500, 35)]
    found = {f"m{i}": 0.02 * 3**i * sample(*shapes[i], seed=10 * seed + i) for i in range(3)}
    return {**found, "v": sample(25, seed=seed)}


@cache
def calibrations(seed: int) -> dict[str, Calibration]:
    found = {"v": Calibration(rows=torch.full((25,), 1e-9))}
    for name, weight in weights(seed).items():
        if name != "v":
            rows, width = weight.shape
            mixed = torch.eye(width) + sample(width, width, seed=seed) / width**0.5
            moments = mixed @ mixed.T
            moments *= width / moments.trace()
            found[name] = Calibration(moments, 1e-3 * torch.logspace(-2, 0, rows), moments)
    return found


def drafts(seed: int = 0, known: bool = True, coding: ArrayCodec = QUICK) -> Candidates:
    return Candidates(weights(seed), calibrations(seed) if known else {}, coding, whole_file)


def all_by(quantizer: Quantizer) -> dict[str, Quantizer]:
    return {**dict.fromkeys(("m0", "m1", "m2"), quantizer), "v": Float16()}


@cache
def filled(cap: int, step: float = Waterfilling().step, seed: int = 0) -> Fitted:
    """The same for all tests that look at it."""
    return FillCap().fit(drafts(seed), all_by(Waterfilling(step=step)), cap)


# Filling


@pytest.mark.parametrize(
    ("step", "cap", "seed"),
    [(5e-4, 31_000, 0), (5e-4, 31_000, 1), (5e-4, 36_555, 2), (5e-4, 48_561, 0), (5e-4, 61_000, 1), (0.3, 31_000, 0)],
)
def test_the_cap_is_filled_and_never_exceeded(step: float, cap: int, seed: int) -> None:
    draft = filled(cap, step, seed).candidate
    assert CLOSE * cap <= draft.file_bytes <= cap
    assert draft.file_bytes == whole_file(draft.sections)
    assert draft.weights["v"].quantizer == Float16()
    steps = {draft.weights[f"m{i}"].quantizer.step for i in range(3)}  # type: ignore[attr-defined]
    assert len(steps) == 1, "one factor for all"


@pytest.mark.long
@pytest.mark.parametrize("cap", [31_000, 37_000])
@pytest.mark.parametrize(
    "quantizer", [CLIPPED, CLIPPED.of, LowRank(of=CLIPPED, rank=2), LowRank(of=Waterfilling(), rank=2)], ids=repr
)
def test_whatever_has_steps_for_choice_can_fill_it(quantizer: Quantizer, cap: int) -> None:
    draft = FillCap().fit(drafts(), all_by(quantizer), cap).candidate
    assert CLOSE * cap <= draft.file_bytes <= cap


@pytest.mark.parametrize("quantizer", [Waterfilling(), CLIPPED.of], ids=repr)
def test_it_is_filled_without_a_calibration(quantizer: Quantizer) -> None:
    fitted = FillCap().fit(drafts(known=False), all_by(quantizer), 36_000)
    # Then all rows of a matrix change their size of step at once, a quarter of a bit for each of 17,500 weights.
    assert (0.98 if quantizer == Waterfilling() else CLOSE) * 36_000 <= fitted.candidate.file_bytes <= 36_000
    assert fitted.curve == []


@pytest.mark.long
def test_it_is_filled_with_the_entropy_model() -> None:
    part = {"m1": Calibration(rows=torch.logspace(-5, -3, 171))}
    made = Candidates({"m1": weights(0)["m1"][:171]}, part, EntropyModel(), whole_file)
    draft = FillCap().fit(made, {"m1": Waterfilling(step=3e-3)}, 8_000).candidate
    assert 0.99 * 8_000 <= draft.file_bytes <= 8_000  # 16 bytes more or less are beyond so small a file


def test_steps_that_fill_the_cap_are_kept_and_no_others_tried() -> None:
    found = filled(31_000).candidate
    again = FillCap().fit(drafts(), all_by(found.weights["m0"].quantizer), 31_000)
    assert again.candidate.file_bytes == found.file_bytes
    assert len(again.curve) == 1


def test_the_same_again() -> None:
    first, second = filled(31_000), FillCap().fit(drafts(), all_by(Waterfilling()), 31_000)
    assert [one.data for one in first.candidate.sections] == [one.data for one in second.candidate.sections]
    assert first.curve == second.curve


@pytest.mark.long
def test_more_bytes_lose_less() -> None:
    made = drafts()
    found = [FillCap().fit(made, all_by(Waterfilling()), cap).candidate for cap in range(16_000, 61_000, 10_000)]
    losses = [draft.predicted_loss for draft in found]
    assert all(loss is not None for loss in losses)
    assert losses == sorted(losses, reverse=True)  # type: ignore[type-var]
    assert len(set(losses)) == len(losses)


def test_the_curve_has_the_chosen_point_and_falls() -> None:
    fitted = filled(31_000)
    assert (fitted.candidate.file_bytes, fitted.candidate.predicted_loss) in fitted.curve
    assert fitted.curve == sorted(fitted.curve)
    losses = [loss for _, loss in fitted.curve]
    assert losses[0] == max(losses)
    assert losses[-1] == min(losses)
    assert len(fitted.curve) >= 2


def sized(**sizes: float) -> dict[float, Any]:
    """Candidates whose steps were moved by octaves, with the logarithm of their bytes over what is aimed at."""
    aim = 0.9993 * 10_000
    return {
        float(place.replace("m", "-").lstrip("o")): SimpleNamespace(file_bytes=aim * 2**excess)
        for place, excess in sizes.items()
    }


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        (sized(o0=0.7), 1.1 * 1.0 + 0.02),  # at first 0.7 octaves of bytes for one of steps
        (sized(o0=-0.35), -0.55 - 0.02),
        (sized(o0=0.0), 0.02),
        (sized(o0=7.0), 6.02),  # no further than six octaves
        (sized(o0=-7.0), -6.02),
        (sized(o0=3.0, o2=2.0), 2 + 1.1 * 2.0 / 0.5 + 0.02),  # then along the line through the last two
        (sized(o0=9.0, o1=3.0, o3=2.0), 3 + 1.1 * 2.0 / 0.5 + 0.02),
        (sized(o0=1.05, o2=1.0), 2 + 1.1 * 1.0 / 0.2 + 0.02),  # that falls by a fifth at least
        (sized(o0=1.0, o4=-3.0), 1.0),  # between a larger and a smaller file
        (sized(o0=1.0, o4=-3.0, o2=0.5), 2 + 2 * 0.5 / 3.5),
        (sized(o0=0.001, o4=-3.0), 4 * 0.02),
        (sized(o0=3.0, o4=-0.001), 4 * 0.98),
        (sized(o0=2.0, o1=0.0), 1.0 * 0.98),  # a file of just the size that is aimed at is small enough
    ],
)
def test_the_next_steps_by_hand(seen: dict[float, Any], wanted: float) -> None:
    assert _next(seen, seen, 10_000) == pytest.approx(wanted)


def test_what_is_too_fine_is_closed_in_on() -> None:
    seen = sized(o0=-3.0, m1=-1.0)
    assert _next(seen, {0.0: seen[0.0]}, 10_000) == -0.5
    seen = sized(o0=-3.0) | {-0.5: SimpleNamespace(file_bytes=5000)}
    assert _next(seen, {0.0: seen[0.0]}, 10_000) == -0.25
    seen = sized(o0=-3.0) | {-0.25: SimpleNamespace(file_bytes=5000)}
    assert _next(seen, {0.0: seen[0.0]}, 10_000) is None


class Made:
    """Makes candidates whose bytes and losses are functions of the octaves that steps are moved by."""

    def __init__(self, size: Callable[[float], float], loss: Callable[[float], float | None]) -> None:
        self.size, self.loss, self.tried = size, loss, list[float]()

    def make(self, quantizers: Mapping[str, Quantizer]) -> Any:
        place = math.log2(quantizers["w"].step)  # type: ignore[attr-defined]
        self.tried.append(place)
        size, loss = round(self.size(place)), self.loss(place)
        return SimpleNamespace(place=place, file_bytes=size, predicted_loss=loss, weights={})


def searched(size: Callable[[float], float], loss: Callable[[float], float | None], cap: int) -> tuple[Made, Fitted]:
    made = Made(size, loss)
    return made, FillCap().fit(made, {"w": Waterfilling(step=1.0)}, cap)  # type: ignore[arg-type]


def usual(place: float) -> float:
    return 100_000 * 2 ** (-0.7 * place)


def bent(place: float) -> float:
    return 20_000 + 100_000 * 2**-place


def fourfold(place: float) -> float:
    return 4**place


@pytest.mark.parametrize(
    ("size", "loss", "cap", "tried", "curve"),
    [
        (usual, fourfold, 61_000, [0, 1.1422, 1.0202], 3),
        (usual, fourfold, 161_000, [0, -1.0981, -0.9801], 3),
        (bent, fourfold, 61_000, [0, 1.5555, 1.3201, 1.2915, 1.2657, 1.2878], 6),
        (bent, fourfold, 400_000, [0, -2.7479, -1.8876, -1.9245], 4),
        (usual, lambda p: 1 + abs(p + 2.5), 1_000_000, [0, -5.2386, -4.7442], 2),  # finer than -2.5 costs more
        # A cap that nothing fits is tried up to 20 octaves away.
        (lambda p: 20_000 + 100 * 2**-p, fourfold, 10_000, [0, 1.6043, 7.143, 12.6689, 18.1945], 5),
        (lambda p: 20_000 + max(0, 4 - p), lambda p: None, 10**9, [0, -6.02, -12.04, -18.06], 0),
    ],
    ids=["coarser", "finer", "coarser, bent", "finer, bent", "too fine", "none fits", "none fills"],
)
def test_the_steps_that_are_tried(
    size: Callable[[float], float], loss: Callable[[float], float], cap: int, tried: list[float], curve: int
) -> None:
    """Frozen: the same weights and settings must give the same file."""
    made, fitted = searched(size, loss, cap)
    assert made.tried == pytest.approx(tried, abs=1e-4)
    assert len(fitted.curve) == curve


def test_a_size_that_jumps_over_the_cap_is_tried_sixteen_times() -> None:
    made, fitted = searched(lambda p: 100_000 if p < 1.3 else 50_000, fourfold, 80_000)
    assert len(made.tried) == 16
    assert fitted.candidate.file_bytes == 50_000
    assert min(abs(place - 1.3) for place in made.tried) < 1e-3


@pytest.mark.parametrize(
    ("size", "loss", "enough"),
    [
        (1000, 1.0, True),  # of a cap of 1,000
        (998, 1.0, True),
        (997, 1.0, False),
        (1001, 1.0, False),
        (500, 1e-9, False),
        (500, 0.9e-9, True),
        (500, None, False),
    ],
)
def test_the_first_steps_are_kept_where_they_are_enough(size: int, loss: float | None, enough: bool) -> None:
    made, _ = searched(lambda place: size if place == 0 else 999, lambda place: loss if place == 0 else 1.0, 1000)
    assert (len(made.tried) == 1) == enough


@pytest.mark.parametrize(("cost", "useful"), [(1.1, True), (1.11, False)])
def test_steps_are_too_fine_where_coarser_ones_cost_less_by_a_tenth(cost: float, useful: bool) -> None:
    _, fitted = searched(usual, lambda place: cost if place == 0 else 1.0, 61_000)
    assert ((100_000, cost) in fitted.curve) == useful


@pytest.mark.parametrize(("finer", "taken"), [((0.3, 0.4), True), ((0.3, 0.44), True), ((0.3, 0.45), False)])
def test_without_a_predicted_loss_squared_errors_are_the_cost(finer: tuple[float, float], taken: bool) -> None:
    """Of errors of 0.5 and 0.1, so that up to 0.286 are as good."""

    class Erring(Made):
        def make(self, quantizers: Mapping[str, Quantizer]) -> Any:
            made = super().make(quantizers)
            errors = (0.5, 0.1) if made.place == 0 else finer
            made.weights = {str(error): SimpleNamespace(relative_error=error) for error in errors}
            return made

    made = Erring(lambda place: 500 if place == 0 else 1000, lambda place: None)
    fitted = FillCap().fit(made, {"w": Waterfilling(step=1.0)}, 1000)  # type: ignore[arg-type]
    assert (fitted.candidate.file_bytes == 1000) == taken


# Where it ends


def test_more_bytes_are_not_taken_where_they_buy_nothing() -> None:
    draft = filled(10_000_000).candidate
    assert draft.predicted_loss is not None
    assert draft.predicted_loss < 1e-6
    assert draft.file_bytes < 200_000
    alone = FillCap().fit(drafts(known=False), all_by(Waterfilling()), 10_000_000).candidate
    assert max(stored.relative_error for stored in alone.weights.values()) < 1e-3


def test_a_cap_too_small_gives_the_smallest_draft() -> None:
    fitted = filled(FIXED)
    assert fitted.candidate.file_bytes == min(size for size, _ in fitted.curve) > FIXED
    assert not any(fitted.candidate.weights[f"m{i}"].restored.any() for i in range(3)), "no matrix has a weight left"


@pytest.mark.parametrize("known", [True, False])
def test_steps_too_fine_for_their_integers_are_not_taken(known: bool) -> None:
    """Four bits clip ever more as steps shrink: the file may grow for a while, but what it loses grows too."""
    made, coarse = drafts(known=known), Gptq(of=Rows(bits=4, scale=SigmaClip(k=6.0)))
    found = FillCap().fit(made, all_by(coarse), 250_000).candidate

    def cost(k: float) -> float:
        draft = made.make(all_by(coarse.but({"of.scale.k": k})))
        errors = sum(stored.relative_error**2 for stored in draft.weights.values())
        return errors if draft.predicted_loss is None else draft.predicted_loss

    least = min(cost(k) for k in (4.0, 3.0, 2.0))
    assert cost(found.weights["m0"].quantizer.of.scale.k) < 3 * least  # type: ignore[attr-defined]
    assert cost(0.7) > 10 * least


def test_drafts_are_few() -> None:
    seen = [len(filled(cap).curve) for cap in (31_000, 10_000_000, FIXED)]
    assert max(seen) <= 8, seen


@pytest.mark.parametrize("quantizer", [Float16(), Rows(), Binary(), Gptq(), LowRank(of=Rows())], ids=repr)
def test_steps_that_are_not_for_choice_are_refused(quantizer: Quantizer) -> None:
    with pytest.raises(UserError, match=r"none of pack.quantizers has steps to choose; set one to Waterfilling"):
        FillCap().fit(drafts(), all_by(quantizer), 31_000)


def test_one_with_steps_is_enough() -> None:
    quantizers = {**all_by(Rows(bits=4)), "m0": Waterfilling()}
    draft = FillCap().fit(drafts(), quantizers, 31_000).candidate
    assert draft.file_bytes <= 31_000
    assert draft.weights["m1"].quantizer == Rows(bits=4)


# Pruning


def test_ones_of_the_smallest_steps_go_first() -> None:
    tensors = {
        "a": {"integers": np.array([[1, 2, -1], [1, 0, 1]], np.int8), "steps": np.array([2, 1], np.float16)},
        "b": {"integers": np.array([-1, 3, 1], np.int8), "steps": np.array([1], np.float16)},
    }
    expected = {
        0: ([[1, 2, -1], [1, 0, 1]], [-1, 3, 1]),
        1: ([[1, 2, -1], [0, 0, 1]], [-1, 3, 1]),
        3: ([[1, 2, -1], [0, 0, 0]], [0, 3, 1]),
        5: ([[0, 2, -1], [0, 0, 0]], [0, 3, 0]),
        9: ([[0, 2, 0], [0, 0, 0]], [0, 3, 0]),
    }
    for count, (a, b) in expected.items():
        found = without_ones(tensors, count)
        assert found["a"]["integers"].tolist() == a
        assert found["b"]["integers"].tolist() == b
        assert found["a"]["integers"].dtype == np.int8
        assert found["a"]["steps"] is tensors["a"]["steps"]
    assert tensors["a"]["integers"][1].tolist() == [1, 0, 1], "what came in is left alone"


def test_ones_of_the_smallest_steps_of_all_tensors_go_first() -> None:
    steps = {"a": [3.0, 1.0], "b": [2.0, 5.0, 0.5]}
    ones = {name: {"integers": np.ones((len(of), 2), np.int8), "steps": np.float32(of)} for name, of in steps.items()}
    found = {name: arrays["integers"].tolist() for name, arrays in without_ones(ones, 5).items()}
    assert found == {"a": [[1, 1], [0, 0]], "b": [[0, 1], [1, 1], [0, 0]]}


WHOLE = Rows(bits=3, scale=Percentile(fraction=1.0))
ROWS = torch.tensor([[3.0, 1.0, -1.0, 0.0], [6.0, 2.0, 2.0, -2.0]])


def integers_of(section: Section) -> np.ndarray:
    length = int.from_bytes(section.data[:4], "little")
    return decode(section.data[4 : 4 + length], np.int8, (2, 4))


def count(sections: list[Section]) -> int:
    """A file whose size is 100 and one for each integer that is not 0."""
    return 100 + sum(int(np.count_nonzero(integers_of(section))) for section in sections)


@pytest.mark.parametrize(
    ("cap", "size", "integers"),
    [
        (200, 107, [[3, 1, -1, 0], [3, 1, 1, -1]]),
        (107, 107, [[3, 1, -1, 0], [3, 1, 1, -1]]),  # what fits is left alone
        (106, 106, [[3, 0, -1, 0], [3, 1, 1, -1]]),  # the first of the smallest step
        (105, 105, [[3, 0, 0, 0], [3, 1, 1, -1]]),
        (103, 103, [[3, 0, 0, 0], [3, 0, 0, -1]]),
        (102, 102, [[3, 0, 0, 0], [3, 0, 0, 0]]),
        (50, 102, [[3, 0, 0, 0], [3, 0, 0, 0]]),  # the smallest that there is
    ],
)
def test_ones_are_pruned_until_the_file_fits(cap: int, size: int, integers: list[list[int]]) -> None:
    made = Candidates({"w": ROWS}, {}, Packed(codec=Stored()), count)
    draft = PruneOnes().fit(made, {"w": WHOLE}, cap).candidate
    assert draft.file_bytes == size
    assert draft.weights["w"].arrays["integers"].tolist() == integers
    assert integers_of(draft.sections[0]).tolist() == integers


@pytest.mark.parametrize(
    ("bytes_of", "excess", "pruned"),
    [
        (lambda ones: ones, 0, 0),
        (lambda ones: ones, 1, 4),  # of 1,024 a part in 256 is 4
        (lambda ones: ones, 10, 12),
        (lambda ones: ones, 499, 500),
        (lambda ones: ones, 1021, 1024),
        (lambda ones: ones, 1024, 1024),
        (lambda ones: max(ones, 500), 524, 524),  # the fewest of those that fit
    ],
)
def test_ones_are_pruned_to_a_part_in_256(bytes_of: Callable[[int], int], excess: int, pruned: int) -> None:
    ones = {"integers": np.ones((64, 16), np.int8), "steps": np.linspace(1, 2, 64, dtype=np.float32)}

    def made(arrays: Any) -> Any:
        weights = {"w": SimpleNamespace(quantizer=WHOLE, arrays=arrays["w"])}
        return SimpleNamespace(weights=weights, file_bytes=100 + bytes_of(int(arrays["w"]["integers"].sum())))

    candidates = SimpleNamespace(
        make=lambda quantizers: made({"w": ones}), changed=lambda candidate, arrays: made(arrays)
    )
    found = PruneOnes().fit(candidates, {"w": WHOLE}, 1124 - excess).candidate  # type: ignore[arg-type]
    assert 1024 - found.weights["w"].arrays["integers"].sum() == pruned


@pytest.mark.parametrize("share", [0.999, 0.97, 0.93])
def test_pruning_takes_no_more_than_it_takes(share: float) -> None:
    made, quantizers = drafts(), all_by(CLIPPED)
    whole = made.make(quantizers)
    cap = int(whole.file_bytes * share)
    found = PruneOnes().fit(made, quantizers, cap).candidate
    assert 0.99 * cap <= found.file_bytes <= cap
    for name, before in arrays_of(whole.weights).items():
        after = found.weights[name].arrays["integers"]
        gone = before != after
        assert (np.abs(before[gone]) == 1).all()
        assert not after[gone].any()


def arrays_of(stored: Mapping[str, object]) -> dict[str, np.ndarray]:
    return {name: one.arrays["integers"] for name, one in stored.items() if name != "v"}  # type: ignore[attr-defined]


@pytest.mark.parametrize("quantizer", [Float16(), Binary(), Rows(bits=6, packed=True), Waterfilling()], ids=repr)
def test_where_nothing_can_be_pruned_what_fits_is_left_alone(quantizer: Quantizer) -> None:
    draft = PruneOnes().fit(drafts(), all_by(quantizer), 10**6).candidate
    assert all(stored.quantizer in (quantizer, Float16()) for stored in draft.weights.values())
    with pytest.raises(UserError, match=r"none of pack.quantizers has integers that PruneOnes prunes"):
        PruneOnes().fit(drafts(), all_by(quantizer), 1000)
    with pytest.raises(UserError, match=r"none of pack.quantizers has integers that PruneOnes prunes"):
        PruneOnes().check(all_by(quantizer).values())
    PruneOnes().check([*all_by(quantizer).values(), Gptq()])
