"""Ideas from outside the records: ternary weights, one block many times, random matrices, dense connections."""

from caddie.config.schedules import Warmdown
from caddie.model import (
    MUDD,
    Dense,
    GatedValueResidual,
    LastLayerMUDD,
    LeakyReluSquared,
    PhaseMix,
    RandomMap,
    Recurrence,
    YaRNRoPE,
)
from caddie.model.parameters import FanInNormal, Normal, Orthogonal
from caddie.pack.codecs import Lzma, Zstd
from caddie.pack.coding import Packed
from caddie.pack.quantize import Float8, Float16, Gptq, Percentile, Rows, SigmaClip, Ternary
from caddie.recipes.recipe import per_role
from caddie.train.qat import StraightThrough

_TRITS = Ternary(packed=True)
_TERNARY_MAP = Dense(initial=Normal(std=0.02), normed=True)

_FOLDED = {
    "model.block.mlp": LeakyReluSquared(hidden=1536),
    "model.block.residual_mix": PhaseMix(),
    "model.block.attention.xsa": True,
    "model.block.attention.value_residual": GatedValueResidual(),
    "model.layers": {},
    "train.seconds": 555,
}
"""Changes that #1110 and #1113 share."""

_MHA = {"model.block.attention.key_value_heads": 8}
"""Values as wide as the stream; narrower MLPs pay for them."""
_MUDD_MAPS = {"pack.quantizers.dense_connections.*.up.weight": Gptq(of=Rows(bits=6, scale=SigmaClip(k=12.85)))}

RECIPES = {
    "ternary": {
        "base": "baseline",
        "why": "Ternary: 67 million parameters, nearly all -1, 0 or 1, in ten wide layers.",
        "model.vocabulary": 8192,
        "model.width": 768,
        "model.depth": 10,
        "model.embedding.dims": 254,
        "model.block.attention.fused": True,
        "model.block.attention.query_gain": 2.25,
        "model.block.attention.linear": _TERNARY_MAP,
        "model.block.attention.rope": YaRNRoPE(base=5000.0, native_length=1024, length=2048),
        "model.block.mlp.hidden": 3072,
        "model.block.mlp.linear": _TERNARY_MAP,
        "model.head.softcap": 10.0,
        "model.head.softcap_form": "polynomial",
        "model.head.bias": True,
        "train.seconds": 599,
        "train.steps": 10_000,
        "train.lr_schedule": Warmdown(fraction=0.2),
        "train.z_loss": 1e-4,
        "train.warmup_steps": 5,
        "train.optimizers.matrix.steps": 3,
        "train.optimizers.matrix.normalize_rows": True,
        **per_role("train.optimizers.*.lr", embedding=0.02, scalar=0.02),
        "train.qat": {
            "matrix": StraightThrough(quantizer=_TRITS, strength=1.0),
            "*.projection.weight": StraightThrough(quantizer=Float8(), strength=1.0),
        },
        "pack.quantizers.embedding": Float8(),
        "pack.quantizers.matrix": _TRITS,
        "pack.quantizers.scalar": Float16(),
        "pack.quantizers.*.projection.weight": Float8(),
        "pack.coding": Packed(codec=Lzma(extreme=False)),
        "score.stride": 16,
    },
    "universal_transformer": {
        "base": "value_embeddings",
        "why": "Depth recurrence of the whole model: three layers, four times; a third of the bytes.",
        **_FOLDED,
        "model.depth": 3,
        "model.block.mlp.linear.initial": Orthogonal(),
        "model.recurrence": Recurrence(first=0, last=2, passes=4, embeddings=True),
        "model.embedding.bigrams.initial": Orthogonal(gain=6**-0.5),
        "model.value_embedding.layers": (0, 1),
        "model.value_embedding.initial": Orthogonal(gain=6**-0.5),
    },
    "random_mlps": {
        "base": "lower_lr",
        "why": "Twelve layers whose MLPs are random but for a part of rank 160; Random_Linear_Adapter.",
        "model.depth": 12,
        "model.block.mlp.hidden": 1536,
        "model.block.mlp.linear": RandomMap(rank=160, initial=FanInNormal()),
        "train.sequence_length": 2048,
        "pack.quantizers.embedding": Float16(),
        "pack.quantizers.blocks.[5-7].*.weight": Rows(bits=6, scale=Percentile(floor="absolute")),
        "pack.coding": Packed(codec=Zstd()),
        "score.sequence_length": 2048,
        "score.stride": 512,
    },
    "random_maps": {
        "base": "value_embeddings",
        "why": "All maps random and orthogonal but for a part of rank 32: five megabytes in all.",
        **_FOLDED,
        "model.block.attention.linear": RandomMap(rank=32, initial=Orthogonal()),
        "model.block.mlp.linear": RandomMap(rank=32, initial=Orthogonal()),
    },
    "mudd": {
        "base": "three_layer_recurrence",
        "why": "Light MUDD for skips and the mix of the input, values as wide as the stream; #1936, 1.0769.",
        **_MHA,
        "model.block.mlp.hidden": 1792,
        "model.layers": {"7-9": {"parallel": True}, "10": {"parallel": True, "mlp.hidden": 1728}},
        "model.block.residual_mix": None,
        "model.skips": None,
        "model.dense_connections": MUDD(),
        **_MUDD_MAPS,
    },
    "last_layer_mudd": {
        "base": "coprime_loader",
        "why": "MUDD in the last layer alone, as factors for each token; modded-nanogpt #259 in the contest's model.",
        **_MHA,
        "model.block.mlp.hidden": 1280,
        "model.dense_connections": LastLayerMUDD(),
        **_MUDD_MAPS,
    },
    "signed_bigrams": {
        "base": "coprime_loader",
        "why": "Bigrams that share a row told apart by fixed random signs; modded-nanogpt #299.",
        "model.embedding.bigrams.signs": 8192,
    },
}
