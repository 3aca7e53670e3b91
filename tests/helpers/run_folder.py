"""A run folder as a finished run leaves it, made up but realistic: for the tests of what reads such folders."""

import json
import math
import random
from pathlib import Path
from typing import Any

from caddie.run.policy import apply_policies

WIDTH, HIDDEN, KEYS, VOCABULARY = 128, 256, 64, 1024
SOURCE_BYTES = 1_182_204

SAMPLE = '''def read_header(self, name, default=None):
    """Return the value of the header *name*, or *default*.

    If the name is not found, raise KeyError if no default is
    given.
    """
    if name not in self._headers:
        return default
    for key, value in self._headers.items():
        if key.lower() == name.lower():
            return value
    return self._parse(value)
'''


def score(bits: float, stride: int) -> dict[str, Any]:
    """One entry of `scores`."""
    nats = bits * math.log(2) * SOURCE_BYTES
    tokens = 472_881
    return {
        "bits_per_byte": bits,
        "bits_per_normalized_byte": bits,
        "bits_per_table_byte": bits,
        "nats_per_token": nats / tokens,
        "nats_per_byte": nats / SOURCE_BYTES,
        "nats": nats,
        "tokens": tokens,
        "source_bytes": SOURCE_BYTES,
        "normalized_bytes": SOURCE_BYTES,
        "table_bytes": SOURCE_BYTES,
        "seconds": 7.4 if stride == 256 else 22.8,
        "sequence_length": 256,
        "stride": stride,
    }


def tensor(name: str, role: str, shape: list[int], chance: random.Random) -> dict[str, Any]:
    """One entry of `tensors`."""
    parameters = math.prod(shape)
    small = role in ("scalar", "gate")
    size = parameters * 2 if small else round(parameters * chance.uniform(0.82, 0.93))
    error = chance.uniform(1e-4, 2e-4) if small else chance.uniform(0.0055, 0.0120)
    return {
        "name": name,
        "role": role,
        "shape": shape,
        "quantizer": "Float16()" if small else "Rows(bits=8)",
        "bytes": size,
        "parameters": parameters,
        "relative_error": error,
        "predicted_bits_per_byte": 0.5 * error**2,
    }


def tensors(depth: int, seed: int = 7) -> list[dict[str, Any]]:
    """The tensors of a model of `depth` blocks."""
    chance = random.Random(seed)
    found = [tensor("embedding.weight", "embedding", [VOCABULARY, WIDTH], chance)]
    for block in range(depth):
        prefix = f"blocks.{block}."
        found += [
            tensor(prefix + "attention.query.weight", "matrix", [WIDTH, WIDTH], chance),
            tensor(prefix + "attention.key.weight", "matrix", [KEYS, WIDTH], chance),
            tensor(prefix + "attention.value.weight", "matrix", [KEYS, WIDTH], chance),
            tensor(prefix + "attention.out.weight", "matrix", [WIDTH, WIDTH], chance),
            tensor(prefix + "attention.gain", "scalar", [4], chance),
            tensor(prefix + "mlp.up.weight", "matrix", [HIDDEN, WIDTH], chance),
            tensor(prefix + "mlp.down.weight", "matrix", [WIDTH, HIDDEN], chance),
            tensor(prefix + "attention_scale", "scalar", [WIDTH], chance),
            tensor(prefix + "mlp_scale", "scalar", [WIDTH], chance),
            tensor(prefix + "mix", "scalar", [2, WIDTH], chance),
        ]
    return [*found, tensor("skip_weights", "scalar", [depth // 2, WIDTH], chance)]


def make_result(depth: int = 4) -> dict[str, Any]:
    """What `result.json` holds."""
    found = tensors(depth)
    parts = {"weights": sum(entry["bytes"] for entry in found), "tokenizer": 13_012, "config": 902}
    parts |= {"manifest": 1_214, "container": 212}
    size = sum(parts.values())
    compressed = {"gzip -9": 1.894, "xz -9e": 1.474, "zstd -22": 1.516, "brotli -11": 1.446}
    result = {
        "version": 1,
        "recipe": "tiny",
        "why": "Learns most from 60 seconds on two CPU cores; the demo.",
        "base": "baseline",
        "key": "1a2b3c4d",
        "seed": 1337,
        "diff": {
            "model.width": 128,
            "model.depth": 4,
            "train.budget": {"kind": "Budget", "seconds": 60.0, "steps": None},
            "train.schedule": {"kind": "Warmdown", "fraction": 0.5, "floor": 0.0},
            "train.averaging": {"kind": "Ema", "decay": 0.995},
        },
        "command": "caddie run tiny",
        "bits_per_byte": 1.53012,
        "artifact_bytes": size,
        "cap_bytes": 16_000_000,
        "under_cap": True,
        "verified": True,
        "checks": [
            {"name": "size", "passed": True, "evidence": f"{size:,} bytes of 16,000,000"},
            {"name": "causal", "passed": True, "evidence": "no later token changed an earlier output, 3 probes"},
        ],
        "scores": {
            "trained_plain": score(1.54871, 256),
            "averaged_plain": score(1.54102, 256),
            "quantized_plain": score(1.54218, 256),
            "quantized_sliding": score(1.53012, 64),
        },
        "byte_source": "documents",
        "compressors": {
            name: {"bytes": round(bits * SOURCE_BYTES / 8), "bits_per_byte": bits} for name, bits in compressed.items()
        },
        "ledger": {"file_bytes": size, "parts": parts},
        "source": {
            "needed_bytes": 16_375,
            "training_bytes": 8_010,
            "modules": {"caddie/__init__.py": 0, "caddie/artifact.py": 4_727, "caddie/codecs.py": 3_199},
            "decoders": {"brotli": 5_184_980, "torch": 698_003_938},
        },
        "tensors": found,
        "compression": {
            "bits_per_weight": 8 * parts["weights"] / sum(entry["parameters"] for entry in found),
            "predicted_bits_per_byte": 0.00104,
            "measured_bits_per_byte": 0.00116,
            "curve": [
                {"bytes": 301_204, "bits_per_byte": 0.0398},
                {"bytes": 447_918, "bits_per_byte": 0.00391},
                {"bytes": size, "bits_per_byte": 0.00104},
                {"bytes": 731_022, "bits_per_byte": 0.0000524},
            ],
            "step_bytes": 100_000,
            "step_more_bits_per_byte": -0.00082,
            "step_fewer_bits_per_byte": 0.00388,
        },
        "seconds": {
            "prepare": 3.21,
            "train_warmup": 18.44,
            "train": 60.02,
            "pack": 0.91,
            "verify": 4.12,
            "score": 38.3,
            "total": 125.0,
        },
        "evaluation": {"load": 0.24, "warm_up": 1.53, "score": 22.8},
        "training": {
            "steps": 812,
            "tokens": 1_662_976,
            "tokens_per_second": 27_707.0,
            "parameters": sum(entry["parameters"] for entry in found),
            "final_loss": 2.6121,
            "cpu_share": 0.97,
            "step_seconds": {"p5": 0.071, "p95": 0.077},
        },
        "sample": SAMPLE,
        "device": "cpu, 2 threads",
        "precision": "bfloat16",
        "world": 1,
        "versions": {"caddie": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "numpy": "2.3.1"},
        "code": None,
        "sha256": {
            name: f"{index:x}" * 64
            for index, name in enumerate(
                ["corpus", "train_documents", "validation_documents", "tokenizer", "recipe", "artifact"], start=10
            )
        },
        "corpus": {
            "name": "stdlib",
            "documents": {"train": 1_604, "validation": 66},
            "tokens": {"train": 11_204_551, "validation": 472_881},
            "source_bytes": {"train": 28_011_377, "validation": SOURCE_BYTES},
            "lossless": True,
            "changed_documents": 0,
            "duplicates_removed": 3,
        },
        "public": [
            {
                "label": "8xH100, seed 1337",
                "bits_per_byte": 1.2244,
                "artifact_bytes": 15_863_489,
                "note": "10 minutes, FineWeb",
                "source": "https://github.com/openai/parameter-golf",
            }
        ],
    }
    return {**result, "policies": apply_policies(result)}


def make_events(steps: int = 812, seconds: float = 60.0, every: int = 4) -> list[dict[str, Any]]:
    """What `log.jsonl` holds, one mapping per line."""
    chance = random.Random(1)
    events: list[dict[str, Any]] = [{"event": "start", "recipe": "tiny", "seed": 1337}]
    for step in range(every, steps + 1, every):
        progress = step / steps
        loss = 2.45 + 4.45 * math.exp(-step / 28) + 1.1 * math.exp(-step / 260) + chance.gauss(0, 0.07)
        events.append(
            {
                "event": "step",
                "step": step,
                "seconds": seconds * progress,
                "progress": progress,
                "loss": loss,
                "bits_per_byte": loss * 0.5771,
                "tokens": step * 2048,
                "tokens_per_second": 2048 * steps / seconds,
                "lr_scale": min(1.0, 2 * (1 - progress)),
            }
        )
    return [*events, {"event": "note", "text": "trained"}, {"event": "end", "seconds": seconds}]


def make_steps(steps: int = 812, seconds: float = 60.0, every: int = 4) -> list[dict[str, Any]]:
    """The steps among these events."""
    return [event for event in make_events(steps, seconds, every) if event["event"] == "step"]


def write_run(folder: Path, result: dict[str, Any] | None = None, events: list[dict[str, Any]] | None = None) -> Path:
    """Write `result.json` and `log.jsonl` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result if result is not None else make_result()))
    lines = events if events is not None else make_events()
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
