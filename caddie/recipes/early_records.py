"""The contest's first records, each a small diff on an earlier one: 1,024 tokens, at most eleven layers.

The scripts' late QAT never acted, since the compiler took its switch for a constant; it is left out.
"""

from caddie.config.schedules import IterationWarmdown, StepRamp
from caddie.model import ChannelSmear, DepthScaledNorm, HashedNGrams, NTKRoPE, PhaseMix, ValueEmbedding
from caddie.model.parameters import Orthogonal, Overtone
from caddie.pack.codecs import Zstd
from caddie.pack.coding import Packed
from caddie.pack.quantize import BestPercentile, Float16, Percentile, Rows
from caddie.recipes.recipe import per_role
from caddie.score import DocumentLoRA
from caddie.train.averaging import EMA, SWA
from caddie.train.qat import StraightThrough

ORTHOGONAL = {"model.block.attention.linear.initial": Orthogonal(), "model.block.mlp.linear.initial": Orthogonal()}
"""Orthogonal initialization of all matrices that read the stream."""

RECIPES = {
    "document_lora": {
        "base": "baseline",
        "why": "The baseline scored by LoRA-TTT, adapters of each document's own; LoRA_TTT.",
        "score.ttt": DocumentLoRA(
            rank=8,
            alpha=8.0,
            lr=0.01,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.0,
            chunk_tokens=256,
            targets=("query", "value", "head"),
            warm_start=False,
        ),
    },
    "rows_2048": {
        "base": "baseline",
        "why": "Sequences of 2,048 tokens and lower rates; LongContextSeq2048.",
        "train.sequence_length": 2048,
        **per_role("train.optimizers.*.lr", matrix=0.032, scalar=0.032, embedding=0.04),
        "score.sequence_length": 2048,
        "score.stride": 2048,
    },
    "rows_4096": {
        "base": "rows_2048",
        "why": "Sequences of 4,096 tokens, smaller batches, longer momentum; TrainingOptSeq4096.",
        "train.sequence_length": 4096,
        "train.batch_tokens": 393_216,
        "train.lr_schedule.steps": 3000,
        **per_role("train.optimizers.*.lr", matrix=0.02, scalar=0.02, embedding=0.03),
        "train.optimizers.matrix.momentum": StepRamp(start=0.92, end=0.99, steps=1500),
        "score.sequence_length": 4096,
        "score.stride": 4096,
    },
    "ten_layers": {
        "base": "lower_lr",
        "why": "A tenth layer, paid for by int6 in layers 3 to 6; 10L_MixedPrecision.",
        "model.depth": 10,
        "pack.quantizers.blocks.[3-6].*.weight": Rows(bits=6, scale=Percentile(floor="absolute")),
    },
    "sliding_window": {
        "base": "baseline",
        "why": "The baseline with sliding window evaluation, stride 64; SlidingWindowEval.",
        "score.stride": 64,
    },
    "overtone_start": {
        "base": "sliding_window",
        "why": "Weight decay, overtone embedding, residual mix by depth; OvertoneInit.",
        "model.depth": 10,
        "model.embedding.initial": Overtone(),
        "model.block.residual_mix": PhaseMix(),
        "train.lr_schedule.steps": 2500,
        **per_role("train.optimizers.*.weight_decay", matrix=0.02, scalar=0.01, embedding=0.01),
        "train.optimizers.embedding.lr": 0.1,
        "pack.quantizers.embedding": Float16(),
    },
    "six_bits": {
        "base": "sliding_window",
        "why": "QAT to int6 from the start pays for wider MLPs; MixedQuant_Int6Int8.",
        "model.block.mlp.hidden": 1536,
        "train.lr_schedule.steps": 3000,
        **per_role("train.optimizers.*.lr", matrix=0.02, scalar=0.02, embedding=0.03),
        "train.optimizers.matrix.momentum": StepRamp(start=0.92, end=0.99, steps=1500),
        "train.qat": {"matrix": StraightThrough(quantizer=Rows(bits=6), strength=1.0)},
        "pack.quantizers.matrix": Rows(bits=6, scale=Percentile(floor="absolute")),
    },
    "six_bits_ten_layers": {
        "base": "six_bits",
        "why": "A tenth layer, longer sequences, fp16 embedding; Seq2048_FP16Emb_TunedLR.",
        "model.depth": 10,
        "model.block.mlp.hidden": 1344,
        "train.sequence_length": 2048,
        "train.clip_norm": 0.3,
        "train.lr_schedule.steps": 3600,
        "train.optimizers.embedding.lr": 0.04,
        "pack.quantizers.embedding": Float16(),
        "pack.coding": Packed(codec=Zstd()),
        "score.sequence_length": 2048,
    },
    "smear_and_bigrams": {
        "base": "six_bits",
        "why": "SmearGate, BigramHash and orthogonal initialization; smeargate.",
        **ORTHOGONAL,
        "model.embedding.bigrams": HashedNGrams(buckets=4096, dims=128),
        "model.embedding.smear": ChannelSmear(),
        "train.optimizers.matrix.weight_decay": 0.01,
        "pack.quantizers.embedding": Float16(),
        "pack.quantizers.*.projection.weight": Float16(),
        "pack.coding": Packed(codec=Zstd()),
    },
    "six_bits_eleven_layers": {
        "base": "six_bits",
        "why": "Eleven layers, which weight decay makes small enough; MLP3x_QAT_Int6.",
        "model.depth": 11,
        **per_role("train.optimizers.*.lr", matrix=0.025, scalar=0.025, embedding=0.035),
        **per_role("train.optimizers.*.weight_decay", matrix=0.04, scalar=0.04, embedding=0.04),
        "pack.quantizers.embedding": Float16(),
        "pack.coding": Packed(codec=Zstd()),
    },
    "snapshot_average": {
        "base": "smear_and_bigrams",
        "why": "SWA of 30 snapshots, longer sequences, larger batches; SmearGate_BigramHash.",
        "model.embedding.bigrams.initial": Orthogonal(gain=18**-0.5),
        "train.sequence_length": 2048,
        "train.batch_tokens": 786_432,
        "train.clip_norm": 0.3,
        "train.qat": {},
        "train.averaging": SWA(fraction=0.2, snapshots=30),
        **per_role("train.optimizers.*.weight_decay", matrix=0.04, scalar=0.01, embedding=0.01),
        "score.sequence_length": 2048,
    },
    "five_bits": {
        "base": "snapshot_average",
        "why": "Int5 MLPs pay for a tenth layer and more hashed pairs; Int5MLP.",
        "model.depth": 10,
        "model.embedding.bigrams": HashedNGrams(buckets=10_240, dims=128, initial=Orthogonal(gain=20**-0.5)),
        "train.averaging": SWA(fraction=0.18, snapshots=24),
        **per_role("train.optimizers.*.weight_decay", scalar=0.04, embedding=0.04),
        "pack.quantizers.blocks.*.mlp.*": Rows(bits=5, scale=Percentile(floor="absolute")),
    },
    "exclusive_three": {
        "base": "snapshot_average",
        "why": "Eleven layers, XSA in the last three; EfficientPartialXSA.",
        "model.depth": 11,
        "model.embedding.bigrams": HashedNGrams(buckets=2048, dims=128, initial=Orthogonal(gain=22**-0.5)),
        "model.block.attention.rope": NTKRoPE(native_length=1024, length=2048),
        "model.layers": {"8-10": {"attention.xsa": True}},
        "train.steps": 9000,
        "train.warmup_steps": 30,
        "train.averaging": SWA(fraction=0.22, snapshots=13),
        **per_role("train.optimizers.*.lr", matrix=0.025, scalar=0.025, embedding=0.035),
        **per_role("train.optimizers.*.weight_decay", scalar=0.04, embedding=0.04),
        "pack.quantizers.embedding": Rows(scale=Percentile(floor="absolute")),
    },
    "exclusive_four": {
        "base": "exclusive_three",
        "why": "XSA in the last four layers, and EMA; XSA4_EMA.",
        "model.layers": {"7-10": {"attention.xsa": True}},
        "train.warmup_steps": 20,
        "train.averaging": EMA(decay=0.997),
    },
    "partial_rotary": {
        "base": "exclusive_four",
        "why": "Partial RoPE on a quarter of the channels, depth-scaled norms; PartialRoPE.",
        "model.block.attention.rope.dims": 16,
        "model.block.attention_norm": DepthScaledNorm(),
        "model.block.mlp_norm": DepthScaledNorm(),
    },
    "value_embeddings": {
        "base": "partial_rotary",
        "why": "Value embeddings in the last layers, longer warmdown; GPTQ-lite.",
        "model.value_embedding": ValueEmbedding(layers=(9, 10), initial=Orthogonal(gain=22**-0.5)),
        "train.steps": 20_000,
        "train.lr_schedule": IterationWarmdown(steps=3500),
        "pack.quantizers.matrix": Rows(bits=6, scale=BestPercentile(floor="absolute")),
        "pack.quantizers.scalar": Float16(),
    },
}
