"""The number formats that a device multiplies matrices in, and products made in them."""

from __future__ import annotations

import platform

import torch
import torch.nn.functional as F
from torch import Tensor


def _bfloat16_on_cpu() -> bool:
    """Whether this CPU has instructions for products of bfloat16.

    Without them a product takes 3 to 70 times float32's time, by layout and shape (`docs/performance.md`).
    """
    try:
        if platform.machine().lower() in ("x86_64", "amd64") and not torch.cpu._is_avx512_bf16_supported():
            return False  # with AVX-512 alone the library imitates them
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # a build of PyTorch without that library, which alone has such products
        return False


BFLOAT16_ON_CPU = _bfloat16_on_cpu()


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """What tensors of that dtype are multiplied in: bfloat16 as float32 on a CPU that has no products of it.

    Products that are rounded to bfloat16 again are its own but for the order of their sums, which are float32's too; a
    compiled graph may leave out the rounding of what goes into them.
    """
    slow = dtype == torch.bfloat16 and not BFLOAT16_ON_CPU and device.type == "cpu"
    return torch.float32 if slow else dtype


def multiplied(tensor: Tensor) -> Tensor:
    """The tensor in the dtype of `product_dtype`."""
    dtype = product_dtype(tensor.device, tensor.dtype)
    return tensor if dtype == tensor.dtype else tensor.to(dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., inputs) times the transposed `weight` (outputs, inputs), in the dtype of x."""
    y = F.linear(multiplied(x), multiplied(weight.to(x.dtype)))
    return y if y.dtype == x.dtype else y.to(x.dtype)  # asking for the dtype it has would take a microsecond


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """x (..., n, k) times y (..., k, m), in the dtype of x."""
    return (multiplied(x) @ multiplied(y.to(x.dtype))).to(x.dtype)


def multiplies_float8(device: torch.device) -> bool:
    """Whether the device has products of eight-bit floats: of NVIDIA's GPUs those of compute capability 8.9 or more."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 9)


def scaled_product(
    left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor, dtype: torch.dtype, *, hasty: bool = False
) -> Tensor:
    """As `plain.scaled_product`, by the instructions for it; `left` lies by rows, `right` by columns.

    All sizes but n must be multiples of 16. Not yet measured on a GPU; `bench/float8.py` times it.
    """
    product: Tensor = torch._scaled_mm(
        left, right, scale_a=of_left, scale_b=of_right, out_dtype=dtype, use_fast_accum=hasty
    )
    return product
