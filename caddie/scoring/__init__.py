"""Bits per byte of a model on held-out text."""

from caddie.scoring.score import Score, Scoring, Text, score
from caddie.scoring.windows import windows

__all__ = ["Score", "Scoring", "Text", "score", "windows"]
