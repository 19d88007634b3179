"""Requests to NeMo Gym's model server, and what it sends to vLLM for each: nemo-gym 0.7.0, `vllm_model` as Gym configures it for training.

`essential` removes from a chat request what changes neither the prompt nor the sampling in vLLM, or can be written in two ways.
"""

from typing import Any, NamedTuple

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"], "additionalProperties": False}
HI = {"role": "user", "content": "hi"}
PIXEL = "data:image/png;base64,iVBORw0KGgo="
SOUND = "data:audio/wav;base64,UklGRg=="
RESULTED = {"role": "tool", "tool_call_id": "call_1", "content": "a.txt"}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "a.txt"}


class Case(NamedTuple):
    """A request, and the essential parts of what Gym's server sends for it.

    `sent` is `None` if Gym's server refuses the request. `ours` is what the proxy sends if that differs, and `why` gives the reason.
    """

    name: str
    path: str
    body: dict[str, Any]
    sent: dict[str, Any] | None
    why: str = ""
    ours: dict[str, Any] | None = None


def essential(body: dict[str, Any]) -> dict[str, Any]:
    """The parts of a chat request from which vLLM builds the prompt and its sampling parameters."""
    left = {name: value for name, value in body.items() if name not in _WITHOUT_EFFECT and value is not None}
    if "max_completion_tokens" in left:
        left["max_tokens"] = left.pop("max_completion_tokens")
    if not left.get("tools"):
        left.pop("tools", None)
        left.pop("parallel_tool_calls", None)
    if left.get("tool_choice") == "auto" or "tools" not in left:
        left.pop("tool_choice", None)
    return left | {"messages": [_message(message) for message in body["messages"]]}


_NAMES = """
    model logprobs top_logprobs return_tokens_as_token_ids return_token_ids return_weight_versions kv_transfer_params include_reasoning
    stream stream_options
    metadata moderation prompt_cache_key prompt_cache_retention safety_identifier service_tier store user
"""
_WITHOUT_EFFECT = frozenset(_NAMES.split())
"""What each server requests of vLLM for itself (the model by its name, ids, log probabilities, a stream); what vLLM accepts and ignores."""


def _message(message: dict[str, Any]) -> dict[str, Any]:
    left = {name: value for name, value in message.items() if value not in (None, "", [])}
    left |= {"reasoning": left.pop("reasoning_content")} if "reasoning_content" in left else {}  # Gym writes both
    if isinstance(content := left.get("content"), list):
        parts = [_part(part) for part in content]
        left["content"] = parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
    return left


def _part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "image_url":  # vLLM does not use `detail`
        return {"type": "image_url", "image_url": {"url": part["image_url"]["url"]}}
    return part


def function(**more: Any) -> dict[str, Any]:
    """A tool of a Responses request."""
    return {"type": "function", "name": "bash", "description": "Run", "parameters": SCHEMA, **more}


def tool(**more: Any) -> dict[str, Any]:
    """A tool of a chat request."""
    return {"type": "function", "function": {"name": "bash", "description": "Run", "parameters": SCHEMA, **more}}


def called(arguments: str = '{"cmd": "ls"}') -> dict[str, Any]:
    """A tool call of a chat message."""
    return {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": arguments}}


def item(arguments: str = '{"cmd": "ls"}') -> dict[str, Any]:
    """A tool call as an output item."""
    return {"type": "function_call", "call_id": "call_1", "name": "bash", "arguments": arguments}


def thought(*texts: str) -> dict[str, Any]:
    """A reasoning item."""
    return {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": text} for text in texts]}


def words(text: str) -> dict[str, Any]:
    """An output message."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}


CASES = [
    Case("chat: plain", CHAT, {"messages": [HI]}, {"messages": [HI]}),
    Case("chat: strict", CHAT, {"messages": [HI], "tools": [tool(strict=True)]}, {"messages": [HI], "tools": [tool()]}),
    Case("chat: strict false", CHAT, {"messages": [HI], "tools": [tool(strict=False)]}, {"messages": [HI], "tools": [tool()]}),
    Case(
        "chat: choice",
        CHAT,
        {"messages": [HI], "tools": [tool(strict=True)], "tool_choice": "required", "parallel_tool_calls": False},
        {"messages": [HI], "parallel_tool_calls": False, "tool_choice": "required", "tools": [tool()]},
    ),
    Case(
        "chat: named choice",
        CHAT,
        {"messages": [HI], "tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "bash"}}},
        {"messages": [HI], "tool_choice": {"function": {"name": "bash"}, "type": "function"}, "tools": [tool()]},
    ),
    Case(
        "chat: sampling",
        CHAT,
        {
            "messages": [HI],
            "temperature": 0.5,
            "top_p": 0.9,
            "max_tokens": 64,
            "seed": 1,
            "stop": ["x"],
            "presence_penalty": 0.1,
            "frequency_penalty": 0.2,
            "logit_bias": {"5": 1},
            "n": 1,
        },
        {
            "messages": [HI],
            "frequency_penalty": 0.2,
            "logit_bias": {"5": 1},
            "max_tokens": 64,
            "n": 1,
            "presence_penalty": 0.1,
            "seed": 1,
            "stop": ["x"],
            "temperature": 0.5,
            "top_p": 0.9,
        },
    ),
    Case("chat: max completion tokens", CHAT, {"messages": [HI], "max_completion_tokens": 9}, {"messages": [HI], "max_tokens": 9}),
    Case(
        "chat: bookkeeping",
        CHAT,
        {
            "messages": [HI],
            "store": True,
            "user": "u",
            "service_tier": "auto",
            "prompt_cache_key": "k",
            "safety_identifier": "i",
            "metadata": {"a": "b"},
        },
        {"messages": [HI]},
    ),
    Case(
        "chat: developer",
        CHAT,
        {"messages": [{"role": "developer", "content": "be brief"}, HI]},
        {"messages": [{"content": "be brief", "role": "developer"}, HI]},
    ),
    Case(
        "chat: system parts",
        CHAT,
        {"messages": [{"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, HI]},
        {"messages": [{"content": [{"text": "a", "type": "text"}, {"text": "b", "type": "text"}], "role": "system"}, HI]},
    ),
    Case(
        "chat: image",
        CHAT,
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}}],
                }
            ]
        },
        {"messages": [{"content": [{"text": "see", "type": "text"}, {"type": "image_url", "image_url": {"url": PIXEL}}], "role": "user"}]},
    ),
    Case("chat: template arguments", CHAT, {"messages": [HI], "chat_template_kwargs": {"enable_thinking": False}}, {"messages": [HI]}),
    Case(
        "chat: template arguments in metadata",
        CHAT,
        {
            "messages": [HI],
            "metadata": {"chat_template_kwargs": '{"enable_thinking": false}'},
            "chat_template_kwargs": {"enable_thinking": True, "x": 1},
        },
        {"messages": [HI], "chat_template_kwargs": {"enable_thinking": False}},
    ),
    Case(
        "chat: extra body",
        CHAT,
        {"messages": [HI], "metadata": {"extra_body": '{"top_k": 5, "temperature": 0.1, "min_p": 0.2}'}, "temperature": 0.5},
        {"top_k": 5, "temperature": 0.5, "min_p": 0.2, "messages": [HI]},
    ),
    Case(
        "chat: audio",
        CHAT,
        {
            "messages": [{"role": "user", "content": "hear"}, {"role": "assistant", "content": "ok"}, HI],
            "metadata": {"audio_data": SOUND, "a": "b"},
        },
        {
            "messages": [
                {"content": "hear", "role": "user"},
                {"role": "assistant", "content": "ok"},
                {"content": [{"type": "audio_url", "audio_url": {"url": SOUND}}, {"type": "text", "text": "hi"}], "role": "user"},
            ]
        },
    ),
    Case(
        "chat: history",
        CHAT,
        {"messages": [HI, {"role": "assistant", "content": None, "tool_calls": [called()]}, RESULTED], "tools": [tool()]},
        {"messages": [HI, {"role": "assistant", "tool_calls": [called()]}, RESULTED], "tools": [tool()]},
    ),
    Case(
        "chat: empty content",
        CHAT,
        {"messages": [HI, {"role": "assistant", "content": ""}, HI]},
        {"messages": [HI, {"role": "assistant"}, HI]},
    ),
    Case(
        "chat: inline thinking",
        CHAT,
        {"messages": [HI, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes.", "tool_calls": [called()]}, RESULTED]},
        {"messages": [HI, {"role": "assistant", "content": "\n\nYes.", "tool_calls": [called()], "reasoning": "\nHm.\n"}, RESULTED]},
    ),
    Case(
        "chat: inline thinking in parts",
        CHAT,
        {"messages": [HI, {"role": "assistant", "content": [{"type": "text", "text": "<think>Hm.</think>Yes."}]}, HI]},
        {"messages": [HI, {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}, HI]},
    ),
    Case(
        "chat: inline thinking after blanks",
        CHAT,
        {"messages": [HI, {"role": "assistant", "content": "\n <think>Hm.</think>\nYes."}, HI]},
        {"messages": [HI, {"role": "assistant", "content": "\n \nYes.", "reasoning": "Hm."}, HI]},
    ),
    Case(
        "chat: thinking within a text",
        CHAT,
        {"messages": [HI, {"role": "assistant", "content": "I write <think>x</think> here."}, HI]},
        {"messages": [HI, {"role": "assistant", "content": "I write  here.", "reasoning": "x"}, HI]},
        "the model may have sampled it: the reply must be recognised",
        {"messages": [HI, {"role": "assistant", "content": "I write <think>x</think> here."}, HI]},
    ),
    Case(
        "chat: two thinking blocks",
        CHAT,
        {"messages": [HI, {"role": "assistant", "content": "<think>a</think><think>b</think>c"}, HI]},
        {"messages": [HI, {"role": "assistant", "content": "c", "reasoning": "a"}, HI]},
        "the model may have sampled it: the reply must be recognised",
        {"messages": [HI, {"role": "assistant", "content": "<think>a</think><think>b</think>c"}, HI]},
    ),
    Case(
        "chat: reasoning member",
        CHAT,
        {"messages": [HI, {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}, HI]},
        None,
        "the proxy's own replies have it",
        {"messages": [HI, {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}, HI]},
    ),
    Case(
        "chat: reasoning content member",
        CHAT,
        {"messages": [HI, {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}, HI]},
        {"messages": [HI, {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}, HI]},
    ),
    Case(
        "chat: ids",
        CHAT,
        {
            "messages": [
                HI,
                {
                    "role": "assistant",
                    "content": "Yes.",
                    "prompt_token_ids": [1],
                    "generation_token_ids": [2],
                    "generation_log_probs": [-0.1],
                },
                HI,
            ]
        },
        {
            "messages": [
                HI,
                {
                    "role": "assistant",
                    "content": "Yes.",
                    "prompt_token_ids": [1],
                    "generation_token_ids": [2],
                    "generation_log_probs": [-0.1],
                },
                HI,
            ]
        },
        "the engine gets them as exact ids, if they are known",
        {"messages": [HI, {"role": "assistant", "content": "Yes."}, HI]},
    ),
    Case(
        "chat: response format",
        CHAT,
        {"messages": [HI], "response_format": {"type": "json_schema", "json_schema": {"name": "o", "schema": SCHEMA, "strict": True}}},
        {"messages": [HI], "response_format": {"json_schema": {"name": "o", "schema": SCHEMA, "strict": True}, "type": "json_schema"}},
    ),
    Case(
        "chat: reasoning effort",
        CHAT,
        {"messages": [HI], "reasoning_effort": "low", "verbosity": "low"},
        {"messages": [HI], "reasoning_effort": "low", "verbosity": "low"},
    ),
    Case("chat: unknown", CHAT, {"messages": [HI], "top_k": 7}, None, "Gym refuses it", {"messages": [HI], "top_k": 7}),
    Case(
        "chat: unknown streamed",
        CHAT,
        {
            "messages": [HI],
            "stream": True,
            "stream_options": {"include_usage": True},
            "top_k": 7,
            "chat_template_kwargs": {"enable_thinking": False},
            "bookkeeping": 1,
            "temperature": 0.5,
        },
        {"messages": [HI], "temperature": 0.5},
    ),
    Case("responses: plain", RESPONSES, {"input": "hi"}, {"messages": [HI]}),
    Case("responses: strict", RESPONSES, {"input": "hi", "tools": [function(strict=True)]}, {"messages": [HI], "tools": [tool()]}),
    Case("responses: strict null", RESPONSES, {"input": "hi", "tools": [function(strict=None)]}, {"messages": [HI], "tools": [tool()]}),
    Case(
        "responses: choice",
        RESPONSES,
        {"input": "hi", "tools": [function(strict=True)], "tool_choice": "required", "parallel_tool_calls": False},
        {"messages": [HI], "parallel_tool_calls": False, "tool_choice": "required", "tools": [tool()]},
    ),
    Case(
        "responses: named choice",
        RESPONSES,
        {"input": "hi", "tools": [function(strict=False)], "tool_choice": {"type": "function", "name": "bash"}},
        {"messages": [HI], "tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "bash"}}},
    ),
    Case("responses: no tools", RESPONSES, {"input": "hi", "parallel_tool_calls": False, "tool_choice": "auto"}, {"messages": [HI]}),
    Case(
        "responses: sampling",
        RESPONSES,
        {"input": "hi", "temperature": 0.5, "top_p": 0.9, "max_output_tokens": 64, "top_logprobs": 2},
        {"messages": [HI], "max_tokens": 64, "temperature": 0.5, "top_p": 0.9},
    ),
    Case(
        "responses: bookkeeping",
        RESPONSES,
        {
            "input": "hi",
            "store": False,
            "user": "u",
            "service_tier": "auto",
            "prompt_cache_key": "k",
            "safety_identifier": "i",
            "metadata": {"a": "b"},
        },
        {"messages": [HI]},
    ),
    Case(
        "responses: instructions",
        RESPONSES,
        {"input": "hi", "instructions": "be brief"},
        {"messages": [{"content": "be brief", "role": "system"}, HI]},
    ),
    Case(
        "responses: instructions and system",
        RESPONSES,
        {
            "input": [
                {"role": "system", "content": "s"},
                {
                    "type": "message",
                    "role": "developer",
                    "content": [{"type": "input_text", "text": "d1"}, {"type": "input_text", "text": "d2"}],
                },
                HI,
                {"role": "system", "content": "later"},
                HI,
            ],
            "instructions": "be brief",
        },
        {"messages": [{"content": "be brief\n\ns\n\nd1d2", "role": "system"}, HI, {"content": "later", "role": "system"}, HI]},
    ),
    Case(
        "responses: system and developer",
        RESPONSES,
        {"input": [{"role": "system", "content": "s"}, {"role": "developer", "content": "d"}, HI]},
        {"messages": [{"content": "s", "role": "system"}, {"content": "d", "role": "developer"}, HI]},
    ),
    Case(
        "responses: system and developer streamed",
        RESPONSES,
        {"input": [{"role": "system", "content": "s"}, {"role": "developer", "content": "d"}, HI], "stream": True},
        {"messages": [{"content": "s\n\nd", "role": "system"}, HI]},
    ),
    Case(
        "responses: developer streamed",
        RESPONSES,
        {"input": [{"role": "developer", "content": "d"}, HI], "stream": True},
        {"messages": [{"content": "d", "role": "system"}, HI]},
    ),
    Case(
        "responses: parts",
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}]},
        {"messages": [{"content": [{"text": "a", "type": "text"}, {"text": "b", "type": "text"}], "role": "user"}]},
    ),
    Case(
        "responses: image",
        RESPONSES,
        {
            "input": [
                {
                    "role": "user",
                    "content": [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": PIXEL, "detail": "auto"}],
                }
            ]
        },
        {"messages": [{"content": [{"text": "see", "type": "text"}, {"type": "image_url", "image_url": {"url": PIXEL}}], "role": "user"}]},
    ),
    Case(
        "responses: reply",
        RESPONSES,
        {"input": [HI, thought("Hm."), words("Yes."), item(), RESULT]},
        {"messages": [HI, {"role": "assistant", "content": "Yes.", "tool_calls": [called()], "reasoning": "Hm."}, RESULTED]},
    ),
    Case(
        "responses: reply of calls only",
        RESPONSES,
        {"input": [HI, thought("Hm."), item(), RESULT]},
        {"messages": [HI, {"role": "assistant", "tool_calls": [called()], "reasoning": "Hm."}, RESULTED]},
    ),
    Case(
        "responses: result in parts",
        RESPONSES,
        {
            "input": [
                HI,
                item(),
                {
                    "type": "function_call_output",
                    "call_id": "call_1",
                    "output": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
                },
            ]
        },
        {
            "messages": [
                HI,
                {"role": "assistant", "tool_calls": [called()]},
                {"content": [{"text": "a", "type": "text"}, {"text": "b", "type": "text"}], "role": "tool", "tool_call_id": "call_1"},
            ]
        },
    ),
    Case("responses: empty words", RESPONSES, {"input": [HI, words(""), HI]}, {"messages": [HI, {"role": "assistant"}, HI]}),
    Case(
        "responses: two summaries",
        RESPONSES,
        {"input": [HI, thought("a", "b"), words("c"), HI]},
        {"messages": [HI, {"role": "assistant", "content": "c", "reasoning": "a"}, HI]},
        "Gym keeps only the first",
        {"messages": [HI, {"role": "assistant", "content": "c", "reasoning": "a\nb"}, HI]},
    ),
    Case(
        "responses: two replies",
        RESPONSES,
        {"input": [HI, words("a"), words("b"), HI]},
        {"messages": [HI, {"role": "assistant", "content": "ab"}, HI]},
        "two replies stay two messages: each has its own ids",
        {"messages": [HI, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}, HI]},
    ),
    Case(
        "responses: easy assistant",
        RESPONSES,
        {"input": [HI, {"role": "assistant", "content": "Yes."}, HI]},
        {"messages": [HI, {"role": "assistant", "content": "Yes."}, HI]},
    ),
    Case(
        "responses: inline thinking",
        RESPONSES,
        {"input": [HI, words("<think>Hm.</think>Yes."), HI]},
        {"messages": [HI, {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}, HI]},
    ),
    Case(
        "responses: template arguments",
        RESPONSES,
        {"input": "hi", "metadata": {"chat_template_kwargs": '{"enable_thinking": false}'}},
        {"messages": [HI], "chat_template_kwargs": {"enable_thinking": False}},
    ),
    Case("responses: extra body", RESPONSES, {"input": "hi", "metadata": {"extra_body": '{"top_k": 5}'}}, {"top_k": 5, "messages": [HI]}),
    Case(
        "responses: audio",
        RESPONSES,
        {"input": "hi", "metadata": {"audio_data": SOUND}},
        {"messages": [{"content": [{"type": "audio_url", "audio_url": {"url": SOUND}}, {"text": "hi", "type": "text"}], "role": "user"}]},
    ),
    Case(
        "responses: text format",
        RESPONSES,
        {"input": "hi", "text": {"format": {"type": "json_schema", "name": "o", "schema": SCHEMA, "strict": True}}},
        {"messages": [HI], "response_format": {"json_schema": {"name": "o", "schema": SCHEMA, "strict": True}, "type": "json_schema"}},
    ),
    Case("responses: verbosity", RESPONSES, {"input": "hi", "text": {"verbosity": "low"}}, {"messages": [HI], "verbosity": "low"}),
    Case("responses: effort", RESPONSES, {"input": "hi", "reasoning": {"effort": "low"}}, {"messages": [HI], "reasoning_effort": "low"}),
    Case(
        "responses: unfinished reply",
        RESPONSES,
        {
            "input": [
                HI,
                {
                    "type": "message",
                    "id": "msg_1",
                    "role": "assistant",
                    "status": "incomplete",
                    "content": [{"type": "output_text", "text": "Ye", "annotations": []}],
                },
            ]
        },
        {"messages": [HI, {"role": "assistant", "content": "Ye"}]},
    ),
    Case(
        "responses: include",
        RESPONSES,
        {"input": "hi", "include": ["reasoning.encrypted_content"]},
        None,
        "Gym refuses it",
        {"messages": [HI]},
    ),
    Case(
        "responses: unknown streamed",
        RESPONSES,
        {"input": "hi", "stream": True, "top_k": 7, "seed": 3, "bookkeeping": 1, "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [HI]},
    ),
    Case(
        "responses: hosted tool",
        RESPONSES,
        {"input": "hi", "tools": [function(strict=True), {"type": "web_search"}]},
        None,
        "Gym refuses it",
        {"messages": [HI], "tools": [tool()]},
    ),
]
