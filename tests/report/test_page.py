"""The report page: what it says, that it stands alone, and that nothing in a run folder can break it."""

import base64
import csv
import io
import json
import math
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from html_page import Parsed
from run_folder import make_events, make_result, make_steps, write_run

from caddie.errors import UserError
from caddie.report import page as report
from caddie.report.page import number, setting, write_report
from caddie.report.read import read_steps
from caddie.run.policy import apply_policies

GOLDEN = Path(__file__).parent.parent / "golden" / "report.txt"
DOCUMENTED = Path(__file__).parent.parent.parent / "docs" / "result.md"
PLACES = ["sample", "recipe", "why", "tensor", "diff", "public", "policy", "device", "hash", "part"]


class Page(Parsed):
    """The page of a run."""

    @property
    def lengths(self) -> list[float]:
        found = [
            re.fullmatch(r"(?:width|left|top):(\S+)%", value) for _, name, value in self.attributes if name == "style"
        ]
        return [float(match.group(1)) for match in found if match]


def read(folder: Path, result: dict[str, Any] | None = None, events: list[dict[str, Any]] | None = None) -> Page:
    return Page(write_report(write_run(folder, result, events)).read_text(encoding="utf-8"))


def test_summary_is_golden(tmp_path: Path, same_as_kept: Callable[[Path, str], None]) -> None:
    same_as_kept(GOLDEN, "\n".join(read(tmp_path).text) + "\n")


def test_page_stands_alone(tmp_path: Path) -> None:
    text = write_report(write_run(tmp_path)).read_text(encoding="utf-8")
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    loads = [(tag, name, value) for tag, name, value in page.attributes if name in ("src", "srcset", "href", "action")]
    assert [value.partition(",")[0] for _, _, value in loads] == [
        "data:application/json;base64",
        "data:text/csv;base64",
        "https://github.com/openai/parameter-golf",
    ]
    assert not re.search(r"url\(|@import|@font-face", text)
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl", "report.html", "result.json"]


def test_lengths_stay_inside(tmp_path: Path) -> None:
    page = read(tmp_path)
    styled = [value for _, name, value in page.attributes if name == "style"]
    assert len(page.lengths) == len(styled) > 100
    assert all(0 <= length <= 100 for length in page.lengths)


def test_page_has_every_picture(tmp_path: Path) -> None:
    page = read(tmp_path)
    assert page.tags.count("svg") == 2
    assert page.tags.count("details") == 4
    assert page.tags.count("section") == 11
    for text in ("Bits per byte along the line", "1.5301", "brotli -11", "not measured here", "30 more tensors"):
        assert any(text in line for line in page.text), text


@pytest.mark.parametrize("place", PLACES)
def test_everything_is_escaped(tmp_path: Path, place: str) -> None:
    evil = "<script>alert(1)</script>\"'\x00&amp;"
    result = make_result()
    if place == "tensor":
        result["tensors"][0] |= {"name": evil, "quantizer": evil}
    elif place == "diff":
        result["diff"] = {evil: evil}
    elif place == "public":
        result["public"][0] |= {"label": evil, "note": evil, "source": "javascript:alert(1)"}
    elif place == "policy":
        result["policies"][0] |= {"name": evil, "why": evil, "hardware": evil}
    elif place == "hash":
        result["sha256"] = {evil: evil}
    elif place == "part":
        result["ledger"]["parts"][evil] = 3
        result["seconds"][evil] = 3.0
        result["compressors"][evil] = {"bytes": 3, "bits_per_byte": 2.0}
    else:
        result[place] = evil
    page = read(tmp_path, result)
    assert "script" not in page.tags
    assert any("<script>alert(1)</script>\"'\ufffd&amp;" in line for line in page.text)
    assert not [
        value
        for _, name, value in page.attributes
        if name == "href"
        and not value.startswith(("https://", "data:application/json;base64,", "data:text/csv;base64,"))
    ]


def without(value: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The same nested mapping many times, each time with one value set to null."""
    for key, held in value.items():
        if path or key not in ("version", "recipe"):
            yield f"{path}{key}", value | {key: None}
        if isinstance(held, dict):
            for name, changed in without(held, f"{path}{key}."):
                yield name, value | {key: changed}


@pytest.mark.long
@pytest.mark.parametrize("together", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_any_value_may_be_missing(together: int) -> None:
    """So many at once, none of them inside another."""
    steps = make_steps(20)
    whole = make_result(depth=1)
    whole["tensors"] = whole["tensors"][:3]  # all are shown alike
    names = [name for name, _ in without(whole)]
    assert len(names) > 120
    groups: list[list[str]] = []
    for name in random.Random(0).sample(names, len(names)):
        for group in groups:
            inside = any(
                f"{one}.".startswith(f"{other}.") for pair in group for one, other in ((name, pair), (pair, name))
            )
            if len(group) < together and not inside:
                group.append(name)
                break
        else:
            groups.append([name])
    for group in groups:
        result = whole
        for name in group:
            result = next(changed for found, changed in without(result) if found == name)
        page = Page(report.render(result, steps))
        assert all(0 <= length <= 100 for length in page.lengths), group


def test_all_values_may_be_missing(tmp_path: Path) -> None:
    page = read(tmp_path, {"version": 1, "recipe": "bare", "bits_per_byte": 1.5}, [])
    assert page.text.count("not measured") > 20
    assert "svg" not in page.tags


@pytest.mark.long
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -5.0, 0, 1e300])
def test_numbers_that_make_no_sense(tmp_path: Path, value: float) -> None:
    result, events = make_result(), make_events()
    result |= {"artifact_bytes": value}
    result["scores"]["trained_plain"]["bits_per_byte"] = value
    result["compressors"]["gzip -9"]["bits_per_byte"] = value
    result["tensors"][0] |= {"bytes": value, "relative_error": value}
    result["seconds"]["train"] = value
    result["ledger"]["parts"]["weights"] = value
    result["tensors"][0] |= {"parameters": value, "predicted_bits_per_byte": value}
    result["compression"] |= {"bits_per_weight": value, "step_bytes": value, "step_more_bits_per_byte": value}
    result["compression"]["curve"][1] |= {"bytes": value, "bits_per_byte": value}
    for index in (1, 50, -3):
        events[index] |= {"loss": value, "lr_scale": value}
    page = read(tmp_path, result, events)
    assert all(0 <= length <= 100 for length in page.lengths)
    drawn = " ".join(value for tag, name, value in page.attributes if (tag, name) == ("path", "d"))
    assert not re.search(r"nan|inf", drawn)


def test_a_recipe_that_scores_plain(tmp_path: Path) -> None:
    result = make_result()
    result["scores"]["quantized_sliding"] = None
    result["bits_per_byte"] = result["scores"]["quantized_plain"]["bits_per_byte"]
    page = read(tmp_path, result)
    assert "Bits per byte of the artifact, plain" in page.text
    assert "This artifact, sliding" not in page.text
    assert page.text[page.text.index("Window, tokens") + 1] == "256"
    marked = [value for tag, name, value in page.attributes if name == "class" and value == "row last"]
    assert len(marked) == 1


def test_policies_say_how_much_is_over_on_which_machine(tmp_path: Path) -> None:
    result = make_result()
    result["ledger"]["parts"]["weights"] = 15_998_000
    result["seconds"]["train"] = 600.4
    result["evaluation"] |= {"load": None, "score": 713.8}
    text = read(tmp_path, result | {"policies": apply_policies(result)}).text
    assert "Bytes, and seconds of this machine, cpu, 2 threads; the budgets are for 8xH100." in text
    row = text[text.index("contest-2026") :][:7]
    assert row == ["contest-2026", "16,024,713", "24,713 over", "600.4", "0.4 over", "713.8", "113.8 over"]
    row = text[text.index("strict") :][:7]
    assert row == ["strict", "16,037,725", "37,725 over", "619.8", "19.8 over", "not measured", "of 600"]


def test_a_result_from_before_the_policies_is_read(tmp_path: Path) -> None:
    old = {name: value for name, value in make_result().items() if name not in ("source", "evaluation", "policies")}
    page = read(tmp_path, old)
    assert not any("policy" in line for line in page.text)
    assert any("30 more tensors" in line for line in page.text)


def test_what_bytes_buy_is_said(tmp_path: Path) -> None:
    text = read(tmp_path).text
    assert "Candidates that the fit tried" in text
    assert "This artifact" in text
    assert "The cap" not in text, "16,000,000 bytes are far outside the picture"
    said = "100,000 bytes more would lower the predicted loss by 0.00082 bits per byte; "
    assert said + "100,000 fewer would raise it by 0.0039." in text
    assert text[text.index("Predicted loss") + 1] == "0.0010"
    assert text[text.index("Measured loss") + 1] == "0.0012"


def test_the_numbers_can_be_taken_from_the_page_alone(tmp_path: Path) -> None:
    page, result = read(tmp_path), make_result()
    held = [value for _, name, value in page.attributes if name == "href" and value.startswith("data:")]
    facts, steps = (base64.b64decode(address.partition(",")[2]).decode() for address in held)
    assert json.loads(facts) == result
    rows = list(csv.DictReader(io.StringIO(steps)))
    logged = [(one["step"], one["loss"]) for one in make_steps()]
    assert [(int(row["step"]), float(row["loss"])) for row in rows] == logged
    assert "27,707 tokens per second" in page.text


def test_the_curve_of_held_out_text_is_drawn_and_can_be_taken(tmp_path: Path) -> None:
    without = read(tmp_path / "without")
    assert "Held-out training text" not in without.text
    held = [{**event, "event": "held_out", "loss": 3.0} for event in make_steps()[::50]]
    page = read(tmp_path / "with", events=[*make_events(), *held])
    assert "Held-out training text" in page.text
    addresses = [value for _, name, value in page.attributes if name == "href" and value.startswith("data:")]
    rows = list(csv.DictReader(io.StringIO(base64.b64decode(addresses[-1].partition(",")[2]).decode())))
    assert [int(row["step"]) for row in rows] == [event["step"] for event in held]
    assert page.tags.count("path") == without.tags.count("path") + 2


def test_a_busy_machine_is_told(tmp_path: Path) -> None:
    assert not any("busy" in line for line in read(tmp_path).text)
    busy = make_result()
    busy["training"] |= {"cpu_share": 0.56, "step_seconds": {"p5": 0.1, "p95": 2.0}}
    said = "The machine was busy: training got 56% of its threads' time, and most steps took 0.1 to 2 s."
    assert said in read(tmp_path, busy).text
    busy["training"]["earlier_budgets"] = ["train.steps=1"]
    told = "It began with train.steps=1, so the same command alone does not repeat it."
    assert {said, told} <= {*read(tmp_path, busy).text}


def test_a_result_from_before_the_curve_is_read(tmp_path: Path) -> None:
    old = {name: value for name, value in make_result().items() if name != "compression"}
    for entry in old["tensors"]:
        del entry["predicted_bits_per_byte"]
    page = read(tmp_path, old)
    assert page.tags.count("svg") == 1
    assert page.text[page.text.index("Measured loss") + 1] == "not measured"


def test_a_wrong_result_is_shown(tmp_path: Path) -> None:
    result = make_result() | {"verified": False, "under_cap": False, "cap_bytes": 400_000}
    result["checks"][0]["passed"] = False
    text = read(tmp_path, result).text
    assert "failed" in text
    assert "533,336 bytes, over the cap" in text
    assert "no" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no .*result.json"),
        ("{", "not JSON"),
        ("[1]", "version none"),
        ('{"version": 2}', "version 2"),
        ('{"version": 1, "recipe": "tiny"}', "holds no score"),
        ('{"version": 1, "recipe": "tiny", "bits_per_byte": NaN}', "holds no score"),
        ('{"version": 1, "recipe": "tiny", "bits_per_byte": "1.2"}', "holds no score"),
    ],
)
def test_what_is_not_a_result_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "result.json").write_text(content)
    with pytest.raises(UserError, match=message):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    "value",
    [
        "1.2",
        {"a": 3},
        pytest.param(10**400, id="400 digits"),
        *(pytest.param(value, marks=pytest.mark.long) for value in (None, [], {}, [3], True)),
    ],
)
def test_an_edited_result_is_shown_or_refused(tmp_path: Path, value: object) -> None:
    """Each of its values in turn; nothing but a `UserError` may come of it."""
    whole = make_result(depth=1) | {"checks": [{"name": "a", "passed": True, "evidence": "b"}]}
    whole["tensors"], refusals = whole["tensors"][:1], []
    for name in whole:
        folder = write_run(tmp_path, whole | {name: value}, [])
        try:
            write_report(folder)
        except UserError as error:
            refusals.append(str(error))
    assert len(refusals) > 1
    assert all(said.startswith(str(tmp_path / "result.json")) for said in refusals)


def test_a_step_without_a_number_is_no_step(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"event": "step"}\n{"event": "step", "step": "3"}\n')
    assert read_steps(tmp_path / "log.jsonl") == []


def test_a_pipe_in_place_of_a_log_holds_nothing_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log.jsonl")
    with pytest.raises(OSError, match="not a regular file"):
        read_steps(tmp_path / "log.jsonl")


def test_a_failed_write_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(write_run(tmp_path))
    before = (tmp_path / "report.html").read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UserError, match="disk full"):
        write_report(tmp_path)
    assert (tmp_path / "report.html").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 3


def test_text_that_is_no_unicode_is_written(tmp_path: Path) -> None:
    assert any("a?b" in line for line in read(tmp_path, make_result() | {"sample": "a\ud800b"}).text)


def test_log_of_a_killed_and_resumed_run(tmp_path: Path) -> None:
    lines = [{"event": "step", "step": step, "loss": float(step)} for step in (10, 20, 30)]
    lines += [
        {"event": "start"},
        {"event": "step", "step": 20, "loss": 2.5},
        {"event": "step", "step": 30, "loss": 3.5},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "log.jsonl").write_text(text[:40] + "\n" + text + '{"event": "st')
    steps = read_steps(tmp_path / "log.jsonl")
    assert read_steps(tmp_path / "log.jsonl", "held_out") == []
    assert [(step["step"], step["loss"]) for step in steps] == [(10, 10.0), (20, 2.5), (30, 3.5)]
    assert read_steps(tmp_path / "none") == []


def test_every_field_is_documented() -> None:
    def fields(value: object, path: str) -> Iterator[str]:
        if isinstance(value, dict):
            for key, held in value.items():
                yield from fields(held, f"{path}.{key}" if path else key)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield from fields(value[0], path + "[]")
        else:
            yield path

    text = DOCUMENTED.read_text()
    for field in fields(make_result() | {"diff": None}, ""):
        name = re.sub(r"^compressors\.[^.]*", "compressors.*", field)
        name = re.sub(r"^scores\.\w+\.", "", name)
        name = re.sub(r"^(source\.(modules|decoders)|.*\.(parts|phases))\.[^.]*(\.py)?$", r"\1.*", name)
        name = name.replace("ledger.parts.*", field).replace("policies[].evaluation.", "policies[].training.")
        assert f"| `{name}` |" in text, field
    for name in make_events()[1]:
        assert f"`{name}`" in text.partition("## log.jsonl")[2], name


def test_number() -> None:
    assert number(1234.6, ",d") == "1,235"
    assert number(1.53012, ".4f") == "1.5301"
    assert number(None, ".4f") is None
    assert number(math.nan, ",d") == "not finite"


def test_setting() -> None:
    value = {"kind": "Ramp", "start": 0.5, "end": None, "of": [{"kind": "Ema"}, 2]}
    assert setting(value) == "Ramp(start=0.5, end=none, of=[Ema(), 2])"
    assert [setting(held) for held in ("word", 3, None, True, {"a": 1})] == ["word", "3", "none", "true", '{"a": 1}']


@pytest.mark.long
def test_long_names_and_hashes_fit_on_a_phone(tmp_path: Path) -> None:
    result = make_result()
    device = "8 x NVIDIA A100-SXM4-80GB, AMD EPYC 7742 64-Core Processor, " + "x" * 80
    checks = [{**check, "evidence": "/a/path/" + "longer/" * 20} for check in result["checks"]]
    page = write_report(write_run(tmp_path / "a", {**result, "device": device, "checks": checks}))
    with Browser(tmp_path / "profile") as browser:
        browser.size(360)
        browser.open(page.as_uri())
        assert browser.run("document.documentElement.scrollWidth") == 360
