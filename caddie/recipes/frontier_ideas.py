"""Ideas beside the contest's last records, each alone on the best of them; none is decided yet.

Sources, published effects and the seeds that a verdict needs stand in `docs/results/frontier-ideas.md`.
"""

from caddie.config.schedules import Ramp, StepRamp
from caddie.train.averaging import TailEMA
from caddie.train.optim import Muon, SoapMuon

RECIPES = {
    "prefix_targets": {
        "base": "ngram_tilt",
        "why": "Predicts the longest prefix of each token too, in two thirds of the run; modded-nanogpt #337.",
        "train.prefix_loss": Ramp(start=0.25, end=0.0, begin=1 / 3, finish=2 / 3),
    },
    "cautious_decay": {
        "base": "ngram_tilt",
        "why": "Weight decay only where the step shrinks the weight too; modded-nanogpt, track 3, #328.",
        "train.optimizers.matrix.weight_decay": 0.0,
        "train.optimizers.matrix.cautious_decay": 0.095,
    },
    "huber_decay": {
        "base": "ngram_tilt",
        "why": "Large weights decay no faster than those of a tenth; a switch of #2135.",
        "train.optimizers.matrix.decay_clamp": 0.1,
    },
    "head_pairs": {
        "base": "ngram_tilt",
        "why": "Muon orthogonalizes queries and keys by pairs of heads; modded-nanogpt #253.",
        "train.optimizers.blocks.*.attention.[qk]*.weight": Muon(
            lr=0.028,
            momentum=StepRamp(start=0.92, end=0.97, steps=1500),
            coefficients="polar_express",
            normalize_rows=True,
            weight_decay=0.095,
            group_rows=128,
        ),
    },
    "soap_muon": {
        "base": "ngram_tilt",
        "why": "SOAP-Muon on the smaller side, its bases refreshed every tenth step; modded-nanogpt, track 3, "
        "#321 to #328.",
        "train.optimizers.matrix": SoapMuon(
            lr=0.028, momentum=StepRamp(start=0.85, end=0.95, steps=300), refresh=10, sides="smaller"
        ),
    },
    "tail_average": {
        "base": "ngram_tilt",
        "why": "Averages the last ninth of the run, mixed with the last weights; modded-nanogpt, track 3, #325.",
        "train.averaging": TailEMA(begin=0.89, steps=150.0, weight=0.6),
    },
    "gentle_slope": {
        "base": "ngram_tilt",
        "why": "LeakyReLU² with a slope of 0.3; #1948, #1967, #2140.",
        "model.block.mlp.slope": 0.3,
    },
    "gated_xsa": {
        "base": "ngram_tilt",
        "why": "Each head learns the share of its own value that XSA leaves out, from 0.96; modded-nanogpt #264.",
        "model.block.attention.xsa_gate": 2.0,
    },
}
