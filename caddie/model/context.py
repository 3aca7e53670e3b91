"""All that a part of the model may know besides the stream."""

from __future__ import annotations

import torch
from torch import Tensor

from caddie.config.schedules import Budget, IntSchedule, TrainProgress, int_at
from caddie.model.rope import RoPE
from caddie.ops import multiplied
from caddie.ops.attention import Visibility, attention, constant_in_graphs


class Cache:
    """What earlier positions of the same rows left behind, so that the next ones need not compute them again.

    Parts reach it through the context alone, and in the same order in every forward.
    """

    def __init__(self) -> None:
        self.length = 0
        """Positions seen."""
        self.kept: list[tuple[Tensor, ...]] = []
        """What each call of the context kept, in the order of the calls."""


class Context:
    """One forward's surroundings, for ids (B, T).

    `starts` (B, T) is true where a document begins, or None when the rows are taken as they come. With a `cache`, the
    ids go on where those of the forward before ended. Rotary tables and visibilities are made once for all layers.
    `progress` is how much of the run is over, for what changes with it. There are at most `segments` documents and
    parts of documents in the rows, or, at 0, nobody has counted.
    """

    def __init__(
        self,
        ids: Tensor,
        starts: Tensor | None,
        dtype: torch.dtype,
        cache: Cache | None = None,
        progress: float = 1.0,
        segments: int = 0,
    ) -> None:
        self.ids = ids
        self.starts = starts
        self.dtype = dtype
        self.moment = TrainProgress(0, progress, Budget(seconds=1.0))
        self.first_values: Tensor | None = None
        """Values (B, K, T, D) of layer 0, once it has run, for layers that take them up."""
        self.values: dict[int, Tensor] = {}
        """What is added to the values (B, T, K·D) of a layer, by layer."""
        self.pass_index = 0
        """How often the layer that runs now ran before in this forward."""
        self.last: int | None = None
        """How many last positions are asked of the layer that runs now, or None for all."""
        self._cache = cache
        self._calls = 0
        self._first = 0 if cache is None else cache.length
        self._room = segments
        self._rotary: dict[tuple[RoPE, int], tuple[Tensor, Tensor]] = {}
        self._segments: dict[int | None, Tensor] = {}
        self._visible: dict[tuple[str, int | None, int | None, int | None], Visibility] = {}
        if cache is not None:
            cache.length += ids.shape[1]

    def rope(self, positions: RoPE, dims: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine tables over the positions of a row, each (T, dims/2)."""
        if (positions, dims) not in self._rotary:
            end = self._first + self.ids.shape[1]
            cosine, sine = _tables(positions, dims, self._first, end, self.ids.device, self.dtype)
            self._rotary[positions, dims] = cosine, sine
        return self._rotary[positions, dims]

    def previous(self, x: Tensor) -> Tensor:
        """x (B, T, ...) shifted by one position: what stood before, zero at the start of a row or a document."""
        (before,) = self._keep((torch.zeros_like(x[:, :1]),))
        shifted = torch.cat((before, x[:, :-1]), dim=1)
        if self._cache is not None:
            self._cache.kept[self._calls - 1] = (x[:, -1:],)
        if self.starts is None:
            return shifted
        return shifted.masked_fill(self.starts.reshape(*self.starts.shape, *[1] * (x.ndim - 2)), 0)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, visible: Visibility) -> Tensor:
        """Attention of q (B, H, T, D) over k, v (B, K, T, D) of these positions and of all positions before."""
        if self._cache is not None:
            before = self._keep((k[:, :, :0], v[:, :, :0]))
            k, v = torch.cat((before[0], k), 2), torch.cat((before[1], v), 2)
            self._cache.kept[self._calls - 1] = (k, v)
        return attention(multiplied(q), multiplied(k), multiplied(v), visible).to(q.dtype)

    def query_positions(self, x: Tensor) -> Tensor:
        """Those positions of x (B, T, ...) that are asked of the layer that runs now."""
        return x if self.last is None else x[:, x.shape[1] - self.last :]

    def visible(self, scope: str, longest: int | None, window: IntSchedule | None) -> Visibility:
        """What the positions asked for attend to: their `row` or `document`, cut into pieces of `longest`."""
        segmented = scope == "document" and self.starts is not None
        width = reach(longest if segmented else None, window, self.moment.progress, self.ids.device)
        key = (scope, longest, width, self.last)
        if key not in self._visible:
            segments = self._numbered(self.starts, longest) if segmented and self.starts is not None else None
            length = self.ids.shape[1]
            cuts = self.ids.numel() // longest if self._room and longest else 0  # at most, of longer documents
            room = self._room + cuts
            self._visible[key] = Visibility(self.last or length, self._first + length, segments, width, room)
        return self._visible[key]

    def _numbered(self, starts: Tensor, longest: int | None) -> Tensor:
        """The running number of the segment of every position up to the last of these, (B, S)."""
        if longest in self._segments:
            return self._segments[longest]
        # Number and age of all positions before; the age counts from the start of the document.
        outside = starts.new_full((len(starts), 1), -1, dtype=torch.long)
        numbers, ages = self._keep((outside, outside))
        place = torch.arange(starts.shape[1], device=starts.device)
        last = torch.where(starts, place, -1).cummax(1).values  # the start that a position belongs to, if it is here
        age = torch.where(last < 0, ages[:, -1:] + 1 + place, place - last)
        begins = starts if longest is None else starts | (age % longest == 0)
        numbers = torch.cat((numbers, numbers[:, -1:] + begins.cumsum(1)), 1)
        ages = torch.cat((ages, age), 1)
        if self._cache is not None:
            self._cache.kept[self._calls - 1] = (numbers, ages)
        self._segments[longest] = numbers[:, 1:]  # the first stands outside
        return self._segments[longest]

    def _keep(self, first: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What this call kept in the forward before, or `first` in the first one."""
        self._calls += 1
        if self._cache is None:
            return first
        if len(self._cache.kept) < self._calls:
            self._cache.kept.append(first)
        return self._cache.kept[self._calls - 1]


def reach(longest: int | None, window: IntSchedule | None, progress: float, device: torch.device) -> int | None:
    """How many positions one sees at most, itself included, or None for all of its row.

    No segment is longer than `longest`, and a CPU that is told so need not look at whole rows.
    """
    bounds = [] if window is None else [_now(window, progress)]
    if longest is not None and device.type == "cpu":
        bounds.append(longest)
    return min(bounds) if bounds else None


@constant_in_graphs
def _now(number: IntSchedule, progress: float) -> int:
    """The number at that progress; PyTorch traces no search for a stair, and a stage of the run is one graph anyway."""
    return int_at(number, TrainProgress(0, progress, Budget(seconds=1.0)))


@constant_in_graphs
def _tables(positions: RoPE, dims: int, first: int, end: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Cosines and sines at these positions, (2, end - first, dims/2).

    Left to the compiler, each of its kernels would find the cosine of each number that it turns anew.
    """
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    angles = torch.arange(first, end, device=device).to(exact)[:, None] * positions.frequencies(dims, device, exact)
    return torch.stack((angles.cos(), angles.sin())).to(dtype)
