"""Optimizers, each one config that builds an updater for the parameters it is given."""

from caddie.train.optim.adamw import AdamW
from caddie.train.optim.muon import Muon, newton_schulz
from caddie.train.optim.optimizer import Optimizer, Updater

__all__ = ["AdamW", "Muon", "Optimizer", "Updater", "newton_schulz"]
