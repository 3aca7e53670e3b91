"""Bits per byte of a model on held-out text."""

from caddie.score.loop import layout_of, run, same_shape_batches
from caddie.score.score import KINDS, Score, Scoring, Text, run_text, score, score_kinds, use_quickest_threads
from caddie.score.scorer import Layout, ScoredPrefix, Scorer, ScoringBatch, Step, Stream
from caddie.score.ttt_lora import DocumentLoRA, GlobalSGD
from caddie.score.ttt_sgd import SGD, ChunkSGD, TestTimeTraining
from caddie.score.user_scorer import TokenScorer, load_scorer
from caddie.score.windows import Window, check_windows, windows
