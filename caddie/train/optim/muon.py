"""Muon: orthogonalized momentum for matrices, with MuonEq-R, Polar Express, Turbo-Muon, NorMuon and Parallel Muon."""

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from caddie.config import Count, Fraction, NonNegative, Positive, Range
from caddie.config.schedules import NonNegativeNumber, TrainProgress, value_at
from caddie.ops import to_product_dtype
from caddie.runtime.distributed import Ranks
from caddie.train.optim.banks import Bank, BankUpdater, Communication
from caddie.train.optim.optimizer import Optimizer, Updater

Coefficients = Literal["classic", "polar_express", "turbo", "convergent"]
"""Names in `COEFFICIENTS`."""
_POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
COEFFICIENTS: dict[Coefficients, tuple[tuple[float, float, float], ...]] = {
    "classic": ((3.4445, -4.7750, 2.0315),),
    "polar_express": _POLAR_EXPRESS,
    "turbo": _POLAR_EXPRESS[1:],
    "convergent": ((2.0, -1.5, 0.5),),
}
"""Quintic coefficients (a, b, c) of the Newton-Schulz iterations; the last triple serves all further ones.

The classic ones drive small singular values toward 1 fastest and leave all between 0.7 and 1.2 (Jordan et al., Muon,
2024). Polar Express has, for each iteration, the best coefficients after the previous iterations (arXiv
2505.16932). Turbo-Muon has the same without the first triple, which its preconditioner replaces (arXiv 2512.04632). The
convergent ones end at 1 exactly, in 12 iterations or so (modded-nanogpt, track 3).
"""


def gram(x: Tensor) -> Tensor:
    """Return X Xᵀ of matrices (count, rows, columns)."""
    return x @ x.mT


def gram_polynomial(symmetric: Tensor, b: float, c: float) -> Tensor:
    """Return bA + cA² of symmetric matrices A (count, rows, rows)."""
    return torch.baddbmm(symmetric, symmetric, symmetric, beta=b, alpha=c)


def gram_norm(matrices: Tensor) -> Tensor:
    """Return sqrt(‖XXᵀ‖), in the Frobenius norm, of matrices (..., rows, columns): (..., 1, 1).

    It is at least the largest singular value, and nearer to it than the Frobenius norm.
    """
    wide = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    norm: Tensor = torch.linalg.matrix_norm(wide @ wide.mT, keepdim=True)
    return norm.sqrt()


def newton_schulz(
    matrices: Tensor, steps: int, coefficients: Coefficients = "classic", norm: Tensor | None = None
) -> Tensor:
    """Orthogonalize matrices (..., rows, columns) approximately, in their dtype; singular values end near 1.

    Per step X ← aX + (bA + cA²)X with A = XXᵀ, on the wide orientation, after division by the Frobenius norm, or by
    `norm` (..., 1, 1) (Jordan et al., Muon, 2024). With `turbo` each row is first divided by the root of the sum of |A|
    over its row, which makes the largest singular value 1 at most (AOL, arXiv 2208.03160). On a CPU without products of
    their dtype the iterations are in float32: rounding each product would take a quarter longer.
    """
    triples = COEFFICIENTS[coefficients]
    tall = matrices.shape[-2] > matrices.shape[-1]
    oriented = matrices.mT if tall else matrices
    x: Tensor = oriented / ((torch.linalg.matrix_norm(oriented, keepdim=True) if norm is None else norm) + 1e-7)
    x = to_product_dtype(x.reshape(-1, *oriented.shape[-2:]))
    for step in range(steps):
        a, b, c = triples[min(step, len(triples) - 1)]
        products = gram(x)
        if coefficients == "turbo" and step == 0:
            scales = products.abs().sum(-1, keepdim=True).clamp_min(1e-30).rsqrt()
            x, products = x * scales, products * scales * scales.mT
        # The sum inside of the product: a fifth faster on a CPU, and half the rounding error in bfloat16.
        x = torch.baddbmm(x, gram_polynomial(products, b, c), x, beta=a)
    x = x.view(oriented.shape).to(matrices.dtype)
    return x.mT if tall else x


def floor_rows(updates: Tensor, weights: Tensor, floor: float) -> Tensor:
    """Lengthen the rows of updates (..., rows, columns) to at least `floor` times the norms of the weights' rows.

    The row floor of modded-nanogpt's track 3, #325; zero rows stay.
    """
    lengths, least = (
        torch.linalg.vector_norm(matrices.float(), dim=-1, keepdim=True) for matrices in (updates, weights)
    )
    factors = (floor * least / lengths.clamp_min(1e-30)).clamp_min(1.0)
    return updates * torch.where(lengths > 0, factors, 1.0).to(updates.dtype)


def equalize_rows(matrices: Tensor) -> Tensor:
    """Divide the rows of matrices (..., rows, columns) by their norms (MuonEq-R, arXiv 2603.28254); zero rows stay."""
    return nn.functional.normalize(matrices, dim=-1, eps=1e-7)


def adapt_rows(updates: Tensor, mean_squares: Tensor, beta2: float) -> Tensor:
    """Divide orthogonalized updates, row by row, by the root of their running mean square (NorMuon, arXiv 2510.05491).

    `updates` are (..., rows, columns); `mean_squares` (..., rows, 1) are updated in place. Each matrix keeps its
    Frobenius norm, as in the authors' code, so Muon's learning rates stay right; zero rows stay.
    """
    rows = updates.float()
    mean_squares.lerp_(rows.square().mean(-1, keepdim=True), 1.0 - beta2)
    adapted: Tensor = rows / (mean_squares.sqrt() + 1e-10)
    before, after = (torch.linalg.matrix_norm(matrices, keepdim=True) for matrices in (rows, adapted))
    adapted *= before / (after + 1e-10)
    return adapted.to(updates.dtype)


class Muon(Optimizer):
    """Muon: orthogonalized Nesterov momentum (Jordan et al. 2024), scaled by sqrt(max(1, rows/columns)).

    Matrices of equal shape are one bank, orthogonalized as one batch; several ranks share each bank.
    """

    momentum: NonNegativeNumber = 0.95
    """Decay of the momentum buffer; the records' warm-up is a ramp from 0.85 or 0.92."""
    steps: Annotated[int, Range(1, 100)] = 5
    """Newton-Schulz iterations."""
    coefficients: Coefficients = "classic"
    """Newton-Schulz coefficients: `classic` (Jordan's), `polar_express`, `turbo` (Turbo-Muon's) or `convergent`.

    With as many iterations Polar Express comes nearer to orthogonal (arXiv 2505.16932); Turbo-Muon does so with one
    less, unless a few directions are far larger than the others. `convergent` ends orthogonal, in about 12.
    """
    normalize_rows: bool = False
    """Divide each row by its norm before the iterations (MuonEq-R, arXiv 2603.28254, #1285 on).

    Fewer iterations suffice then: NeoMuon of the ternary record makes 3. NeoMuon divides by the root mean square, which
    is equivalent, since the iterations first divide out any common factor.
    """
    beta2: Fraction | None = None
    """Decay of the mean squared update of each row; its root divides the row (NorMuon, arXiv 2510.05491).

    None is plain Muon; the paper takes 0.95. It needs no communication, since a rank holds whole matrices.
    """
    weight_decay: NonNegativeNumber = 0.0
    """Weight decay: fraction of the weight, times the learning rate, taken off at each step.

    0.01 to 0.04 in records up to #1204, then 0.085 to 0.095. A ramp is the taper of #1729: constant until 0.7 of the
    run, then to half at its end.
    """
    decay_clamp: Positive | None = None
    """Bound on the magnitude of a weight in its decay (Huber decay, #2135), or none."""
    cautious_decay: NonNegativeNumber = 0.0
    """Cautious weight decay: after the step, only of weights that the step moves toward zero."""
    row_floor: NonNegative = 0.0
    """Least norm of each row of an update, as a fraction of the norm of the weight's row."""
    group_rows: Count | None = None
    """Rows that are orthogonalized together, or none for all; for queries and keys twice the head size."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Number format of the iterations and of the exchanged updates."""
    communication: Communication = "reduce_scatter"
    """Collective for gradients and updates of several ranks; with one rank it does nothing.

    With reduce_scatter (Parallel Muon, #549) each rank receives the gradient of its share of a bank alone, and its
    updates are gathered while it works on the next bank. With all_reduce, as in the contest's baseline, gradients and
    updates are both summed as whole banks, which moves twice as much. The results differ by rounding.
    """

    def build(self, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> Updater:
        """Return the updater of these matrices; raises `UserError` for one that is no matrix or not of whole groups."""
        return _MuonUpdater(self, parameters, ranks)


class _MuonUpdater(BankUpdater):
    config: Muon

    def __init__(self, config: Muon, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
        super().__init__(config, parameters, ranks, config.communication, config.group_rows)
        for bank in self.banks if config.beta2 is not None else ():
            momentum = bank.buffers["momentum"]
            bank.buffers["mean_squares"] = momentum.new_zeros(*momentum.shape[:2], 1, dtype=torch.float32)

    def apply(self, bank: Bank, weights: list[Tensor], steps: Tensor, lr: float, train_progress: TrainProgress) -> None:
        rows, columns = bank.buffers["momentum"].shape[1:]
        cautious, clamp = lr * value_at(self.config.cautious_decay, train_progress), self.config.decay_clamp
        decay = lr * value_at(self.config.weight_decay, train_progress)
        shrinking = [step * weight > 0 for step, weight in zip(steps, weights, strict=True)] if cautious else []
        if clamp is not None:
            for weight in weights:
                weight.sub_(weight.clamp(-clamp, clamp), alpha=decay)
        elif decay:
            torch._foreach_mul_(weights, 1.0 - decay)
        torch._foreach_add_(weights, steps.unbind(), alpha=-lr * max(1.0, rows / columns) ** 0.5)
        for weight, mask in zip(weights, shrinking, strict=False):  # no masks without the decay
            weight.mul_(1.0 - cautious * mask)

    def update(self, bank: Bank, gradient: Tensor, train_progress: TrainProgress) -> Tensor:
        momentum = value_at(self.config.momentum, train_progress)
        buffer = bank.buffers["momentum"][bank.share].mul_(momentum).add_(gradient)
        nesterov = gradient.add_(buffer, alpha=momentum)
        if self.config.normalize_rows:
            nesterov = equalize_rows(nesterov)
        nesterov = nesterov.to(getattr(torch, self.config.precision))
        update = newton_schulz(nesterov, self.config.steps, self.config.coefficients)
        if self.config.beta2 is not None:
            update = adapt_rows(update, bank.buffers["mean_squares"][bank.share], self.config.beta2)
        if self.config.row_floor:
            rows, columns = update.shape[1:]  # `apply` lengthens the update of a tall matrix
            floor = self.config.row_floor / max(1.0, rows / columns) ** 0.5
            update = floor_rows(update, bank.weights()[bank.share], floor)
        return update
