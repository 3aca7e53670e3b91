"""caddie's own recipes: `champion`, the best record in another packing, and `few_layers`, chosen at mini scale.

`docs/log.md` tells what was tried.
"""

from caddie.model import ChannelSmear, HashedNGrams, RMSNorm
from caddie.model.parameters import Orthogonal
from caddie.pack.compress import Pack

RECIPES = {
    "few_layers": {
        "base": "vocabulary_4096",
        "why": "Chosen by ablation at mini scale: few layers, many hashed pairs; not measured at full size.",
        "model.depth": 5,
        "model.value_embedding.layers": (3, 4),
        "model.block.attention_norm": RMSNorm(),
        "model.block.mlp_norm": RMSNorm(),
        "model.embedding.smear": ChannelSmear(),
        "model.embedding.bigrams": HashedNGrams(buckets=16_384, dims=128, initial=Orthogonal()),
        "train.optimizers.matrix.normalize_rows": True,
        "train.optimizers.embedding.lr": 0.06,
        "pack": Pack(policy="contest-2026"),
    },
    "champion": {
        "base": "ngram_tilt",
        "why": "The best record, packed by waterfilling and an entropy coder; not measured at full size.",
        "pack": Pack(policy="contest-2026"),
    },
}
