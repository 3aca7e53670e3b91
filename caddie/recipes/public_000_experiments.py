"""Experiments of public system 000: changes that did not help the base of #670, each as a diff on `parallel_muon`.

What came of them stands in `public_000_experiments.txt`. The figures are those of openai/parameter-golf #670, from
eight H100 and 600 seconds. It states differences from two bases, 1.1171 and, for quantization, 1.1153; there they stand
as stated.
"""

from caddie.config import Diff
from caddie.config.schedules import Ramp
from caddie.model import DenseGate, MixedValueResidual
from caddie.pack.quantize import BestPercentile, Float16, Gptq, Percentile, Rotated, Rows
from caddie.recipes.published import rows
from caddie.train.optim import AdamW
from caddie.train.qat import SoftRound, StraightThrough

_SIX_BITS = Rows(bits=6, scale=Percentile(floor="absolute"))
_FIVE_BITS = Rows(bits=5, scale=Percentile(floor="absolute"))
_LATE_SIX_BITS = StraightThrough(quantizer=_SIX_BITS, strength=Ramp(start=0.0, end=1.0, begin=0.927, finish=0.927))
_SOFT_SIX_BITS = SoftRound(
    quantizer=_SIX_BITS,
    strength=Ramp(start=0.0, end=1.0, begin=0.93, finish=0.93),
    sharpness=Ramp(start=1.0, end=16.0, begin=0.93),
)

DIFFS: dict[str, Diff] = {
    "fp8_training": {"train.float8": ("head", "mlp")},
    "fused_query_key_value": {"model.block.attention.fused": True},
    "late_quantization_aware_training": {"train.qat": {"matrix": _LATE_SIX_BITS}},
    "hadamard_rotation": {"pack.quantizers.matrix": Rotated(of=Gptq(of=Rows(bits=6, scale=BestPercentile())))},
    "five_bits_in_the_middle": {
        "pack.quantizers.matrix": Rows(scale=Percentile(floor="absolute")),
        "pack.quantizers.blocks.[2-8].*.weight": _FIVE_BITS,
    },
    "soft_rounding": {"train.qat": {"matrix": _SOFT_SIX_BITS}},
    "exclusive_in_all_layers": {"model.block.attention.xsa": True, "model.layers": {}},
    "value_residual": {"model.block.attention.value_residual": MixedValueResidual()},
    "gated_attention": {
        "model.block.attention.gate": DenseGate(),
        "train.optimizers.gate": AdamW(lr=0.025, weight_decay=0.04),
        "pack.quantizers.gate": Float16(),
    },
    "weight_decay_008": {"train.optimizers.matrix.weight_decay": 0.08},
    "million_token_batches": {"train.batch_tokens": 1_048_576},
    "wider_with_five_bits": {
        "model.width": 576,
        "model.block.mlp.hidden": 1728,
        "pack.quantizers.matrix": _FIVE_BITS,
    },
    "test_time_training": {"score.ttt.sgd.lr": 0.005},
}
"""Label of an experiment to its changes to `parallel_muon`; the others have nothing to set."""

OUTCOMES = {label: outcome for label, outcome, *_ in rows("public_000_experiments.txt")}
"""Label of every experiment to its outcome as the source states it; plus is worse."""
