"""Tiny models that use every technique of the model at once."""

from caddie.config.schedules import PiecewiseConstant
from caddie.model import (
    GPT,
    HashedNGrams,
    LeakyReluSquared,
    NTKRoPE,
    Recurrence,
    RoutedStreams,
    SeparateStreams,
    SwiGLU,
    ValueEmbedding,
    YaRNRoPE,
)

TINY = GPT(vocabulary=16, width=16, depth=1).but(
    {"block.attention.heads": 2, "block.attention.key_value_heads": 1, "block.mlp.hidden": 16}
)
TWICE = PiecewiseConstant(values=(1, 2), begins=(0.5,))
RICH = {
    "one of each": TINY.but(
        {
            "depth": 4,
            "embedding.dims": 12,
            "embedding.bigrams": HashedNGrams(buckets=32, dims=4),
            "embedding.trigrams": HashedNGrams(buckets=32),
            "embedding.smear": "TokenSmear",
            "block.residual_mix": "PhaseMix",
            "block.attention.rope": NTKRoPE(dims=4, native_length=8, length=16),
            "block.attention.scope": "document",
            "block.attention.longest": 12,
            "block.attention.window": 10,
            "block.attention.value_residual": "GatedValueResidual",
            "block.attention.xsa": True,
            "block.attention.gate": "SparseGate",
            "block.attention_norm": "DepthScaledNorm",
            "block.mlp_norm": "DepthScaledNorm",
            "block.mlp": LeakyReluSquared(hidden=16),
            "layers": {"1": {"parallel": True}},
            "skips": "GatedUNet",
            "recurrence": Recurrence(first=1, last=2, passes=TWICE, embeddings=True),
            "parallel_streams": RoutedStreams(first=3),
            "value_embedding": ValueEmbedding(layers=(2, 3), dims=4),
            "head.bias": True,
            "head.softcap_form": "polynomial",
        }
    ),
    "the others": TINY.but(
        {
            "depth": 4,
            "embedding.smear": "ChannelSmear",
            "block.attention.rope": YaRNRoPE(native_length=8, length=16),
            "block.attention.linear.normed": True,  # with `xsa` it norms mere rounding where a document begins
            "block.attention.value_residual": "MixedValueResidual",
            "block.attention.gate": "DenseGate",
            "block.mlp": SwiGLU(hidden=16),
            "layers": {"0-1": {"attention.window": 5, "attention.gate": "NarrowGate"}},
            "recurrence": Recurrence(first=1, last=2, passes=TWICE, own_mlps=True),
            "parallel_streams": SeparateStreams(first=3),
            "head": "UntiedHead",
        }
    ),
}
"""The model's techniques all at once; what excludes another one stands in the other model."""
