"""A stand-in for CUDA graphs on a CPU: operations taken down once, and done again on the same memory.

As there, nothing of Python runs again, what is recorded has no effect, and a number that is read by the host cannot be
recorded. Operations by hand read numbers, and are for a CPU alone, so the plain ones must be asked for.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.made: dict[int, Tensor] = {}
        """Storages of the recording's own; the tensors are held, so that no other has their place."""
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else PyTorch's compiler would be imported, to be told to leave this alone."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name
        if name in ("aten::_local_scalar_dense", "aten::item", "aten::nonzero"):
            raise RuntimeError("operation not permitted when stream is capturing\nand much more")
        arguments = zip(function._schema.arguments, [*args, *(None,) * len(function._schema.arguments)], strict=False)
        for argument, value in arguments:
            value = kwargs.get(argument.name, value)
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)):
                    self._keep(tensor)
        found = function(*args, **kwargs)
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in given:
                self.made[leaf.untyped_storage().data_ptr()] = leaf
        self.calls.append((function, args, kwargs, found))
        return found

    def _keep(self, tensor: Tensor) -> None:
        place = tensor.untyped_storage().data_ptr()
        if place not in self.made and place not in self.before:
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())  # type: ignore[call-overload]
            self.before[place] = whole, whole.clone()

    def undo(self) -> None:
        for tensor, was in self.before.values():
            tensor.copy_(was)

    def replay(self) -> None:
        with torch.no_grad():
            for function, args, kwargs, held in self.calls:
                again = function(*tree_map(_detached, args), **tree_map(_detached, kwargs))
                for old, new in zip(tree_leaves(held), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.detach().copy_(new)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def record(work: Callable[[], object]) -> Callable[[], object]:
    """A `caddie.train.cuda_graphs.Recorder`."""
    tape = _Tape()
    try:
        with tape:
            work()
    finally:
        with torch.no_grad():
            tape.undo()
    return tape.replay
