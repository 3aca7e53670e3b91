"""Lines of a training log as the contest's scripts print them, made of the fields of `result.json`.

A field that is None is left out with its line. Spelling and order are those of the merged records' logs, so that
`caddie review` and grep work on both.
"""

from collections.abc import Mapping
from typing import Any

from caddie.run.policy import CONTEST_2026, counted_bytes

_TRAINED = {
    "trained_plain": "diagnostic pre-quantization",
    "averaged_plain": "diagnostic pre-quantization post-average",
}
"""Stage in `scores` of the trained weights to the name of its line."""
_PACKED = {
    "quantized_plain": "quantized",
    "quantized_sliding": "quantized_sliding_window",
    "quantized_adaptive": "quantized_ttt",
}
"""Stage in `scores` of the packed file to the name of its line; the last stage that a run has is its score."""


def before_training(facts: Mapping[str, Any]) -> list[str]:
    """Return the lines of what is known before the first step: `facts` by their names in the log."""
    return [f"{name}:{value}" for name, value in facts.items() if value is not None]


def step_line(event: Mapping[str, Any], steps: int | None) -> str:
    """Return the line of a `step` event of `log.jsonl`; `steps` is the number of all steps, where that is known."""
    of = f"/{steps}" if steps else ""
    milliseconds = 1000 * event["seconds"]
    return (
        f"step:{event['step']}{of} train_loss:{event['loss']:.4f} train_time:{milliseconds:.0f}ms "
        f"step_avg:{milliseconds / event['step']:.2f}ms"
    )


def after_training(result: Mapping[str, Any], budget: int | None) -> list[str]:
    """Return the lines of the end of training; `budget` are the steps that it may take, None without a limit."""
    training, seconds = result["training"], result["seconds"]
    lines = []
    if budget is None or training["steps"] < budget:
        step = f"{training['steps']}/{budget or training['steps']}"
        lines.append(f"stopping_early: wallclock_cap train_time: {1000 * seconds['train']:.0f}ms step: {step}")
    if training["peak_bytes"] is not None:
        lines.append(f"peak memory allocated: {training['peak_bytes'] >> 20} MiB")
    if "calibrate" in seconds:
        lines.append(f"calibrate_time:{1000 * seconds['calibrate']:.0f}ms")
    return [*lines, *_score_lines(result, _TRAINED)]


def after_scoring(result: Mapping[str, Any], code_bytes: int) -> list[str]:
    """Return the lines of the file's bytes, its scores (the last is the run's), seconds of evaluation and hash."""
    artifact = counted_bytes(CONTEST_2026, result["ledger"]["parts"])  # the tokenizer is not counted
    last = [score for stage in _PACKED if (score := result["scores"].get(stage))][-1]
    return [
        f"Serialized model caddie: {artifact} bytes",
        f"Code size: {code_bytes} bytes",
        f"Total submission size caddie: {artifact + code_bytes} bytes",
        *_score_lines(result, _PACKED),
        f"final_caddie_roundtrip {_score(last)}",
        f"final_caddie_roundtrip_exact val_loss:{last['nats_per_token']:.8f} val_bpb:{last['bits_per_byte']:.8f}",
        f"eval_load_time:{result['evaluation']['load']:.1f}s eval_warm_up_time:{result['evaluation']['warm_up']:.1f}s",
        f"total_eval_time:{result['evaluation']['score']:.1f}s",
        f"artifact_sha256:{result['sha256']['artifact']}",
    ]


def _score_lines(result: Mapping[str, Any], stages: Mapping[str, str]) -> list[str]:
    return [f"{name} {_score(score)}" for stage, name in stages.items() if (score := result["scores"].get(stage))]


def _score(score: Mapping[str, Any]) -> str:
    milliseconds = 1000 * score["seconds"]
    return f"val_loss:{score['nats_per_token']:.8f} val_bpb:{score['bits_per_byte']:.8f} eval_time:{milliseconds:.0f}ms"
