"""Number formats of matrix products by device, and products made in them."""

import platform
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _bfloat16_on_cpu() -> bool:
    """Return True if this CPU has instructions for bfloat16 products.

    Without them a product takes 3 to 70 times as long as in float32, depending on layout and shape (`docs/log.md`).
    """
    try:
        if platform.machine().lower() in ("x86_64", "amd64") and not torch.cpu._is_avx512_bf16_supported():
            return False  # with AVX-512 alone the library emulates them
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # PyTorch without oneDNN, which alone has such products
        return False


BFLOAT16_ON_CPU = _bfloat16_on_cpu()


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of `dtype` are multiplied.

    It is float32 for bfloat16 on a CPU without bfloat16 products, and on Apple's GPUs, where bfloat16 was never tried.
    Products of either dtype are summed in float32, so products rounded to bfloat16 differ only by the order of the
    sums; a compiled graph may leave out the rounding of the factors.
    """
    exact = device.type == "mps" or (device.type == "cpu" and not BFLOAT16_ON_CPU)
    return torch.float32 if exact and dtype == torch.bfloat16 else dtype


def to_product_dtype(tensor: Tensor) -> Tensor:
    """Return the tensor in the dtype of `product_dtype`."""
    dtype = product_dtype(tensor.device, tensor.dtype)
    return tensor if dtype == tensor.dtype else tensor.to(dtype)


def _onednn_linear() -> Callable[..., Tensor] | None:
    """Return oneDNN's linear layer, as compiled graphs call it, on an x86 processor with that library, else None."""
    if platform.machine().lower() not in ("x86_64", "amd64") or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


_ONEDNN_LINEAR = _onednn_linear()
_ONEDNN_ROWS = 256  # least rows for oneDNN: a call costs 12 µs more than MKL's


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x (..., inputs) by the transposed `weight` (outputs, inputs), in the dtype of x.

    In inference mode many rows of float32 are multiplied by oneDNN on a CPU: 1.0 to 1.4 times as fast as PyTorch's own
    choice on a Zen 4; MKL seems to keep to AVX2 on processors that are not Intel's (`docs/log.md`).
    """
    if (
        not torch.compiler.is_compiling()  # first: a graph breaks where the mode is asked for
        and _ONEDNN_LINEAR is not None
        and x.dtype == torch.float32
        and x.numel() >= _ONEDNN_ROWS * x.shape[-1]
        and x.device.type == "cpu"
        and torch.is_inference_mode_enabled()
    ):
        return _ONEDNN_LINEAR(x, weight.to(torch.float32), None, "none", [], "")
    y = F.linear(to_product_dtype(x), to_product_dtype(weight.to(x.dtype)))
    return y if y.dtype == x.dtype else y.to(x.dtype)  # `to` costs a microsecond even where it does nothing


def float32_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply as `linear` does, but return float32: factors in half precision are rounded, their sums are not.

    Near the softcap, logits rounded to bfloat16 move the loss of a token by a hundredth of a nat.
    """
    if x.dtype not in (torch.bfloat16, torch.float16):
        return linear(x, weight)
    y: Tensor = _Float32Product.apply(x, weight)  # type: ignore[no-untyped-call]
    return y


class _Float32Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        factor = weight.to(x.dtype)
        ctx.save_for_backward(x, factor)
        ctx.dtype = weight.dtype
        if x.device.type == "cuda":
            # As a batch of one: PyTorch 2.9 cannot compile `mm` with an `out_dtype`.
            rows: Tensor = torch.bmm(x.flatten(0, -2)[None], factor.mT[None], out_dtype=torch.float32)[0]
            return rows.view(*x.shape[:-1], len(factor))
        return F.linear(x.float(), factor.float())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, factor = ctx.saved_tensors
        rounded = grad.to(x.dtype)
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = matmul(rounded.flatten(0, -2).mT, x.flatten(0, -2)).to(ctx.dtype)
        return matmul(rounded, factor), of_weight


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """Multiply x (..., n, k) by y (..., k, m), in the dtype of x."""
    return (to_product_dtype(x) @ to_product_dtype(y.to(x.dtype))).to(x.dtype)


def multiplies_float8(device: torch.device) -> bool:
    """Return True if the device has float8 products: an NVIDIA GPU of compute capability 8.9 or more."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 9)


def scaled_product(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """Compute `plain.scaled_product` with the GPU's instructions; `left` is row-major, `right` column-major.

    All sizes but n must be multiples of 16. Not yet measured on a GPU; `bench/float8.py` times it.
    """
    return torch._scaled_mm(left, right, scale_a=left_scale, scale_b=right_scale, out_dtype=dtype, use_fast_accum=fast)
