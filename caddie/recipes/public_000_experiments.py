"""Experiments of public system 000: changes that did not help the base of #670, each as a diff on `parallel_muon`.

The figures are those of openai/parameter-golf #670, from eight H100 and 600 seconds. It states differences from two
bases, 1.1171 and, for quantization, 1.1153; here they stand as stated.
"""

from __future__ import annotations

from dataclasses import dataclass

from caddie.config import Diff
from caddie.config.schedules import Ramp
from caddie.model import DenseGate, MixedValueResidual
from caddie.pack.quantize import BestPercentile, Float16, Gptq, Percentile, Rotated, Rows
from caddie.recipes.public_systems import parallel_muon
from caddie.recipes.recipe import Recipe
from caddie.train.optim import AdamW
from caddie.train.qat import SoftRound, StraightThrough


@dataclass(frozen=True)
class Experiment:
    """An experiment and its outcome."""

    label: str
    """Short name."""
    outcome: str
    """Outcome as its source states it; plus is worse."""
    bits_per_byte: float | None = None
    """Score, or none where the source has none."""
    diff: Diff | None = None
    """Changes to `parallel_muon`, or none if there is nothing to set."""
    note: str = ""
    """Reason that there is nothing to set, or differences that matter to a comparison."""

    @property
    def recipe(self) -> Recipe | None:
        """Return the whole recipe, or none if there is nothing to set."""
        if self.diff is None:
            return None
        return parallel_muon.but(self.diff, name=self.label, base="parallel_muon", why=self.outcome)


_SIX_BITS = Rows(bits=6, scale=Percentile(floor="absolute"))
_FIVE_BITS = Rows(bits=5, scale=Percentile(floor="absolute"))
_KERNEL = "how a kernel is written changes no setting"
_HABIT = "a habit of experimenters, not a setting"

public_000_experiments = (
    Experiment("cutlass_gemm", "2.5 times as slow as cuBLAS", note=_KERNEL),
    Experiment(
        "fused_triton_mlp",
        "forward 1.82 times as fast, forward and backward together 2.7 times as slow",
        note=_KERNEL + "; later records made the same fusion pay",
    ),
    Experiment("triton_op_gemm", "does not compile: fake tensors have no data pointer", note=_KERNEL),
    Experiment("cuda_activation", "6 % slower", note=_KERNEL),
    Experiment("fused_norm_and_residual", "0.136 ms for 0.136 ms, the compiler fuses it", note=_KERNEL),
    Experiment(
        "fp8_training",
        "90 ms for 89 ms a step",
        diff={"train.float8": ("head", "mlp")},
        note="products of this size wait for memory; the system does not say which layers",
    ),
    Experiment(
        "fused_query_key_value",
        "3 to 17 % slower",
        diff={"model.block.attention.fused": True},
        note="its split into pieces that are not contiguous costs more than one product saves",
    ),
    Experiment(
        "late_quantization_aware_training",
        "recompiled when its switch was thrown, out of memory with larger models",
        diff={
            "train.qat": {
                "matrix": StraightThrough(
                    quantizer=_SIX_BITS, strength=Ramp(start=0.0, end=1.0, begin=0.927, finish=0.927)
                )
            }
        },
        note="here both graphs are compiled before the clock starts; begins as the base's learning rate comes to 0.15",
    ),
    Experiment(
        "constant_benchmark_data",
        "25 to 50 % too optimistic, since memory compresses constant data",
        note=_HABIT + "; warm-ups here run on random tokens",
    ),
    Experiment(
        "hadamard_rotation",
        "-0.0002, and a larger file",
        bits_per_byte=1.1151,
        diff={"pack.quantizers.matrix": Rotated(of=Gptq(of=Rows(bits=6, scale=BestPercentile())))},
    ),
    Experiment(
        "five_bits_in_the_middle",
        "+0.006",
        bits_per_byte=1.1209,
        diff={
            "pack.quantizers.matrix": Rows(scale=Percentile(floor="absolute")),
            "pack.quantizers.blocks.[2-8].*.weight": _FIVE_BITS,
        },
        note="eight bits in the outer layers, five between; how many are outer is not said, here two on either side",
    ),
    Experiment(
        "soft_rounding",
        "-0.0002, 500 steps being too few",
        bits_per_byte=1.1151,
        diff={
            "train.qat": {
                "matrix": SoftRound(
                    quantizer=_SIX_BITS,
                    strength=Ramp(start=0.0, end=1.0, begin=0.93, finish=0.93),
                    sharpness=Ramp(start=1.0, end=16.0, begin=0.93),
                )
            }
        },
    ),
    Experiment(
        "pruning_of_ones",
        "28 to 37 % of the weights: +0.004 to +0.005; below 10 %: none",
        bits_per_byte=1.1198,
        note="how many follows from the cap, not from a setting",
    ),
    Experiment(
        "exclusive_in_all_layers",
        "+0.014 after 100 seconds, 2.9 ms more a step",
        diff={"model.block.attention.xsa": True, "model.layers": {}},
        note="judged too early: the same author's next record has it, for about -0.002",
    ),
    Experiment(
        "value_residual",
        "+0.0008, since value embeddings do the same",
        bits_per_byte=1.1179,
        diff={"model.block.attention.value_residual": MixedValueResidual()},
    ),
    Experiment(
        "gated_attention",
        "+0.0026, 86.7 ms for 83 ms a step",
        bits_per_byte=1.1197,
        diff={
            "model.block.attention.gate": DenseGate(),
            "train.optimizers.gate": AdamW(lr=0.025, weight_decay=0.04),
            "pack.quantizers.gate": Float16(),
        },
        note="later records gain with narrower gates",
    ),
    Experiment(
        "weight_decay_008",
        "+0.008, though better after 100 seconds",
        bits_per_byte=1.1235,
        diff={"train.optimizers.matrix.weight_decay": 0.08},
        note="later records gain with it and a larger model",
    ),
    Experiment(
        "million_token_batches",
        "+0.003, 5,526 steps for 7,189",
        bits_per_byte=1.1197,
        diff={"train.batch_tokens": 1_048_576},
    ),
    Experiment(
        "wider_with_five_bits",
        "+0.006, 110 ms a step",
        bits_per_byte=1.1233,
        diff={"model.width": 576, "model.block.mlp.hidden": 1728, "pack.quantizers.matrix": _FIVE_BITS},
    ),
    Experiment(
        "hard_shards_first",
        "+0.0009, the shards' losses being only 0.024 apart",
        bits_per_byte=1.1162,
        note="shards are read in the order of their names",
    ),
    Experiment(
        "test_time_training",
        "+0.0006 for the best of 22 variants",
        bits_per_byte=1.1177,
        diff={"score.ttt.sgd.lr": 0.005},
        note="the variants are not listed; this is the rate of later records",
    ),
    Experiment(
        "hessians_of_all_ranks",
        "-0.0002, one rank's 256 batches suffice",
        bits_per_byte=1.1169,
        note="here all processes calibrate together",
    ),
    Experiment("stale_processes", "2 to 3 times as slow", note=_HABIT),
    Experiment("early_losses_decide", "false: see weight decay and exclusive layers", note=_HABIT),
)
