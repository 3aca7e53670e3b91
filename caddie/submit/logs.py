"""The lines of training logs as contest scripts write them: the one place that knows their formats.

A log may hold the script's own source, whose format strings and comments are no results, and its lines may carry a
prefix: a line number, a time, or the process, as in `[default0]:`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import groupby, islice
from typing import NamedTuple

_MOST_COLUMNS, _MOST_LINES, _MOST_SCORES = 400, 50_000, 200
"""Columns of a line, lines of a log, and scoring lines from its end that are read; the longest public log has 20,000
lines."""
_FACT = re.compile(
    r"seed|stopping|Total|budget:|[aA]rtifact|Serialized|Code size|val_|val |train_sh|_time:|gate=|quant|stop_|params:"
    r"|gptq:|total_docs"
)
"""Only lines with one of these can hold a fact."""
_PREFIX = re.compile(r"\x1b\[[\d;]{0,8}m|\[[\w:]{1,20}\]:?|\d+:(?=\D)|\d{9,}\.\d+ ")
_NO_DATE = r"(?!20\d\d[-_.]?[01]\d[-_.]?[0-3]\d(?!\d))"
_SEPARATOR = re.compile(r"={60,}\s*")
_SOURCE = re.compile(r"\s{0,8}(?:import |from \w+ import |def |class |@)")
_SOURCE_LINES = 3
"""A part between separators with at least this many lines of Python is source."""
_SETTING = re.compile(r"  ([a-z]\w*): (.*)")
_PAIR = re.compile(r"\b([a-z]\w{2,40})[:=]([-\w.]+)(?=\s|$)")
_SETTINGS_LINE = re.compile(
    r"\b(?:train_batch_tokens|tie_embeddings|num_heads|model_params|world_size|recipe_sha256):|activation_type="
)
_LOSS = re.compile(r"val_loss[:=]\s{0,12}(\d{1,3}\.\d{1,12})")
_BITS = re.compile(r"val_bpb[:=]\s{0,12}(\d{1,3}\.\d{1,12})")
_SECONDS = re.compile(r"\b(?:eval_time|time|elapsed)[:=] ?(\d+(?:\.\d+)?) ?(ms|s|min)\b")
_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0}
_UNFINISHED = re.compile(r"/\d|epoch|batch|chunk|\bstep|progress|running", re.IGNORECASE)
"""In the name of a scoring line: it is an intermediate result."""
_LIVE = re.compile(r"pre-?_?quant|post[-_ ]ema|\bswa\b|\bema\b|^raw", re.IGNORECASE)
"""In the name of a scoring line: it scored the trained weights, not the file."""

_LEARNED = re.compile(r"^(?:step:)?(\d{1,9})/\d+ train_loss: ?(\d{1,3}\.\d{1,9})")
_INTEGER = r"\s{0,12}(\d{1,3}(?:,\d{3}){1,5}|\d{1,18})"
_NUMBER = r"\s{0,12}(\d{1,3}(?:,\d{3}){1,5}(?:\.\d{1,9})?|\d{1,18}(?:\.\d{1,9})?)"
_FACTS: Mapping[str, tuple[str, ...]] = {
    "seed": (rf"^seed[:=]{_INTEGER}\s*$", rf"^  seed:{_INTEGER}\s*$", r"^params:.* s:(\d{1,18})\s*$"),
    "training_ms": (rf"^stopping_early: ?wallclock_cap train_time:{_NUMBER}\s?ms",),
    "step_ms": (rf"^step:\d+(?:/\d+)? .*train_time:{_NUMBER}\s?ms",),
    "calibration_ms": (rf"^calibrate_time:{_NUMBER}ms",),
    "steps": (rf"^stopping_early: ?wallclock_cap .*step:{_INTEGER}/",),
    "total_bytes": (
        rf"^Total submission size[^:]{{0,40}}:{_INTEGER} bytes",
        rf"Total submission:{_INTEGER} bytes",
        r"^budget:(\d{1,18})/\d+ ",
        rf"^artifact_bytes:{_INTEGER}\s*$",
        rf"^Artifact:{_INTEGER} bytes",
    ),
    "model_bytes": (rf"^Serialized model [^:]{{1,40}}:{_INTEGER} bytes",),
    "code_bytes": (rf"^Code size(?: \(compressed\))?:{_INTEGER} bytes", r"^artifact:.* code:(\d{1,18})\s*$"),
    "validation_tokens": (rf"^val[_ ]tokens:{_INTEGER}\s*$", rf"^val_loader:shards pattern=.* tokens:{_INTEGER}\s*$"),
    "validation_documents": (rf"\btotal_docs[:=]{_INTEGER}\b",),
    "training_shards": (rf"^train_shards:{_INTEGER}\s*$", rf"^train_loader:dataset:.* train_shards:{_INTEGER}\s*$"),
    "evaluation_s": (rf"^total_eval_time:{_NUMBER}(?:\s?s|\s*$)",),
    "within_hints": (rf"\bwithin_gate={_INTEGER}\b",),
    "word_hints": (rf"\bword_gate={_INTEGER}\b",),
    "before_quantization": (r"^pre_?-?quant_?-?ttt:? ?(?:epoch|start|done)()", r"^post-prequant-ttt()"),
    "calibration": (r"^gptq:(?:calibrating|collected hessians)()",),
    "own_calibration": (r"^gptq:.*(?:autoregressive|self-?gen)()",),
    "adaptation_s": (r"^pre_?quant_ttt: ?done .*time[:=](\d{1,6}(?:\.\d{1,9})?)",),
    "force_stop_step": (rf"^  force_stop_step:{_INTEGER}\s*$", rf"\bforce_stop_step[:=]{_INTEGER}\b"),
}
"""Patterns of each fact. The last line that matches counts, except for those of `_LARGEST`. A total that is not stated
is the sum of model and code. A pattern captures a number or nothing."""
_LARGEST = ("training_ms", "step_ms", "within_hints", "word_hints")
"""Facts of which the largest counts, as a later line takes none back."""
_COMPILED = {name: [re.compile(pattern) for pattern in patterns] for name, patterns in _FACTS.items()}


class Fact(NamedTuple):
    """A number that a log states, and its line; 0 where only the line matters."""

    value: float
    line: int


@dataclass(frozen=True)
class Score:
    """A scoring line: bits per byte as written, nats per token and seconds where it has them."""

    line: int
    name: str
    bits: Decimal
    loss: Decimal | None
    seconds: float | None

    @property
    def live(self) -> bool:
        """True if its name says that the trained weights were scored, not the file."""
        return bool(_LIVE.search(self.name))


@dataclass
class Log:
    """Values read from one log."""

    file: str
    facts: dict[str, Fact] = field(default_factory=dict)
    scores: list[Score] = field(default_factory=list)
    settings: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Setting to its text and line."""
    losses: dict[int, float] = field(default_factory=dict)
    """Step to training loss in nats."""

    def value(self, name: str) -> float | None:
        """Return a fact's number, or None."""
        return self.facts[name].value if name in self.facts else None

    def line(self, name: str) -> int | None:
        """Return a fact's line, or None."""
        return self.facts[name].line if name in self.facts else None

    @property
    def seed(self) -> int | None:
        """The seed in the file's name, as in `train_seed42.log`, else the one that the log states."""
        name = self.file.rpartition("/")[2]
        # The word comes first, as `s64` may be a stride, and `train600` seconds.
        for before in (r"(?i:seed)[_-]?", rf"(?:_s|log_|train){_NO_DATE}"):
            if named := re.search(rf"{before}(\d{{1,18}})(?!\d)", name):
                return int(named[1])
        return self.stated_seed

    @property
    def stated_seed(self) -> int | None:
        """The seed that the log states."""
        return int(self.facts["seed"].value) if "seed" in self.facts else None

    @property
    def final(self) -> list[Score]:
        """Scores of the file, in order; the last is the result."""
        return [score for score in self.scores if not score.live]


def parse_log(file: str, text: str) -> Log:
    """Return what the log of this name and text states."""
    log, listed = Log(file), False
    for number, line in _results(text):
        for name, patterns in _COMPILED.items() if _FACT.search(line) else ():
            for pattern in patterns:
                if match := pattern.search(line):
                    stated = match[1].replace(",", "") or "0"
                    fact = Fact(float(stated) if "." in stated else int(stated), number)
                    if name not in _LARGEST or fact.value >= (log.value(name) or 0):
                        log.facts[name] = fact
        setting = _SETTING.match(line)
        listed = line.startswith("Hyperparameters:") or (listed and setting is not None)
        if listed and setting:
            log.settings[setting[1]] = (setting[2].strip(), number)
        elif _SETTINGS_LINE.search(line):
            log.settings.update((name, (value, number)) for name, value in _PAIR.findall(line))
        if learned := _LEARNED.match(line):
            log.losses[int(learned[1])] = float(learned[2])
        if bits := _BITS.search(line):
            _add_score(log, number, line, bits)
    model, code = log.value("model_bytes"), log.value("code_bytes")
    if "total_bytes" not in log.facts and model is not None and code is not None:
        log.facts["total_bytes"] = Fact(model + code, log.facts["model_bytes"].line)
    return log


def _add_score(log: Log, number: int, line: str, bits: re.Match[str]) -> None:
    name = re.split(r"val_(?:loss|bpb)[:=]", line, maxsplit=1)[0].strip()
    if _UNFINISHED.search(name) or "running" in line or not (name[:1].isalpha() or name == ""):
        return
    name = re.sub(r"\s+stride:\d+|:done$", "", name) or "val_bpb"
    loss, time = _LOSS.search(line), _SECONDS.search(line)
    seconds = float(time[1]) * _UNITS[time[2]] if time else None
    if seconds is None:  # a line with more digits follows the one with the seconds
        same = (score.seconds for score in reversed(log.scores) if score.name == name.removesuffix("_exact"))
        seconds = next(same, None)
    log.scores.append(Score(number, name, Decimal(bits[1]), Decimal(loss[1]) if loss else None, seconds))
    del log.scores[:-_MOST_SCORES]


def _results(text: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line outside the source, without its prefix."""
    lines: list[tuple[int, str]] = []
    wholes = enumerate(text.split("\n", _MOST_LINES)[:_MOST_LINES], 1)
    parts = ((number, part) for number, whole in wholes for part in whole.split("\r", _MOST_LINES))
    for number, whole in islice(parts, _MOST_LINES):  # a progress bar writes over its line
        line = whole[:_MOST_COLUMNS]
        prefix = _PREFIX.match(line)
        lines.append((number, line[prefix.end() :] if prefix else line))
    for separates, part in groupby(lines, lambda line: bool(_SEPARATOR.fullmatch(line[1]))):
        held = [*part]
        if not separates and sum(bool(_SOURCE.match(line)) for _, line in held) < _SOURCE_LINES:
            yield from (line for line in held if "{" not in line[1])  # a format string, if no separator precedes source


def decimals(value: Decimal) -> int:
    """Return the digits after the point."""
    return max(0, -int(value.as_tuple().exponent))
