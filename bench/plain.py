"""The contest's baseline as a plain PyTorch loop: what anybody would write, to compare with in the same run.

Eager, float32 or autocast to bfloat16, `nn.Linear`, PyTorch's own attention, a clipped gradient, and AdamW in the
manner of nanoGPT or, as ours and in the manner of nanochat, PyTorch's own Muon for the matrices of layers. The model
is that of `caddie.model` to the last parameter where the recipe is of the baseline's kind (`tests/bench/test_bench.py`
compares the logits); what other recipes add, such as n-gram tables, is left out.
"""

from contextlib import nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from contenders import BOS, documents, step_facts
from laps import Repeated
from torch import Tensor, nn

from caddie.config.schedules import TrainProgress, int_at
from caddie.data.shards import Tokens
from caddie.doctor.pace import named
from caddie.model import GPT
from caddie.runtime.autotune import compiled_here

PLAIN = (
    ("plain, AdamW", False, False),
    ("plain, Muon", False, True),
    ("plain, AdamW, bfloat16 autocast", True, False),
)
"""Names of the loops; whether under autocast, and whether matrices of layers have Muon."""


class Attention(nn.Module):
    """Causal, with grouped queries, normed queries and keys, and rotary positions."""

    def __init__(self, width: int, heads: int, shared: int, gain: float) -> None:
        super().__init__()
        self.size = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, shared * self.size, bias=False)
        self.value = nn.Linear(width, shared * self.size, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.gain = nn.Parameter(torch.full((heads,), gain))

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """x (B, T, width) keeps its shape; the tables are (T, size/2)."""
        q, k, v = (
            part.unflatten(2, (-1, self.size)).transpose(1, 2) for part in (self.query(x), self.key(x), self.value(x))
        )
        q, k = (turned(F.rms_norm(part, (self.size,)), cosine, sine) for part in (q, k))
        q = q * self.gain[:, None, None].to(q.dtype)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed: Tensor = self.output(y.transpose(1, 2).flatten(2))
        return mixed


def turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """The halves of the channels are the two axes of the planes that positions turn."""
    u, w = x.chunk(2, dim=-1)
    cosine, sine = cosine.to(x.dtype), sine.to(x.dtype)
    return torch.cat((u * cosine + w * sine, w * cosine - u * sine), dim=-1)


class Block(nn.Module):
    """The embedded input mixed in, attention, and an MLP with a squared rectifier, each scaled per channel."""

    def __init__(self, width: int, heads: int, shared: int, gain: float, hidden: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.stack((torch.ones(width), torch.zeros(width))))
        self.attention = Attention(width, heads, shared, gain)
        self.attention_scale = nn.Parameter(torch.ones(width))
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.mlp_scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, x0: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """The stream (B, T, width) behind the layer."""
        x = self.mix[0] * x + self.mix[1] * x0
        x = x + self.attention_scale * self.attention(F.rms_norm(x, (x.shape[-1],)), cosine, sine)
        hidden = F.relu(self.up(F.rms_norm(x, (x.shape[-1],)))).square()
        y: Tensor = x + self.mlp_scale * self.down(hidden)
        return y


class Plain(nn.Module):
    """ids (B, T) to logits (B, T, vocabulary), with a tied table and skips from early to late layers."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        attention = gpt.block.attention
        heads, shared = getattr(attention, "heads", 8), getattr(attention, "key_value_heads", 4)
        gain, hidden = getattr(attention, "query_gain", 1.0), gpt.block.mlp.hidden
        self.table = nn.Embedding(gpt.vocabulary, gpt.width)
        nn.init.normal_(self.table.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(gpt.width, heads, shared, gain, hidden) for _ in range(gpt.depth))
        self.skips = nn.Parameter(torch.ones(gpt.depth // 2 if gpt.skips else 0, gpt.width))
        self.cap = gpt.head.softcap
        self.size = gpt.width // heads

    def divided(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The matrices of the layers, which Muon is for, and all other parameters that are not empty."""
        matrices = {id(layer.weight) for layer in self.blocks.modules() if isinstance(layer, nn.Linear)}
        held = [one for one in self.parameters() if one.numel()]
        return [one for one in held if id(one) in matrices], [one for one in held if id(one) not in matrices]

    def forward(self, ids: Tensor) -> Tensor:
        """Logits for each position."""
        place = torch.arange(ids.shape[1], device=ids.device, dtype=torch.float32)
        angles = place[:, None] * 10_000.0 ** -(torch.arange(0, self.size, 2, device=ids.device) / self.size)
        cosine, sine = angles.cos(), angles.sin()
        x = F.rms_norm(self.table(ids), (self.table.embedding_dim,))
        x0, half = x, len(self.blocks) // 2
        saved: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            if 0 <= number - half < len(self.skips):
                x = x + self.skips[number - half] * saved.pop()
            x = block(x, x0, cosine, sine)
            if number < half:
                saved.append(x)
        logits = F.linear(F.rms_norm(x, (x.shape[-1],)), self.table.weight)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


class PlainSteps(Repeated):
    """Training steps of the plain loop at a recipe's shape and batch, on random tokens."""

    clip: float | None = 1.0
    """The norm that the whole gradient is cut to, as nanoGPT does."""

    def __init__(
        self,
        name: str,
        settings: tuple[str, ...] = (),
        threads: int | None = None,
        autocast: bool = False,
        muon: bool = False,
        compiled: bool = False,
    ) -> None:
        super().__init__(threads)
        recipe = named(name, settings)
        train, moment = recipe.train, TrainProgress(0, 0.0, recipe.train.budget)
        self.parts, self.length = train.micro_batches_at(moment), int_at(train.sequence_length, moment)
        tokens = int_at(train.batch_tokens, moment)
        self.rows = tokens // self.parts // self.length
        torch.manual_seed(0)
        self.model = Plain(recipe.model).to(self.device)
        self.forward = compiled_here(self.model) if compiled else self.model
        matrices, others = self.model.divided()
        parameters = others if muon else [*matrices, *others]
        groups = [
            {"params": [one for one in parameters if one.ndim == 2], "weight_decay": 0.1},
            {"params": [one for one in parameters if one.ndim != 2], "weight_decay": 0.0},
        ]
        on_gpu = self.device.type == "cuda"
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=on_gpu)
        ]
        if muon:
            self.optimizers.append(torch.optim.Muon(matrices, lr=0.02))
        self.autocast = torch.autocast(self.device.type, torch.bfloat16) if autocast else nullcontext()
        self.text: Tokens = documents(recipe.model.vocabulary, 8 * tokens + 1, BOS)
        self.chance = np.random.default_rng(0)
        self.facts = step_facts(
            tokens=tokens,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            precision="bfloat16 autocast" if autocast else "float32",
            threads=torch.get_num_threads(),
            attention="SDPA",
            compiled=compiled,
        )

    def batch(self) -> tuple[Tensor, Tensor]:
        """Random rows of the text, and the same one token later."""
        begins = self.chance.integers(0, len(self.text) - self.length, self.rows)
        rows = torch.from_numpy(np.stack([self.text[i : i + self.length + 1] for i in begins]).astype(np.int64))
        if self.device.type == "cuda":
            rows = rows.pin_memory().to(self.device, non_blocking=True)
        return rows[:, :-1], rows[:, 1:]

    def once(self) -> None:
        """A step as nanoGPT makes it."""
        for _ in range(self.parts):
            self.watch.mark("forward")
            inputs, targets = self.batch()
            with self.autocast:
                loss = F.cross_entropy(self.forward(inputs).float().flatten(0, 1), targets.flatten()) / self.parts
            self.watch.mark("backward")
            loss.backward()  # type: ignore[no-untyped-call]
        self.watch.mark("optimizer")
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
