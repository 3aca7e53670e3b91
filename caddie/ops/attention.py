"""Attention behind one door: which positions a query may look at, and which implementation computes it here.

`Visibility` says who sees whom; `choose` names the implementation for a device, dtype and shape; `attention` uses it.
All of them give the same numbers, up to rounding, and none is needed but PyTorch itself. What runs on a GPU alone has
been tested against stand-ins that keep the documented signatures, and is not yet measured on a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

SHORT_ROW = 512
"""On a CPU that multiplies bfloat16, its queries of up to this many keys attend by plain products: 1.2 to 4.7 times
faster, forward and backward, than the fused kernel (`bench/attention.py`, 2026-11-21). In float32 they would gain a few
per cent of a step on two threads, and lose them in short rows on one (`docs/log.md`)."""


QUERIES = 128
"""So many queries go through plain products at a time, with the keys up to the last of them: in rows of 256 and 512 a
quarter faster, forward and backward, than all at once; 64 at a time are no faster (`docs/performance.md`)."""


class Visibility:
    """Which positions a query may look at: itself and earlier ones, of its own segment, within the window.

    The T `queries` are the last of the S `keys`; T < S only with a cache. `segments` (B, S) is a number for each
    position that rises along a row where a document begins; None: a row is one segment. `window` counts the positions
    seen, the query's own included; None: all. Masks are made once, when first asked for, for all layers of a forward.

    FlashAttention wants the places where segments begin, in a number that is data; a compiled graph wants fixed shapes.
    So there is `room` for so many segments in the whole batch, filled up with empty ones, as in the contest's records,
    which count them outside of the graph. Training counts them while the batch is in host memory (`segment_bucket`).
    Without room no such kernel is chosen, as each empty segment takes it time, and 65,535 are the most that one can
    take. More segments than room are an error, never a wrong number.
    """

    def __init__(
        self, queries: int, keys: int, segments: Tensor | None = None, window: int | None = None, room: int = 0
    ) -> None:
        self.queries, self.keys = queries, keys
        self.segments = segments
        self.window = None if window is None or window >= keys else window
        self.room = room
        self._mask: Tensor | None = None
        self._band: Tensor | None = None
        self._blocks: BlockMask | None = None
        self._bounds: Tensor | None = None

    def sees(self, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether the position `query` of a row sees the position `key`; tensors of indices that broadcast."""
        seen = key <= query
        if self.window is not None:
            seen = seen & (query - key < self.window)
        if self.segments is not None:
            seen = seen & (self.segments[row, query] == self.segments[row, key])
        return seen

    def mask(self, device: torch.device) -> Tensor:
        """True where a query sees a key, (B or 1, 1, T, S)."""
        if self._mask is None:
            rows, positions = self._rows(device), torch.arange(self.keys, device=device)
            seen = self.sees(rows, positions[self.keys - self.queries :, None], positions)
            self._mask = seen.expand(len(rows), 1, -1, -1)
        return self._mask

    def band(self, rows: int, device: torch.device) -> Tensor:
        """The same for chunks of a window each and the keys of two, (rows · chunks, 1, window, 2 · window)."""
        if self._band is None:
            width = self.window or self.keys
            first = torch.arange(0, self.keys, width, device=device)[:, None, None]
            query = first + torch.arange(width, device=device)[:, None]
            key = first + torch.arange(-width, width, device=device)  # below zero: before the row, seen by none
            seen = self.sees(self._rows(device), query, key) & (key >= 0)
            self._band = seen.expand(rows, *seen.shape[-3:]).flatten(0, 1)[:, None]
        return self._band

    def blocks(self, device: torch.device) -> BlockMask:
        """The same as a `BlockMask` for FlexAttention."""
        if self._blocks is None:
            rows = len(self._rows(device))
            from torch.nn.attention.flex_attention import create_block_mask  # imports the compiler, a second

            self._blocks = create_block_mask(
                lambda row, head, query, key: self.sees(row, query, key), rows, None, self.queries, self.keys, device
            )
        return self._blocks

    def bounds(self, rows: int, device: torch.device) -> Tensor:
        """Where segments begin in the rows laid end to end, then the end, over and over: cu_seqlens, int32."""
        if self._bounds is None:
            end = rows * self.keys
            if self.segments is None:
                self._bounds = torch.arange(0, end + 1, self.keys, dtype=torch.int32, device=device)
            else:
                room = self.room or end
                begins = F.pad(self.segments.diff(dim=1) != 0, (1, 0), value=True).flatten()
                places = torch.where(begins, torch.arange(end, device=device), end)
                places = F.pad(places, (0, room + 1), value=end).sort().values[: room + 1]
                torch._assert_async(places[-1] == end, f"more than {room} segments in a batch: give them more room")
                self._bounds = places.int()
        return self._bounds

    def _rows(self, device: torch.device) -> Tensor:
        return torch.arange(1 if self.segments is None else len(self.segments), device=device)[:, None, None, None]


Marked = TypeVar("Marked", bound=Callable[..., Any])


def constant_in_graphs(function: Marked) -> Marked:
    """Let compiled graphs keep what the function answered, as `torch.compiler.assume_constant_result` does.

    That would import the compiler, which takes a second in every process, for this one mark.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def segment_bucket(count: int, positions: int) -> int:
    """Room for `count` segments in a batch of so many positions: a power of two, so that few graphs are compiled.

    At least 64, and one for each 256 positions, four times what web text has: the batches of a run share a graph.
    """
    return 1 << (max(64, count, positions // 256) - 1).bit_length()


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Visibility) -> Tensor:
    """Attention of q (B, H, T, D) over k, v (B, K, S, D); query head h reads key/value head h // (H/K)."""
    documents = visible.segments is not None
    counted = visible.room > 0
    name = choose(q.device, q.dtype, q.shape[-1], visible.queries, visible.keys, documents, visible.window, counted)
    return BACKENDS[name](q, k, v, visible)


@constant_in_graphs
def choose(
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    queries: int,
    keys: int,
    documents: bool,
    window: int | None,
    counted: bool = True,
) -> str:
    """Which of `BACKENDS` attends here, by the size of a head and what bounds the past; the same all process long.

    `counted`: whether somebody made room for the `documents`, of which there are any.
    """
    windowed = window is not None and window < keys
    if device.type == "cuda" and queries == keys:
        return _on_cuda(device, dtype, size, "documents" if documents else "window" if windowed else "causal", counted)
    if windowed and window and queries == keys and keys % window == 0 and 2 * window < keys:
        return "plain products in bands" if _short(device, dtype, 2 * window) else "SDPA in bands"
    if _short(device, dtype, keys):
        return "plain products"
    return "SDPA with a dense mask" if documents or windowed or 1 < queries < keys else "SDPA"


def _on_cuda(device: torch.device, dtype: torch.dtype, size: int, kind: str, counted: bool) -> str:
    """`kind`: what bounds the past besides the row, "causal" (nothing), "window" or "documents" (and perhaps both).

    An installed FlashAttention is meant to be used. Without one, SDPA's own flash kernel: the records measured cuDNN's
    6 % slower on an H100. On data centre Blackwell PyTorch itself prefers cuDNN's from 9.15.1 on, and so does this.
    """
    major = torch.cuda.get_device_capability(device)[0]
    half = dtype in (torch.float16, torch.bfloat16) and size % 8 == 0 and size <= 256
    flash = _flash_attention(major) if half and (size <= 128 or major < 10) else {}
    if kind in flash and (counted or kind != "documents"):
        return flash[kind]
    if kind == "causal":
        cudnn = major == 10 and (torch.backends.cudnn.version() or 0) >= 91501  # type: ignore[no-untyped-call]
        return ("SDPA (cuDNN)" if cudnn else "SDPA (flash)") if half else "SDPA"
    flexible = size >= 16 and dtype != torch.float64 and _has("triton", "jit")
    return "FlexAttention" if flexible else "SDPA with a dense mask"


@cache
def _flash_attention(major: int) -> dict[str, str]:
    """What attends to each kind at this compute capability; PyTorch's own varlen does it all from 2.12 on."""
    functions = "flash_attn_func", "flash_attn_varlen_func"
    varlen = major >= 8 and torch.__version__ >= "2.12" and _has("torch.nn.attention.varlen", "varlen_attn")
    if major == 9 and _has("flash_attn_interface", *functions):
        name = "FlashAttention 3"
    elif major in (9, 10) and varlen and _activated("FA4"):
        return {"causal": "FlashAttention 4", **dict.fromkeys(("window", "documents"), "FlashAttention 4 varlen")}
    elif major >= 8 and _has("flash_attn", *functions):
        name = "FlashAttention 2"
    else:
        return dict.fromkeys(("window", "documents"), "PyTorch's varlen") if varlen else {}
    return {"causal": name, "window": name, "documents": f"{name} varlen"}


def _has(module: str, *names: str) -> bool:
    """Whether a module has these functions; what cannot be imported, for whatever reason, is not there."""
    try:
        return set(names) <= set(dir(importlib.import_module(module)))
    except Exception:
        return False


def _activated(package: str) -> bool:
    """Have PyTorch's flash operators call an installed FlashAttention, which has no operators to compile by itself."""
    try:
        torch.nn.attention.activate_flash_attention_impl(package)
    except Exception:
        return False
    return True


def _short(device: torch.device, dtype: torch.dtype, keys: int) -> bool:
    return device.type == "cpu" and dtype == torch.bfloat16 and keys <= SHORT_ROW


def _sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Visibility, kernel: SDPBackend | None = None) -> Tensor:
    """PyTorch's fused attention where all that is past is seen, by this kernel if it can, or by the one it prefers."""
    with nullcontext() if kernel is None else sdpa_kernel([kernel, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        causal, grouped = visible.queries == visible.keys, q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)


def _dense(q: Tensor, k: Tensor, v: Tensor, visible: Visibility) -> Tensor:
    """With a mask over all pairs."""
    return _masked(q, k, v, visible.mask(q.device))


def _banded(q: Tensor, k: Tensor, v: Tensor, visible: Visibility) -> Tensor:
    """Chunks as long as the window, each attending to itself and the chunk before, as rows of their own: exact.

    2 · T · window pairs instead of T²: 3.6 to 5 times faster with 128 in 1,024 (`bench/attention.py`, 2026-11-21).
    """
    rows, heads, length, size = q.shape
    count = length // (visible.window or length)

    def chunks(x: Tensor) -> Tensor:  # (B, chunks, heads, window, D)
        return x.reshape(rows, x.shape[1], count, -1, size).transpose(1, 2)

    def with_previous(x: Tensor) -> Tensor:
        x = chunks(x)
        return torch.cat((F.pad(x[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0)), x), 3).flatten(0, 1)

    y = _masked(chunks(q).flatten(0, 1), with_previous(k), with_previous(v), visible.band(rows, q.device))
    return y.view(rows, count, heads, -1, size).transpose(1, 2).reshape(q.shape)


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Where a mask (B or 1, 1, T, S) is true, by SDPA or by two products with a group's heads stacked along the row."""
    heads, length, size = q.shape[1:]
    shared, keys = k.shape[1:3]
    if not _short(q.device, q.dtype, keys):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=heads != shared)
    bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    bias = bias.expand(-1, 1 if len(mask) == 1 else shared, -1, -1).flatten(0, 1)
    queries = (q * size**-0.5).reshape(-1, heads // shared, length, size)
    k, v = k.reshape(-1, keys, size), v.reshape(-1, keys, size)
    parts = []
    for first in range(0, length, QUERIES):
        some = slice(first, min(first + QUERIES, length))
        past = slice(keys - length + some.stop)  # what comes later, none of these queries sees
        asking = queries[:, :, some].flatten(1, 2)
        weights = torch.baddbmm(bias[:, some, past].repeat(1, heads // shared, 1), asking, k[:, past].mT).softmax(-1)
        parts.append((weights @ v[:, past]).view(len(k), heads // shared, -1, size))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 2)).view(q.shape)


def _flex(q: Tensor, k: Tensor, v: Tensor, visible: Visibility) -> Tensor:
    """PyTorch's FlexAttention: a kernel generated for the mask, which skips blocks that nobody sees."""
    from torch.nn.attention.flex_attention import flex_attention

    attend: Any = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
    y: Tensor = attend(q, k, v, block_mask=visible.blocks(q.device), enable_gqa=q.shape[1] != k.shape[1])
    return y


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _flash(generation: int, q: Tensor, k: Tensor, v: Tensor, visible: Visibility) -> Tensor:
    """FlashAttention over whole rows, (B, T, heads, D) (arXiv 2307.08691, 2407.08608)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return _call(_package(generation).flash_attn_func, visible, q, k, v, causal=True).transpose(1, 2)


def _varlen(generation: int | None, q: Tensor, k: Tensor, v: Tensor, visible: Visibility) -> Tensor:
    """FlashAttention over segments laid end to end, (positions, heads, D); without a generation, by PyTorch's own."""
    rows, heads, length, size = q.shape
    bounds = visible.bounds(rows, q.device)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    if generation is None:
        from torch.nn.attention.varlen import varlen_attn

        y = _call(varlen_attn, visible, q, k, v, bounds, bounds, length, length, enable_gqa=True)
    else:
        function = _package(generation).flash_attn_varlen_func
        y = _call(function, visible, q, k, v, bounds, bounds, length, length, causal=True)
    return y.view(rows, length, heads, size).transpose(1, 2)


def _package(generation: int) -> Any:
    if generation == 3:
        import flash_attn_interface as package  # type: ignore[import-not-found, unused-ignore]
    else:
        import flash_attn as package  # type: ignore[import-not-found, unused-ignore]
    return package


def _call(function: Callable[..., Any], visible: Visibility, *arguments: Tensor | int, **switch: bool) -> Tensor:
    """For the output alone, beside which some releases of FlashAttention 3 hand back the logarithms of the sums."""
    y = function(*arguments, window_size=(-1 if visible.window is None else visible.window - 1, 0), **switch)
    output: Tensor = y[0] if isinstance(y, tuple) else y
    return output


BACKENDS: dict[str, Callable[[Tensor, Tensor, Tensor, Visibility], Tensor]] = {
    "SDPA": _sdpa,
    "SDPA (flash)": partial(_sdpa, kernel=SDPBackend.FLASH_ATTENTION),
    "SDPA (cuDNN)": _sdpa,  # which PyTorch then prefers
    "SDPA with a dense mask": _dense,
    "SDPA in bands": _banded,
    "plain products": _dense,
    "plain products in bands": _banded,
    "FlexAttention": _flex,
    "PyTorch's varlen": partial(_varlen, None),
    "FlashAttention 2": partial(_flash, 2),
    "FlashAttention 2 varlen": partial(_varlen, 2),
    "FlashAttention 3": partial(_flash, 3),
    "FlashAttention 3 varlen": partial(_varlen, 3),
    "FlashAttention 4": partial(_sdpa, kernel=SDPBackend.FLASH_ATTENTION),  # which PyTorch's operators then call
    "FlashAttention 4 varlen": partial(_varlen, None),
}
"""The implementations by name; all take q (B, H, T, D), k, v (B, K, S, D) and who sees whom, and keep q's shape."""
