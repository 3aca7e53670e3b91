"""Probes of what a score says: ways in which it could be false, each tried on the scorer as a black box."""

from caddie.verify.black_box import BlackBoxScorer, Priced, Scored
from caddie.verify.known_bad import KNOWN_BAD, Caught, KnownBad, catch, known_bad
from caddie.verify.probe_case import ProbeCase, excerpts, library, probe_case_of
from caddie.verify.probes import PROBES, examine
from caddie.verify.verify import Verdict, verify

__all__ = [
    "KNOWN_BAD",
    "PROBES",
    "Caught",
    "KnownBad",
    "Priced",
    "Scored",
    "BlackBoxScorer",
    "ProbeCase",
    "Verdict",
    "catch",
    "examine",
    "excerpts",
    "known_bad",
    "library",
    "probe_case_of",
    "verify",
]
