"""Checks of an artifact, and probes for false scores that see the scorer as a black box."""

from caddie.verify.verify import Verdict, verify

__all__ = ["Verdict", "verify"]
