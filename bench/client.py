"""A client with one blocking socket, and the reading of an answer; it parses only where the answer ends, during the measured time."""

import contextlib
import json
import re
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from bench.talk import Talk

RECV = 1 << 20
CHAT = "/v1/chat/completions"
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_SENT = re.compile(rb'"mock_sent": ?(\d+)')


class Answer:
    """An answer that is being read. Times are CLOCK_MONOTONIC in nanoseconds; `first` is that of the first byte of its body, 0 before.

    `pause` is the longest time between two arrivals.
    """

    def __init__(self) -> None:
        self.begun = time.monotonic_ns()
        self.got = bytearray()
        self.first = self.ended = self.pause = 0
        self._end = self._start = -1

    def add(self, data: bytes) -> bool:
        """Adds what arrived; whether the answer is complete. One of a known length ends there, a chunked one at its last chunk."""
        now = time.monotonic_ns()
        self.got += data
        if self._start < 0:
            found = self.got.find(b"\r\n\r\n")
            if found < 0:
                return False
            self._start = found + 4
            length = _LENGTH.search(self.got, 0, self._start)
            self._end = self._start + int(length[1]) if length else -1
        if self.first:
            self.pause = max(self.pause, now - self.ended)
        elif len(self.got) > self._start:
            self.first = now
        self.ended = now
        return len(self.got) >= self._end if self._end >= 0 else self.got.endswith(b"0\r\n\r\n")

    @property
    def status(self) -> int:
        return int(self.got[9:12])

    @property
    def wall(self) -> float:
        """Seconds until its end."""
        return (self.ended - self.begun) / 1e9

    @property
    def sent(self) -> int:
        """When the mock engine wrote the last event of a stream; 0 if it is none."""
        found = _SENT.search(self.got, max(0, len(self.got) - 400))
        return int(found[1]) if found else 0

    @property
    def body(self) -> bytes:
        if self._end >= 0:
            return bytes(self.got[self._start :])
        parts, at = [], self._start
        while size := int(self.got[at : (line := self.got.index(b"\r\n", at))], 16):
            parts.append(self.got[line + 2 : line + 2 + size])
            at = line + 4 + size
        return b"".join(parts)


class Client:
    """A persistent connection to one server."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        self.socket.close()

    def post(self, body: bytes, session: str | None = None, path: str = CHAT, *, at_event: Callable[[], None] | None = None) -> Answer:
        """Makes a call; `at_event` is called at the first event of a stream. `RuntimeError`: the answer is not 200."""
        answer = self._call(head(session, len(body), path) + body, at_event)
        if answer.status != 200:
            raise RuntimeError(f"port {self.port}, session {session}: {answer.status} {answer.body[:500]!r}")
        return answer

    def get(self, path: str) -> Answer:
        return self._call(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())

    def _call(self, request: bytes, at_event: Callable[[], None] | None = None) -> Answer:
        answer, complete = Answer(), False
        self.socket.sendall(request)
        while not complete:
            if not (data := self.socket.recv(RECV)):
                raise ConnectionError(f"port {self.port} closed the connection: {bytes(answer.got[:300])!r}")
            complete = answer.add(data)
            if at_event is not None and b"data: {" in answer.got:
                at_event()
                at_event = None
        return answer


def head(session: str | None, length: int, path: str = CHAT) -> bytes:
    """The head of a call with so many bytes; `session`: the session that it names, if any."""
    named = f"X-Tokencache-Session: {session}\r\n" if session else ""
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{named}Content-Length: {length}\r\n\r\n".encode()


def get(port: int, path: str) -> Answer:
    """Fetches a path over a connection of its own."""
    with contextlib.closing(Client(port)) as client:
        return client.get(path)


def turns(port: int, session: str) -> list[dict[str, Any]]:
    """The turns that a proxy recorded of a session, none if it does not know the session; `RuntimeError` for another error."""
    answer = get(port, f"/tokencache/v1/sessions/{session}/turns")
    if answer.status not in {200, 404}:
        raise RuntimeError(f"port {port}, turns of {session}: {answer.status} {answer.body[:120]!r}")
    return json.loads(answer.body)["turns"] if answer.status == 200 else []


def check_continued(ports: Iterable[int], session: str, least: int) -> int:
    """Checks that each call of a session continued the one before. Returns the number of its turns.

    `RuntimeError`: one did not, or there are fewer. Then no figure counts: a proxy that only relays is fast, too.
    """
    kinds = [turn["match"] for turn in next(filter(None, (turns(port, session) for port in ports)), [])]
    if len(kinds) < least or kinds[1:] != ["continue"] * (len(kinds) - 1):
        raise RuntimeError(f"session {session} has {len(kinds)} of {least} turns: {' '.join(kinds)[:80]}")
    return len(kinds)


def reply_text(answer: Answer) -> str:
    """The assistant's text, streamed or whole."""
    body = answer.body
    if body.startswith(b"{"):
        return json.loads(body)["choices"][0]["message"]["content"]
    events = [json.loads(e[6:]) for e in body.split(b"\n\n") if e.startswith(b"data: {")]
    return "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])


def take_turn(client: Client, talk: Talk, session: str, tail: int) -> Answer:
    """Makes the next call of a conversation, and adds the reply and the user's next message of `tail` bytes to it."""
    answer = client.post(talk.body(), session)
    talk.add_turn(reply_text(answer), tail)
    return answer
