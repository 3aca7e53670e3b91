"""Calibrate: run the model on text to measure how it uses each weight."""

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.func import functional_call

from caddie.config import Config, Count, NonNegative, Seed
from caddie.data.loaders import ShuffledSequences
from caddie.data.shards import Tokens
from caddie.errors import UserError
from caddie.model import Cache, Linear, Model, TiedHead, UntiedHead
from caddie.ops import rms_norm
from caddie.pack.quantize import Calibration
from caddie.runtime.distributed import Ranks
from caddie.runtime.progress import SILENT, Progress

_DIRECTIONS = 16.0  # gradient directions per column at which gradients get the same weight as inputs
_PILOT = 1 / 8  # fraction of the batches in a first pass, which measures the scale of each row


class CalibrationText(Config):
    """Socket: tokens that the model runs on to calibrate its weights."""

    @abstractmethod
    def batches(
        self, model: Model, shards: Sequence[Tokens], *, length: int, bos: int, ranks: Ranks = Ranks()
    ) -> Iterator[Tensor]:
        """Yield this process's batches of ids, each (rows, length), on the model's device."""


class TrainingText(CalibrationText):
    """Random rows of the training shards, never of held-out text."""

    tokens: Count = 65_536
    """Tokens over all processes; each process takes at least one batch."""
    batch_tokens: Count = 1024
    """Tokens of a batch, at least one row; its gradients are summed, then squared: larger is faster but less exact."""
    seed: Seed = 0
    """Random seed of the rows."""

    def batches(
        self, model: Model, shards: Sequence[Tokens], *, length: int, bos: int, ranks: Ranks = Ranks()
    ) -> Iterator[Tensor]:
        """Yield batches in the order of `ShuffledSequences`, to processes in turn; short text gives small batches."""
        size = max(1, min(self.batch_tokens, sum(map(len, shards)) - 1) // length) * length
        stream = ShuffledSequences().build(shards, tokens=size, sequence_length=length, seed=self.seed, bos=bos)
        for number in range(max(1, self.tokens // (size * ranks.world))):
            inputs = stream.micro_batch(number * ranks.world + ranks.rank).inputs
            yield torch.from_numpy(inputs).to(_device(model))


class SelfGenerated(CalibrationText):
    """Text sampled from the model, after a first token drawn from the whole vocabulary; no training text is read."""

    sequences: Count = 64
    """Rows over all processes; each process samples at least one batch."""
    temperature: NonNegative = 0.8
    """Sampling temperature."""
    batch: Count = 8
    """Rows of a batch: sampled at once, and their gradients are summed before squaring."""
    seed: Seed = 42
    """Random seed of the rows."""

    def batches(
        self, model: Model, shards: Sequence[Tokens], *, length: int, bos: int, ranks: Ranks = Ranks()
    ) -> Iterator[Tensor]:
        """Yield batches sampled token by token; a new document may begin inside a row."""
        for number in range(max(1, self.sequences // (self.batch * ranks.world))):
            generator = torch.Generator().manual_seed(self.seed + number * ranks.world + ranks.rank)
            yield self._sampled(model, length, bos, generator)

    @torch.no_grad()
    def _sampled(self, model: Model, length: int, bos: int, generator: torch.Generator) -> Tensor:
        fresh = torch.randint(model.config.vocabulary, (self.batch, 1), generator=generator)
        rows, cache = [fresh], Cache()
        for _ in range(length - 1):
            ids = fresh.to(_device(model))
            logits = model(ids, ids == bos, last=1, cache=cache)[:, -1].float().cpu()
            probabilities = (logits / max(self.temperature, 1e-4)).softmax(-1)
            fresh = torch.multinomial(probabilities, 1, generator=generator)
            rows.append(fresh)
        return torch.cat(rows, 1).to(_device(model))


def calibrate(
    model: Model, batches: Iterable[Tensor], *, bos: int, ranks: Ranks = Ranks(), progress: Progress = SILENT
) -> dict[str, Calibration]:
    """Return the calibration of each parameter by name, measured on `batches` of ids (rows, length).

    Vectors have only `rows`. R and C come from the gradients of each batch, which include the effect of one position
    on others. Rows are scaled to equal weight before C is computed. R and C keep the sum of the squared gradients, so
    uniform noise has the right cost.

    The model runs in float32 and in its last stage, as it is packed; `bos` begins a document. Each rank brings the same
    number of batches of its own, and all ranks get the result of all batches. The model is not changed.
    """
    weights = {name: parameter.detach().float().requires_grad_() for name, parameter in model.named_parameters()}
    device, given, uses = _device(model), list(batches), product_modules(model)
    sums = {name: _Sums(weight, name in uses) for name, weight in weights.items()}
    with ExitStack() as stack:
        stack.enter_context(torch.autocast(device.type, enabled=False))
        for name in sums.keys() & uses.keys():
            stack.callback(uses[name].register_forward_pre_hook(sums[name].gather).remove)
        pilot, done = math.ceil(len(given) * _PILOT), 0
        total = sum(ids.numel() for ids in [*given[:pilot], *given])
        for count in (pilot, len(given)):
            for one in sums.values():
                one.begin()
            for number, ids in enumerate(given[:count]):
                generator = torch.Generator(device).manual_seed(number * ranks.world + ranks.rank)
                for name, gradient in _gradients(model, weights, ids, bos, generator).items():
                    sums[name].add(gradient)
                done += ids.numel()
                progress.step({"event": "tokens", "done": done, "total": total})
            ranks.sum([tensor for one in sums.values() for tensor in one.all])
    tokens = torch.tensor(sum(ids.numel() for ids in given), dtype=torch.float64, device=device)
    ranks.sum([tokens])
    if not tokens:
        raise UserError("pack.calibration yields no tokens; it must yield at least one row")
    return {name: one.calibration(float(tokens)) for name, one in sums.items()}


def predicted_loss(calibration: Calibration, weight: Tensor, restored: Tensor) -> float:
    """Return the predicted loss, in nats per token, of `restored` in place of `weight`: 1/2 tr(R E C E^T).

    An unknown factor counts as the identity.
    """
    error = as_matrix((restored - weight).float())
    rows, columns = calibration.rows, calibration.columns
    through = error if columns is None else error @ columns
    cost = (through * error).sum(1, dtype=torch.float64)
    return 0.5 * float((cost if rows is None else cost * rows).sum())


def _gradients(
    model: Model, weights: dict[str, Tensor], ids: Tensor, bos: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return gradients by name; the mean of their squares is the Fisher information, summed over tokens.

    The Hessian of a softmax loss is S S^T with S = diag(√p) - p √p^T (BackPACK, arXiv 1912.10985), so S z with random
    signs z has this Hessian as its covariance and replaces the loss's gradient. The gradient of labels drawn from p has
    the same covariance, but reaches rare tokens only by chance.
    """
    logits = functional_call(model, weights, (ids, ids == bos))
    with torch.no_grad():
        probabilities = logits.softmax(-1)
        signs = torch.empty_like(probabilities).random_(2, generator=generator) * 2 - 1
        drawn = probabilities.sqrt() * signs
        drawn -= probabilities * drawn.sum(-1, keepdim=True)
    # Differentiate <logits, drawn>, whose gradient is `drawn`: passing gradients makes autograd import sympy, 0.5 s.
    product = torch.linalg.vecdot(logits, drawn).sum()
    found = torch.autograd.grad(product, list(weights.values()), allow_unused=True)
    return {name: as_matrix(gradient) for name, gradient in zip(weights, found, strict=True) if gradient is not None}


class _Sums:
    """Running sums of one weight's gradients (rows, columns), and of the inputs of its products."""

    def __init__(self, weight: Tensor, used: bool) -> None:
        height, width = as_matrix(weight).shape
        self.squares, self.seen = weight.new_zeros(height), weight.new_zeros(height)
        self.columns, self.batches = weight.new_zeros(width, width), weight.new_zeros(())
        self.inputs = torch.zeros_like(self.columns if used else self.columns[:0, :0])
        self.count = weight.new_zeros((), dtype=torch.int64)
        self.all = [self.squares, self.seen, self.columns, self.batches, self.inputs, self.count]
        self.scale: Tensor | None = None

    def begin(self) -> None:
        """Reset the sums; after a first pass, scale rows so that all count alike in C."""
        if self.batches:
            self.scale = floored(self.squares, self.seen).clamp_min(1e-30).rsqrt()[:, None]
        for tensor in self.all:
            tensor.zero_()

    def add(self, gradient: Tensor) -> None:
        squares = gradient.square().sum(1)
        self.squares += squares
        self.seen += squares > 0.0
        self.batches += 1.0
        if len(self.columns) > 1:
            scaled = gradient if self.scale is None else gradient * self.scale
            self.columns.addmm_(scaled.T, scaled)

    @torch.no_grad()
    def gather(self, module: nn.Module, given: tuple[Tensor, ...]) -> None:
        """Add x x^T over a module's inputs; a forward pre-hook."""
        linear = isinstance(module, Linear)  # otherwise the head, whose table is never called
        x = rms_norm(given[0]) if not linear or module.normed else given[0]
        if not linear and isinstance(projection := getattr(module, "projection", None), Linear):
            x = projection.forward(x)  # without its hook, which would count these inputs
        flat = x.reshape(-1, x.shape[-1]).float()
        self.inputs.addmm_(flat.T, flat)
        self.count += len(flat)

    def mixed(self) -> Tensor | None:
        """Return C, with a mean of 1 on the diagonal, or None.

        Gradients carry more information than inputs, but a batch shows no more directions than the weight has rows or
        the batch has tokens. At 16 directions per column, gradients and inputs have equal weight.
        """
        columns = _even(self.columns) if len(self.columns) > 1 else None
        if columns is None or (inputs := _even(self.inputs)) is None:
            return columns
        directions = min(float(self.batches) * len(self.squares), float(self.count)) / len(columns)
        return torch.lerp(inputs, columns, directions / (directions + _DIRECTIONS))

    def calibration(self, tokens: float) -> Calibration:
        """Return the calibration on the CPU, where weights are quantized."""
        rows = floored(self.squares, self.seen) / (tokens * len(self.columns))
        inputs = self.inputs / self.count.float() if self.count else None
        return Calibration(*(known if known is None else known.cpu() for known in (inputs, rows, self.mixed())))


def _even(square: Tensor) -> Tensor | None:
    """Return the matrix scaled to a mean of 1 on the diagonal, or None for zeros."""
    mean = square.diagonal().mean()
    return square / mean if mean > 0.0 else None


def floored(squares: Tensor, seen: Tensor) -> Tensor:
    """Smooth sums of squares by row as if each row had been seen in one batch more (Laplace's rule); keep their total.

    Other texts use tokens that this text lacks, so errors in the rows of those tokens must cost something.
    """
    floored = squares + squares.sum() / seen.sum().clamp_min(1.0)
    return floored * (squares.sum() / floored.sum().clamp_min(1e-30))


def product_modules(model: Model) -> dict[str, nn.Module]:
    """Return, by weight name, the module whose inputs the weight multiplies."""
    found: dict[str, nn.Module] = {f"{n}.weight": each for n, each in model.named_modules() if isinstance(each, Linear)}
    # A head multiplies by its own table, or by the embedding's.
    table = {TiedHead: "embedding.weight", UntiedHead: "head.table.weight"}.get(type(model.config.head))
    return {**found, table: model.head} if table else found


def as_matrix(tensor: Tensor) -> Tensor:
    """Return a weight or its gradient as a matrix (rows, columns); a vector is one column."""
    return tensor.reshape(-1, 1) if tensor.ndim < 2 else tensor.flatten(1)


def _device(model: Model) -> torch.device:
    return next(model.parameters()).device
