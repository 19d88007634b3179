"""Makes a chat completion from the answer of a route that samples but does not parse: `/v1/completions`, `/inference/v1/generate`.

`derender` makes the messages. It leaves some steps to its caller. They are done here like in vLLM's chat (0.32,
`entrypoints/openai/chat_completion/serving.py`): leave out a last id that only ended the reply; if a stop string cut the text, parse that
text, tokenized again by `/tokenize`; set the finish reason of tool calls; keep only one call if `parallel_tool_calls` is off.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from multidict import CIMultiDict

from tokencache.dialects.chat.whole import whole_choice, whole_completion
from tokencache.dialects.json_io import FIELDS, IDS, NULL, OBJECTS
from tokencache.engine.derender import Derender, DerenderRequest
from tokencache.engine.drivers.base import ParsedCompletion
from tokencache.engine.generate import read_generated
from tokencache.engine.template.renderer import EngineRenderer
from tokencache.engine.upstream import EngineClient
from tokencache.errors import EngineError

Raw = msgspec.Raw

_PROMPT = "prompt_token_ids"
_NO_MESSAGE: dict[str, Any] = {"role": "assistant", "content": None}


class _TextLogprobs(msgspec.Struct):
    """The log probabilities of a text completion."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


_TEXT_LOGPROBS = msgspec.json.Decoder(_TextLogprobs)


class ReplacedChat(NamedTuple):
    """The chat request that another request replaces: engine, members, headers (`None` for a request that the proxy itself makes)."""

    upstream: EngineClient
    fields: Mapping[str, Raw]
    headers: CIMultiDict[str] | None = None


async def parse_completion(derender: Derender, request: ReplacedChat, body: bytes) -> ParsedCompletion:
    """Make a chat completion from a text completion with token ids.

    If it cannot be parsed, the result has ids and log probabilities but no messages. A body that is not a completion is returned unchanged.
    """
    try:
        completion = FIELDS.decode(body)
        choices = OBJECTS.decode(completion["choices"])
        sampled = [IDS.decode(choice["token_ids"]) for choice in choices]
    except (ValueError, KeyError, RecursionError):
        return ParsedCompletion(body)
    if not choices:
        return ParsedCompletion(body)
    messages: list[dict[str, Any]] = [dict(_NO_MESSAGE) for _ in choices]
    error, temporary = "", False
    try:
        visible = [await _visible(request, choice, own) for choice, own in zip(choices, sampled, strict=True)]
        await _fill(derender, messages, request, choices, visible)
    except EngineError as why:
        messages = [dict(_NO_MESSAGE) for _ in choices]
        error, temporary = why.client_message, why.passing
    return ParsedCompletion(_chat_completion(completion, choices, messages, request.fields, error), error, temporary)


async def parse_generated(derender: Derender, request: ReplacedChat, body: bytes) -> ParsedCompletion:
    """Make a chat completion from an answer of `generate`. A body that is not such an answer is returned unchanged."""
    try:
        _, places = read_generated(body)
        answer = FIELDS.decode(body)
        prompt = answer["prompt_token_ids"]
        choices = [{**choice, _PROMPT: prompt} for choice in OBJECTS.decode(answer["choices"])]
    except (ValueError, KeyError, RecursionError):
        return ParsedCompletion(body)
    for choice in choices:
        choice.pop("sampling_mask", None)  # chat has no such member (0.32)
    completion = {name: answer.get(name, NULL) for name in ("created", "model", "usage", "kv_transfer_params", "metrics")}
    text = msgspec.json.encode({"id": answer.get("request_id", NULL), **completion, "choices": choices})
    return (await parse_completion(derender, request, text))._replace(places=places)


async def _fill(
    derender: Derender,
    messages: list[dict[str, Any]],
    request: ReplacedChat,
    choices: list[dict[str, Raw]],
    visible: list[list[int]],
) -> None:
    """Fill in derender's messages; a choice without visible ids keeps its empty message.

    Raises:
        EngineError: derender cannot be reached, or refuses.
    """
    wanted: list[dict[str, Any]] = [
        {"index": index, "token_ids": tokens, "finish_reason": choice.get("finish_reason", NULL)}
        for index, (choice, tokens) in enumerate(zip(choices, visible, strict=True))
        if tokens
    ]
    if not wanted:
        return
    asked = DerenderRequest(request.upstream, request.fields, bytes(choices[0].get(_PROMPT, NULL)), request.headers)
    for index, message in (await derender.messages(asked, wanted)).items():
        messages[index] = message


async def _visible(request: ReplacedChat, choice: dict[str, Raw], tokens: list[int]) -> list[int]:
    """Return the ids with text for the harness: the sampled ids without a last id that only ended the reply.

    Raises:
        EngineError: the engine cannot tokenize the text that a stop string left.
    """
    fields, reason = request.fields, bytes(choice.get("stop_reason", NULL))
    shown = bytes(fields.get("include_stop_str_in_output", NULL)) == b"true"
    stopped = bytes(choice.get("finish_reason", NULL)) == b'"stop"'
    if stopped and reason.startswith(b'"'):
        text = choice.get("text", NULL)
        if bytes(text) == b"null":
            raise EngineError("the engine did not return the text before the stop string; the tokens are recorded")
        if bytes(text) == b'""':
            return []
        if not (left := await EngineRenderer(request.upstream).encode(fields.get("model", NULL), text, request.headers)):
            raise EngineError("/tokenize cannot tokenize the text before the stop string; the tokens are recorded")
        return left
    return tokens[:-1] if stopped and not shown else tokens


def _chat_completion(
    completion: dict[str, Raw], choices: list[dict[str, Raw]], messages: list[dict[str, Any]], fields: Mapping[str, Raw], error: str
) -> bytes:
    """Write a text completion as a chat completion with these messages, and with an error if there is one."""
    several = bytes(fields.get("parallel_tool_calls", NULL)) != b"false"  # as vLLM 0.32 reads it (`tool_calls_utils.py`)
    named = bytes(fields.get("tool_choice", NULL)).startswith(b"{")
    most = msgspec.json.decode(fields.get("top_logprobs", NULL)) or 0
    made: list[dict[str, Any]] = []
    for choice, message in zip(choices, messages, strict=True):
        others = {name: raw for name, raw in choice.items() if name not in {"text", _PROMPT, "prompt_logprobs", "logprobs"}}
        if message.get("tool_calls"):
            if not several:
                message["tool_calls"] = message["tool_calls"][:1]
            if not named and bytes(others.get("finish_reason", NULL)) != b'"abort"':
                others["finish_reason"] = Raw(b'"tool_calls"')
        made.append(whole_choice(len(made), message, {**others, "logprobs": _chat_logprobs(choice.get("logprobs", NULL), most)}))
    members = {name: raw for name, raw in completion.items() if name != "usage"}
    if bytes(completion.get("id", NULL)).startswith(b'"cmpl-'):
        members["id"] = Raw(b'"chat' + bytes(completion["id"])[1:])
    members |= {name: choices[0].get(name, NULL) for name in (_PROMPT, "prompt_logprobs")}
    usage = msgspec.json.decode(completion.get("usage", NULL)) or {}
    body = whole_completion(made, usage, members)
    if error:
        body["error"] = {"message": error, "type": "upstream_error", "code": HTTPStatus.BAD_GATEWAY}
    return msgspec.json.encode(body)


def _chat_logprobs(raw: Raw, most: int) -> dict[str, Any] | None:
    """Write log probabilities as a chat completion has them, with up to `most` alternatives per token (-1: all).

    Those of `/inference/v1/generate` are written so already. `None` if there are none, or if they cannot be read.
    """
    try:
        if "content" in (members := FIELDS.decode(raw)):
            return dict(members)
        found = _TEXT_LOGPROBS.decode(raw)
        others = found.top_logprobs or [None] * len(found.tokens)
        return {
            "content": [
                {**_entry(token, value), "top_logprobs": [_entry(*one) for one in list((top or {}).items())[: most if most >= 0 else None]]}
                for token, value, top in zip(found.tokens, found.token_logprobs, others, strict=True)
            ]
        }
    except (ValueError, RecursionError):
        return None


def _entry(token: str, value: float | None) -> dict[str, Any]:
    return {"token": token, "logprob": value, "bytes": list(token.encode("utf-8", "surrogatepass"))}
