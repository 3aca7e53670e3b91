"""The board: what it answers to whom, what it makes of run folders, and its page in a browser."""

import http.client
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from browser import Browser
from click.testing import CliRunner
from run_folder import make_events, make_result, write_run

from caddie.board import folders
from caddie.board.folders import flat
from caddie.board.server import Board
from caddie.cli import app
from caddie.errors import UserError
from caddie.files import process_name
from caddie.lab.background import StudyState
from caddie.report import read
from caddie.report.page import write_report
from caddie.report.read import LARGEST_BYTES, POINTS, Log, parse_finite
from caddie.run.run_lock import this_process

HOSTILE = "<img src=x onerror=alert(1)>"
PATHS = (
    *("/../../etc/passwd", "/..%2f..%2fetc%2fpasswd", "/%2e%2e/%2e%2e/secret", "//etc/passwd", "/page.html"),
    *("/./board.js", "/board.js/", "/board.js/../server.py", "/board%2ejs", "/server.py", "/a/recipe.json", "/api"),
    *("http://127.0.0.1/", "*", "/api/runs/", "/report/a", "/\\..\\secret"),
)


def write(folder: Path, **files: Any) -> Path:
    """A run folder with these documents; text is written as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / (f"{name}.jsonl" if name == "log" else f"{name}.json")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def recipe(seed: int = 1, lr: float = 0.02, name: str = "tiny") -> dict[str, Any]:
    model = {"kind": "GPT", "width": 64, "layers": {}}
    train = {"kind": "Train", "optimizers": {"matrix": {"kind": "Muon", "lr": lr}}, "betas": [0.9, 0.95]}
    return {
        "recipe": {"kind": "Recipe", "name": name, "why": "x", "model": model, "train": train},
        "seed": seed,
        "corpus": "data/a",
    }


def lines(steps: int, first: int = 1, loss: float = 3.0, **more: Any) -> str:
    return "".join(
        json.dumps({"event": "step", "step": step, "seconds": step / 10, "loss": loss, "progress": 0.5, **more}) + "\n"
        for step in range(first, first + steps)
    )


def age(folder: Path, seconds: float) -> None:
    changed = time.time() - seconds
    for path in [*folder.iterdir(), folder]:
        os.utime(path, (changed, changed))


Ask = Callable[..., tuple[int, dict[str, str], bytes]]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Board]:
    root = tmp_path / "runs"
    root.mkdir()
    with Board(root, 0) as board:
        thread = threading.Thread(target=board.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield board
        finally:
            board.shutdown()
            thread.join()


@pytest.fixture
def root(served: Board, tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def ask(served: Board) -> Ask:
    def send(path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", served.server_port, timeout=5)
        try:
            connection.putrequest(method, path, skip_host="Host" in headers)
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    return send


def runs(ask: Ask) -> dict[str, dict[str, Any]]:
    status, _, content = ask("/api/runs")
    assert status == 200
    return {row["name"]: row for row in json.loads(content, parse_constant=pytest.fail)["runs"]}


def details(ask: Ask, name: str) -> dict[str, Any]:
    status, _, content = ask(f"/api/run?name={quote(name, safe='')}")
    assert status == 200
    return dict(json.loads(content, parse_constant=pytest.fail))


# Who is answered, and what


def test_only_reading_is_allowed(ask: Ask, root: Path) -> None:
    write(root / "a", recipe=recipe())
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "get", "BREW"):
        status, headers, content = ask("/api/runs", method)
        assert (status, headers["allow"]) == (405, "GET, HEAD"), method
        assert content == b"Method Not Allowed\n"


@pytest.mark.parametrize("path", ["/", "/board.js", "/board.css", "/api/runs", "/api/run?name=a", "/report?name=a"])
def test_what_is_served(path: str, ask: Ask, root: Path) -> None:
    (write(root / "a", recipe=recipe()) / "report.html").write_text("<h1>report</h1>")
    status, headers, content = ask(path)
    assert status == 200
    assert content
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert ("script" not in policy and "sandbox allow-downloads;" in policy) == path.startswith("/report")
    assert "unsafe-inline" not in policy or path.startswith("/report")
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in headers
    head_status, head, nothing = ask(path, "HEAD")
    assert (head_status, nothing) == (200, b"")
    assert head["content-length"] == headers["content-length"]


@pytest.mark.parametrize("host", ["localhost", "LocalHost:1", "127.0.0.1", "127.0.0.1:65535"])
def test_names_of_this_machine(host: str, ask: Ask) -> None:
    assert ask("/", Host=host)[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        *("", "evil.example", "localhost.evil.example", "evil.example:8765", "127.0.0.1.evil.example", "[::1]"),
        *("0.0.0.0", "127.1", "localhost:", "localhost:80x", "user@localhost", "localhost,evil.example"),
    ],
)
def test_other_names_are_refused(host: str, ask: Ask) -> None:
    for path in ("/", "/api/runs", "/nothing"):
        assert ask(path, Host=host)[0] == 403
    assert b"evil" not in ask("/", Host=host)[2]


def test_a_request_needs_one_host(served: Board) -> None:
    for lines_sent in (b"", b"Host: localhost\r\nHost: evil.example\r\n"):
        connection = http.client.HTTPConnection("127.0.0.1", served.server_port, timeout=5)
        connection.connect()
        connection.sock.sendall(b"GET /api/runs HTTP/1.1\r\n" + lines_sent + b"\r\n")
        answer = http.client.HTTPResponse(connection.sock)
        answer.begin()
        assert answer.status == 403
        connection.close()


def test_it_listens_on_the_loopback_alone(served: Board) -> None:
    assert served.server_address[0] == "127.0.0.1"
    assert served.url == f"http://127.0.0.1:{served.server_port}/"


@pytest.mark.parametrize("path", PATHS)
def test_no_path_is_a_path(path: str, ask: Ask, root: Path) -> None:
    write(root / "a", recipe=recipe())
    assert ask(path)[0] == 404


@pytest.mark.parametrize(
    "name",
    [
        *("..", "../outside", "a/../a", "./a", "/a", "a/", "a//", "%2e%2e/outside", "\\..\\outside", "a%00", ""),
        *("nothing", "link", "a/recipe.json", "a&name=a", "a;name=a"),
    ],
)
def test_only_names_that_were_found_are_known(name: str, ask: Ask, root: Path) -> None:
    write(root / "a", recipe=recipe())
    outside = write(root.parent / "outside", recipe=recipe())
    (outside / "report.html").write_text("secret")
    (root / "link").symlink_to(outside, target_is_directory=True)
    for address in ("/api/run", "/report"):
        for asked in (name, quote(name, safe=""), quote(quote(name, safe=""), safe="")):
            if asked.isascii() and " " not in asked and asked not in ("a",):
                assert ask(f"{address}?name={asked}")[0] == 404, asked
    assert set(runs(ask)) == {"a"}


def test_links_out_of_a_run_folder_are_not_followed(ask: Ask, root: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"label": "secret", "error": "secret", "bits_per_byte": 1}')
    run = write(root / "a", recipe=recipe())
    for name in ("report.html", "task.json", "error.json", "result.json", "log.jsonl"):
        (run / name).symlink_to(secret)
    row = runs(ask)["a"]
    assert (row["label"], row["bits_per_byte"], row["report"], row["state"]) == ("tiny", None, False, "running")
    assert ask("/report?name=a")[0] == 404
    assert b"secret" not in ask("/api/run?name=a")[2]


def test_a_pipe_in_place_of_a_file_holds_nothing_up(ask: Ask, root: Path) -> None:
    run = write(root / "a", recipe=recipe())
    os.mkfifo(run / "log.jsonl")
    os.mkfifo(run / "report.html")
    assert runs(ask)["a"]["loss"] is None
    assert ask("/report?name=a")[0] == 404
    with pytest.raises(OSError, match="regular"):
        read.read_regular(run / "log.jsonl")


# What is made of run folders


def test_a_run_from_its_beginning_to_its_end(ask: Ask, root: Path) -> None:
    run = write(root / "study" / "a", task={"study": "rates", "label": "lr=0.04", "seed": 3, "key": "k"})
    row = runs(ask)["study/a"]
    assert (row["state"], row["label"], row["study"], row["seed"]) == ("waiting", "lr=0.04", "rates", 3)

    write(run, recipe=recipe(seed=3, lr=0.04), log=json.dumps({"event": "start", "step": 0}) + "\n")
    assert runs(ask)["study/a"]["state"] == "running"

    with (run / "log.jsonl").open("a") as log:
        log.write(lines(4, tokens_per_second=100.0, bits_per_byte=1.5))
        log.write(json.dumps({"event": "forecast", "file_bytes": 1234}) + "\n" + '{"event": "step", "st')
    row = runs(ask)["study/a"]
    assert (row["step"], row["loss"], row["train_bits_per_byte"], row["forecast_bytes"]) == (4, 3.0, 1.5, 1234)
    assert (row["progress"], row["tokens_per_second"], row["seconds"], row["bits_per_byte"]) == (0.5, 100.0, 0.4, None)

    with (run / "log.jsonl").open("a") as log:
        log.write('ep": 5, "loss": 2.5, "seconds": 1, "progress": 1.0}\n{"event": "end", "step": 5}\n')
    row = runs(ask)["study/a"]
    assert (row["step"], row["loss"], row["state"]) == (5, 2.5, "running")
    told = details(ask, "study/a")
    assert told["curve"] == {
        "step": [1, 2, 3, 4, 5],
        "seconds": [0.1, 0.2, 0.3, 0.4, 1],
        "loss": [3.0, 3.0, 3.0, 3.0, 2.5],
    }
    assert told["settings"] == {
        "model": "GPT",
        "model.width": 64,
        "model.layers": "none",
        "train": "Train",
        "train.optimizers.matrix": "Muon",
        "train.optimizers.matrix.lr": 0.04,
        "train.betas.0": 0.9,
        "train.betas.1": 0.95,
        "seed": 3,
        "corpus": "data/a",
    }

    write(run, result=make_result())
    row = runs(ask)["study/a"]
    assert (row["state"], row["bits_per_byte"], row["progress"], row["reason"]) == ("finished", 1.53012, 1.0, "")
    result = details(ask, "study/a")["result"]
    assert result["scores.quantized_plain.bits_per_byte"] == 1.54218
    assert not [path for path in result if path.startswith(("tensors", "sample", "sha256"))]


def test_states_of_runs_that_go_wrong(ask: Ask, root: Path) -> None:
    error = {"error": "the loss is not finite"}
    age(write(root / "failed", recipe=recipe(), log=lines(3), error=error), 50)
    age(write(root / "again", recipe=recipe(), error=error), 50)
    write(root / "again", log=lines(3))
    age(write(root / "quiet", recipe=recipe(), log=lines(3)), folders.TRAINING_QUIET_SECONDS + 5)
    scoring = write(root / "scoring", recipe=recipe(), log=lines(3) + '{"event": "end"}\n')
    (scoring / ".lock").write_text(json.dumps(asdict(this_process())))
    age(scoring, folders.QUIET_SECONDS - 5)
    age(write(root / "killed", recipe=recipe(), log=lines(3) + '{"event": "end"}\n'), folders.QUIET_SECONDS + 5)
    trained = write(root / "trained", recipe=recipe(), log=lines(3) + '{"event": "end"}\n')
    (trained / "weights.safetensors").touch()
    age(trained, folders.QUIET_SECONDS + 5)
    age(write(root / "stopped", recipe=recipe(), log=lines(3)), folders.UNHELD_QUIET_SECONDS + 5)
    age(write(root / "begun", recipe=recipe(), log=lines(3)), folders.UNHELD_QUIET_SECONDS - 5)
    write(root / "untold", error={})
    write(root / "nan", recipe=recipe(), log=lines(2) + lines(1, 3).replace("3.0", "NaN"))
    write(root / "over", result={**make_result(), "under_cap": False, "verified": False})
    write(root / "no_run" / "inner", other={})
    found = runs(ask)
    assert {name: row["state"] for name, row in found.items()} == {
        **{
            "failed": "failed",
            "again": "running",
            "quiet": "stale",
            "scoring": "running",
            "killed": "stale",
            "trained": "trained",
        },
        **{"untold": "failed", "nan": "running", "over": "finished", "stopped": "stale", "begun": "running"},
    }
    assert found["stopped"]["reason"] == "it was stopped; the same command continues it"
    assert found["failed"]["reason"] == "the loss is not finite"
    assert found["again"]["reason"] == ""
    assert found["untold"]["reason"] == "no reason was written down"
    assert (found["nan"]["loss"], found["nan"]["reason"]) == (None, "the loss is not finite")
    assert found["over"]["reason"] == "verification failed; the artifact is over its cap"


def test_studies_with_their_runs_and_the_time_left(ask: Ask, root: Path) -> None:
    state = StudyState("rates", "somewhere", 3, 0, 12, 5400.0, this_process())
    state.write(root / "rates")
    replace(state, study="gone", driver=replace(this_process(), name="x-1")).write(root / "gone")
    replace(state, study=HOSTILE, done=12).write(root / "whole")
    write(root / "odd", driver="[")
    write(root / "worse", driver=state.to_json() | {"done": 10**400})
    told = json.loads(ask("/api/runs")[2])
    assert told["runs"] == [], "none of them is a run"
    assert told["studies"] == [
        {"study": "gone", "state": "stopped", "done": 3, "failed": 0, "total": 12, "seconds_left": 5400.0},
        {"study": "rates", "state": "running", "done": 3, "failed": 0, "total": 12, "seconds_left": 5400.0},
        {"study": HOSTILE, "state": "finished", "done": 12, "failed": 0, "total": 12, "seconds_left": 5400.0},
    ]


def test_a_run_whose_process_was_killed_has_failed_at_once(ask: Ask, root: Path) -> None:
    """It says so on the machine it ran on; a number that another process has now is not its."""
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    me = {"host": platform.node(), "pid": os.getpid(), "name": process_name(os.getpid()), "since": "now"}
    locks = {"alive": me, "killed": me | {"pid": gone.pid}, "reused": me | {"name": "x-1"}, "far": me | {"host": "x"}}
    for name, lock in locks.items():
        write(root / name, recipe=recipe(), log=lines(3))
        (root / name / ".lock").write_text(json.dumps(lock))
    rows = runs(ask)
    assert {name: rows[name]["state"] for name in locks} == {
        "alive": "running",
        "killed": "failed",
        "reused": "failed",
        "far": "running",
    }
    assert rows["killed"]["reason"] == f"its process, {gone.pid}, was killed"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        '{"recipe": ',
        "[1, 2]",
        "7",
        "null",
        "\0\0\0",
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"seed": ' + "9" * 5000 + "}",
    ],
    ids=["empty", "brace", "half", "list", "number", "null", "zeros", "deep", "deeper", "long"],
)
def test_a_broken_document_is_a_reason(content: str, ask: Ask, root: Path) -> None:
    write(root / "good", result=make_result())
    for name in ("recipe", "result", "error", "task"):
        write(root / name, **{name: content})
    (root / "log").mkdir()
    (root / "log" / "log.jsonl").write_bytes(content.encode() + b"\n\xff\xfe\n" + lines(2).encode())
    found = runs(ask)
    assert found["good"]["bits_per_byte"] == 1.53012
    for name in ("recipe", "result", "error", "task"):
        assert found[name]["reason"] == f"{name}.json is no JSON object"
        details(ask, name)
    assert found["result"]["state"] == found["error"]["state"] == "failed"
    assert found["log"]["step"] == 2


@pytest.mark.parametrize("value", [True, "1", [1], {"a": 1}, None, 10**400, float("inf"), -1e300])
def test_values_of_another_kind_are_not_known(value: Any, ask: Ask, root: Path) -> None:
    step = {"event": "step", "step": 1, "seconds": 0.1}
    log = [step, {**step, "step": value}, {**step, "loss": value}, {**step, "seconds": value}, {"event": value}, value]
    told = {"recipe": value, "seed": value, "corpus": value}
    result = {"bits_per_byte": value, "training": value, "seconds": {"train": value}, "artifact_bytes": value}
    write(root / "a", recipe=told, log="".join(json.dumps(event) + "\n" for event in log), task={"label": value})
    write(root / "b", result=result, error={"error": value})
    found = runs(ask)
    assert found["a"]["seed"] is None
    assert found["a"]["label"] == (value if isinstance(value, str) else "a")
    assert found["b"]["bits_per_byte"] is None
    assert found["b"]["artifact_bytes"] is None
    assert details(ask, "a")["curve"]["loss"] == []
    details(ask, "b")


def test_files_that_are_too_large(ask: Ask, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(root / "a", recipe=recipe(), error={"error": "x"}, log="y" * 2500 + "\n" + lines(40))
    os.truncate(root / "a" / "error.json", read.LARGEST_BYTES + 1)
    monkeypatch.setattr(read, "LARGEST_BYTES", 1000)
    assert runs(ask)["a"]["reason"] == "error.json cannot be read: it has more than 16,777,216 bytes"
    seen = [runs(ask)["a"]["step"] for _ in range(9)]
    assert seen == sorted(seen, key=lambda step: step or 0)
    assert seen[-1] == 40, "each look reads on"


def test_what_did_not_change_is_not_read_again(ask: Ask, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write(root / "a", recipe=recipe(), log=lines(3))
    runs(ask)
    opened: list[str] = []
    real = read.open_regular
    monkeypatch.setattr(read, "open_regular", lambda path, *flags: opened.append(path.name) or real(path, *flags))  # type: ignore[func-returns-value]
    runs(ask)
    assert opened == []
    with (run / "log.jsonl").open("a") as log:
        log.write(lines(1, 4))
    assert runs(ask)["a"]["step"] == 4
    assert opened == ["log.jsonl"]


def test_a_log_that_begins_anew(ask: Ask, root: Path) -> None:
    run = write(root / "a", recipe=recipe(), log=lines(9))
    assert runs(ask)["a"]["step"] == 9
    write(run, log=lines(2))
    assert details(ask, "a")["curve"]["step"] == list(range(1, 10)), "asked for in between looks"
    assert runs(ask)["a"]["step"] == 2
    assert details(ask, "a")["curve"]["step"] == [1, 2]
    for path in run.iterdir():
        path.unlink()
    assert runs(ask) == {}


def test_a_resumed_run_replaces_what_it_did_again(tmp_path: Path) -> None:
    path = write(tmp_path, log=lines(6) + lines(2, first=4, loss=2.0)) / "log.jsonl"
    log = Log().read(path)
    assert [(point.step, point.loss) for point in log.points] == [(1, 3), (2, 3), (3, 3), (4, 2), (5, 2)]


@pytest.mark.parametrize("steps", [POINTS, POINTS + 1, 2 * POINTS + 3, 7 * POINTS])
def test_a_long_curve_is_thinned_to_means(steps: int, tmp_path: Path) -> None:
    events = [{"event": "step", "step": step, "seconds": step, "loss": step % 2} for step in range(1, steps + 1)]
    path = write(tmp_path, log="".join(json.dumps(event) + "\n" for event in events)) / "log.jsonl"
    points = Log().read(path).points
    assert POINTS // 2 <= len(points) <= POINTS
    assert points[-1].step == steps
    assert sum(point.events for point in points) == steps
    assert sum(point.loss * point.events for point in points) == pytest.approx(sum(event["loss"] for event in events))
    assert [point.step for point in points] == sorted({point.step for point in points})


def test_numbers_that_are_not_finite_are_null() -> None:
    assert parse_finite(b"[NaN, -Infinity, 1e999, 1.5, 2]") == [None, None, None, 1.5, 2]


def test_settings_are_flattened_and_bounded() -> None:
    assert flat({"a": {"kind": "X", "b": [1, {"kind": "Y"}]}, "c": {}}) == {
        "a": "X",
        "a.b.0": 1,
        "a.b.1": "Y",
        "c": "none",
    }
    assert len(flat({"a": list(range(10_000))})) == 4000
    assert flat({"a": "x" * 1000})["a"] == "x" * 300 + "…"


def test_folders_too_deep_or_hidden_are_left_out(ask: Ask, root: Path) -> None:
    for name in ("1", "1/2/3/4", "1/2/3/4/5", ".hidden"):
        write(root / name, recipe=recipe())
    assert set(runs(ask)) == {"1", "1/2/3/4"}


def test_the_served_folder_may_be_a_run_and_a_name_need_not_be_text(ask: Ask, root: Path) -> None:
    write(root, recipe=recipe())
    odd = os.fsdecode(b"odd-\xff")
    write(root / odd, recipe=recipe(seed=5))
    write(root / HOSTILE, recipe=recipe(seed=6))
    assert set(runs(ask)) == {".", "odd-�", HOSTILE}
    assert details(ask, "odd-�")["row"]["seed"] == 5
    assert details(ask, HOSTILE)["row"]["seed"] == 6


def test_a_whole_disk_is_not_walked(ask: Ask, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abcdef":
        write(root / name, recipe=recipe())
    monkeypatch.setattr(folders, "MOST_FOLDERS", 4)
    answer = json.loads(ask("/api/runs")[2])
    assert (len(answer["runs"]), answer["complete"]) == (3, False)


@pytest.mark.long
def test_many_ask_at_once_while_a_log_grows(ask: Ask, root: Path) -> None:
    run = write(root / "a", recipe=recipe(), log="")
    failures: list[BaseException] = []

    def look() -> None:
        try:
            steps = [runs(ask)["a"]["step"] or 0 for _ in range(15)]
            assert steps == sorted(steps)
            assert len({len(one) for one in details(ask, "a")["curve"].values()}) == 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    with (run / "log.jsonl").open("a", buffering=1) as log:
        for step in range(1, 2000):
            log.write(lines(1, step))
    for thread in threads:
        thread.join()
    assert not failures
    assert runs(ask)["a"]["step"] == 1999


# The verb


def test_what_is_wrong_is_one_line(served: Board, tmp_path: Path) -> None:
    for arguments, message in [
        ([str(tmp_path / "none")], "no folder"),
        ([str(tmp_path), "--port", str(served.server_port)], f"port {served.server_port} cannot be used"),
    ]:
        ended = CliRunner().invoke(app, ["board", *arguments])
        assert isinstance(ended.exception, UserError)
        assert message in str(ended.exception)
        assert "\n" not in str(ended.exception)


@pytest.mark.long
def test_interrupt_ends_it_quietly(tmp_path: Path) -> None:
    write(tmp_path / "a", recipe=recipe())
    program = "from caddie.cli.lab import board\nfrom caddie.cli.exits import end\n"
    program += "end(lambda: board.main(standalone_mode=False))"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            connection = http.client.HTTPConnection("127.0.0.1", told["port"], timeout=5)
            connection.request("GET", "/api/runs")
            assert len(json.loads(connection.getresponse().read())["runs"]) == 1
            connection.close()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=10)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (0, "", "")
    assert told == {"url": f"http://127.0.0.1:{told['port']}/", "port": told["port"], "folder": str(tmp_path)}


# The page in a browser

ROWS = "[...document.querySelectorAll('#runs tbody .run label')].map(one => one.textContent).join()"
HEADERS = "[...document.querySelectorAll('#settings thead th, #figures thead th')].map(one => one.textContent).join()"


def cells(table: str, row: str) -> str:
    """Script for the cells of a row of a comparison, by its first cell."""
    return (
        f"[...document.querySelectorAll('#{table} tbody tr')].filter(row => row.cells[0].textContent === '{row}')"
        ".map(row => [...row.cells].slice(1).map(one => one.textContent).join(' '))[0]"
    )


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as started:
        started.size(1200)
        yield started


LINES = "document.querySelectorAll('#plot polyline').length"


@pytest.mark.long
def test_a_run_that_is_removed_leaves_the_comparison(served: Board, root: Path, browser: Browser) -> None:
    for name in "ab":
        write(root / name, recipe=recipe(), log=lines(5))
    browser.open(f"{served.url}#run=a&run=b")
    browser.until(LINES, 2)
    shutil.rmtree(root / "b")
    browser.until(LINES, 1)
    assert browser.run("document.querySelectorAll('#figures thead th').length") == 2
    shutil.rmtree(root / "a")
    browser.until("document.getElementById('comparison').hidden")


@pytest.mark.long
def test_a_loss_that_stays_is_drawn(served: Board, root: Path, browser: Browser) -> None:
    write(root / "a", log=lines(60, loss=3.3))  # the means of which differ in the last bit
    browser.open(f"{served.url}#run=a")
    browser.until(LINES, 1)
    assert browser.run("document.querySelectorAll('#plot .up').length") > 2


@pytest.mark.long
def test_the_axis_of_a_short_run_has_whole_figures(served: Board, root: Path, browser: Browser) -> None:
    write(root / "a", log=lines(20))
    browser.open(f"{served.url}#run=a&axis=seconds")
    browser.until(LINES, 1)
    across = browser.run("[...document.querySelectorAll('#plot .across')].map(one => one.textContent).join(' ')")
    assert across == "0 0.25 0.5 0.75 1 1.25 1.5 1.75 2"


@pytest.mark.long
def test_an_error_while_drawing_does_not_stop_the_looks(served: Board, root: Path, browser: Browser) -> None:
    write(root / "a", recipe=recipe(), log=lines(5))
    browser.open(f"{served.url}#run=a")
    browser.until(LINES, 1)
    browser.run("globalThis.looks = 0; globalThis.asked = fetch; fetch = (...of) => (looks++, asked(...of)); 1")
    browser.run("plot = () => { throw new Error('no room'); }; 1")
    write(root / "a", log=lines(9))
    browser.until("looks > 3")


@pytest.mark.long
def test_many_long_curves_are_drawn_at_once(served: Board, root: Path, browser: Browser) -> None:
    write(root / "a", log=lines(60, loss=3.0012))
    browser.open(f"{served.url}#run=a")
    browser.until(LINES, 1)
    browser.run("globalThis.x = [...Array(500).keys()]; globalThis.known = details.get('a'); 1")
    curve = "{ step: x, seconds: x, loss: x.map((at) => 3.00122 - at * 4e-8) }"
    browser.run(f"plot(Array.from({{ length: 300 }}, () => ({{ ...known, curve: {curve} }}))); 1")
    assert browser.run(LINES) == 300
    left = "document.getElementById('plot').getBoundingClientRect().left"
    labels = "[...document.querySelectorAll('#plot .up')]"
    assert browser.run(f"{labels}.every((one) => one.getBoundingClientRect().left >= {left})"), "none is cut off"


@pytest.mark.long
def test_a_report_hands_out_its_numbers(served: Board, root: Path, browser: Browser, tmp_path: Path) -> None:
    write_report(write_run(root / "a", make_result(), make_events()))
    browser.ask("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    browser.open(f"{served.url}report?name=a")
    browser.until("document.querySelectorAll('a[download]').length", 2)
    browser.click("a[download='steps.csv']")
    latest = time.monotonic() + 10
    while not (tmp_path / "steps.csv").exists():
        assert time.monotonic() < latest, browser.said
        time.sleep(0.05)


def test_the_report_of_a_long_run_is_served(ask: Ask, root: Path) -> None:
    write(root / "a", result=make_result())
    (root / "a" / "report.html").write_bytes(b" " * (LARGEST_BYTES + 1))  # which holds each of its logged steps
    assert len(ask("/report?name=a")[2]) == LARGEST_BYTES + 1


@pytest.mark.slow
def test_the_page_in_a_browser(served: Board, root: Path, tmp_path: Path) -> None:
    for label, seed, bits, rate in [("base", 1, 1.5, 0.02), ("faster", 1, 1.4, 0.06), ("slower", 10, 1.6, 0.01)]:
        run = write_run(root / f"rates/{label}", {**make_result(), "bits_per_byte": bits, "seed": seed}, make_events())
        write(run, recipe=recipe(seed, rate), task={"study": "rates", "label": label, "seed": seed})
    live = write(root / "live", recipe=recipe(2, name="live"), log=lines(5))
    write(root / HOSTILE, task={"label": HOSTILE}, error={"error": HOSTILE})
    StudyState(HOSTILE, "", 3, 0, 12, 5400.0, this_process()).write(root / "rates")
    with Browser(tmp_path / "profile") as browser:
        browser.size(1200)
        browser.open(served.url)
        browser.until("document.querySelectorAll('#runs tbody tr').length", 5)
        assert browser.run("document.images.length") == 0
        assert (
            browser.run("document.getElementById('studies').innerText") == f"{HOSTILE} running 3 of 12 runs, 1.5 h left"
        )
        assert (
            browser.run(f"document.getElementById({json.dumps('run ' + HOSTILE)}).closest('tr').innerText").count(
                "<img"
            )
            == 3
        )

        # sort by a click on a header, then by another
        browser.click("th[data-key=bits_per_byte] button")
        assert browser.run(ROWS) == f"faster,base,slower,live,{HOSTILE}"
        browser.press("Enter", "\r")
        assert browser.run(ROWS) == f"slower,base,faster,live,{HOSTILE}", "unknown ones stay last"
        assert browser.run("document.querySelector('th[data-key=bits_per_byte]').ariaSort") == "descending"
        browser.click("th[data-key=seed] button")
        assert browser.run(ROWS) == f"faster,base,live,slower,{HOSTILE}"

        # filter by typing
        browser.run("document.getElementById('filter').focus()")
        browser.ask("Input.insertText", text="rates FINISHED")
        assert sorted(browser.run(ROWS).split(",")) == ["base", "faster", "slower"]
        browser.run("document.getElementById('filter').value = ''")
        browser.ask("Input.insertText", text="seed 1")
        assert sorted(browser.run(ROWS).split(",")) == ["base", "faster", "slower"]
        browser.run("document.getElementById('filter').value = ''")
        browser.ask("Input.insertText", text="e")

        # tick two
        browser.click("[id='run rates/base']")
        browser.click("[id='run rates/faster']")
        browser.until("document.querySelectorAll('#plot polyline').length", 2)
        browser.until(cells("settings", "train.optimizers.matrix.lr"), "0.02 0.06")
        assert browser.run("document.querySelectorAll('#settings tbody tr').length") == 1, "all else is the same"
        assert browser.run(cells("figures", "Bits per byte of the artifact")) == "1.5000 1.4000 −0.1000"
        assert (
            browser.run(HEADERS) == ",base, seed 1,faster, seed 1,second less first" + ",,base, seed 1,faster, seed 1"
        )

        # a third, which goes on; the rest stays as it is
        browser.click("[id='run live']")
        browser.until("document.querySelectorAll('#plot polyline').length", 3)
        browser.until(cells("figures", "Steps"), "812 812 5")
        focused = browser.run("document.activeElement.id")
        with (live / "log.jsonl").open("a") as log:
            log.write(lines(1, 6))
        browser.until(cells("figures", "Steps"), "812 812 6")
        assert browser.run("document.activeElement.id") == focused == "run live"
        assert browser.run("document.querySelectorAll('#runs tbody input:checked').length") == 3
        assert browser.run("document.querySelector('th[aria-sort]').dataset.key") == "seed"
        assert browser.run("document.getElementById('filter').value") == "e"

        # the view is in the address
        browser.click("#axis input[value=seconds]")
        address = browser.run("location.href")
        browser.open(address)
        browser.until("document.querySelectorAll('#plot polyline').length", 3)
        browser.until("document.querySelector('#plot svg').getAttribute('aria-label').endsWith('against seconds')")
        assert browser.run("document.querySelector('th[aria-sort]').dataset.key") == "seed"
        browser.click("#clear")
        assert browser.run("document.getElementById('comparison').hidden && !location.hash.includes('run=')")

        again = write_run(root / "again/base", {**make_result(), "seed": 1}, make_events())
        write(again, recipe=recipe(1, 0.03), task={"study": "again", "label": "base", "seed": 1})
        browser.open(f"{served.url}#run=rates/base&run=again/base")
        browser.until("document.querySelectorAll('#plot polyline').length", 2)
        named = ",base, seed 1 (rates/base),base, seed 1 (again/base)"
        assert browser.run(HEADERS) == f"{named},second less first,{named}", (
            "names that are the same have their folders"
        )
        assert "(again/base)" in browser.run("document.getElementById('legend').textContent")

        for width in (1200, 390):
            browser.size(width)
            browser.open("about:blank")
            browser.open(address)
            browser.until("document.querySelectorAll('#plot polyline').length", 3)
            assert browser.run("document.documentElement.scrollWidth") <= width, "nothing sticks out"
        assert browser.said == []
