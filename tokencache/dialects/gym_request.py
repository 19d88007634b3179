"""Rewrites requests as NeMo Gym's model server does before it sends them to vLLM.

With `--return-token-id-information` the proxy replaces Gym's `vllm_model` server. A model then has to get the same prompt as from Gym's
server, so the proxy changes the same members of a request. Without that option requests stay unchanged.

=====================================  ====================================================================================
`strict` of a function                 left out; vLLM would constrain sampling by a grammar, and some templates render it
`chat_template_kwargs`                 left out
`metadata.chat_template_kwargs`        JSON text: the request's `chat_template_kwargs`
`metadata.extra_body`                  JSON text: further members for vLLM; a member of the request itself wins
`metadata.audio_data`                  a data URI: an `audio_url` part before the content of the last user message
`<think>…</think>`                     at the beginning of an assistant's text: the message's `reasoning`
members that Gym does not know         left out of a streamed request. Gym refuses (422) any other request with them; here they pass
`instructions` (Responses)             one system message with all system and developer messages that follow directly; a streamed
                                       request needs no `instructions` for that
=====================================  ====================================================================================

Source: nemo-gym 0.7.0, `responses_api_models/vllm_model/app.py` (`_preprocess_chat_completion_create_params`), `nemo_gym/chat_streaming.py`
(`sanitize_streaming_chat_body`), `nemo_gym/responses_streaming.py` (`sanitize_streaming_responses_body`),
`nemo_gym/responses_converter.py` (`responses_to_chat_completion_create_params`).
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tokencache.dialects.gym import PREFIX
from tokencache.dialects.json_io import NULL, entries_of, fields_of, member
from tokencache.dialects.members import OF_STREAMS
from tokencache.errors import HarnessError

Raw = msgspec.Raw
Fields = dict[str, Raw]
Rewrite = Callable[[Fields], Fields]
"""Changes the members of a chat request."""

CHAT_MEMBERS = frozenset({
    "messages", "model", "audio", "frequency_penalty", "logit_bias", "logprobs", "max_completion_tokens", "max_tokens",
    "metadata", "moderation", "modalities", "n", "parallel_tool_calls", "prediction", "presence_penalty",
    "prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "response_format", "seed", "safety_identifier",
    "service_tier", "stop", "store", "temperature", "tool_choice", "tools", "top_logprobs", "top_p", "user",
    "verbosity", "web_search_options",
})  # fmt: skip
"""`NeMoGymChatCompletionCreateParamsNonStreaming`, less what only streams have and what it passes to other providers."""

_RESPONSES_MEMBERS = frozenset({
    "background", "context_management", "conversation", "include", "input", "instructions", "max_output_tokens", "max_tool_calls",
    "metadata", "model", "moderation", "parallel_tool_calls", "previous_response_id", "prompt", "prompt_cache_key",
    "prompt_cache_retention", "reasoning", "safety_identifier", "service_tier", "store", "stream", "stream_options", "temperature",
    "text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation", "user",
})  # fmt: skip
"""`NeMoGymResponseCreateParamsNonStreaming`."""

_OWN = frozenset({*OF_STREAMS, PREFIX})
"""Members that the proxy reads itself."""
_AUDIO = ("audio_data", "audio_path", "audio_paths")
_THINK = re.compile(r"(\s*+)<think>(.*?)</think>", re.DOTALL)
_SYSTEM = frozenset({"system", "developer"})
_FIELDS = msgspec.json.Decoder(Fields)


def chat_members(fields: Fields) -> Fields:
    """Return the members of a chat request for the engine.

    Raises:
        HarnessError: `metadata` cannot be read.
    """
    if member(fields, "stream", (bool,), False):
        fields = {name: raw for name, raw in fields.items() if name in CHAT_MEMBERS or name in _OWN}
    return translated_members({name: raw for name, raw in fields.items() if name != "chat_template_kwargs"})


def translated_members(fields: Fields) -> Fields:
    """Return the members of a translated chat request for the engine.

    Raises:
        HarnessError: `metadata` cannot be read.
    """
    fields = _from_metadata(fields)
    if bytes(fields.get("tools", NULL))[:1] == b"[":
        fields["tools"] = _without_strict(fields["tools"])
    return fields


def responses_members(fields: Fields) -> Fields:
    """Return the members of a Responses request that Gym's server reads.

    Raises:
        HarnessError: `stream` has the wrong type.
    """
    if not member(fields, "stream", (bool,), False):
        return fields
    return {name: raw for name, raw in fields.items() if name in _RESPONSES_MEMBERS}


def leading_system(instructions: str | None, items: Sequence[Any], *, stream: bool) -> tuple[str, int]:
    """Join the instructions of a Responses request with the system and developer messages at the beginning of its input.

    Returns:
        The text of the system message, `""` if there is none; and how many of the decoded `items` are in it.
    """
    if not (instructions or stream):
        return "", 0
    texts = [instructions] if instructions else []
    count = 0
    for item in items:
        text = _system_text(item)
        if text is None:
            break
        texts.append(text)
        count += 1
    return "\n\n".join(text for text in texts if text or not stream), count


def _system_text(item: Any) -> str | None:
    """Return the text of a system or developer message; `None` for every other item."""
    if not isinstance(item, dict) or item.get("type") not in {None, "message"} or item.get("role") not in _SYSTEM:
        return None
    content = item.get("content")
    if isinstance(content, str):
        return content
    texts = [part.get("text") if isinstance(part, dict) else None for part in content] if isinstance(content, list) else [None]
    return "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None


def with_reasoning(raw: bytes) -> bytes:
    """Make the inline thinking at the beginning of an assistant's text (a raw chat message) its `reasoning`.

    Gym does this with blocks anywhere in a text. Here, a text with another block after the first one stays unchanged, and so does a text of
    several parts: the model may have sampled that text, and the reply must then be recognized.
    """
    if (b"<think>" not in raw and b"\\u003c" not in raw) or b"assistant" not in raw:
        return raw
    try:
        message = msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        return raw
    if not isinstance(message, dict) or message.get("role") != "assistant" or message.get("reasoning") or message.get("reasoning_content"):
        return raw
    owner, name = message, "content"
    if isinstance(message.get("content"), list) and len(message["content"]) == 1 and isinstance(message["content"][0], dict):
        owner, name = message["content"][0], "text"
    text: str = owner[name] if isinstance(owner.get(name), str) else ""
    found = _THINK.match(text)
    if found is None or _THINK.match(text, found.end()):
        return raw
    owner[name] = found[1] + text[found.end() :]
    return msgspec.json.encode({**message, "reasoning": found[2]})


def with_audio(body: bytes) -> bytes:
    """Put `metadata.audio_data` of a chat request before the content of its last user message.

    Raises:
        HarnessError: the metadata names a file: Gym's server reads it from its own disk, the proxy does not.
    """
    if b'"audio_' not in body:
        return body
    fields = fields_of(body)
    metadata = member(fields, "metadata", (dict,), {})
    named = [name for name in _AUDIO if metadata.get(name)]
    if not named:
        return body
    audio = metadata["audio_data"] if named == ["audio_data"] else None
    if not isinstance(audio, str):
        raise HarnessError(
            f"'metadata.{named[-1]}' is not supported: the proxy does not read files; send one 'metadata.audio_data', a data URI",
            param=f"metadata.{named[-1]}",
        )
    del metadata["audio_data"]
    try:
        messages = [msgspec.json.decode(raw) for raw in entries_of(fields.get("messages", NULL))]
    except (ValueError, RecursionError):
        return body  # the parser of the messages reports the error
    part = {"type": "audio_url", "audio_url": {"url": audio}}
    last = next((message for message in reversed(messages) if isinstance(message, dict) and message.get("role") == "user"), None)
    if last is None:
        messages.append({"role": "user", "content": [part]})
    else:
        content = last.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content if isinstance(content, list) else []
        last["content"] = [part, *parts]
    return msgspec.json.encode({**fields, "messages": messages, "metadata": metadata})


def _from_metadata(fields: Fields) -> Fields:
    """Move the members for the engine out of `metadata`."""
    if "metadata" not in fields:
        return dict(fields)
    metadata = member(fields, "metadata", (dict,), {})
    arguments, extra = (_members_in(metadata, name) for name in ("chat_template_kwargs", "extra_body"))
    for name in ("model", *OF_STREAMS):  # Gym's server sets these itself
        extra.pop(name, None)
    if arguments:
        own = {**_FIELDS.decode(fields.get("chat_template_kwargs", b"{}")), **arguments}
        fields = {**fields, "chat_template_kwargs": Raw(msgspec.json.encode(own))}
    return {**extra, **fields}


def _members_in(metadata: dict[str, Any], name: str) -> Fields:
    text = metadata.get(name) or "{}"
    try:
        return _FIELDS.decode(text)
    except (ValueError, TypeError, RecursionError):
        raise HarnessError(f"'metadata.{name}' must be the text of a JSON object", param=f"metadata.{name}") from None


def _without_strict(tools: Raw) -> Raw:
    """Remove `strict` from the functions of a raw list of tools. A list that cannot be parsed stays unchanged; the engine refuses it."""
    try:
        listed = msgspec.json.decode(tools, type=list[Fields])
        for tool in listed:
            if bytes(tool.get("type", NULL)) == b'"function"' and "function" in tool:
                function = _FIELDS.decode(tool["function"])
                if function.pop("strict", None) is not None:
                    tool["function"] = Raw(msgspec.json.encode(function))
    except (ValueError, RecursionError):
        return tools
    return Raw(msgspec.json.encode(listed))
