"""Does it pay if each rounding weighs its own code length? Against plain rounding at equal bytes, on trained weights.

    python bench/code_length_rounding.py RUN... [--steps 5e-4 ...] [--ways NAME ...] [--megabytes .3 ...] [--rows FILE]

`Waterfilling` rounds each weight to the nearest step and lets later columns take up the error. Here, with the same
steps and feedback, an integer q is taken in the place of t = weight / step that makes

    (t - q)^2 + slope * ln(2) / 6 * (bits that q takes)

least, as video coders do (G. Sullivan and T. Wiegand, IEEE Signal Processing Magazine 15(6), 1998). ln(2) / 6 is what a
bit buys where uniform steps are small, so a slope of 1 is what the steps themselves imply. Bits are those under the
frequencies of plain rounding: of the whole tensor (`tensor`), or of the weights of like row and column scale with the
priors of the entropy model (`scale`), which is what our coder pays but for having to learn it. As such rounding shrinks
weights, a tensor's step may be moved after it, which costs no byte: so that the tensor has its old energy, weighted as
the loss weighs it (`energy`), or that its error is least (`least`).

Bytes are those of all coded weights by the product's own choice of codec. The gap is in bits per byte of held-out text,
and so is the divergence (Kullback-Leibler) from the weights before, which shows the same with less chance in it. Both
are taken at equal bytes, those of plain rounding or `--megabytes`, from curves through the points of each way, of which
there must be three; ± is how much the ratio to plain rounding differs between sizes, not what another text would say.
`--rows` keeps what was measured and is not measured again.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from caddie.model import Model, build
from caddie.model.parameters import assign
from caddie.pack.candidates import Candidate, Candidates
from caddie.pack.coding.priors import FRACTION_BITS, LARGEST, PRIOR_BITS, contexts, log2, priors, width
from caddie.pack.compress import Pack
from caddie.pack.quantize import Arrays, Calibration, Waterfilling
from caddie.pack.quantize.gptq import cholesky_upper
from caddie.pack.quantize.quantizer import as_rows
from caddie.pack.quantize.waterfilling import _BLOCK, _LARGEST, _REMEDY, _steps
from caddie.report.tables import table
from caddie.run.run_folder import read_run, run_weights
from caddie.run.stages import bits_per_nat, calibrate_recipe, held_out_text

Odds = Literal["tensor", "scale"]
Move = Literal["energy", "least"]
Row = dict[str, Any]
Measure = Callable[[Path, Sequence[float], Sequence[str], int, set[str]], Iterator[Row]]

_PRIOR_COUNT = 200
"""As in the entropy model."""
_TRUST = 4
"""Rows or columns that what is usual weighs as much as; what the coder takes unless it finds another better."""
_BIT_BUYS = math.log(2) / 6
STEPS = tuple(5e-4 * 2.0 ** (place / 2) for place in range(-2, 5))


@dataclass(frozen=True)
class Way:
    """How weights are rounded."""

    odds: Odds = "tensor"
    slope: float = 0.0
    """0 is plain rounding."""
    move: Move | None = None
    """What a tensor's step is moved for afterwards."""

    @property
    def name(self) -> str:
        """As in the table."""
        rounding = f"{self.odds}, slope {self.slope:g}" if self.slope else "plain"
        return rounding + (f", {self.move}" if self.move else "")


PLAIN = Way()
WAYS = {
    way.name: way
    for way in (
        PLAIN,
        Way(move="energy"),
        Way(move="least"),
        *(Way("tensor", slope) for slope in (0.25, 0.5, 1.0)),
        *(Way("scale", slope) for slope in (0.1, 0.25, 0.5, 1.0)),
        Way("scale", 0.25, "energy"),
        Way("scale", 0.5, "energy"),
        Way("scale", 0.5, "least"),
    )
}


def code_lengths(integers: Tensor, odds: Odds) -> tuple[Tensor, Tensor]:
    """Bits of each magnitude by context, (contexts, 256), and the context of each integer, both by frequency.

    An integer and its negative cost the same; magnitudes beyond 255 cost as 255.
    """
    magnitudes = integers.abs().clamp_max(LARGEST).long()
    if odds == "tensor":
        places = torch.zeros_like(magnitudes)
        usual = torch.full((1, LARGEST + 1), 1 / (2 * LARGEST + 1))
        weight = LARGEST + 0.5  # half a count for every integer
    else:
        rows, columns = magnitudes.shape
        sums = magnitudes.double()
        mean = sums.mean().clamp_min(2.0**-FRACTION_BITS)
        ratios = (sums.sum(0) + _TRUST * mean) / ((rows + _TRUST) * mean)
        scales = (sums.sum(1) + _TRUST * mean) / (ratios.sum() + _TRUST)
        fixed = (scales[:, None] * ratios * 2**FRACTION_BITS).round()
        places = torch.from_numpy(contexts(log2(fixed.numpy()))).long()
        usual = torch.from_numpy(priors()[width(rows, columns)] / 2.0**PRIOR_BITS).float()
        weight = _PRIOR_COUNT
    counts = torch.bincount((places * (LARGEST + 1) + magnitudes).flatten(), minlength=usual.numel()).float()
    counts = counts.reshape(usual.shape)
    counts[:, 1:] /= 2  # of each sign
    total = counts.sum(1) + counts[:, 1:].sum(1)
    return -((counts + weight * usual) / (total[:, None] + weight)).log2(), places


def feed_back(rows: Tensor, steps: Tensor, unit: Tensor, bits: Tensor, places: Tensor, slope: float) -> Tensor:
    """The integers of `Waterfilling`'s feedback, each chosen by its error and `slope` times its bits."""
    left, steps, places = rows.T.contiguous(), steps.T.contiguous(), places.T.contiguous()
    costs = (slope * _BIT_BUYS * bits).flatten()
    integers = torch.empty_like(left)
    for begin in range(0, len(left), _BLOCK):
        end = min(begin + _BLOCK, len(left))
        errors = torch.zeros(end - begin, len(rows))
        for j in range(begin, end):
            target = (left[j] + unit[begin:j, j] @ errors[: j - begin]) / steps[j]
            below = target.abs().floor().clamp_max(_LARGEST - 1)
            tried = torch.stack([below, below + 1, torch.zeros_like(below)])
            lengths = costs[places[j] * bits.shape[1] + tried.clamp_max(LARGEST).long()]
            best = ((target.abs() - tried).square() + lengths).argmin(0, keepdim=True)
            integers[j] = tried.gather(0, best)[0] * target.sign()
            errors[j - begin] = rows[:, j] - integers[j] * steps[j]
        if end < len(left):
            left[end:] += unit[begin:end, end:].T @ errors
    return integers.T.contiguous()


def rounded(plain: Arrays, weight: Tensor, calibration: Calibration, quantizer: Waterfilling, way: Way) -> Arrays:
    """`plain`, which `quantizer` made of the weight, rounded anew."""
    rows = as_rows(weight)
    integers = torch.from_numpy(plain["integers"]).reshape(rows.shape)
    if not bool(integers.any()):
        return plain
    if weight.ndim != 2 and calibration.rows is not None:
        calibration = Calibration(rows=calibration.rows.mean().expand(len(rows)))
    importance, columns = quantizer._costs(rows, calibration)
    step = float(plain["step"][0])
    along, across = (torch.from_numpy(plain[key].astype(np.int32)) for key in ("row_steps", "column_steps"))
    steps = _steps(along, across, step)
    if way.slope:
        factor = cholesky_upper(columns.double(), _REMEDY).float()
        alive = integers.any(1)  # the others lost their own steps
        bits, places = code_lengths(integers[alive], way.odds)
        found = feed_back(rows[alive], steps[alive], factor / factor.diagonal(), bits, places, way.slope)
        integers = torch.zeros_like(integers).index_put_((alive,), found.to(torch.int16))
    if way.move:
        restored = integers * steps
        through = restored @ columns * importance[:, None]
        energy, shared = float((through * restored).sum()), float((through * rows).sum())
        whole = float((rows @ columns * importance[:, None] * rows).sum())
        if energy > 0 < shared:
            step *= shared / energy if way.move == "least" else math.sqrt(whole / energy)
    return plain | {
        "integers": integers.to(torch.int16).reshape(weight.shape).numpy(),
        "step": np.array([step], "<f4"),
    }


class Reader:
    """Held-out text and what the model made of it before its weights were rounded."""

    def __init__(self, model: Model, ids: Tensor, bos: int) -> None:
        """`ids` are (batches, rows, length + 1)."""
        self.model, self.ids, self.bos = model, ids, bos
        self.before = [self._log_odds(batch) for batch in ids]

    @torch.no_grad()
    def read(self, weights: dict[str, Tensor]) -> tuple[float, float]:
        """Nats per token that these weights cost more, and their divergence from those before."""
        self.model.load_state_dict(weights)
        gap = divergence = 0.0
        for batch, before in zip(self.ids, self.before, strict=True):
            lost = before - self._log_odds(batch)
            gap += float(lost.gather(2, batch[:, 1:, None]).double().sum())
            divergence += float((lost * before.exp()).double().sum())
        count = self.ids[..., 1:].numel()
        return gap / count, divergence / count

    @torch.no_grad()
    def _log_odds(self, batch: Tensor) -> Tensor:
        inputs = batch[:, :-1]
        log_odds: Tensor = self.model(inputs, inputs == self.bos).float().log_softmax(-1)
        return log_odds


class Trained:
    """A run's weights with all that packing them and reading held-out text with them takes."""

    def __init__(self, run: Path, tokens: int) -> None:
        self.recipe, _, corpus = read_run(run)
        self.weights, text = run_weights(run, self.recipe, corpus), held_out_text(corpus)
        model, length = build(self.recipe.model, 0), self.recipe.score.sequence_length
        model.load_state_dict(self.weights)
        rows = max(1, 2048 // length)
        batches = min(tokens, len(text.tokens) - 1) // (rows * length)
        starts = torch.arange(batches * rows)[:, None] * length + torch.arange(length + 1)
        ids = torch.from_numpy(np.asarray(text.tokens).astype(np.int64))[starts].reshape(batches, rows, length + 1)
        self.reader, self.per_nat, self._pack = Reader(model, ids, text.bos), bits_per_nat(corpus), Pack()
        self._calibrations = calibrate_recipe(self.recipe.but(pack=self._pack), self.weights, corpus)
        self.quantizers = assign(self._pack.quantizers, model, "pack.quantizers")
        """Quantizer of each weight."""

    def candidates(self) -> Candidates:
        """Return what packs the weights, with nothing kept of earlier packings."""
        return Candidates(
            self.weights, self._calibrations, self._pack.coding, lambda found: sum(len(one.data) for one in found)
        )

    def costs(self, found: Candidate) -> Row:
        """Return the bytes of packed weights, and what they cost in bits per byte of held-out text."""
        gap, divergence = self.reader.read({name: stored.restored for name, stored in found.weights.items()})
        return {
            "bytes": found.file_bytes,
            "gap": gap * self.per_nat,
            "divergence": divergence * self.per_nat,
            "predicted": (found.predicted_loss or 0.0) * self.per_nat,
        }


def measure(run: Path, steps: Sequence[float], ways: Sequence[str], tokens: int, done: set[str]) -> Iterator[Row]:
    """A row for each step and way that is not `done`."""
    if all(row_key(run, step, way) in done for step in steps for way in ways):
        return
    trained = Trained(run, tokens)
    drafts, chosen = trained.candidates(), trained.quantizers
    for step in steps:
        wanted = [WAYS[way] for way in ways if row_key(run, step, way) not in done]
        if not wanted:
            continue
        quantizers = {
            name: quantizer.but(step=step) if isinstance(quantizer, Waterfilling) else quantizer
            for name, quantizer in ((name, chosen[name]) for name in trained.weights)
        }
        plain = drafts.make(quantizers)
        for way in wanted:
            draft = plain if way == PLAIN else drafts.changed(plain, _anew(drafts, plain, way))
            yield {
                "key": row_key(run, step, way.name),
                "run": run.name,
                "parameters": trained.recipe.parameters,
                "way": way.name,
                "step": step,
                **trained.costs(draft),
            }


def _anew(drafts: Candidates, plain: Candidate, way: Way) -> dict[str, Arrays]:
    return {
        name: rounded(stored.arrays, drafts.weights[name], drafts.calibrations[name], stored.quantizer, way)
        for name, stored in plain.weights.items()
        if isinstance(stored.quantizer, Waterfilling)
    }


def row_key(run: Path, step: float, way: str) -> str:
    """Tells a row from all others of its file."""
    return f"{run.name} {step:.3g} {way}"


def measured(given: argparse.Namespace, measure: Measure) -> Iterator[tuple[Path, list[Row]]]:
    """Each run with all rows so far: those of `--rows`, and what they lack, which is measured, shown and kept there."""
    rows = []
    if given.rows and given.rows.exists():
        rows = [json.loads(line) for line in given.rows.read_text().splitlines()]
    for run in given.runs:
        for row in measure(run, given.steps, given.ways, given.tokens, {row["key"] for row in rows}):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if given.rows:
                with given.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        yield run, rows


def at(points: Sequence[Row], size: float, field: str) -> float | None:
    """The field of a file of so many bytes; None beyond the points, or where there are fewer than three of them.

    The parabola that is nearest to the points in logarithms of both; a straight line is off by 6 % in the middle of an
    octave of steps. The gap, which may be negative, is counted in divergences, by a straight line.
    """
    sizes = [math.log(point["bytes"]) for point in points]
    if len(points) < 3 or not min(sizes) - 1e-9 <= math.log(size) <= max(sizes) + 1e-9:
        return None
    share = 1.0
    if field == "gap":
        parts = [point["gap"] / point["divergence"] for point in points]
        share, field = float(np.polyval(np.polyfit(sizes, parts, 1), math.log(size))), "divergence"
    logs = [math.log(max(point[field], 1e-12)) for point in points]
    return share * math.exp(np.polyval(np.polyfit(sizes, logs, 2), math.log(size)))


def summary(rows: Sequence[Row], sizes: Sequence[float] = ()) -> str:
    """The table of one run: each way at the sizes, and what it comes to over all sizes of plain rounding."""
    by_way: dict[str, list[Row]] = {}
    for row in rows:
        by_way.setdefault(row["way"], []).append(row)
    plain = by_way.get(PLAIN.name, [])
    known = sorted(row["bytes"] for row in plain)
    lines = []
    for name, points in by_way.items():
        ratios: dict[str, list[float]] = {"divergence": [], "gap": [], "predicted": []}
        for size in known:
            for field, found in ratios.items():
                ours, theirs = at(points, size, field), at(plain, size, field)
                if ours is not None and theirs is not None and theirs > 0:
                    found.append(ours / theirs)
        if not ratios["divergence"]:
            continue
        shown = [at(points, size, field) for size in sizes or known for field in ("gap", "divergence")]
        means = [f"{np.mean(found):.3f} ± {_error(found):.3f}" if found else "-" for found in ratios.values()]
        lines.append([name, *("-" if one is None else f"{one:.5f}" for one in shown), *means])
    heads = [f"{kind}, {size:,.0f}" for size in sizes or known for kind in ("gap", "KL")]
    return table(lines, ["rounding", *heads, "KL : plain", "gap : plain", "predicted : plain"])


def _error(found: Sequence[float]) -> float:
    """Of the mean."""
    return float(np.std(found, ddof=1) / math.sqrt(len(found))) if len(found) > 1 else math.nan


def main() -> None:
    """The tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--steps", nargs="*", type=float, default=STEPS)
    parser.add_argument("--ways", nargs="+", default=[*WAYS], choices=[*WAYS], help="besides plain rounding")
    parser.add_argument("--megabytes", nargs="*", type=float, default=())
    parser.add_argument("--tokens", type=int, default=32_768, help="held-out tokens that are read")
    parser.add_argument("--rows", type=Path)
    arguments = parser.parse_args()
    arguments.ways = [name for name, way in WAYS.items() if way == PLAIN or name in arguments.ways]
    for run, rows in measured(arguments, measure):
        ours = [row for row in rows if row["run"] == run.name]
        print(f"\n{run.name}, bits per byte\n\n{summary(ours, [1e6 * size for size in arguments.megabytes])}\n")


if __name__ == "__main__":
    main()
