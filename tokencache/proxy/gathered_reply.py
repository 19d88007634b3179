"""Gathers a streamed reply for a client that requested a whole one.

If an engine breaks off a whole reply, all of it is lost. Of a stream, every token that arrived is known. So where a broken reply can be
continued (`continuation`), the engine is asked for a stream. Derender makes the message from the ids, with the parsers that make it for a
whole reply: the deltas of a stream may divide it otherwise.
"""

from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import msgspec

from tokencache.dialects.chat.request import ChatCall
from tokencache.dialects.chat.whole import whole_choice, whole_completion, whole_members
from tokencache.dialects.completion_reader import ReplyMessage
from tokencache.engine.derender import Derender, DerenderRequest
from tokencache.engine.figures import judge
from tokencache.engine.reply import Choice, Reply
from tokencache.proxy.continuation import events_of
from tokencache.request_memory import Holding

Raw = msgspec.Raw

_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_CHOICES = msgspec.json.Decoder(list[dict[str, Raw]])
_HEAD = ("id", "created", "model", "system_fingerprint", "service_tier", "prompt_text")
_NULL = Raw(b"null")
_NO_MESSAGE: Mapping[str, Any] = {"role": "assistant", "content": None}


class _Entries(msgspec.Struct):
    content: list[Raw] | None = None


_ENTRIES = msgspec.json.Decoder(_Entries | None)


def as_stream(call: ChatCall) -> ChatCall:
    """Return a call that requests a stream, with the usage."""
    fields = {**call.fields, "stream": Raw(b"true"), "stream_options": Raw(b'{"include_usage":true}')}
    return msgspec.structs.replace(call, fields=fields, stream=True)


def as_whole(call: ChatCall) -> ChatCall:
    """Return a call that requests a whole reply."""
    return msgspec.structs.replace(call, fields=whole_members(call.fields), stream=False)


class GatheredReply:
    """The chunks of one reply, as they arrive.

    Attributes:
        reply: the engine's reply.
        first: the first chunk (JSON).
    """

    def __init__(self, reply: Reply, holding: Holding) -> None:
        self.reply, self._holding = reply, holding
        self.first = b""
        self._logprobs: list[Raw] = []
        self._head: dict[str, Raw] = {}
        self._usage = _NULL
        self._pieces = 0

    async def read(self, answer: aiohttp.ClientResponse, check: Callable[[bytes], None] | None = None) -> str:
        """Read a stream to its end, the whole reply's or that of a piece of it; `check` gets each chunk first.

        Returns:
            How the engine broke it off (`ReplyPiece.ended`); `""` if the reply is complete. A reply whose ids are not all certain counts
            as broken off, because its message would be made of them.

        Raises:
            MemoryFullError: requests hold as much memory as they may.
        """
        self._pieces += check is not None
        async for data in events_of(answer):
            self._holding.take("reply", len(data))
            if check is not None:
                check(data)
            self._add(data)
        if self.reply.finished and not self.reply.aborted and all(found.hole is None for found in judge(self.reply, whole=True).values()):
            return ""
        return "abort" if self.reply.aborted else "error" if self.reply.error else "lost"

    def _add(self, data: bytes) -> None:
        unreadable = self.reply.unreadable
        brief = self.reply.add(self.reply.without_experts(data))
        if self.reply.unreadable > unreadable:
            return
        self.first = self.first or brief
        fields = _FIELDS.decode(brief)
        self._head |= {name: fields[name] for name in _HEAD if name in fields}
        self._usage = fields.get("usage", _NULL)
        for choice in _CHOICES.decode(fields.get("choices", Raw(b"[]"))):
            entries = _ENTRIES.decode(choice.get("logprobs", _NULL))
            self._logprobs += (entries.content or ()) if entries is not None else ()
        for known in self.reply.choices.values():
            known.steps.clear()  # the client has received nothing of it
            known.call_steps.clear()

    async def body(self, call: ChatCall, derender: Derender, request: DerenderRequest) -> bytes:
        """Write the whole reply as vLLM does (0.32), and set its message.

        Raises:
            EngineError: derender did not answer.
        """
        choice = self.reply.choices[0]
        message = await _message(choice, derender, request)
        calls = message.get("tool_calls") or []
        if calls and bytes(call.fields.get("parallel_tool_calls", _NULL)) == b"false":
            calls = message["tool_calls"] = calls[:1]
        if calls and choice.finish_reason == "stop":
            choice.finish_reason = "tool_calls"
        choice.replace_message(msgspec.convert(message, ReplyMessage))
        prompt, sampled = self.reply.prompt.tokens, len(choice.ids)
        made = whole_choice(
            0,
            message,
            {
                "logprobs": {"content": self._logprobs} if call.shows_logprobs else None,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                "token_ids": choice.ids,
            },
        )
        usage: Any = {"prompt_tokens": prompt, "total_tokens": prompt + sampled, "completion_tokens": sampled}
        if bytes(self._usage) != b"null" and not self._pieces:
            usage = _FIELDS.decode(self._usage)  # the engine's own, which may have details
        echo = Raw(self.reply.prompt.raw or b"null") if call.shows_ids else None
        return msgspec.json.encode(whole_completion([made], usage, {**self._head, "prompt_token_ids": echo}))


async def _message(choice: Choice, derender: Derender, request: DerenderRequest) -> dict[str, Any]:
    ended_by_id = choice.finish_reason == "stop" and not isinstance(choice.stop_reason, str)
    shown = choice.ids[:-1] if ended_by_id else choice.ids
    if not shown:
        return dict(_NO_MESSAGE)
    made = await derender.messages(request, [{"index": 0, "token_ids": shown, "finish_reason": choice.finish_reason}])
    return made[0]
