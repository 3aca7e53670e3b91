"""The contest's last records, from the document mask to the best, each a small diff on the one before."""

from __future__ import annotations

from caddie.config.schedules import Ramp, Warmdown
from caddie.data.loaders import PackedDocuments
from caddie.data.tokenizers import CaseOps
from caddie.model import DenseGate, NarrowGate, RoutedStreams, SparseGate, TokenSmear
from caddie.pack.compress import Correction
from caddie.pack.quantize import Float16, Gptq, Percentile, Rows, SigmaClip
from caddie.recipes.recipe import per_role
from caddie.recipes.records import three_layer_recurrence
from caddie.score import SGD, DocumentLoRA, GlobalSGD
from caddie.train.optim import AdamW

document_attention = three_layer_recurrence.but(
    {
        "model.block.attention.query_gain": 5.0,
        "model.block.attention.scope": "document",
        "model.block.attention.longest": 2048,
        "model.layers": {},
        "model.parallel_streams": RoutedStreams(first=8),
        "train.seconds": 587,
        "train.loader": PackedDocuments(),
        "train.optimizers.matrix.momentum.end": 0.97,
        "score.stride": 1024,
        "score.ttt": DocumentLoRA(rank=96, alpha=96.0, beta2=0.999, chunk_tokens=32, warm_start=False),
    },
    base="three_layer_recurrence",
    why="Document mask, two streams, LoRA-TTT; VarLenAttn.",
)

one_phase = document_attention.but(
    {"score.ttt.phases": GlobalSGD(documents=2000, phases=1, sgd=SGD(lr=0.005))},
    base="document_attention",
    why="All weights trained once on the documents scored so far; PhasingTTT2000.",
)

three_phases = one_phase.but(
    {
        "train.seconds": 596,
        "train.lr_schedule": Warmdown(fraction=0.75),
        "train.optimizers.matrix.lr": 0.026,
        "pack.quantizers.embedding": Gptq(of=Rows(bits=7, scale=SigmaClip(k=15.0))),
        "pack.quantizers.matrix.of.scale.k": 13.0,
        "pack.quantizers.blocks.*.mlp.*": Gptq(of=Rows(bits=6, scale=SigmaClip(k=12.0))),
        "score.ttt.chunk_tokens": 48,
        "score.ttt.phases": GlobalSGD(documents=2000),
    },
    base="one_phase",
    why="Three phases of such TTT at a lower rate, longer warmdown; MultiPhaseGlobalSGD.",
)

_GATE_QUANTIZER = Rows(scale=Percentile(fraction=1.0))
_GATE_OPTIMIZER = AdamW(lr=0.02, weight_decay=0.02)

narrow_gates = three_phases.but(
    {
        "model.block.attention.query_gain": 5.25,
        "model.block.attention.gate": NarrowGate(),
        "train.seconds": 587,
        "train.optimizers.gate": _GATE_OPTIMIZER,
        "score.ttt.phases": None,
    },
    base="three_phases",
    why="Attention gates from twelve channels, no phases; SmearGate_AttentionOutputGate.",
)

lossless_caps = three_phases.but(
    {"data.tokenizer": CaseOps(), "train.optimizers.matrix.weight_decay": Ramp(start=0.095, end=0.0475, begin=0.7)},
    base="three_phases",
    why="CaseOps, and less weight decay at the end; CaseOps_Taper.",
)

dense_gates = lossless_caps.but(
    {
        "model.block.attention.gate": DenseGate(bias=None, std=0.005),
        "train.optimizers.matrix.weight_decay": 0.095,
        "train.optimizers.gate": _GATE_OPTIMIZER,
        "pack.quantizers.gate": _GATE_QUANTIZER,
    },
    base="lossless_caps",
    why="Attention gates from all channels, constant weight decay; CaseOps_GatedAttn.",
)

sparse_gates = dense_gates.but(
    {
        "model.block.attention.gate": SparseGate(scale=1.0),
        "train.seconds": 599.5,
        "train.lr_schedule.floor": 0.1,
        "train.optimizers.matrix.coefficients": "polar_express",
        "score.ttt.alpha": 144.0,
        "score.ttt.weight_decay": 1.0,
        "score.ttt.warm_start": True,
    },
    base="dense_gates",
    why="Narrow attention gates, Polar Express, a least rate, warm LoRA-TTT; SparseGate.",
)

document_smear = sparse_gates.but(
    {"model.embedding.smear": TokenSmear(), "pack.correction": Correction(), "pack.quantizers.gate": Float16()},
    base="sparse_gates",
    why="SmearGate that does not cross documents, LQER; SmearGateBOSFix.",
)

best_record = document_smear.but(
    {
        "model.block.attention.gate.scale": 0.5,
        "train.lr_schedule.fraction": 0.85,
        **per_role("train.optimizers.*.beta2", embedding=0.99, scalar=0.99, gate=0.99),
        "pack.quantizers.embedding.of.scale.k": 14.0,
        "pack.quantizers.blocks.*.mlp.*.of.scale.k": 11.5,
        "pack.quantizers.gate": _GATE_QUANTIZER,
        "score.ttt.rank": 80,
        "score.ttt.beta2": 0.99,
        "score.ttt.weight_decay": 0.5,
        "score.ttt.phases.documents": 2500,
    },
    base="document_smear",
    why="The best record, 1.0611: gentler gates, slower Adam, longer warmdown.",
)
