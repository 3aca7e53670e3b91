"""The code of a recipe's training step for an H200 that is not here: made by PyTorch's compiler, compiled, never run.

python bench/compile_only.py [RECIPE ...] [--set PATH=VALUE ...] [--scoring]    (a CPU build of PyTorch, Triton and g++)

At both ends of a recipe's stages, loss and gradients are traced as one graph over tensors that have shapes and no
numbers, Inductor writes its code, and Triton compiles every kernel to the machine code of compute capability 9.0; with
`--scoring`, instead, the same of what its sliding windows and its test-time training compile. That finds what breaks a
graph, what has no lowering and what does not compile, all of which `bench/kernels.py` and the interpreter leave open;
it says nothing of speed, memory or numbers. PyTorch is told that a GPU is here by a device guard that does nothing and
by answers of a GPU to its questions: internals of PyTorch, so this is written for 2.13.
"""

import argparse
import ctypes
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from caddie.cli.exits import end
from caddie.errors import UserError

GUARD = r"""
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
static const Device GPU(DeviceType::CUDA, 0);
struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return GPU; }
  Device getDevice() const override { return GPU; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, GPU); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
};
static Guard guard;
static const bool set = (impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard), true);
namespace at {
struct CUDAHooks : CUDAHooksInterface {  // the name that PyTorch asks its registry for
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}
"""
H200 = {
    **{"name": "NVIDIA H200", "major": 9, "minor": 0, "multi_processor_count": 132, "total_memory": 150 << 30},
    **{"warp_size": 32, "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024},
    **{"regs_per_multiprocessor": 65536, "shared_memory_per_block_optin": 232_448, "L2_cache_size": 60 << 20},
    **{"shared_memory_per_block": 49_152, "shared_memory_per_multiprocessor": 233_472, "gcnArchName": ""},
}
KERNEL = re.compile(r"= async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.DOTALL)


def pretend() -> list[str]:
    """Have PyTorch, which must not be imported yet, see an H200; what Inductor writes from then on is in the list."""
    (home,) = find_spec("torch").submodule_search_locations  # type: ignore[union-attr, misc]
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(GUARD)
        linked = [f"-L{home}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{home}/lib"]
        flags = ["-std=c++20", "-shared", "-fPIC", f"-I{home}/include"]
        subprocess.run(["g++", *flags, source, *linked, "-o", library], check=True)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    import torch

    asked: Any = torch.cuda
    nothing = lambda *given: None  # noqa: E731
    for name, answer in {
        **{"is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0},
        **{"get_device_capability": (9, 0), "get_device_properties": SimpleNamespace(**H200)},
        **{"_lazy_init": None, "_exchange_device": 0, "_maybe_exchange_device": 0, "set_device": None},
        **{"synchronize": None, "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None},
    }.items():
        setattr(asked, name, lambda *given, answer=answer: answer)
    torch.tensor = lambda data, device=None, made=torch.tensor, **how: made(data, **how).to(device)
    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        setattr(torch._C, name, lambda *given: 0)
    # The compiler takes its answers as it is imported.
    import torch._functorch.config as graphs
    import torch._inductor.config as inductor
    import torch._inductor.fx_passes.fuse_attention as patterns
    import torch._inductor.graph as lowering
    import torch._inductor.runtime.triton_helpers as helpers
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", 90, 32)
    driver = {"get_current_target": lambda: target, "get_current_device": lambda: 0}
    triton.runtime.driver.set_active(SimpleNamespace(**driver))  # type: ignore[arg-type, unused-ignore]
    helpers.set_driver_to_gpu = nothing
    # What runs products or searches with real tensors while it compiles.
    patterns._sfdp_init = nothing  # type: ignore[assignment]
    inductor.shape_padding = inductor.joint_graph_constant_folding = inductor.fx_graph_cache = False
    graphs.enable_autograd_cache = False
    graphs.force_non_lazy_backward_lowering = True
    written: list[str] = []

    def keep(self: Any, code: Any) -> SimpleNamespace:
        """Instead of loading what was written: its outputs have shapes and no numbers, or are None."""
        from torch._inductor.ir import NoneAsConstantBuffer

        written.append(code.value)

        def call(given: list[Any]) -> list[Any]:
            given.clear()
            return [
                None
                if isinstance(each, NoneAsConstantBuffer)
                else torch.empty_strided(
                    each.get_size(), each.get_stride(), dtype=each.get_dtype(), device=each.get_device()
                )
                for each in self.graph_outputs
            ]

        return SimpleNamespace(call=call, __file__="nowhere")

    lowering.GraphLowering._compile_to_module_lines = keep  # type: ignore[assignment]
    return written


@contextmanager
def without_numbers() -> Iterator[None]:
    """Tensors that have shapes and no numbers, the tables that a graph keeps among them."""
    from torch._subclasses import FakeTensorMode

    from caddie.model import context
    from caddie.ops.dispatch import constant_in_graphs

    mode, made = FakeTensorMode(allow_non_fake_inputs=True), context._rope_tables

    @constant_in_graphs
    def tables(*given: Any) -> Any:
        with mode:
            return made(*given)

    context._rope_tables = tables
    try:
        with mode:
            yield
    finally:
        context._rope_tables = made


def write(name: str, settings: list[str], stage: int) -> None:
    """Have Inductor write the forward and backward of a micro-batch."""
    import torch

    from caddie.doctor.pace import named
    from caddie.ops.attention import segment_bucket
    from caddie.runtime.distributed import Ranks
    from caddie.train.trainer import Trainer

    recipe = named(name, tuple(settings))
    torch._dynamo.reset()
    device = torch.device("cuda", 0)
    with without_numbers():
        trainer = Trainer(recipe.model, recipe.train.but(compile="never"), 0, Ranks(device=device))
        trainer.dtype = torch.bfloat16
        length = recipe.train.longest_row
        ids = torch.zeros(trainer.micro_tokens // length, length, dtype=torch.int64, device=device)
        segments = segment_bucket(len(ids), ids.numel()) if "varlen" in trainer.attention(length) else 0
        torch.compile(trainer._losses, fullgraph=True, dynamic=False)(ids, ids, ids == 1, stage, segments)


class Broken(BaseException):
    """What a compiler said, past those who would go on without one."""


def write_scoring(name: str, settings: list[str], adaptive: int) -> None:
    """Have Inductor write what the scorer of a recipe compiles: a forward, and where it learns a backward besides."""
    import numpy as np
    import torch

    from caddie.doctor.pace import named
    from caddie.model import build
    from caddie.score import ChunkSGD, DocumentLoRA, forward

    def at_once(function: Any) -> Any:
        compiled = torch.compile(function, fullgraph=True, dynamic=False)

        def run(*given: Any) -> Any:
            try:
                return compiled(*given)
            except Exception as error:
                raise Broken(f"{name}: {error}") from error

        return run

    forward.COMPILE_SECONDS, forward.compiled_here = -1.0, at_once
    torch._dynamo.reset()
    recipe = named(name, tuple(settings))
    chosen = recipe.score if adaptive else recipe.score.but(ttt=None)
    with without_numbers():
        scorer: Any = chosen.scorer(build(recipe.model, 0, "cuda"), 1)
        rows, last = chosen.rows, chosen.stride
        if isinstance(chosen.ttt, DocumentLoRA):
            rows, last = scorer.together, chosen.ttt.chunk_tokens
            scorer._adapters.begin(0)
        ids = torch.zeros(rows, chosen.sequence_length, dtype=torch.int64, device="cuda")
        scorer.logits(ids, list(range(rows)), last)
        if isinstance(chosen.ttt, ChunkSGD):
            learnt = np.zeros((chosen.ttt.sgd.rows, chosen.sequence_length + 1), dtype=np.int64)
            scorer._learner._gradient(learnt)


def compile_kernels(code: str) -> int:
    """Compile what Inductor wrote to machine code; how many kernels that were."""
    from torch._inductor.codecache import PyCodeCache

    found = KERNEL.findall(code)
    for name, source in found:
        kernel = getattr(PyCodeCache.load(source), name)
        for choice in kernel.configs:
            kernel._precompile_config(choice)
    return len(found)


def main() -> None:
    """A line for each recipe and stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = ["baseline", "three_layer_recurrence", "longer_warmdown"]
    parser.add_argument("recipes", nargs="*", default=usual, help=f"else {', '.join(usual)}")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", dest="settings")
    parser.add_argument("--scoring", action="store_true", help="the code of scoring instead of training")
    given = parser.parse_args()
    build = version("torch")
    here = {
        f"PyTorch 2.13's CPU build (here {build})": build.startswith("2.13.") and build.endswith("+cpu"),
        "Triton (`make setup` installs it)": find_spec("triton"),
        "g++": shutil.which("g++"),
    }
    if missing := [name for name, found in here.items() if not found]:
        raise UserError(f"this needs {' and '.join(missing)}")
    written = pretend()
    from caddie.doctor.pace import named

    for name in given.recipes:
        recipe = named(name, tuple(given.settings))
        other = int(recipe.score.ttt is not None) if given.scoring else len(recipe.model.stages) - 1
        for number in sorted({0, other}):
            begin = time.perf_counter()
            written.clear()
            (write_scoring if given.scoring else write)(name, given.settings, number)
            counts = [compile_kernels(code) for code in written]
            what = ("sliding windows", "test-time training")[number] if given.scoring else f"stage {number}"
            print(f"{name}, {what}: kernels {counts}, {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    end(main)
