"""A server on this machine that answers as the Hugging Face hub does."""

import base64
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch
from urllib.parse import unquote, urlsplit


class Hub(ThreadingHTTPServer):
    """Serves the files of one repository; a file in `drops` is cut off once after so many bytes.

    One of models takes uploads: a commit makes the repository, and moves `main`.
    """

    def __init__(
        self, files: Mapping[str, bytes], repository: str = "willdepueoai/parameter-golf", kind: str = "dataset"
    ) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repository, self.files = repository, dict(files)
        self.kind, self.token = kind, ""
        """The token that every request needs, if any."""
        self.visibility: str | None = None
        """That with which the repository was made."""
        self.messages: list[str] = []
        """Title of every commit."""
        self.history: dict[str, dict[str, bytes]] = {}
        """Commit to the files that it has, for those that were pushed."""
        self.stored: dict[str, bytes] = {}
        """SHA-256 to the bytes of each large file."""
        self.branches = {"main": "a" * 40}
        """Branch to commit."""
        self.drops: dict[str, int] = {}
        self.asked: list[tuple[str, str, str | None]] = []
        """Method, path and range of every request."""
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def held(self, commit: str) -> dict[str, bytes]:
        """Return the files of a commit."""
        return self.history.get(commit, self.files)

    def fetched(self) -> list[str]:
        """Return the names of the files that were fetched, in order."""
        return [Path(path).name for method, path, _ in self.asked if method == "GET" and "/" in path]


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_POST(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        sent = self.received()
        hub.asked.append((self.command, path, None))
        if path == "/api/validate-yaml":
            self.tell({"errors": [], "warnings": []})
        elif not hub.token or self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.tell({"error": "Invalid username or password."}, 401)
        elif path == "/api/repos/create":
            value = json.loads(sent)
            name, there = f"{value['organization']}/{value['name']}", bool(hub.history)
            hub.visibility = hub.visibility if there else value.get("visibility")
            self.tell({"url": f"{hub.url}/{name}"}, 403 if name != hub.repository else 409 if there else 200)
        elif path == f"/api/models/{hub.repository}/preupload/main":
            modes = [
                {"path": one["path"], "uploadMode": "lfs" if b"\0" in base64.b64decode(one["sample"]) else "regular"}
                for one in json.loads(sent)["files"]
            ]
            self.tell({"files": [{**one, "shouldIgnore": False} for one in modes]})
        elif path == f"/{hub.repository}.git/info/lfs/objects/batch":
            wanted = json.loads(sent)["objects"]
            upload = [{**one, "actions": {"upload": {"href": f"{hub.url}/storage/{one['oid']}"}}} for one in wanted]
            self.tell({"transfer": "basic", "objects": upload})
        elif path == f"/api/models/{hub.repository}/commit/main":
            self.commit([json.loads(line) for line in sent.splitlines()])
        else:
            self.absent("RepoNotFound")

    def do_PUT(self) -> None:
        content = self.received()
        oid = self.path.rpartition("/")[2]
        if sha256(content).hexdigest() == oid:
            self.server.stored[oid] = content
        self.tell({}, 200 if oid in self.server.stored else 422)

    def received(self) -> bytes:
        """Return the body of a request, which may come in chunks."""
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        pieces = []
        while size := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def commit(self, lines: list[dict[str, Any]]) -> None:
        hub = self.server
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                hub.messages.append(value["summary"])
            elif line["key"] == "lfsFile":
                hub.files[value["path"]] = hub.stored[value["oid"]]
            elif line["key"] == "file":
                hub.files[value["path"]] = base64.b64decode(value["content"])
        oid = sha256(repr(sorted(hub.files.items())).encode()).hexdigest()[:40]
        hub.branches["main"], hub.history[oid] = oid, dict(hub.files)
        self.tell({"commitUrl": f"{hub.url}/{hub.repository}/commit/{oid}", "commitOid": oid})

    def tell(self, value: object, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def answer(self, body: bool) -> None:
        hub, path, wanted = self.server, unquote(urlsplit(self.path).path), self.headers.get("Range")
        prefix = "datasets/" if hub.kind == "dataset" else ""
        api, resolve = f"/api/{hub.kind}s/{hub.repository}/revision/", f"/{prefix}{hub.repository}/resolve/"
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            hub.asked.append((self.command, path, wanted))
            self.absent("RepoNotFound", 401)
            return
        if path == f"/api/models/{hub.repository}":
            self.tell({"id": hub.repository, "private": hub.visibility == "private"})
            return
        if path.startswith(api):
            self.listing(path.removeprefix(api))
            return
        revision, _, name = path.removeprefix(resolve).partition("/")
        hub.asked.append((self.command, name, wanted))
        if not path.startswith(resolve):
            self.absent("RepoNotFound")
        elif revision not in {*hub.branches.values(), *hub.history}:
            self.absent("RevisionNotFound")
        elif name not in hub.held(revision):
            self.absent("EntryNotFound")
        else:
            self.file(name, wanted, revision, body)

    def absent(self, code: str, status: int = 404) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def listing(self, revision: str) -> None:
        hub = self.server
        hub.asked.append((self.command, revision, None))
        commit = hub.branches.get(revision, revision)
        if commit not in {*hub.branches.values(), *hub.history}:
            self.absent("RevisionNotFound")
            return
        files = [{"rfilename": name, "size": len(data), "blobId": "b"} for name, data in hub.held(commit).items()]
        self.tell({"id": hub.repository, "sha": commit, "siblings": files})

    def file(self, name: str, wanted: str | None, commit: str, body: bool) -> None:
        whole = self.server.held(commit)[name]
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
def serving(
    files: Mapping[str, bytes], repository: str = "willdepueoai/parameter-golf", kind: str = "dataset"
) -> Iterator[Hub]:
    """Serve the files while the block runs, to huggingface_hub in this process."""
    from huggingface_hub import constants

    with Hub(files, repository, kind) as server:
        here: dict[str, Any] = {"ENDPOINT": server.url, "HF_HUB_DISABLE_TELEMETRY": True}  # as `hub_library` sets it
        here["HUGGINGFACE_CO_URL_TEMPLATE"] = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        with patch.multiple(constants, **here):
            yield server
        server.shutdown()
        thread.join()
