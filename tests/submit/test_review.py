"""Review of a submission folder: each rule fires on the folder that breaks it, and on no folder that does not."""

import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from submission_folder import BYTES_PER_TOKEN_BITS, SCORES, SCRIPT, TOKENS, score_line, submission, write_submission

from caddie.cli import app
from caddie.errors import UserError
from caddie.submit import review_rules as rules_of
from caddie.submit.review import Review, review, review_table
from caddie.submit.review_rules import RULES


def rules(result: Review, severity: str | None = None) -> set[str]:
    return {one.rule for one in result.findings if severity in (None, one.severity)}


def found(result: Review, rule: str) -> Any:
    return next(one for one in result.findings if one.rule == rule)


def test_a_folder_that_keeps_every_rule_has_neither_errors_nor_warnings(tmp_path: Path) -> None:
    result = review(write_submission(tmp_path / "a"))
    assert rules(result) == {"score-std"}  # which says that it is the sample's
    assert "is the sample standard" in found(result, "score-std").sentence
    assert [(log["seed"], log["bits_per_byte"]) for log in sorted(result.logs, key=lambda log: log["file"])] == [
        (1337, 1.10212343),
        (42, 1.10012341),
        (7, 1.10112342),
    ]
    assert result.logs[0]["total_bytes"] == 15_000_500
    assert result.logs[0]["training_seconds"] == 599.99
    assert result.logs[0]["evaluation_seconds"] == 90.0


SIZE = {"15000000 bytes": "15999900 bytes", "15000500 bytes": "16000400 bytes"}
SLIDING = "final_int6_sliding_window_exact"

LOGS: dict[str, tuple[str, Mapping[str, str]]] = {
    "size": ("size-cap", SIZE),
    "training": ("training-clock", {"train_time:599990ms": "train_time:600500ms"}),
    "training step": ("training-step", {"train_time:599990ms": "train_time:600100ms"}),
    "training unknown": ("training-unknown", {"stopping_early": "stopping", "step:1000/": "at "}),
    "training by its last step": (
        "training-clock",
        {"stopping_early": "stopping", "train_time:60000ms": "train_time:601500ms"},
    ),
    "training by a step after its end": (
        "training-clock",
        {"stopping_early": "step:12000/20000 train_loss:2.0 train_time:720000ms step_avg:60.00ms\nstopping_early"},
    ),
    "training in fractions": ("training-clock", {"train_time:599990ms": "train_time:720,000.5ms"}),
    "training with calibration": ("training-clock", {"Code size": "calibrate_time:20000ms\nCode size"}),
    "calibration": (
        "calibration-clock",
        {"train_time:599990ms": "train_time:600100ms", "Code size": "gptq:calibrating with 256 batches\nCode size"},
    ),
    "evaluation": ("evaluation-clock", {"eval_time:90000ms": "eval_time:600100ms"}),
    "evaluation total": ("evaluation-clock", {"eval_time:90000ms": "eval_time:90000ms\ntotal_eval_time:601.0s"}),
    "evaluation beside a smaller total": (
        "evaluation-clock",
        {"eval_time:90000ms": "eval_time:900000ms\ntotal_eval_time:90.0s"},
    ),
    "evaluation without decimals": (
        "evaluation-clock",
        {"eval_time:90000ms": "eval_time:90000ms\ntotal_eval_time: 688s"},
    ),
    "evaluation with adaptation": (
        "evaluation-clock",
        {"Serialized model:": "prequant_ttt:done total_time=523.0s\nSerialized model:"},
    ),
    "evaluation unknown": ("evaluation-unknown", {" eval_time:90000ms": ""}),
    "validation cut": ("validation-set", {f"val_tokens: {TOKENS}": "val_tokens: 9662464"}),
    "validation documents": ("validation-set", {"Code size": "ttt_phased: total_docs:10000 prefix_docs:1\nCode size"}),
    "validation first": ("validation-first", {f"val_tokens: {TOKENS}": "val_tokens: 63947000"}),
    "validation unknown": ("validation-unknown", {f"val_tokens: {TOKENS}": "tokens"}),
    "shards": ("training-shards", {"train_shards: 80": "train_shards: 1499"}),
    "within hints": ("target-hints", {"Serialized model:": "hints within_gate=9866847 word_gate=0\nSerialized model:"}),
    "word hints": ("target-hints", {"Serialized model:": "hints within_gate=0 word_gate=5\nSerialized model:"}),
    "hints with commas": ("target-hints", {"Code size": "hints within_gate=9,866,847 word_gate=0\nCode size"}),
    "hints that a later line takes back": (
        "target-hints",
        {"Code size": "hints within_gate=0 word_gate=5\nhints within_gate=0 word_gate=0\nCode size"},
    ),
    "before quantization": ("score-first", {"Serialized model:": "prequant_ttt:epoch 1/21 lr=1\nSerialized model:"}),
    "slot": ("score-first", {SLIDING: "final_slot_exact"}),
    "gain": ("score-gain", {score_line("final_int6_roundtrip", "1.13000000"): score_line("final", "1.17000000")}),
    "live": ("score-live", {SLIDING: "post_ema sliding"}),
    "forced": ("code-force-stop", {"  matrix_lr: 0.02": "  force_stop_step: 4945"}),
    "total": ("size-unknown", {"Total submission": "Submission", "Code size": "Code"}),
    "model alone": (
        "size-cap",
        {
            "Total submission": "Submission",
            "Code size": "Code",
            "model int6+brotli: 15000000": "model int6+brotli: 25000000",
        },
    ),
    "total of its parts": (
        "size-cap",
        {"Total submission": "Submission", "model int6+brotli: 15000000": "model int6: 15999900"},
    ),
}


@pytest.mark.parametrize("case", LOGS)
def test_what_a_log_shows(case: str, tmp_path: Path) -> None:
    rule, replace = LOGS[case]
    result = review(write_submission(tmp_path / "a", replace=replace))
    one = found(result, rule)
    assert one.severity == RULES[rule].severity
    assert one.file.startswith("train_seed")
    assert rules(result, "error") <= {rule, *(["score-first"] if "adaptation" in case else [])}


def test_a_score_that_is_not_the_last_of_its_log(tmp_path: Path) -> None:
    folder = write_submission(tmp_path / "a")
    with (folder / "train_seed7.log").open("a") as log:
        log.write(score_line("final_int6_ttt", "1.33603201", " eval_time:405410ms") + "\n")
    one = found(review(folder), "score-last")
    assert (one.severity, one.file) == ("warning", "train_seed7.log")
    assert "final_int6_ttt" in one.sentence
    assert not rules(review(folder), "error")


def test_hints_that_number_zero_are_none(tmp_path: Path) -> None:
    replace = {"Serialized model:": "hints within_gate=0 word_gate=0 agree2plus=0\nSerialized model:"}
    assert "target-hints" not in rules(review(write_submission(tmp_path / "a", replace=replace)))


def test_bits_per_byte_that_do_not_follow_from_the_loss(tmp_path: Path) -> None:
    """As where a mixture over bytes is reported beside the loss of the model alone."""
    line = score_line(SLIDING, SCORES[42])
    mixed = line.replace(SCORES[42], "0.99000000")
    data = {"seeds": [42], "seed_results": {"42": {"val_bpb": 0.99}}, "val_bpb": 0.99}
    folder = write_submission(tmp_path / "a", data)
    (folder / "train_seed42.log").write_text((folder / "train_seed42.log").read_text().replace(line, mixed))
    result = review(folder)
    assert found(result, "score-bytes").severity == "error"
    assert "MB" in found(result, "score-bytes").sentence
    assert "validation-set" not in rules(result, "error")


JSON: dict[str, tuple[str, Any]] = {
    "not JSON": ("json", "{"),
    "list": ("json", "[1]"),
    "deep": ("json", "[" * 100_000),
    "not a number": ("json", '{"val_bpb": NaN}'),
    "long integer": ("json", '{"val_bpb": ' + "1" * 10_000 + "}"),
    "score null": ("json-score", {"val_bpb": None}),
    "score text": ("json-score", {"val_bpb": "TBD"}),
    "field": ("json-field", {"author": ""}),
    "type": ("json-type", {"bytes_total": "15 MB"}),
    "below zero": ("json-type", {"bytes_code": -5}),
    "boolean": ("json-type", {"bytes_total": True}),
    "mean": ("score-mean", {"val_bpb": 1.10051234}),
    "mean digits": ("score-mean-digits", {"val_bpb": 1.10112712}),
    "one seed": ("score-one-seed", {"val_bpb": 1.10012341}),
    "std": ("score-std-wrong", {"val_bpb_std": 0.0002}),
    "seeds": ("seeds", {"seeds": [42, 7], "seed_results": {}, "val_bpb": 1.10062342}),
    "no log": ("seed-log", {"seeds": [*SCORES, 9]}),
    "readme": ("score-readme", {"val_bpb": 1.2345}),
    "a seed left out": (
        "score-left-out",
        {"seed_results": {"42": {"val_bpb": 1.10012341}, "7": {"val_bpb": 1.10112342}}, "val_bpb": 1.10062342},
    ),
    "one digit": ("score-mean", {"val_bpb": 1}),
    "two digits": ("score-mean", {"val_bpb": 1.1}),
    "one digit of a seed": ("score", {"seed_results": {"42": {"val_bpb": 1}}, "val_bpb": 1}),
    "training": ("training-clock", {"train_wallclock_ms_max": 719_000}),
    "training step": ("training-step", {"train_wallclock_ms_max": 600_100}),
    "training of a seed": (
        "training-clock",
        {"seed_results": {"42": {"val_bpb": 1.1001, "train_wallclock_ms": 719_000}}},
    ),
    "evaluation": ("evaluation-clock", {"eval_time_s_max": 900.0}),
    "evaluation of a seed": ("evaluation-clock", {"seed_results": {"42": {"val_bpb": 1.1001, "eval_time_s": 900.0}}}),
    "bytes": ("size-cap", {"bytes_total": 17_000_000}),
    "tokens": ("validation-claim", {"seed_results": {"42": {"val_bpb": 1.1001, "val_tokens": 9_662_464}}}),
    "claim": (
        "size-claim",
        {"seed_results": {"42": {"val_bpb": 1.10012341, "artifact_bytes": 14_000_000}}},
    ),
    "score": ("score", {"seed_results": {"42": {"val_bpb": 1.09}}}),
    "p": ("p-value-claim", {"p_value": 0.5, "base_seeds": [1.12, 1.121, 1.122]}),
    "p weak": ("p-value-weak", {"base_seeds": [1.1, 1.101, 1.102]}),
}


@pytest.mark.parametrize("case", JSON)
def test_what_the_json_claims(case: str, tmp_path: Path) -> None:
    rule, data = JSON[case]
    one = found(review(write_submission(tmp_path / "a", data)), rule)
    assert one.severity == RULES[rule].severity


@pytest.mark.parametrize(("case", "line"), [("score", "val_bpb:1.10012341"), ("tokens", "val_tokens:")])
def test_a_claim_is_compared_with_the_log_that_has_it(case: str, line: str, tmp_path: Path) -> None:
    rule, data = JSON[case]
    folder = write_submission(tmp_path / "a", data, files={"a_seed42.log": "seed: 42\n"})
    one = found(review(folder), rule)
    assert (one.file, bool(one.line)) == ("train_seed42.log", True)
    assert line in (folder / one.file).read_text().splitlines()[one.line - 1]


def test_the_table_has_the_seconds_that_are_judged(tmp_path: Path) -> None:
    result = review(write_submission(tmp_path / "a", replace=LOGS["evaluation beside a smaller total"][1]))
    assert result.logs[0]["evaluation_seconds"] == 900.0
    assert "evaluation took 900.0 s" in found(result, "evaluation-clock").sentence


def test_a_path_of_any_length_is_cut(tmp_path: Path) -> None:
    script = f"{SCRIPT}\nopen('/{'a' * 300_000}')\n"
    said = found(review(write_submission(tmp_path / "a", script=script)), "code-outside").sentence
    assert said.startswith("it reads /aaa")
    assert said.endswith("a…")
    assert len(said) == 1000


@pytest.mark.parametrize("zero", ["0E-99999999999", "0E-999999", "0E999999"])
def test_a_zero_of_any_exponent_is_zero(zero: str, tmp_path: Path) -> None:
    data = json.dumps({**submission(), "val_bpb_std": "std", "val_bpb": "score"})
    folder = write_submission(tmp_path / "a", data.replace('"std"', zero).replace('"score"', zero))
    assert max(len(one.sentence) for one in review(folder).findings) < 200


def test_older_spellings_are_not_errors(tmp_path: Path) -> None:
    data = submission()
    del data["val_bpb"], data["seed_results"]
    data |= {
        "mean_val_bpb": 1.10112342,
        "seeds": {str(seed): {"val_bpb": float(bits)} for seed, bits in SCORES.items()},
    }
    result = review(write_submission(tmp_path / "a", json.dumps(data)))
    assert rules(result, "error") == rules(result, "warning") == set()
    assert found(result, "json-spelling").severity == "note"


def test_a_mean_of_all_seeds_needs_no_seeds_in_the_json(tmp_path: Path) -> None:
    data = {"seeds": None, "seed_results": None}
    assert not rules(review(write_submission(tmp_path / "a", data)), "error")


def test_the_mean_of_another_line_is_named(tmp_path: Path) -> None:
    folder = write_submission(
        tmp_path / "a", {"seeds": None, "seed_results": None, "val_bpb": 1.13000003, "val_bpb_std": None}
    )
    for last, seed in zip("135", SCORES, strict=True):
        log = folder / f"train_seed{seed}.log"
        log.write_text(log.read_text().replace("val_bpb:1.13000000", f"val_bpb:1.1300000{last}"))
    result = review(folder)
    assert "final_int6_roundtrip" in found(result, "score-last").sentence
    assert "score-mean" not in rules(result)


@pytest.mark.parametrize("name", ["README.md", "submission.json", "train_gpt.py"])
def test_a_file_that_is_missing_or_has_another_name(name: str, tmp_path: Path) -> None:
    folder = write_submission(tmp_path / "a")
    text = (folder / name).read_text()
    (folder / name).unlink()
    assert name in {one.file for one in review(folder).findings if one.rule == "file-missing"}
    other = {"README.md": "V2_README.md", "submission.json": "submission_v2.json", "train_gpt.py": "train_v2.py"}[name]
    (folder / other).write_text(text)
    result = review(folder)
    assert found(result, "file-name").file == other
    assert "file-missing" not in rules(result)


def test_no_log_is_an_error(tmp_path: Path) -> None:
    logs = {f"train_seed{seed}.log": None for seed in SCORES}
    assert rules(review(write_submission(tmp_path / "a", files=logs)), "error") == {"file-missing", "seed-log"}


def test_seeds_of_two_configurations(tmp_path: Path) -> None:
    folder = write_submission(tmp_path / "a")
    log = folder / "train_seed7.log"
    log.write_text(log.read_text().replace("matrix_lr: 0.02", "matrix_lr: 0.03"))
    sentence = found(review(folder), "configuration").sentence
    assert "matrix_lr" in sentence
    assert "run_id" not in sentence


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("world_size:8 grad_accum_steps:1", "world_size:1 grad_accum_steps:8"),
        ("attention_mode:gqa num_heads:8 num_kv_heads:4", "attention_mode:gqa num_heads:8 num_kv_heads:2"),
        ("model_params:17059912", "model_params:17424332"),
        ("recipe_sha256:0a1b", "recipe_sha256:2c3d"),
    ],
)
def test_seeds_of_other_machines_models_or_recipes(line: str, other: str, tmp_path: Path) -> None:
    folder = write_submission(tmp_path / "a", replace={"train_shards: 80": f"{line}\ntrain_shards: 80"})
    assert not rules(review(folder), "error")
    log = folder / "train_seed7.log"
    log.write_text(log.read_text().replace(line, other))
    one = found(review(folder), "configuration")
    assert (one.severity, one.file, one.line) == ("error", log.name, 5)
    first = folder / "train_seed42.log"  # which states no settings, and hides none of the others
    first.write_text("\n".join(one for one in first.read_text().splitlines() if one[:2] != "  " and one != line))
    assert found(review(folder), "configuration").severity == "error"


def test_settings_that_the_log_of_one_seed_alone_prints(tmp_path: Path) -> None:
    folder = write_submission(tmp_path / "a")
    log = folder / "train_seed7.log"
    log.write_text(log.read_text().replace("  matrix_lr: 0.02", "  matrix_lr: 0.02\n  ema: 1\n  log_dir: b"))
    one = found(review(folder), "configuration-names")
    assert (one.severity, one.file) == ("warning", log.name)
    assert one.sentence == "only one of it and train_seed42.log prints ema: see whether one script wrote both"


def test_a_log_of_another_seed_than_its_name_says(tmp_path: Path) -> None:
    folder = write_submission(tmp_path / "a")
    log = folder / "train_seed7.log"
    log.write_text(log.read_text().replace("seed: 7", "seed: 8"))
    assert found(review(folder), "seed-name").file == "train_seed7.log"


def test_logs_of_earlier_runs_are_worth_notes_alone(tmp_path: Path) -> None:
    folder = write_submission(tmp_path / "a", replace=SIZE)
    old = (folder / "train_seed42.log").read_text().replace(SCORES[42], "1.20000000")
    write_submission(folder)
    (folder / "train_seed42_first.log").write_text(old)
    result = review(folder)
    assert not rules(result, "error")
    assert found(result, "size-cap").severity == "note"
    assert found(result, "size-cap").file == "train_seed42_first.log"


def test_training_counts_where_the_score_comes_from_a_log_of_evaluation(tmp_path: Path) -> None:
    folder = write_submission(tmp_path / "a", replace={"train_time:599990ms": "train_time:602000ms"})
    for seed, bits in SCORES.items():
        log = folder / f"train_seed{seed}.log"
        (folder / f"eval_seed{seed}.log").write_text(
            f"val_tokens: {TOKENS}\n" + score_line("quantized_ttt", bits) + "\n"
        )
        log.write_text(log.read_text().replace(bits, "1.12000000"))
    assert found(review(folder), "training-clock").severity == "error"
    assert "size-unknown" not in rules(review(folder))


def test_no_spelling_of_the_path_changes_the_track(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "track_10min_16mb" / "a"
    write_submission(folder, {"track": "non_record"}, replace={"train_time:599990ms": "train_time:900000ms"})
    (tmp_path / "track_non_record_16mb").mkdir()
    (tmp_path / "track_non_record_16mb" / "a").symlink_to(folder)
    (folder / "sub").mkdir()
    monkeypatch.chdir(folder / "sub")
    for path in (Path(".."), folder, tmp_path / "track_non_record_16mb" / "a"):
        assert "training-clock" in rules(review(path), "error")


def test_many_warnings_hide_no_error(tmp_path: Path) -> None:
    folder = write_submission(tmp_path / "a", replace={"train_time:599990ms": "train_time:900000ms"})
    for number in range(500):
        (folder / f"a{number}").symlink_to("/etc/hostname")
    result = review(folder)
    assert len([one for one in result.findings if one.rule == "training-clock"]) == 3
    links = [one for one in result.findings if one.rule == "file-irregular"]
    assert len(links) == 100
    assert links[-1].sentence.endswith("more of this rule are not shown")


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    folder = write_submission(tmp_path / "a")
    for file in folder.iterdir():
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert rules(review(folder)) == {"score-std"}


def test_files_in_utf_16_are_read_and_told(tmp_path: Path) -> None:
    """PowerShell writes what a command prints in UTF-16; a script must be UTF-8."""
    folder = write_submission(tmp_path / "a")
    for encoding in ("utf-16-le", "utf-16-be"):
        for file in write_submission(folder).iterdir():
            if file.suffix != ".py":
                file.write_bytes(f"\ufeff{file.read_text()}".encode(encoding))
        result = review(folder)
        assert rules(result) == {"score-std", "file-unread"}
        assert found(result, "file-unread").sentence == "it is UTF-16, where UTF-8 is expected"
        assert found(result, "file-unread").severity == "note"
    (folder / "train_gpt.py").write_text(SCRIPT, encoding="utf-16")
    assert "code-syntax" in rules(review(folder), "warning")


def test_logs_beyond_those_that_are_read_are_told(tmp_path: Path) -> None:
    folder = write_submission(tmp_path / "a", files={f"a{number}.txt": "no result" for number in range(38)})
    one = found(review(folder), "file-unread")
    assert (one.severity, one.file) == ("warning", "train_seed7.log")
    assert one.sentence == "of 41 logs the first 40 were read, and neither this one nor any after it"


def test_a_log_that_was_not_read_is_not_called_missing(tmp_path: Path) -> None:
    folder = write_submission(tmp_path / "a", files={f"a{number}.txt": "no result" for number in range(38)})
    one = found(review(folder), "seed-log")
    assert (one.severity, one.sentence) == ("note", "no log that was read is of seed 7")
    for number in range(2):
        (folder / f"b{number}.txt").write_text("no result")
    result = review(folder)
    assert found(result, "file-missing").sentence == "no log that was read is of a run"
    assert not rules(result, "error")
    with (folder / "a0.txt").open("wb") as log:
        log.truncate(10**9)  # of zeros, on no disk
    assert not rules(review(folder), "error")


def test_files_beyond_the_bytes_that_are_read_are_told(tmp_path: Path) -> None:
    folder = write_submission(tmp_path / "a", files={f"a{number}.txt": "x" * 7_000_000 for number in range(5)})
    one = found(review(folder), "file-unread")
    assert (one.severity, one.file) == ("warning", "a4.txt")
    assert one.sentence == "it was not read, as at most 32,000,000 bytes of a folder are: read it yourself"
    with (folder / "a4.txt").open("wb") as log:
        log.truncate(9_000_000)
    assert found(review(folder), "file-unread").sentence == "it cannot be read (it has more than 8,000,000 bytes)"


def test_a_name_that_is_not_utf_8_is_told(tmp_path: Path) -> None:
    folder = write_submission(tmp_path / "a")
    os.rename(folder / "train_seed42.log", os.fsencode(folder) + b"/train_seed42_\xff.log")
    one = found(review(folder), "file-unread")
    assert (one.severity, one.file) == ("warning", "train_seed42_\ufffd.log")
    assert one.sentence == "its name is not UTF-8, and it was not read: rename it"


def test_an_empty_readme_states_no_score(tmp_path: Path) -> None:
    assert found(review(write_submission(tmp_path / "a", files={"README.md": ""})), "score-readme").file == "README.md"


def test_folders_that_are_not_looked_at_are_told(tmp_path: Path) -> None:
    files = {".lib/hidden.py": "", "a/b/c/d/hidden.py": ""}
    result = review(write_submission(tmp_path / "a", files=files))
    assert {one.file for one in result.findings if one.rule == "file-unread"} == {".lib", "a/b/c/d"}


def test_the_track_without_a_clock_has_no_errors_of_clocks_and_seeds(tmp_path: Path) -> None:
    data = {"track": "non_record_16mb", "val_bpb_std": None}
    replace = {"train_time:599990ms": "train_time:9999990ms", **SIZE}
    result = review(write_submission(tmp_path / "a", data, replace=replace))
    assert "training-clock" not in rules(result)
    assert found(result, "size-cap").severity == "error"
    above = write_submission(tmp_path / "track_10min_16mb" / "a", data, replace=replace)
    assert found(review(above), "training-clock").severity == "error"


def test_a_track_that_only_mentions_non_records_has_its_clocks(tmp_path: Path) -> None:
    data = {"track": "10min_16mb record (not a non-record run)"}
    replace = {"train_time:599990ms": "train_time:9999990ms"}
    assert found(review(write_submission(tmp_path / "a", data, replace=replace)), "training-clock").severity == "error"


def test_tokens_of_validation_may_be_missing_on_the_track_without_a_clock(tmp_path: Path) -> None:
    for track, severity in (("10min_16mb", "warning"), ("non_record_16mb", "note")):
        folder = write_submission(tmp_path / track, {"track": track}, replace={f"val_tokens: {TOKENS}": "tokens"})
        assert found(review(folder), "validation-unknown").severity == severity


def test_a_later_line_takes_no_overrun_back(tmp_path: Path) -> None:
    late = "stopping_early: wallclock_cap train_time:6000000ms step:10000/20000\n"
    replace = {
        "stopping_early: wallclock_cap train_time:599990ms": f"{late}stopping_early: wallclock_cap train_time:0ms"
    }
    assert found(review(write_submission(tmp_path / "a", replace=replace)), "training-clock").severity == "error"


def test_a_model_over_the_cap_in_a_total_below_it_is_found(tmp_path: Path) -> None:
    replace = {"int6+brotli: 15000000 bytes": "int6+brotli: 24000000 bytes"}
    said = found(review(write_submission(tmp_path / "a", replace=replace)), "size-cap")
    assert (said.severity, said.sentence) == ("error", "its model has 24,000,000 bytes, and its total is 15,000,500")


def test_a_total_below_the_cap_that_model_and_code_are_over(tmp_path: Path) -> None:
    total = {"15000000 bytes": "15990000 bytes", "15000500 bytes": "15999999 bytes"}
    replace = {**total, "Code size: 500": "Code size: 19576"}
    said = found(review(write_submission(tmp_path / "a", None, SCRIPT + "#" * 19_000, replace)), "size-cap")
    assert said.severity == "error"
    assert "its model and code have 16,009,576 bytes" in said.sentence
    # A log that states its source, and counts the wrapped script, is right.
    assert not rules(review(write_submission(tmp_path / "b", replace=replace)), "error")


def test_scores_without_losses_are_told(tmp_path: Path) -> None:
    folder = write_submission(tmp_path / "a")
    for log in folder.glob("*.log"):
        log.write_text(re.sub(r"val_loss:[\d.]+ ", "", log.read_text()))
    assert rules(review(folder), "warning") == {"score-loss"}


def test_data_that_the_script_reads_is_told(tmp_path: Path) -> None:
    script = SCRIPT + "\n\nprior = open('prior.npz', 'rb').read()\n"
    result = review(write_submission(tmp_path / "a", script=script, files={"prior.npz": bytes(5_000_000)}))
    assert "it names prior.npz, whose 5,000,000 bytes count too" in found(result, "code-hidden").sentence


@pytest.mark.parametrize("glob", ["'*.npz'", "f'{folder}/pri*'", "os.path.join(folder, 'prior.*')"])
def test_data_that_the_script_reads_by_a_pattern_is_told(tmp_path: Path, glob: str) -> None:
    script = SCRIPT + f"\n\nprior = torch.load(glob.glob({glob})[0])\n"
    result = review(write_submission(tmp_path / "a", script=script, files={"lib/prior.npz": bytes(5_000_000)}))
    assert found(result, "code-hidden").sentence == "it may read lib/prior.npz, whose 5,000,000 bytes count too"
    other = review(write_submission(tmp_path / "b", script=script, files={"plot.zip": bytes(5)}))
    assert "code-hidden" not in rules(other)


@pytest.mark.parametrize("file", ["tables/__init__.py", "tables.cpython-312-x86_64-linux-gnu.so", "tables.pyc"])
def test_packages_and_compiled_modules_that_the_script_imports_count(tmp_path: Path, file: str) -> None:
    replace = {"15000000 bytes": "15990000 bytes", "15000500 bytes": "15999000 bytes"}
    files = {file: "# " + "x" * 20_000 + "\n"}
    result = review(write_submission(tmp_path / "a", None, f"import tables\n{SCRIPT}", replace, files))
    assert found(result, "size-script")
    assert ("code-hidden" in rules(result, "warning")) == (not file.endswith(".py"))


def test_modules_beyond_those_that_are_read_are_told_and_count(tmp_path: Path) -> None:
    replace = {"15000000 bytes": "15900000 bytes", "15000500 bytes": "15999000 bytes"}
    files = {f"m{number}.py": "import requests\n#" + "x" * 15_000 for number in range(9)}
    script = "".join(f"import m{number}\n" for number in range(9)) + SCRIPT
    result = review(write_submission(tmp_path / "a", None, script, replace, files))
    assert "m7.py, m8.py were not checked" in found(result, "code-hidden").sentence
    assert found(result, "size-script")
    assert "m6.py" in {one.file for one in result.findings if one.rule == "code-network"}


@pytest.mark.parametrize(
    "line", ["import tables", "from tables import data", "import tables.data", "from . import tables"]
)
def test_modules_that_the_script_imports_count(tmp_path: Path, line: str) -> None:
    replace = {"15000000 bytes": "15990000 bytes", "15000500 bytes": "15999000 bytes"}
    files = {"tables.py": "# " + "x" * 20_000 + "\n"}
    named = SCRIPT + "\n# the tables of the paper\n"
    assert "size-script" not in rules(review(write_submission(tmp_path / "a", None, named, replace, files)))
    importing = f"{line}\n{SCRIPT}"
    assert found(review(write_submission(tmp_path / "b", None, importing, replace, files)), "size-script")


def test_the_script_counts_as_it_is_submitted(tmp_path: Path) -> None:
    """A log that counts the unpacked source is over the cap, and the submission is not; and the other way round."""
    replace = {
        "15000000 bytes": "15990000 bytes",
        "15000500 bytes": "16050000 bytes",
        "Code size: 500": "Code size: 60000",
    }
    assert found(review(write_submission(tmp_path / "a", replace=replace)), "size-script").severity == "note"
    replace = {"15000000 bytes": "15990000 bytes", "15000500 bytes": "15999000 bytes"}
    long = SCRIPT + "# " + "x" * 20_000 + "\n"
    result = review(write_submission(tmp_path / "b", None, long, replace))
    assert found(result, "size-script").severity == "note"
    assert "size-cap" not in rules(result)


OWN = "gptq:generating autoregressive calibration data...\ngptq:collected hessians for 33 layers\nCode size"
IN_TIME = {"Code size": "gptq:calibrating with 256 batches\nCode size"}


@pytest.mark.parametrize("replace", [IN_TIME, {"train_time:599990ms": "train_time:600100ms", "Code size": OWN}])
def test_calibration_in_time_or_on_its_own_text_is_legal(replace: Mapping[str, str], tmp_path: Path) -> None:
    assert "calibration-clock" not in rules(review(write_submission(tmp_path / "a", replace=replace)))


@pytest.mark.parametrize(
    ("shift", "drift", "other"), [(0.0, 0.0, False), (0.3, 0.0, False), (0.0, 0.05, False), (0.1, 0.0, True)]
)
def test_training_losses_tell_another_text_than_the_base_read(
    shift: float, drift: float, other: bool, tmp_path: Path
) -> None:
    """A better model is better at every step, or ever more so; over another text it is at some and worse at others."""
    reading = "  matrix_lr: 0.02\n  train_batch_tokens: 786432\n  train_seq_len: 2048"

    def folder(name: str, losses: list[float], reading: str = reading, shards: int = 80) -> Path:
        steps = "\n".join(f"{1000 + 500 * at}/20000 train_loss: {loss:.4f}" for at, loss in enumerate(losses))
        end = f"{steps}\ntrain_shards: {shards}\nstopping_early"
        replace = {"  matrix_lr: 0.02": reading, "stopping_early": end}
        return write_submission(tmp_path / name, replace=replace)

    base = [2.60, 2.58, 2.57, 2.41, 2.28]
    ours = [loss - drift * at - shift * (-1 if other and at % 2 else 1) for at, loss in enumerate(base)]
    result = review(folder("a", ours), folder("base", base))
    assert ("training-text" in rules(result, "warning")) == other
    assert "shards" not in str(result.findings)
    fewer = review(folder("fewer", ours, shards=20), folder("base", base))
    assert ("as from 20 shards and the base's 80" in str(fewer.findings)) == other
    assert "training-text" not in rules(review(folder("a", ours)))
    shorter = folder("shorter", base, reading.replace("2048", "1024"))
    assert "training-text" not in rules(review(folder("a", ours), shorter))


@pytest.mark.parametrize("name", ["README.md", "AUDIT.md", "submission.json"])
def test_documents_that_the_folder_says_were_held_out(name: str, tmp_path: Path) -> None:
    said = {"README.md": "prepared by --val-docs=10_000\n", "AUDIT.md": "built with `val_docs=10000`\n"}
    claims = {"blurb": "--val-docs 10000 for training"} if name == "submission.json" else {}
    files = {name: f"Mean 1.1011; seeds 1.1001, 1.1011, 1.1021.\n{said[name]}"} if name in said else {}
    one = found(review(write_submission(tmp_path / "a", claims, files=files)), "held-out-stated")
    assert (one.severity, one.file, one.line) == ("warning", name, 2 if name in said else 1)
    assert "10,000" in one.sentence
    for all_of_them in ("50000", "50k"):
        held = f"Mean 1.1011; seeds 1.1001, 1.1011, 1.1021; --val-docs {all_of_them}; the first 2000 val docs"
        assert "held-out-stated" not in rules(review(write_submission(tmp_path / "b", files={"README.md": held})))


def test_a_database_is_no_base(tmp_path: Path) -> None:
    folder = write_submission(tmp_path / "a", {"p_value": 0.5, "database": [1.12, 1.121, 1.122]})
    assert "p-value-claim" not in rules(review(folder))


def test_p_value_against_another_folder(tmp_path: Path) -> None:
    worse = {seed: f"1.12{place}00000" for place, seed in enumerate(SCORES)}
    base = {"seed_results": {str(seed): {"val_bpb": float(bits)} for seed, bits in worse.items()}}
    against = write_submission(tmp_path / "base", {**base, "val_bpb": 1.121, "val_bpb_std": None})
    sentence = found(review(write_submission(tmp_path / "a"), against), "p-value").sentence
    from scipy.stats import ttest_ind

    p = ttest_ind(
        [1.12, 1.121, 1.122], [float(bits) for bits in SCORES.values()], equal_var=False, alternative="greater"
    ).pvalue
    assert f"p = {p:.4g}" in sentence
    bar = review(write_submission(tmp_path / "b", {"p_value": 100 * p}), against)  # as for an improvement by 0.005 nats
    assert f"the seeds give {p:.4g} for any improvement" in found(bar, "p-value-claim").sentence
    assert not [one for one in review(against).findings if one.rule.startswith("p-value")]


def test_a_set_that_the_author_says_is_another_is_worth_a_warning(tmp_path: Path) -> None:
    """As where a run on one's own text was written as a submission."""
    replace = {f"val_tokens: {TOKENS}": "val_tokens: 16511"}
    result = review(
        write_submission(tmp_path / "a", {"compliance": {"contest_validation_set": False}}, replace=replace)
    )
    assert not rules(result, "error")
    assert found(result, "validation-own").severity == "warning"


def test_a_log_without_a_score_and_one_that_cannot_fill_up_the_seeds(tmp_path: Path) -> None:
    folder = write_submission(tmp_path / "a", {"seeds": [42, 7], "seed_results": {}, "val_bpb": 1.10062342})
    log = folder / "train_seed1337.log"
    log.write_text(log.read_text().replace("matrix_lr: 0.02", "matrix_lr: 0.03"))
    assert (found(review(folder), "seed-other").file, found(review(folder), "seed-other").severity) == (
        log.name,
        "warning",
    )
    log.write_text("\n".join(line for line in log.read_text().splitlines() if "val_bpb" not in line))
    assert found(review(folder), "score-missing").file == log.name


def test_a_log_under_two_seeds_is_found_by_its_losses_and_by_its_score(tmp_path: Path) -> None:
    steps = "".join(f"\nstep:{step}/20000 train_loss: 2.{step}" for step in range(100, 600, 100))
    replace = {"train_shards: 80": "train_shards: 80" + steps}
    copied = write_submission(tmp_path / "losses", replace=replace)
    said = found(review(copied), "seed-copy")
    assert (said.severity, said.file) == ("error", "train_seed1337.log")
    assert said.sentence.startswith("6 of its 6 training losses are those of seed")

    one = write_submission(tmp_path / "score", {"val_bpb": 1.1, "seed_results": {"42": {"val_bpb": 1.1}}})
    assert "seed-copy" not in rules(review(one))
    text = (one / "train_seed42.log").read_text()
    (one / "train_seed7.log").write_text(text.replace("seed: 42", "seed: 7"))
    assert found(review(one), "seed-copy").sentence.startswith(
        "the digits of its score 1.10012341 are those of seed 42"
    )


def test_a_seed_that_the_json_leaves_out_is_told_unless_it_is_of_another_configuration(tmp_path: Path) -> None:
    folder = write_submission(tmp_path / "a")
    text = (folder / "train_seed42.log").read_text().replace("seed: 42", "seed: 5").replace("1.10012341", "1.20012341")
    (folder / "train_seed5.log").write_text(text)
    said = found(review(folder), "seed-left-out")
    assert (said.severity, said.file) == ("warning", "train_seed5.log")
    assert "ends with 1.20012341" in said.sentence
    (folder / "train_seed5.log").write_text(text.replace("matrix_lr: 0.02", "matrix_lr: 0.03"))
    assert "seed-left-out" not in rules(review(folder))


def test_a_score_line_borrows_no_loss_of_another_score(tmp_path: Path) -> None:
    folder = write_submission(tmp_path / "a")
    for log in folder.glob("*.log"):
        log.write_text(re.sub(r"(_exact) val_loss:[\d.]+ ", r"\1 ", log.read_text()))
    assert rules(review(folder), "warning") == {"score-loss"}
    for log in folder.glob("*.log"):
        last = re.findall(r"_exact (val_bpb:[\d.]+)", log.read_text())[-1]
        lost = float(last.removeprefix("val_bpb:")) * BYTES_PER_TOKEN_BITS
        log.write_text(log.read_text() + f"final_int6_sliding_window val_loss:{lost:.8f} {last} eval_time:3000ms\n")
    assert "score-loss" not in rules(review(folder))


def test_a_loss_of_few_digits_implies_no_bytes(tmp_path: Path) -> None:
    folder = write_submission(tmp_path / "a")
    for log in folder.glob("*.log"):
        log.write_text(re.sub(r"(val_loss:\d\.\d\d)\d+", r"\1", log.read_text()))
    assert rules(review(folder), "error") == set()


def test_another_run_beside_enough_seeds_is_worth_a_note(tmp_path: Path) -> None:
    folder = write_submission(tmp_path / "a")
    text = (folder / "train_seed42.log").read_text().replace("matrix_lr: 0.02", "matrix_lr: 0.03")
    (folder / "train_seed5.log").write_text(text.replace("seed: 42", "seed: 5"))
    assert found(review(folder), "seed-other").severity == "note"


def test_every_rule_is_used_and_every_finding_has_one() -> None:
    source = "".join(path.read_text() for path in Path(rules_of.__file__).parent.glob("review*.py"))
    assert [rule for rule in RULES if source.count(f'"{rule}"') < 2] == []


# hostile folders


def test_what_is_no_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(UserError, match="name the folder of a submission"):
            review(path)


def test_links_pipes_and_devices_are_not_followed(tmp_path: Path) -> None:
    folder = write_submission(tmp_path / "a", files={"README.md": None})
    (tmp_path / "secret").write_text("Mean 1.1011; seeds 1.1001, 1.1011, 1.1021.")
    (folder / "README.md").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "train_pipe.log")
    (folder / "round").symlink_to(folder)
    result = review(folder)
    assert {one.file for one in result.findings if one.rule == "file-irregular"} == {
        "README.md",
        "train_pipe.log",
        "round",
    }
    assert "file-missing" in rules(result)


def test_large_deep_and_many_files_are_bounded(tmp_path: Path) -> None:
    folder = write_submission(tmp_path / "a")
    with (folder / "train_big.log").open("wb") as file:
        file.truncate(10**10)  # of zeros, on no disk
    deep = folder.joinpath(*["d"] * 200)
    deep.mkdir(parents=True)
    many = folder / "many"
    many.mkdir()
    for number in range(2_100):
        (many / f"{number}.log").touch()
    start = time.monotonic()
    result = review(folder)
    assert time.monotonic() - start < 20
    assert {"train_big.log", "many"} <= {one.file for one in result.findings if one.rule == "file-unread"}


def test_bytes_that_are_no_text_are_replaced(tmp_path: Path) -> None:
    folder = write_submission(tmp_path / "a")
    log = folder / "train_seed42.log"
    log.write_bytes(b"\xff\xfe\x00 noise\n" + log.read_bytes())
    (folder / "README.md").write_bytes(b"\xff Mean 1.1011; seeds 1.1001, 1.1011, 1.1021.")
    result = review(folder)
    assert not rules(result, "error")
    assert found(result, "file-unread").severity == "note"


def test_lines_of_any_length_and_their_numbers_are_read_in_bounded_time(tmp_path: Path) -> None:
    hostile = ["val_bpb:" + " " * 1_000_000, "val_loss:1" * 100_000, "Total submission size" + "x" * 10**6]
    hostile += ["Serialized model " + "y" * 10**6 + ": 1 bytes", "train_shards: " + "9" * 10_000, "seed: " + "9" * 30]
    start = time.monotonic()
    review(write_submission(tmp_path / "a", files={"train_seed5.log": "\n".join(hostile * 2)}))
    assert time.monotonic() - start < 20


# the verb


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["review", *arguments], standalone_mode=False)


def test_the_verb_says_how_many_and_its_status_is_that_of_errors(tmp_path: Path) -> None:
    good = invoke(str(write_submission(tmp_path / "good")))
    assert good.return_value == 0
    assert "0 errors, 0 warnings, 1 note" in good.output
    bad = invoke(str(write_submission(tmp_path / "bad", replace=SIZE)))
    assert bad.return_value == 1
    assert "size-cap" in bad.output
    assert "400 over" in bad.output


def test_json_holds_every_finding_with_the_source_of_its_rule(tmp_path: Path) -> None:
    result = invoke(str(write_submission(tmp_path / "a", replace=SIZE)), "--json")
    facts = json.loads(result.output)
    assert facts["errors"] == 3
    assert {"rule", "severity", "file", "line", "sentence", "source"} == set(facts["findings"][0])
    assert result.return_value == 1


def test_a_name_cannot_steer_the_terminal(tmp_path: Path) -> None:
    folder = write_submission(
        tmp_path / "a", {"author": ""}, files={"train_\x1b[31m.log": "Total submission size: 1 bytes"}
    )
    assert "\x1b" not in review_table(review(folder))


def test_bad_input_ends_in_one_line(caddie: Any, tmp_path: Path) -> None:
    ended = caddie("review", str(tmp_path / "none"))
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.count("\n") == 1
    assert "does not exist; name the folder of a submission" in ended.err
    ended = caddie("review", str(write_submission(tmp_path / "a")), "--against", str(tmp_path / "none"))
    assert ended.status == 2


def test_an_empty_script_is_no_script(tmp_path: Path) -> None:
    assert found(review(write_submission(tmp_path / "a", None, "")), "file-missing").file == "train_gpt.py"


def test_the_readme_may_round(tmp_path: Path) -> None:
    rounded = {"README.md": "Mean 1.101, of 1.10012, 1.10112 and 1.10212."}
    assert "score-readme" not in rules(review(write_submission(tmp_path / "a", files=rounded)))
    assert "score-readme" in rules(review(write_submission(tmp_path / "a", files={"README.md": "1.10, 11.1011"})))
    longer = {"README.md": "Mean 1.1011234166666667, of 1.1001234133333333, 1.1011234233333333, 1.1021234344444444."}
    assert "score-readme" not in rules(review(write_submission(tmp_path / "a", files=longer)))


def test_a_long_step_does_not_excuse_a_long_training(tmp_path: Path) -> None:
    replace = {"train_time:599990ms step:10000/20000": "train_time:700000ms step:1/20000"}
    assert found(review(write_submission(tmp_path / "a", replace=replace)), "training-clock").severity == "error"


def test_numbers_of_any_size_are_judged_in_bounded_time(tmp_path: Path) -> None:
    start = time.monotonic()
    for number in ("1e-999999", "1e999999", "-1e400", "0e-999999", "1e" + "9" * 30):
        seeds = ", ".join(f'"{seed}": {{"val_bpb": {number}}}' for seed in range(5_000))
        text = f'{{"val_bpb": {number}, "val_bpb_std": {number}, "p_value": {number}, "seed_results": {{{seeds}}}}}'
        assert rules(review(write_submission(tmp_path / "a", text)), "error")
    assert time.monotonic() - start < 30


@pytest.mark.long
def test_many_scoring_lines_and_numbers_are_bounded(tmp_path: Path) -> None:
    lines = "".join(f"final val_loss:2.0 val_bpb:1.{number}\n" for number in range(100_000, 200_000))
    data = {"seed_results": {str(seed): {"val_bpb": 1.5} for seed in range(5_000)}}
    files = {"train_seed1.log": lines, "train_seed2.log": "\n" * 7_000_000, "README.md": lines.replace("\n", " ")}
    start = time.monotonic()
    review(write_submission(tmp_path / "a", data, files=files))
    assert time.monotonic() - start < 30


def test_seeds_that_do_not_differ_have_no_p_value(tmp_path: Path) -> None:
    same = {"seed_results": {str(seed): {"val_bpb": 1.1} for seed in SCORES}}
    against = write_submission(tmp_path / "base", same)
    assert not [one for one in review(against).findings if one.rule.startswith("p-value")]
    other = write_submission(tmp_path / "other", same)
    assert found(review(other, against), "p-value").sentence.endswith("here are 3, and the base has 3")


@pytest.mark.parametrize("track", ["track_10min_16mb", "track_non_record_16mb"])
def test_a_base_without_scores_gives_no_p_value_and_a_word(track: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / track).mkdir()
    result = review(write_submission(tmp_path / track / "a"), tmp_path / "empty")
    one = found(result, "p-value")
    assert (one.severity, one.sentence[:31]) == ("note", "no p-value against the base: it")
    assert one.sentence.endswith("here are 3, and the base has 0")


def test_a_folder_is_not_its_own_base(tmp_path: Path) -> None:
    folder = write_submission(tmp_path / "a")
    (tmp_path / "b").symlink_to(folder)
    with pytest.raises(UserError, match="is --against itself; name the folder of its base"):
        review(folder, tmp_path / "b")
