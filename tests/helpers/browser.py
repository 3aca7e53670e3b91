"""A headless Chromium, driven over a pipe by its DevTools protocol: for the tests of pages."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

PATIENCE_SECONDS = 20.0


class Browser:
    """One page in one process, which its `with` block ends; the test is skipped where there is no Chromium.

    `said` collects what the page wrote to its console: errors and warnings alone.
    """

    def __init__(self, profile: Path) -> None:
        program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        if program is None:
            pytest.skip("no Chromium")
        self.said: list[str] = []
        self._number = 0
        self._rest = b""
        read_there, self._write = os.pipe()
        self._read, write_there = os.pipe()
        command = f'exec "$@" 3<&{read_there} 4>&{write_there}'
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
        flags += [
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--no-proxy-server",
            "--hide-scrollbars",
        ]
        with open(profile.with_suffix(".log"), "wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", command, "bash", program, *flags, f"--user-data-dir={profile}", "about:blank"],
                pass_fds=(read_there, write_there),
                stdout=log,
                stderr=log,
            )
        os.close(read_there)
        os.close(write_there)
        self._session: str | None = None

    def __enter__(self) -> Self:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._write)  # which ends it
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)

    def ask(self, method: str, **settings: Any) -> dict[str, Any]:
        """What the browser answers to a command of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": settings}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            chunk = os.read(self._read, 1 << 16)
            assert chunk, "the browser ended"
            self._rest += chunk
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        told = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.said.append(json.dumps(told["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.said.append(told["entry"]["text"])

    def open(self, url: str) -> None:
        """Go to an address, in a new page where only what follows # differs, and wait until it is parsed."""
        self.ask("Page.navigate", url="about:blank")
        self.ask("Page.navigate", url=url)
        self.until("document.readyState != 'loading'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str, value: Any = True) -> None:
        """Wait until an expression in the page has a value."""
        latest = time.monotonic() + PATIENCE_SECONDS
        while (found := self.run(script)) != value:
            assert time.monotonic() < latest, f"{script} is {found!r}, not {value!r}"
            time.sleep(0.02)

    def press(self, key: str, text: str = "") -> None:
        """Press and release one key where the focus is."""
        self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, text=text)
        self.ask("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def click(self, selector: str) -> None:
        """Click with the mouse into the middle of the first element that matches."""
        box = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{box}.scrollIntoView({{block: 'center'}})")
        place = self.run(
            f"(box => ({{x: box.x + box.width / 2, y: box.y + box.height / 2}}))({box}.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, **place, button="left", clickCount=1)

    def look(self, path: Path, width: int, dark: bool = False, height: int = 900) -> None:
        """Write a picture of the page, as wide as asked for and as high as it is."""
        self.size(width, height, dark)
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=False)
        path.write_bytes(base64.b64decode(shot["data"]))

    def size(self, width: int, height: int = 900, dark: bool = False) -> None:
        """Give the window a size in CSS pixels, and the user a taste."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
