"""Which implementation of an operation runs here: the one place that picks, and the doors that ask it.

All implementations of an operation have one signature and, up to rounding, one result: "plain" in PyTorch's operations,
"by hand" with a backward of its own, "Triton" as kernels for a GPU, "scaled_mm" by a GPU's products of eight bits.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from caddie.errors import UserError
from caddie.ops import by_hand, norms, plain, products
from caddie.ops.plain import Softcap

IMPLEMENTATIONS: Mapping[str, Mapping[str, str]] = {
    "cross_entropy": {"plain": "plain", "by hand": "by_hand", "Triton": "loss_kernels"},
    "softcap": {"plain": "plain", "by hand": "by_hand"},
    "squared": {"plain": "plain", "by hand": "by_hand"},
    "rms_norm": {"plain": "plain", "by hand": "norms"},
    "normed_rotation": {"plain": "plain", "by hand": "norms"},
    "squared_mlp": {"plain": "plain", "Triton": "mlp_kernels"},
    "gram": {"plain": "plain", "Triton": "gram_kernels"},
    "gram_polynomial": {"plain": "plain", "Triton": "gram_kernels"},
    "scaled_product": {"plain": "plain", "scaled_mm": "products"},
}
"""For each operation, name of implementation to the module of `caddie.ops` that has it."""

_PAYS = {
    "cpu": dict.fromkeys(("cross_entropy", "softcap", "squared", "rms_norm", "normed_rotation"), "by hand"),
    "cuda": {"cross_entropy": "Triton", "scaled_product": "scaled_mm"},
}
"""What is taken instead of the reference. On a CPU it was measured; on a GPU the loss pays in the records, which do not
make its float32 logits, and products written by hand have not paid at these sizes (`bench/kernels.py` tells)."""
_DTYPES = {
    "by hand": (torch.float32, torch.bfloat16),
    "Triton": (torch.float32, torch.bfloat16, torch.float16),
    "scaled_mm": (torch.float8_e4m3fn, torch.float8_e5m2),
}
_asked: dict[str, str] = {}
_MODULES = {"plain": plain, "by_hand": by_hand, "norms": norms, "products": products}
_functions: Mapping[tuple[str, str], Callable[..., Any]] = {
    (operation, name): getattr(_MODULES[module], operation)
    for operation, names in IMPLEMENTATIONS.items()
    for name, module in names.items()
    if module in _MODULES
}
_kernels: dict[tuple[str, str], Callable[..., Any]] = {}
"""The same of Triton's, once any of them is wanted."""


def choose(operation: str, device: torch.device, dtype: torch.dtype, compiling: bool = False) -> str:
    """Which of `IMPLEMENTATIONS` runs there: the one asked for, else the fastest known that can, else "plain".

    What a CPU is given as a compiled graph is plain but for the loss, since the compiler fuses it.
    """
    if operation in _asked:
        return _asked[operation]
    name = _PAYS.get(device.type, {}).get(operation, "plain")
    if name == "plain" or dtype not in _DTYPES[name]:
        return "plain"
    if name == "by hand":
        able = operation == "cross_entropy" or not compiling
    else:
        able = has_triton() if name == "Triton" else products.multiplies_float8(device)
    return name if able else "plain"


choose._dynamo_marked_constant = True  # type: ignore[attr-defined]  # compiled graphs keep the answer


@cache
def has_triton() -> bool:
    """Whether Triton's kernels can be launched on a GPU, for which it needs itself and a C compiler."""
    try:
        importlib.import_module("triton")
    except Exception:  # what cannot be imported, for whatever reason, is not there
        return False
    return any(map(shutil.which, ("cc", "gcc", "clang")))


@contextmanager
def asking(**names: str) -> Iterator[None]:
    """Within it, operations run as named (`asking(squared_mlp="Triton")`), whether or not that pays or can be.

    What was compiled before keeps its choice. A name that an operation does not have is a `UserError`.
    """
    for operation, name in names.items():
        if name not in IMPLEMENTATIONS.get(operation, {}):
            known = ", ".join(f"{one}: {'/'.join(have)}" for one, have in IMPLEMENTATIONS.items())
            raise UserError(f"there is no {name} implementation of {operation}; there are {known}")
    before = dict(_asked)
    _asked.update(names)
    try:
        yield
    finally:
        _asked.clear()
        _asked.update(before)


def implementation(operation: str, name: str) -> Callable[..., Any]:
    """The function of that name; Triton's modules are imported only here."""
    if name != "Triton":
        return _functions[operation, name]
    if not _kernels:  # all at once: a graph that is being compiled looks into what it holds only once
        for one, names in IMPLEMENTATIONS.items():
            if name in names:
                _kernels[one, name] = getattr(importlib.import_module(f"caddie.ops.{names[name]}"), one)
    return _kernels[operation, name]


def _ready(operation: str, device: torch.device, dtype: torch.dtype, compiling: bool) -> str:
    """The name that `choose` gives, of a function that has been imported."""
    name = choose(operation, device, dtype, compiling)
    implementation(operation, name)
    return name


# A compiled graph keeps the name that this answered; a function it cannot keep, but it can look one up.
_ready._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _chosen(operation: str, tensor: Tensor) -> Callable[..., Any]:
    name = _ready(operation, tensor.device, tensor.dtype, torch.compiler.is_compiling())
    return (_kernels if name == "Triton" else _functions)[operation, name]


def cross_entropy(
    logits: Tensor, targets: Tensor, cap: float | None = None, form: Softcap = "tanh", z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`plain.cross_entropy`, as chosen; a gradient in bfloat16 differs from its by rounding."""
    descended, entropies = _chosen("cross_entropy", logits)(logits, targets, cap, form, z_loss)
    return descended, entropies


def softcap(logits: Tensor, cap: float) -> Tensor:
    """`plain.softcap`, as chosen."""
    y: Tensor = _chosen("softcap", logits)(logits, cap)
    return y


def rms_norm(x: Tensor, epsilon: float | None = None) -> Tensor:
    """`plain.rms_norm`, as chosen."""
    y: Tensor = _chosen("rms_norm", x)(x, epsilon)
    return y


def normed_rotation(x: Tensor, cosine: Tensor, sine: Tensor, gain: Tensor | None = None) -> Tensor:
    """`plain.normed_rotation`, as chosen."""
    y: Tensor = _chosen("normed_rotation", x)(x, cosine, sine, gain)
    return y


def squared(u: Tensor, slope: float = 0.0) -> Tensor:
    """`plain.squared`, as chosen."""
    y: Tensor = _chosen("squared", u)(u, slope)
    return y


def squared_mlp(x: Tensor, up: Tensor, down: Tensor, slope: float = 0.0) -> Tensor:
    """`plain.squared_mlp`, as chosen."""
    y: Tensor = _chosen("squared_mlp", x)(x, up, down, slope)
    return y


def gram(x: Tensor) -> Tensor:
    """`plain.gram`, as chosen."""
    y: Tensor = _chosen("gram", x)(x)
    return y


def gram_polynomial(symmetric: Tensor, b: float, c: float) -> Tensor:
    """`plain.gram_polynomial`, as chosen."""
    y: Tensor = _chosen("gram_polynomial", symmetric)(symmetric, b, c)
    return y


def scaled_product(
    left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor, dtype: torch.dtype, *, hasty: bool = False
) -> Tensor:
    """`plain.scaled_product`, as chosen; the reference where sizes do not fit the instructions, multiples of 16."""
    fitting = left.shape[1] % 16 == right.shape[1] % 16 == 0
    function = _chosen("scaled_product", left) if fitting else plain.scaled_product
    y: Tensor = function(left, right, of_left, of_right, dtype, hasty=hasty)
    return y
