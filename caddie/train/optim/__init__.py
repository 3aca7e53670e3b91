"""Optimizers: settings that build an updater of parameters."""

from caddie.train.optim.adamw import AdamW
from caddie.train.optim.muon import Muon, newton_schulz
from caddie.train.optim.optimizer import Optimizer, Updater
from caddie.train.optim.soap_muon import SoapMuon, TrustGate
