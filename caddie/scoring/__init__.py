"""Bits per byte of a model on held-out text."""

from caddie.scoring.adaptation import SGD, Adaptation, ChunkSGD
from caddie.scoring.adapters import DocumentLoRA, GlobalSGD
from caddie.scoring.loop import equal, layout_of, run
from caddie.scoring.score import Score, Scoring, Text, score, use_quickest_threads
from caddie.scoring.scorer import Asked, Layout, Past, Scorer, Step, Stream
from caddie.scoring.tokenwise import TokenByToken, TokenScorer, load_scorer
from caddie.scoring.windows import Window, check_windows, windows

__all__ = [
    "SGD",
    "Adaptation",
    "Asked",
    "ChunkSGD",
    "DocumentLoRA",
    "GlobalSGD",
    "Layout",
    "Past",
    "Score",
    "Scorer",
    "Scoring",
    "Step",
    "Stream",
    "Text",
    "TokenByToken",
    "TokenScorer",
    "Window",
    "check_windows",
    "equal",
    "layout_of",
    "load_scorer",
    "run",
    "score",
    "use_quickest_threads",
    "windows",
]
