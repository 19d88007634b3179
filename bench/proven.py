"""The floor with verification: the floor plus what it takes to verify the tokens and to keep them: `python -m bench.proven PORT UPSTREAM`.

It adds what the design's invariants require of any proxy, each in the cheapest way that Python's libraries have for it:

1. the messages are compared with those of the previous call: a hash of the repeated bytes; new messages are decoded and hashed; the reply
   among them must be the sampled one;
2. the ids that the engine echoes are compared with those that were sent, and the first call's are read;
3. the sampled ids are decoded, as many log probabilities as ids, none of them a NaN; the client gets neither, because it requested neither;
4. the turn is packed as it would be stored, its new messages deflated; and kept in memory.

It omits all else that a proxy does: dialects, several engines, changed histories, disconnects, duplicate calls, metrics, errors, limits.
"""

import hashlib
import math
import struct
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import xxhash
from aiohttp import web
from cachetools import LRUCache
from isal import isal_zlib

from bench.floor import LAST_END, SESSION, SUPPLIED, WANTED, Floor, echo_in, sampled_in
from bench.relay import Relay, passed_on, serve

_MESSAGES = b'{"messages":['
_LOGPROBS, _IDS = (b'"logprobs":{', b',"finish_reason"'), (b'"token_ids":[', b"]")
_MOST = 1024
"""Sessions that are kept; a forgotten one begins again."""


_ENTRY = msgspec.defstruct("_ENTRY", [("role", str), ("content", str)])
_CHANCE = msgspec.defstruct("_CHANCE", [("logprob", float)])
_CHANCES = msgspec.defstruct("_CHANCES", [("content", list[_CHANCE])])
MESSAGE = msgspec.defstruct("MESSAGE", [("content", str)])
_CHOICE = msgspec.defstruct("_CHOICE", [("message", MESSAGE), ("logprobs", _CHANCES), ("token_ids", list[int])])
_REPLY = msgspec.json.Decoder(msgspec.defstruct("_REPLY", [("choices", list[_CHOICE])]))
_ENTRIES = msgspec.json.Decoder(list[_ENTRY])
_IDS_OF = msgspec.json.Decoder(list[int])
_PACK = msgspec.msgpack.Encoder()


@dataclass(slots=True)
class Known:
    """State of a session: the ids so far as pieces of JSON, the last body's hash, the last reply's digest, its turns."""

    pieces: list[bytes] = field(default_factory=list)
    body_size: int = 0
    """Bytes of the last body up to the end of its messages."""
    body_hash: int = 0
    reply: bytes = b""
    turns: list[bytes] = field(default_factory=list)


class Proven(Floor):
    """The floor with verification; how the prompt is sent, and how the answer is verified, is in `sent` and `verified`."""

    known: type[Known] = Known

    def __init__(self, upstream: str, engine: aiohttp.ClientSession) -> None:
        super().__init__(upstream, engine)
        self.sessions = LRUCache[str, Any](_MOST)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Whole replies only: for streams the floor's figures are sufficient."""
        name = request.headers.get(SESSION)
        if name is None:
            return await Relay.handle(self, request)
        body = await request.read()
        known = self.sessions.pop(name, None) or self.known()
        new = new_messages(known, body)
        digests = [digest(entry.role, entry.content) for entry in _ENTRIES.decode(new)]
        tail = b""
        if known.reply:
            if digests[0] != known.reply:
                raise ValueError("this is not what was sampled")
            tail = await self.tail(body)
        sent, tail = self.sent(known, body, tail)
        async with self.engine.post(self.chat, headers=passed_on(request.headers), data=sent) as answer:
            answer_body = await answer.read()
        content, turn, brief = self.verified(known, tail, answer, answer_body)
        known.reply = digest("assistant", content)
        known.turns.append(_PACK.encode([*turn, isal_zlib.compress(new), *digests]))
        self.sessions[name] = known
        return web.Response(status=answer.status, headers=passed_on(answer.headers), body=brief)

    def sent(self, known: Any, body: bytes, tail: bytes) -> tuple[bytes, bytes]:
        """The request, and the tail as `verified` gets it; `tail` is JSON, and empty for the first call of a session."""
        parts = [memoryview(body)[:-1], WANTED]
        if tail:
            known.turns.append(pack_json_ids(tail))
            known.pieces += (b",", tail)
            parts += (SUPPLIED, *known.pieces, b"]}")
        return b"".join((*parts, b"}")), tail

    def verified(self, known: Any, _tail: bytes, _answer: aiohttp.ClientResponse, body: bytes) -> tuple[str, tuple[bytes, bytes], bytes]:
        """The reply's text, its packed ids and log probabilities, and the body for the client."""
        brief = _without_echo(known, body)
        choice = _REPLY.decode(brief).choices[0]
        values = [one.logprob for one in choice.logprobs.content]
        if len(choice.token_ids) != len(values) or any(map(math.isnan, values)):
            raise ValueError("the engine returned no log probabilities")
        known.pieces.append(sampled_in(brief))
        turn = _ints(choice.token_ids), struct.pack(f"<{len(values)}f", *values)
        return choice.message.content, turn, _hidden(brief)


def new_messages(known: Known, body: bytes) -> bytes:
    """The messages that the session has not sent yet, as a list of JSON."""
    end = body.rindex(LAST_END)
    same = known.body_size and xxhash.xxh3_64_intdigest(memoryview(body)[: known.body_size]) == known.body_hash
    new = b"[%s]" % body[known.body_size + 1 if same else len(_MESSAGES) : end]
    if known.body_size and not same:
        raise ValueError("this does not continue what was sent before")
    known.body_size, known.body_hash = end, xxhash.xxh3_64_intdigest(memoryview(body)[:end])
    return new


def digest(role: str, content: str) -> bytes:
    return hashlib.sha256(f"{role}\n{content}".encode()).digest()[:16]


def _without_echo(known: Known, answer_body: bytes) -> bytes:
    """The reply without its echo. The engine must have used the ids that were sent; those of a first call are read."""
    begin, end = echo_in(answer_body)
    if not known.pieces:
        known.pieces.append(answer_body[begin:end])
        known.turns.append(pack_json_ids(known.pieces[0]))
    at = begin
    for piece in known.pieces:
        if not answer_body.startswith(piece, at):
            raise ValueError("the engine used another prompt")
        at += len(piece)
    if at != end or begin == end:
        raise ValueError("the engine used a longer prompt, or did not return its ids")
    return answer_body[:begin] + answer_body[end:]


def pack_json_ids(ids: bytes) -> bytes:
    return _ints(_IDS_OF.decode(b"[%s]" % ids))


def _ints(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def _hidden(reply: bytes) -> bytes:
    """The fields that the client did not request, cut out of a reply."""
    for begin, end in (_LOGPROBS, _IDS):
        at = reply.index(begin) + len(begin) - 1
        reply = reply[:at] + b"null" + reply[reply.index(end, at) + (end == b"]") :]
    return reply


if __name__ == "__main__":
    serve(Proven)
