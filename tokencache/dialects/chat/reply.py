"""Presenters: the speakers of what is not translated, where the harness sees the engine's own bytes.

Chat and text completions are answered with what the engine sent, less what only the proxy asked for. What is ours in such an
answer is said as vLLM (0.32) says it.

Routed experts are never shown (`engine.reply`): an engine that gives them gives them unasked, and they are the trainer's. Weight
versions are shown to who asked for them; who did not gets a reply without the member (vLLM 0.33).


A whole chat completion, written by us: where a reply is said again, or where one ends an episode that the engine had no part in.

Members as vLLM 0.32 writes them; what is said of it in another dialect, or as a stream, is made of this like of the engine's own.


Chat completions: what the harness is shown of the engine's reply.

The engine is always asked for ids, log probabilities and reasoning. A harness that did not ask must see the bytes of a
direct call: the members that vLLM writes as `null` are set back to `null`, never taken away, and the chunks that exist
only because ids were asked for (`delta: {}`) are dropped (observed on vLLM 0.32.0; a direct client that asks for log
probabilities does get them).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tokencache.core.messages import Message
from tokencache.dialects.chat.request import ChatCall
from tokencache.dialects.completion_reader import hide_tokens
from tokencache.dialects.sse import DONE, event_of

Raw = msgspec.Raw
_NULL = Raw(b"null")
_VERSIONS = "weight_versions"
_EXPERTS = b'"routed_experts":'
_UNAVAILABLE = 503


class HiddenMembers:
    """What a reply may hold besides ids and log probabilities, and what of it the harness sees that sent the members `fields`."""

    def __init__(self, fields: Mapping[str, Raw]) -> None:
        self._shows_versions = bytes(fields.get(f"return_{_VERSIONS}", _NULL)) == b"true"

    def found(self, data: bytes) -> bool:
        """Whether something in a reply's JSON is to be hidden."""
        return data.count(_EXPERTS) > data.count(_EXPERTS + b"null") or (not self._shows_versions and b'"%s":' % _VERSIONS.encode() in data)

    def hide(self, choice: dict[str, Raw]) -> None:
        """Hide it in one choice."""
        if "routed_experts" in choice:
            choice["routed_experts"] = _NULL
        if not self._shows_versions:
            choice.pop(_VERSIONS, None)


class PassthroughEncoder:
    """What both have in common of `dialect.Speaker`."""

    @property
    def chunk_unparsed(self) -> Callable[[bytes], bytes | None] | None:
        """See `ReplyEncoder.chunk_unparsed`: nothing does."""
        return None

    def end(self) -> bytes:
        """See `ReplyEncoder.end`."""
        return event_of(DONE)

    def keep_alive(self) -> bytes:
        """See `ReplyEncoder.keep_alive`: a comment, which every reader of events passes over."""
        return b": keep-alive\n\n"

    def error(self, status: int, message: str) -> bytes:
        """See `ReplyEncoder.error`."""
        kind = "store_error" if status == _UNAVAILABLE else "upstream_error"
        error = {"message": message, "type": kind, "param": None, "code": status}
        return event_of(msgspec.json.encode({"error": error})) + event_of(DONE)

    def documents(self) -> dict[str, bytes]:
        """See `ReplyEncoder.documents`: none, these are not asked for again."""
        return {}


_NEVER = ("refusal", "annotations", "audio", "function_call")
"""Members of OpenAI's that vLLM writes and never fills."""
_MOST_CHOICES = 128
"""Whoever asks for more gets no more from an engine either."""


class WrittenChoice(NamedTuple):
    """One choice: its place, its message, how it ended."""

    place: int
    message: Message
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None


def repeated_choice(choices: int, message: Message, finish_reason: str) -> list[WrittenChoice]:
    """As many choices as were asked for, which all say the same."""
    return [WrittenChoice(place, message, finish_reason) for place in range(min(max(choices, 1), _MOST_CHOICES))]


def write_completion(
    *, call: str, created: float, model: str, choices: Sequence[WrittenChoice], prompt_tokens: int, completion_tokens: int
) -> bytes:
    """Write a chat completion (JSON); `created` in seconds since the epoch, `call` makes its id."""
    counts = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + completion_tokens, "completion_tokens": completion_tokens}
    return msgspec.json.encode(
        {
            "id": f"chatcmpl-{call}",
            "object": "chat.completion",
            "created": int(created),
            "model": model,
            "choices": [_choice(one) for one in choices],
            "service_tier": None,
            "usage": {**counts, "prompt_tokens_details": None, "completion_tokens_details": None},
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
    )


def _choice(one: WrittenChoice) -> dict[str, Any]:
    said = one.message
    calls = [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in said.calls]
    message: dict[str, Any] = {"role": "assistant", "content": said.content, **dict.fromkeys(_NEVER)}
    if calls:
        message["tool_calls"] = calls
    return {
        "index": one.place,
        "message": {**message, "reasoning": said.reasoning},
        "logprobs": None,
        "finish_reason": one.finish_reason,
        "stop_reason": one.stop_reason,
        "token_ids": None,
        "routed_experts": None,
    }


_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_CHOICES = msgspec.json.Decoder(list[dict[str, Raw]])
_ENCODER = msgspec.json.Encoder()


class ChatReplyEncoder(PassthroughEncoder):
    """The encoder of chat completions: shows the engine's own bytes, less what this harness did not ask for."""

    def __init__(self, call: ChatCall) -> None:
        self._prompt = call.shows_ids
        # vLLM itself keeps ids and log probabilities back where reasoning is not to be seen (0.26 and later).
        self._ids = call.shows_ids and call.shows_reasoning
        self._logprobs = call.shows_logprobs and call.shows_reasoning
        self._reasoning = call.shows_reasoning
        self._as_is = self._ids and self._logprobs
        self._extras = HiddenMembers(call.fields)

    def whole(self, data: bytes) -> bytes:
        """See `ReplyEncoder.whole`; what cannot be read is passed on as it is."""
        return data if self._shows_all(data) else self._present(data, "message") or data

    def chunk(self, event: bytes, data: bytes, prompt_tokens: int) -> bytes:
        """See `ReplyEncoder.chunk`; nothing where a direct client would have got nothing."""
        del prompt_tokens
        shown = data if self._shows_all(data) else self._present(data, "delta")
        if shown is None:
            return b""
        return event if shown is data else event_of(shown)

    @property
    def chunk_unparsed(self) -> Callable[[bytes], bytes | None] | None:
        """What says most events without reading them (`plain`); `None` for who sees other than everybody."""
        hides = not (self._prompt or self._ids or self._logprobs) and self._reasoning
        return hide_tokens if hides else None

    def _shows_all(self, data: bytes) -> bool:
        return self._as_is and not self._extras.found(data)

    def _present(self, data: bytes, said: str) -> bytes | None:
        try:
            fields = _FIELDS.decode(data)
            choices = _CHOICES.decode(fields["choices"])
        except (ValueError, KeyError, RecursionError):
            return data
        if not self._prompt and "prompt_token_ids" in fields:
            fields["prompt_token_ids"] = _NULL
        shown = [choice for choice in choices if self._choice(choice, said)]
        if choices and not shown:
            return None
        fields["choices"] = Raw(_ENCODER.encode(shown))
        return _ENCODER.encode(fields)

    def _choice(self, choice: dict[str, Raw], said: str) -> bool:
        """Hide in one choice what was not asked for; false if nothing would be left of it."""
        if not self._ids:
            for name in ("token_ids", "prompt_token_ids"):
                if name in choice and (name == "token_ids" or not self._prompt):
                    choice[name] = _NULL
        self._extras.hide(choice)
        if not self._logprobs and "logprobs" in choice:
            choice["logprobs"] = _NULL
        spoke = True
        if said in choice and not self._reasoning:
            spoke = self._hide_reasoning(choice, said)
        elif said == "delta" and bytes(choice.get("delta", _NULL)) == b"{}":
            spoke = self._ids or self._logprobs
        return spoke or bytes(choice.get("finish_reason", _NULL)) != b"null"

    @staticmethod
    def _hide_reasoning(choice: dict[str, Raw], said: str) -> bool:
        entry = _FIELDS.decode(choice[said])
        if said == "message":
            for name in ("reasoning", "reasoning_content"):
                if name in entry:
                    entry[name] = _NULL
        else:
            thought = entry.pop("reasoning", None) or entry.pop("reasoning_content", None)
            if not entry:
                choice[said] = Raw(b"{}")
                return False
            if "role" not in entry:  # vLLM 0.32 writes it after `content` in every later delta
                entry = {"content": entry.pop("content", _NULL), "reasoning": _NULL, **entry}
            elif thought is not None:
                entry["reasoning"] = _NULL
        choice[said] = Raw(_ENCODER.encode(entry))
        return True
