"""A device or a pipe in place of a file, as input of every verb and as its output: one line at once, and no change."""

import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

Call = Callable[..., Any]
MEMORY_BYTES, SECONDS = 2 << 30, 20
ARTIFACT = "IN.caddie"
REFUSED = r"not a regular file|not a folder|not a run folder|no file IN|no folder IN|no corpus in IN|no IN/result.json"
"""Error messages, by the kind of file that a verb wants."""

INPUTS = {
    "sample": ["sample", ARTIFACT],
    "score": ["score", ARTIFACT],
    "verify": ["verify", ARTIFACT],
    "export": ["export", ARTIFACT, "--to", "safetensors"],
    "lm-eval": ["lm-eval", ARTIFACT],
    "compress": ["compress", "GOOD", "IN", "--quiet"],
    "compress with": ["compress", ARTIFACT, "TEXT", "--out", "coded", "--quiet"],
    "decompress": ["decompress", "GOOD", "IN.cz", "--quiet"],
    "decompress with": ["decompress", ARTIFACT, "TEXT", "--out", "plain", "--quiet"],
    "data": ["data", "IN.txt", "--quiet"],
    "data, compressed": ["data", "IN.txt.gz", "--quiet"],
    "data, Parquet": ["data", "IN.parquet", "--quiet"],
    "data, its tokenizer": ["data", "TEXT", "--tokenizer", ARTIFACT, "--quiet"],
    "data, a SentencePiece model": ["data", "TEXT", "--tokenizer", "IN.model", "--quiet"],
    "data, ranks": ["data", "TEXT", "--tokenizer", "IN.tiktoken", "--quiet"],
    "data, a tokenizer.json": ["data", "TEXT", "--tokenizer", "IN.json", "--quiet"],
    "data, a setting": ["data", "TEXT", 'data.tokenizer=SentencePieceFile(path="IN.model")', "--quiet"],
    "data, ranks by a setting": ["data", "TEXT", 'data.tokenizer=TiktokenFile(path="IN.tiktoken")', "--quiet"],
    "data, JSON by a setting": ["data", "TEXT", 'data.tokenizer=HuggingFaceFile(path="IN.json")', "--quiet"],
    "data, against": ["data", "TEXT", "--against", "IN", "--quiet"],
    "run": ["run", "tiny", "--data", "IN.txt", "--quiet"],
    "run, JSON": ["run", "IN.json", "--quiet"],
    "run, TOML": ["run", "IN.toml", "--quiet"],
    "run, Python": ["run", "IN.py:mine", "--quiet"],
    "run, its parts": ["run", "tiny", "--parts", "IN.py", "--quiet"],
    "train": ["train", "tiny", "--data", "IN.txt", "--quiet"],
    "doctor": ["doctor", "IN.json", "--quiet"],
    "diff": ["diff", "IN.json", "tiny"],
    "ablate": ["ablate", "IN.json", "--quiet"],
    "compare": ["compare", "IN", "--against", "RUN"],
    "sweep": ["sweep", "IN.json", "model.depth=1,2", "--quiet"],
    "study": ["study", "IN.py", "--quiet"],
    "score, a text": ["score", "GOOD", "--data", "IN.txt", "--quiet"],
    "score, a scorer": ["score", "GOOD", "--data", "CORPUS", "--scorer", "IN.py:Mine", "--quiet"],
    "verify, a text": ["verify", "GOOD", "--data", "IN.txt"],
    "pack": ["pack", "IN", "--quiet"],
    "replay": ["replay", "IN", "--quiet"],
    "report": ["report", "IN"],
    "review": ["review", "IN"],
    "submit": ["submit", "--quiet", "IN", "--out", "new", "--author", "a", "--github-id", "b"],
    "push": ["push", "IN", "hf:someone/something"],
    "board": ["board", "IN", "--port", "0"],
}

OUTPUTS = {
    "compress": ["compress", "GOOD", "TEXT", "--out", "OUT", "--quiet"],
    "decompress": ["decompress", "GOOD", "TEXT", "--out", "OUT", "--quiet"],
    "pack": ["pack", "RUN", "--out", "OUT", "--quiet"],
    "export html": ["export", "GOOD", "--to", "html", "--out", "OUT"],
    "export safetensors": ["export", "GOOD", "--to", "safetensors", "--out", "OUT"],
    "documents": ["score", "GOOD", "--data", "CORPUS", "--documents", "OUT", "--quiet"],
    "run": ["run", "tiny", "--data", "TEXT", "--out", "OUT", "--quiet"],
    "train": ["train", "tiny", "--data", "TEXT", "--out", "OUT", "--quiet"],
    "data": ["data", "TEXT", "--out", "OUT", "--quiet"],
    "submit": ["submit", "--quiet", "RUN", "--out", "OUT", "--author", "a", "--github-id", "b"],
}


@pytest.fixture
def bounded() -> Iterator[None]:
    """Whoever waits for a pipe, or reads a device to its end, is stopped."""

    def stop(number: int, frame: object) -> NoReturn:
        raise AssertionError(f"it still waits after {SECONDS} s")

    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES, before[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def filled(arguments: list[str], tiny: Any) -> list[str]:
    """The arguments with the names of what there is."""
    places = {"GOOD": tiny.artifact, "TEXT": tiny.text, "CORPUS": tiny.corpus, "RUN": tiny.folder}
    return [str(places.get(word, word)) for word in arguments]


def make(name: str, kind: str) -> None:
    """A pipe that nobody writes to, or a link to a device that has no end."""
    if kind == "pipe":
        os.mkfifo(name)
    else:
        os.symlink("/dev/zero", name)


def printed(redirection: str, stdout: int | None = None) -> tuple[int, bytes]:
    """Return status and standard error of a verb whose little output is written only when it is flushed."""
    command = ["sh", "-c", f'exec "$0" -m caddie diff tiny tiny model.depth=3 --json {redirection}', sys.executable]
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    ended = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, env=buffered, check=False)
    return ended.returncode, ended.stderr


@pytest.mark.long  # processes of their own, each of which imports PyTorch
@pytest.mark.parametrize("redirection", ["", "2>&-"])
def test_a_reader_that_leaves_ends_it_without_a_word_and_not_as_a_failed_check(redirection: str) -> None:
    read, write = os.pipe()
    os.close(read)
    assert printed(redirection, write) == (141, b"")
    os.close(write)


@pytest.mark.long
@pytest.mark.parametrize(
    ("redirection", "says"),
    [
        (">/dev/full", b"No space left on device"),
        (">&-", b"standard output is closed, so the result cannot be printed"),
    ],
)
def test_a_result_that_cannot_be_printed_is_a_mistake(redirection: str, says: bytes) -> None:
    assert printed(redirection) == (2, b"caddie: " + says + b"\n")


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("verb", INPUTS)
def test_no_verb_reads_it(
    verb: str, kind: str, tiny_run: Any, caddie: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bounded: None
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = filled(INPUTS[verb], tiny_run)
    made = set(re.findall(r"IN[.\w]*", " ".join(INPUTS[verb])))
    for name in made:
        make(name, kind)
    ended = caddie(*arguments)
    assert ended.status == 2
    assert re.fullmatch(rf"caddie: .*({REFUSED}).*\n", ended.err), ended.err
    assert "IN" in ended.err
    assert {path.name for path in Path().rglob("*") if path.is_file()} <= {"error.json"}, "of the run that failed"


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("verb", OUTPUTS)
def test_no_verb_replaces_it(
    verb: str, kind: str, tiny_run: Any, caddie: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bounded: None
) -> None:
    monkeypatch.chdir(tmp_path)
    make("OUT", kind)
    before = Path("OUT").lstat()
    ended = caddie(*filled(OUTPUTS[verb], tiny_run))
    assert ended.status == 2
    assert re.fullmatch(r"caddie: .*(OUT|/dev/zero).*\n", ended.err), ended.err
    after = Path("OUT").lstat()  # its times may be others
    assert (after.st_mode, after.st_dev, after.st_ino) == (before.st_mode, before.st_dev, before.st_ino)
    assert os.listdir() == ["OUT"]
