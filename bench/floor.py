"""The floor: only what any proxy for exact tokens must do in Python on aiohttp: `python -m bench.floor PORT UPSTREAM [--local]`.

It relays a call, and does these four: a second, small call (`/tokenize`) for the ids that the template puts after the last reply (the
tail); the ids of the whole history to the engine; their echo cut out of the answer; the sampled ids kept for the session's next call.
It verifies nothing, and parses no JSON: it searches for a few byte strings that the bench and its mock engine are known to write.

`--local` omits the second call, as if a tokenizer in the proxy cost nothing: the tail is then the same made-up ids at each call.
"""

import sys
from typing import Any

import aiohttp
from aiohttp import web
from cachetools import LRUCache
from yarl import URL

from bench.relay import Relay, begun, passed_on, serve

SESSION = "X-Tokencache-Session"
STOP = b"151645,"
"""`bench.mock.END` with the comma after it: a tail begins there."""
LAST_END = b'],"model"'
WANTED = b',"return_token_ids":true,"logprobs":true'
SUPPLIED = b',"kv_transfer_params":{"prompt_token_ids":['
_LAST = b'{"role":'
_ASK = b'{"model":"mock","messages":[{"role":"assistant","content":"x"},%s],"add_generation_prompt":true}'
_ECHO = b'"prompt_token_ids":['
_SAMPLED = b'"token_ids":['  # does not match `_ECHO`, where no quote precedes these words
_NO_ECHO = "the engine did not return the prompt ids that it used"
_MADE_UP = b"100001," * 215 + b"100001"
_MOST = 512 * 2**20
"""Bytes of ids that are kept."""


def kept_sessions() -> LRUCache[str, list[bytes]]:
    """The ids of each session's history so far: pieces of JSON that are joined only when they are sent."""
    return LRUCache(_MOST, getsizeof=lambda pieces: sum(map(len, pieces)))


class Floor(Relay):
    """The relay, for calls without a session; the floor for others."""

    def __init__(self, upstream: str, engine: aiohttp.ClientSession, *, local: bool = False) -> None:
        super().__init__(upstream, engine)
        self.local = local
        self.chat, self.tokenize = URL(upstream + "/v1/chat/completions"), URL(upstream + "/tokenize")
        self.sessions: Any = kept_sessions()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        session = request.headers.get(SESSION)
        if session is None:
            return await super().handle(request)
        body = await request.read()
        pieces = self.sessions.pop(session, [])
        sent = [memoryview(body)[:-1], WANTED]
        if pieces:
            pieces += (b",", await self.tail(body))
            sent += (SUPPLIED, *pieces, b"]}")
        async with self.engine.post(self.chat, headers=passed_on(request.headers), data=b"".join((*sent, b"}"))) as answer:
            if answer.content_length is None:
                response, answer_body = await self.stream(request, answer, pieces)
            else:
                response, answer_body = self.whole(answer, await answer.read(), pieces)
        self.sessions[session] = [*pieces, sampled_in(answer_body)]
        return response

    async def tail(self, body: bytes) -> bytes:
        """The ids after the last reply: the engine renders a stand-in for the reply, and the last message."""
        if self.local:
            return _MADE_UP
        end = body.rindex(LAST_END)
        asked = _ASK % body[body.rindex(_LAST, 0, end) : end]
        async with self.engine.post(self.tokenize, headers={"Content-Type": "application/json"}, data=asked) as answer:
            answer_body = await answer.read()
        at = answer_body.index(STOP) + len(STOP)
        return answer_body[at : answer_body.index(b"]", at)]

    def whole(self, answer: aiohttp.ClientResponse, answer_body: bytes, pieces: list[bytes]) -> tuple[web.Response, bytes]:
        at, end = echo_in(answer_body)
        if not end:
            raise ValueError(_NO_ECHO)
        if not pieces:
            pieces.append(answer_body[at:end])
        brief = answer_body[:at] + answer_body[end:]
        return web.Response(status=answer.status, headers=passed_on(answer.headers), body=brief), brief

    async def stream(self, request: web.Request, answer: aiohttp.ClientResponse, pieces: list[bytes]) -> tuple[web.StreamResponse, bytes]:
        response = begun(answer)
        await response.prepare(request)
        first, answer_body, end = bytearray(), [], 0
        async for chunk in answer.content.iter_any():
            if end:
                answer_body.append(chunk)
                await response.write(chunk)
                continue
            first += chunk
            at, end = echo_in(first)
            if end:
                if not pieces:
                    pieces.append(bytes(first[at:end]))
                del first[at:end]
                answer_body.append(bytes(first))
                await response.write(answer_body[0])
        if not end:
            raise ValueError(_NO_ECHO)
        await response.write_eof()
        return response, b"".join(answer_body)


def echo_in(answer_body: bytes | bytearray) -> tuple[int, int]:
    """Position of the prompt ids; (0, 0) if they are incomplete. Finding their end takes as long as comparing them would."""
    at = answer_body.find(_ECHO) + len(_ECHO)
    end = answer_body.find(b"]", at) if at >= len(_ECHO) else -1
    return (at, end) if end > 0 else (0, 0)


def sampled_in(answer_body: bytes) -> bytes:
    """The sampled ids of a reply, whole or in events, each preceded by a comma."""
    return b"".join([b"," + part[: part.index(b"]")] for part in answer_body.split(_SAMPLED)[1:]])


if __name__ == "__main__":
    serve(Floor, local="--local" in sys.argv)
