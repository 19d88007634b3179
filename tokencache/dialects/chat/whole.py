"""Requests whole replies, and writes them with all members that vLLM writes, in its order, null where there is nothing (vLLM 0.32).

A stream, a text completion and derender do not have all of them. A client that gets a reply made of these must not see that.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokencache.dialects.chat.request import ChatCall
from tokencache.dialects.members import OF_STREAMS

Raw = msgspec.Raw

_MESSAGE = ("content", "refusal", "annotations", "audio", "function_call")
_CHOICE = ("logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts")
_NULLABLE = (
    "service_tier", "system_fingerprint", "prompt_logprobs", "prompt_token_ids", "prompt_text", "kv_transfer_params", "ec_transfer_params",
    "metrics",
)  # fmt: skip
_ORDER = ("id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage", *_NULLABLE[2:])
_USAGE = ("prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details", "completion_tokens_details")


def whole_members(fields: Mapping[str, Raw]) -> dict[str, Raw]:
    """Return the members of a request for a whole reply.

    `stream_options` without `stream` stays: vLLM refuses that, and does so for a direct client.
    """
    dropped = OF_STREAMS if bytes(fields.get("stream", Raw())) == b"true" else ("stream",)
    return {name: raw for name, raw in fields.items() if name not in dropped}


def as_stream(call: ChatCall) -> ChatCall:
    """Return a call that requests a stream, with the usage."""
    fields = {**call.fields, "stream": Raw(b"true"), "stream_options": Raw(b'{"include_usage":true}')}
    return msgspec.structs.replace(call, fields=fields, stream=True)


def as_whole(call: ChatCall) -> ChatCall:
    """Return a call that requests a whole reply."""
    return msgspec.structs.replace(call, fields=whole_members(call.fields), stream=False)


def whole_message(made: Mapping[str, Any]) -> dict[str, Any]:
    """Write a message. `tool_calls` is missing if there are none."""
    calls, reasoning = made.get("tool_calls"), made.get("reasoning")
    others = {name: value for name, value in made.items() if name not in {"tool_calls", "reasoning"}}
    return {"role": "assistant", **dict.fromkeys(_MESSAGE), **others, **({"tool_calls": calls} if calls else {}), "reasoning": reasoning}


def whole_choice(index: int, message: Mapping[str, Any], members: Mapping[str, Any]) -> dict[str, Any]:
    """Write a choice with its message; `members` are the others."""
    return {"index": index, "message": whole_message(message), **dict.fromkeys(_CHOICE), **members}


def whole_completion(choices: Sequence[Mapping[str, Any]], usage: Mapping[str, Any], members: Mapping[str, Any]) -> dict[str, Any]:
    """Write a completion of these choices; `usage` has the numbers of tokens that are known, `members` the others."""
    given = {**dict.fromkeys(_NULLABLE), **members, "object": "chat.completion", "choices": choices}
    given["usage"] = {**dict.fromkeys(_USAGE), **usage}
    return {name: given.pop(name) for name in _ORDER if name in given} | given
