"""The fused kernels: interpreted against their references, and compiled, as far as that goes without a GPU."""

import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import CONTEXT

HERE = Path(__file__).resolve().parent.parent
COMPILE = """
import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from caddie.ops import loss_kernels

sys.path.append("bench")
import gram_kernels, mlp_kernels

vectors, settings = ["*i64", "*i64", *["*fp32"] * 4], [30.0, 0.0001, 1, True, 1024]
products = [*["*bf16"] * 4, *["i32"] * 5, 0.5]
symmetric = ["*bf16", "*bf16", *["i32"] * 5, -4.775, 2.0315]
for kernel, arguments in (
    (loss_kernels._forward, ["*bf16", *vectors, "i32", *settings]),
    (loss_kernels._backward, ["*bf16", *vectors[:5], "*bf16", "i32", *settings]),
    (mlp_kernels._product, [*products, False, *mlp_kernels.TILE]),
    (mlp_kernels._product, [*products, True, *mlp_kernels.TILE]),
    (gram_kernels._symmetric, [*symmetric, False, gram_kernels.TILE, gram_kernels.INNER]),
    (gram_kernels._symmetric, [*symmetric, True, gram_kernels.TILE, gram_kernels.INNER]),
):
    types, values = {}, {}
    for param, kind in zip(kernel.params, arguments, strict=True):
        if param.is_constexpr:
            types[param.name], values[param.name] = "constexpr", kind
        else:  # a compiled graph hands numbers over in float64
            types[param.name] = kind if isinstance(kind, str) else "fp64"
    even = {(number,): [["tt.divisibility", 16]] for number, kind in enumerate(arguments) if str(kind)[0] in "*i"}
    source = ASTSource(kernel, types, values, even)
    done = compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 8, "num_stages": 3, "enable_fp_fusion": True})
    print(kernel.__name__, len(done.asm["cubin"]), done.metadata.shared, "wgmma" in done.asm["ptx"])
"""
"""Compiles every kernel for an H100 with the types that a run gives it."""
TRACE = """
import sys

import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from caddie.ops import loss_kernels

sys.path.append("bench")
import gram_kernels, mlp_kernels


def everything(x, targets, slopes, up, down):
    descended, entropies, denominators = loss_kernels._cross_entropy(x, targets, None, None, 30.0, 1, 0.0)
    gradient = loss_kernels._cross_entropy_backward(
        x, targets, targets, slopes, denominators, slopes, 30.0, 1, 0.0
    )
    before, after = mlp_kernels._up(x, up, 0.5)
    hidden = mlp_kernels._down_backward(x, down, before, 0.5)
    return descended, gradient, after, hidden, gram_kernels.gram_polynomial(gram_kernels.gram(up), 1.0, 2.0)


with FakeTensorMode(), torch.no_grad():
    kinds = {"device": "cuda", "dtype": torch.bfloat16}
    x, up, down = torch.empty(5, 9, **kinds), torch.empty(16, 9, **kinds), torch.empty(9, 16, **kinds)
    tensors = x, torch.empty(5, device="cuda", dtype=torch.int64), torch.empty(5, device="cuda"), up, down
    calls = [node.target.name() for node in make_fx(everything)(*tensors).graph.nodes if node.op == "call_function"
             and "caddie" in str(node.target)]
    print(*calls)
    for result in everything(*tensors):
        print(result.device.type, *result.shape, str(result.dtype))
"""
"""Traces every kernel on a GPU's tensors that have a shape and no numbers, as the compiler does."""


def run(*command: str, **environment: str) -> str:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        cwd=HERE.parent,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def interpreted(out: Path, chosen: str) -> None:
    """Run the chosen tests of the interpreted kernels; what they print goes to `out`."""
    assert "triton" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"
    with out.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    given = ["-p", "no:cacheprovider", "-m", chosen, "--rootdir", str(HERE.parent)]
    sys.exit(pytest.main([*given, str(HERE / "helpers" / "interpreted_kernels.py")]))


@pytest.mark.long
@pytest.mark.parametrize("chosen", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_fused_kernels_are_their_references_in_the_interpreter(chosen: str, tmp_path: Path) -> None:
    """In a process of its own, since Triton interprets either all kernels of a process or none."""
    if find_spec("triton") is None:  # importing it here would take a second
        pytest.skip("no Triton")
    if version("triton") < "3.7":
        pytest.skip("the interpreter before Triton 3.7 makes no number of an array, as NumPy 2.4 wants it")
    process = CONTEXT.Process(target=interpreted, args=(tmp_path / "out", chosen))
    process.start()
    process.join()
    out = (tmp_path / "out").read_text()
    assert process.exitcode == 0, out
    assert " passed" in out
    assert "skipped" not in out


@pytest.mark.long
def test_a_cache_of_graphs_knows_the_source_of_the_kernels() -> None:
    """PyTorch finds the kernels of an operation by name in its body; of one that it misses it would keep an old one."""
    kernels = "from caddie.ops import loss_kernels; from torch._library.triton import get_triton_kernels_for_op as of\n"
    kernels += "print(*[len(of('caddie::cross_entropy' + name)) for name in ('', '_backward')])"
    assert run("-c", kernels).split() == ["1", "1"]


@pytest.mark.slow
def test_compiled_graphs_see_the_kernels() -> None:
    calls, *results = run("-c", TRACE).splitlines()
    assert calls.split() == [
        "caddie::cross_entropy",
        "caddie::cross_entropy_backward",
        "caddie::squared_up",
        "caddie::squared_down_backward",
        "caddie::symmetric_product",
        "caddie::symmetric_product",
    ]
    assert results == [
        "cuda 5 torch.float32",
        "cuda 5 9 torch.bfloat16",
        "cuda 5 16 torch.bfloat16",
        "cuda 5 16 torch.bfloat16",
        "cuda 16 16 torch.bfloat16",
    ]


@pytest.mark.slow
def test_fused_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """To machine code, by the assembler that comes with Triton; nothing is run."""
    lines = run("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path)).splitlines()
    print("\n".join(lines))
    assert len(lines) == 6
    for line in lines:
        name, size, shared, tensor_cores = line.split()
        assert int(size) > 1000
        assert int(shared) <= 232_448, "more than an H100 has"
        assert tensor_cores == str(name in ("_product", "_symmetric"))
