"""The floor with the plugin: `bench.proven` in front of an engine that takes prompts by hash: `python -m bench.named PORT UPSTREAM`.

The prompt goes to the engine as the hash and length of its beginning and the ids of the tail, one message stands for all, and the answer
has a hash of the prompt and a packed reply. So neither request nor answer grows. A prefix that the engine does not have is an error here.
"""

import base64
import hashlib
import math
import struct
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from bench.floor import LAST_END, WANTED
from bench.proven import MESSAGE, Known, Proven, pack_json_ids
from bench.relay import serve

_HEADER = "x-tokencache-prompt"
_STAND_IN = b'{"messages":[{"role":"user","content":"x"}'
_RENDERED = b',"kv_transfer_params":{"tokencache_prefix":{"packed":true}}}'
_NAMED = b',"kv_transfer_params":{"tokencache_prefix":{"hash":"%s","length":%d,"tail":"%s","calls":0,"echo":false,"packed":true}}}'
_PACKED, _PACKED_END = b',"tokencache":{"ids":', b"}"

_REPLY_IDS = msgspec.defstruct("_REPLY_IDS", [("ids", bytes), ("logprobs", bytes)])
_CHOICE = msgspec.defstruct("_CHOICE", [("message", MESSAGE), ("tokencache", _REPLY_IDS)])
_PROMPT = msgspec.defstruct("_PROMPT", [("prompt", bytes)])
_REPLY = msgspec.json.Decoder(msgspec.defstruct("_REPLY", [("choices", list[_CHOICE]), ("tokencache", _PROMPT | None, None)]))


@dataclass(slots=True)
class KnownByHash(Known):
    """State of a session: `hashed` has read all its ids."""

    hashed: Any = None
    tokens: int = 0


class Named(Proven):
    known = KnownByHash

    def sent(self, known: Any, body: bytes, tail: bytes) -> tuple[bytes, bytes]:
        if not tail:
            return body[:-1] + WANTED + _RENDERED, tail
        packed = pack_json_ids(tail)
        asked = _NAMED % (known.hashed.hexdigest().encode(), known.tokens, base64.b64encode(packed))
        return b"".join((_STAND_IN, memoryview(body)[body.rindex(LAST_END) : -1], WANTED, asked)), packed

    def verified(self, known: Any, tail: bytes, answer: aiohttp.ClientResponse, body: bytes) -> tuple[str, tuple[bytes, bytes], bytes]:
        reply = _REPLY.decode(body)
        if known.hashed is None:
            if reply.tokencache is None:
                raise ValueError("the engine did not return the ids of the prompt")
            known.hashed, tail = hashlib.sha256(), reply.tokencache.prompt
        known.hashed.update(tail)
        if answer.headers.get(_HEADER) != known.hashed.hexdigest():
            raise ValueError("the engine used another prompt")
        known.turns.append(tail)
        choice = reply.choices[0]
        sampled, values = choice.tokencache.ids, choice.tokencache.logprobs
        tokens = len(sampled) // 4
        if values[:1] != b"f" or len(values) != 1 + 4 * tokens or any(map(math.isnan, struct.unpack(f"<{tokens}f", values[1:]))):
            raise ValueError("the engine returned no log probabilities")
        known.hashed.update(sampled)
        known.tokens += len(tail) // 4 + tokens
        return choice.message.content, (sampled, values[1:]), _hidden(body)


def _hidden(reply: bytes) -> bytes:
    """The reply without what the client did not request."""
    at = reply.index(_PACKED)
    return reply[:at] + reply[reply.index(_PACKED_END, at) + 1 :]


if __name__ == "__main__":
    serve(Named)
