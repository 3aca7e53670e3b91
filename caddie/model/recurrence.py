"""Depth recurrence: layers with several passes in a forward."""

from itertools import pairwise
from typing import Annotated

from torch import Tensor

from caddie.config import Config, Range
from caddie.config.schedules import IntSchedule, PiecewiseConstant, all_values
from caddie.errors import UserError
from caddie.model.parameters import Constant, Part

MOST_PASSES = 64
"""Largest number of passes of a layer."""


class Recurrence(Config):
    """Depth recurrence: layers first to last run several times with the same weights (arXiv 1807.03819).

    `passes` may change over the run. U-Net connections follow the order of the passes, so they change with it. All
    orders are warmed up before the clock starts. The packed model runs as at the end of the run.
    """

    first: Annotated[int, Range(0, 1023)] = 3
    """First repeated layer."""
    last: Annotated[int, Range(0, 1023)] = 5
    """Last repeated layer."""
    passes: IntSchedule = PiecewiseConstant(values=(1, 3), begins=(0.35,))
    """Passes of these layers in a forward."""
    embeddings: bool = False
    """True for a learned vector for each pass, added to the stream before it."""
    own_mlps: bool = False
    """True if repeated passes of a layer have their own MLPs and share only its attention (#1204)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.first > self.last:
            raise UserError(f"first ({self.first}) must be at most last ({self.last})")
        if self.most > MOST_PASSES:
            raise UserError(f"passes must be at most {MOST_PASSES}, not {self.most}")

    @property
    def most(self) -> int:
        """Largest number of passes over the run."""
        return max(all_values(self.passes))

    def order(self, depth: int, passes: int) -> list[int]:
        """Return the layers in the order of their passes."""
        return [*range(self.first), *list(range(self.first, self.last + 1)) * passes, *range(self.last + 1, depth)]

    def places(self, depth: int, passes: int) -> list[range]:
        """Return for each pass in that order its place in the longest order, then the places left out after it."""
        order = self.order(depth, passes)
        left_out, later = len(self.order(depth, self.most)) - len(order), depth - 1 - self.last
        begins = [number + left_out * (number >= len(order) - later) for number in range(len(order) + 1)]
        return [range(*ends) for ends in pairwise(begins)]


NO_RECURRENCE = Recurrence(first=0, last=0, passes=1)
"""Every layer runs once."""


class PassEmbeddings(Part):
    """One vector for each pass, initially zero."""

    def __init__(self, config: Recurrence, width: int) -> None:
        super().__init__()
        self.first = config.first
        self.weight = self.declare("weight", (config.most, width), "scalar", Constant(value=0.0))

    def forward(self, number: int, x: Tensor) -> Tensor:
        """Return the stream (B, T, width) plus the vector of pass `number`, from 0."""
        return x + self.weight[number].to(x.dtype)
