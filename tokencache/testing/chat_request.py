"""Reads and validates the body of a chat completion request, in the order in which vLLM 0.32 does.

First the types (pydantic in vLLM), then the values and combinations of fields, then the model's name. The order only decides which of
several faults is reported. As in vLLM, unknown fields are ignored, so an old engine silently ignores `kv_transfer_params.prompt_token_ids`.
"""

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokencache.testing.errors import RefusalResponse, schema_refusal, senseless, unknown_model

_KINDS: dict[str, tuple[tuple[type, ...], str, str]] = {
    "str": ((str,), "string_type", "Input should be a valid string"),
    "int": ((int,), "int_parsing", "Input should be a valid integer, unable to parse string as an integer"),
    "float": ((int, float), "float_parsing", "Input should be a valid number, unable to parse string as a number"),
    "bool": ((bool,), "bool_parsing", "Input should be a valid boolean, unable to interpret input"),
    "list": ((list,), "list_type", "Input should be a valid list"),
    "dict": ((dict,), "dict_type", "Input should be a valid dictionary"),
}
_FIELDS = {
    "messages": "list", "model": "str", "logprobs": "bool", "top_logprobs": "int", "max_tokens": "int", "max_completion_tokens": "int",
    "n": "int", "seed": "int", "stream": "bool", "stream_options": "dict", "temperature": "float", "top_p": "float", "tools": "list",
    "include_reasoning": "bool", "stop_token_ids": "list", "allowed_token_ids": "list", "return_token_ids": "bool", "ignore_eos": "bool",
    "kv_transfer_params": "dict", "chat_template_kwargs": "dict", "add_generation_prompt": "bool", "continue_final_message": "bool",
    "parallel_tool_calls": "bool", "prompt_logprobs": "int", "stream_interval": "int", "include_stop_str_in_output": "bool",
}  # fmt: skip
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_MAX_LOGPROBS = 20


def read_json(raw: bytes, content_type: str) -> dict[str, Any]:
    """Parse the JSON object in `raw`. Raises `RefusalResponse` with FastAPI's errors, as vLLM words them."""
    if content_type != "application/json":
        raise RefusalResponse("1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed", kind="Bad Request")
    if not raw:
        raise schema_refusal("body", "missing", "Field required", None)
    try:
        body = json.loads(raw)
    except json.JSONDecodeError as error:
        raise schema_refusal(f"body.{error.pos}", "json_invalid", "JSON decode error", {}, {"error": error.msg}) from error
    except UnicodeDecodeError as error:
        raise RefusalResponse("There was an error parsing the body", kind="Bad Request") from error
    if not isinstance(body, dict):
        raise schema_refusal("body", "model_attributes_type", "Input should be a valid dictionary or object to extract fields from", body)
    return body


def check_types(body: Mapping[str, Any]) -> None:
    """Refuse fields of a wrong type. Null counts as absent."""
    for name, kind in _FIELDS.items():
        value = body.get(name)
        types, error, message = _KINDS[kind]
        if value is not None and (not isinstance(value, types) or (isinstance(value, bool) and kind != "bool")):
            raise schema_refusal(f"body.{name}", error, message, value)
    for i, message in enumerate(body.get("messages") or []):
        location = f"body.messages.{i}.ChatCompletionDeveloperMessageParam"
        if not isinstance(message, dict):
            raise schema_refusal(location, "dict_type", _KINDS["dict"][2], message)
        if not isinstance(message.get("role"), str):
            raise schema_refusal(f"{location}.role", "missing", "Field required", message)
        if not isinstance(message.get("content"), (str, list, type(None))):
            raise schema_refusal(f"{location}.content", "string_type", _KINDS["str"][2], message["content"])
        _check_calls(message)
    for i, tool in enumerate(body.get("tools") or []):
        if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
            raise schema_refusal(f"body.tools.{i}.function", "missing", "Field required", tool)


def _check_calls(message: Mapping[str, Any]) -> None:
    """Refuse arguments that are not text, even if the prompt is given as ids."""
    calls = message.get("tool_calls")
    for i, call in enumerate(calls if isinstance(calls, list) else []):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and not isinstance(function.get("arguments"), str):
            location = f"body.{i}.ChatCompletionMessageFunctionToolCallParam.function"
            if "arguments" not in function:
                raise schema_refusal(location, "missing", "Field required", function)
            raise schema_refusal(location, "string_type", _KINDS["str"][2], function["arguments"])


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A valid chat completion request. The fields have the names of vLLM 0.32."""

    body: dict[str, Any]
    model: str
    stream: bool
    n: int
    max_tokens: int | None
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    allowed_token_ids: tuple[int, ...] | None
    logprobs: bool
    top_logprobs: int
    return_token_ids: bool
    return_tokens_as_token_ids: bool
    include_reasoning: bool
    parallel_tool_calls: bool
    include_usage: bool
    continuous_usage: bool
    stream_interval: int
    tools: tuple[dict[str, Any], ...]
    parse_tools: bool
    template_arguments: dict[str, Any]
    request_id: str
    session: str | None

    @property
    def thinking(self) -> bool:
        """Whether the parser looks for reasoning."""
        return bool(self.template_arguments.get("enable_thinking", True))

    @property
    def role(self) -> str:
        """Role of the reply: that of the last message if the request turns the generation prompt off."""
        return "assistant" if self.body.get("add_generation_prompt", True) else str(self.body["messages"][-1]["role"])


def read_chat_request(body: dict[str, Any], headers: Mapping[str, str], *, served: str, vocabulary: int) -> ChatRequest:
    """Validate a body, and read what the engine uses. Raises `RefusalResponse` if it is invalid."""
    if "messages" not in body:
        raise schema_refusal("body.messages", "missing", "Field required", body)
    check_types(body)
    effort = body.get("reasoning_effort")
    if effort is not None and effort not in _EFFORTS:
        names = ", ".join(f"'{name}'" for name in _EFFORTS[:-1]) + f" or '{_EFFORTS[-1]}'"
        raise schema_refusal("body.reasoning_effort", "literal_error", f"Input should be {names}", effort, {"expected": names})
    _check_meaning(body, vocabulary)
    if body.get("model") not in (None, served):
        raise unknown_model(body["model"], served)
    stop = body.get("stop") or []
    options = body.get("stream_options") or {}
    allowed = body.get("allowed_token_ids")
    arguments = dict(body.get("chat_template_kwargs") or {})
    if effort is not None:
        arguments.setdefault("enable_thinking", effort != "none")
        arguments.setdefault("reasoning_effort", effort)
    tools = tuple(body.get("tools") or ())
    limits = [body.get("max_completion_tokens"), body.get("max_tokens")]
    given_id = headers.get("X-Request-Id") or body.get("request_id") or uuid.uuid4().hex[:16]
    return ChatRequest(
        body=body,
        model=body.get("model") or served,
        stream=bool(body.get("stream")),
        n=body.get("n") or 1,
        max_tokens=next((limit for limit in limits if limit is not None), None),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=frozenset(body.get("stop_token_ids") or ()),
        include_stop_str_in_output=bool(body.get("include_stop_str_in_output")),
        ignore_eos=bool(body.get("ignore_eos")),
        allowed_token_ids=None if allowed is None else tuple(allowed),
        logprobs=bool(body.get("logprobs")),
        top_logprobs=body.get("top_logprobs") or 0,
        return_token_ids=bool(body.get("return_token_ids")),
        return_tokens_as_token_ids=bool(body.get("return_tokens_as_token_ids")),
        include_reasoning=body.get("include_reasoning") is not False,
        parallel_tool_calls=body.get("parallel_tool_calls") is not False,
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("include_usage") and options.get("continuous_usage_stats")),
        stream_interval=body.get("stream_interval") or 1,
        tools=tools,
        parse_tools=bool(tools) and body.get("tool_choice") != "none",
        template_arguments=arguments,
        request_id=f"chatcmpl-{given_id}",
        session=headers.get("X-Session-ID") or body.get("session_id"),
    )


def _check_meaning(body: Mapping[str, Any], vocabulary: int) -> None:
    """Refuse values that vLLM's own validators refuse, with messages recorded from vLLM."""
    if body.get("stream_options") and not body.get("stream"):
        raise senseless("Stream options can only be defined when `stream=True`.", "stream_options")
    if body.get("logprob_token_ids") and not body.get("logprobs"):
        raise senseless("when using `logprob_token_ids`, `logprobs` must be set to true.", "logprob_token_ids")
    if body.get("top_logprobs") and not body.get("logprobs"):
        raise senseless("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    if body.get("tools") == []:
        raise senseless("`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.", "tools")
    _check_tool_choice(body.get("tool_choice"), body.get("tools") or ())
    if body.get("continue_final_message") and body.get("add_generation_prompt", True):
        raise senseless(
            "continue_final_message and add_generation_prompt are not compatible. Use continue_final_message when you want the model to "
            "continue the final message, and add_generation_prompt when you want to add a header that will prompt it to start a new "
            "assistant message instead."
        )
    _check_sampling(body, vocabulary)


def _check_sampling(body: Mapping[str, Any], vocabulary: int) -> None:
    """Refuse impossible sampling parameters."""
    if (n := body.get("n")) is not None and n < 1:
        raise senseless(f"n must be at least 1, got {n}.")
    if (temperature := body.get("temperature")) is not None and temperature < 0:
        raise senseless(f"temperature must be non-negative, got {float(temperature)}.", "temperature", float(temperature))
    if temperature == 0 and (n or 1) > 1:
        raise senseless(f"n must be 1 when using greedy sampling, got {n}.")
    if (top := body.get("top_logprobs") or 0) > _MAX_LOGPROBS:
        message = f"Requested sample logprobs of {top}, which is greater than max allowed: {_MAX_LOGPROBS}"
        raise senseless(message, "logprobs", top, by_engine=True)
    if strange := [token for token in body.get("stop_token_ids") or () if not 0 <= token < vocabulary]:
        message = f"token_id(s) {strange} in stop_token_ids contain out-of-vocab token ids. Vocabulary size: {vocabulary}"
        raise senseless(message, "stop_token_ids", strange, by_engine=True)
    if (wanted := body.get("prompt_logprobs")) is not None:
        _check_prompt_logprobs(wanted, vocabulary, stream=bool(body.get("stream")))
    allowed = body.get("allowed_token_ids")
    if allowed == []:
        raise senseless("allowed_token_ids is not None and empty!", "allowed_token_ids", allowed, by_engine=True)
    if allowed is not None and not all(isinstance(token, int) and 0 <= token < vocabulary for token in allowed):
        raise senseless("allowed_token_ids contains out-of-vocab token id!", "allowed_token_ids", allowed, by_engine=True)


def _check_prompt_logprobs(wanted: int, vocabulary: int, *, stream: bool) -> None:
    if stream and (wanted > 0 or wanted == -1):
        raise senseless("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    if wanted < -1:
        raise senseless("`prompt_logprobs` must be a positive value or -1.", "prompt_logprobs", wanted)
    if (number := vocabulary if wanted == -1 else wanted) > _MAX_LOGPROBS:
        message = f"Requested prompt logprobs of {number}, which is greater than max allowed: {_MAX_LOGPROBS}"
        raise senseless(message, "prompt_logprobs", number, by_engine=True)


def _check_tool_choice(choice: Any, tools: Any) -> None:
    if choice is None or (choice == "none" and not tools):
        return
    if not tools:
        raise senseless("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if isinstance(choice, dict):
        name = (choice.get("function") or {}).get("name")
        if not any(tool["function"].get("name") == name for tool in tools):
            raise senseless("The tool specified in `tool_choice` does not match any of the specified `tools`", "tool_choice")
    elif choice not in ("none", "auto", "required"):
        message = f'Invalid value for `tool_choice`: {choice}! Only named tools, "none", "auto" or "required" are supported.'
        raise senseless(message, "tool_choice")
