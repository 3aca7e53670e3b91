"""A user's scorer that uses tokens too early, once it has been shown AFTER tokens."""

WAITS = """
import torch
from caddie.score import Scorer, Step, windows
class Waits(Scorer):
    def __init__(self, model, tokenizer):
        self.model, self.bos, self.shown = model, tokenizer.bos, 0
    def plan(self, layout, rows):
        for window in windows(0, int(layout.ends[0]), 64, 64):
            yield Step([window], [0])
    @torch.no_grad()
    def logits(self, inputs, slots, last, cache=None):
        self.shown += inputs.shape[1]
        logits = self.model(inputs, inputs == self.bos)
        if self.shown > AFTER:
            logits[:, :-1].scatter_add_(2, inputs[:, 1:, None], torch.full((1, inputs.shape[1] - 1, 1), 5.0))
        return logits[:, -last:]
"""
