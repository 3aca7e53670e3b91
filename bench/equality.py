"""Fused kernels and attention backends against their plain references here: how far apart, forward and backward, and
how long each takes; what a machine does not have is named with the reason."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from kernels import error, least, names, one_call, operations
from torch import Tensor

from caddie.ops.attention import BACKENDS, Visibility, segment_bucket
from caddie.report.tables import one_line, table
from caddie.runtime.distributed import local_device

PLAIN = "plain"
Call = Callable[[], list[Tensor]]
"""Gives the result of an operation and the gradients of what it was given."""


def fused_kernels() -> list[dict[str, Any]]:
    """A row for each operation and implementation that is not plain: shapes of runs, and ragged ones."""
    rows: list[dict[str, Any]] = []
    for operation, size, tensors, settings in [*operations(), *ragged()]:
        exact = one_call(operation, PLAIN, tuple(tensor.float() for tensor in tensors), settings)
        calls = {name: one_call(operation, name, tensors, settings) for name in names(operation)}
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        for name, call in calls.items():
            if name != PLAIN:
                found = compared(call, calls[PLAIN], exact)
                rows.append({"operation": operation, "size": size, "format": dtype, "name": name, **found})
    return rows


def ragged() -> list[tuple[str, str, tuple[Tensor, ...], tuple[object, ...]]]:
    """Sizes that are a multiple of nothing."""
    device = local_device()

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).bfloat16()

    targets, x = torch.randint(1003, (1001,), device=device), 0.1 * random(3, 100, 130)
    return [
        ("cross_entropy", "1001 x 1003", (4 * random(1001, 1003),), (targets, 30.0, "tanh", 1e-4)),
        ("squared", "1001 x 203", (random(1001, 203),), (0.5,)),
        ("squared_mlp", "1001 x 96 x 200", (random(1001, 96), 0.1 * random(200, 96), random(96, 200)), (0.5,)),
        ("gram", "3 x 100 x 130", (x,), ()),
        ("gram_polynomial", "100 squared", (x @ x.mT,), (-4.775, 2.0315)),
    ]


def attention_backends(toy: bool = False) -> list[dict[str, Any]]:
    """A row for each backend, for rows and for documents within them: 8 heads on 4 of size 64."""
    rows: list[dict[str, Any]] = []
    count, length = (2, 64) if toy else (32, 2048)
    device = local_device()
    for documents in (False, True):
        generator = torch.Generator(device).manual_seed(0)
        q, k, v = (
            torch.randn(count, heads, length, 64, device=device, dtype=torch.bfloat16, generator=generator)
            for heads in (8, 4, 4)
        )
        starts = torch.rand(count, length, device=device, generator=generator) < 1 / 600
        segments = starts.cumsum(1) if documents else None
        reference = "SDPA with a dense mask" if documents else "SDPA"
        exact = _attending(reference, segments, (q.float(), k.float(), v.float()))
        plain = _attending(reference, segments, (q, k, v))
        for name in BACKENDS:
            bounded = any(word in name for word in ("varlen", "Flex", "dense"))
            if "bands" in name or name == "explicit matmuls" or bounded != documents:
                continue
            found = compared(_attending(name, segments, (q, k, v)), plain, exact)
            rows.append({"what": "documents" if documents else "rows", "name": name, **found})
    return rows


def _attending(name: str, segments: Tensor | None, given: tuple[Tensor, ...]) -> Call:
    length = given[0].shape[2]
    counted = 0 if segments is None else int((segments.diff(dim=1) != 0).sum()) + len(segments)
    room = segment_bucket(counted, len(given[0]) * length) if counted else 0
    visible = Visibility(length, given[1].shape[2], segments, room=room)  # masks are made once, as in a model

    def call() -> list[Tensor]:
        q, k, v = (tensor.detach().requires_grad_() for tensor in given)
        y = BACKENDS[name](q, k, v, visible)
        return [y.detach(), *torch.autograd.grad(y.float().square().mean(), (q, k, v))]

    return call


def compared(call: Call, plain: Call, exact: Call) -> dict[str, Any]:
    """Errors of both against float32, equal if the first has at most twice that of the second; best milliseconds."""
    try:
        right = exact()
        errors = [error(one(), right) for one in (call, plain)]
        best = least([call, plain])
    except Exception as problem:  # whatever a library says when it cannot
        return {"equal": None, "why": one_line(f"{type(problem).__name__}: {problem}")[:60]}
    return {
        "equal": errors[0] <= 2 * errors[1] + 1e-3,
        "error": errors[0],
        "of plain": errors[1],
        "ms": best[0],
        "ms of plain": best[1],
    }


def listed(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of rows that may lack some of the columns."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [
        [f"{row[key]:.3g}" if isinstance(row.get(key), float) else row.get(key) for key in columns] for row in rows
    ]
    return table(cells, columns, 150)
