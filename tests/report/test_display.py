"""The terminal: a live bar, plain lines, silence, and the final table."""

import errno
import io
import os
import re
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_folder import make_events, make_result, make_steps

from caddie.cli import exits
from caddie.cli.exits import fail
from caddie.report import display as display_module
from caddie.report.display import Display, clock, step_line
from caddie.report.read import step_seconds
from caddie.report.tables import WIDTH, columns, crop, pack_table, printable, result_table, score_table, table
from caddie.run.policy import apply_policies
from caddie.runtime import distributed

GOLDEN = Path(__file__).parent.parent / "golden" / "result_table.txt"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Hands:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def show(events: list[dict[str, Any]], **settings: Any) -> list[str]:
    hands, stream = Hands(), io.StringIO()
    with Display(stream=stream, now=hands, **settings) as display:
        display.phase("train")
        for event in events:
            hands.time = event["seconds"]
            display.step(event)
    return stream.getvalue().splitlines()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("NO_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def test_result_table_is_golden(same_as_kept: Callable[[Path, str], None]) -> None:
    text = result_table(make_result(), "runs/tiny-1a2b3c4d-s1337/report.html")
    same_as_kept(GOLDEN, text + "\n")
    assert max(map(columns, text.splitlines())) <= WIDTH
    assert len(text.splitlines()) <= 38
    assert text.isascii()


def test_result_table_without_what_is_optional() -> None:
    result = make_result()
    result |= {"compressors": None, "sample": None, "verified": None, "bits_per_byte": None, "cap_bytes": None}
    result["scores"]["averaged_plain"] = None
    result["seconds"]["verify"] = None
    text = result_table(result)
    assert "averaged" not in text
    assert "gzip" not in text
    assert "not verified" in text
    assert "report" not in text
    assert "written by" not in text


def test_tables_say_that_a_tokenizer_is_lossy() -> None:
    result = make_result()
    assert "lossy" not in result_table(result)
    for count, words in ((1, "1 document"), (1_038, "1,038 documents")):
        result["corpus"]["changed_documents"] = count
        told = " ".join(result_table(result).splitlines()[1:3])
        assert told.strip() == f"Lossy tokenizer: it changes {words}."


class Full(io.StringIO):
    """A stream to a disk without room."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_work_goes_on_where_its_lines_cannot_be_written() -> None:
    with Display(stream=Full()) as display:
        display.phase("train")
        display.note("a line")
        display.step({"event": "doing", "text": "part 1"})
        display.step(make_events()[1])


class Closed(Full):
    """A terminal that was closed under a process that goes on without it, as after `disown`."""

    def isatty(self) -> bool:
        return True


def test_work_goes_on_where_its_terminal_was_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with Display(stream=Closed()) as display:
        assert display._live is not None
        display.phase("train")
        display.note("a line")
        display.step(make_events()[1])
        display.phase("pack")


def test_a_busy_machine_is_told() -> None:
    result = make_result()

    def told(share: float | None, quick: float = 0.1, slow: float = 0.12) -> str:
        training = result["training"] | {"cpu_share": share, "step_seconds": {"p5": quick, "p95": slow}}
        return " ".join(result_table(result | {"training": training}).split())  # wherever the lines break

    assert "busy" not in told(None) + told(0.95) + told(0.8) + told(0.95, slow=2.0) + result_table(result)
    assert ("The machine was busy: training got 56% of its threads' time, and most steps took 0.1 to 0.12 s.") in told(
        0.56
    )
    assert "training got 80% of its threads' time, and most steps took 0.1 to 2 s." in told(0.8, slow=2.0)


def test_an_earlier_budget_is_told() -> None:
    result = make_result()
    result["training"]["earlier_budgets"] = ["train.steps=1", "train.steps=9"]
    assert "began with train.steps=1 and then train.steps=9, so" in " ".join(result_table(result).split())


def test_quick_and_slow_steps() -> None:
    events = [{"step": 4 * index, "seconds": 0.4 * index + max(0, index - 30) * 4.0} for index in range(40)]
    assert step_seconds(events) == pytest.approx({"p5": 0.1, "p95": 1.1})
    assert step_seconds(events[:10]) is None


def test_a_score_prints_its_notes() -> None:
    scored = make_result()["scores"]["quantized_plain"]
    about = {"own_scoring": True, "changed_documents": 0, "validation_set": None, "bits_per_byte": 1.5}
    told = score_table({"plain": scored, **about, "notes": ["Nothing was learned."]})
    assert told.endswith("\nNothing was learned.")


def test_a_score_speaks_of_the_contest_only_where_it_matters() -> None:
    def told(official: str | None, table_bytes: int) -> str:
        scored = make_result()["scores"]["quantized_plain"] | {"table_bytes": table_bytes}
        about = {"own_scoring": True, "changed_documents": 0, "validation_set": official, "bits_per_byte": 1.5}
        return score_table({"plain": scored, **about})

    source = make_result()["scores"]["quantized_plain"]["source_bytes"]
    for own_text in (told(None, source), told(None, source - 33)):
        assert not [word for word in ("contest", "table", "normalized", "wrong") if word in own_text]
    assert "By its totals" in told("By its totals this is the contest's validation set.", source)
    for matters in (told("By its totals it is.", source - 33), told(None, source // 2)):
        assert "bits per table byte" in matters
        assert f"The text's own {source:,} bytes count; by the contest's table" in matters
    assert f"bytes they are {source // 2:,}." in told(None, source // 2)


def test_result_table_without_a_fit() -> None:
    result = make_result()
    assert "quantization gap      0.0010    0.0012" in result_table(result)
    result["compression"] |= {"step_more_bits_per_byte": None, "predicted_bits_per_byte": None}
    assert "quantization gap           -    0.0012" in result_table(result)
    assert "bytes more" not in result_table(result)
    del result["compression"]
    assert "rounding" not in result_table(result)


def test_a_compressor_that_is_ahead_is_named() -> None:
    result = make_result()
    result["compressors"] = {"gzip -9": {"bits_per_byte": 1.0}, "brotli -11": {"bits_per_byte": 0.9}}
    for own, expected in ((0.9, False), (0.95, True), (1.1, True), (None, False)):
        assert ("brotli -11 is ahead; train longer" in result_table(result | {"bits_per_byte": own})) is expected


def test_pack_table() -> None:
    result = make_result()
    facts = {
        "artifact": "run/artifact-600000.caddie",
        "artifact_bytes": result["artifact_bytes"],
        "cap_bytes": 600_000,
        "ledger": result["ledger"]["parts"],
        "compression": result["compression"],
        "seconds": 12.34,
        "next": ["caddie score run/artifact-600000.caddie --data corpus"],
    }
    lines = pack_table(facts).splitlines()
    assert lines[-8:] == [
        "",
        "  88.89 % of the cap",
        "  7.00 bits a weight; 100,000 bytes more: about -0.0008 bpb, fewer: +0.0039",
        "  predicted quantization gap: 0.0010 bits per byte",
        "  12.3 seconds",
        "",
        "written  run/artifact-600000.caddie",
        "next     caddie score run/artifact-600000.caddie --data corpus",
    ]
    facts["compression"] |= {"predicted_bits_per_byte": None, "step_bytes": None}
    assert "predicted quantization gap: not measured" in pack_table(facts)


def test_what_a_phase_is_at_is_told_every_two_seconds() -> None:
    hands, stream = Hands(), io.StringIO()
    with Display(stream=stream, now=hands) as display:
        display.phase("fit")
        for hands.time, text in ((0.0, "part 1"), (1.9, "part 2"), (2.0, "part\x1b3"), (3.0, "part 4")):
            display.step({"event": "doing", "text": text})
    assert stream.getvalue().splitlines() == ["fit", "      part 1", "      part\ufffd3"]
    quiet = io.StringIO()
    with Display(stream=quiet, quiet=True) as display:
        display.step({"event": "doing", "text": "part 1"})
    assert quiet.getvalue() == ""


def line_of(event: dict[str, Any]) -> str:
    """Return the text of an event off a terminal."""
    stream = io.StringIO()
    Display(stream=stream, now=Hands()).step(event)
    return stream.getvalue()


def test_every_kind_of_event_has_its_line() -> None:
    lines = {
        "start": {"precision": "float32", "threads": 2, "compiled": False, "attention": None},
        "candidate": {"number": 3, "file_bytes": 999_219, "cap_bytes": 1_000_000},
        "running": {"progress": 0.4, "text": "2 of 6 runs  base, seed 2: 40% trained"},
        "runs": {"done": 2, "total": 6, "text": "base, seed 1  2.0001 bpb"},
        "tokens": {"done": 50, "total": 100},
        "end": {"step": 812, "seconds": 60.0, "loss": 2.5},
    }
    shown = {kind: line_of({**event, "event": kind}) for kind, event in lines.items()}
    assert shown["start"].startswith("float32, 2 threads, not compiled\n")
    assert "lower is better" in shown["start"]
    assert shown["candidate"] == "      candidate 3: a file of 999,219 bytes, 781 under the cap\n"
    over = {**lines["candidate"], "event": "candidate", "file_bytes": 1_000_300}
    assert line_of(over) == "      candidate 3: a file of 1,000,300 bytes, 300 over the cap\n"
    assert shown["running"] == " 40%  2 of 6 runs  base, seed 2: 40% trained\n"
    assert shown["runs"] == "2 of 6 runs  base, seed 1  2.0001 bpb\n"
    assert shown["tokens"] == " 50%  50 of 100 tokens\n"
    assert shown["end"] == ""


def test_result_table_says_what_is_wrong() -> None:
    result = make_result()
    result |= {"verified": False, "under_cap": False, "cap_bytes": 500_000, "artifact_bytes": 533_336}
    text = result_table(result)
    assert "VERIFICATION FAILED" in text
    assert "THE ARTIFACT IS 33,336 BYTES OVER ITS CAP" in text


def test_result_table_under_policies() -> None:
    result = make_result()
    result["ledger"]["parts"]["weights"] = 15_998_000
    result["seconds"]["train"] = 600.4
    result["evaluation"] |= {"load": None, "score": 713.8}
    lines = result_table(result | {"policies": apply_policies(result)}).splitlines()
    start = lines.index("by the rules of            bytes              cap     training s   evaluation s")
    assert lines[start + 1 : start + 8] == [
        "  contest-2026        16,024,713  over 16,000,000 600.4 over 600 713.8 over 600",
        "  strict              16,037,725  over 16,000,000 619.8 over 600              -",
        "  hutter              16,255,830                -          619.8              -",
        "  contest-2026: Bytes of model and code; seconds to train, calibrate and score.",
        "  strict: As contest-2026, and the tokenizer, warm-up, packing and loading.",
        "  hutter: All that restores the text: file, code that reads it, coded text.",
        "  seconds of this machine; budgets are for 8xH100",
    ]
    assert "policy" not in result_table({**result, "policies": None})


def test_result_table_keeps_the_terminal_safe() -> None:
    result = make_result() | {"recipe": "a\x1b[2Jb" * 20, "sample": "\x1b]0;title\x07one\n\u202etwo\n" + "字" * 90}
    result["policies"][0] |= {"name": "\x1b[2J" + "字" * 90, "hardware": "\x07"}
    text = result_table(result)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\u202e" not in text
    assert max(map(columns, text.splitlines())) <= WIDTH


def test_table_aligns_and_wraps() -> None:
    rows = [["tiny", 981_000, 1.53, "small " * 20], ["baseline", 17_059_912, None, "large"], ["no", None, 0.5, True]]
    lines = table(rows, ["recipe", "parameters", "bpb", "why"]).splitlines()
    assert lines[0] == "recipe    parameters     bpb  why"
    assert lines[1].startswith("tiny         981,000  1.5300  small small")
    assert lines[2].startswith(" " * 30 + "small")
    assert lines[-2] == "baseline  17,059,912       -  large"
    assert lines[-1] == "no                 -  0.5000  yes"
    assert max(map(columns, lines)) <= WIDTH


@pytest.mark.parametrize("width", [42, 60, 72])
def test_a_narrow_terminal_gets_blocks_in_place_of_columns(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = result_table(make_result())
    monkeypatch.setenv("COLUMNS", str(width))
    rows = [["tiny", 981_000, 1.53, "small " * 20], ["baseline", 17_059_912, None, ""]]
    lines = table(rows, ["recipe", "parameters", "bpb", "why"]).splitlines()
    assert max(map(columns, lines)) < width
    if width == 42:
        assert lines[:4] == ["recipe", "tiny", "  parameters  981,000", "  bpb  1.5300"]
        assert lines[-3:] == ["baseline", "  parameters  17,059,912", "  bpb  -"]
    narrow = result_table(make_result())
    assert max(map(columns, narrow.splitlines())) < width
    figures = re.findall(r"[\d,.]*\d", whole)
    assert sorted(re.findall(r"[\d,.]*\d", narrow)) == sorted(figures), "nothing is left out"
    monkeypatch.setenv("COLUMNS", "200")
    assert result_table(make_result()) == whole


def test_table_with_numbers_last_or_no_rows() -> None:
    assert table([["a", 1], ["b", 1000]], ["name", "bytes"]) == "name  bytes\na         1\nb     1,000"
    assert table([], ["name", "why"]) == "name  why"
    assert table([["a", "1.530120"], ["b", 7]], ["", "plain"]) == "      plain\na  1.530120\nb         7"
    assert "\x1b" not in table([["\x1b[31m", "\x1b[0m"]], ["a", "b"])


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0:00"), (35.4, "0:35"), (59.6, "1:00"), (725, "12:05"), (11_400, "3:10:00"), (-1, "0:00")],
)
def test_clock(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


def test_clock_of_what_is_not_finite() -> None:
    assert clock(float("nan")) == clock(float("inf")) == "-:--"


def test_crop_counts_columns() -> None:
    assert crop("abcdef", 6) == "abcdef"
    assert crop("abcdefg", 6) == "abc..."
    assert crop("字字字字", 7) == "字字..."
    assert columns("e\u0301") == 1


def test_printable_is_one_line() -> None:
    assert printable("a\tb\r\nc\x00\x9b") == "a   b c\ufffd\ufffd"


@pytest.mark.parametrize(("sliding", "place"), [(True, "         -    1.2345"), (False, "    1.2345")])
def test_the_adaptive_score_stands_below_that_of_its_windows(sliding: bool, place: str) -> None:
    result = make_result()
    result["scores"]["quantized_adaptive"] = {"bits_per_byte": 1.2345}
    if not sliding:
        result["scores"]["quantized_sliding"] = None
    (line,) = [line for line in result_table(result, Path("report.html")).splitlines() if "packed, adaptive" in line]
    assert line.startswith(f"  packed, adaptive  {place}")


def test_step_line() -> None:
    event = make_steps()[100] | {"loss": 2.5, "bits_per_byte": 1.25, "seconds": 30.0, "progress": 0.5}
    assert step_line(event) == "step 404  loss 2.5000  1.2500 bpb  27,716 tokens/s  0:30 left"


def test_step_line_keeps_what_is_looked_at_where_room_is_short() -> None:
    event = make_steps()[100] | {"loss": 2.5, "bits_per_byte": 1.25, "seconds": 30.0, "progress": 0.5}
    assert step_line(event, "1.5000 bpb", room=60) == "step 404  1.2500 bpb  27,716 tokens/s  0:30 left"
    assert step_line(event, "1.5000 bpb", room=40) == "1.2500 bpb  27,716 tokens/s  0:30 left"
    assert step_line(event, "1.5000 bpb", room=0) == "1.2500 bpb  0:30 left"
    assert step_line(event | {"bits_per_byte": None}, room=0) == "loss 2.5000  0:30 left"


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminal")
@pytest.mark.parametrize("width", [80, 50])
def test_a_narrow_terminal_shows_phase_and_time_left(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    event = make_steps()[100] | {"loss": 2.5, "bits_per_byte": 1.25, "seconds": 30.0, "progress": 0.5}
    size = {"event": "forecast", "file_bytes": 9e5, "cap_bytes": 1e6, "gap_bits_per_byte": 0.01, "progress": 0.5}
    main, end = os.openpty()
    with os.fdopen(end, "w") as stream:
        with Display(stream=stream) as display:
            display.phase("calibrate")
            for one in ({**event, "event": "held_out"}, event, size):
                display.step(one)
            assert display._live is not None
            display._live.refresh()
        shown = ""
        while select.select([main], [], [], 0)[0]:  # a read may give a part of what a busy machine has drawn
            shown += os.read(main, 1 << 16).decode()
    os.close(main)
    assert "…" not in shown
    assert "calibrate" in shown
    assert "0:30 left" in shown
    assert "file about 0.90 of 1.00 MB" in shown


def test_held_out_text_stands_beside_the_loss() -> None:
    first, *_, last = make_steps()
    told = [{**first, "event": "held_out", "loss": 2.6, "bits_per_byte": 1.5}, first]
    told += [last, {**last, "event": "held_out", "loss": 2.55, "bits_per_byte": 1.47}]
    lines = show(told)
    assert "bpb  held out 1.5000 bpb" in lines[1]
    assert lines[-1] == "held-out training text: loss 2.5500  1.4700 bpb"
    del told[0]["bits_per_byte"]
    assert "held out loss 2.6000" in show(told)[1]


def test_step_line_of_a_bad_step() -> None:
    event = make_steps()[0] | {"loss": float("nan"), "bits_per_byte": None, "progress": 0.0, "seconds": 0.0}
    assert step_line(event) == "step 4  loss nan"


def test_speed_and_time_left_wait_until_they_mean_something() -> None:
    first = make_steps()[0] | {"seconds": 0.9, "progress": 0.1}
    assert "left" not in step_line(first)
    assert step_line(first | {"seconds": 1.0}).endswith("27,716 tokens/s  0:09 left")
    hands, stream = Hands(), io.StringIO()
    with Display(stream=stream, now=hands) as display:
        for _ in range(2):  # each phase begins anew
            display.phase("plain")
            hands.time += 50.0  # of reading the file, which is no scoring
            for done in (10, 60):
                display.step({"event": "tokens", "done": done, "total": 110})
                hands.time += 5.0
    lines = ["  9%  10 of 110 tokens", " 55%  60 of 110 tokens  10 tokens/s  0:05 left"]
    assert stream.getvalue().splitlines() == ["plain", *lines] * 2


def test_a_moment_has_no_speed() -> None:
    hands, stream = Hands(), io.StringIO()
    with Display(stream=stream, now=hands) as display:
        for done in (10, 100):
            display.step({"event": "tokens", "done": done, "total": 100})
            hands.time += 0.001
    assert stream.getvalue().splitlines() == [" 10%  10 of 100 tokens", "100%  100 of 100 tokens"]


@pytest.mark.long
def test_silent_work_is_said_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display_module, "FIRST_SILENCE", 0.2)
    stream, probes = io.StringIO(), ("probe 3 of 20", "probe 4 of 20")
    with Display(stream=stream) as display:
        display.phase("verify")
        for probe in probes:
            display.step({"event": "doing", "text": probe})
            time.sleep(0.8)  # said after 0.2 and 0.6 seconds; the next of this probe would come 0.8 later
    time.sleep(0.3)  # nothing comes after the end
    lines = [line for line in stream.getvalue().splitlines() if "still at work" in line]
    assert lines[0] == f"      still at work after 0:00: {probes[0]}"
    assert all(1 <= sum(line.endswith(probe) for line in lines) <= 2 for probe in probes)


def test_an_early_forecast_says_nothing_of_the_loss_by_rounding() -> None:
    about = {"event": "forecast", "file_bytes": 999_000, "cap_bytes": 1_000_000, "gap_bits_per_byte": 0.19}
    early, middle = show([{**about, "progress": share, "seconds": 0.0} for share in (0.0, 0.5)])[1:]
    assert early == "      forecast: file about 1.00 of 1.00 MB"
    assert middle == f"{early}, quantization gap about 0.1900 bpb before calibration"


def test_without_standard_error_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None)
        patch.setattr(distributed, "under_torchrun", lambda: True)
        patch.setattr(os, "_exit", sys.exit)
        with Display() as display:
            display.phase("train")
            display.step(make_steps()[0])
            display.note("it goes on")
        assert fail("a mistake", 2) == 2
        with pytest.raises(SystemExit):
            exits._leave(2)
    assert capsys.readouterr().out == ""


def test_plain_lines_come_at_each_tenth() -> None:
    lines = show(make_steps(seconds=60.0))
    assert lines[0] == "train"
    assert len(lines) == 1 + 1 + 10
    assert lines[1].startswith("  0%  step 4  loss ")
    assert lines[-1].startswith("100%  step 812")
    assert lines[-1].endswith("0:00 left")


def test_plain_lines_are_two_seconds_apart_but_the_last() -> None:
    lines = show(make_steps(seconds=5.0))
    assert len(lines) == 1 + 4
    assert lines[-1].startswith("100%")


def test_plain_lines_of_a_long_run_come_each_minute() -> None:
    lines = show(make_steps(seconds=3600.0))
    assert 50 <= len(lines) <= 72


def test_plain_lines_start_again_in_a_second_phase() -> None:
    hands, stream = Hands(), io.StringIO()
    with Display(stream=stream, now=hands) as display:
        for name in ("warm_up", "train"):
            display.phase(name)
            display.step(make_steps()[0])
        display.note("two\nlines \x1b[2J")
    assert [line.split()[0] for line in stream.getvalue().splitlines()] == ["warm_up", "0%", "train", "0%", "two"]
    assert "\x1b" not in stream.getvalue()


def test_quiet_prints_nothing(terminal: Terminal) -> None:
    with Display(quiet=True, stream=terminal) as display:
        display.phase("train")
        display.note("note")
        for event in make_steps():
            display.step(event)
    assert terminal.getvalue() == ""


def test_terminal_has_one_live_line(terminal: Terminal) -> None:
    hands = Hands()
    with Display(stream=terminal, now=hands) as display:
        display.phase("prepare")
        display.note("[bold]reading[/bold] 12 files")
        hands.time = 1.5
        display.phase("train")
        display.step(make_steps()[50])
        display._live.refresh()  # type: ignore[union-attr]
        hands.time = 61.5
    shown = terminal.getvalue()
    assert "[bold]reading[/bold] 12 files" in shown
    assert "prepare       1.5 s" in shown
    assert "train        60.0 s   step 204  loss" in shown
    assert "tokens/s" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_work_without_a_phase_is_shown_on_a_terminal(terminal: Terminal) -> None:
    """Work such as `caddie study --estimate` begins no phase."""
    with Display(stream=terminal, now=Hands()) as display:
        display.step({"event": "doing", "text": "timing 12 labels"})
        display._live.refresh()  # type: ignore[union-attr]
    shown = terminal.getvalue()
    assert "timing 12 labels" in shown
    assert "work" in shown
    assert "0.0 s" not in shown, "only a phase ends with its time"
    assert "train" not in shown


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_terminal_gets_its_cursor_back(terminal: Terminal, error: type[BaseException]) -> None:
    display = Display(stream=terminal)

    def run() -> None:
        with display:
            display.step(make_steps()[0])
            raise error

    with pytest.raises(error):
        run()
    shown = terminal.getvalue()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    before = shown
    display.note("after")
    assert terminal.getvalue() == before + "after\n"


def test_dumb_terminal_gets_plain_lines(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with Display(stream=terminal) as display:
        display.phase("train")
        display.step(make_steps()[0])
    assert "\x1b" not in terminal.getvalue()
    assert terminal.getvalue().splitlines()[0] == "train"


def test_rich_is_imported_only_for_a_terminal() -> None:
    import subprocess

    code = "import sys\nfrom caddie.report import display as d\nwith d.Display() as x: x.note('hi')\n"
    code += "assert 'rich' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "hi\n")
