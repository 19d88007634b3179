"""The mock engine: the part of vLLM that the proxy uses, at the lowest possible cost: `python -m bench.mock PORT [--plugin]`.

Supplied prompt ids are never parsed: their JSON is copied to the reply, which is joined from byte strings made once. The tokenizer is exact
and trivial: any four bytes of a text are one token, whose id has six digits, and special tokens enclose each message; so a tail is a suffix
of the full rendering, as with a real template.

Request members that only this engine has, all optional: `mock_tokens` (length of the reply), `mock_pace_ms` (the pause before each token of
a stream), `mock_halt` (after so many tokens a stream goes on no more). The last event of a stream has the time when it was written:
`"mock_sent": nanoseconds` of CLOCK_MONOTONIC. With `--plugin` it also takes prompts by hash, and packs replies.
"""

import asyncio
import base64
import hashlib
import itertools
import re
import sys
import time
from functools import lru_cache

import msgspec
import numpy as np
import uvloop
from cachetools import FIFOCache

START, END = 151644, 151645
FIRST, SPREAD = 100_000, 1 << 15
_ID_BYTES = len(b"%d," % FIRST)
_TABLE = np.array([b"%d," % (FIRST + i) for i in range(SPREAD)], dtype=f"S{_ID_BYTES}")
MODEL = "mock"
_ROLE_END = b"\n"
_SUPPLIED = b'"kv_transfer_params":{"prompt_token_ids":['
_NAMED = b'"kv_transfer_params":{"tokencache_prefix":'
_OPTIONS = 600
_OPTION = re.compile(rb'"mock_(tokens|pace_ms|halt)": ?(\d+)')
_counter = itertools.count()


def tokens_of(text: bytes) -> bytes:
    """Each four bytes are one token; its id is a hash of them. JSON, with a comma after each."""
    words = np.frombuffer(text + bytes(-len(text) % 4), dtype="<u4")
    return _TABLE[(words * np.uint32(2654435761)) >> np.uint32(17)].tobytes()


class _NotTextError(Exception):
    """A message has images, which a model for text refuses."""


@lru_cache(20_000)
def _message(raw: bytes) -> bytes:
    entry = msgspec.json.decode(raw)
    if isinstance(entry.get("content"), list):
        raise _NotTextError
    text = (entry.get("content") or "").encode() + b"".join(msgspec.json.encode(c["function"]) for c in entry.get("tool_calls") or ())
    parts = tokens_of(entry["role"].encode() + _ROLE_END), tokens_of(text), tokens_of(b"\n")
    return b"%d,%s%s%d,%s" % (START, parts[0], parts[1], END, parts[2])


def render(messages: list[msgspec.Raw], *, generation: bool) -> bytes:
    """The ids of a conversation as JSON, without the brackets."""
    ids = b"".join([_message(bytes(raw)) for raw in messages])
    if generation:
        ids += b"%d," % START + tokens_of(b"assistant" + _ROLE_END)
    return ids[:-1]


class _Body(msgspec.Struct):
    messages: list[msgspec.Raw] = []
    add_generation_prompt: bool = True
    max_tokens: int = 1 << 20
    allowed_token_ids: list[int] | None = None
    return_token_ids: bool = False


class _Name(msgspec.Struct):
    tail: bytes = b""
    hash: str = ""
    echo: bool = False
    packed: bool = False


_decode = msgspec.json.Decoder(_Body).decode
_decode_name = msgspec.json.Decoder(_Name).decode


def kept_prompts() -> FIFOCache[str, bytes]:
    """What the engine keeps with the plugin: the SHA-256 of a prompt with its reply → their packed ids."""
    return FIFOCache(4_096)


_CHOICE = b'"logprobs":%s,"finish_reason":"stop","stop_reason":null,"token_ids":%s,"routed_experts":null'
"""The members of a whole reply's choice after its message."""


class MockReply:
    """A reply of `n` tokens, made once: four characters each, the last one the end of turn."""

    def __init__(self, n: int) -> None:
        self.ids = [FIRST + (i * 7919) % SPREAD for i in range(n - 1)] + [END]
        self.texts = [f"w{i % 1000:03d}" for i in range(n - 1)] + [""]
        self.logprob_entries = [
            msgspec.json.encode({"token": t, "logprob": -(1 + i % 97) / 64, "bytes": list(t.encode()), "top_logprobs": []})
            for i, t in enumerate(self.texts)
        ]
        logprobs_json, json_ids = b",".join(self.logprob_entries), b",".join(b"%d" % i for i in self.ids)
        self.plain = _CHOICE % (b"null", b"null")
        self.with_ids = _CHOICE % (b'{"content":[%s]}' % logprobs_json, b"[%s]" % json_ids)
        self.json_text = "".join(self.texts).encode()
        self.packed = np.array(self.ids, dtype="<i4").tobytes()
        logprobs = np.array([-(1 + i % 97) / 64 for i in range(n)], dtype="<f4").tobytes()
        members = tuple(base64.b64encode(data) for data in (self.packed, b"f" + logprobs))
        self.with_packed = self.plain + b',"tokencache":{"ids":"%s","logprobs":"%s"}' % members

    def events(self, *, ids: bool) -> list[bytes]:
        """The deltas of a stream, one for each token, without the head that all of one call share."""
        found = []
        for token, text, entry in zip(self.ids, self.texts, self.logprob_entries, strict=True):
            logprobs, token_ids = (b'{"content":[%s]}' % entry, b"[%d]" % token) if ids else (b"null", b"null")
            finish = b'"stop","stop_reason":null' if token == END else b"null"
            parts = text.encode(), logprobs, finish, token_ids
            found.append(b'{"index":0,"delta":{"content":"%s"},"logprobs":%s,"finish_reason":%s,"token_ids":%s}]}\n\n' % parts)
        return found


reply_of = lru_cache(32)(MockReply)
events_of = lru_cache(64)(lambda n, ids: reply_of(n).events(ids=ids))


class Server(asyncio.Protocol):
    """One connection; requests follow one another. `kept`: what the engine keeps; `None` without the plugin."""

    def __init__(self, kept: FIFOCache[str, bytes] | None = None) -> None:
        self.kept = kept
        self.buffer = bytearray()
        self.wanted = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (self.wanted or self._head()) and len(self.buffer) >= self.wanted:
            body = bytes(memoryview(self.buffer)[self.start : self.wanted])
            del self.buffer[: self.wanted]
            self.wanted = 0
            try:
                self._serve(body)
            except _NotTextError:
                self._json(b'{"error":{"message":"the mock engine accepts no images","code":400}}', b"400 Bad Request")

    def _head(self) -> bool:
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self.buffer[:end]).lower()
        self.path = head.split(b" ", 2)[1]
        length = re.search(rb"\r\ncontent-length: *(\d+)", head)
        if length is None and b"\r\ntransfer-encoding:" in head:
            raise RuntimeError("the mock engine does not accept chunked requests")
        self.start = end + 4
        self.wanted = self.start + (int(length[1]) if length else 0)
        return True

    def _serve(self, body: bytes) -> None:
        if self.path == b"/v1/chat/completions":
            self._chat(body)
        elif self.path == b"/tokenize":
            asked = _decode(body)
            ids = render(asked.messages, generation=asked.add_generation_prompt)
            self._json(b'{"count":%d,"max_model_len":1048576,"tokens":[%s],"token_strs":null}' % (_count(ids), ids))
        elif self.path == b"/v1/models":
            self._json(msgspec.json.encode({"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 1 << 20}]}))
        elif self.path == b"/version":
            self._json(b'{"version":"0.32.0"}')
        else:
            self._json(b"{}")

    def _json(self, body: bytes, status: bytes = b"200 OK", more: bytes = b"") -> None:
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%s\r\n"
        self.transport.writelines([head % (status, len(body), more), body])

    def _chat(self, body: bytes) -> None:
        prompt, at = b"", -1
        if body.endswith(b"]}}"):
            at = body.rfind(_SUPPLIED)
            prompt = body[at + len(_SUPPLIED) : -3]
        # Everything relevant is after the messages: both the bench and the proxy write it there.
        rest = body[max(0, at - _OPTIONS) : at] if at >= 0 else body[-_OPTIONS:]
        wants_ids = b'"return_token_ids":true' in rest
        if wants_ids and b'"allowed_token_ids"' in rest:
            self._forced(_decode(body))
            return
        if wants_ids and at < 0:
            prompt = render(_decode(body).messages, generation=True)
        options = {name: int(value) for name, value in _OPTION.findall(rest)}
        n = options.get(b"tokens", 16)
        number = b"%08d" % (next(_counter) % 10**8)
        if self.kept is not None and (named := body.rfind(_NAMED)) >= 0:
            options = {name: int(value) for name, value in _OPTION.findall(body)}
            self._named(self.kept, _decode_name(body[named + len(_NAMED) : -2]), prompt, reply_of(options.get(b"tokens", 16)), number)
            return
        echo = b"[%s]" % prompt if wants_ids else b"null"
        if b'"stream":true' in rest or b'"stream": true' in rest:
            usage = _usage(_count(prompt), n) if b'"include_usage":true' in rest else b""
            self._stream(events_of(n, wants_ids), options.get(b"pace_ms", 1), number, echo, usage, halt=options.get(b"halt", 0))
            return
        reply = reply_of(n)
        self._json(_whole(number, reply, reply.with_ids if wants_ids else reply.plain, _count(prompt), echo))

    def _named(self, kept: FIFOCache[str, bytes], name: _Name, rendered: bytes, reply: MockReply, number: bytes) -> None:
        """Answers a whole reply to a prompt by its hash, or to one that was rendered because the request has no tail."""
        known = kept.get(name.hash) if name.tail and name.hash else b""
        if known is None:
            self._json(b'{"error":{"message":"no such prefix","code":400}}', b"400 Bad Request", b"x-tokencache-prefix: miss\r\n")
            return
        prompt = known + name.tail if name.tail else np.fromstring(rendered.decode(), dtype="<i4", sep=",").tobytes()
        hashed = hashlib.sha256(prompt)
        digest = hashed.hexdigest()
        hashed.update(reply.packed)
        kept[hashed.hexdigest()] = prompt + reply.packed
        echo = b',"tokencache":{"prompt":"%s"}' % base64.b64encode(prompt) if name.echo or not name.tail else b""
        body = _whole(number, reply, reply.with_packed, len(prompt) // 4, b"null" + echo)
        self._json(body, more=b"x-tokencache-prompt: %s\r\n" % digest.encode())

    def _forced(self, asked: _Body) -> None:
        """Answers the probe's question: does generation stop at this token?"""
        token = (asked.allowed_token_ids or [END])[0]
        finish, count = ("stop", 1) if token == END else ("length", min(2, asked.max_tokens))
        message = {"role": "assistant", "content": ""}
        choice = {"index": 0, "message": message, "finish_reason": finish, "stop_reason": None, "token_ids": [token] * count}
        self._json(msgspec.json.encode({"model": MODEL, "choices": [choice], "prompt_token_ids": [START]}))

    def _stream(self, deltas: list[bytes], pace_ms: int, number: bytes, prompt: bytes, usage: bytes, *, halt: int) -> None:
        head = b'data: {"id":"chatcmpl-%s","object":"chat.completion.chunk","created":0,"model":"mock","choices":[' % number
        first = b'{"index":0,"delta":{"role":"assistant","content":"%s"},"logprobs":null,"finish_reason":null}]' % number
        begin = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        self.transport.write(begin + _framed(head + first + b',"prompt_token_ids":%s,"prompt_text":null}\n\n' % prompt))
        loop = asyncio.get_running_loop()
        begun, sent = loop.time(), 0

        def step() -> None:
            nonlocal sent
            if self.transport.is_closing():
                return
            self.transport.write(_framed(head + deltas[sent]))
            sent += 1
            if sent == len(deltas):
                counted = head + b'],"usage":%s}\n\n' % usage if usage else b""
                last = b'data: {"mock_sent":%d,"choices":[]}\n\ndata: [DONE]\n\n' % time.monotonic_ns()
                self.transport.write(_framed(counted + last) + b"0\r\n\r\n")
            elif sent != halt:
                loop.call_at(begun + (sent + 1) * pace_ms / 1000, step)

        loop.call_at(begun + pace_ms / 1000, step)


def _count(json_ids: bytes) -> int:
    """How many ids a JSON list without its brackets has: all have as many digits."""
    return (len(json_ids) + 1) // _ID_BYTES


def _usage(prompt: int, reply: int) -> bytes:
    return b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}' % (prompt, prompt + reply, reply)


def _whole(number: bytes, reply: MockReply, choice: bytes, prompt_tokens: int, prompt_ids: bytes) -> bytes:
    """A whole reply; `choice` has the members of its only choice after the message, `prompt_ids` those after the prompt's ids, too."""
    return (
        b'{"id":"chatcmpl-%s","object":"chat.completion","created":0,"model":"mock","choices":[{"index":0,"message":{"role":"assistant",'
        b'"content":"%s%s","refusal":null,"annotations":null,"audio":null,"function_call":null,"reasoning":null},%s}],"service_tier":null,'
        b'"system_fingerprint":"mock","usage":%s,"prompt_logprobs":null,'
        b'"prompt_token_ids":%s,"prompt_text":null,"kv_transfer_params":null}'
        % (number, number, reply.json_text, choice, _usage(prompt_tokens, len(reply.ids)), prompt_ids)
    )


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def main(port: int, kept: FIFOCache[str, bytes] | None) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Server(kept), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), kept_prompts() if "--plugin" in sys.argv else None))
