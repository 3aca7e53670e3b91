"""A submission folder as the contest takes it, that breaks no rule, for tests that break one each."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TOKENS = 62_021_632
"""Of the official set under SP 1024."""
BYTES_PER_TOKEN_BITS = 2.4359 * 0.6931471805599453
"""Nats per token over bits per byte of that set."""

SCRIPT = '''"""Trains and scores."""
import torch


def eval_val_ttt(model, val_tokens, optimizer):
    loss_sum = byte_count = 0
    for start in range(0, len(val_tokens), 8):
        chunk = val_tokens[start : start + 8]
        with torch.no_grad():
            loss_sum += model(chunk)
            byte_count += 8
        model(chunk).backward()
        optimizer.step()
    return loss_sum / byte_count


def main(model, val_tokens, loader, optimizer):
    for batch in loader:
        model(batch).backward()
        optimizer.step()
    eval_val_ttt(model, val_tokens, optimizer)
'''

SCORES = {42: "1.10012341", 7: "1.10112342", 1337: "1.10212343"}
"""Bits per byte of each seed; none ends with a zero, which a JSON number would lose."""


def score_line(name: str, bits: str, extra: str = "") -> str:
    """Return a scoring line whose loss fits its bits per byte."""
    return f"{name} val_loss:{float(bits) * BYTES_PER_TOKEN_BITS:.8f} val_bpb:{bits}{extra}"


def log_lines(seed: int, bits: str) -> list[str]:
    """Return the lines of a log."""
    return [
        "Hyperparameters:",
        "  matrix_lr: 0.02",
        "  run_id: run-" + str(seed),
        f"  seed: {seed}",
        "train_shards: 80",
        f"val_tokens: {TOKENS}",
        "step:1000/20000 train_loss:2.2 train_time:60000ms step_avg:60.00ms",
        "stopping_early: wallclock_cap train_time:599990ms step:10000/20000",
        score_line("pre-quantization post-ema", "1.12000000"),
        "Serialized model: 67224983 bytes",
        "Code size: 500 bytes",
        "Total submission size: 67225483 bytes",
        "Serialized model int6+brotli: 15000000 bytes",
        "Total submission size int6+brotli: 15000500 bytes",
        score_line("final_int6_roundtrip", "1.13000000", " eval_time:3000ms"),
        score_line("final_int6_sliding_window_exact", bits, " eval_time:90000ms"),
    ]


def submission() -> dict[str, Any]:
    """Return the JSON."""
    return {
        "author": "A. Author",
        "github_id": "author",
        "name": "A submission",
        "date": "2026-04-01",
        "track": "10min_16mb",
        "val_bpb": 1.10112342,
        "val_bpb_std": 0.00100001,
        "seeds": list(SCORES),
        "seed_results": {
            str(seed): {"val_bpb": float(bits), "artifact_bytes": 15_000_500} for seed, bits in SCORES.items()
        },
    }


def write_submission(
    folder: Path,
    data: Mapping[str, Any] | str | None = None,
    script: str | None = SCRIPT,
    replace: Mapping[str, str] | None = None,
    files: Mapping[str, str | bytes | None] | None = None,
) -> Path:
    """Write the folder; `data` changes fields of the JSON, or is its text; `replace` changes lines of every log.

    `files` are written as they are, or not at all where they are None.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[str, str | bytes | None] = {
        "README.md": "Mean 1.1011; seeds 1.1001, 1.1011, 1.1021.\n",
        "submission.json": data if isinstance(data, str) else json.dumps({**submission(), **(data or {})}),
        "train_gpt.py": script,
    }
    for seed, bits in SCORES.items():
        text = "\n".join(log_lines(seed, bits)) + "\n"
        for old, new in (replace or {}).items():
            assert old in text, old
            text = text.replace(old, new)
        written[f"train_seed{seed}.log"] = text
    for name, content in {**written, **(files or {})}.items():
        if content is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder
