"""Choice of the implementation of each operation by device, dtype and compiler, and the functions that dispatch to it.

All implementations of an operation have one signature and, up to rounding, one result: "plain" in PyTorch's operations,
"manual" with a hand-written backward, "Triton" as kernels for a GPU, "scaled_mm" by a GPU's float8 matrix products.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from caddie.errors import UserError
from caddie.ops import manual_backward, plain, products

_PLAIN_AND_MANUAL = {"plain": "plain", "manual": "manual_backward"}
IMPLEMENTATIONS: Mapping[str, Mapping[str, str]] = {
    "cross_entropy": {**_PLAIN_AND_MANUAL, "Triton": "loss_kernels"},
    **dict.fromkeys(("softcap", "squared", "rms_norm", "normed_rotation"), _PLAIN_AND_MANUAL),
    "scaled_product": {"plain": "plain", "scaled_mm": "products"},
}
"""For each operation: name of an implementation to the module of `caddie.ops` that defines it."""

_FASTEST = {
    "cpu": dict.fromkeys(("cross_entropy", "softcap", "squared", "rms_norm", "normed_rotation"), "manual"),
    "cuda": {"cross_entropy": "Triton", "scaled_product": "scaled_mm", "squared": "manual"},
}
"""Implementations preferred to the reference. On a CPU they were measured. On a GPU a fused loss pays in the records:
it never materializes float32 logits (`bench/kernels.py` measures it). The manual `squared`, uncompiled, keeps one
tensor for its backward, the reference two."""
_DTYPES = {
    "manual": (torch.float32, torch.bfloat16),
    "Triton": (torch.float32, torch.bfloat16, torch.float16),
    "scaled_mm": (torch.float8_e4m3fn, torch.float8_e5m2),
}
_forced: dict[str, str] = {}
_MODULES = {"plain": plain, "manual_backward": manual_backward, "products": products}
_functions: Mapping[tuple[str, str], Callable[..., Any]] = {
    (operation, name): getattr(_MODULES[module], operation)
    for operation, names in IMPLEMENTATIONS.items()
    for name, module in names.items()
    if module in _MODULES
}
_kernels: dict[tuple[str, str], Callable[..., Any]] = {}
"""Triton functions needed so far. They are not in `_functions`: a graph in compilation reads a dictionary only once."""
Function = TypeVar("Function", bound=Callable[..., Any])


def constant_in_graphs(function: Function) -> Function:
    """Mark a function whose result compiled graphs keep; PyTorch's decorator takes a second to import the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_in_graphs
def choose(operation: str, device: torch.device, dtype: torch.dtype, compiling: bool = False) -> str:
    """Return the name in `IMPLEMENTATIONS` to run: the forced one, else the fastest that works here, else "plain".

    A compiled graph takes plain implementations in place of manual ones, because the compiler fuses them; the loss is
    the exception.
    """
    if operation in _forced:
        return _forced[operation]
    name = _FASTEST.get(device.type, {}).get(operation, "plain")
    able = dtype in _DTYPES.get(name, ())
    if able and name == "manual":
        able = operation == "cross_entropy" or not compiling
    elif able:
        able = has_triton() if name == "Triton" else products.multiplies_float8(device)
    return name if able else "plain"


@cache
def has_triton() -> bool:
    """True if Triton can launch kernels on a GPU; it compiles its driver first, which needs C and Python's headers."""
    try:
        return has("triton", "jit") and bool(
            importlib.import_module("triton").runtime.driver.active.get_current_target()
        )
    except Exception:  # the compiler may fail in any way
        return False


def has(module: str, *names: str) -> bool:
    """True if a module can be imported and has these names; a folder left behind by a package has none of them."""
    try:
        return set(names) <= set(dir(importlib.import_module(module)))
    except Exception:  # an import may fail in any way
        return False


@contextmanager
def use_implementations(**names: str) -> Iterator[None]:
    """Force implementations within the context, as in `use_implementations(cross_entropy="plain")`.

    They are used even where they are slower or cannot run. Graphs compiled before keep their choice. Raises `UserError`
    for a name that an operation does not have.
    """
    for operation, name in names.items():
        if name not in IMPLEMENTATIONS.get(operation, {}):
            known = ", ".join(f"{one}: {'/'.join(have)}" for one, have in IMPLEMENTATIONS.items())
            raise UserError(f"there is no {name} implementation of {operation}; there are {known}")
    before = dict(_forced)
    _forced.update(names)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


def implementation(operation: str, name: str) -> Callable[..., Any]:
    """Return the function of that name; only this imports Triton's modules."""
    if name != "Triton":
        return _functions[operation, name]
    if (operation, name) not in _kernels:
        module = importlib.import_module(f"caddie.ops.{IMPLEMENTATIONS[operation][name]}")
        _kernels[operation, name] = getattr(module, operation)
    return _kernels[operation, name]


@constant_in_graphs
def _ready(operation: str, device: torch.device, dtype: torch.dtype, compiling: bool) -> str:
    """Return the name from `choose`, and import its function.

    A compiled graph can keep a name as a constant, but not a function; it looks the function up by the name.
    """
    name = choose(operation, device, dtype, compiling)
    implementation(operation, name)
    return name


def _chosen(operation: str, tensor: Tensor) -> Callable[..., Any]:
    name = _ready(operation, tensor.device, tensor.dtype, torch.compiler.is_compiling())
    return (_kernels if name == "Triton" else _functions)[operation, name]


def _dispatched(reference: Function) -> Function:
    """Return the function that calls the chosen implementation of the reference's operation."""
    operation = reference.__name__

    @wraps(reference)
    def call(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        return _chosen(operation, tensor)(tensor, *arguments, **named)

    return cast(Function, call)


cross_entropy = _dispatched(plain.cross_entropy)
softcap = _dispatched(plain.softcap)
rms_norm = _dispatched(plain.rms_norm)
normed_rotation = _dispatched(plain.normed_rotation)
squared = _dispatched(plain.squared)


def scaled_product(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """Dispatch `plain.scaled_product`; sizes that are not multiples of 16 do not fit GPUs and use the plain one."""
    fitting = left.shape[1] % 16 == right.shape[1] % 16 == 0
    function = _chosen("scaled_product", left) if fitting else plain.scaled_product
    y: Tensor = function(left, right, left_scale, right_scale, dtype, fast=fast)
    return y
