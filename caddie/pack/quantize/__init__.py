"""Quantizers: from weights to integer arrays and back."""

from caddie.pack.quantize.floats import Float8, Float16, Float32
from caddie.pack.quantize.gptq import Gptq
from caddie.pack.quantize.groups import Binary, Ternary
from caddie.pack.quantize.low_rank import LowRank
from caddie.pack.quantize.protected import Protected, Protection
from caddie.pack.quantize.quantizer import Arrays, Calibration, Layout, Quantizer, Rounding
from caddie.pack.quantize.rotated import Rotated
from caddie.pack.quantize.rows import Rows
from caddie.pack.quantize.scales import BestPercentile, Percentile, Scale, SigmaClip
from caddie.pack.quantize.trellis import Trellis
from caddie.pack.quantize.waterfilling import Waterfilling, WaterfillingSteps
