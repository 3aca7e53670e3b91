"""Ideas beside the contest's last records, each alone on the best of them; none is decided yet.

Sources, published effects and the seeds that a verdict needs stand in `docs/results/frontier-ideas.md`.
"""

from __future__ import annotations

from caddie.config.schedules import Ramp, StepRamp
from caddie.recipes.late_records import ngram_tilt
from caddie.recipes.recipe import Recipe
from caddie.train.averaging import TailEMA
from caddie.train.optim import SoapMuon


def _idea(diff: dict[str, object], why: str) -> Recipe:
    return ngram_tilt.but(diff, base="ngram_tilt", why=why)


prefix_targets = _idea(
    {"train.prefix_loss": Ramp(start=0.25, end=0.0, begin=1 / 3, finish=2 / 3)},
    "Predicts the longest prefix of each token too, in two thirds of the run; modded-nanogpt #337.",
)
cautious_decay = _idea(
    {"train.optimizers.matrix.weight_decay": 0.0, "train.optimizers.matrix.cautious_decay": 0.095},
    "Weight decay only where the step shrinks the weight too; modded-nanogpt, track 3, #328.",
)
huber_decay = _idea(
    {"train.optimizers.matrix.decay_clamp": 0.1},
    "Large weights decay no faster than those of a tenth; a switch of #2135.",
)
head_pairs = _idea(
    {"train.optimizers.blocks.*.attention.[qk]*.weight": ngram_tilt.train.optimizers["matrix"].but(group_rows=128)},
    "Muon orthogonalizes queries and keys by pairs of heads; modded-nanogpt #253.",
)
soap_muon = _idea(
    {
        "train.optimizers.matrix": SoapMuon(
            lr=0.028,
            momentum=StepRamp(start=0.85, end=0.95, steps=300),
            refresh=10,
            sides="smaller",
        )
    },
    "SOAP-Muon on the smaller side, its bases refreshed every tenth step; modded-nanogpt, track 3, #321 to #328.",
)
tail_average = _idea(
    {"train.averaging": TailEMA(begin=0.89, steps=150.0, weight=0.6)},
    "Averages the last ninth of the run, mixed with the last weights; modded-nanogpt, track 3, #325.",
)
gentle_slope = _idea(
    {"model.block.mlp.slope": 0.3},
    "LeakyReLU² with a slope of 0.3; #1948, #1967, #2140.",
)
gated_xsa = _idea(
    {"model.block.attention.xsa_gate": 2.0},
    "Each head learns the share of its own value that XSA leaves out, from 0.96; modded-nanogpt #264.",
)
