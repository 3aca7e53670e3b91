"""Attention on a CPU: PyTorch's fused kernel against two batched products, forward and backward, in one run.

python bench/attention.py [THREADS]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from caddie.ops import attention

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's own choice."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def milliseconds(function: Function, dtype: torch.dtype, batch: int, length: int) -> tuple[float, float]:
    """Best of 15 forward and backward times for 4 heads of size 32 over 2 key/value heads."""
    q, k, v = (torch.randn(batch, heads, length, 32, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    forward = backward = float("inf")
    for _ in range(15):
        begin = time.perf_counter()
        y = function(q, k, v)
        middle = time.perf_counter()
        y.backward(torch.ones_like(y))  # type: ignore[no-untyped-call]
        forward = min(forward, middle - begin)
        backward = min(backward, time.perf_counter() - middle)
    return 1e3 * forward, 1e3 * backward


def main() -> None:
    """Print a table of times and ratios."""
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    print(f"{torch.get_num_threads()} threads, 2,048 tokens; milliseconds forward + backward")
    for dtype in (torch.float32, torch.bfloat16):
        for batch, length in ((16, 128), (8, 256), (4, 512)):
            a, b = milliseconds(fused, dtype, batch, length), milliseconds(attention, dtype, batch, length)
            print(
                f"{str(dtype).removeprefix('torch.'):9} row {length:4}: fused {a[0]:6.2f} + {a[1]:6.2f}, "
                f"plain {b[0]:6.2f} + {b[1]:6.2f}, ratio {sum(a) / sum(b):.2f}"
            )


if __name__ == "__main__":
    main()
