"""Makes the responses of `/v1/chat/completions/render` (a request's ids and sampling parameters) and `/derender` (a message from ids).

As in vLLM 0.32: `derender` keeps the finish reason (`stop`, with or without calls), keeps all calls whatever the value of
`parallel_tool_calls`, gives them ids of another style, and refuses a choice without ids (`renderers/online_derenderer.py`). `render`
returns the grammar (`structured_outputs`), and whether it binds the reply at once.

A streamed `derender` (0.31 and later) returns the delta of some more ids. Its caller sends the state back: the ids before, and how many
arrived together. The parser reads them again each time.
"""

import codecs
import time
import uuid
from collections.abc import Sequence
from typing import Any

from tokencache.testing.chat_request import ChatRequest
from tokencache.testing.errors import senseless
from tokencache.testing.parser import StreamParser, parse_reply, reasoning_is_over
from tokencache.testing.tokenizer import SimTokenizer


def derendered(request: ChatRequest, generated: dict[str, Any], tokenizer: SimTokenizer) -> dict[str, Any]:
    """Make a chat completion from a `generate_response`. Raises `RefusalResponse` if a choice has no ids."""
    choices = []
    for choice in generated["choices"]:
        if not choice["token_ids"]:
            raise senseless(f"choice {choice['index']} has empty or null token_ids")
        parsed = parse_reply(tokenizer.decode(choice["token_ids"]), tools=request.parse_tools, thinking=request.thinking)
        calls = [
            {"id": uuid.uuid4().hex[:16], "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in parsed.tool_calls
        ]
        message = {"role": "assistant", "content": parsed.content, "reasoning": parsed.reasoning, "tool_calls": calls}
        choices.append({"index": choice["index"], "message": message, "finish_reason": choice.get("finish_reason")})
    return {
        "id": generated["request_id"], "object": "chat.completion", "created": int(time.time()), "model": request.model, "choices": choices
    }  # fmt: skip


def derendered_chunk(request: ChatRequest, body: dict[str, Any], tokenizer: SimTokenizer) -> dict[str, Any]:
    """Make the answer to a streamed request: the chunk of some more ids, and the state to send back."""
    state = body.get("stream_state") or {}
    before, lengths = list(state.get("output_token_ids") or ()), list(state.get("output_chunk_lens") or ())
    if sum(lengths) != len(before):
        raise senseless("output_chunk_lens must sum to the number of output_token_ids")
    over = reasoning_is_over(body["prompt_token_ids"], tokenizer, thinking=request.thinking)
    parser = StreamParser(tools=request.parse_tools, thinking=request.thinking, reasoning_done=over)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    at = 0
    for length in lengths:
        parser.feed(_decoded(before[at : at + length], tokenizer, decoder))
        at += length
    (choice,) = body["generate_chunk"]["choices"]
    new, reason = list(choice.get("token_ids") or ()), choice.get("finish_reason")
    delta = parser.feed(_decoded(new, tokenizer, decoder), finished=reason is not None) or {}
    if not state.get("role_sent"):
        delta = {"role": "assistant", **delta}
    ids = [call["id"] for call in delta.get("tool_calls") or () if call.get("id")]
    streamed = bool(state.get("tools_streamed")) or bool(ids)
    chunk = {
        "id": body["generate_chunk"]["request_id"], "object": "chat.completion.chunk", "created": int(time.time()), "model": request.model,
        "choices": [{"index": 0, "delta": delta, "finish_reason": "tool_calls" if streamed and reason == "stop" else reason}],
    }  # fmt: skip
    after = {
        "output_token_ids": before + new, "output_chunk_lens": lengths + ([len(new)] if new else []), "role_sent": True,
        "tools_streamed": streamed, "last_tool_call_ids": [*(state.get("last_tool_call_ids") or ()), *ids],
    }  # fmt: skip
    return {"chunk": chunk, "stream_state": after}


def _decoded(ids: Sequence[int], tokenizer: SimTokenizer, decoder: codecs.IncrementalDecoder) -> str:
    return decoder.decode(b"".join(tokenizer.token_bytes(token_id) for token_id in ids))


def rendered(request: ChatRequest, ids: Sequence[int], longest: int) -> dict[str, Any]:
    """Return the `GenerateRequest` for a request and its rendering. `longest` is the most tokens of prompt and reply together."""
    body = request.body
    choice, format_ = body.get("tool_choice"), body.get("response_format") or {}
    guided = body.get("structured_outputs") or ({"json_object": True} if format_.get("type", "text") != "text" else None)
    if choice == "required" or isinstance(choice, dict):
        guided = {"structural_tag": '{"type": "structural_tag"}', "_backend": None}
    sampling = {
        "n": request.n, "max_tokens": request.max_tokens or longest - len(ids), "structured_outputs": guided, "stop": list(request.stop),
        "stop_token_ids": sorted(request.stop_token_ids), "include_stop_str_in_output": request.include_stop_str_in_output,
        "ignore_eos": request.ignore_eos, "allowed_token_ids": body.get("allowed_token_ids"), "temperature": body.get("temperature"),
        "logprobs": request.top_logprobs if request.logprobs else None, "output_kind": 2, "skip_clone": True,
    }  # fmt: skip
    return {
        "request_id": request.request_id, "token_ids": ids, "features": None, "sampling_params": sampling, "model": request.model,
        "reasoning_ended": not request.include_reasoning, "reasoning_parser_kwargs": None, "stream": request.stream, "stream_options": None,
        "cache_salt": body.get("cache_salt"), "priority": 0, "token_offsets": None,
    }  # fmt: skip
