"""Attention on a CPU: what caddie chooses against PyTorch's fused kernel, forward and backward.

python bench/attention.py [THREADS]
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from caddie.ops.attention import BACKENDS, Visibility, attention, choose

TOKENS, HEADS, SHARED, SIZE = 2048, 4, 2, 32


def fused(q: Tensor, k: Tensor, v: Tensor, visible: Visibility) -> Tensor:
    """PyTorch's own choice, with a mask over all pairs where one is needed."""
    if visible.segments is None and visible.window is None:
        return BACKENDS["SDPA"](q, k, v, visible)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible.mask(q.device), enable_gqa=True)


def milliseconds(dtype: torch.dtype, length: int, documents: bool, window: int | None) -> list[tuple[float, float]]:
    """Best of 15 forward and backward times of the fused kernel and of what is chosen; masks made before."""
    rows = TOKENS // length
    q, k, v = (torch.randn(rows, h, length, SIZE, dtype=dtype, requires_grad=True) for h in (HEADS, SHARED, SHARED))
    segments = (torch.rand(rows, length) < 1 / 100).cumsum(1) if documents else None
    visible = Visibility(length, length, segments, window)
    best = [(float("inf"), float("inf"))] * 2
    for repeat in range(16):
        for i, function in enumerate((fused, attention)):
            begin = time.perf_counter()
            y = function(q, k, v, visible)
            middle = time.perf_counter()
            y.backward(torch.ones_like(y))  # type: ignore[no-untyped-call]
            if repeat:  # the first call is cold
                best[i] = min(best[i][0], middle - begin), min(best[i][1], time.perf_counter() - middle)
    return [(1e3 * forward, 1e3 * backward) for forward, backward in best]


def main() -> None:
    """Print a table of times and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("threads", type=int, nargs="?", default=1, metavar="THREADS")
    torch.set_num_threads(parser.parse_args().threads)
    print(f"{torch.get_num_threads()} threads, {TOKENS:,} tokens; milliseconds forward + backward")
    for dtype in (torch.float32, torch.bfloat16):
        for length in (128, 256, 512, 1024):
            windows = [(False, w) for w in (32, 128, 256) if 2 * w < length]
            for documents, window in ((False, None), (True, None), *windows):
                name = choose(torch.device("cpu"), dtype, SIZE, length, length, documents, window)
                what = f"{str(dtype).removeprefix('torch.'):8} row {length:4} " + (
                    "documents " if documents else f"window {window or 'none':4}"[:11].ljust(11)
                )
                a, b = milliseconds(dtype, length, documents, window)
                print(
                    f"{what:28}: fused {a[0]:6.2f} + {a[1]:6.2f}, chosen {b[0]:6.2f} + {b[1]:6.2f}, "
                    f"ratio {sum(a) / sum(b):5.2f} ({name})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
