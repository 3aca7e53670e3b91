"""Messages over a socket between the judge and a user's scorer: a kind, a length, and raw bytes, never unpickled."""

import socket
import struct
from collections.abc import Callable

JOB, PLAN, NEXT, LOGITS, UPDATE, TOKEN, READS = b"J", b"P", b"N", b"L", b"U", b"T", b"R"
"""Kinds of questions: which scorer to make, a layout, the next step, logits, scored targets, a token, files read."""
DONE, END, SINGLE, DOUBLE = b".", b"e", b"f", b"d"
"""Kinds of answers: done, the plan is over, logits in float32 or float64."""
WRONG, REFUSED = b"!", b"x"
"""Kinds of answers whose text becomes a `UserError` or a `CheckFailed`."""
_HEAD = struct.Struct("<cQ")
_POLL_SECONDS = 0.2


class Channel:
    """One end of a socket; while it waits, it calls `waiting` from time to time, which may raise."""

    def __init__(self, connection: socket.socket, waiting: Callable[[], None] | None = None) -> None:
        self._connection = connection
        self._waiting = waiting or (lambda: None)  # without one there is no timeout
        connection.settimeout(_POLL_SECONDS if waiting else None)

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """Send a message; `OSError` if the other end is closed."""
        left = memoryview(_HEAD.pack(kind, len(payload)) + payload)
        while left:
            try:
                left = left[self._connection.send(left) :]
            except TimeoutError:
                self._waiting()

    def receive(self, most: int = 1 << 62) -> tuple[bytes, bytearray]:
        """Return kind and payload of a message; `EOFError` if the other end is closed, `ValueError` if it is too long.

        `most` is the longest payload, in bytes.
        """
        kind, size = _HEAD.unpack(self._read(_HEAD.size))
        if size > most:
            raise ValueError(f"a message of {size:,} bytes, at most {most:,} were due")
        return kind, self._read(size)

    def close(self) -> None:
        """Close this end."""
        self._connection.close()

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        left = memoryview(data)
        while left:
            try:
                count = self._connection.recv_into(left)
            except TimeoutError:
                self._waiting()
                continue
            if not count:
                raise EOFError
            left = left[count:]
        return data
