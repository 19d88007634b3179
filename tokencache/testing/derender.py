"""Makes the responses of `/v1/chat/completions/render` (a request's ids and sampling parameters) and `/derender` (a message from ids).

As in vLLM 0.32, without streams: `derender` keeps the finish reason (`stop`, with or without calls), keeps all calls whatever the value of
`parallel_tool_calls`, gives them ids of another style, and refuses a choice without ids (`renderers/online_derenderer.py`). `render`
returns the constraint of a required or named tool (`structured_outputs`); the simulated model follows no grammar.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from tokencache.testing.errors import senseless
from tokencache.testing.parser import parse_reply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokencache.testing.chat_request import ChatRequest
    from tokencache.testing.tokenizer import SimTokenizer


def derendered(request: ChatRequest, generated: dict[str, Any], tokenizer: SimTokenizer) -> dict[str, Any]:
    """Make a chat completion from a `generate_response`.

    Raises:
        RefusalResponse: a choice has no ids.
    """
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


def rendered(request: ChatRequest, ids: Sequence[int], longest: int) -> dict[str, Any]:
    """Return the `GenerateRequest` for a request. `longest`: largest number of tokens of prompt and reply together."""
    choice = request.body.get("tool_choice")
    guided = (
        {"structural_tag": '{"type": "structural_tag"}', "_backend": None} if choice == "required" or isinstance(choice, dict) else None
    )
    sampling = {"max_tokens": request.max_tokens or longest - len(ids), "structured_outputs": guided}
    return {"request_id": request.request_id, "token_ids": ids, "sampling_params": sampling}
