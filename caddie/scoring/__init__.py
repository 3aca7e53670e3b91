"""Bits per byte of a model on held-out text."""

from caddie.scoring.score import Score, Scoring, Text, score, use_quickest_threads
from caddie.scoring.windows import windows

__all__ = ["Score", "Scoring", "Text", "score", "use_quickest_threads", "windows"]
