"""Quantizers: from weights to integer arrays and back."""

from caddie.quantize.floats import Float8, Float16, Float32
from caddie.quantize.gptq import Gptq
from caddie.quantize.groups import Binary, Ternary
from caddie.quantize.low_rank import LowRank
from caddie.quantize.pruning import without_ones
from caddie.quantize.quantizer import Arrays, Calibration, Layout, Quantizer, Rounding
from caddie.quantize.rotated import Rotated
from caddie.quantize.rows import Rows
from caddie.quantize.scales import BestPercentile, Percentile, Scale, SigmaClip
from caddie.quantize.waterfilling import Waterfilling

__all__ = [
    "Arrays",
    "BestPercentile",
    "Binary",
    "Calibration",
    "Float8",
    "Float16",
    "Float32",
    "Gptq",
    "Layout",
    "LowRank",
    "Percentile",
    "Quantizer",
    "Rotated",
    "Rounding",
    "Rows",
    "Scale",
    "SigmaClip",
    "Ternary",
    "Waterfilling",
    "without_ones",
]
