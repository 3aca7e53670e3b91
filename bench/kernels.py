"""Fused operations beside their references, forward and backward, in one run; and whole training steps with each.

python bench/kernels.py [RECIPE]

Operations on random data at the shapes of a run, every implementation in turn, best of several. On a GPU references are
compiled, as training compiles them, and errors against float32 are shown too, since nothing else there has checked the
kernels. On a CPU then the products of float32 that scoring makes, beside PyTorch's own choice. Then steps of RECIPE
(baseline_mini): all references, what the program chooses, and each fused one alone, those of `mlp_kernels.py` and
`gram_kernels.py` beside this file included, which the program never takes.
"""

import argparse
import importlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from caddie.config.schedules import Budget, TrainProgress
from caddie.data.loaders import Batch
from caddie.model import mlp
from caddie.ops import IMPLEMENTATIONS, choose, linear, plain, use_implementations
from caddie.ops.dispatch import implementation
from caddie.recipes.catalog import find
from caddie.recipes.recipe import Recipe
from caddie.runtime.distributed import Ranks
from caddie.train.optim import muon
from caddie.train.trainer import Trainer

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
REPEATS = 20 if GPU else 7
REFERENCES = dict.fromkeys(IMPLEMENTATIONS, "plain")


def squared_mlp(x: Tensor, up: Tensor, down: Tensor, slope: float = 0.0) -> Tensor:
    """Return x (..., width) through `up` (hidden, width), the squared activation and `down` (width, hidden)."""
    return linear(plain.squared(linear(x, up), slope), down)


CANDIDATES: dict[str, tuple[Callable[..., Tensor], str]] = {
    "squared_mlp": (squared_mlp, "mlp_kernels"),
    "gram": (muon.gram, "gram_kernels"),
    "gram_polynomial": (muon.gram_polynomial, "gram_kernels"),
}
"""Operations whose Triton kernels the package does not take: reference, and module beside this file."""


def names(operation: str) -> list[str]:
    """Implementations of an operation."""
    return list(IMPLEMENTATIONS.get(operation, ("plain", "Triton")))


def function_of(operation: str, name: str) -> Callable[..., object]:
    """The implementation of that name."""
    if operation in IMPLEMENTATIONS:
        return implementation(operation, name)
    reference, module = CANDIDATES[operation]
    return reference if name == "plain" else getattr(importlib.import_module(module), operation)


@contextmanager
def candidate(operation: str) -> Iterator[None]:
    """Within it, steps take the Triton kernel of that operation."""
    kernels = importlib.import_module(CANDIDATES[operation][1])
    target, name = (mlp._Squared, "forward") if operation == "squared_mlp" else (muon, operation)
    with patch.object(target, name, getattr(kernels, name)):
        yield


def milliseconds(work: Callable[[], object]) -> float:
    """Time of one call, the device waited for."""
    if GPU:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    if GPU:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)


def least(works: Sequence[Callable[[], object]], repeats: int = REPEATS) -> list[float]:
    """The least milliseconds of each, called one after the other."""
    rounds = [[milliseconds(work) for work in works] for _ in range(repeats)]
    return [min(times) for times in zip(*rounds, strict=True)]


def operations() -> list[tuple[str, str, tuple[Tensor, ...], tuple[object, ...]]]:
    """Operation, what is said of its size, tensors, settings."""
    sizes = [(65_536, 1024), (32_768, 8192)] if GPU else [(2048, 1024), (4096, 1024), (2048, 2048), (2048, 8192)]
    mlps = [(65_536, 512, 1024), (65_536, 512, 2048)] if GPU else [(2048, 128, 256), (2048, 192, 768)]
    banks = [(18, 512, 512), (9, 512, 1024), (11, 512, 2048)] if GPU else []
    found: list[tuple[str, str, tuple[Tensor, ...], tuple[object, ...]]] = []
    for dtype in (torch.bfloat16,) if GPU else (torch.bfloat16, torch.float32):

        def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = dtype) -> Tensor:
            return (scale * torch.randn(shape, device=DEVICE)).to(dtype)

        for rows, columns in sizes:
            targets = torch.randint(columns, (rows,), device=DEVICE)
            settings = (targets, 30.0, "tanh", 0.0)
            found.append(("cross_entropy", f"{rows} x {columns}", (random(rows, columns, scale=4.0),), settings))
        for rows, width, hidden in mlps:
            x, up, down = random(rows, width), random(hidden, width, scale=width**-0.5), random(width, hidden)
            found.append(("squared", f"{rows} x {hidden}", (random(rows, hidden),), (0.5,)))
            found.append(("squared_mlp", f"{rows} x {width} x {hidden}", (x, up, down), (0.5,)))
        for shape in banks:
            matrices = random(*shape, scale=shape[-1] ** -0.5)
            found.append(("gram", " x ".join(map(str, shape)), (matrices,), ()))
            found.append(("gram_polynomial", f"{shape[1]} squared", (muon.gram(matrices),), (-4.775, 2.0315)))
    return found


def one_call(
    operation: str, name: str, tensors: tuple[Tensor, ...], settings: tuple[object, ...]
) -> Callable[[], list[Tensor]]:
    """A forward, and where the operation has one a backward; gives result and gradients."""
    function = function_of(operation, name)
    function = torch.compile(function, dynamic=False) if GPU and name == "plain" else function

    def call() -> list[Tensor]:
        if operation.startswith("gram"):
            return [function(*tensors, *settings)]
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        result = function(*(leaf.view_as(leaf) for leaf in leaves), *settings)
        result = result[0].mean() if isinstance(result, tuple) else result
        slopes = torch.autograd.grad(result, leaves, None if result.ndim == 0 else torch.ones_like(result))
        return [result.detach(), *slopes]

    return call


def error(found: list[Tensor], right: list[Tensor]) -> float:
    """The largest relative error among result and gradients."""
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, right, strict=True))


def compare() -> None:
    """A line for each operation, size and implementation."""
    for operation, size, tensors, settings in operations():
        these = [name for name in names(operation) if name == "plain" or (name == "Triton") == GPU]
        if len(these) == 1:
            continue
        exact = one_call(operation, "plain", tuple(tensor.float() for tensor in tensors), settings)()
        calls = {name: one_call(operation, name, tensors, settings) for name in these}
        errors = {name: error(call(), exact) for name, call in calls.items()}
        best = dict(zip(these, least(list(calls.values())), strict=True))
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        chosen = choose(operation, DEVICE, tensors[0].dtype) if operation in IMPLEMENTATIONS else "plain"
        for name in these:
            print(
                f"{operation:16} {dtype:8} {size:22} {name:8} {best[name]:8.3f} ms, {best['plain'] / best[name]:5.2f} "
                f"times the reference, error {errors[name]:.1e}{', chosen' if name == chosen else ''}",
                flush=True,
            )


def products() -> None:
    """A line for each size of a product in inference mode: PyTorch's own time, and as this program multiplies."""
    for rows, inputs, outputs in ((64, 128, 128), (2048, 128, 1024), (4096, 128, 128), (4096, 512, 1024)):
        x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
        with torch.inference_mode():
            best = least([partial(torch.nn.functional.linear, x, weight), partial(linear, x, weight)], 10 * REPEATS)
        rates = [2e-6 * rows * inputs * outputs / spent for spent in best]
        print(
            f"linear           float32  {f'{rows} x {inputs} x {outputs}':22} {rates[1]:8.1f} GFLOP/s, "
            f"{rates[1] / rates[0]:5.2f} times PyTorch's own ({torch.get_num_threads()} threads)",
            flush=True,
        )


def steps(recipe: Recipe) -> None:
    """Training steps with all references, with what is chosen, and with each kernel alone."""
    variants: dict[str, dict[str, str]] = {"references": REFERENCES, "chosen": {}}
    for operation in (*IMPLEMENTATIONS, *(CANDIDATES if GPU else ())):
        if (fused := "Triton" if GPU else "manual") in names(operation):
            variants[f"{operation} alone"] = {**REFERENCES, operation: fused}
    config = recipe.train
    rows = config.micro_tokens(1) // config.longest_row, config.longest_row
    ids = np.random.default_rng(0).integers(0, recipe.model.vocabulary, (2, *rows))
    moment = TrainProgress(0, 0.0, Budget(steps=1000))
    for dtype in (torch.bfloat16,) if GPU else (torch.bfloat16, torch.float32):
        trainers = {}
        for variant in variants:
            trainers[variant] = Trainer(recipe.model, config, 0, Ranks(device=DEVICE))
            trainers[variant].dtype = dtype
        best = dict.fromkeys(variants, float("inf"))
        for repeat, variant in itertools.product(range(REPEATS + 3), variants):
            forced = {operation: used for operation, used in variants[variant].items() if operation in IMPLEMENTATIONS}
            with ExitStack() as stack:
                stack.enter_context(use_implementations(**forced))
                for operation in variants[variant].keys() - forced:
                    stack.enter_context(candidate(operation))
                batches = itertools.repeat(Batch(*ids))
                spent = milliseconds(lambda: trainers[variant].step(batches, moment, bos=-1))  # noqa: B023
            best[variant] = min(best[variant], spent) if repeat > 2 else best[variant]
        for variant, spent in best.items():
            label = str(dtype).removeprefix("torch.")
            print(
                f"{recipe.name} {label:8} {variant:24} {spent:9.2f} ms a step, {best['references'] / spent:.3f} times",
                flush=True,
            )


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="baseline_mini", metavar="RECIPE")
    recipe = find(parser.parse_args().recipe)
    if not GPU:
        torch.set_num_threads(1)
    print(f"{torch.cuda.get_device_name() if GPU else 'one CPU thread'}, torch {torch.__version__}")
    compare()
    if not GPU:
        products()
    steps(recipe)


if __name__ == "__main__":
    main()
