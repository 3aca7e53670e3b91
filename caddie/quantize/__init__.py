"""Quantizers: from weights to integer arrays and back."""

from caddie.quantize.floats import Float16, Float32
from caddie.quantize.quantizer import Arrays, Calibration, Layout, Quantizer, Rounding
from caddie.quantize.rows import Rows

__all__ = ["Arrays", "Calibration", "Float16", "Float32", "Layout", "Quantizer", "Rounding", "Rows"]
