"""Names exact prompts by a hash, so that requests and answers do not grow with the conversation, for engines with the plugin.

The plugin (`tokencache_vllm.prefixes`) keeps the ids of recent conversations in the engine's API server. A request then has the
SHA-256 and the length of the prompt's beginning, up to the end of the last reply, and only the ids after it. The messages are not
rendered, so one short message stands for all of them. The answer has a header with the SHA-256 of the ids that the engine was given, and
not these ids. If it is not the hash of the exact prompt, the answer is not used, and the call is sent again with all its ids.

The engine may not have a prefix: it restarted, its memory for prefixes is full, or another of its API servers has it. Then it answers 400
with a header, and the same request is sent with the whole prompt. An engine that misses most prefixes is rarely asked for one.

Every 256th exact prompt is compared id by id, too: the answer to that request has the ids. A hash alone would not find a plugin that
computes it of other ids than it uses.
"""

import base64
import hashlib
import secrets
from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from itertools import count
from typing import Any, NamedTuple

import msgspec
import xxhash

from tokencache.core import ids
from tokencache.dialects.chat.request import ChatCall
from tokencache.dialects.members import UNNAMED
from tokencache.engine.derender import ANY_MESSAGES
from tokencache.engine.reply import Reply
from tokencache.engine.upstream import AskChat, EngineResponse
from tokencache.recent import Recent

MEMBER = "tokencache_prefix"
"""The member of `kv_transfer_params` that names a prompt."""
PROMPT_HEADER, MISS_HEADER = "x-tokencache-prompt", "x-tokencache-prefix"
ECHO_EVERY = 256
"""Exact prompts of which one is compared id by id."""

_WEIGHT = 0.9
"""How much of an engine's share of hits remains when another request is counted."""
_WORTHWHILE = 0.5
"""Share of hits below which an engine gets whole prompts."""
_TRY_EVERY = 16
"""Of the prompts for such an engine, one is named in spite of that, to learn whether it has them again."""
_MOST_STATES = 16_384
"""Prompts whose state of the hash is kept, some 400 bytes each."""


class PromptName(msgspec.Struct, frozen=True):
    """How a request names its prompt.

    Attributes:
        digest: SHA-256 of the packed prompt, as hex digits; `""` if the engine renders it.
        prefix: SHA-256 of its beginning that the request does not have; `""` if it has all ids.
        length: number of tokens of this beginning.
        tail: the ids that the request has, packed.
        echo: whether the answer shall have the ids of the prompt.
        experts: whether it shall have routed experts.
    """

    digest: str = ""
    prefix: str = ""
    length: int = 0
    tail: bytes = b""
    echo: bool = True
    experts: bool = False

    def member(self, calls: int, *, packed: bool) -> dict[str, Any]:
        """Return the member of a request.

        Args:
            calls: number of tool calls in the history.
            packed: whether the ids and log probabilities of the reply shall be packed.
        """
        options = {"packed": packed, **({"experts": True} if self.experts else {})}
        if not self.digest:
            return options
        named = {"hash": self.prefix, "length": self.length} if self.prefix else {}
        return {**named, "tail": base64.b64encode(self.tail).decode(), "calls": calls, "echo": self.echo, **options}

    def whole(self, packed: bytes) -> "PromptName":
        """Return the name for a request that has all ids of the prompt."""
        return msgspec.structs.replace(self, prefix="", length=0, tail=packed)

    def is_proven(self, headers: Mapping[str, str]) -> bool:
        """Whether an answer says that the engine was given this prompt. If the engine renders, there is nothing to prove."""
        return not self.digest or headers.get(PROMPT_HEADER) == self.digest


class PromptHashes:
    """Computes SHA-256 of prompts, and continues from that of the conversation's previous prompt.

    For 30,000 tokens that takes 7 µs instead of 71 (AMD EPYC, Python 3.11).

    The state of the hash is kept by a fast hash of the same ids, which has a secret seed: clients cannot construct two prompts with one.
    """

    def __init__(self) -> None:
        self._key = partial(xxhash.xxh3_128_digest, seed=secrets.randbits(64))
        self._states: Recent[bytes, Any] = Recent(_MOST_STATES)

    def name(self, packed: bytes, known: int, before: int = 0, *, echo: bool) -> PromptName:
        """Name an exact prompt.

        Args:
            packed: its ids.
            known: number of tokens at its beginning that the engine has; 0 if the request is to have all.
            before: number of tokens at its beginning that are the prompt of an earlier call; 0 if unknown.
            echo: whether the answer shall have the ids.
        """
        view = memoryview(packed)
        begin, end = min(before, known) * ids.ID_BYTES, known * ids.ID_BYTES
        state = self._states.get(self._key(view[:begin])) if begin else None
        hashed: Any = state.copy() if state is not None else hashlib.sha256(view[:begin])
        hashed.update(view[begin:end])
        prefix = hashed.hexdigest() if known else ""
        hashed.update(view[end:])
        self._states[self._key(view)] = hashed
        return PromptName(hashed.hexdigest(), prefix, known, packed[end:], echo)


class PrefixUse:
    """Decides which prompts are named to which engine, and counts how many of the prefixes it had."""

    def __init__(self) -> None:
        self._hits: dict[str, float] = {}  # engine → share of hits, recent requests first
        self._numbers = count()
        self._hashes = PromptHashes()

    def name(self, engine: str, packed: bytes, last_reply: tuple[int, int], *, echo: bool) -> PromptName:
        """Name an exact prompt to an engine.

        Args:
            engine: the engine's base URL.
            packed: the ids of the prompt.
            last_reply: the tokens of the last reply in it: the first one, and the one after the last.
            echo: whether the answer must have the ids.
        """
        number = next(self._numbers)
        before, known = last_reply
        worthwhile = self._hits.get(engine, 1.0) >= _WORTHWHILE or number % _TRY_EVERY == 0
        if not worthwhile or known >= ids.count(packed):
            before = known = 0
        return self._hashes.name(packed, known, before, echo=echo or number % ECHO_EVERY == 0)

    def noted(self, engine: str, *, hit: bool) -> None:
        """Note whether an engine had a prefix."""
        self._hits[engine] = _WEIGHT * self._hits.get(engine, 1.0) + (1 - _WEIGHT) * hit


def can_be_named(call: ChatCall) -> bool:
    """Whether the plugin accepts the prompt of a call, and the call's reply does not depend on its last message."""
    if call.media or not call.raw_messages or bytes(call.fields.get("add_generation_prompt", b"true")) != b"true":
        return False
    return {*map(bytes, filter(None, map(call.fields.get, UNNAMED)))} <= {b"null", b"false"}


def is_miss(answer: Mapping[str, str]) -> bool:
    """Whether the headers of a refusal say that the engine does not have the prefix."""
    return MISS_HEADER in answer


class PrefixSupport(NamedTuple):
    """Whether an engine accepts prompts that are named by a hash, and if not, why."""

    accepted: bool
    why: str = ""


class _UnprovenError(Exception):
    """The engine does not accept named prompts; the text of the error is the reason."""


async def probe_prefixes(ask: AskChat, model: str, plain: bytes) -> PrefixSupport:
    """Test whether an engine accepts prompts that are named by a hash.

    Args:
        ask: sends a chat request to it.
        model: the model.
        plain: packed ids of any prompt.

    Raises:
        EngineError: the engine cannot be reached, or cannot answer now.
    """
    try:
        await _Probe(ask, model).test(plain + plain + ids.head(plain, 1))
    except _UnprovenError as why:
        return PrefixSupport(accepted=False, why=str(why))
    return PrefixSupport(accepted=True)


class _Probe:
    def __init__(self, ask: AskChat, model: str) -> None:
        self._ask, self._model, self._hashes = ask, model, PromptHashes()

    async def test(self, prompt: bytes) -> None:
        """Supply ids that no rendering has, then name them with their reply, then name something that the engine cannot have.

        Raises:
            _UnprovenError: an answer is not as the plugin gives it.
        """
        reply = await self._proven(self._hashes.name(prompt, 0, echo=True))
        if reply.prompt.packed != prompt or not reply.choices[0].ids or len(reply.choices[0].logprobs) != len(reply.choices[0].ids):
            raise _UnprovenError("its answer to a prompt by hash has other ids than its header, or no packed reply")
        known = prompt + ids.pack(reply.choices[0].ids)
        await self._proven(self._hashes.name(known + ids.head(prompt, 2), ids.count(known), echo=False), may_miss=True)
        answer = await self._answer(msgspec.structs.replace(self._hashes.name(prompt[::-1], 1, echo=False), prefix="0" * 64))
        if answer.status != HTTPStatus.BAD_REQUEST or not is_miss(answer.headers):
            raise _UnprovenError("it does not refuse a prefix that it cannot have")

    async def _proven(self, name: PromptName, *, may_miss: bool = False) -> Reply:
        answer, reply = await self._answer(name), Reply()
        if may_miss and is_miss(answer.headers):  # another of its API servers has the prefix
            return reply
        if answer.status != HTTPStatus.OK:
            raise _UnprovenError(f"it refuses prompts by hash: {answer.status}: {answer.body[:300].decode(errors='replace')}")
        if PROMPT_HEADER not in answer.headers:
            raise _UnprovenError("its answer has no hash of the prompt: the plugin for prefixes is not active (docs/prefixes.md)")
        reply.add(answer.body)
        if not name.is_proven(answer.headers) or 0 not in reply.choices:
            raise _UnprovenError("it does not use the ids of a prompt by hash")
        return reply

    async def _answer(self, name: PromptName) -> EngineResponse:
        members = {"max_tokens": 1, "temperature": 0, "return_token_ids": True, "logprobs": True}
        transfer = {MEMBER: name.member(0, packed=True)}
        return await self._ask({"model": self._model, "messages": ANY_MESSAGES, **members, "kv_transfer_params": transfer})
