"""Checks of an artifact, and probes for false scores that see the scorer as a black box."""

from caddie.verify.black_box import BlackBoxScorer, LoopScorer, ScoredText
from caddie.verify.known_bad import KNOWN_BAD, Caught, KnownBad, catch, known_bad
from caddie.verify.probe_case import ProbeCase, excerpts, library, probe_case_of
from caddie.verify.probes import PROBES, run_probes
from caddie.verify.verify import Verdict, verify

__all__ = [
    "KNOWN_BAD",
    "PROBES",
    "Caught",
    "KnownBad",
    "ScoredText",
    "LoopScorer",
    "BlackBoxScorer",
    "ProbeCase",
    "Verdict",
    "catch",
    "run_probes",
    "excerpts",
    "known_bad",
    "library",
    "probe_case_of",
    "verify",
]
