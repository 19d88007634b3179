"""A client with one blocking socket; it parses nothing during the measured time."""

import contextlib
import json
import re
import socket
import time
from typing import Any, NamedTuple

from bench.talk import Talk

RECV = 1 << 20
CHAT = "/v1/chat/completions"


class Timed(NamedTuple):
    """One answer; `first` and `wall` in seconds after the first byte of the request was written. `ended`: CLOCK_MONOTONIC, ns."""

    status: int
    body: bytes
    first: float
    wall: float
    ended: int


class Client:
    """A persistent connection to one server."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.socket = self._connect()

    def _connect(self) -> socket.socket:
        connected = socket.create_connection(("127.0.0.1", self.port))
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connected

    def close(self) -> None:
        self.socket.close()

    def reopen(self) -> None:
        """Opens a new connection, because servers close idle ones; between blocks this is cheap."""
        self.close()
        self.socket = self._connect()

    def post(self, body: bytes, session: str | None = None, path: str = CHAT) -> Timed:
        """Makes a call.

        Raises:
            RuntimeError: The answer is not 200.
        """
        answer = self._call(request(body, session, path))
        if answer.status != 200:
            raise RuntimeError(f"port {self.port}, session {session}: {answer.status} {answer.body[:500]!r}")
        return answer

    def get(self, path: str) -> Timed:
        return self._call(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())

    def _call(self, request: bytes) -> Timed:
        begun = time.monotonic_ns()
        self.socket.sendall(request)
        got = bytearray()
        first = 0
        end = -1
        start = 0
        while True:
            data = self.socket.recv(RECV)
            now = time.monotonic_ns()
            if not data:
                raise ConnectionError(f"port {self.port} closed the connection: {bytes(got[:300])!r}")
            got += data
            if not start:
                found = got.find(b"\r\n\r\n")
                if found < 0:
                    continue
                start = found + 4
                head = bytes(got[:found])
                length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
                end = start + int(length[1]) if length else -1
            if not first and len(got) > start:
                first = now
            if len(got) >= end if end >= 0 else got.endswith(b"0\r\n\r\n"):
                break
        body = bytes(got[start:])
        if end < 0:
            body = b"".join(_unframed(body))
        return Timed(int(head[9:12]), body, ((first or now) - begun) / 1e9, (now - begun) / 1e9, now)


def request(body: bytes, session: str | None, path: str = CHAT) -> bytes:
    """A call as it is sent; `session`: the session that it names, if any."""
    named = f"X-Tokencache-Session: {session}\r\n" if session else ""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{named}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _unframed(body: bytes) -> list[bytes]:
    parts, at = [], 0
    while True:
        line = body.index(b"\r\n", at)
        size = int(body[at:line], 16)
        if not size:
            return parts
        parts.append(body[line + 2 : line + 2 + size])
        at = line + 4 + size


def get(port: int, path: str) -> Timed:
    """Fetches a path over a connection of its own."""
    with contextlib.closing(Client(port)) as client:
        return client.get(path)


def turns(port: int, session: str) -> list[dict[str, Any]]:
    """The turns that a proxy recorded of a session, as it returns them; none if it does not know the session.

    Raises:
        RuntimeError: It answered with another error.
    """
    answer = get(port, f"/tokencache/v1/sessions/{session}/turns")
    if answer.status not in {200, 404}:
        raise RuntimeError(f"port {port}, turns of {session}: {answer.status} {answer.body[:120]!r}")
    found: list[dict[str, Any]] = json.loads(answer.body)["turns"] if answer.status == 200 else []
    return found


def reply_text(answer: Timed) -> str:
    """The assistant's text, streamed or whole."""
    if answer.body.startswith(b"{"):
        return json.loads(answer.body)["choices"][0]["message"]["content"]
    events = [json.loads(e[6:]) for e in answer.body.split(b"\n\n") if e.startswith(b"data: {")]
    return "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])


def take_turn(client: Client, talk: Talk, session: str, tail: int) -> Timed:
    """Makes the next call of a conversation, and adds the reply and the user's next message of `tail` bytes to it."""
    answer = client.post(talk.body(), session)
    talk.add_turn(reply_text(answer), tail)
    return answer


def lag(answer: Timed) -> float:
    """Seconds from the engine's write of a stream's last event to its arrival here."""
    found = re.search(rb'"mock_sent":(\d+)', answer.body)
    return (answer.ended - int(found[1])) / 1e9 if found else 0.0
