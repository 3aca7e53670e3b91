"""The few tensor functions that every model shares: plain references, and faster versions of some of them.

Those with several implementations go through `choice`, which picks one by device and dtype.
"""

from caddie.ops.dispatch import (
    IMPLEMENTATIONS,
    asking,
    choose,
    cross_entropy,
    gram,
    gram_polynomial,
    normed_rotation,
    rms_norm,
    scaled_product,
    softcap,
    squared,
    squared_mlp,
)
from caddie.ops.float8 import float8_linear
from caddie.ops.plain import SOFTCAPS, Softcap, polynomial_softcap, rotate, xsa
from caddie.ops.products import linear, matmul, multiplied, multiplies_float8, product_dtype

__all__ = [
    "IMPLEMENTATIONS",
    "SOFTCAPS",
    "Softcap",
    "asking",
    "choose",
    "cross_entropy",
    "xsa",
    "float8_linear",
    "gram",
    "gram_polynomial",
    "linear",
    "matmul",
    "multiplied",
    "multiplies_float8",
    "normed_rotation",
    "polynomial_softcap",
    "product_dtype",
    "rms_norm",
    "rotate",
    "scaled_product",
    "softcap",
    "squared",
    "squared_mlp",
]
