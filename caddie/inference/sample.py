"""Text generation."""

from collections.abc import Iterator, Sequence

import torch

from caddie.config import Count, NonNegative, Seed, coerce
from caddie.errors import UserError, check_kind
from caddie.model import Cache
from caddie.pack.artifact import AS_ARTIFACT, Artifact


def sample(
    artifact: Artifact, prompt: bytes | str = b"", tokens: int = 120, temperature: float = 0.8, seed: int = 0
) -> bytes:
    """Generate text: return the bytes of the prompt and of up to `tokens` sampled tokens, fewer if the document ends.

    A prompt may be text, which is taken as UTF-8. A temperature of 0 takes the most likely token. The same seed gives
    the same text on one machine. Raises `UserError` for `tokens` below 1, a temperature below 0, a seed that is no
    whole number of 0 to 2³² - 1, and a model that gives no probabilities.
    """
    check_kind(artifact, Artifact, "the artifact", AS_ARTIFACT)
    tokens, temperature = coerce(tokens, Count, "tokens"), coerce(temperature, NonNegative, "temperature")
    seed = coerce(seed, Seed, "seed")
    tokenizer = artifact.tokenizer
    begun = tokenizer.encode(prompt.encode(errors="replace") if isinstance(prompt, str) else prompt).tolist()
    return tokenizer.decode([*begun, *continuation(artifact, begun, tokens, temperature, seed)])


@torch.inference_mode()
def continuation(
    artifact: Artifact, prompt: Sequence[int], tokens: int, temperature: float, seed: int = 0
) -> Iterator[int]:
    """Yield up to `tokens` sampled ids that continue a document, whose first ids are `prompt`, until it ends."""
    model, tokenizer, longest = artifact.model, artifact.tokenizer, artifact.scoring.sequence_length
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    written = [tokenizer.bos, *prompt]
    unread, cache = written[-longest:], Cache()
    for _ in range(tokens):
        if cache.length + len(unread) > longest:  # start a new window, half full
            unread, cache = written[-max(1, longest // 2) :], Cache()
        ids = torch.tensor([unread], device=device)
        logits = model(ids, ids == tokenizer.bos, last=1, cache=cache)[0, -1].float().cpu()
        if not logits.max().isfinite():
            raise UserError("the model gives no probabilities: it is damaged, or its training diverged; take another")
        if temperature > 1e-4:
            chosen = int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator))
        else:
            chosen = int(logits.argmax())
        if chosen == tokenizer.bos:
            return
        written.append(chosen)
        unread = [chosen]
        yield chosen
