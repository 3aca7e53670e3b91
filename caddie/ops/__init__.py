"""Tensor functions that every model shares: plain references, and faster implementations of some of them.

Functions with several implementations go through `dispatch`, which chooses one by device and dtype.
"""

from caddie.ops.dispatch import (
    IMPLEMENTATIONS,
    choose,
    cross_entropy,
    normed_rotation,
    rms_norm,
    scaled_product,
    softcap,
    squared,
    use_implementations,
)
from caddie.ops.float8 import float8_linear
from caddie.ops.plain import SOFTCAPS, Softcap, asymmetric_softcap, polynomial_softcap, rotate, xsa
from caddie.ops.products import float32_linear, linear, matmul, multiplies_float8, product_dtype, to_product_dtype
