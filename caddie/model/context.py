"""Context of a forward: positions, documents, visibility and the key/value cache."""

import torch
from torch import Tensor

from caddie.config.schedules import IntSchedule, PiecewiseConstant, int_at, progress_at
from caddie.model.rope import rope_of
from caddie.ops import to_product_dtype
from caddie.ops.attention import Visibility, attention
from caddie.ops.dispatch import constant_in_graphs


class Cache:
    """Keys, values and other state of earlier positions of the same rows, for generation token by token.

    Modules access it only through the context, in the same order in every forward.
    """

    def __init__(self) -> None:
        self.length = 0
        """Number of cached positions."""
        self.kept: list[tuple[Tensor, ...]] = []
        """State kept by each call of the context, in the order of the calls."""


class Context:
    """Shared state of one forward over ids (B, T), with RoPE tables and visibilities made once for all layers.

    `starts` (B, T) is true where a document begins, or None if rows are not divided into documents. With a `cache` the
    ids continue those of the previous forward. `progress` is the fraction of the budget spent, for schedules.
    `segments` is an upper bound on the documents and parts of documents in the rows, 0 if unknown.
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
        self.ids, self.starts, self.dtype, self.progress = ids, starts, dtype, progress
        self.first_values: Tensor | None = None
        """Values (B, K, T, D) of layer 0, once it has run, for value residuals."""
        self.values: dict[int, Tensor] = {}
        """Value embeddings (B, T, K·D) to add to a layer's values, by layer."""
        self.value_input: Tensor | None = None
        """Stream (B, T, width) from which the current layer computes its values, or None for its normed input."""
        self.bigrams: Tensor | None = None
        """Bigram embedding of each position (B, T, width), as added to the token embedding, or None."""
        self.outputs: list[Tensor] = []
        """Embedded input and outputs of the passes so far (B, T, width), for dense connections."""
        self.pass_index = 0
        """Number of earlier passes of the current layer in this forward."""
        self.last: int | None = None
        """Number of last positions that the current layer must return, or None for all."""
        self._cache, self._calls = cache, 0
        self._first = 0 if cache is None else cache.length
        self._room = segments
        self._rope_tables: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self._segments: dict[int | None, Tensor] = {}
        self._visible: dict[tuple[str, int | None, int | None, int | None], Visibility] = {}
        if cache is not None:
            cache.length += ids.shape[1]

    def rope(self, rope: str, dims: int) -> tuple[Tensor, Tensor]:
        """Return cosine and sine tables (T, dims/2) for the positions of a row; `rope` is from `RoPE.as_text`."""
        if (rope, dims) not in self._rope_tables:
            end = self._first + self.ids.shape[1]
            cosine, sine = _rope_tables(rope, dims, self._first, end, self.ids.device, self.dtype)
            self._rope_tables[rope, dims] = cosine, sine
        return self._rope_tables[rope, dims]

    def previous(self, x: Tensor) -> Tensor:
        """Return x (B, T, ...) shifted by one position, with zeros at the start of a row or a document."""
        (before,) = self._keep((torch.zeros_like(x[:, :1]),))
        shifted = torch.cat((before, x[:, :-1]), dim=1)
        if self._cache is not None:
            self._cache.kept[self._calls - 1] = (x[:, -1:],)
        if self.starts is None:
            return shifted
        return shifted.masked_fill(self.starts.reshape(*self.starts.shape, *[1] * (x.ndim - 2)), 0)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, visible: Visibility) -> Tensor:
        """Return attention of q (B, H, T, D) over k, v (B, K, T, D) of these positions and of the cached ones."""
        if self._cache is not None:
            before = self._keep((k[:, :, :0], v[:, :, :0]))
            k, v = torch.cat((before[0], k), 2), torch.cat((before[1], v), 2)
            self._cache.kept[self._calls - 1] = (k, v)
        return attention(to_product_dtype(q), to_product_dtype(k), to_product_dtype(v), visible).to(q.dtype)

    def query_positions(self, x: Tensor) -> Tensor:
        """Return the positions of x (B, T, ...) that the current layer must return."""
        return x if self.last is None else x[:, x.shape[1] - self.last :]

    def visible(self, scope: str, longest: IntSchedule | None, window: IntSchedule | None) -> Visibility:
        """Return the mask of the query positions in scope `row` or `document`; documents are cut after `longest`."""
        starts = self.starts if scope == "document" else None
        longest = None if starts is None or longest is None else _int_at(longest, self.progress)
        width = reach(longest, window, self.progress, self.ids.device)
        key = (scope, longest, width, self.last)
        if key not in self._visible:
            segments = None if starts is None else self._numbered(starts, longest)
            length = self.ids.shape[1]
            cuts = self.ids.numel() // longest if self._room and longest else 0  # upper bound on the cuts
            keys, room = self._first + length, self._room + cuts
            self._visible[key] = Visibility(self.last or length, keys, segments, width, room, longest)
        return self._visible[key]

    def _numbered(self, starts: Tensor, longest: int | None) -> Tensor:
        """Return the segment number of every position, cached ones included, (B, S)."""
        if longest in self._segments:
            return self._segments[longest]
        # Segment number and age of all cached positions; the age counts from the start of the document.
        outside = starts.new_full((len(starts), 1), -1, dtype=torch.long)
        numbers, ages = self._keep((outside, outside))
        place = torch.arange(starts.shape[1], device=starts.device)
        last = torch.where(starts, place, -1).cummax(1).values  # start of a position's document; -1: in the cache
        age = torch.where(last < 0, ages[:, -1:] + 1 + place, place - last)
        begins = starts if longest is None else starts | (age % longest == 0)
        numbers = torch.cat((numbers, numbers[:, -1:] + begins.cumsum(1)), 1)
        ages = torch.cat((ages, age), 1)
        if self._cache is not None:
            self._cache.kept[self._calls - 1] = (numbers, ages)
        self._segments[longest] = numbers[:, 1:]  # without the column before the row
        return self._segments[longest]

    def _keep(self, first: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the state that this call kept in the previous forward, or `first` in the first forward."""
        self._calls += 1
        if self._cache is None:
            return first
        if len(self._cache.kept) < self._calls:
            self._cache.kept.append(first)
        return self._cache.kept[self._calls - 1]


def reach(longest: IntSchedule | None, window: IntSchedule | None, progress: float, device: torch.device) -> int | None:
    """Return the largest number of positions that a query attends to, its own included, or None for its whole row.

    No segment is longer than `longest`; on a CPU this bound serves as a window, cheaper than whole rows.
    """
    bounds = [] if window is None else [_int_at(window, progress)]
    if longest is not None and device.type == "cpu":
        bounds.append(_int_at(longest, progress))
    return min(bounds) if bounds else None


def _int_at(number: IntSchedule, progress: float) -> int:
    return _piece(number.values, number.begins, progress) if isinstance(number, PiecewiseConstant) else number


@constant_in_graphs
def _piece(values: tuple[float, ...], begins: tuple[float, ...], progress: float) -> int:
    """Return the value at that progress; PyTorch cannot trace `bisect`, and each stage of a run has its own graph."""
    return int_at(PiecewiseConstant(values=values, begins=begins), progress_at(progress))


@constant_in_graphs
def _rope_tables(rope: str, dims: int, first: int, end: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return cosines and sines at positions `first` to `end`, (2, end - first, dims/2).

    Inside a compiled graph, every kernel would compute the cosine of each element again.
    """
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    angles = torch.arange(first, end, device=device).to(exact)[:, None] * rope_of(rope).frequencies(dims, device, exact)
    return torch.stack((angles.cos(), angles.sin())).to(dtype)
