"""All that a part of the model may know besides the stream."""

from __future__ import annotations

import torch
from torch import Tensor

from caddie.ops import rotary_tables


class Context:
    """One forward's surroundings, for ids (B, T).

    `starts` (B, T) is true where a document begins, or None when the rows are taken as they come. Rotary
    tables are made once for all layers.
    """

    def __init__(self, ids: Tensor, starts: Tensor | None, dtype: torch.dtype) -> None:
        self.ids = ids
        self.starts = starts
        self.dtype = dtype
        self.documents = None if starts is None else starts.cumsum(1)
        """The running number of each position's document in its row, (B, T), or None without `starts`."""
        self._rotary: dict[tuple[int, float], tuple[Tensor, Tensor]] = {}

    def rotary(self, dims: int, base: float) -> tuple[Tensor, Tensor]:
        """Cosine and sine tables over the positions of a row, each (T, dims/2)."""
        if (dims, base) not in self._rotary:
            positions = torch.arange(self.ids.shape[1], device=self.ids.device)
            self._rotary[dims, base] = rotary_tables(positions, dims, base, self.dtype)
        return self._rotary[dims, base]

    def previous(self, x: Tensor) -> Tensor:
        """x (B, T, ...) shifted by one position: what stood before, zero at the start of a row or a document."""
        shifted = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), dim=1)
        if self.starts is None:
            return shifted
        return shifted.masked_fill(self.starts.reshape(*self.starts.shape, *[1] * (x.ndim - 2)), 0)
