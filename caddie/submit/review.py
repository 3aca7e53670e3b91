"""Check the folder of a contest submission, whoever wrote it; nothing in it is run."""

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

from caddie.errors import UserError, count
from caddie.report.tables import printable, table
from caddie.run.contest_sets import CURRENT
from caddie.submit.logs import Log, parse_log
from caddie.submit.review_claims import Claims, read_claims
from caddie.submit.review_code import check_scripts
from caddie.submit.review_files import Folder, list_folder, read_json
from caddie.submit.review_logs import evaluation_clock, training_clock
from caddie.submit.review_rules import RULES, SEVERITIES, Finding, Findings
from caddie.submit.review_runs import Stated, agree, check_runs, cited, headline
from caddie.submit.review_script import main_script, read_scripts

_MOST_LOGS, _MOST_NUMBERS = 40, 2_000
"""Most logs, and most different numbers of the README, that are read."""
_README_DIGITS = 3
"""Digits after the point that a README may round scores to."""
_HELD_OUT = CURRENT.documents or 0
_VAL_DOCS = re.compile(r"\bval[-_]docs[=: ]{1,2}(\d[\d_,]{0,12})([kK]?)")
_BY_DEFAULT = re.compile(r"(?s)--val-docs[\"'](?:(?!--val|add_arg|default).){0,500}\bdefault\s*=\s*(\d[\d_]{0,12})\b()")
"""Number of documents, and `k` for thousands, as text states it and as an option has it by default."""
_UNLIMITED = re.compile(r"(?:track[-_ ])?non[-_ ]?record", re.IGNORECASE)


@dataclass(frozen=True)
class Review:
    """Findings of a review, and the logs it read."""

    folder: str
    findings: list[Finding]
    logs: list[dict[str, Any]]
    """File, seed, bits per byte, bytes and seconds of each log that the score comes from."""

    def count(self, severity: str) -> int:
        """Return the number of findings of a severity."""
        return sum(finding.severity == severity for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return the review for JSON; a finding states the source of its rule."""
        counts = {f"{severity}s": self.count(severity) for severity in SEVERITIES}
        found = [{**asdict(one), "source": RULES[one.rule].source} for one in self.findings]
        return {"folder": self.folder, **counts, "findings": found, "logs": self.logs}


def review(path: Path, against: Path | None = None) -> Review:
    """Check a submission's folder; `against` is the folder of its base, for the p-value.

    Raises `UserError` if `path` is no folder, cannot be read or is `against`. Every other problem is a finding.
    """
    if against is not None and os.path.realpath(path) == os.path.realpath(against):
        raise UserError(f"{path} is --against itself; name the folder of its base")
    found = Findings()
    folder, stated = _read(path, found)
    size = _check_scripts(folder, stated, found)
    check_runs(stated, _read(against, Findings())[1] if against else None, size, found)
    _check_readme(folder, stated.claims, found)
    _check_held_out(folder, found)
    findings = sorted(found, key=lambda one: (SEVERITIES.index(one.severity), one.file, one.line or 0))
    return Review(str(path), findings, [_facts(log, stated.claims) for log in stated.chosen])


def _read(path: Path, found: Findings) -> tuple[Folder, Stated]:
    """Return the folder and what its JSON and logs say."""
    folder = list_folder(path, found)
    file = _pick(folder, "submission.json", r"submission\w*\.json", found)
    data = read_json(text, file, found) if file and (text := folder.text(file, found)) is not None else {}
    found.unlimited = _unlimited(path, data)
    claims = read_claims(data, file, found) if file and data else Claims(file or "submission.json")
    names = [name for name in folder.sizes if _is_log(name)]
    if len(names) > _MOST_LOGS:
        said = f"of {len(names)} logs the first {_MOST_LOGS} were read, and neither this one nor any after it"
        found.add("file-unread", names[_MOST_LOGS], said)
    texts = [(name, folder.text(name, found)) for name in names[:_MOST_LOGS]]
    unread = len(names) > sum(text is not None for _, text in texts)
    logs = [parse_log(name, text) for name, text in texts if text]
    logs = [log for log in logs if log.scores or log.value("total_bytes") is not None]
    if not logs:
        said = "no log that was read is of a run" if unread else "there is no log of a run"
        found.add("file-missing", "train.log", said, note=unread)
    return folder, Stated(claims, logs, cited(logs, claims), unread)


def _unlimited(path: Path, data: Mapping[str, Any]) -> bool:
    """True if the folder is of the track without a clock, by its parent folder's name, else by its JSON."""
    above = Path(os.path.realpath(path)).parent.name  # a link to a folder, or `..`, changes no track
    return bool(_UNLIMITED.match(above if above.startswith("track_") else str(data.get("track") or "")))


def _is_log(name: str) -> bool:
    last = name.rpartition("/")[2]
    return last.endswith(".log") or (last.endswith(".txt") and not re.match("requirements|readme|license", last, re.I))


def _pick(folder: Folder, wanted: str, like: str, found: Findings) -> str | None:
    """Return the name of a file that must be there, or of one like it; None with a finding if there is neither."""
    if wanted in folder.sizes:
        return wanted
    if near := [name for name in folder.sizes if re.fullmatch(like, name, re.I)]:
        found.add("file-name", near[0], f"the contest calls it {wanted}")
        return near[0]
    found.add("file-missing", wanted, f"there is no {wanted}")
    return None


def _check_scripts(folder: Folder, stated: Stated, found: Findings) -> int:
    """Check the script and the files that it names; return the bytes of the training code."""
    if (main := main_script(folder)) is None:
        found.add("file-missing", "train_gpt.py", "there is no script train_gpt.py")
        return 0
    if main != "train_gpt.py":
        found.add("file-name", main, "the contest calls it train_gpt.py")
    if not folder.sizes[main]:
        found.add("file-missing", main, "the script is empty")
    scripts, size = read_scripts(folder, main, found)
    off = [
        {name for name, (value, _) in log.settings.items() if re.fullmatch(r"0(\.0*)?", value)} for log in stated.chosen
    ]
    try:
        check_scripts(scripts, set.intersection(*off) if off else set(), found)
    except RecursionError:
        found.add("code-unread", main, "an expression is nested too deeply; not all of its source was checked")
    return size


def _check_readme(folder: Folder, claims: Claims, found: Findings) -> None:
    """Check that the README states the scores, to three digits after the point or more."""
    name = _pick(folder, "README.md", r"\w*readme(?:\.\w+)?", found)
    if name is None or (text := folder.text(name, found)) is None:
        return
    if forced := re.search(r"FORCE_STOP_STEP\W{1,3}([1-9]\d{0,9})", text):
        said = f"training ends at step {forced[1]}, whatever the clock says"
        found.add("code-force-stop", name, said, text.count("\n", 0, forced.start()) + 1)
    if claims.score is None:
        return
    numbers = dict.fromkeys(re.findall(r"(?<![\d.])\d\.\d{3,18}(?!\d)", text))
    written = [Decimal(number) for number in islice(numbers, _MOST_NUMBERS)]
    for what, score in (("val_bpb", claims.score), *((f"seed {k}", v) for k, v in claims.scores.items())):
        if not any(agree(number, score, _README_DIGITS) for number in written):
            found.add("score-readme", name, f"it does not state {what} {score}")


def _check_held_out(folder: Folder, found: Findings) -> None:
    """Check how many documents training leaves out: as README and JSON state, and as scripts do by default."""
    for name in folder.sizes:
        stating = re.fullmatch(r"[^/]+\.md|submission\w*\.json", name, re.I)
        preparing = re.search(r"(?:prepare|tokenize|download)\w*\.py$", name)
        text = ((stating or preparing) and folder.text(name, found)) or ""
        for match in (_BY_DEFAULT if preparing else _VAL_DOCS).finditer(text):
            if (count := int(re.sub(r"\D", "", match[1])) * (1_000 if match[2] else 1)) < _HELD_OUT:
                rest = f"of {_HELD_OUT:,} in the set: training text"
                rule, said = "held-out-stated", f"{count:,} documents were held out, {rest} holds the others"
                if preparing:
                    rule, said = "held-out-default", f"--val-docs is {count:,} by default, {rest} would hold the others"
                    said += ", and the log cannot show whether it was given"
                line = text.count("\n", 0, match.start()) + 1
                found.add(rule, name, said, line)
                break


def _facts(log: Log, claims: Claims) -> dict[str, Any]:
    score = headline(log, claims)
    training = log.value(training_clock(log))
    evaluation_seconds, _ = evaluation_clock(log, score)
    return {
        "file": log.file,
        "seed": log.seed,
        "bits_per_byte": float(score.bits) if score else None,
        "total_bytes": log.value("total_bytes"),
        "training_seconds": training / 1e3 if training is not None else None,
        "evaluation_seconds": evaluation_seconds,
    }


def review_table(result: Review) -> str:
    """Format a review for a terminal."""
    lines: list[str] = []
    if result.logs:
        names = ("file", "seed", "bits_per_byte", "total_bytes", "training_seconds", "evaluation_seconds")
        header = ("log", "seed", "bits per byte", "bytes", "training s", "evaluation s")
        logs = ({**log, "seed": None if log["seed"] is None else str(log["seed"])} for log in result.logs)
        lines += [table([[log[name] for name in names] for log in logs], header), ""]
    rows = []
    for one in result.findings:
        place = f"{one.file}:{one.line}" if one.line else one.file
        rows.append((one.severity, one.rule, f"{place}: {one.sentence}"))
    if rows:
        lines += [table(rows, ("", "rule", "where and what")), ""]
    counts = ", ".join(count(result.count(one), one) for one in SEVERITIES)
    return "\n".join([*lines, f"{printable(result.folder)}: {counts}"])
