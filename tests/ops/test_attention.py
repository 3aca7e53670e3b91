"""Attention: every implementation against one query at a time, what is chosen where, and one compiled graph for all."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention
from torch.torch_version import TorchVersion
from variations import BASE, VOCABULARY

from caddie.model import build
from caddie.model.context import Context
from caddie.ops import attention as attend
from caddie.ops.attention import BACKENDS, Visibility, attention, choose, segment_bucket

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def oracle(q: Tensor, k: Tensor, v: Tensor, visible: Visibility) -> Tensor:
    """In float64, by the definition alone: a softmax over the scores of all pairs that may be seen."""
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    query, key = torch.arange(visible.keys)[-visible.queries :, None], torch.arange(visible.keys)
    seen = ((key <= query) & (query - key < (visible.window or visible.keys)))[None, None]
    if (segments := visible.segments) is not None:
        seen = seen & (segments[:, None, query[:, 0], None] == segments[:, None, None, :])
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v


def tensors(
    rows: int, heads: int, shared: int, queries: int, keys: int, size: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows + 10 * heads + 100 * keys)
    shapes = (rows, heads, queries, size), (rows, shared, keys, size), (rows, shared, keys, size)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def layout(rows: int, keys: int, seed: int = 0, chance: float = 0.3) -> Tensor:
    """Running numbers of segments that begin anywhere."""
    return torch.rand(rows, keys, generator=torch.Generator().manual_seed(seed)).lt(chance).cumsum(1)


def agrees(backend: Callable[..., Tensor], visible: Visibility, qkv: list[Tensor], tolerance: float = 1e-9) -> None:
    """Output and gradients are the oracle's."""
    found, expected = backend(*qkv, visible), oracle(*qkv, visible)
    assert (found.shape, found.dtype) == (expected.shape, qkv[0].dtype)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    weight = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(1))
    slopes = torch.autograd.grad((found.double() * weight).sum(), qkv)
    for slope, right in zip(slopes, torch.autograd.grad((expected * weight).sum(), qkv), strict=True):
        torch.testing.assert_close(slope.double(), right.double(), rtol=tolerance, atol=4 * tolerance)


SHAPES: dict[str, Any] = {
    "rows": st.integers(1, 3),
    "groups": st.sampled_from([(1, 1), (4, 2), (3, 1), (2, 2)]),
    "keys": st.integers(1, 24),
    "size": st.sampled_from([2, 6, 8]),
    "documents": st.booleans(),
    "window": st.one_of(st.none(), st.integers(1, 30)),
    "seed": st.integers(0, 3),
}


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(**SHAPES, cached=st.integers(0, 23))
def test_attention_is_that_of_the_definition(
    rows: int,
    groups: tuple[int, int],
    keys: int,
    size: int,
    documents: bool,
    window: int | None,
    seed: int,
    cached: int,
) -> None:
    queries = keys - min(cached, keys - 1)
    visible = Visibility(queries, keys, layout(rows, keys, seed) if documents else None, window)
    agrees(attention, visible, tensors(rows, *groups, queries, keys, size))
    agrees(attention, visible, tensors(rows, *groups, queries, keys, size, torch.bfloat16), 0.05)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("chunks", [3, 5])
def test_bands_are_exact(dtype: torch.dtype, documents: bool, chunks: int) -> None:
    visible = Visibility(4 * chunks, 4 * chunks, layout(2, 4 * chunks, chance=0.1) if documents else None, 4)
    qkv = tensors(2, 4, 2, 4 * chunks, 4 * chunks, 8, dtype)
    name = choose(CPU, dtype, 8, 4 * chunks, 4 * chunks, documents, 4)
    assert name == ("SDPA in bands" if dtype == torch.float64 else "explicit matmuls in bands")
    agrees(attention, visible, qkv, 1e-9 if dtype == torch.float64 else 0.05)


@pytest.mark.parametrize("short_row", [0, 512])
@pytest.mark.parametrize("documents", [False, True])
def test_half_precision_attends_the_same_on_both_paths(
    short_row: int, documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attend, "SHORT_ROW", short_row)
    assert choose(CPU, torch.bfloat16, 6, 9, 9, documents, None) == (
        "explicit matmuls" if short_row else "SDPA with a dense mask" if documents else "SDPA"
    )
    visible = Visibility(9, 9, layout(2, 9) if documents else None)
    agrees(attention, visible, tensors(2, 4, 2, 9, 9, 6, torch.bfloat16), 0.05)


@pytest.mark.parametrize(
    ("queries", "window", "name"),
    [
        (12, 4, "SDPA in bands"),
        (12, 6, "SDPA with a dense mask"),  # two chunks would see as much as the row
        (12, 5, "SDPA with a dense mask"),
        (12, 12, "SDPA"),
        (4, 4, "SDPA with a dense mask"),
        (4, None, "SDPA with a dense mask"),
        (1, None, "SDPA"),
    ],
)
def test_bands_are_for_whole_chunks_without_a_cache(queries: int, window: int | None, name: str) -> None:
    assert choose(CPU, torch.float32, 8, queries, 12, False, window) == name


def test_visibility_by_hand() -> None:
    segments = torch.tensor([[0, 0, 1, 1, 1, 1]])
    visible = Visibility(3, 6, segments, 3)
    assert visible.mask(CPU).int().tolist() == [[[[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1]]]]
    assert visible.mask(CPU) is visible.mask(CPU)
    assert Visibility(2, 2, None, 1).mask(CPU).int().tolist() == [[[[1, 0], [0, 1]]]]
    assert Visibility(4, 4, None, 2).band(1, CPU).int().tolist() == [
        [[[0, 0, 1, 0], [0, 0, 1, 1]]],
        [[[0, 1, 1, 0], [0, 0, 1, 1]]],
    ]


def test_bounds_by_hand() -> None:
    segments = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 2, 2, 2]])
    bounds = Visibility(5, 5, segments, room=8).bounds(2, CPU)
    assert (bounds.tolist(), bounds.dtype) == ([0, 2, 5, 6, 7, 10, 10, 10, 10], torch.int32)
    assert Visibility(5, 5, segments, room=5).bounds(2, CPU).tolist() == [0, 2, 5, 6, 7, 10]
    assert Visibility(5, 5).bounds(2, CPU).tolist() == [0, 5, 10]
    assert len(Visibility(5, 5, segments).bounds(2, CPU)) == 11
    with pytest.raises(RuntimeError, match="more than 4 segments in a batch"):
        Visibility(5, 5, segments, room=4).bounds(2, CPU)
    assert [segment_bucket(n, 1024) for n in (1, 64, 65, 128, 1000)] == [64, 64, 128, 128, 1024]
    assert [segment_bucket(n, 98_304) for n in (1, 384, 512, 513)] == [512, 512, 512, 1024]


# What needs a GPU, by stand-ins that keep the documented signatures


def fake_rows(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window_size: tuple[int, int]) -> Tensor:
    """`flash_attn_func`: (B, T, H, D); position i sees i - left to i + right, and none after it when causal."""
    query, key = torch.arange(q.shape[1])[:, None], torch.arange(q.shape[1])
    left, right = window_size[0], 0 if causal else window_size[1]
    seen = (query - key <= left) if left >= 0 else torch.ones_like(query - key, dtype=torch.bool)
    seen = seen & (key - query <= right) if right >= 0 else seen
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)


def fake_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window_size: tuple[int, int],
) -> Tensor:
    """`flash_attn_varlen_func`: (positions, H, D), each segment by itself, some of them empty."""
    assert cu_seqlens_k is cu_seqlens_q
    assert cu_seqlens_q.dtype == torch.int32
    bounds = cu_seqlens_q.tolist()
    assert (bounds[0], bounds[-1], type(max_seqlen_q)) == (0, len(q), int)
    parts = [slice(a, b) for a, b in pairwise(bounds) if a < b]
    assert max(p.stop - p.start for p in parts) <= max_seqlen_q == max_seqlen_k
    return torch.cat(
        [fake_rows(*(x[None, p] for x in (q, k, v)), causal=causal, window_size=window_size)[0] for p in parts]
    )


def own_varlen(*args: Any, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn` as of 2.12: no `causal`, grouped heads by request."""
    assert (enable_gqa, window_size[1]) == (True, 0)
    return fake_varlen(*args, window_size=window_size)


@contextmanager
def machine(
    major: int,
    activated: str = "",
    cudnn: int = 0,
    torch_version: str = "2.12.0",
    **modules: dict[str, Any],
) -> Iterator[None]:
    """A GPU of this compute capability, these modules and nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
        patch.setattr(attend, "_activated", lambda implementation: implementation == activated)
        patch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
        patch.setattr(torch, "__version__", TorchVersion(torch_version))
        for name in ("flash_attn_interface", "flash_attn", "triton", "torch.nn.attention.varlen"):
            module = ModuleType(name)
            vars(module).update(modules.get(name.rpartition(".")[2], {}))
            patch.setitem(sys.modules, name, module if modules.get(name.rpartition(".")[2]) else None)
        attend._flash_attention.cache_clear()
        attend.has_triton.cache_clear()
        yield
    attend._flash_attention.cache_clear()
    attend.has_triton.cache_clear()


PACKAGE = {"flash_attn_func": fake_rows, "flash_attn_varlen_func": fake_varlen}
PAIRS = {name: lambda *a, f=function, **k: (f(*a, **k), None) for name, function in PACKAGE.items()}
"""Return a pair, as the first releases of FlashAttention 3 do."""
OWN = {"varlen_attn": own_varlen}
TRITON = {"jit": None, "runtime": Mock()}
BROKEN = {"jit": None, "runtime": Mock(**{"driver.active.get_current_target.side_effect": RuntimeError("no Python.h")})}
OWN_NAME, DENSE = "PyTorch's varlen", "SDPA with a dense mask"


def names(dtype: torch.dtype = torch.bfloat16, head_size: int = 64) -> tuple[str, str, str]:
    """Return the backends of plain rows, of a window and of documents."""
    ask = partial(choose, CUDA, dtype, head_size, 256, 256)
    return ask(False, None), ask(False, 32), ask(True, None)


def test_what_is_there_is_used() -> None:
    with machine(9):
        assert names() == ("SDPA (flash)", DENSE, DENSE)
        assert choose(CUDA, torch.bfloat16, 64, 1, 256, False, None) == "SDPA"
        assert choose(CUDA, torch.bfloat16, 64, 4, 256, False, None) == DENSE
    with machine(9, triton=TRITON):
        assert names() == ("SDPA (flash)", "FlexAttention", "FlexAttention")
    with machine(9, triton=BROKEN):
        assert names() == ("SDPA (flash)", DENSE, DENSE)
    with machine(9, triton=TRITON, varlen=OWN):
        assert names() == ("SDPA (flash)", OWN_NAME, OWN_NAME)
        assert names(torch.float32) == ("SDPA", "FlexAttention", "FlexAttention")
        assert names(head_size=12) == ("SDPA", DENSE, DENSE)
        uncounted = partial(choose, CUDA, torch.bfloat16, 64, 256, 256, counted=False)
        assert (uncounted(True, None), uncounted(True, 32), uncounted(False, 32)) == (*2 * ["FlexAttention"], OWN_NAME)
    with machine(9, triton=TRITON, varlen=OWN, torch_version="2.11.1"):
        assert names()[2] == "FlexAttention"
    with machine(9, flash_attn=PACKAGE, varlen=OWN):
        assert names() == ("FlashAttention 2", "FlashAttention 2", "FlashAttention 2 varlen")
    with machine(9, flash_attn={"cute": None}, varlen=OWN):  # a folder that another package left there
        assert names()[2] == OWN_NAME
    with machine(9, flash_attn=PACKAGE, flash_attn_interface=PACKAGE):
        assert names() == ("FlashAttention 3", "FlashAttention 3", "FlashAttention 3 varlen")
    with machine(8, flash_attn=PACKAGE, flash_attn_interface=PACKAGE):  # the latter is for Hopper alone
        assert names()[0] == "FlashAttention 2"
    with machine(7, flash_attn=PACKAGE, varlen=OWN):
        assert names() == ("SDPA (flash)", DENSE, DENSE)
    with machine(10, cudnn=91501):
        assert names()[0] == "SDPA (cuDNN)"
    with machine(10, cudnn=91002):
        assert names()[0] == "SDPA (flash)"
    with machine(10, "FA4", varlen=OWN, flash_attn=PACKAGE):
        assert names() == ("FlashAttention 4", "FlashAttention 4 varlen", "FlashAttention 4 varlen")
        assert names(head_size=256)[0] == "SDPA (flash)"


def test_a_package_that_fails_to_import_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> ModuleType:
        raise OSError("undefined symbol")

    with machine(9, triton=TRITON, flash_attn=PACKAGE, varlen=OWN):
        monkeypatch.setattr("importlib.import_module", broken)
        assert names() == ("SDPA (flash)", DENSE, DENSE)
    monkeypatch.undo()
    assert attend._activated("no such implementation") is False


@pytest.mark.parametrize(
    ("modules", "name"),
    [
        ({"flash_attn_interface": PACKAGE}, "FlashAttention 3"),
        ({"flash_attn_interface": PAIRS}, "FlashAttention 3"),
        ({"flash_attn": PACKAGE}, "FlashAttention 2"),
        ({"varlen": OWN}, OWN_NAME),
        ({}, DENSE),
    ],
)
@settings(max_examples=12, deadline=None)
@given(**SHAPES)
def test_on_a_gpu_attention_is_that_of_the_definition(
    modules: dict[str, Any],
    name: str,
    rows: int,
    groups: tuple[int, int],
    keys: int,
    size: int,
    documents: bool,
    window: int | None,
    seed: int,
) -> None:
    visible = Visibility(keys, keys, layout(rows, keys, seed) if documents else None, window)
    with machine(9, **modules):
        backend = choose(CUDA, torch.bfloat16, 64, keys, keys, documents, window)
        masked = documents or visible.window is not None
        assert backend.startswith(name) == (masked or name in ("FlashAttention 2", "FlashAttention 3"))
        agrees(BACKENDS[backend], visible, tensors(rows, *groups, keys, keys, size))


@pytest.mark.parametrize(
    ("modules", "name"), [({"varlen": OWN}, OWN_NAME), ({"flash_attn": PACKAGE}, "FlashAttention 2")]
)
def test_flash_attention_is_told_the_longest_segment(modules: dict[str, Any], name: str) -> None:
    """For each segment it starts as many blocks as that one needs, and a packed row is 48 times as long."""
    told = []

    def varlen(*given: Any, **settings: Any) -> Tensor:
        told.append(given[5])
        return own_varlen(*given, **settings) if name == OWN_NAME else fake_varlen(*given, **settings)

    module, function = next(
        (module, "varlen_attn" if module == "varlen" else "flash_attn_varlen_func") for module in modules
    )
    context = Context(torch.zeros(1, 96, dtype=torch.int64), torch.arange(96)[None] % 40 == 0, torch.float32)
    qkv = tensors(1, 2, 1, 96, 96, 8)
    with machine(9, **{module: {**modules[module], function: varlen}}):
        for scope, longest, most in (("document", 16, 16), ("document", None, 96), ("document", 200, 96)):
            visible = context.visible(scope, longest, None)
            agrees(BACKENDS[f"{name} varlen" if name != OWN_NAME else name], visible, qkv)
            assert set(told) == {most}
            told.clear()


@pytest.mark.long
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_heads_are_repeated_for_a_gpu_where_flash_attention_has_none(masked: bool, dtype: torch.dtype) -> None:
    given: list[tuple[int, bool]] = []

    def sdpa(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool, **settings: Any) -> Tensor:
        assert k.shape == v.shape
        given.append((k.shape[1], enable_gqa))
        return q

    mask = {"attn_mask": torch.ones(3, 3, dtype=torch.bool)} if masked else {"is_causal": True}
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
        patch.setattr(F, "scaled_dot_product_attention", sdpa)
        for device in ("cuda", "cpu"):
            q, k, v = (torch.empty(1, heads, 3, 8, device=device, dtype=dtype) for heads in (4, 2, 2))
            attend._fused(q, k, v, **mask)
    whole = masked or dtype == torch.float32
    assert given == [(4, False) if whole else (2, True), (2, True)]


def test_repeated_heads_are_those_that_are_shared() -> None:
    q, k, v = tensors(2, 4, 2, 5, 5, 8)
    repeated = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(F.scaled_dot_product_attention(q, *repeated, is_causal=True), right)


def flex_agrees(visible: Visibility, qkv: list[Tensor], traced: bool) -> None:
    """FlexAttention's output is the oracle's; on a CPU it has no backward. Tracing it for each shape takes long."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it is not compiled
        patch.setattr(attend, "_compiled", lambda _: flex_attention)
        patch.setattr(attend, "DENSE_ROW", 0)
        patch.setattr(
            "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", not traced, raising=False
        )
        found = attend._flex(*(x.detach() for x in qkv), visible)
    torch.testing.assert_close(found, oracle(*qkv, visible), rtol=1e-9, atol=1e-9)


@pytest.mark.long
@settings(max_examples=5, deadline=None)
@given(**SHAPES)
def test_flex_attention_is_that_of_the_definition(
    rows: int,
    groups: tuple[int, int],
    keys: int,
    size: int,
    documents: bool,
    window: int | None,
    seed: int,
) -> None:
    visible = Visibility(keys, keys, layout(rows, keys, seed) if documents else None, window)
    flex_agrees(visible, tensors(rows, *groups, keys, keys, size), traced=False)


@pytest.mark.long
def test_flex_attention_can_be_traced() -> None:
    flex_agrees(Visibility(17, 17, layout(2, 17), 5), tensors(2, 4, 2, 17, 17, 8), traced=True)


# Compiled: also a test of the whole model, so that one process alone imports the compiler


def compiled_twice(run: Callable[..., Tensor], qkv: list[Tensor], backend: str = "aot_eager") -> None:
    """One graph without breaks serves two layouts of documents, each as uncompiled."""
    torch.compiler.reset()
    compiled = torch.compile(run, backend=backend, fullgraph=True, dynamic=False)
    first, second = layout(2, 16, 0), layout(2, 16, 1)
    assert not torch.equal(first, second)
    torch.testing.assert_close(compiled(*qkv, first), run(*qkv, first))
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(compiled(*qkv, second), run(*qkv, second))


@pytest.mark.long
@pytest.mark.parametrize("window", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_attention_is_compiled_in_one_graph(window: int | None) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, segments: Tensor) -> Tensor:
        whole, visible = Visibility(16, 16), Visibility(16, 16, segments, window)
        return attention(q, k, v, visible) + attention(q, k, v, visible) + attention(q, k, v, whole)

    compiled_twice(run, tensors(2, 4, 2, 16, 16, 8, torch.bfloat16))


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["SDPA (flash)", "FlashAttention 3 varlen", pytest.param("FlexAttention", marks=pytest.mark.slow)]
)
def test_what_a_gpu_runs_is_compiled_in_one_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @torch.library.custom_op("caddie_test::varlen", mutates_args=())
    def kernel(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, left: int) -> Tensor:
        return fake_varlen(q, k, v, bounds, bounds, 16, 16, window_size=(left, 0))

    kernel.register_fake(lambda q, k, v, bounds, left: torch.empty_like(q))

    def varlen(q: Tensor, k: Tensor, v: Tensor, a: Tensor, *rest: object, causal: bool, window_size: Any) -> Tensor:
        return kernel(q, k, v, a, window_size[0])

    def run(q: Tensor, k: Tensor, v: Tensor, segments: Tensor) -> Tensor:
        visible = Visibility(16, 16, segments, room=64)
        return BACKENDS[name](q, k, v, visible) + BACKENDS[name](q, k, v, visible)

    package = ModuleType("flash_attn_interface")
    vars(package)["flash_attn_varlen_func"] = varlen
    monkeypatch.setitem(sys.modules, package.__name__, package)
    qkv = [x.detach() for x in tensors(2, 4, 2, 16, 16, 16, torch.float32)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled_twice(run, qkv, "eager" if name == "FlexAttention" else "aot_eager")


@pytest.mark.long
@torch.no_grad()
def test_a_model_is_one_compiled_graph_where_bfloat16_is_imitated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caddie.ops.products.BFLOAT16_ON_CPU", False)
    torch.compiler.reset()
    model = build(BASE.but(depth=1), seed=0)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    ids, starts = torch.arange(32).view(2, 16) * 7 % VOCABULARY, layout(2, 16).diff(prepend=torch.zeros(2, 1)).bool()
    half, found = (call(ids, starts, torch.bfloat16, capped=False) for call in (model, compiled))
    assert found.dtype == torch.bfloat16
    assert (found.float() - half.float()).norm() < 0.02 * half.float().norm()  # graphs norm by PyTorch's operations


def test_an_uncompiled_model_compiles_no_kernel_for_each_of_many_short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "_compiled", lambda _: pytest.fail("compiled"))
    qkv = tensors(2, 2, 1, 24, 24, 8)
    visible = Visibility(24, 24, layout(2, 24, 0))
    torch.testing.assert_close(attend._flex(*qkv, visible), oracle(*qkv, visible))
    monkeypatch.setattr(attend, "DENSE_ROW", 23)
    with pytest.raises(pytest.fail.Exception, match="compiled"):
        attend._flex(*qkv, visible)
