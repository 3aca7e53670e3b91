"""Scoring a long stream: memory does not grow with its length, and time grows linearly; and beside a naive loop.

python bench/scoring.py [TOKENS]    (Linux or macOS)
python bench/scoring.py --naive [--bytes 10_000_000] [--artifact FILE] [--recipe tiny] [--pieces 4] [--whole]

Random tokens in a memory-mapped shard are scored by a very small model, plain, sliding and with both kinds of test-time
training, at 1, 4 and 16 times TOKENS; each time in a process of its own with one thread, which scores the first TOKENS
beforehand, as PyTorch loads parts of itself late. Memory is the peak of what is resident above what was at the start,
with the pages of the shard itself, two bytes a token; glibc is told to give back at once what is freed, because its
heap would otherwise grow for a while whatever is done. Time is the processor's; with `chunks` the shortest stream is
cheaper by a seventh or so, as the last of its four chunks is not learnt from. Ratios are to the shortest stream.

With `--naive`, that many bytes of the recipe's own text (Python's standard library unless `--data` names another) are
scored by this program and by the loop that one would write first: one window after the other, all its logits in
float32, their cross-entropy, and of that what is new; with the model's operations as PyTorch has them ("plain" in
`caddie.ops`). Both run the same weights on the same pieces of the text, in turn;
the loop with PyTorch's own number of threads, this program with the number it measures to be the best. They must come
to the same nats to a millionth. Weights are random, or those of an artifact, with which it also samples text with the
cache and without. With `--whole`, this program then scores all the bytes and says what memory that took.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from laps import peak_bytes

from caddie.config import parse_assignment
from caddie.data.shards import open_shard, write_shard
from caddie.inference.sample import sample
from caddie.model import GPT, Model, build
from caddie.ops import IMPLEMENTATIONS, use_implementations
from caddie.pack import artifact as artifacts
from caddie.recipes.catalog import find
from caddie.run.resolve_corpus import open_corpus
from caddie.score import Scoring, Text, score, use_quickest_threads

TIMES = (1, 4, 16)
VOCABULARY, BOS, DOCUMENT = 256, 0, 512
LENGTH = 128
CPU = torch.device("cpu")
WAYS = {
    "plain": f"stride={LENGTH}",
    "sliding": f"stride={LENGTH // 2}",
    "chunks": "ttt=ChunkSGD(chunk_tokens=4096,sgd=SGD(epochs=1))",
    "documents": 'ttt=DocumentLoRA(rank=4,chunk_tokens=64,documents=16,targets=["head"])',
}
"""What is set besides the length of a window."""


def write(path: Path, tokens: int) -> None:
    """A shard of random documents."""
    ids = np.random.default_rng(0).integers(1, VOCABULARY, tokens, dtype=np.uint16)
    ids[np.random.default_rng(1).integers(0, tokens, tokens // DOCUMENT)] = BOS
    write_shard(path, ids)


def measure(path: Path, tokens: int, way: str) -> None:
    """Print seconds and bytes of scoring a shard in one way, after its first tokens."""
    torch.set_num_threads(1)
    model = build(GPT(vocabulary=VOCABULARY, width=16, depth=1).but({"block.mlp.hidden": 32}), 0)
    scoring = Scoring(sequence_length=LENGTH, stride=LENGTH, batch_tokens=4096).but(dict([parse_assignment(WAYS[way])]))
    text = Text(open_shard(path), BOS, 1, 1, 1)
    before = peak_bytes(CPU)
    score(model, replace(text, tokens=text.tokens[:tokens]), scoring)
    begin = time.process_time()
    score(model, text, scoring)
    print(json.dumps([time.process_time() - begin, peak_bytes(CPU) - before]))


def naive(model: Model, text: Text, length: int, stride: int) -> float:
    """Nats of a text, by the loop that one would write first."""
    ids, nats = torch.from_numpy(text.tokens.astype("int64")), 0.0
    with torch.no_grad(), use_implementations(**dict.fromkeys(IMPLEMENTATIONS, "plain")):
        for begin in range(0, len(ids) - 1, stride):
            end = min(begin + length, len(ids) - 1)
            inputs = ids[None, begin:end]
            logits = model(inputs, inputs == text.bos).float()
            losses = F.cross_entropy(logits[0], ids[begin + 1 : end + 1], reduction="none")
            nats += losses[0 if begin == 0 else length - stride :].double().sum().item()
            if end == len(ids) - 1:
                break
    return nats


def model_and_text(given: argparse.Namespace) -> tuple[Model, Text, Any, Any]:
    """The model, the first bytes of its text, how it is scored, and the artifact if there is one."""
    recipe = find(given.recipe)
    loaded = artifacts.load(given.artifact) if given.artifact else None
    corpus = open_corpus(recipe, given.data)
    split, (tokens, *_) = corpus.manifest.train, corpus.train_shards()
    assert split is not None
    count = int(given.bytes * split.tokens / split.source_bytes)
    if count >= len(tokens):
        raise SystemExit(f"the text has {split.source_bytes:,} bytes; ask for fewer, or name a longer one with --data")
    if loaded:
        model = loaded.model
    else:
        model = build(recipe.model, 0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    bos = corpus.manifest.tokenizer.bos
    return model, Text(tokens[: count + 1], bos, given.bytes, 1, 1), loaded.scoring if loaded else recipe.score, loaded


def beside_naive(given: argparse.Namespace) -> None:
    """Print tokens per second of the naive loop and of this program, by the stride."""
    model, text, scoring, loaded = model_and_text(given)
    threads, length = torch.get_num_threads(), scoring.sequence_length
    use_quickest_threads(model, text, scoring)
    ours = torch.get_num_threads()
    print(f"{given.bytes:,} bytes, {len(text.tokens) - 1:,} predictions; threads: naive {threads}, ours {ours}")
    for stride in dict.fromkeys((length, scoring.stride, 64)):
        sliding, size = scoring.but({"stride": stride, "ttt": None}), 1024 * stride + length
        if len(text.tokens) <= 2 * size:
            raise SystemExit(f"{given.bytes:,} bytes are too short for pieces of {size:,} tokens; ask for more --bytes")
        seconds: list[tuple[float, float]] = []
        for begin in range(0, len(text.tokens) - size, (len(text.tokens) - size) // (given.pieces + 1)):
            piece = replace(text, tokens=text.tokens[begin : begin + size + 1])
            torch.set_num_threads(threads)
            start = time.perf_counter()
            expected = naive(model, piece, length, stride)
            middle = time.perf_counter()
            torch.set_num_threads(ours)
            between = time.perf_counter()
            found = score(model, piece, sliding).nats
            seconds.append((middle - start, time.perf_counter() - between))
            if abs(found / expected - 1) > 1e-6:
                raise SystemExit(f"not the same score: {found} and {expected} nats")
        slow, quick = (statistics.median(size / each[side] for each in seconds[1:]) for side in (0, 1))
        ratio = statistics.median(a / b for a, b in seconds[1:])
        print(f"stride {stride:4}: naive {slow:9,.0f}, ours {quick:9,.0f} tokens/s, {ratio:.2f} times", flush=True)
    if loaded:
        sampling(loaded)
    if given.whole:
        torch.set_num_threads(ours)
        before, start = peak_bytes(CPU), time.perf_counter()
        score(model, text, scoring.plain)
        rate, peak = (len(text.tokens) - 1) / (time.perf_counter() - start), peak_bytes(CPU) - before
        print(f"all of it, plain: {rate:,.0f} tokens/s; {peak / (1 << 20):,.1f} MiB above the peak before")


def sampling(loaded: Any) -> None:
    """Print characters of `caddie sample`, and tokens per second with its cache and with all computed again."""
    torch.set_num_threads(1)
    window = loaded.scoring.sequence_length
    sample(loaded, b"import os", 8)
    start = time.perf_counter()
    written = loaded.tokenizer.encode(sample(loaded, b"import os", window - 16, seed=1))
    cached = len(written) / (time.perf_counter() - start)
    ids = [loaded.tokenizer.bos, *map(int, written)]
    start = time.perf_counter()
    with torch.inference_mode():
        for end in range(1, len(ids)):
            inputs = torch.tensor([ids[:end]])
            loaded.model(inputs, inputs == loaded.tokenizer.bos, last=1)
    again = len(written) / (time.perf_counter() - start)
    print(f"sampling {len(written)} tokens: {cached:,.0f} tokens/s, without the cache {again:,.0f}")


def main() -> None:
    """Print a table of memory, times and ratios, or of this program beside the naive loop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", nargs="?", type=int, default=16_384)
    parser.add_argument("one", nargs="*", help=argparse.SUPPRESS)  # the shard and way of a measuring process
    parser.add_argument("--naive", action="store_true")
    parser.add_argument("--bytes", type=int, default=10_000_000)
    parser.add_argument("--artifact", type=Path)
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--data")
    parser.add_argument("--pieces", type=int, default=4)
    parser.add_argument("--whole", action="store_true")
    given = parser.parse_args()
    if given.naive:
        beside_naive(given)
    elif given.one:
        measure(Path(given.one[0]), given.tokens, given.one[1])
    else:
        flatness(given.tokens)


def flatness(tokens: int) -> None:
    """Print memory and time of longer and longer streams."""
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
