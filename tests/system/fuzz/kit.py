"""Attacks on a running proxy, and the checks after each: it answers or refuses, others are not affected, the record stays true.

`Target` is a proxy with a well-behaved session (the *oracle*) that continues between attacks. `Strict` is an engine that reads requests
with another parser than ours (h11), to detect bytes that two servers read in different ways.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import h11

from tests.proxy.kit import CHAT, HEADER, TOOLS, echo, results, user
from tests.support import invariants
from tests.support.waiting import PATIENCE, until

if TYPE_CHECKING:
    from tests.proxy.kit import Rig

OURS = (": internal error", "Unhandled exception", "the reply cannot be written", "no turn could be made", "is not planned")
"""Parts of the log lines that report a failure in the proxy itself."""
ASK = json.dumps({"model": "sim", "messages": [user("EPISODE:talk")]}).encode()
ANTHROPIC, RESPONSES, GEMINI = "/v1/messages", "/v1/responses", "/v1beta/models/sim:generateContent"
DIALECTS = {"chat": CHAT, "messages": ANTHROPIC, "responses": RESPONSES, "gemini": GEMINI, "completions": "/v1/completions"}


def request(
    body: bytes = ASK, *headers: bytes, line: bytes = b"", path: str = CHAT, session: str | None = "attack", length: bool = True
) -> bytes:
    """The bytes of a request, with any headers."""
    head = [line or f"POST {path} HTTP/1.1".encode(), b"Host: h", b"Content-Type: application/json"]
    head += [f"{HEADER}: {session}".encode()] if session is not None else []
    head += [b"Content-Length: %d" % len(body)] if length else []
    return b"\r\n".join([*head, *headers, b"", body])


def chunked(body: bytes = ASK) -> bytes:
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


async def send(url: str, *pieces: bytes, half_close: bool = True) -> bytes:
    """Sends bytes, a piece at a time, and reads until the server sends nothing more."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    received = bytearray()
    try:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if half_close:
                writer.write_eof()
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE):
                while more := await reader.read(65536):
                    received += more
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    return bytes(received)


async def ask(url: str, *pieces: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """Sends requests on one connection; returns each answer's status, headers and body. The last request closes the connection."""
    return answers(await send(url, *pieces, half_close=False))


def answers(received: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """Reads answers with another parser than ours; a malformed answer is an error here."""
    found = []
    while received:
        peer = h11.Connection(h11.CLIENT)
        peer.send(h11.Request(method="POST", target="/", headers=[("Host", "h")]))
        peer.send(h11.EndOfMessage())
        peer.receive_data(received)
        peer.receive_data(b"")
        head, body = None, bytearray()
        while not isinstance(event := peer.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                assert isinstance(event, h11.InformationalResponse), event
        assert head is not None
        found.append((head.status_code, {k.decode(): v.decode("latin-1") for k, v in head.headers}, bytes(body)))
        received = peer.trailing_data[0]
    return found


@dataclass
class Target:
    """A proxy under attack, and the session that must not be affected."""

    rig: Rig
    log: Any
    messages: list[dict[str, Any]] = field(default_factory=lambda: [user("EPISODE:demo")])
    steps: int = 0

    @property
    def url(self) -> str:
        return self.rig.url

    async def step(self) -> None:
        """The oracle's next turn."""
        message = await self.rig.say("oracle", self.messages, tools=TOOLS, stream=self.steps % 2 == 1)
        self.messages += [echo(message), *results(message)]
        self.steps += 1

    async def unharmed(self, *attackers: str) -> None:
        """The oracle continues exactly; new calls work; the records of the attackers are true, and none of their calls is left open."""
        await self.step()
        exported = await self.rig.check("oracle")
        assert [len(sequence["turns"]) for sequence in exported["sequences"]] == [self.steps]
        assert exported["complete"]
        await self.rig.say("fresh", [user("EPISODE:talk")])
        for session in attackers:
            await settled(self.rig, session)
        wrong = [record.getMessage() for record in self.log.records if any(words in record.getMessage() for words in OURS)]
        assert not wrong, wrong


async def settled(rig: Rig, session: str) -> None:
    """A session's records satisfy the invariants and the engine's log, and none of its calls stays open."""
    info = await rig.store.session(session)
    if info is None:
        return

    async def closed() -> bool:
        return not (await rig.store.session(session)).open_calls

    await until(closed)
    turns = await rig.store.turns(session)
    tokens = await rig.store.tokens(session, [turn.id for turn in turns])
    assert not invariants.audit(turns, tokens, session=session)
    ground_truth = [(entry.prompt_ids, entry.completion_ids, entry.logprobs) for entry in rig.ground_truth(session)]
    assert not invariants.engine_agrees(turns, tokens, ground_truth, session=session)


@dataclass
class Strict:
    """An engine that reads requests with h11 and gives all of them the same answer; `wrong` is what h11 rejected."""

    seen: list[tuple[str, str, bytes]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer, head, body = h11.Connection(h11.SERVER), None, bytearray()
        try:
            while True:
                event = peer.next_event()
                if event is h11.NEED_DATA:
                    if not (data := await reader.read(65536)):
                        break
                    peer.receive_data(data)
                elif isinstance(event, h11.Request):
                    head, body = event, bytearray()
                elif isinstance(event, h11.Data):
                    body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    self.seen.append((head.method.decode(), head.target.decode("latin-1"), bytes(body)))
                    reply = b'{"ok": true}'
                    writer.write(peer.send(h11.Response(status_code=200, headers=[("Content-Length", str(len(reply)))])))
                    writer.write(peer.send(h11.Data(data=reply if head.method != b"HEAD" else b"")) + peer.send(h11.EndOfMessage()))
                    await writer.drain()
                    peer.start_next_cycle()
        except h11.RemoteProtocolError as why:
            self.wrong.append(str(why))
        except (ConnectionError, h11.LocalProtocolError):
            pass
        finally:
            writer.close()

    @contextlib.asynccontextmanager
    async def serve(self):
        server = await asyncio.start_server(self._client, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    def asked(self, marks: str = "/t/") -> list[tuple[str, str, bytes]]:
        """The relayed requests, without the probe's own."""
        return [one for one in self.seen if marks in one[1]]
