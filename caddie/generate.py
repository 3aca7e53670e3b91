"""Text written by a model."""

from __future__ import annotations

import torch

from caddie.artifact import Artifact


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
    for _ in range(tokens):
        ids = torch.tensor([written[-longest:]], device=device)
        logits = model(ids, ids == tokenizer.bos)[0, -1].float().cpu()
        if temperature > 1e-4:
            chosen = int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator))
        else:
            chosen = int(logits.argmax())
        if chosen == tokenizer.bos:
            break
        written.append(chosen)
    return tokenizer.decode(written)
