"""The baseline, the two public systems that only change its settings, and the recipe of the demonstration."""

from caddie.config.schedules import IterationWarmdown, Ramp, Warmdown
from caddie.data.loaders import ShuffledSequences
from caddie.model import ChannelSmear, HashedNGrams
from caddie.pack.codecs import Zlib
from caddie.pack.coding import Packed
from caddie.pack.compress import Pack
from caddie.pack.quantize import Float16, Float32, Percentile, Rows
from caddie.recipes.recipe import per_role
from caddie.train.settings import Train

RECIPES = {
    "baseline": {
        "why": "The contest's naive baseline: 9 layers of width 512 for 600 seconds, int8 rows and zlib.",
        "train": Train(seconds=600, steps=20_000, lr_schedule=IterationWarmdown(steps=1200), warmup_steps=20),
        "pack.quantizers": {
            **dict.fromkeys(("embedding", "matrix", "head"), Rows(scale=Percentile(floor="absolute"))),
            "gate": Float16(),
            "scalar": Float32(),
        },
        "pack.coding": Packed(codec=Zlib()),
        "pack.fit": None,
        "pack.policy": "contest-2026",
        "score.stride": 1024,
        "score.precision": "bfloat16",
    },
    "fp16_embedding": {
        "base": "baseline",
        "why": "Tied embedding in fp16 for 32 hidden channels, longer warmdown, higher rate.",
        "model.block.mlp.hidden": 992,
        "train.lr_schedule.steps": 3600,
        "train.optimizers.matrix.lr": 0.06,
        "pack.quantizers.embedding": Float16(),
    },
    "lower_lr": {
        "base": "baseline",
        "why": "About half the learning rates, the best of a sweep over six.",
        **per_role("train.optimizers.*.lr", matrix=0.02, scalar=0.02, embedding=0.03),
    },
    "tiny": {
        "base": "baseline",
        "why": "The baseline at a size that two cores train in a minute; BigramHash rows stand in for depth.",
        "model.width": 128,
        "model.depth": 1,
        "model.embedding.bigrams": HashedNGrams(buckets=32_768),
        "model.embedding.smear": ChannelSmear(),
        "model.block.attention.heads": 2,
        "model.block.attention.key_value_heads": 2,
        "model.block.mlp.hidden": 128,
        "model.skips": None,
        "train.seconds": 60,
        "train.steps": None,
        "train.batch_tokens": 2048,
        "train.micro_batches": 1,
        "train.sequence_length": 256,
        "train.loader": ShuffledSequences(),
        "train.lr_schedule": Warmdown(fraction=0.5),
        **per_role("train.optimizers.*.lr", matrix=0.02, embedding=0.04),
        "train.optimizers.matrix.momentum": Ramp(start=0.85, end=0.95, finish=0.1),
        "train.warmup_steps": 3,
        "pack": Pack(cap_bytes=1_000_000),
        "score.sequence_length": 256,
        "score.stride": 128,
        "score.batch_tokens": 16_384,
        "score.precision": "float32",
    },
    "small": {
        "base": "tiny",
        "why": "For five minutes of two cores: two wider layers, and rows of 1,024 tokens to copy from.",
        "model.width": 192,
        "model.depth": 2,
        "model.block.attention.heads": 3,
        "model.block.attention.key_value_heads": 3,
        "model.block.mlp.hidden": 384,
        "train.seconds": 300,
        "train.sequence_length": 1024,
        "score.sequence_length": 1024,
        "score.stride": 512,
    },
}
