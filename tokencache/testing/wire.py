"""Builds the bodies of responses: JSON objects with vLLM 0.32's keys, in vLLM's order, with null where vLLM writes null.

A whole reply contains every field, null or not. A stream omits fields that were not set: `token_ids` is missing in the role chunk, and null
in the others unless requested; `stop_reason` is only in the last chunk of a choice; so is `system_fingerprint`, unless a usage chunk
follows and has it. These forms were recorded from a running server.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokencache.testing.chat_request import ChatRequest
from tokencache.testing.generation import GenerationStep, Token
from tokencache.testing.parser import ParsedText, new_call_id

FINGERPRINT = "vllm-0.32.0-51b0ca5e"
"""`system_fingerprint` of every reply."""


def event(value: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"
"""The event that ends every stream, also a failed one."""


def usage(prompt: int, completion: int, reasoning: int, *, whole: bool = False) -> dict[str, Any]:
    """Return token counts. In a `whole` reply `prompt_tokens_details` is null."""
    counts: dict[str, Any] = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    if whole:
        counts["prompt_tokens_details"] = None
    counts["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return counts


def logprobs(tokens: Sequence[Token], request: ChatRequest) -> dict[str, Any]:
    """Return the `logprobs` object of a choice or chunk, one entry per token.

    The sampled token is the most likely one; `top_logprobs` adds made-up neighbours with falling probability. A token that is a part of a
    character has empty text, and the token that completes it has the whole character.
    """
    content = []
    for token in tokens:
        top = [_logprob_entry(token.id + i, token.text if i == 0 else "", token.neighbour(i), request) for i in range(request.top_logprobs)]
        entry = _logprob_entry(token.id, token.text, token.logprob, request)
        entry["bytes"] = list(token.text.encode())
        content.append({**entry, "top_logprobs": top})
    return {"content": content}


def _logprob_entry(token_id: int, text: str, logprob: float, request: ChatRequest) -> dict[str, Any]:
    shown = f"token_id:{token_id}" if request.return_tokens_as_token_ids else text
    return {"token": shown, "logprob": logprob, "bytes": list(shown.encode())}


def whole_choice(request: ChatRequest, index: int, parsed: ParsedText, tokens: Sequence[Token], last: GenerationStep) -> dict[str, Any]:
    """Return a choice of a whole reply."""
    message: dict[str, Any] = {"role": request.role, "content": parsed.content, "refusal": None, "annotations": None, "audio": None}
    message["function_call"] = None
    calls = parsed.tool_calls if request.parallel_tool_calls else parsed.tool_calls[:1]
    if calls:
        message["tool_calls"] = [
            {"id": new_call_id(), "type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls
        ]
    message["reasoning"] = parsed.reasoning if request.include_reasoning else None
    shows = request.include_reasoning
    return {
        "index": index, "message": message, "logprobs": logprobs(tokens, request) if request.logprobs and shows else None,
        "finish_reason": "tool_calls" if parsed.tool_calls else last.finish_reason, "stop_reason": last.stop_reason,
        "token_ids": [token.id for token in tokens] if request.return_token_ids and shows else None, "routed_experts": None,
    }  # fmt: skip


def whole_reply(
    request: ChatRequest, created: int, choices: Sequence[dict[str, Any]], counts: dict[str, Any], prompt_ids: Sequence[int]
) -> dict[str, Any]:
    """Return the body of a reply that is not streamed; `created` in seconds of Unix time."""
    return {
        "id": request.request_id, "object": "chat.completion", "created": created, "model": request.model, "choices": choices,
        "service_tier": None, "system_fingerprint": FINGERPRINT, "usage": counts, "prompt_logprobs": None,
        "prompt_token_ids": prompt_ids if request.return_token_ids else None, "prompt_text": None,
        "kv_transfer_params": None, "ec_transfer_params": None, "metrics": None,
    }  # fmt: skip


def _chunk(request: ChatRequest, created: int, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": request.request_id, "object": "chat.completion.chunk", "created": created, "model": request.model, "choices": choices,
    }  # fmt: skip


def role_chunk(request: ChatRequest, created: int, index: int, prompt_ids: Sequence[int]) -> dict[str, Any]:
    """Return the first chunk of a choice: the role, and the prompt's ids if requested."""
    delta = {"role": request.role, "content": ""}
    chunk = _chunk(request, created, [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
    if request.continuous_usage:
        chunk["usage"] = usage(len(prompt_ids), 0, 0)
    return chunk | {"prompt_token_ids": prompt_ids if request.return_token_ids else None}


def delta_chunk(
    request: ChatRequest, created: int, index: int, delta: dict[str, Any] | None, step: GenerationStep, *, finish_reason: str | None
) -> dict[str, Any] | None:
    """Return a chunk with the delta of one step; `None` where vLLM sends nothing because it would be empty."""
    shows = request.include_reasoning
    if delta is not None and not shows:
        delta = _without_reasoning(delta)
    values = logprobs(step.tokens, request) if request.logprobs and shows else None
    ids = step.ids if request.return_token_ids and shows else None
    if delta is None and finish_reason is None and values is None and ids is None:
        return None
    delta = delta or {}
    if not request.parallel_tool_calls and delta.get("tool_calls"):
        delta = delta | {"tool_calls": [call for call in delta["tool_calls"] if call["index"] == 0]}
    choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": values, "finish_reason": finish_reason}
    if finish_reason is not None:
        choice["stop_reason"] = step.stop_reason
    choice["token_ids"] = ids
    chunk = _chunk(request, created, [choice])
    if finish_reason is not None and not request.include_usage:
        chunk["system_fingerprint"] = FINGERPRINT
    return chunk


def _without_reasoning(delta: dict[str, Any]) -> dict[str, Any] | None:
    """Hide reasoning in a delta: its key stays, with null. A delta with only reasoning becomes `None`."""
    content, calls = delta.get("content"), delta.get("tool_calls")
    if not content and not calls:
        return None
    return {"content": content, "reasoning": None} | ({"tool_calls": calls} if calls else {})


def usage_chunk(request: ChatRequest, created: int, counts: dict[str, Any]) -> dict[str, Any]:
    """Return the chunk without choices at the end of a stream whose request includes usage."""
    return _chunk(request, created, []) | {"usage": counts, "system_fingerprint": FINGERPRINT}


def model_list(model: str, created: int, max_model_len: int, adapters: Mapping[str, str]) -> dict[str, Any]:
    """Return the body of `GET /v1/models`; `max_model_len` in tokens; `adapters` maps names to paths."""
    permission = {
        "id": "modelperm-0000000000000000", "object": "model_permission", "created": created, "allow_create_engine": False,
        "allow_sampling": True, "allow_logprobs": True, "allow_search_indices": False, "allow_view": True, "allow_fine_tuning": False,
        "organization": "*", "group": None, "is_blocking": False,
    }  # fmt: skip
    card = {"id": model, "object": "model", "created": created, "owned_by": "vllm", "root": model, "parent": None}
    base = card | {"max_model_len": max_model_len, "permission": [permission]}
    own = [base | {"id": name, "root": path, "parent": model, "max_model_len": None} for name, path in adapters.items()]
    return {"object": "list", "data": [base, *own]}
