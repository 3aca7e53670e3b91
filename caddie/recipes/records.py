"""The contest's records of late March and early April: larger vocabularies, depth recurrence, parallel streams.

Each is a small diff on an earlier one. A change at a step of a record comes here at the same part of the run. The
records calibrate on 16 to 256 of their batches, recipes on 65,536 tokens of the training text.
"""

from caddie.config.schedules import IterationWarmdown, PiecewiseConstant, StepRamp, Warmdown
from caddie.data.loaders import CoprimeStride, ShuffledSequences
from caddie.model import GatedUNet, HashedNGrams, PlainRoPE, Recurrence, RoutedStreams, SeparateStreams
from caddie.model.parameters import Orthogonal
from caddie.pack.calibrate import SelfGenerated, TrainingText
from caddie.pack.codecs import Zstd
from caddie.pack.coding import Packed
from caddie.pack.quantize import BestPercentile, Float16, Gptq, Rows, SigmaClip
from caddie.recipes.recipe import per_role
from caddie.score import SGD, ChunkSGD
from caddie.train.averaging import EMA
from caddie.train.settings import Train

RECIPES = {
    "exclusive_everywhere": {
        "base": "parallel_muon",
        "why": "XSA in all layers, larger BigramHash; ValCalib_GPTQ_XSA_BigramHash3072.",
        "model.block.attention.xsa": True,
        "model.layers": {},
        "model.embedding.bigrams": HashedNGrams(buckets=3072, dims=112, initial=Orthogonal()),
        "train.steps": 20_000,
        "train.lr_schedule": IterationWarmdown(steps=4000),
        "pack.calibration": SelfGenerated(),
        "score.ttt": None,
    },
    "coprime_loader": {
        "base": "exclusive_everywhere",
        "why": "All shards mixed, each walked by a coprime stride; Loader_FullGPTQ_XSA11.",
        "model.embedding.bigrams.buckets": 2816,
        "train.seconds": 586,
        "train.loader": CoprimeStride(),
        "train.lr_schedule.steps": 3500,
        "pack.calibration": TrainingText(),
    },
    "plain_six_bits": {
        "base": "coprime_loader",
        "why": "Int6 without GPTQ; Rascal, whose claimed score is not its artifact's.",
        "model.embedding.bigrams": HashedNGrams(buckets=2048, dims=128, initial=Orthogonal()),
        "train.seconds": 600,
        "pack.quantizers.matrix": Rows(bits=6, scale=BestPercentile(floor="absolute")),
        "pack.coding": Packed(codec=Zstd()),
        "score.stride": 2048,
    },
    "own_mlps": {
        "base": "coprime_loader",
        "why": "Depth recurrence of layers 4 and 5 with own MLPs, two streams; MiniDepthRecurrence.",
        "model.embedding.bigrams.dims": 160,
        "model.layers": {"0": {"attention": None}, "1": {"attention.xsa": False}},
        "model.skips": GatedUNet(),
        "model.recurrence": Recurrence(
            first=4, last=5, passes=PiecewiseConstant(values=(1, 2), begins=(0.44,)), own_mlps=True
        ),
        "model.parallel_streams": RoutedStreams(first=7, gain=1.1**0.5, sequential=True),
        "model.value_embedding.layers": (7, 8),
        "train.seconds": 600,
        "train.optimizers.matrix.lr": 0.03,
        "pack.coding": Packed(shuffle=True),
    },
    "vocabulary_4096": {
        "base": "coprime_loader",
        "why": "Four times the vocabulary, wider MLPs, more weight decay; Vocab4096.",
        "model.vocabulary": 4096,
        "model.embedding.bigrams": None,
        "model.embedding.smear": None,
        "model.block.mlp.hidden": 2048,
        "model.block.attention.query_gain": 4.0,
        "model.block.attention.rope": PlainRoPE(dims=16),
        "model.skips": GatedUNet(),
        "train.seconds": 590,
        "train.steps": None,
        "train.lr_schedule": Warmdown(fraction=0.667),
        "train.optimizers": Train().optimizers,
        **per_role("train.optimizers.*.lr", matrix=0.02, embedding=0.03, scalar=0.02),
        **per_role("train.optimizers.*.weight_decay", matrix=0.085, embedding=0.085, scalar=0.02),
        "train.optimizers.matrix.momentum": StepRamp(start=0.92, end=0.99, steps=1500),
        "pack.quantizers": {
            "embedding": Rows(),
            "matrix": Gptq(of=Rows(bits=6, scale=BestPercentile())),
            "head": Rows(),
            "gate": Float16(),
            "scalar": Float16(),
            "*.projection.weight": Float16(),
        },
        "pack.coding": Packed(shuffle=True),
    },
    "equal_rows": {
        "base": "vocabulary_4096",
        "why": "MuonEq-R, depth recurrence of layers 4 and 5; MuonEqR_DepthRecurrence.",
        "model.recurrence": Recurrence(first=4, last=5, passes=PiecewiseConstant(values=(1, 2), begins=(0.5,))),
        "train.optimizers.matrix.normalize_rows": True,
        **per_role("train.optimizers.*.weight_decay", matrix=0.09, embedding=0.09),
    },
    "separate_lanes_4096": {
        "base": "equal_rows",
        "why": "Attention and MLP in streams of their own; SP4096_DepthRecurrence.",
        "model.block.attention.query_gain": 5.0,
        "model.parallel_streams": SeparateStreams(first=7),
    },
    "vocabulary_8192": {
        "base": "vocabulary_4096",
        "why": "Vocabulary of 8,192, no value embeddings, layers 4 and 5 three times; Loop45x2.",
        "model.vocabulary": 8192,
        "model.value_embedding": None,
        "model.recurrence": Recurrence(first=4, last=5, passes=PiecewiseConstant(values=(1, 3), begins=(0.5,))),
        "train.seconds": 588,
        "train.loader": ShuffledSequences(),
        "train.optimizers.matrix.normalize_rows": True,
        "pack.quantizers": {
            "embedding": Gptq(of=Rows(scale=SigmaClip(k=20.0))),
            "matrix": Gptq(of=Rows(bits=6, scale=SigmaClip(k=12.85))),
            "head": Rows(),
            "gate": Float16(),
            "scalar": Float16(),
        },
    },
    "progressive_recurrence": {
        "base": "vocabulary_8192",
        "why": "Layers 4 and 5 twice, later three times; HessianSDClip.",
        "model.layers": {"7-10": {"parallel": True}},
        "model.recurrence.passes": PiecewiseConstant(values=(1, 2, 3), begins=(0.5, 0.65)),
        "pack.quantizers.embedding.of.scale.importance": 0.175,
        "pack.quantizers.matrix.of.scale.importance": 0.175,
    },
    "sharp_attention": {
        "base": "vocabulary_8192",
        "why": "Query gain of 5, score-first TTT; QK5_LegalTTT.",
        "model.block.attention.query_gain": 5.0,
        "score.ttt": ChunkSGD(),
    },
    "separate_lanes": {
        "base": "sharp_attention",
        "why": "Attention and MLP in streams of their own, with TTT; ParallelResid_ScoreFirstTTT.",
        "model.block.attention.query_gain": 4.0,
        "model.parallel_streams": SeparateStreams(first=7),
    },
    "momentum_97": {
        "base": "sharp_attention",
        "why": "Muon momentum of 0.97, layers 3 to 5 three times; A2_Muon097.",
        "model.layers": {"7-10": {"parallel": True}},
        "model.recurrence": Recurrence(first=3, last=5, passes=PiecewiseConstant(values=(1, 3), begins=(0.5,))),
        "train.optimizers.matrix.momentum.end": 0.97,
    },
    "three_layer_recurrence": {
        "base": "sharp_attention",
        "why": "Layers 3 to 5 three times from 35 % of the time on, parallel residuals; 3LayerRecur.",
        "model.block.attention.query_gain": 5.25,
        "model.layers": {"7-10": {"parallel": True}},
        "model.recurrence": Recurrence(first=3, last=5, passes=PiecewiseConstant(values=(1, 3), begins=(0.35,))),
        "train.lr_schedule": Warmdown(fraction=0.72),
        "train.averaging": EMA(decay=0.9965),
        "train.optimizers.matrix.lr": 0.022,
        "train.optimizers.matrix.weight_decay": 0.095,
    },
    "routed_lanes": {
        "base": "three_layer_recurrence",
        "why": "Two streams from layer 8, both written by attention and MLP; ImprovedParallelResiduals.",
        "model.block.attention.query_gain": 5.0,
        "model.layers": {},
        "model.parallel_streams": RoutedStreams(first=8),
        "train.seconds": 587,
        "train.lr_schedule": Warmdown(fraction=0.667),
        "train.averaging": EMA(decay=0.997),
        "train.optimizers.matrix.momentum.end": 0.97,
        "train.optimizers.embedding.weight_decay": 0.095,
        "score.ttt": ChunkSGD(sgd=SGD(lr=0.01)),
    },
}
