"""nanoGPT and nanochat as contenders of `rivals.py`: settings, model, optimizer and schedule of their scripts."""

import importlib
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from nanochat_steps import imported
from rival_models import Caddie, Contender, Public, Settings
from torch import Tensor, nn


class NanoGPT(Public):
    """karpathy/nanoGPT; the settings are those of its `train.py`, by default of its README's run on a CPU."""

    name = "nanoGPT"
    first = "model.py"
    defaults: ClassVar[Settings] = {
        "n_layer": 4,
        "n_head": 4,
        "n_embd": 128,
        "block_size": 64,
        "batch_size": 12,
        "dropout": 0.0,
        "bias": False,
        "learning_rate": 1e-3,
        "warmup_iters": 100,
        "weight_decay": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "grad_clip": 1.0,
        "compile": False,
    }

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of a step, and tokens of a row."""
        return self.settings["batch_size"], self.settings["block_size"]

    @property
    def clip(self) -> float:  # type: ignore[override]
        """Norm that gradients are clipped to."""
        return float(self.settings["grad_clip"])

    def build(self, vocabulary: int) -> nn.Module:
        """Return its `GPT`."""
        theirs = _module(self.checkout, "model")
        names = ("n_layer", "n_head", "n_embd", "block_size", "dropout", "bias")
        shape = {name: self.settings[name] for name in names}
        return cast(nn.Module, theirs.GPT(theirs.GPTConfig(vocab_size=vocabulary, **shape)))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return its AdamW."""
        one = self.settings
        configure = cast(Any, model).configure_optimizers
        return cast(
            torch.optim.Optimizer,
            configure(one["weight_decay"], one["learning_rate"], (one["beta1"], one["beta2"]), "cpu"),
        )

    def loss(self, forward: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss that its forward gives."""
        return cast(Tensor, forward(inputs, targets)[1])

    def logits(self, model: nn.Module, ids: Tensor) -> Tensor:
        """Return all logits, which it gives only beside a loss."""
        return cast(Tensor, model(ids, ids)[0])

    def schedule(self, optimizer: torch.optim.Optimizer, step: int, progress: float, steps: float) -> None:
        """Warm up over iterations, then follow a cosine down to a tenth (`get_lr`)."""
        most, warm = self.settings["learning_rate"], self.settings["warmup_iters"]
        if step < warm:
            rate = most * (step + 1) / (warm + 1)
        else:
            begin = warm / max(steps, warm, 1)
            left = 1.0 - max(0.0, progress - begin) / max(1.0 - begin, 1e-9)
            rate = most * (0.1 + 0.9 * 0.5 * (1.0 - math.cos(math.pi * left)))
        for group in optimizer.param_groups:
            group["lr"] = rate


class Nanochat(Public):
    """karpathy/nanochat; the settings are those of `scripts/base_train.py`, by default of its example for a CPU.

    Heads of 64 channels and full windows are those of its `runs/runcpu.sh`. `dtype` is its NANOCHAT_DTYPE.
    """

    name = "nanochat"
    first = "nanochat/gpt.py"
    defaults: ClassVar[Settings] = {
        "depth": 4,
        "aspect_ratio": 64,
        "head_dim": 64,
        "max_seq_len": 512,
        "window_pattern": "L",
        "total_batch_size": 512,
        "embedding_lr": 0.3,
        "unembedding_lr": 0.008,
        "matrix_lr": 0.02,
        "scalar_lr": 0.5,
        "weight_decay": 0.28,
        "warmup_steps": 40,
        "warmdown_ratio": 0.65,
        "final_lr_frac": 0.05,
        "dtype": "float32",
        "compile": False,
    }

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of a step, and tokens of a row."""
        return max(1, self.settings["total_batch_size"] // self.settings["max_seq_len"]), self.settings["max_seq_len"]

    def _config(self, depth: int, vocabulary: int) -> Any:
        one = self.settings
        heads = math.ceil(depth * one["aspect_ratio"] / one["head_dim"])
        return self._theirs().GPTConfig(
            sequence_len=one["max_seq_len"],
            vocab_size=vocabulary,
            n_layer=depth,
            n_head=heads,
            n_kv_head=heads,
            n_embd=heads * one["head_dim"],
            window_pattern=one["window_pattern"],
        )

    def _theirs(self) -> Any:
        return imported(self.checkout, "nanochat.gpt", self.settings["compile"], dtype=self.settings["dtype"])

    def build(self, vocabulary: int) -> nn.Module:
        """Return its `GPT`."""
        model = self._theirs().GPT(self._config(self.settings["depth"], vocabulary))
        model.init_weights()
        return cast(nn.Module, model)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return its Muon and AdamW, with rates and decay scaled to the batch and the model as its script does."""
        one, theirs = self.settings, cast(Any, model)
        with torch.device("meta"):
            reference = self._theirs().GPT(self._config(12, theirs.config.vocab_size))
        scale = math.sqrt(one["total_batch_size"] / 2**19)
        sizes = [
            counts["transformer_matrices"] + counts["lm_head"]
            for counts in (reference.num_scaling_params(), theirs.num_scaling_params())
        ]
        rates = {name: one[name] * scale for name in ("embedding_lr", "unembedding_lr", "matrix_lr", "scalar_lr")}
        self.decay = one["weight_decay"] * scale * sizes[0] / sizes[1]
        return cast(torch.optim.Optimizer, theirs.setup_optimizer(weight_decay=self.decay, **rates))

    def loss(self, forward: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss that its forward gives."""
        return cast(Tensor, forward(inputs, targets))

    def logits(self, model: nn.Module, ids: Tensor) -> Tensor:
        """Return all logits."""
        return cast(Tensor, model(ids))

    def schedule(self, optimizer: torch.optim.Optimizer, step: int, progress: float, steps: float) -> None:
        """Set rates, Muon's momentum and its decay (`get_lr_multiplier`, `get_muon_momentum`, `get_weight_decay`)."""
        one = self.settings
        left = min(1.0, (1.0 - progress) / one["warmdown_ratio"])  # 1 until the warmdown begins
        rate = left + (1.0 - left) * one["final_lr_frac"]
        if step < one["warmup_steps"]:
            rate = (step + 1) / one["warmup_steps"]
        momentum = 0.85 + 0.12 * step / 400 if step < 400 else 0.97 * left + 0.90 * (1.0 - left)
        decay = self.decay * 0.5 * (1.0 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * rate
            if group["kind"] == "muon":
                group |= {"momentum": momentum, "weight_decay": decay}


CONTENDERS: Mapping[str, type[Contender]] = {one.name: one for one in (Caddie, NanoGPT, Nanochat)}


def _module(checkout: Path, name: str) -> Any:
    sys.path.insert(0, str(checkout.resolve()))
    return importlib.import_module(name)
