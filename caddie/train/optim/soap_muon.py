"""SOAP-Muon: momentum whitened in the eigenbases of its gradients' second moments, then orthogonalized."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from caddie.config import Config, Count, Fraction, NonNegative, Range
from caddie.config.schedules import NonNegativeNumber, TrainProgress, value_at
from caddie.errors import UserError
from caddie.runtime.distributed import Ranks
from caddie.train.optim.banks import Bank, BankUpdater, Communication
from caddie.train.optim.muon import floor_rows, gram_norm, newton_schulz
from caddie.train.optim.optimizer import Optimizer, Updater

_LEAST = 1e-8


class TrustGate(Config):
    """Blend of SOAP's update with the momentum; SOAP's share grows as the two and the gradient agree."""

    floor: NonNegativeNumber = 0.45
    """Least share of SOAP's update."""
    cap: NonNegativeNumber = 0.85
    """Largest share of SOAP's update."""
    agreement: Annotated[float, Range(0.0, 0.99)] = 0.2
    """Cosine of update and momentum above which the share grows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.floor, float) and isinstance(self.cap, float) and self.floor > self.cap:
            raise UserError(f"TrustGate's floor, {self.floor}, is above its cap, {self.cap}; lower it or raise the cap")

    def share(self, raw: Tensor, whitened: Tensor, gradient: Tensor, train_progress: TrainProgress) -> Tensor:
        """Return the share (count, 1, 1) for stacks (count, rows, columns) of momentum, whitened momentum, gradient."""
        agreement = (_cosine(whitened, raw) - self.agreement) / (1.0 - self.agreement)
        aligned = _cosine(whitened, gradient) / _cosine(raw, gradient).clamp_min(_LEAST)
        share = agreement.clamp(0.0, 1.0) * aligned.clamp(0.0, 1.0)
        return share.clamp(value_at(self.floor, train_progress), value_at(self.cap, train_progress))


class SoapMuon(Optimizer):
    """SOAP-Muon: Nesterov momentum divided by its root mean square in the eigenbases of SOAP, then Muon's iterations.

    After the iterations the part of a step that lengthens the matrix is shortened, and rows are lengthened to a floor.
    After the step the matrix gets the norm that the radial part alone would give it. SOAP: arXiv 2409.11321.
    """

    momentum: NonNegativeNumber = 0.95
    """Decay of the running mean of the gradient."""
    beta2: Fraction = 0.9
    """Decay of the running mean squares and second moments."""
    refresh: Count = 1
    """Steps between two refreshes of the eigenbases, by one power iteration with QR."""
    sides: Literal["both", "smaller"] = "both"
    """Sides of a matrix that have an eigenbasis; the smaller side alone costs a fraction where the other is wide."""
    steps: Annotated[int, Range(1, 100)] = 12
    """Newton-Schulz iterations, with coefficients that converge."""
    outward: Fraction = 0.5
    """Factor on the part of a step that lengthens the matrix."""
    row_floor: NonNegative = 0.3825
    """Least norm of each row of an update, as a fraction of the norm of the weight's row."""
    cautious_decay: NonNegativeNumber = 0.025
    """Cautious weight decay: after the step, only of weights that the step moves toward zero."""
    weight_decay: NonNegativeNumber = 0.0
    """Weight decay after the step: fraction of the weight, times the learning rate."""
    trust: TrustGate | None = None
    """Gate on the whitening, meant for attention's output matrices; none whitens fully."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Number format of the iterations."""
    communication: Communication = "reduce_scatter"
    """Collective for gradients and updates of several ranks, as in `Muon`."""

    def build(self, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> Updater:
        """Return the updater of these matrices; raises `UserError` for a parameter that is no matrix."""
        return _SoapUpdater(self, parameters, ranks)


class _SoapUpdater(BankUpdater):
    config: SoapMuon

    def __init__(self, config: SoapMuon, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
        super().__init__(config, parameters, ranks, config.communication)
        for bank in self.banks:
            size, *shape = bank.buffers["momentum"].shape
            zeros = bank.buffers["momentum"].new_zeros
            # Steps are counted on the host, which reads them in each step and would wait for a GPU.
            bank.buffers |= {"mean_squares": zeros(size, *shape, dtype=torch.float32), "steps": torch.zeros(size)}
            for side, length in self._sides(shape).items():
                for name in ("gram", "basis"):
                    bank.buffers[f"{side}_{name}"] = zeros(size, length, length, dtype=torch.float32)

    def update(self, bank: Bank, gradient: Tensor, train_progress: TrainProgress) -> Tensor:
        momentum, config = value_at(self.config.momentum, train_progress), self.config
        buffers = {name: buffer[bank.share] for name, buffer in bank.buffers.items()}
        mean = buffers["momentum"].lerp_(gradient, 1.0 - momentum)
        raw = gradient.lerp(mean, momentum)
        chosen = raw
        if float(buffers["steps"][0]):  # there are bases
            whitened = self._whitened(raw, buffers)
            share = 1.0 if config.trust is None else config.trust.share(raw, whitened, gradient, train_progress)
            blend = raw + (whitened - raw) * share
            chosen = blend * (gram_norm(raw) / gram_norm(blend).clamp_min(_LEAST))
        self._learn_bases(gradient.float(), buffers)
        chosen = chosen.to(getattr(torch, config.precision))
        update = newton_schulz(chosen, config.steps, "convergent", gram_norm(chosen)).float()
        rows, columns = update.shape[1:]
        weights = bank.weights()[bank.share].float()
        return floor_rows(self._shortened(update * max(1.0, rows / columns) ** 0.5, weights), weights, config.row_floor)

    def apply(self, bank: Bank, weights: list[Tensor], steps: Tensor, lr: float, train_progress: TrainProgress) -> None:
        cautious = lr * value_at(self.config.cautious_decay, train_progress)
        decay = lr * value_at(self.config.weight_decay, train_progress)
        for weight, step in zip(weights, steps.unbind(), strict=True):
            before, shrinks = weight.norm().clamp_min(_LEAST), step * weight > 0
            length = (before - lr * (step * weight).sum() / before).clamp_min(_LEAST)
            weight.sub_(step, alpha=lr)
            weight.mul_(length / weight.norm().clamp_min(_LEAST))
            weight.mul_((1.0 - decay) * (1.0 - cautious * shrinks))

    def _sides(self, shape: Sequence[int]) -> dict[str, int]:
        """Return each side of a matrix that has an eigenbasis, with its length."""
        sides = {"row": shape[0], "column": shape[1]}
        if self.config.sides == "smaller":
            sides.pop("row" if shape[0] > shape[1] else "column")
        return sides

    def _whitened(self, raw: Tensor, buffers: Mapping[str, Tensor]) -> Tensor:
        """Return the momentum divided by its root mean square in the eigenbases, with its old `gram_norm`."""
        row, column = buffers.get("row_basis"), buffers.get("column_basis")
        projected = raw.float()
        projected = projected if row is None else row.mT @ projected
        projected = projected if column is None else projected @ column
        squares = buffers["mean_squares"].lerp_(projected.square(), 1.0 - self.config.beta2)
        whitened = projected / squares.clamp_min(1e-16).sqrt()
        whitened = whitened if row is None else row @ whitened
        whitened = whitened if column is None else whitened @ column.mT
        return (whitened * (gram_norm(raw.float()) / gram_norm(whitened).clamp_min(_LEAST))).to(raw.dtype)

    def _learn_bases(self, gradient: Tensor, buffers: Mapping[str, Tensor]) -> None:
        """Add a gradient to the second moments, and refresh their eigenbases if it is time."""
        steps = int(buffers["steps"][0])
        for side, axis in (("row", 1), ("column", 2)):
            if f"{side}_gram" not in buffers:
                continue
            moment = gradient @ gradient.mT if side == "row" else gradient.mT @ gradient
            gram, basis = buffers[f"{side}_gram"].lerp_(moment, 1.0 - self.config.beta2), buffers[f"{side}_basis"]
            if steps == 0:
                basis.copy_(torch.linalg.eigh(gram).eigenvectors.flip(-1))
            elif steps % self.config.refresh == 0:
                # The eigenvalues of old vectors may have changed places; the mean squares belong to the vectors.
                order = (basis * (gram @ basis)).sum(1).argsort(dim=-1, descending=True, stable=True)
                basis.copy_(torch.linalg.qr(gram @ basis.gather(2, order[:, None].expand_as(basis))).Q)
                squares = buffers["mean_squares"]
                places = order[:, :, None] if axis == 1 else order[:, None]
                squares.copy_(squares.gather(axis, places.expand_as(squares)))
        buffers["steps"].add_(1.0)

    def _shortened(self, updates: Tensor, weights: Tensor) -> Tensor:
        """Shorten the radial part of updates that lengthen their matrices; a step is minus the update."""
        lengths = weights.square().sum((1, 2), keepdim=True).clamp_min(1e-12)
        radial = (updates * weights).sum((1, 2), keepdim=True) / lengths
        return updates - (1.0 - self.config.outward) * radial.clamp_max(0.0) * weights


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of matrices (count, rows, columns) as vectors, (count, 1, 1)."""
    a, b = a.float(), b.float()
    lengths = [x.square().sum((1, 2), keepdim=True).sqrt() for x in (a, b)]
    return (a * b).sum((1, 2), keepdim=True) / (lengths[0] * lengths[1]).clamp_min(_LEAST)
