"""Server of the board: reads run folders and answers this machine alone.

It binds the loopback interface. A request's path must equal one of six fixed paths, so it never becomes the path of a
file. A page of another origin cannot read the board through a host name that it lets resolve to this machine (DNS
rebinding), because such a request carries that name as its `Host`, and is refused.
"""

import json
import re
import socketserver
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from urllib.parse import parse_qs

from caddie.board.folders import Folders
from caddie.errors import UserError
from caddie.files import reason

ADDRESS = "127.0.0.1"
_CLOSED = "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
PAGE_POLICY = f"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; {_CLOSED}"
REPORT_POLICY = f"sandbox allow-downloads; default-src 'none'; style-src 'unsafe-inline'; {_CLOSED}"
"""Policy for reports, which come from run folders: no scripts, no origin; files inside the page can be downloaded."""
_ASSETS = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/board.js": ("board.js", "text/javascript; charset=utf-8"),
    "/board.css": ("board.css", "text/css; charset=utf-8"),
}
_SAME_ORIGIN = dict.fromkeys(("Cross-Origin-Resource-Policy", "Cross-Origin-Opener-Policy"), "same-origin")
_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
_HOST = re.compile(r"(localhost|127\.0\.0\.1)(:[0-9]{1,5})?", re.IGNORECASE)


class Board(ThreadingHTTPServer):
    """Server of the run folders below `folder`. `serve_forever` answers until `shutdown`.

    Port 0 takes any free port. Raises `UserError` if there is no such folder or the port cannot be used.
    """

    daemon_threads = True

    def __init__(self, folder: Path, port: int) -> None:
        if not folder.is_dir():
            raise UserError(f"no folder {folder}; name the one that holds your runs: caddie board FOLDER")
        self.folders = Folders(folder)
        files = resources.files("caddie") / "board"
        self.assets = {path: (kind, (files / name).read_bytes()) for path, (name, kind) in _ASSETS.items()}
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            what = f"port {port} cannot be used: {reason(error)}"
            raise UserError(f"{what}; choose another with --port N, or 0 for any") from None

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def server_bind(self) -> None:
        """Bind without asking a name server for this machine's name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, int(self.server_address[1])

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a browser that went away."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    server: Board
    timeout = 20.0

    def do_GET(self) -> None:
        if not _HOST.fullmatch(",".join(self.headers.get_all("Host") or [])):
            self._send(HTTPStatus.FORBIDDEN, b"only localhost and 127.0.0.1 are answered\n")
            return
        path, _, query = self.path.partition("?")
        folders = self.server.folders
        if path in self.server.assets:
            kind, content = self.server.assets[path]
            self._send(HTTPStatus.OK, content, kind)
        elif path == "/api/runs":
            self._send_json(folders.rows())
        elif path == "/api/run" and (details := folders.details(_name(query))) is not None:
            self._send_json(details)
        elif path == "/report" and (page := folders.report(_name(query))) is not None:
            self._send(HTTPStatus.OK, page, "text/html; charset=utf-8", REPORT_POLICY)
        else:
            self._send(HTTPStatus.NOT_FOUND, b"nothing here\n")

    do_HEAD = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send an error of the base class as plain text, and status 405 for a method without a handler."""
        allowed = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        self._send(allowed, f"{allowed.phrase}\n".encode())

    def _send_json(self, value: object) -> None:
        self._send(HTTPStatus.OK, json.dumps(value, allow_nan=False).encode(), "application/json")

    def _send(
        self, status: HTTPStatus, content: bytes, kind: str = "text/plain; charset=utf-8", policy: str = PAGE_POLICY
    ) -> None:
        self.send_response(status)
        own = {"Content-Type": kind, "Content-Length": str(len(content)), "Content-Security-Policy": policy}
        for name, value in (own | _HEADERS | _SAME_ORIGIN).items():
            self.send_header(name, value)
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def version_string(self) -> str:
        return "caddie"

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: the page asks every two seconds."""


def _name(query: str) -> str:
    """Return the only `name` in a query, else an empty text, which is no run's name."""
    try:
        names = parse_qs(query, keep_blank_values=True, errors="strict", max_num_fields=4).get("name", [])
    except ValueError:
        return ""
    return names[0] if len(names) == 1 else ""
