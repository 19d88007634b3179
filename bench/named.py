"""The floor with the plugin: what any proxy must do that names prompts by a hash, verifies the tokens and keeps them.

As `bench.proven`, but the prompt goes to the engine as the hash and length of its beginning and the ids of the tail, one message stands
for all, and the answer has a hash of the prompt and a packed reply (`tokencache_vllm.prefixes`). So neither request nor answer
grows. A prefix that the engine does not have is an error here: the bench's engine keeps all that it needs.

    python -m bench.named PORT UPSTREAM
"""

import base64
import hashlib
import math
import struct
import sys
from dataclasses import dataclass
from typing import Any

import msgspec
import uvloop
from aiohttp import web

from bench.floor import LAST_END, SESSION, WANTED
from bench.proven import Known, Message, Proven, digest, digests_of, new_messages, pack_json_ids, pack_turn
from bench.relay import passed_on, serve

_HEADER = "x-tokencache-prompt"
_STAND_IN = b'{"messages":[{"role":"user","content":"x"}'
_RENDERED = b',"kv_transfer_params":{"tokencache_prefix":{"packed":true}}}'
_NAMED = b',"kv_transfer_params":{"tokencache_prefix":{"hash":"%s","length":%d,"tail":"%s","calls":0,"echo":false,"packed":true}}}'
_PACKED, _PACKED_END = b',"tokencache":{"ids":', b"}"


class _Packed(msgspec.Struct):
    ids: bytes
    logprobs: bytes


class _Choice(msgspec.Struct):
    message: Message
    tokencache: _Packed


class _Prompt(msgspec.Struct):
    prompt: bytes


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    tokencache: _Prompt | None = None


_REPLY = msgspec.json.Decoder(_Reply)


@dataclass(slots=True)
class KnownByHash(Known):
    """State of a session: `hashed` has read all its ids."""

    hashed: Any = None
    tokens: int = 0


class Named(Proven):
    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Whole replies only."""
        name = request.headers.get(SESSION)
        if name is None:
            return await self.floor.relay.handle(request)
        body = await request.read()
        known: Any = self.sessions.pop(name, None) or KnownByHash()
        new = new_messages(known, body)
        digests = digests_of(new)
        tail = b""
        if known.hashed is None:
            sent = body[:-1] + WANTED + _RENDERED
        else:
            if digests[0] != known.reply:
                raise ValueError("this is not what was sampled")
            tail = pack_json_ids(await self.floor.tail(body))
            asked = _NAMED % (known.hashed.hexdigest().encode(), known.tokens, base64.b64encode(tail))
            sent = b"".join((_STAND_IN, memoryview(body)[body.rindex(LAST_END) : -1], WANTED, asked))
        async with self.floor.engine.post(self.floor.chat, headers=passed_on(request.headers), data=sent) as answer:
            answer_body = await answer.read()
        reply = _REPLY.decode(answer_body)
        if known.hashed is None:
            if reply.tokencache is None:
                raise ValueError("the engine did not return the ids of the prompt")
            known.hashed, tail = hashlib.sha256(), reply.tokencache.prompt
        known.hashed.update(tail)
        if answer.headers.get(_HEADER) != known.hashed.hexdigest():
            raise ValueError("the engine used another prompt")
        known.turns.append(tail)
        _keep(known, new, digests, reply.choices[0])
        known.tokens += len(tail) // 4
        self.keep(name, known)
        return web.Response(status=answer.status, headers=passed_on(answer.headers), body=_hidden(answer_body))


def _keep(known: KnownByHash, new: bytes, digests: list[bytes], choice: _Choice) -> None:
    """The packed turn; the next call is compared with it."""
    sampled, values = choice.tokencache.ids, choice.tokencache.logprobs
    tokens = len(sampled) // 4
    if values[:1] != b"f" or len(values) != 1 + 4 * tokens or any(map(math.isnan, struct.unpack(f"<{tokens}f", values[1:]))):
        raise ValueError("the engine returned no log probabilities")
    known.reply = digest("assistant", choice.message.content)
    known.turns.append(pack_turn(sampled, values[1:], new, digests))
    known.hashed.update(sampled)
    known.tokens += tokens


def _hidden(reply: bytes) -> bytes:
    """The reply without what the client did not request."""
    at = reply.index(_PACKED)
    return reply[:at] + reply[reply.index(_PACKED_END, at) + 1 :]


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), lambda engine: Named(sys.argv[2], engine).handle))
