"""Checks of one log against the rules: bytes, clocks, validation set, and how it scored."""

import math
from collections.abc import Iterator
from decimal import Decimal

from caddie.run.contest_sets import CURRENT, FIRST
from caddie.run.policy import CONTEST_2026, overrun_seconds
from caddie.submit.logs import Log, Score, decimals

Told = Iterator[tuple[str, str, int | None]]
"""The rule that a log breaks, the sentence that says so, and the log's line."""
CAP = CONTEST_2026.cap_bytes or 0
TRAINING_MS = 1_000 * (CONTEST_2026.training.seconds or 0)
EVALUATION_S = CONTEST_2026.evaluation.seconds or 0
_BYTES_ALIKE = 1e-3
"""Share of a set's bytes by which a size may differ, since scripts cut the set to whole windows."""
_MOST_SHARDS = 476
"""Training shards of the largest published data set (bytes); a local build of small shards has 1,499."""
_GAIN = Decimal("0.06")
"""Most bits per byte by which a scoring may lower the plain score of its file; merged records gained up to 0.037."""


def check_training(log: Log, script_bytes: int) -> Told:
    """Check the bytes that the log states, and its clock of training."""
    yield from _check_size(log, script_bytes)
    yield from _check_clock(log)


def check_scoring(log: Log, score: Score | None, own_set: bool) -> Told:
    """Check the clock of evaluation, the validation set, and how the log's score came about."""
    yield from _check_evaluation_clock(log, score)
    yield from _check_validation(log, score, own_set)
    yield from _check_score(log, score)


def _check_size(log: Log, script_bytes: int) -> Told:
    total, model, code = (log.value(f"{part}_bytes") for part in ("total", "model", "code"))
    if total is None:
        if model is not None and model > CAP:
            yield "size-cap", f"its model alone has {model:,.0f} bytes, over {CAP:,}", log.line("model_bytes")
        return
    submitted = model + script_bytes if model is not None and script_bytes else total
    line, least = log.line("total_bytes"), min(total, submitted)
    if model is not None and model > CAP >= total:
        yield "size-cap", f"its model has {model:,.0f} bytes, and its total is {total:,.0f}", line
    elif model is not None and code is not None and model + code > total and min(model + code, submitted) > CAP:
        said = f"its model and code have {model + code:,.0f} bytes, over {CAP:,}, and its total is {total:,.0f}"
        yield "size-cap", said, line
    elif least > CAP:
        yield "size-cap", f"{least:,.0f} bytes are {least - CAP:,.0f} over {CAP:,}", line
    elif total > CAP:
        said = f"it counts {code or 0:,.0f} bytes of code, over the cap; with the script as submitted {submitted:,.0f}"
        yield "size-script", said, line
    elif submitted > CAP:
        said = f"it counts {code or 0:,.0f} bytes of code; the script in the folder has {script_bytes:,}, over the cap"
        yield "size-script", said, line


def training_clock(log: Log) -> str:
    """Return the fact that says when training ended: its stop line or its last step, whichever is later."""
    return max(("training_ms", "step_ms"), key=lambda name: log.value(name) or 0)


def _check_clock(log: Log) -> Told:
    stopped = training_clock(log)
    training, steps, calibration = log.value(stopped), log.value("steps"), log.value("calibration_ms") or 0
    if training is None:
        if log.value("model_bytes") is not None:
            yield "training-unknown", "no line states when training stopped", None
    elif training + calibration > TRAINING_MS:
        step = training / steps if steps else 0.0
        training += calibration
        over = f"training took {training / 1e3:,.3f} s of {TRAINING_MS / 1e3:,.0f}"
        over += f", {calibration / 1e3:,.3f} s of calibration included" if calibration else ""
        over += f"; one step takes {step / 1e3:.3f} s" if step else ""
        late = training - TRAINING_MS > 1_000 * overrun_seconds(step / 1e3)
        yield "training-clock" if late else "training-step", over, log.line(stopped)
        if stopped == "training_ms" and "calibration" in log.facts and "own_calibration" not in log.facts:
            said = f"calibration begins after {training / 1e3:,.3f} s of training; on training text it belongs to them"
            yield "calibration-clock", said, log.line("calibration")
    shards = log.value("training_shards")
    if shards is not None and shards > _MOST_SHARDS:
        said = f"{shards:.0f} training shards; no published set has more than {_MOST_SHARDS}: a build of one's own,"
        said += " which holds out 10,000 documents by default and then trains on 80 % of the validation text"
        yield "training-shards", said, log.line("training_shards")


def evaluation_clock(log: Log, score: Score | None) -> tuple[float | None, int | None]:
    """Return seconds and line of the evaluation: a total's, or the score's, which a total may leave out."""
    seconds, line = log.value("evaluation_s"), log.line("evaluation_s")
    if score is not None and score.seconds is not None and score.seconds > (seconds or 0):
        return score.seconds, score.line
    return seconds, line


def _check_evaluation_clock(log: Log, score: Score | None) -> Told:
    seconds, line = evaluation_clock(log, score)
    before = log.value("adaptation_s") or 0
    if seconds is None:
        yield "evaluation-unknown", "no line states the seconds of evaluation", None
    elif seconds + before > EVALUATION_S:
        added = f", {before:.1f} s of adaptation before quantization included" if before else ""
        yield "evaluation-clock", f"evaluation took {seconds + before:,.1f} s of {EVALUATION_S:.0f}{added}", line


def _check_validation(log: Log, score: Score | None, own_set: bool) -> Told:
    tokens, documents = (log.value(f"validation_{unit}") for unit in ("tokens", "documents"))
    other_set = "validation-own" if own_set else "validation-set"
    if documents is not None and documents < (CURRENT.documents or 0):
        said = f"{documents:,.0f} documents are scored, of {CURRENT.documents:,} in the set"
        yield other_set, said, log.line("validation_documents")
    if tokens is None:
        yield "validation-unknown", "no line states the tokens of validation", None
        return
    line = log.line("validation_tokens")
    charged = {one: size for one in log.scores if (size := _charged_bytes(one, tokens))}
    size = next((size for one, size in charged.items() if score is not None and one.bits == score.bits), None)
    if size is None and score is not None:
        yield "score-loss", f"no line has the score {score.bits} with its loss, to four digits both", score.line
    size = size or next(iter(charged.values()), None)
    if size is None or _alike(size, CURRENT.bytes):
        return
    if _alike(size, FIRST.bytes):
        yield "validation-first", f"it is {FIRST.name}", line
    elif any(_alike(other, CURRENT.bytes) for other in charged.values()) and score is not None:
        said = f"loss and bits per byte imply {size / 1e6:,.2f} MB of {CURRENT.bytes / 1e6:,.2f}: they are not of one"
        yield "score-bytes", f"{said} distribution, or bytes are miscounted", score.line
    else:
        said = f"{tokens:,.0f} tokens, loss and bits per byte imply {size / 1e6:,.2f} MB; the set has"
        said += f" {CURRENT.bytes / 1e6:,.2f}: it is not the whole set, or bytes are counted otherwise"
        yield other_set, said, line


def _charged_bytes(score: Score, tokens: float) -> float | None:
    """Return the bytes that a score divided by: tokens times nats per token over nats per byte."""
    if score.loss is None or not score.bits or min(decimals(score.loss), decimals(score.bits)) < 4:
        return None
    return tokens * float(score.loss) / (float(score.bits) * math.log(2))


def _alike(size: float, known: int) -> bool:
    return abs(size / known - 1) <= _BYTES_ALIKE


def _check_score(log: Log, score: Score | None) -> Told:
    if score is None:
        yield "score-missing", "no scoring line was found", None
        return
    if score.live:
        yield "score-live", f"the score is that of `{score.name}`, the weights before the file", score.line
    plain = [one for one in log.final if one.line < score.line and not one.name.startswith("val_bpb")]
    if plain and plain[0].bits - score.bits > _GAIN:
        said = f"`{score.name}` is {plain[0].bits - score.bits:.4f} bits per byte below `{plain[0].name}`;"
        yield "score-gain", f"{said} no merged record's way of scoring gained over {_GAIN}", score.line
    if "before_quantization" in log.facts:
        said = "the weights were trained on validation text before they were quantized and scored on it"
        yield "score-first", said, log.line("before_quantization")
    if "slot" in score.name.lower():
        said = f"`{score.name}`: parameters are fitted on the tokens that are then scored (SLOT)"
        yield "score-first", said, score.line
    for kind, called in (("within_hints", "within-word"), ("word_hints", "word-start")):
        if hints := log.value(kind):
            yield "target-hints", f"{hints:,.0f} {called} hints, whose gate looks at the target", log.line(kind)
    if stop := log.value("force_stop_step"):
        said = f"training ends at step {stop:.0f}, whatever the clock says"
        yield "code-force-stop", said, log.line("force_stop_step")
