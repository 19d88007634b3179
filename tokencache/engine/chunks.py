"""Splits a whole reply into chunks as vLLM would stream it, for engines that do not stream.

Each choice becomes several chunks: the role (with the prompt's ids), the reasoning, the text, the calls (for each its name, then its
arguments), and the end. The last chunk has all ids and log probabilities of the choice; in vLLM's own streams they do not line up with the
text either. If the usage was requested, it follows after all choices. The format is that of vLLM 0.32, including nulls.
"""

from typing import Any

import msgspec

from tokencache.dialects.json_io import FIELDS, NULL, OBJECTS, member

Raw = msgspec.Raw

_CALLS = msgspec.json.Decoder(list[dict[str, Any]])
_TEXT = b'"text_completion"'
_EMPTY = frozenset({b"null", b'""'})
_HEAD = ("id", "object", "created", "model")
_OF_CHOICE = ("token_ids", "weight_versions")


def as_chunks(body: bytes, asked: dict[str, Raw]) -> list[bytes]:
    """Split a whole completion (JSON) into the JSON of chunks; `asked` are the request's members.

    An error instead of a completion becomes one chunk, as in a stream. Each choice of a text completion becomes one chunk.

    Raises:
        ValueError: the body is not a completion.
    """
    try:
        fields = FIELDS.decode(body)
        if "choices" not in fields and "error" in fields:
            return [body]
        choices = OBJECTS.decode(fields["choices"])
        head: dict[str, Any] = {name: fields[name] for name in _HEAD if name in fields}
        head["object"] = "chat.completion.chunk"
        if bytes(fields.get("object", NULL)) == _TEXT:
            head["object"], first, rest = fields["object"], [], [{"choices": [choice]} for choice in choices]
        else:
            first = [_first(choice, fields) for choice in choices]
            rest = [chunk for choice in choices for chunk in _choice(choice)]
        usage = FIELDS.decode(fields["usage"]) if bytes(fields.get("usage", NULL)) != b"null" else {}
    except (ValueError, KeyError, RecursionError) as why:
        raise ValueError(f"not a chat completion: {why}") from why
    usage = {name: count for name, count in usage.items() if bytes(count) != b"null"}  # only whole replies contain nulls
    chunks = [{**head, **more} for more in [*first, *rest]]
    counted = member(asked, "stream_options", (dict,), {}).get("include_usage")
    fingerprint = {"system_fingerprint": fields["system_fingerprint"]} if "system_fingerprint" in fields else {}
    if counted:
        chunks.append({**head, "choices": [], "usage": usage})
    if chunks:
        chunks[-1] |= fingerprint
    return [msgspec.json.encode(chunk) for chunk in chunks]


def _first(choice: dict[str, Raw], fields: dict[str, Raw]) -> dict[str, Any]:
    role = FIELDS.decode(choice["message"]).get("role", Raw(b'"assistant"'))
    first = {"index": choice.get("index", 0), "delta": {"role": role, "content": ""}, "logprobs": None, "finish_reason": None}
    return {"choices": [first], "prompt_token_ids": fields.get("prompt_token_ids", NULL)}


def _choice(choice: dict[str, Raw]) -> list[dict[str, Any]]:
    index = choice.get("index", 0)
    deltas = _deltas(FIELDS.decode(choice["message"]))
    pieces: list[dict[str, Any]] = [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
    end: dict[str, Any] = {
        "index": index,
        "delta": {},
        "logprobs": choice.get("logprobs", NULL),
        "finish_reason": choice.get("finish_reason", NULL),
        "stop_reason": choice.get("stop_reason", NULL),
        **{name: choice[name] for name in _OF_CHOICE if name in choice},
    }
    return [{"choices": [piece]} for piece in [*pieces, end]]


def _deltas(message: dict[str, Raw]) -> list[dict[str, Any]]:
    present = [name for name in ("reasoning", "reasoning_content", "content") if bytes(message.get(name, NULL)) not in _EMPTY]
    deltas: list[dict[str, Any]] = [{name: message[name]} for name in present]
    calls = message.get("tool_calls", NULL)
    for index, call in enumerate(_CALLS.decode(calls) if bytes(calls) != b"null" else ()):
        function = call.get("function") or {}
        named = {"id": call.get("id"), "type": call.get("type", "function"), "index": index}
        deltas.append({"tool_calls": [{**named, "function": {"name": function.get("name"), "arguments": ""}}]})
        deltas.append({"tool_calls": [{"index": index, "function": {"arguments": function.get("arguments") or ""}}]})
    return deltas


def split_cut(chunk: bytes) -> tuple[bytes, bytes]:
    """Split the chunk with which an engine broke a reply of one choice off: its tokens without words, and its words and its end.

    Returns:
        Both as JSON; the first is `b""` if the chunk has no tokens.
    """
    fields = FIELDS.decode(chunk)
    choices = OBJECTS.decode(fields.get("choices", Raw(b"[]")))
    if len(choices) != 1 or bytes(choices[0].get("token_ids", NULL)) in {b"null", b"[]"}:
        return b"", chunk
    (choice,) = choices
    tokens: dict[str, Any] = {**choice, "delta": {}, "finish_reason": None, "stop_reason": None}
    end: dict[str, Any] = {**choice, "token_ids": [], "logprobs": None}
    return msgspec.json.encode({**fields, "choices": [tokens]}), msgspec.json.encode({**fields, "choices": [end]})
