"""The floor with proof: what the floor does, and what it takes besides to be sure of the tokens and to keep them.

The floor (`bench.floor`) takes for granted that each call continues the one before. Nobody could train on what it carries. What is here
added is what the design's invariants ask of any proxy, each in the cheapest way that Python's libraries have for it:

1. the messages are compared with those of the call before: a hash of the bytes that came again; what is new is decoded and hashed; the
   reply among it must say what was sampled. The first call of a session decodes and hashes all of it;
2. the ids that the engine echoes are compared with those that were sent, and the first call's are read;
3. what was sampled is decoded, as many log probabilities as ids, none of them a NaN; the client gets neither, as it asked for neither;
4. the turn is packed as it would be stored: ids and log probabilities in bytes, the new messages deflated; and kept, in memory.

What it leaves out is what makes a proxy of it: more than one conversation in a session, more than one dialect and engine, a harness that
changes what it sends back, a client that hangs up, calls that come twice, a tail that depends on its messages, books, errors, limits.
`tokencache` does all of that and costs more; nothing that proves its tokens, in Python on aiohttp, costs much less than this.

    python -m bench.proven PORT UPSTREAM
"""

import asyncio
import hashlib
import math
import struct
import sys
from dataclasses import dataclass, field

import aiohttp
import msgspec
import uvloop
import xxhash
from aiohttp import web
from isal import isal_zlib

from bench.floor import LAST_END, SUPPLIED, WANTED, Floor, echo_in, sampled_in
from bench.relay import begun, listening, passed_on, pool
from tokencache.dialects.chat.plain import without_tokens

_MESSAGES = b'{"messages":['
_CHANCES, _IDS = (b'"logprobs":{', b',"finish_reason"'), (b'"token_ids":[', b"]")
_EVENT, _DONE = b"data: ", b"\n\ndata: [DONE]\n\n"
_MOST = 1024
"""Sessions that are kept; one that was forgotten begins again."""


class _Entry(msgspec.Struct):
    role: str
    content: str


class _Chance(msgspec.Struct):
    logprob: float


class _Chances(msgspec.Struct):
    content: list[_Chance]


class _Message(msgspec.Struct):
    content: str = ""


class _Choice(msgspec.Struct):
    """A choice, or a piece of one."""

    message: _Message = msgspec.field(default_factory=_Message)
    delta: _Message = msgspec.field(default_factory=_Message)
    logprobs: _Chances | None = None
    token_ids: list[int] | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice]


_ENTRIES = msgspec.json.Decoder(list[_Entry])
_IDS_OF = msgspec.json.Decoder(list[int])
_REPLIES = msgspec.json.Decoder(list[_Reply])
_PACK = msgspec.msgpack.Encoder()


@dataclass(slots=True)
class Known:
    """What is known of a session: the ids so far as pieces of JSON, the last body by its hash, the last reply by its digest; its turns."""

    pieces: list[bytes] = field(default_factory=list)
    heard: int = 0
    """Bytes of the last body up to the end of its messages."""
    heard_hash: int = 0
    reply: bytes = b""
    turns: list[bytes] = field(default_factory=list)


class Proven:
    def __init__(self, upstream: str, engine: aiohttp.ClientSession) -> None:
        self.floor = Floor(upstream, engine, local=False)
        self.sessions: dict[str, Known] = {}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        name = request.headers.get("X-Tokencache-Session")
        if name is None:
            return await self.floor.relay.handle(request)
        body = await request.read()
        known = self.sessions.pop(name, None) or Known()
        new = _new(known, body)
        digests = _digests(new)
        sent = [memoryview(body)[:-1], WANTED]
        if known.pieces:
            if digests[0] != known.reply:
                raise ValueError("this is not what was sampled")
            tail = await self.floor.tail(body)
            known.turns.append(_packed(tail))
            known.pieces += (b",", tail)
            sent += (SUPPLIED, *known.pieces, b"]}")
        async with self.floor.engine.post(self.floor.chat, headers=passed_on(request.headers), data=b"".join((*sent, b"}"))) as answer:
            if answer.content_length is None:
                response, said = await _streamed(request, answer, known)
            else:
                said = _without_echo(known, await answer.read())
                response = web.Response(status=answer.status, headers=passed_on(answer.headers), body=_hidden(said))
        _keep(known, new, digests, said)
        self.sessions[name] = known
        if len(self.sessions) > _MOST:
            del self.sessions[next(iter(self.sessions))]
        return response  # a stream ends behind this: the turn is kept by then


async def _streamed(request: web.Request, answer: aiohttp.ClientResponse, known: Known) -> tuple[web.StreamResponse, bytes]:
    """Pass a stream on without what the client did not ask for; all of it, but for the echo, comes back."""
    response = begun(answer)
    await response.prepare(request)
    rest, said = b"", list[bytes]()
    async for chunk in answer.content.iter_any():
        events = rest + chunk if rest else chunk
        shown, rest = without_tokens(events), b""
        if shown is None:
            end = len(events) if events.endswith(b"\n\n") else events.rfind(b"\n\n") + 2
            if end < 2:
                rest = events
                continue
            events, rest = events[:end], events[end:]
            if not said:
                events = _without_echo(known, events)
            shown = b"\n\n".join([_hidden(event) for event in events.split(b"\n\n")])
        said.append(events)
        await response.write(shown)
    return response, b"".join(said)


def _new(known: Known, body: bytes) -> bytes:
    """The messages that the session has not sent yet, as a list of JSON."""
    end = body.rindex(LAST_END)
    same = known.heard and xxhash.xxh3_64_intdigest(memoryview(body)[: known.heard]) == known.heard_hash
    new = b"[%s]" % body[known.heard + 1 if same else len(_MESSAGES) : end]
    if known.heard and not same:
        raise ValueError("this does not continue what was sent before")
    known.heard, known.heard_hash = end, xxhash.xxh3_64_intdigest(memoryview(body)[:end])
    return new


def _digests(new: bytes) -> list[bytes]:
    return [_digest(entry.role, entry.content) for entry in _ENTRIES.decode(new)]


def _digest(role: str, content: str) -> bytes:
    return hashlib.sha256(f"{role}\n{content}".encode()).digest()[:16]


def _without_echo(known: Known, said: bytes) -> bytes:
    """The reply without its echo. The engine must have used the ids that were sent; those of a first call are read."""
    begin, end = echo_in(said)
    if not known.pieces:
        known.pieces.append(said[begin:end])
        known.turns.append(_packed(known.pieces[0]))
    at = begin
    for piece in known.pieces:
        if not said.startswith(piece, at):
            raise ValueError("the engine used another prompt")
        at += len(piece)
    if at != end or begin == end:
        raise ValueError("the engine used a longer prompt, or did not say which")
    return said[:begin] + said[end:]


def _packed(ids: bytes) -> bytes:
    return _ints(_IDS_OF.decode(b"[%s]" % ids))


def _ints(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def _hidden(reply: bytes) -> bytes:
    """What the client did not ask for, cut out of a reply or an event."""
    for begin, end in (_CHANCES, _IDS):
        at = reply.find(begin) + len(begin) - 1
        if at >= len(begin) - 1:
            reply = reply[:at] + b"null" + reply[reply.index(end, at) + (end == b"]") :]
    return reply


def _keep(known: Known, new: bytes, digests: list[bytes], said: bytes) -> None:
    """The turn, packed; what the next call is held against."""
    replies = [said] if said.startswith(b"{") else said.removesuffix(_DONE).split(b"\n\n")
    read = _REPLIES.decode(b"[%s]" % b",".join([reply.removeprefix(_EVENT) for reply in replies]))
    choices = [reply.choices[0] for reply in read if reply.choices]
    ids = [id_ for choice in choices for id_ in choice.token_ids or ()]
    chances = [one.logprob for choice in choices if choice.logprobs for one in choice.logprobs.content]
    if len(ids) != len(chances) or any(map(math.isnan, chances)):
        raise ValueError("the engine did not say how likely its tokens were")
    known.reply = _digest("assistant", "".join([choice.message.content or choice.delta.content for choice in choices]))
    packed = [_ints(ids), struct.pack(f"<{len(chances)}f", *chances), isal_zlib.compress(new), *digests]
    known.turns.append(_PACK.encode(packed))
    known.pieces.append(sampled_in(said))


async def main(port: int, upstream: str) -> None:
    async with pool() as engine:
        await listening(port, Proven(upstream, engine).handle)
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2]))
