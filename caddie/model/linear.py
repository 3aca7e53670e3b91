"""Linear layers: learned, or random with a learned low-rank part."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from caddie.config import Channels, Config
from caddie.errors import UserError
from caddie.model.parameters import Constant, FanIn, Initial, Overtone, Part, Role
from caddie.ops import linear, matmul, rms_norm

Delta = Callable[[Tensor], Tensor]
"""Addition of test-time training to the output of a part, computed from the part's input."""

Product = Callable[[Tensor, Tensor], Tensor]
"""Product of x (..., inputs) and a weight (outputs, inputs): `caddie.ops.linear`, or one in float8."""


@dataclass(eq=False)
class LowRankDelta:
    """LoRA: an addition x Aᵀ Bᵀ · scale to a part's output (arXiv 2106.09685), kept outside its parameters.

    All rows of x (B, T, inputs) share A (rank, inputs) and B (outputs, rank), or each row has its own, along a leading
    axis.
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        """Map x (B, T, inputs) to the addition (B, T, outputs)."""
        return matmul(matmul(x, self.a.mT), self.b.mT) * self.scale


def adapted(y: Tensor, delta: Delta | None, x: Tensor) -> Tensor:
    """Return the output y of a part on x plus the delta."""
    return y if delta is None else y + delta(x)


class Linear(Part):
    """Linear layer y = x Wᵀ without bias, W (outputs, inputs) kept in float32 and cast to the stream's dtype.

    With `normed`, x is RMS-normed first. `view` replaces the weight in the forward (quantization-aware training);
    `delta` adds to the output (test-time training). Neither is set at first. `product` is the matrix product.
    """

    def __init__(
        self, inputs: int, outputs: int, initial: Initial, role: Role = "matrix", *, normed: bool = False
    ) -> None:
        super().__init__()
        self.normed = normed
        self.weight = self.declare("weight", (outputs, inputs), role, initial)
        self.view: Callable[[Tensor], Tensor] | None = None
        self.delta: Delta | None = None
        self.product: Product = linear

    @property
    def viewed(self) -> Tensor:
        """Weight as the forward sees it."""
        return self.weight if self.view is None else self.view(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., inputs) to (..., outputs)."""
        if self.normed:
            x = rms_norm(x)
        return adapted(self.product(x, self.viewed), self.delta, x)


class LinearMap(Config):
    """Socket: kind of the matrices of attention and MLP."""

    @abstractmethod
    def build(self, inputs: int, outputs: int) -> Part:
        """Return a map that reads the stream."""

    @abstractmethod
    def build_output(self, inputs: int, outputs: int) -> Part:
        """Return a map that writes to the stream."""


class Dense(LinearMap):
    """Learned matrix. Matrices that write to the stream start at zero, so that a new layer is the identity."""

    initial: Initial = FanIn()
    """Initial values of matrices that read the stream."""
    normed: bool = False
    """True if matrices that write to the stream norm their input, as in the ternary record."""

    def build(self, inputs: int, outputs: int) -> Part:
        return Linear(inputs, outputs, self.initial)

    def build_output(self, inputs: int, outputs: int) -> Part:
        return Linear(inputs, outputs, Constant(value=0.0), normed=self.normed)


class RandomMap(LinearMap):
    """Fixed random matrix plus a learned one of low rank: R + B A.

    R is drawn again whenever the model is made, with its name as the seed, so it takes no bytes.
    """

    rank: Channels = 160
    """Rank of the learned part."""
    initial: Initial = FanIn()
    """Distribution of the fixed matrix."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.initial, Overtone):
            raise UserError("a RandomMap is drawn anew whenever the model is opened; Overtone takes too long for that")

    def build(self, inputs: int, outputs: int) -> Part:
        return RandomLinear(inputs, outputs, self.rank, self.initial)

    build_output = build


class RandomLinear(Part):
    """Linear layer y = x Rᵀ + x Aᵀ Bᵀ, R (outputs, inputs) fixed, A (rank, inputs), B (outputs, rank) initially 0."""

    def __init__(self, inputs: int, outputs: int, rank: int, initial: Initial) -> None:
        super().__init__()
        self.fixed = self.constant("fixed", (outputs, inputs), initial)
        self.down = Linear(inputs, rank, FanIn())
        self.up = Linear(rank, outputs, Constant(value=0.0))

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., inputs) to (..., outputs)."""
        learned = self.up(self.down(x))
        return linear(x, self.fixed) + learned
