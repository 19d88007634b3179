"""Writes replies in chat completions: the engine's own bytes without the members that the client did not request.

`write_completion` writes whole replies that the proxy makes itself.

The proxy always requests ids, log probabilities and reasoning from the engine. A client that did not request them gets the bytes of a
direct call: members that vLLM writes as `null` become `null` and are never removed, and chunks that exist only because ids were requested
(`delta: {}`) are dropped (observed on vLLM 0.32.0; a direct client that requests log probabilities does get these chunks).

Routed experts are never passed on (`engine.reply`): engines send them without a request, and they are for the trainer. A client gets
weight versions if it requests them; otherwise the member is missing (vLLM 0.33). Text completions share these rules (`text_completions`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from tokencache.core.messages import Message
from tokencache.dialects.chat.request import ChatCall
from tokencache.dialects.chat.whole import whole_choice, whole_completion
from tokencache.dialects.completion_reader import PACKED, hide_tokens
from tokencache.dialects.json_io import FIELDS, NULL, OBJECTS
from tokencache.dialects.reply_encoder import ReplyEncoder
from tokencache.dialects.sse import DONE, event_of
from tokencache.dialects.stream_usage import HiddenUsage

Raw = msgspec.Raw

_VERSIONS = "weight_versions"
_EXPERTS = b'"routed_experts":'
_MOST_CHOICES = 128
"""Largest number of choices that the proxy writes; an engine does not return more either."""


class PassthroughEncoder(ReplyEncoder):
    """Base of the reply encoders of chat and text completions; `fields` are the members of the client's request."""

    verbatim = True

    def __init__(self, fields: Mapping[str, Raw]) -> None:
        self._usage = HiddenUsage(fields)
        self._shows_versions = bytes(fields.get(f"return_{_VERSIONS}", NULL)) == b"true"

    def has_extras(self, data: bytes) -> bool:
        """Whether a reply's JSON has members, besides ids and log probabilities, that this client does not get."""
        experts = data.count(_EXPERTS) > data.count(_EXPERTS + b"null")
        return experts or (not self._shows_versions and b'"%s":' % _VERSIONS.encode() in data)

    def hide_extras(self, choice: dict[str, Raw]) -> None:
        """Hide them in one choice."""
        if "routed_experts" in choice:
            choice["routed_experts"] = NULL
        if not self._shows_versions:
            choice.pop(_VERSIONS, None)

    def rest(self) -> bytes:
        """See `ReplyEncoder.rest`."""
        return self._usage.rest()

    def end(self) -> bytes:
        """See `ReplyEncoder.end`."""
        return self.rest() + event_of(DONE)

    def error(self, status: int, message: str) -> bytes:
        """See `ReplyEncoder.error`; written as vLLM 0.32 does."""
        kind = "store_error" if status == HTTPStatus.SERVICE_UNAVAILABLE else "upstream_error"
        error = {"message": message, "type": kind, "param": None, "code": status}
        return self.rest() + event_of(msgspec.json.encode({"error": error})) + event_of(DONE)


class ChatReplyEncoder(PassthroughEncoder):
    """Passes on the engine's own bytes, without the members that this client did not request."""

    def __init__(self, call: ChatCall) -> None:
        super().__init__(call.fields)
        self._choices = call.n
        self._prompt = call.shows_ids
        # vLLM itself omits ids and log probabilities if reasoning is hidden (0.26 and later).
        self._ids = call.shows_ids and call.shows_reasoning
        self._logprobs = call.shows_logprobs and call.shows_reasoning
        self._reasoning = call.shows_reasoning

    def whole(self, data: bytes) -> bytes:
        """See `ReplyEncoder.whole`. A body that cannot be parsed is passed on."""
        return self._hide(data, "message") or data

    def chunk(self, event: bytes, data: bytes, prompt_tokens: int) -> bytes:
        """See `ReplyEncoder.chunk`; `b""` if a direct client would get no such chunk."""
        del prompt_tokens
        shown = self._hide(data, "delta")
        if shown is None:
            return b""
        return self._usage.present(event if shown is data else event_of(shown), shown)

    @property
    def chunk_unparsed(self) -> Callable[[bytes], bytes | None] | None:
        """See `ReplyEncoder.chunk_unparsed`; `None` for a client that requested ids, log probabilities or hidden reasoning."""
        if not self._reasoning or self._prompt or self._ids or self._logprobs:
            return None
        return hide_tokens if self._choices == 1 else self._hide_unless_waiting

    def _hide_unless_waiting(self, event: bytes) -> bytes | None:
        return None if self._usage.keeps_back else hide_tokens(event)

    def _hide(self, data: bytes, part: str) -> bytes | None:
        """Hide the members that were not requested; `None` if nothing is left of a chunk."""
        if self._ids and self._logprobs and not self.has_extras(data):
            return data
        try:
            fields = FIELDS.decode(data)
            choices = OBJECTS.decode(fields["choices"])
        except (ValueError, KeyError, RecursionError):
            return data
        if not self._prompt and "prompt_token_ids" in fields:
            fields["prompt_token_ids"] = NULL
        fields.pop(PACKED, None)
        shown = [*filter(partial(self._hide_in_choice, part=part), choices)]
        if choices and not shown:
            return None
        fields["choices"] = Raw(msgspec.json.encode(shown))
        return msgspec.json.encode(fields)

    def _hide_in_choice(self, choice: dict[str, Raw], part: str) -> bool:
        """Hide the members of one choice that were not requested; false if nothing is left of it."""
        if not self._ids:
            for name in ("token_ids", "prompt_token_ids"):
                if name in choice and (name == "token_ids" or not self._prompt):
                    choice[name] = NULL
        choice.pop(PACKED, None)
        self.hide_extras(choice)
        if not self._logprobs and "logprobs" in choice:
            choice["logprobs"] = NULL
        has_content = True
        if part in choice and not self._reasoning:
            has_content = self._hide_reasoning(choice, part)
        elif part == "delta" and bytes(choice.get("delta", NULL)) == b"{}":
            has_content = self._ids or self._logprobs
        return has_content or bytes(choice.get("finish_reason", NULL)) != b"null"

    @staticmethod
    def _hide_reasoning(choice: dict[str, Raw], part: str) -> bool:
        entry = FIELDS.decode(choice[part])
        if part == "message":
            for name in ("reasoning", "reasoning_content"):
                if name in entry:
                    entry[name] = NULL
        else:
            reasoning = entry.pop("reasoning", None) or entry.pop("reasoning_content", None)
            if not entry:
                choice[part] = Raw(b"{}")
                return False
            if "role" not in entry:  # vLLM 0.32 writes it after `content` in every later delta
                entry = {"content": entry.pop("content", NULL), "reasoning": NULL, **entry}
            elif reasoning is not None:
                entry["reasoning"] = NULL
        choice[part] = Raw(msgspec.json.encode(entry))
        return True


class WrittenChoice(NamedTuple):
    """One choice of a reply that the proxy writes."""

    position: int
    message: Message
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None


def repeated_choice(choices: int, message: Message, finish_reason: str) -> list[WrittenChoice]:
    """Return the requested number of equal choices."""
    return [WrittenChoice(position, message, finish_reason) for position in range(min(max(choices, 1), _MOST_CHOICES))]


class WrittenReply(NamedTuple):
    """A reply that the proxy writes at a Unix time in seconds. The completion's id is made of that of the call."""

    call: str
    created: float
    model: str
    choices: Sequence[WrittenChoice]
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def usage(self) -> dict[str, int]:
        """The usage of a completion."""
        prompt, completion = self.prompt_tokens, self.completion_tokens
        return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def write_completion(reply: WrittenReply) -> bytes:
    """Write a whole chat completion (JSON) with the members that vLLM 0.32 writes; other dialects and streams are made from it."""
    members = {"id": f"chatcmpl-{reply.call}", "created": int(reply.created), "model": reply.model}
    return msgspec.json.encode(whole_completion([_choice(one) for one in reply.choices], reply.usage, members))


def _choice(one: WrittenChoice) -> dict[str, Any]:
    reply = one.message
    calls = [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in reply.calls]
    message = {"content": reply.content, "tool_calls": calls, "reasoning": reply.reasoning}
    return whole_choice(one.position, message, {"finish_reason": one.finish_reason, "stop_reason": one.stop_reason})
