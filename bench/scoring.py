"""Scoring a long stream: memory does not grow with its length, and time grows linearly.

python bench/scoring.py [TOKENS]    (Linux or macOS)

Random tokens in a memory-mapped shard are scored by a very small model, plain, sliding and with both kinds of test-time
training, at 1, 4 and 16 times TOKENS; each time in a process of its own with one thread, which scores the first TOKENS
beforehand, as PyTorch loads parts of itself late. Memory is the peak of what is resident above what was at the start,
with the pages of the shard itself, two bytes a token; glibc is told to give back at once what is freed, because its
heap would otherwise grow for a while whatever is done. Time is the processor's; with `chunks` the shortest stream is
cheaper by a seventh or so, as the last of its four chunks is not learnt from. Ratios are to the shortest stream.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

TIMES = (1, 4, 16)
VOCABULARY, BOS, DOCUMENT = 256, 0, 512
LENGTH = 128
WAYS = {
    "plain": f"stride={LENGTH}",
    "sliding": f"stride={LENGTH // 2}",
    "chunks": "adaptation=ChunkSGD(chunk_tokens=4096,sgd=SGD(epochs=1))",
    "documents": 'adaptation=DocumentLoRA(rank=4,chunk_tokens=64,documents=16,targets=["head"])',
}
"""What is set besides the length of a window."""


def peak_bytes() -> int:
    """Most memory that was resident in this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def write(path: Path, tokens: int) -> None:
    """A shard of random documents."""
    import numpy as np

    from caddie.data import write_shard

    ids = np.random.default_rng(0).integers(1, VOCABULARY, tokens, dtype=np.uint16)
    ids[np.random.default_rng(1).integers(0, tokens, tokens // DOCUMENT)] = BOS
    write_shard(path, ids)


def measure(path: Path, tokens: int, way: str) -> None:
    """Print seconds and bytes of scoring a shard in one way, after its first tokens."""
    import torch

    from caddie.config import parse_assignment
    from caddie.data import open_shard
    from caddie.model import GPT, build
    from caddie.scoring import Scoring, Text, score

    torch.set_num_threads(1)
    model = build(GPT(vocabulary=VOCABULARY, width=16, depth=1).but({"block.mlp.hidden": 32}), 0)
    scoring = Scoring(sequence_length=LENGTH, stride=LENGTH, batch_tokens=4096).but(dict([parse_assignment(WAYS[way])]))
    text = Text(open_shard(path), BOS, 1, 1, 1)
    before = peak_bytes()
    score(model, replace(text, tokens=text.tokens[:tokens]), scoring)
    begin = time.process_time()
    score(model, text, scoring)
    print(json.dumps([time.process_time() - begin, peak_bytes() - before]))


def main() -> None:
    """Print a table of memory, times and ratios."""
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 16_384
    if len(sys.argv) > 2:
        measure(Path(sys.argv[2]), tokens, sys.argv[3])
        return
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    print("peak MiB above the start and seconds for a million tokens, each with its ratio to the shortest")
    with tempfile.TemporaryDirectory() as folder:
        for times in TIMES:
            write(Path(folder, str(times)), times * tokens)
        for way in WAYS:
            first: list[float] | None = None
            for times in TIMES:
                command = [sys.executable, __file__, str(tokens), str(Path(folder, str(times))), way]
                seconds, peak = json.loads(subprocess.check_output(command, env=environment))
                found = [peak / (1 << 20), seconds / (times * tokens) * 1e6]
                first = first or found
                ratios = [value / start for value, start in zip(found, first, strict=True)]
                print(
                    f"{way:9} {times * tokens:9,} tokens: {found[0]:6.1f} MiB ({ratios[0]:4.2f}), "
                    f"{found[1]:6.2f} s ({ratios[1]:4.2f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
