"""Formats of log lines, as public scripts write them."""

from decimal import Decimal

import pytest

from caddie.submit.logs import parse_log

LINES = {
    "stopping_early: wallclock_cap train_time:600028ms step:13450/20000": ("training_ms", 600_028),
    "stopping_early: wallclock_cap train_time: 599623ms step: 4900/20000": ("training_ms", 599_623),
    "stopping_early: wallclock_cap train_time: 599622ms step: 4901/20000": ("steps", 4_901),
    "Total submission size int8+zlib: 15874829 bytes": ("total_bytes", 15_874_829),
    "Total submission size: 15735483 bytes": ("total_bytes", 15_735_483),
    "INT7+zlib model: 15370972 bytes | Total submission: 15441941 bytes": ("total_bytes", 15_441_941),
    "budget:15993853/16000000 (15.99/16.00MB) FITS": ("total_bytes", 15_993_853),
    "Artifact: 16,548,775 bytes (15.78 MB)": ("total_bytes", 16_548_775),
    "Code size (compressed): 31250 bytes": ("code_bytes", 31_250),
    "Code size: 47642 bytes": ("code_bytes", 47_642),
    "Serialized model int8+zlib: 15815847 bytes (payload:17178912)": ("model_bytes", 15_815_847),
    "val_tokens: 47851520": ("validation_tokens", 47_851_520),
    "val_loader:shards pattern=./data/x_*.bin tokens:62021632": ("validation_tokens", 62_021_632),
    "train_shards: 1499": ("training_shards", 1_499),
    "train_loader:dataset:fineweb10B_sp1024 train_shards:80": ("training_shards", 80),
    "stopping_early: wallclock_cap train_time:720,000.5ms step:13450/20000": ("training_ms", 720_000.5),
    "calibrate_time:3450ms": ("calibration_ms", 3_450),
    "ttt_phased: total_docs:50000 prefix_docs:2000": ("validation_documents", 50_000),
    "total_eval_time:519.5s": ("evaluation_s", 519.5),
    "total_eval_time: 688s": ("evaluation_s", 688),
    "ngram_tilt:hints total=9 gated=5 token_gate=6 within_gate=7 word_gate=8 agree2plus=3": ("within_hints", 7),
    "prequant_ttt:done total_time=523.0s": ("adaptation_s", 523),
    "params:73685840 L:10 d:768 h:8 kv:4 ws:8 ga:1 s:42": ("seed", 42),
    "seed:1337": ("seed", 1_337),
    "  seed: 314": ("seed", 314),
}


@pytest.mark.parametrize("prefix", ["", "921:", "1776144156.999 ", "[default0]:"])
@pytest.mark.parametrize("line", LINES)
def test_facts(line: str, prefix: str) -> None:
    name, value = LINES[line]
    assert parse_log("train.log", f"first\n{prefix}{line}\n").facts[name] == (value, 2)


def test_a_progress_bar_before_a_line_hides_nothing() -> None:
    text = "first\n\r100%|#####| 10/10\r\x1b[0mfinal val_loss:2.0 val_bpb:1.22000000\r\nseed:7\r\n"
    log = parse_log("train.log", text)
    assert (log.scores[0].name, log.scores[0].line, log.facts["seed"].line) == ("final", 2, 3)


SCORES = {
    "final_int8_zlib_roundtrip_exact val_loss:2.07269931 val_bpb:1.22436570": ("1.22436570", "2.07269931", None),
    "final_sliding_window_eval stride:64 val_loss:1.9511 val_bpb:1.1556 eval_time:75096ms": (
        "1.1556",
        "1.9511",
        75.096,
    ),
    "quantized_ttt_phased val_loss:2.32 val_bpb:1.06 eval_time:508785ms": ("1.06", "2.32", 508.785),
    "final val_loss:2.32 val_bpb:1.06 eval_time:900000 ms": ("1.06", "2.32", 900.0),
    "final val_loss:2.32 val_bpb:1.06 time=1200.5 s": ("1.06", "2.32", 1200.5),
    "final val_loss:2.32 val_bpb:1.06 elapsed:15min": ("1.06", "2.32", 900.0),
    "921:quantized_ttt_phased val_loss:2.32 val_bpb:1.06 eval_time:508785ms": ("1.06", "2.32", 508.785),
    "final_slot val_loss:1.1737 val_bpb:0.6951 steps:64 lr:0.01 time:825384ms": ("0.6951", "1.1737", 825.384),
    "final_sliding val_loss:2.9027 val_bpb:1.1239 (stride=16, T=0.90) eval_time:768782ms": (
        "1.1239",
        "2.9027",
        768.782,
    ),
    "ttt_sliding:done val_loss=2.795171 val_bpb=1.082098 elapsed=293.2s": ("1.082098", "2.795171", 293.2),
    "quantized_ttt_ppm_sliding_window val_bpb:0.80023955": ("0.80023955", None, None),
    "val_bpb:          1.12278022": ("1.12278022", None, None),
}


@pytest.mark.parametrize("line", SCORES)
def test_scoring_lines(line: str) -> None:
    bits, loss, seconds = SCORES[line]
    (score,) = parse_log("train.log", line).scores
    assert (str(score.bits), score.loss and str(score.loss), score.seconds) == (bits, loss, seconds)
    assert not score.live


@pytest.mark.parametrize(
    "line",
    [
        "step:4000/20000 val_loss:2.0601 val_bpb:1.2201 train_time:337946ms",
        "0/20000 val_loss: 9.0076 val_bpb: 4.1159",
        "prequant_ttt:epoch 1/21 val_bpb=1.084492 lr=0.0005 time=44.6s",
        'log0(f"final val_loss:{loss:.4f} val_bpb:{bpb:.4f}")',
        'log0(f"final val_loss:1.00000000 val_bpb:1.00000000 {seconds}")',
        "val_bpb:enabled tokenizer_kind=sentencepiece",
        "  sliding_eval [ 97.8%] 118432/121136 windows running_bpb=1.152134",
    ],
)
def test_lines_that_are_no_scores(line: str) -> None:
    assert parse_log("train.log", line).scores == []


def test_scores_of_the_trained_weights_are_known_by_name() -> None:
    names = (
        "pre-quantization post-ema",
        "DIAGNOSTIC post_ema",
        "diagnostic pre-quantization post-ema",
        "post-prequant-ttt",
    )
    for name in names:
        (score,) = parse_log("train.log", f"{name} val_loss:2.32 val_bpb:1.06 eval_time:9ms").scores
        assert score.live


def test_an_exact_line_takes_the_seconds_of_the_line_that_it_repeats() -> None:
    text = "final val_loss:2.07 val_bpb:1.22 eval_time:1401ms\nfinal_exact val_loss:2.07269931 val_bpb:1.22436570\n"
    assert parse_log("train.log", text).final[-1].seconds == 1.401


def test_source_in_a_log_is_no_result() -> None:
    """The script that a log holds may have lines like results in comments, strings and constants."""
    source = ["import os", "def f():", "    pass", "class A:", "seed:9", "final val_loss:1.00000000 val_bpb:1.00000000"]
    rule = "=" * 100
    text = "\n".join([*source, rule, "Running Python 3.12", rule, "seed:7", "final val_loss:2.0 val_bpb:1.22000000"])
    log = parse_log("train.log", text)
    assert log.stated_seed == 7
    assert [score.bits for score in log.scores] == [Decimal("1.22000000")]


def test_settings_in_a_list_and_in_lines() -> None:
    text = "Hyperparameters:\n  matrix_lr: 0.02\n  seed: 7\ntrain_shards: 80\n  not_one: 1\n"
    assert parse_log("a.log", text).settings == {"matrix_lr": ("0.02", 2), "seed": ("7", 3)}
    line = "train_batch_tokens:786432 train_seq_len:2048 iterations:20000 max_wallclock_seconds:600.000"
    assert parse_log("a.log", line).settings["train_seq_len"] == ("2048", 1)


SEEDS = {
    "train_seed42.log": 42,
    "log_seed7.txt": 7,
    "seed_0.log": 0,
    "logs/train2.txt": 2,
    "eval_v6_s1234.log": 1234,
    "train.log": None,
    "train_v3.txt": None,
    "sliding_s64_seed1337.log": 1337,
    "train600_SEED-7.log": 7,
    "train_2026-03-14_seed42.log": 42,
    "log_2026-03-14.txt": None,
    "train20260314_12.log": None,
    "log_2026_03_14_s7.txt": 7,
    "20260314.log": None,
    "train_seed20260314.log": 20_260_314,
    "log_2026.txt": 2026,
}


@pytest.mark.parametrize("name", SEEDS)
def test_the_seed_in_a_name(name: str) -> None:
    assert parse_log(name, "").seed == SEEDS[name]
