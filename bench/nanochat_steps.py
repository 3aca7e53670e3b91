"""nanochat's own model and optimizer (karpathy/nanochat, a checkout beside ours) at a recipe's shape and batch.

Its training script wants its own data and tokenizer, so its `GPT` and what its `setup_optimizer` gives are driven here
as the script drives them: forward, backward, step. Its model has more in it than the contest's: an MLP of four widths,
embeddings added to the values of every second layer, a head of its own. So its optimizer is timed with the recipe's own
model, too, as `bench/plain.py` has it. On a GPU nanochat's model and optimizer are compiled, as its script has them; on
a CPU, where that takes a minute or more and a C++ compiler, only if asked, as the plain model is anywhere. On a CPU all
is float32.
"""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from contenders import step_facts
from laps import Repeated
from peers import shape_of
from plain import PlainSteps

from caddie.doctor.pace import named
from caddie.runtime.autotune import compiled_here
from caddie.runtime.distributed import local_device


def is_nanochat(path: Path) -> bool:
    """Whether a checkout of nanochat is there."""
    return (path / "nanochat" / "gpt.py").is_file()


def imported(path: Path, module: str, compiled: bool, dtype: str = "float32") -> Any:
    """A module of that checkout; `dtype` is that of its products on a CPU."""
    if local_device().type == "cpu":
        os.environ |= {"NANOCHAT_DTYPE": dtype, "TORCHDYNAMO_DISABLE": str(int(not compiled))}  # read by the import
    sys.path.insert(0, str(path.resolve()))
    return importlib.import_module(module)


class PlainNanochatSteps(PlainSteps):
    """Training steps of the recipe's own model in a plain loop under nanochat's optimizer, which clips nothing."""

    clip = None

    def __init__(
        self, path: Path, name: str, settings: tuple[str, ...], threads: int | None, compiled: bool = False
    ) -> None:
        super().__init__(name, settings, threads, compiled=compiled)
        matrices, others = self.model.divided()
        adamw = {"kind": "adamw", "lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0}
        muon = {"kind": "muon", "lr": 0.02, "momentum": 0.95, "ns_steps": 5, "beta2": 0.9, "weight_decay": 0.0}
        shapes = dict.fromkeys(matrix.shape for matrix in matrices)
        groups = [muon | {"params": [matrix for matrix in matrices if matrix.shape == shape]} for shape in shapes]
        theirs = imported(path, "nanochat.optim", compiled)
        self.optimizers = [theirs.MuonAdamW([adamw | {"params": others}, *groups])]


class NanochatSteps(Repeated):
    """Training steps of nanochat's model on random tokens; FLOPs per token are by its own count."""

    def __init__(
        self, path: Path, name: str, settings: tuple[str, ...], threads: int | None, compiled: bool = False
    ) -> None:
        super().__init__(threads)
        self.shape = shape = shape_of(named(name, settings))
        on_gpu = self.device.type == "cuda"
        compiled = compiled or on_gpu
        theirs = imported(path, "nanochat.gpt", compiled)
        torch.manual_seed(0)
        self.model = theirs.GPT(
            theirs.GPTConfig(
                sequence_len=shape.length,
                vocab_size=shape.vocabulary,
                n_layer=shape.depth,
                n_head=shape.heads,
                n_kv_head=shape.shared,
                n_embd=shape.width,
                window_pattern="L",
            )
        ).to(self.device)
        self.model.init_weights()
        self.optimizer = self.model.setup_optimizer()
        self.forward = compiled_here(self.model) if compiled else self.model
        rows = shape.tokens // shape.parts // shape.length
        tokens = torch.randint(shape.vocabulary, (rows, shape.length + 1), device=self.device)
        self.inputs, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.facts = {
            **step_facts(
                tokens=shape.tokens,
                parameters=sum(parameter.numel() for parameter in self.model.parameters()),
                precision="bfloat16" if on_gpu else "float32",
                threads=torch.get_num_threads(),
                attention="its own",
                compiled=compiled,
            ),
            "flops_per_token": float(self.model.estimate_flops()),
        }

    def once(self) -> None:
        """A step as its training script makes it."""
        for _ in range(self.shape.parts):
            self.watch.mark("forward")
            loss = self.forward(self.inputs, self.targets) / self.shape.parts
            self.watch.mark("backward")
            loss.backward()
        self.watch.mark("optimizer")
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
