"""The rules that a submission folder is checked against, as data, and the findings that refer to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

README, PRACTICE = "contest README", "reviews of pull requests"
FOUR = "four conditions (#1017)"


@dataclass(frozen=True)
class Rule:
    """What a folder must keep, how bad it is not to, and where that is written."""

    severity: Severity
    source: str
    says: str
    unlimited: Severity | None = None
    """Severity on the track without a clock and a rule of seeds; None where the rule says nothing there."""


def _everywhere(severity: Severity, source: str, says: str) -> Rule:
    return Rule(severity, source, says, severity)


RULES: Mapping[str, Rule] = {
    # files
    "file-missing": _everywhere("error", README, "README.md, submission.json, train_gpt.py and a log are there"),
    "file-name": _everywhere("warning", README, "README, JSON and script have the names that the contest gives them"),
    "file-irregular": _everywhere("warning", "this checker", "links, pipes and devices are not followed"),
    "file-unread": _everywhere("warning", "this checker", "files are of a size and encoding that can be read"),
    # submission.json
    "json": _everywhere("error", README, "submission.json is a JSON object"),
    "json-score": _everywhere("error", README, "val_bpb is a number"),
    "json-field": _everywhere("warning", "merged records", "author, date, name and github_id are there"),
    "json-type": _everywhere("warning", "merged records", "a field has the type that merged records give it"),
    "json-spelling": _everywhere("note", "merged records", "a field has the name that merged records give it"),
    # sizes
    "size-cap": _everywhere("error", README, "code and model together are at most 16,000,000 bytes"),
    "size-script": _everywhere("note", "needs 2.4", "the log counts the script that is in the folder"),
    "size-unknown": Rule("warning", README, "each log states the total bytes", "note"),
    "size-claim": _everywhere("warning", PRACTICE, "the JSON's bytes are those of a log"),
    # clocks
    "training-clock": Rule("error", README, "training ends within 600 seconds and two steps"),
    "training-step": Rule("note", PRACTICE, "training ends within 600 seconds"),
    "calibration-clock": Rule("warning", "#677", "calibration on training text ends within the 600 seconds"),
    "training-unknown": Rule("warning", README, "each log states the seconds of training"),
    "evaluation-clock": Rule("error", README, "evaluation ends within 600 seconds"),
    "evaluation-unknown": Rule("note", README, "each log states the seconds of evaluation"),
    # scores
    "score": _everywhere("error", PRACTICE, "the score of each seed stands in its log, to the digit"),
    "score-last": _everywhere("warning", PRACTICE, "the score of each seed is the log's last scoring line"),
    "score-missing": _everywhere("warning", README, "each log has a scoring line"),
    "score-mean": _everywhere("error", PRACTICE, "val_bpb is the mean over the seeds"),
    "score-mean-digits": _everywhere("warning", PRACTICE, "val_bpb is that mean in all its digits"),
    "score-one-seed": Rule("warning", PRACTICE, "val_bpb is the mean over the seeds, not one of them", "note"),
    "score-readme": _everywhere("warning", PRACTICE, "the README states the scores of the JSON"),
    "score-std": _everywhere("note", PRACTICE, "the standard deviation says which one it is"),
    "score-std-wrong": _everywhere("warning", PRACTICE, "the standard deviation follows from the seeds"),
    "score-live": _everywhere("error", "techniques 13.2", "the score is that of the file, not of the trained model"),
    "score-gain": _everywhere("warning", "merged records", "no legal way of scoring gained over 0.06 bits per byte"),
    # seeds and statistics
    "seeds": Rule("warning", README, "three seeds"),
    "seed-log": _everywhere("error", README, "each seed has a log"),
    "seed-name": _everywhere("warning", PRACTICE, "a log is of the seed in its name"),
    "seed-other": Rule("warning", PRACTICE, "logs beside those of the score do not fill up the seeds"),
    "configuration": Rule("error", PRACTICE, "all seeds have one configuration"),
    "p-value": Rule("note", README, "Welch's one-sided test against the base"),
    "p-value-weak": Rule("warning", "#1900, #1902", "p is below 0.25 against the base"),
    "p-value-claim": Rule("warning", PRACTICE, "the stated p-value follows from the seeds"),
    # data
    "validation-set": _everywhere("error", README, "the whole official validation set is scored"),
    "validation-own": _everywhere("warning", README, "the set is the contest's, and not the author's by his own words"),
    "validation-first": _everywhere("note", "#837", "the set is the one of later records"),
    "validation-unknown": _everywhere("note", README, "the log states the tokens of validation"),
    "score-bytes": _everywhere("error", FOUR, "bits per byte follow from the loss and the set's bytes"),
    "training-shards": _everywhere("warning", "#2127", "the training shards are those of a published data set"),
    "training-text": _everywhere(
        "warning", "#2127", "training losses rise and fall with the base's: one text, one order"
    ),
    "held-out-stated": _everywhere("warning", "#2127", "the training text leaves out all 50,000 documents of the set"),
    "held-out-default": _everywhere("warning", "#2127", "the preparation holds out 50,000 documents by default"),
    # how the log says that it scored
    "score-first": _everywhere("error", FOUR, "no update on validation text before its final score"),
    "target-hints": _everywhere("error", FOUR, "hints do not look at the target"),
    # script, by its syntax tree: signs, not proofs
    "code-unread": _everywhere("note", "this checker", "the script can be read without being run"),
    "code-trains-on-validation": _everywhere("warning", FOUR, "no function trains on validation text unscored"),
    "code-update-first": _everywhere("warning", FOUR, "tokens are scored before parameters are fitted on them"),
    "code-rescoring": _everywhere("warning", FOUR, "nothing is scored again after the model learned from it"),
    "code-mixture": _everywhere("warning", FOUR, "a blend of probabilities sums to one over the vocabulary"),
    "code-target": _everywhere("warning", FOUR, "what is scored depends on neither the target nor later places"),
    "code-selection": _everywhere("warning", FOUR, "every token counts, whatever its loss"),
    "code-cut": _everywhere("warning", README, "the whole validation set is scored"),
    "code-live": _everywhere("warning", README, "the model that is scored is the one read back from the file"),
    "code-training-files": _everywhere("warning", README, "training reads no validation shard"),
    "code-target-hints": _everywhere("warning", FOUR, "hints do not look at the target"),
    "code-calibration": _everywhere("warning", README, "quantization is calibrated on training text"),
    "code-bytes": _everywhere("warning", "#1545", "the space before a word is counted once"),
    "code-network": _everywhere("warning", README, "no network at evaluation"),
    "code-hidden": _everywhere("warning", README, "all code is in the script, where it can be read and counted"),
    "code-outside": _everywhere("warning", README, "evaluation reads the folder and the data alone"),
    "code-force-stop": Rule("warning", "#1908", "a forced last step does not ignore the clock"),
}
"""Rule by name."""


@dataclass(frozen=True)
class Finding:
    """A place where a folder breaks a rule, or what there is to know about it."""

    rule: str
    severity: Severity
    file: str
    line: int | None
    sentence: str


class Findings(list[Finding]):
    """Findings of a folder, under the rules of its track."""

    MOST = 500
    """Findings that are kept; a folder with more is beyond help."""

    def __init__(self, unlimited: bool) -> None:
        super().__init__()
        self.unlimited = unlimited

    def add(self, rule: str, file: str, sentence: str, line: int | None = None, note: bool = False) -> None:
        """Add a finding once; as a note where `note` is set; not at all where the rule says nothing on this track."""
        known = RULES[rule]
        severity = known.unlimited if self.unlimited else known.severity
        if severity and len(self) < self.MOST:
            finding = Finding(rule, "note" if note else severity, file, line, sentence)
            self += [] if finding in self else [finding]

    def lower(self, start: int) -> None:
        """Make the findings from `start` on notes: they are about a log that the score does not come from."""
        said = "not a log of the score: "
        self[start:] = [replace(one, severity="note", sentence=said + one.sentence) for one in self[start:]]
