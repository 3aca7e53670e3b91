"""A server on this machine that answers as the Hugging Face hub does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit


class Hub(ThreadingHTTPServer):
    """Serves the files of one repository; a file in `drops` is cut off once after so many bytes."""

    def __init__(self, files: Mapping[str, bytes], repository: str = "willdepueoai/parameter-golf") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repository, self.files = repository, dict(files)
        self.branches = {"main": "a" * 40}
        """Branch to commit."""
        self.drops: dict[str, int] = {}
        self.asked: list[tuple[str, str, str | None]] = []
        """Method, path and range of every request."""
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def fetched(self) -> list[str]:
        """Return the names of the files that were fetched, in order."""
        return [Path(path).name for method, path, _ in self.asked if method == "GET" and "/" in path]


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        hub, path, wanted = self.server, unquote(urlsplit(self.path).path), self.headers.get("Range")
        api, resolve = f"/api/datasets/{hub.repository}/revision/", f"/datasets/{hub.repository}/resolve/"
        if path.startswith(api):
            self.listing(path.removeprefix(api))
            return
        revision, _, name = path.removeprefix(resolve).partition("/")
        hub.asked.append((self.command, name, wanted))
        if not path.startswith(resolve):
            self.absent("RepoNotFound")
        elif revision not in hub.branches.values():
            self.absent("RevisionNotFound")
        elif name not in hub.files:
            self.absent("EntryNotFound")
        else:
            self.file(name, wanted, revision, body)

    def absent(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def listing(self, revision: str) -> None:
        hub = self.server
        hub.asked.append((self.command, revision, None))
        commit = hub.branches.get(revision, revision)
        if commit not in hub.branches.values():
            self.absent("RevisionNotFound")
            return
        files = [{"rfilename": name, "size": len(data), "blobId": "b"} for name, data in hub.files.items()]
        content = json.dumps({"id": hub.repository, "sha": commit, "siblings": files}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def file(self, name: str, wanted: str | None, commit: str, body: bool) -> None:
        whole = self.server.files[name]
        begin = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        content = whole[begin:]
        self.send_response(206 if begin else 200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{sha256(whole).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(whole) - 1}/{len(whole)}")
        self.end_headers()
        if body:
            self.wfile.write(content[: self.server.drops.pop(name, len(content))])

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving(files: Mapping[str, bytes], repository: str = "willdepueoai/parameter-golf") -> Iterator[Hub]:
    """Serve the files while the block runs."""
    with Hub(files, repository) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
