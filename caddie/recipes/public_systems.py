"""Public systems 000 to 002, each a diff on the contest's history; 003 and 004 stand in `baseline`."""

from caddie.config.schedules import Warmdown
from caddie.model import HashedNGrams, LeakyReluSquared
from caddie.model.parameters import Orthogonal
from caddie.pack.codecs import Lzma
from caddie.pack.coding import Packed
from caddie.pack.quantize import BestPercentile, Gptq, Percentile, Rows
from caddie.recipes.early_records import ORTHOGONAL
from caddie.recipes.recipe import per_role
from caddie.score import SGD, ChunkSGD
from caddie.train.optim import AdamW
from caddie.train.qat import StraightThrough

RECIPES = {
    "single_gpu": {
        "base": "baseline",
        "why": "Eight layers for one GPU, partial RoPE, XSA in two layers; public system 001.",
        **ORTHOGONAL,
        "model.depth": 8,
        "model.block.mlp.hidden": 1536,
        "model.block.attention.query_gain": 1.7,
        "model.block.attention.rope.dims": 32,
        "model.block.attention_norm.epsilon": 1e-6,
        "model.layers": {"6-7": {"attention.xsa": True}},
        "train.sequence_length": 2048,
        "train.steps": 35_000,
        "train.lr_schedule": Warmdown(fraction=0.2),
        **per_role("train.optimizers.*.lr", matrix=0.032, embedding=0.04, scalar=0.032),
        **per_role("train.optimizers.*.weight_decay", matrix=0.02, embedding=0.04, scalar=0.04),
        "train.qat": {"matrix": StraightThrough(quantizer=Rows(scale=Percentile(floor="absolute")))},
        "pack.quantizers.scalar": Rows(scale=Percentile(floor="absolute")),
        "score.sequence_length": 2048,
        "score.stride": 128,
    },
    "gold6": {
        "base": "value_embeddings",
        "why": "Eleven layers and small batches, for machines that make few steps; public system 002.",
        "train.batch_tokens": 262_144,
        "score.stride": 2048,
    },
    "parallel_muon": {
        "base": "value_embeddings",
        "why": "LeakyReLU², Parallel Muon, score-first TTT; public system 000 builds on it.",
        "model.block.mlp": LeakyReluSquared(hidden=1536),
        "model.block.mlp.linear.initial": Orthogonal(),
        "model.embedding.bigrams": HashedNGrams(buckets=1536, dims=128, initial=Orthogonal()),
        "model.value_embedding.initial": Orthogonal(),
        "train.steps": 9000,
        "train.optimizers.embedding.bigrams.projection.weight": AdamW(lr=0.025, weight_decay=0.04),
        "train.optimizers.value_embedding.projection.weight": AdamW(lr=0.025, weight_decay=0.04),
        "pack.quantizers.matrix": Gptq(of=Rows(bits=6, scale=BestPercentile(floor="absolute"))),
        "pack.coding": Packed(codec=Lzma(extreme=False)),
        "score.ttt": ChunkSGD(sgd=SGD(lr=0.002)),
    },
}
