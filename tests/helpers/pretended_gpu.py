"""A pretended GPU: tensors that are really on the CPU, of which every operation that mixes the two kinds is an error.

It is the device `cpu:0`, and whose storages belong to it is written down; `.cpu()`, `.to(device)` and `copy_` lead from
one to the other, as does `torch.as_tensor`. Operations by hand are for a CPU alone, so the plain ones are asked for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from caddie.ops import IMPLEMENTATIONS, use_implementations

GPU = torch.device("cpu", 0)
_TRANSFERS = ("aten::copy_", "aten::_to_copy")
_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
_to, _numpy, _as_tensor = Tensor.to, Tensor.numpy, torch.as_tensor


class _Pretended(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.storages: set[StorageWeakRef] = set()  # which keep the name of a storage, but not its memory

    def has(self, tensor: Tensor) -> bool:
        return StorageWeakRef(tensor.untyped_storage()) in self.storages

    def put(self, tensor: Tensor) -> Tensor:
        assert tensor.dtype != torch.float64, "Apple's GPUs have no float64"
        self.storages.add(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.device.type == "cpu"]
        here = [tensor for tensor in given if self.has(tensor)]
        there = [tensor for tensor in given if tensor.dim() and tensor.numel() and not self.has(tensor)]
        name = function._schema.name
        if name not in _TRANSFERS and not (name in _INDEXED and self.has(args[0])):
            assert not (here and there), f"{name} mixes devices"
        out = function(*args, **(kwargs or {}))
        wanted = (kwargs or {}).get("device")
        if here if given else wanted == GPU:
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor) and all(leaf is not tensor for tensor in given):
                    self.put(leaf)
        return out


@contextmanager
def pretended_gpu() -> Iterator[_Pretended]:
    """What is moved or asked for there is on it, and so is all that is computed from that."""
    mode = _Pretended()

    def device(tensor: Tensor) -> torch.device:
        return GPU if mode.has(tensor) else torch.device("cpu")

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        wanted = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.device | str | Tensor)]
        moved = _to(tensor, *args, **kwargs)
        if not wanted:
            return moved
        target = wanted[0].device if isinstance(wanted[0], Tensor) else torch.device(wanted[0])
        if (target == GPU) == mode.has(tensor):
            return moved
        copied = moved.clone()
        mode.storages.discard(StorageWeakRef(copied.untyped_storage()))
        return mode.put(copied) if target == GPU else copied

    def numpy(tensor: Tensor, *args: Any, **kwargs: Any) -> np.ndarray:
        assert not mode.has(tensor), "NumPy knows no tensor of a GPU"
        return _numpy(tensor, *args, **kwargs)

    def as_tensor(data: Any, **kwargs: Any) -> Tensor:
        return to(_as_tensor(data), **kwargs)

    with pytest.MonkeyPatch.context() as patch, use_implementations(**dict.fromkeys(IMPLEMENTATIONS, "plain")), mode:
        patch.setattr(Tensor, "device", property(device))
        patch.setattr(Tensor, "to", to)
        patch.setattr(Tensor, "cpu", lambda tensor: to(tensor, "cpu"))
        patch.setattr(Tensor, "numpy", numpy)
        patch.setattr(torch, "as_tensor", as_tensor)
        yield mode
