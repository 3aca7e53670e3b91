"""Text written by a model."""

from __future__ import annotations

import torch

from caddie.model import Cache
from caddie.pack.artifact import Artifact


@torch.inference_mode()
def sample(
    artifact: Artifact, prompt: bytes = b"", tokens: int = 120, temperature: float = 0.8, seed: int = 0
) -> bytes:
    """The prompt and what the model writes after it, drawn token by token; the same for a seed on one machine.

    Stops before the next document would begin. A temperature of 0 takes the likeliest token each time.
    """
    model, tokenizer, longest = artifact.model, artifact.tokenizer, artifact.scoring.sequence_length
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    written = [tokenizer.bos, *(int(token) for token in tokenizer.encode(prompt))]
    fresh, cache = written[-longest:], Cache()
    for _ in range(tokens):
        if cache.length + len(fresh) > longest:  # begin a new window, half full
            fresh, cache = written[-max(1, longest // 2) :], Cache()
        ids = torch.tensor([fresh], device=device)
        logits = model(ids, ids == tokenizer.bos, last=1, cache=cache)[0, -1].float().cpu()
        if temperature > 1e-4:
            chosen = int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator))
        else:
            chosen = int(logits.argmax())
        if chosen == tokenizer.bos:
            break
        written.append(chosen)
        fresh = [chosen]
    return tokenizer.decode(written)
