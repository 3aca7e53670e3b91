"""All that a part of the model may know besides the stream."""

from __future__ import annotations

import torch
from torch import Tensor

from caddie.ops import causal_mask, rotary_tables


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
    ids go on where those of the forward before ended. Rotary tables and masks are made once for all layers.
    """

    def __init__(self, ids: Tensor, starts: Tensor | None, dtype: torch.dtype, cache: Cache | None = None) -> None:
        self.ids = ids
        self.starts = starts
        self.dtype = dtype
        self._cache = cache
        self._calls = 0
        self._first = 0 if cache is None else cache.length
        self._rotary: dict[tuple[int, float], tuple[Tensor, Tensor]] = {}
        self._mask: Tensor | None = None
        if cache is not None:
            cache.length += ids.shape[1]
        self.documents = None if starts is None else starts.cumsum(1)
        """The running number of each position's document in its row, (B, T), or None without `starts`."""
        self._seen = self.documents
        if cache is not None and self.documents is not None:
            (before,) = self._keep((self.documents[:, :0],))
            if before.shape[1]:
                self.documents = self.documents + before[:, -1:]
            self._seen = torch.cat((before, self.documents), 1)
            cache.kept[0] = (self._seen,)

    def rotary(self, dims: int, base: float) -> tuple[Tensor, Tensor]:
        """Cosine and sine tables over the positions of a row, each (T, dims/2)."""
        if (dims, base) not in self._rotary:
            positions = torch.arange(self._first, self._first + self.ids.shape[1], device=self.ids.device)
            self._rotary[dims, base] = rotary_tables(positions, dims, base, self.dtype)
        return self._rotary[dims, base]

    def previous(self, x: Tensor) -> Tensor:
        """x (B, T, ...) shifted by one position: what stood before, zero at the start of a row or a document."""
        (before,) = self._keep((torch.zeros_like(x[:, :1]),))
        shifted = torch.cat((before, x[:, :-1]), dim=1)
        if self._cache is not None:
            self._cache.kept[self._calls - 1] = (x[:, -1:],)
        if self.starts is None:
            return shifted
        return shifted.masked_fill(self.starts.reshape(*self.starts.shape, *[1] * (x.ndim - 2)), 0)

    def keys_and_values(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v (B, K, T, D) of these positions behind those of all positions before."""
        if self._cache is None:
            return k, v
        before = self._keep((k[:, :, :0], v[:, :, :0]))
        both = torch.cat((before[0], k), 2), torch.cat((before[1], v), 2)
        self._cache.kept[self._calls - 1] = both
        return both

    def mask(self, scope: str) -> Tensor | None:
        """Which positions attend to which, (B, 1, T, all positions), or None where all that is past is seen."""
        if scope == "row" or self.documents is None or self._seen is None:
            return None
        if self._mask is None:
            same = self.documents[:, None, :, None] == self._seen[:, None, None, :]
            self._mask = same & causal_mask(self.documents.shape[1], self._seen.shape[1], same.device)
        return self._mask

    def _keep(self, first: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What this call kept in the forward before, or `first` in the first one."""
        self._calls += 1
        if self._cache is None:
            return first
        if len(self._cache.kept) < self._calls:
            self._cache.kept.append(first)
        return self._cache.kept[self._calls - 1]
