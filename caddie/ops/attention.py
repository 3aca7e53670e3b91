"""Attention backends: SDPA, explicit matmuls, FlexAttention and FlashAttention, chosen by device, dtype and shape.

All backends give the same numbers up to rounding, and only PyTorch itself is required. Backends for GPUs are
tested against stand-ins with the documented signatures, and not yet measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from caddie.ops.dispatch import constant_in_graphs, has, has_triton

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

SHORT_ROW = 512
"""Largest number of keys for which bfloat16 attention uses explicit matmuls, on a CPU that has bfloat16 products: 1.2
to 4.7 times faster, forward and backward, than the fused kernel (`bench/attention.py`, 2026-11-21; `docs/log.md`)."""
DENSE_ROW = 4_096
"""Largest number of keys for a dense mask in an uncompiled model, where a compiled one uses FlexAttention; a guess."""
QUERIES = 128
"""Queries per chunk of explicit matmuls, which read the keys up to the last of them: a quarter faster in rows of 256
and 512, forward and backward, than all queries at once (`docs/log.md`)."""


class Visibility:
    """Causal mask of a batch: a query attends to itself and earlier positions of its segment, within the window.

    The T `queries` are the last of the S `keys`; T < S with a cache, and in a layer that only returns its last
    positions. `segments` (B, S) numbers the segment of each position, rising along a row; None: a row is one segment.
    `window` is the number of positions attended to, the query's own included; None: all. Masks are made once, on first
    use, for all layers of a forward.

    FlashAttention takes the starts of segments, whose number depends on the data, but a compiled graph needs fixed
    shapes. So there is `room` for that many segments in the batch, padded with empty ones. Training counts them while
    the batch is in host memory (`segment_bucket`). With a `room` of 0 FlashAttention's varlen kernel is not used: each
    empty segment takes time, and a kernel takes at most 65,535. More segments than room are an error. `longest` is the
    maximum length of a segment: the kernel launches blocks for that length for every segment.
    """

    def __init__(
        self,
        queries: int,
        keys: int,
        segments: Tensor | None = None,
        window: int | None = None,
        room: int = 0,
        longest: int | None = None,
    ) -> None:
        self.queries, self.keys = queries, keys
        self.longest = keys if longest is None else min(longest, keys)
        self.segments = segments
        self.window = None if window is None or window >= keys else window
        self.room = room
        self._mask: Tensor | None = None
        self._band: Tensor | None = None
        self._blocks: BlockMask | None = None
        self._bounds: Tensor | None = None

    def sees(self, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return True where position `query` of a row attends to position `key`; the index tensors broadcast."""
        seen = key <= query
        if self.window is not None:
            seen = seen & (query - key < self.window)
        if self.segments is not None:
            seen = seen & (self.segments[row, query] == self.segments[row, key])
        return seen

    def mask(self, device: torch.device) -> Tensor:
        """Return the dense mask, True where a query attends to a key, (B or 1, 1, T, S)."""
        if self._mask is None:
            rows, positions = self._rows(device), torch.arange(self.keys, device=device)
            seen = self.sees(rows, positions[self.keys - self.queries :, None], positions)
            self._mask = seen.expand(len(rows), 1, -1, -1)
        return self._mask

    def band(self, rows: int, device: torch.device) -> Tensor:
        """Return the mask of chunks, `window` queries and 2 · `window` keys: (rows · chunks, 1, window, 2 · window)."""
        if self._band is None:
            width = self.window or self.keys
            first = torch.arange(0, self.keys, width, device=device)[:, None, None]
            query = first + torch.arange(width, device=device)[:, None]
            key = first + torch.arange(-width, width, device=device)  # below zero: before the row, masked
            seen = self.sees(self._rows(device), query, key) & (key >= 0)
            self._band = seen.expand(rows, *seen.shape[-3:]).flatten(0, 1)[:, None]
        return self._band

    def blocks(self, device: torch.device) -> BlockMask:
        """Return the `BlockMask` for FlexAttention."""
        if self._blocks is None:
            rows = len(self._rows(device))
            from torch.nn.attention.flex_attention import create_block_mask  # imports the compiler, a second

            self._blocks = create_block_mask(
                lambda row, head, query, key: self.sees(row, query, key), rows, None, self.queries, self.keys, device
            )
        return self._blocks

    def bounds(self, rows: int, device: torch.device) -> Tensor:
        """Return cu_seqlens, int32: starts of segments in the concatenated rows, then the end, repeated as padding."""
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


def segment_bucket(count: int, positions: int) -> int:
    """Round the number of segments in a batch of `positions` up to a power of two, so that few graphs are compiled.

    The result is at least 64, and one for each 256 positions, four times the number in web text, so that the batches of
    a run share a graph.
    """
    return 1 << (max(64, count, positions // 256) - 1).bit_length()


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Visibility) -> Tensor:
    """Return attention of q (B, H, T, D) over k, v (B, K, S, D); query head h reads key/value head h // (H/K)."""
    documents, counted = visible.segments is not None, visible.room > 0
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
    """Return the name in `BACKENDS` for heads of that `size`; the answer is constant in a process.

    `documents` is True if segments bound attention, and `counted` if there is room for their number.
    """
    windowed = window is not None and window < keys
    if device.type == "cuda" and queries == keys:
        return _on_cuda(device, dtype, size, "documents" if documents else "window" if windowed else "causal", counted)
    if windowed and window and queries == keys and keys % window == 0 and 2 * window < keys:
        return "explicit matmuls in bands" if _short(device, dtype, 2 * window) else "SDPA in bands"
    if _short(device, dtype, keys):
        return "explicit matmuls"
    return "SDPA with a dense mask" if documents or windowed or 1 < queries < keys else "SDPA"


def _on_cuda(device: torch.device, dtype: torch.dtype, size: int, kind: str, counted: bool) -> str:
    """Return the backend on a GPU; `kind` is the bound besides the row: "causal" (none), "window" or "documents".

    If FlashAttention is not installed, it is SDPA's flash kernel: the records measured cuDNN's 6 % slower on an H100.
    On data center Blackwell it is cuDNN's kernel from version 9.15.1 on, which PyTorch prefers too.
    """
    major = torch.cuda.get_device_capability(device)[0]
    half = dtype in (torch.float16, torch.bfloat16) and size % 8 == 0 and size <= 256
    flash = _flash_attention(major) if half and (size <= 128 or major < 10) else {}
    if kind in flash and (counted or kind != "documents"):
        return flash[kind]
    if kind == "causal":
        cudnn = major == 10 and (torch.backends.cudnn.version() or 0) >= 91501  # type: ignore[no-untyped-call]
        return ("SDPA (cuDNN)" if cudnn else "SDPA (flash)") if half else "SDPA"
    flexible = size >= 16 and dtype != torch.float64 and has_triton()
    return "FlexAttention" if flexible else "SDPA with a dense mask"


@cache
def _flash_attention(major: int) -> dict[str, str]:
    """Return kind to FlashAttention backend at this compute capability; PyTorch's varlen is complete from 2.12 on."""
    functions = "flash_attn_func", "flash_attn_varlen_func"
    varlen = major >= 8 and torch.__version__ >= "2.12" and has("torch.nn.attention.varlen", "varlen_attn")
    if major == 9 and has("flash_attn_interface", *functions):
        name = "FlashAttention 3"
    elif major in (9, 10) and varlen and _activated("FA4"):
        return {"causal": "FlashAttention 4", **dict.fromkeys(("window", "documents"), "FlashAttention 4 varlen")}
    elif major >= 8 and has("flash_attn", *functions):
        name = "FlashAttention 2"
    else:
        return dict.fromkeys(("window", "documents"), "PyTorch's varlen") if varlen else {}
    return {"causal": name, "window": name, "documents": f"{name} varlen"}


def _activated(package: str) -> bool:
    """Make PyTorch's flash operators call FlashAttention 4, which has none of its own; False if it is missing."""
    try:
        torch.nn.attention.activate_flash_attention_impl(package)
    except Exception:
        return False
    return True


def _short(device: torch.device, dtype: torch.dtype, keys: int) -> bool:
    return device.type == "cpu" and dtype == torch.bfloat16 and keys <= SHORT_ROW


def _sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Visibility, kernel: SDPBackend | None = None) -> Tensor:
    """Compute causal attention by PyTorch's SDPA, with `kernel` where it works, else with another."""
    with nullcontext() if kernel is None else sdpa_kernel([kernel, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return _fused(q, k, v, is_causal=visible.queries == visible.keys)


def _fused(q: Tensor, k: Tensor, v: Tensor, **causality: Any) -> Tensor:
    """Compute SDPA; on a GPU, repeat shared heads if there is a mask or the dtype is float32.

    SDPA's flash kernel supports neither, and its memory-efficient kernel no shared heads. The third kernel keeps all
    pairs of positions in memory.
    """
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.is_cuda and (q.dtype == torch.float32 or "attn_mask" in causality):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **causality)


def _dense(q: Tensor, k: Tensor, v: Tensor, visible: Visibility) -> Tensor:
    return _masked(q, k, v, visible.mask(q.device))


def _banded(q: Tensor, k: Tensor, v: Tensor, visible: Visibility) -> Tensor:
    """Compute sliding-window attention exactly: chunks of a window each attend to themselves and the chunk before.

    2 · T · window pairs instead of T²: 3.6 to 5 times faster with a window of 128 in rows of 1,024
    (`bench/attention.py`, 2026-11-21).
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
    """Compute attention under a mask (B or 1, 1, T, S), by SDPA or by explicit matmuls with a group's heads stacked."""
    shape, (heads, length, size) = q.shape, q.shape[1:]
    shared, keys = k.shape[1:3]
    if not _short(q.device, q.dtype, keys):
        return _fused(q, k, v, attn_mask=mask)
    bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    bias = bias.expand(-1, 1 if len(mask) == 1 else shared, -1, -1).flatten(0, 1)
    queries = (q * size**-0.5).reshape(-1, heads // shared, length, size)
    k, v = k.reshape(-1, keys, size), v.reshape(-1, keys, size)
    parts = []
    for first in range(0, length, QUERIES):
        chunk = slice(first, min(first + QUERIES, length))
        past = slice(keys - length + chunk.stop)  # later keys are masked for all these queries
        q = queries[:, :, chunk].flatten(1, 2)
        weights = torch.baddbmm(bias[:, chunk, past].repeat(1, heads // shared, 1), q, k[:, past].mT).softmax(-1)
        parts.append((weights @ v[:, past]).view(len(k), heads // shared, -1, size))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 2)).view(shape)


def _flex(q: Tensor, k: Tensor, v: Tensor, visible: Visibility) -> Tensor:
    """Compute attention by FlexAttention: a kernel generated for the mask, which skips masked blocks.

    A kernel is compiled for each shape, and scoring has hundreds. So uncompiled models use it for long rows alone.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling and visible.keys <= DENSE_ROW:
        return _dense(q, k, v, visible)
    from torch.nn.attention.flex_attention import flex_attention

    attend: Callable[..., Tensor] = flex_attention if compiling else _compiled(flex_attention)
    return attend(q, k, v, block_mask=visible.blocks(q.device), enable_gqa=q.shape[1] != k.shape[1])


@cache
def _compiled(function: Callable[..., Any]) -> Any:
    return torch.compile(function, dynamic=False)


def _flash(generation: int, q: Tensor, k: Tensor, v: Tensor, visible: Visibility) -> Tensor:
    """Compute FlashAttention over whole rows, (B, T, heads, D) (arXiv 2307.08691, 2407.08608)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return _call(_package(generation).flash_attn_func, visible, q, k, v, causal=True).transpose(1, 2)


def _varlen(generation: int | None, q: Tensor, k: Tensor, v: Tensor, visible: Visibility) -> Tensor:
    """Compute FlashAttention over concatenated segments, (positions, heads, D); PyTorch's own if generation is None."""
    rows, heads, length, size = q.shape
    bounds, longest = visible.bounds(rows, q.device), visible.longest
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    if generation is None:
        from torch.nn.attention.varlen import varlen_attn

        y = _call(varlen_attn, visible, q, k, v, bounds, bounds, longest, longest, enable_gqa=True)
    else:
        function = _package(generation).flash_attn_varlen_func
        y = _call(function, visible, q, k, v, bounds, bounds, longest, longest, causal=True)
    return y.view(rows, length, heads, size).transpose(1, 2)


def _package(generation: int) -> Any:
    if generation == 3:  # import statements, as compiled graphs can trace them
        import flash_attn_interface as package  # type: ignore[import-not-found, unused-ignore]
    else:
        import flash_attn as package  # type: ignore[import-not-found, unused-ignore]
    return package


def _call(function: Callable[..., Any], visible: Visibility, *arguments: Tensor | int, **switch: bool) -> Tensor:
    """Call a FlashAttention function and return its output; some releases also return the log-sum-exp."""
    y = function(*arguments, window_size=(-1 if visible.window is None else visible.window - 1, 0), **switch)
    output: Tensor = y[0] if isinstance(y, tuple) else y
    return output


BACKENDS: dict[str, Callable[[Tensor, Tensor, Tensor, Visibility], Tensor]] = {
    "SDPA": _sdpa,
    "SDPA (flash)": partial(_sdpa, kernel=SDPBackend.FLASH_ATTENTION),
    "SDPA (cuDNN)": _sdpa,  # which PyTorch then prefers
    "SDPA with a dense mask": _dense,
    "SDPA in bands": _banded,
    "explicit matmuls": _dense,
    "explicit matmuls in bands": _banded,
    "FlexAttention": _flex,
    "PyTorch's varlen": partial(_varlen, None),
    "FlashAttention 2": partial(_flash, 2),
    "FlashAttention 2 varlen": partial(_varlen, 2),
    "FlashAttention 3": partial(_flash, 3),
    "FlashAttention 3 varlen": partial(_varlen, 3),
    "FlashAttention 4": partial(_sdpa, kernel=SDPBackend.FLASH_ATTENTION),  # which PyTorch's operators then call
    "FlashAttention 4 varlen": partial(_varlen, None),
}
"""Backends by name; all take q (B, H, T, D), k, v (B, K, S, D) and the visibility, and return the shape of q."""
