"""Optimizers, each one config that builds an updater for the parameters it is given."""

from caddie.optim.adamw import AdamW
from caddie.optim.muon import Muon, newton_schulz
from caddie.optim.optimizer import Optimizer, Updater

__all__ = ["AdamW", "Muon", "Optimizer", "Updater", "newton_schulz"]
