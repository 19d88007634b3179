"""Gathers a streamed reply for a client that requested a whole one.

If an engine breaks off a whole reply, all of it is lost. Of a stream, every token that arrived is known. So where a broken reply can be
continued (`continuation`), the engine is asked for a stream. Derender makes the message from the ids, with the parsers that make it for a
whole reply: the deltas of a stream may divide it otherwise.
"""

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from tokencache.core.incidents import IncidentKind
from tokencache.core.turn import TurnMark
from tokencache.dialects.chat.whole import whole_choice, whole_completion
from tokencache.dialects.completion_reader import ReplyMessage
from tokencache.dialects.json_io import FIELDS, NULL, OBJECTS
from tokencache.dialects.sse import DONE
from tokencache.engine.derender import Derender, DerenderRequest
from tokencache.engine.figures import judge
from tokencache.engine.reply import Choice
from tokencache.errors import EngineError, MemoryFullError
from tokencache.proxy.dispatch import Dispatch
from tokencache.proxy.facts import BegunCall
from tokencache.proxy.reply_source import ENDED_EARLY, Continued, End, EndKind, WholeSource, refusal
from tokencache.request_memory import Holding

Raw = msgspec.Raw

_HEAD = ("id", "created", "model", "system_fingerprint", "service_tier", "prompt_text")
_NO_MESSAGE: Mapping[str, Any] = {"role": "assistant", "content": None}


class _Entries(msgspec.Struct):
    content: list[Raw] | None = None


_ENTRIES = msgspec.json.Decoder(_Entries | None)


class Gathered(WholeSource):
    """A whole reply that is read as a stream."""

    def __init__(self, stream: Continued, call: BegunCall, dispatch: Dispatch, holding: Holding) -> None:
        super().__init__(stream.reply)
        self._stream, self._call, self._dispatch, self._holding = stream, call, dispatch, holding
        self.pieces = stream.pieces
        self._unreadable = 0
        self._logprobs: list[Raw] = []
        self._head: dict[str, Raw] = {}
        self._usage = NULL

    async def read(self) -> bytes:
        """See `WholeSource.read`."""
        try:
            async with contextlib.aclosing(aiter(self._stream)) as parts:
                async for events in parts:
                    self._add(events)
                    del events  # see `Stream.__aiter__`
        except MemoryFullError as why:  # what was read is recorded
            self._call.note(IncidentKind.REPLY_NOT_READ, str(why))
            self.end = End(EndKind.BROKEN, str(why), TurnMark.UPSTREAM_BROKE, error=why)
            return b""
        self.end = self._judged()
        if self.end.kind is not EndKind.FINISHED:
            return b""
        try:
            return await self._body()
        except EngineError as why:
            self.end = End(EndKind.UNPARSED, str(why), error=why)
            return b""

    def _judged(self) -> End:
        """Return how the reply ended.

        If not all of its ids are certain, it counts as broken off, because its message would be made of them.
        """
        reply = self.reply
        holes = [found.detail or found.hole for found in judge(reply, whole=True).values() if found.hole is not None]
        if reply.finished and not reply.aborted and not holes:
            return End(EndKind.FINISHED)
        if any(choice.ids for choice in reply.choices.values()):
            why = self.gave_up = self._stream.gave_up or f"not all of its ids are certain: {', '.join(holes)}"
            error = EngineError("the engine broke off its reply, and it cannot be continued", private=why)
            return End(EndKind.ABORTED, why, TurnMark.UPSTREAM_BROKE, error=error)
        if reply.error:
            return msgspec.structs.replace(refusal(reply.error_code, reply.error), body=b'{"error":%s}' % reply.error)
        return End(EndKind.ABORTED, ENDED_EARLY, incident=IncidentKind.UPSTREAM_BROKE)

    def _add(self, events: Iterable[bytes]) -> None:
        for event in events:
            self._add_event(event)

    def _add_event(self, event: bytes) -> None:
        self._holding.take("reply", len(event))
        chunk = self._stream.read(event)
        if not chunk or chunk == DONE:
            return
        if self.reply.unreadable > self._unreadable:
            self._unreadable = self.reply.unreadable
            return
        fields = FIELDS.decode(chunk)
        self._head |= {name: fields[name] for name in _HEAD if name in fields}
        self._usage = fields.get("usage", NULL)
        for choice in OBJECTS.decode(fields.get("choices", Raw(b"[]"))):
            entries = _ENTRIES.decode(choice.get("logprobs", NULL))
            self._logprobs += (entries.content or ()) if entries is not None else ()
        for known in self.reply.choices.values():
            del known.steps[:]  # the client has received nothing of it
            del known.call_steps[:]

    async def _body(self) -> bytes:
        """Write the whole reply as vLLM does (0.32), and set its message.

        Raises:
            EngineError: derender did not answer.
        """
        chat, choice = self._call.chat, self.reply.choices[0]
        message = await _message(choice, self._stream.derender, self._dispatch.derender_request(self.reply.prompt.raw))
        calls = message.get("tool_calls") or []
        if calls and bytes(chat.fields.get("parallel_tool_calls", NULL)) == b"false":
            calls = message["tool_calls"] = calls[:1]
        if calls and choice.finish_reason == "stop":
            choice.finish_reason = "tool_calls"
        choice.replace_message(msgspec.convert(message, ReplyMessage))
        prompt, sampled = self.reply.prompt.tokens, len(choice.ids)
        made = whole_choice(
            0,
            message,
            {
                "logprobs": {"content": self._logprobs} if chat.shows_logprobs else None,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                "token_ids": list(choice.ids),
            },
        )
        usage: Any = {"prompt_tokens": prompt, "total_tokens": prompt + sampled, "completion_tokens": sampled}
        if bytes(self._usage) != b"null" and not self.pieces:
            usage = FIELDS.decode(self._usage)  # the engine's own, which may have details
        echo = Raw(self.reply.prompt.raw or b"null") if chat.shows_ids else None
        return msgspec.json.encode(whole_completion([made], usage, {**self._head, "prompt_token_ids": echo}))


async def _message(choice: Choice, derender: Derender, request: DerenderRequest) -> dict[str, Any]:
    ended_by_id = choice.finish_reason == "stop" and not isinstance(choice.stop_reason, str)
    shown = list(choice.ids[:-1] if ended_by_id else choice.ids)
    if not shown:
        return dict(_NO_MESSAGE)
    made = await derender.messages(request, [{"index": 0, "token_ids": shown, "finish_reason": choice.finish_reason}])
    return made[0]
