"""Fetching published shards, from a stand-in server on this machine."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from recording import Recorder

from caddie.data.corpus import Corpus
from caddie.data.fineweb import fetch_fineweb
from caddie.data.shards import open_shard, write_shard
from caddie.data.tokenizers import SentencePieceBPE, Tokenizer
from caddie.errors import UserError
from caddie.runtime.progress import SILENT

pytest.importorskip("huggingface_hub")

ROOT = Path(__file__).resolve().parent.parent.parent
SHARDS = "datasets/datasets/fineweb10B_sp300/fineweb_"
MODEL = "datasets/tokenizers/fineweb_300_bpe.model"
WORDS = ["a", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dogs", "that", "rain", "made", "sleepy"]


def documents(seed: int) -> list[bytes]:
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, 40)).encode() for _ in range(30)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return SentencePieceBPE().build(300, lambda: documents(0))


@pytest.fixture(scope="module")
def published(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Path in the repository to content."""
    files: dict[str, bytes] = {MODEL: tokenizer.serialize()}
    path = tmp_path_factory.mktemp("shard") / "shard.bin"
    for number, name in enumerate(["val_000000", "train_000000", "train_000001", "train_000002"]):
        runs = [np.append(np.uint16(tokenizer.bos), ids) for ids in tokenizer.encode_many(documents(number))]
        write_shard(path, np.concatenate(runs))
        files[f"{SHARDS}{name}.bin"] = path.read_bytes()
    manifest = {
        "datasets": [
            {"name": "fineweb10B_byte260", "tokenizer_name": "bytes", "stats": {}},
            {"name": "fineweb10B_sp300", "tokenizer_name": "sp", "stats": {"files_train": 3, "files_val": 1}},
        ],
        "tokenizers": [
            {"name": "bytes", "path": "tokenizers/bytes.json"},
            {"name": "sp", "model_path": "tokenizers/fineweb_300_bpe.model"},
        ],
    }
    files["datasets/manifest.json"] = json.dumps(manifest).encode()
    return files


class Hub(ThreadingHTTPServer):
    """Serves files as the real one does; a file in `drops` is cut off once after so many bytes."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = dict(files)
        self.drops: dict[str, int] = {}
        self.asked: list[tuple[str, str, str | None]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def fetched(self) -> list[str]:
        return [Path(path).name for method, path, _ in self.asked if method == "GET"]


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        prefix = "/datasets/willdepueoai/parameter-golf/resolve/main/"
        path = self.path.removeprefix(prefix)
        wanted = self.headers.get("Range")
        self.server.asked.append((self.command, path, wanted))
        if not self.path.startswith(prefix) or path not in self.server.files:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("X-Repo-Commit", "a" * 40)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        whole = self.server.files[path]
        begin = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        content = whole[begin:]
        self.send_response(206 if begin else 200)
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("ETag", f'"{sha256(whole).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(whole) - 1}/{len(whole)}")
        self.end_headers()
        if body:
            self.wfile.write(content[: self.server.drops.pop(path, len(content))])

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(published: dict[str, bytes]) -> Iterator[Hub]:
    with Hub(published) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def fetch(hub: Hub, folder: Path, shards: int = 2, variant: str = "sp300", told: list[str] | None = None) -> Corpus:
    report = SILENT if told is None else Recorder(lambda event: told.append(event["text"]))
    return fetch_fineweb(variant, shards, folder, report, endpoint=hub.url)


@pytest.mark.long
def test_the_first_shards_become_a_corpus(hub: Hub, tmp_path: Path, tokenizer: Tokenizer) -> None:
    told: list[str] = []
    found = fetch(hub, tmp_path / "out", told=told)
    assert found.folder == tmp_path / "out"
    assert hub.fetched() == [
        "manifest.json",
        "fineweb_300_bpe.model",
        "fineweb_val_000000.bin",
        "fineweb_train_000000.bin",
        "fineweb_train_000001.bin",
    ]
    assert any(line.startswith("fineweb_train_000001.bin") and line.endswith("bytes (3 of 3)") for line in told)
    assert found.tokenizer().sha256 == tokenizer.sha256
    assert [shard.file for shard in found.manifest.validation.shards] == [f"{SHARDS}val_000000.bin"]
    assert len(found.train_shards()) == 2
    assert found.manifest.validation.source_bytes == sum(map(len, documents(0)))
    assert found.manifest.byte_source == "table"
    found.check_disjoint()


def test_complete_files_are_not_fetched_again(hub: Hub, tmp_path: Path) -> None:
    fetch(hub, tmp_path, 1)
    hub.asked.clear()
    assert len(fetch(hub, tmp_path, 1).train_shards()) == 1
    assert hub.asked == []
    assert len(fetch(hub, tmp_path, 3).train_shards()) == 3
    assert hub.fetched() == ["fineweb_train_000001.bin", "fineweb_train_000002.bin"]
    assert len(fetch(hub, tmp_path, 2).train_shards()) == 2


def test_a_stopped_run_continues(hub: Hub, tmp_path: Path) -> None:
    kept = hub.files.pop(f"{SHARDS}train_000001.bin")
    with pytest.raises(UserError, match=r"has no file datasets.*train_000001.bin") as caught:
        fetch(hub, tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="no corpus"):
        Corpus.load(tmp_path)
    hub.files[f"{SHARDS}train_000001.bin"] = kept
    hub.asked.clear()
    assert len(fetch(hub, tmp_path).train_shards()) == 2
    assert hub.fetched() == ["fineweb_train_000001.bin"]


def test_a_dropped_connection_resumes_within_the_file(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1024)
    monkeypatch.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda seconds: None))
    name = f"{SHARDS}train_000000.bin"
    hub.drops[name] = 1500
    found = fetch(hub, tmp_path, 1)
    assert [wanted for method, path, wanted in hub.asked if method == "GET" and path == name] == [None, "bytes=1024-"]
    assert (tmp_path / name).read_bytes() == hub.files[name]
    found.check_shards("train")


def test_a_file_cut_short_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    fetch(hub, tmp_path, 1)
    path = tmp_path / f"{SHARDS}val_000000.bin"
    path.write_bytes(path.read_bytes()[:-10])
    hub.asked.clear()
    fetch(hub, tmp_path, 1)
    assert hub.fetched() == ["fineweb_val_000000.bin"]
    assert len(open_shard(path)) > 0


def test_what_cannot_be_had_is_one_line(hub: Hub, tmp_path: Path) -> None:
    cases = [
        ("sp301", 1, "has sp300, not sp301; did you mean sp300"),
        ("sp300", 4, "sp300 has 3 training shards, not 4"),
        ("sp300", 0, "at least one training shard"),
    ]
    for variant, shards, message in cases:
        with pytest.raises(UserError, match=message) as caught:
            fetch(hub, tmp_path, shards, variant)
        assert "\n" not in str(caught.value)
    hub.files[f"{SHARDS}val_000000.bin"] = b"<html>busy</html>"
    with pytest.raises(UserError, match=r"val_000000.bin: not a token shard"):
        fetch(hub, tmp_path)


@pytest.mark.parametrize("content", [b"[]", b"{", b'{"datasets": [{}], "tokenizers": []}', b'{"tokenizers": [1]}'])
def test_an_unknown_manifest_is_one_line(hub: Hub, tmp_path: Path, content: bytes) -> None:
    hub.files["datasets/manifest.json"] = content
    with pytest.raises(UserError, match="not the manifest this program knows") as caught:
        fetch(hub, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_manifest_cannot_lead_out_of_the_folder(hub: Hub, tmp_path: Path) -> None:
    manifest = json.loads(hub.files["datasets/manifest.json"])
    for path in ("../../escaped.model", "/etc/passwd"):
        manifest["tokenizers"][1]["model_path"] = path
        hub.files["datasets/manifest.json"] = json.dumps(manifest).encode()
        with pytest.raises(UserError, match="leads out of the repository"):
            fetch(hub, tmp_path / path.replace("/", "_"))


def test_no_server_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*arguments: object, **settings: object) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    with pytest.raises(UserError, match=r"\(no route\); the same command continues") as caught:
        fetch_fineweb("sp300", 1, tmp_path, SILENT)
    assert "\n" not in str(caught.value)


def test_the_library_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name.startswith("huggingface_hub"):
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"pip install 'caddie\[hub\]'"):
        fetch_fineweb("sp300", 1, tmp_path, SILENT)


def test_the_environment_is_changed_for_the_library_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def download(*arguments: object, **settings: object) -> None:
        seen.extend(os.environ[name] for name in ("HF_HOME", "HF_XET_CACHE"))
        raise RuntimeError

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setenv("HF_HOME", "mine")
    monkeypatch.delenv("HF_XET_CACHE", raising=False)
    with pytest.raises(UserError, match="RuntimeError"):
        fetch_fineweb("sp300", 1, tmp_path, SILENT)
    assert [Path(value).is_relative_to(tmp_path) for value in seen] == [True, True]
    assert os.environ["HF_HOME"] == "mine"
    assert "HF_XET_CACHE" not in os.environ


@pytest.mark.long
def test_nothing_is_written_at_home(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    script = "import sys; from pathlib import Path; from caddie.data.fineweb import fetch_fineweb\n"
    script += "from caddie.report.display import Display\n"
    script += "fetch_fineweb('sp300', 1, Path(sys.argv[1]), Display(quiet=True))"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    environment = {**kept, "HOME": str(home), "PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub.url}
    command = [sys.executable, "-c", script, str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert list(home.rglob("*")) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "out"]
    assert all(path.startswith("datasets/") for _, path, _ in hub.asked)
