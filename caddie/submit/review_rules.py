"""The rules that a submission folder is checked against, as data, and the findings that refer to them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

README, PRACTICE = "contest README", "reviews of pull requests"
FOUR = "four conditions (#1017)"


@dataclass(frozen=True)
class Rule:
    """Requirement on a folder, the severity of breaking it, and its source."""

    severity: Severity
    source: str
    says: str
    unlimited: Severity | Literal["same"] | None = "same"
    """Severity on the track that has no clock and no rule on seeds; None if the rule does not apply there."""


RULES: Mapping[str, Rule] = {
    # files
    "file-missing": Rule("error", README, "README.md, submission.json, train_gpt.py and a log are there"),
    "file-name": Rule("warning", README, "README, JSON and script have the names that the contest gives them"),
    "file-irregular": Rule("warning", "this checker", "links, pipes and devices are not followed"),
    "file-unread": Rule("warning", "this checker", "files are of a size and encoding that can be read"),
    # submission.json
    "json": Rule("error", README, "submission.json is a JSON object"),
    "json-score": Rule("error", README, "val_bpb is a number"),
    "json-field": Rule("warning", "merged records", "author, date, name and github_id are there"),
    "json-type": Rule("warning", "merged records", "a field has the type that merged records give it"),
    "json-spelling": Rule("note", "merged records", "a field has the name that merged records give it"),
    # sizes
    "size-cap": Rule("error", README, "code and model together are at most 16,000,000 bytes"),
    "size-script": Rule("note", PRACTICE, "the log counts the script that is in the folder"),
    "size-unknown": Rule("warning", README, "each log states the total bytes", "note"),
    "size-claim": Rule("warning", PRACTICE, "the JSON's bytes are those of a log"),
    # clocks
    "training-clock": Rule("error", README, "training ends within 600 seconds and two steps, one second at most", None),
    "training-step": Rule("note", PRACTICE, "training ends within 600 seconds", None),
    "calibration-clock": Rule("warning", "#677", "calibration on training text ends within the 600 seconds", None),
    "training-unknown": Rule("warning", README, "each log states the seconds of training", None),
    "evaluation-clock": Rule("error", README, "evaluation ends within 600 seconds", None),
    "evaluation-unknown": Rule("note", README, "each log states the seconds of evaluation", None),
    # scores
    "score": Rule("error", PRACTICE, "the score of each seed stands in its log, to the digit"),
    "score-left-out": Rule("error", PRACTICE, "each seed that is listed counts in the mean"),
    "score-last": Rule("warning", PRACTICE, "the score of each seed is the log's last scoring line"),
    "score-missing": Rule("warning", README, "each log has a scoring line"),
    "score-mean": Rule("error", PRACTICE, "val_bpb is the mean over the seeds"),
    "score-mean-digits": Rule("warning", PRACTICE, "val_bpb is that mean in all its digits"),
    "score-one-seed": Rule("warning", PRACTICE, "val_bpb is the mean over the seeds, not one of them", "note"),
    "score-readme": Rule("warning", PRACTICE, "the README states the scores of the JSON"),
    "score-std": Rule("note", PRACTICE, "the standard deviation says which one it is"),
    "score-std-wrong": Rule("warning", PRACTICE, "the standard deviation follows from the seeds"),
    "score-live": Rule("error", PRACTICE, "the score is that of the file, not of the trained model"),
    "score-gain": Rule(
        "warning", "merged records", "no merged record gained over 0.06 bits per byte by its way of scoring"
    ),
    # seeds and statistics
    "seeds": Rule("warning", README, "three seeds", None),
    "seed-log": Rule("error", README, "each seed has a log"),
    "seed-name": Rule("warning", PRACTICE, "a log is of the seed in its name"),
    "seed-other": Rule("warning", PRACTICE, "logs beside those of the score do not fill up the seeds", None),
    "seed-copy": Rule("error", PRACTICE, "each seed has a run of its own"),
    "seed-left-out": Rule("warning", PRACTICE, "every seed of the configuration counts, not the best of them"),
    "configuration": Rule("error", PRACTICE, "all seeds have one configuration", None),
    "configuration-names": Rule("warning", PRACTICE, "the logs of all seeds print the same settings", None),
    "p-value": Rule("note", README, "Welch's one-sided test against the base"),
    "p-value-weak": Rule("warning", "#1900, #1902", "p is below 0.25 against the base", "note"),
    "p-value-claim": Rule("warning", PRACTICE, "the stated p-value follows from the seeds", None),
    # data
    "validation-set": Rule("error", README, "the whole official validation set is scored"),
    "validation-own": Rule("warning", README, "the set is the contest's, and not the author's by his own words"),
    "validation-claim": Rule("warning", PRACTICE, "the JSON's tokens of validation are those of a log"),
    "validation-first": Rule("note", "#837", "the set is the one of later records"),
    "validation-unknown": Rule("warning", README, "each log states the tokens of validation", "note"),
    "score-loss": Rule("warning", PRACTICE, "a log has the loss beside the bits per byte, which says their bytes"),
    "score-bytes": Rule("error", FOUR, "bits per byte follow from the loss and the set's bytes"),
    "training-shards": Rule("warning", "#2127", "the training shards are those of a published data set"),
    "training-text": Rule("warning", "#2127", "training losses rise and fall with the base's: one text, one order"),
    "held-out-stated": Rule("warning", "#2127", "the training text leaves out all 50,000 documents of the set"),
    "held-out-default": Rule("warning", "#2127", "the preparation holds out 50,000 documents by default"),
    # how the log says that it scored
    "score-first": Rule("error", FOUR, "no update on validation text before its final score"),
    "target-hints": Rule("error", FOUR, "hints do not look at the target"),
    # script, by its syntax tree: signs, not proofs
    "code-unread": Rule("note", "this checker", "the script can be read without being run"),
    "code-syntax": Rule("warning", "this checker", "the script is Python"),
    "code-trains-on-validation": Rule("warning", FOUR, "no function trains on validation text unscored"),
    "code-update-first": Rule("warning", FOUR, "tokens are scored before parameters are fitted on them"),
    "code-rescoring": Rule("warning", FOUR, "nothing is scored again after the model learned from it"),
    "code-mixture": Rule("warning", FOUR, "a blend of probabilities sums to one over the vocabulary"),
    "code-target": Rule("warning", FOUR, "what is scored depends on neither the target nor later places"),
    "code-selection": Rule("warning", FOUR, "every token counts, whatever its loss"),
    "code-cut": Rule("warning", README, "the whole validation set is scored"),
    "code-live": Rule("warning", README, "the model that is scored is the one read back from the file"),
    "code-training-files": Rule("warning", README, "training reads no validation shard"),
    "code-target-hints": Rule("warning", FOUR, "hints do not look at the target"),
    "code-calibration": Rule("warning", README, "quantization is calibrated on training text"),
    "code-bytes": Rule("warning", "#1545", "the space before a word is counted once"),
    "code-network": Rule("warning", README, "no network at evaluation"),
    "code-hidden": Rule("warning", README, "all code is in the script, where it can be read and counted"),
    "code-outside": Rule("warning", README, "evaluation reads the folder and the data alone"),
    "code-force-stop": Rule("warning", "#1908", "a forced last step does not ignore the clock", None),
}


@dataclass(frozen=True)
class Finding:
    """A place where a folder breaks a rule, or a note about it."""

    rule: str
    severity: Severity
    file: str
    line: int | None
    sentence: str


class Findings(list[Finding]):
    """Findings of a folder, under the rules of its track."""

    MOST = 100
    """Findings of one rule and severity that are kept, so that many of one kind hide no other."""
    LONGEST = 1_000
    """Characters of a sentence: a script may have names and paths of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.unlimited = False
        self._counts = Counter[tuple[str, Severity]]()

    def add(self, rule: str, file: str, sentence: str, line: int | None = None, note: bool = False) -> None:
        """Add a finding once; as a note where `note` is set; not at all where the rule says nothing on this track."""
        known = RULES[rule]
        sentence = sentence if len(sentence) <= self.LONGEST else f"{sentence[: self.LONGEST - 1]}…"
        severity = known.unlimited if self.unlimited and known.unlimited != "same" else known.severity
        severity = severity and ("note" if note else severity)
        if severity and self._counts[rule, severity] < self.MOST:
            finding = Finding(rule, severity, file, line, sentence)
            if finding not in self:
                self._counts[rule, severity] += 1
                more = "; more of this rule are not shown" if self._counts[rule, severity] == self.MOST else ""
                self.append(replace(finding, sentence=sentence + more))
