"""Parameters with declared name, shape, role and initial values, and rules that match them."""

import fnmatch
import hashlib
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from caddie.config import Config, NonNegative, Range
from caddie.errors import UserError, suggest

Role = Literal["embedding", "matrix", "gate", "scalar", "head"]
ROLES: tuple[Role, ...] = get_args(Role)
Value = TypeVar("Value")


class Initial(Config):
    """Socket: initial values of a parameter."""

    @abstractmethod
    def fill(self, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill `tensor` (float32, on the CPU) in place."""


class Constant(Initial):
    """One value for all elements."""

    value: Annotated[float, Range(-1e30, 1e30)]
    """Value of every element."""

    def fill(self, tensor: Tensor, generator: torch.Generator) -> None:
        tensor.fill_(self.value)


class RowConstants(Initial):
    """One value for each row."""

    values: tuple[Annotated[float, Range(-1e30, 1e30)], ...]
    """Values of the rows, in order."""

    def fill(self, tensor: Tensor, generator: torch.Generator) -> None:
        """Set every row; raises `UserError` unless there are as many rows as values."""
        if len(self.values) != len(tensor):
            raise UserError(f"RowConstants has {len(self.values)} values for {len(tensor)} rows")
        tensor.copy_(torch.tensor(self.values).reshape(-1, *[1] * (tensor.ndim - 1)).expand_as(tensor))


class Normal(Initial):
    """Independent normal values with mean 0."""

    std: NonNegative
    """Standard deviation."""

    def fill(self, tensor: Tensor, generator: torch.Generator) -> None:
        tensor.normal_(0.0, self.std, generator=generator)


class FanIn(Initial):
    """Uniform within ±1/√inputs: PyTorch's default for linear layers."""

    def fill(self, tensor: Tensor, generator: torch.Generator) -> None:
        bound = 1.0 / math.sqrt(tensor.shape[-1])
        tensor.uniform_(-bound, bound, generator=generator)


class FanInNormal(Initial):
    """Normal with standard deviation 1/√inputs (LeCun et al. 1998)."""

    def fill(self, tensor: Tensor, generator: torch.Generator) -> None:
        tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)


class Orthogonal(Initial):
    """Orthogonal rows, or columns if there are fewer, of length `gain` (arXiv 1312.6120)."""

    gain: NonNegative = 1.0
    """Length of a row or column."""

    def fill(self, tensor: Tensor, generator: torch.Generator) -> None:
        nn.init.orthogonal_(tensor, self.gain, generator)


class Overtone(Initial):
    """Normal values with replaced singular values: number k, from 1, becomes the largest divided by √k."""

    std: NonNegative = 0.005
    """Standard deviation of the values before the spectrum is shaped."""

    def fill(self, tensor: Tensor, generator: torch.Generator) -> None:
        u, s, v = torch.linalg.svd(tensor.normal_(0.0, self.std, generator=generator), full_matrices=False)
        falling = s[0] * torch.arange(1, len(s) + 1, dtype=s.dtype).rsqrt()
        tensor.copy_((u * falling) @ v)


@dataclass(frozen=True)
class Declaration:
    """Role and initial values of a parameter."""

    role: Role
    initial: Initial


class Part(nn.Module):
    """Module that declares its parameters.

    It holds their roles, because attributes of an `nn.Parameter` do not survive `deepcopy` or `to_empty`.
    """

    __call__: Callable[..., Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.declarations: dict[str, Declaration] = {}
        self.constants: dict[str, Initial] = {}

    def declare(self, name: str, shape: tuple[int, ...], role: Role, initial: Initial) -> nn.Parameter:
        """Return an uninitialized parameter of this module; `initialize` fills it."""
        self.declarations[name] = Declaration(role, initial)
        return nn.Parameter(torch.empty(shape))

    def constant(self, name: str, shape: tuple[int, ...], initial: Initial) -> Tensor:
        """Return a random buffer that is neither learned nor stored; `draw_constants` draws it from its name."""
        self.constants[name], tensor = initial, torch.empty(shape)
        self.register_buffer(name, tensor, persistent=False)
        return tensor


def declarations(model: nn.Module) -> dict[str, Declaration]:
    """Return full parameter name to declaration, in the model's order; an undeclared parameter is a bug."""
    found: dict[str, Declaration] = {}
    for prefix, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            assert isinstance(module, Part), f"{prefix} declares no parameters"
            assert name in module.declarations, f"undeclared parameter {prefix}.{name}"
            found[f"{prefix}.{name}" if prefix else name] = module.declarations[name]
    return found


def initialize(model: nn.Module, seed: int) -> None:
    """Fill every parameter with its initial values, and draw every constant.

    Each parameter has its own generator, seeded by run seed and name. So its values depend neither on the device nor on
    other parameters, and two recipes that share a parameter start it equally.
    """
    declared = declarations(model)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.copy_(_drawn(declared[name].initial, parameter.shape, f"{seed}:{name}"))
    draw_constants(model)


def draw_constants(model: nn.Module) -> None:
    """Draw every constant from its name, on the device of the model's parameters."""
    for prefix, module in model.named_modules():
        for name, initial in module.constants.items() if isinstance(module, Part) else ():
            buffer, device = module.get_buffer(name), next(model.parameters()).device
            setattr(module, name, _drawn(initial, buffer.shape, f"constant:{prefix}.{name}").to(device, buffer.dtype))


def _drawn(initial: Initial, shape: torch.Size, name: str) -> Tensor:
    value = torch.empty(shape)
    initial.fill(value, named_generator(name))
    return value


def named_generator(name: str) -> torch.Generator:
    """Return a generator on the CPU whose seed is a hash of the name, the same on every machine."""
    digest = hashlib.sha256(name.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def assign(rules: Mapping[str, Value], model: nn.Module, what: str) -> dict[str, Value]:
    """Return parameter name to the value of the last rule that matches its role or its name.

    A rule's key is a role (`matrix`) or a pattern of names (`blocks.0.*`). Raises `UserError`, whose text begins
    with `what`, for a parameter without a rule and for a pattern that matches nothing; an unused role is no error.
    """
    declared = declarations(model)
    chosen: dict[str, Value] = {}
    for pattern, value in rules.items():
        if pattern in ROLES:
            matches = [name for name, declaration in declared.items() if declaration.role == pattern]
        elif not (matches := [name for name in declared if fnmatch.fnmatchcase(name, pattern)]):
            raise UserError(f"{what}: {pattern} matches no parameter{suggest(pattern, [*declared, *ROLES])}")
        chosen.update(dict.fromkeys(matches, value))
    for name, declaration in declared.items():
        if name not in chosen:
            raise UserError(f"{what}: no rule for {name}; add one for its role, {declaration.role}")
    return chosen
