"""Gemini's tools and generation settings → members of a chat request.

Asked for and not to be had from vLLM is refused by its name (tools that Google runs, several candidates, sound); what
changes nothing in the text is left out (`safetySettings`, `labels`, `responseLogprobs`). Of `thinkingConfig`,

* a `thinkingBudget` of 0 turns thinking off: `reasoning_effort: "none"`, as vLLM 0.32 does for Messages;
* any other budget is left out. It is guidance in this dialect, Gemini CLI sends one with every call, and vLLM refuses its
  own `thinking_token_budget` wherever no reasoning parser is set up (0.32, `v1/engine/input_processor.py`);
* a `thinkingLevel` is the `reasoning_effort` of the same name;
* without `includeThoughts` the harness sees no thoughts, and the turn is recorded as one that showed none.

One of `allowedFunctionNames` is a named `tool_choice`. Several are said by offering only those, for vLLM 0.32 has no
`allowed_tools`: the prompt is another one then.

https://ai.google.dev/api/generate-content#generationconfig
"""

from typing import Any

from tokencache.dialects.gemini.entry import RequestObject
from tokencache.dialects.gemini.schema import json_schema
from tokencache.errors import HarnessError

_NUMBERS = {
    "temperature": "temperature",
    "topP": "top_p",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}
_INTEGERS = {"topK": "top_k", "maxOutputTokens": "max_tokens", "seed": "seed"}
_EFFORTS = {"MINIMAL": "minimal", "LOW": "low", "MEDIUM": "medium", "HIGH": "high", "XHIGH": "xhigh"}
_JSON, _PLAIN = "application/json", "text/plain"


def chat_settings(request: RequestObject) -> dict[str, Any]:
    """Everything of a request besides its conversation, as members of a chat request.

    Raises:
        HarnessError: something of it is not to be had, or has a wrong type.
    """
    if request.text("cachedContent"):
        raise HarnessError("cachedContent is not supported: send the contents themselves", param="cachedContent")
    config = request.inner("generationConfig") or RequestObject({}, "generationConfig")
    said = _sampling(config) | _thinking(config)
    if form := _response_format(config):
        said["response_format"] = form
    return said | _tools(request)


def _sampling(config: RequestObject) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for name, theirs in _NUMBERS.items():
        if (number := config.number(name)) is not None:
            said[theirs] = number
    for name, theirs in _INTEGERS.items():
        if (whole := config.integer(name)) is not None:
            said[theirs] = whole
    if stops := config.texts("stopSequences"):
        said["stop"] = stops
    if (config.integer("candidateCount") or 1) != 1:
        raise HarnessError("generationConfig.candidateCount: only one candidate is supported", param="generationConfig.candidateCount")
    for modality in config.texts("responseModalities"):
        if modality.upper() != "TEXT":
            at = config.at("responseModalities")
            raise HarnessError(f"{at}: {modality} is not supported, only TEXT is", param=at)
    if config.inner("speechConfig") is not None:
        raise HarnessError("generationConfig.speechConfig is not supported", param="generationConfig.speechConfig")
    return said


def _thinking(config: RequestObject) -> dict[str, Any]:
    thinking = config.inner("thinkingConfig") or RequestObject({}, config.at("thinkingConfig"))
    said: dict[str, Any] = {} if thinking.flag("includeThoughts") else {"include_reasoning": False}
    level = (thinking.text("thinkingLevel") or "").upper()
    if thinking.integer("thinkingBudget") == 0:
        said["reasoning_effort"] = "none"
    elif level in _EFFORTS:
        said["reasoning_effort"] = _EFFORTS[level]
    elif level not in {"", "THINKING_LEVEL_UNSPECIFIED"}:
        at = thinking.at("thinkingLevel")
        raise HarnessError(f"{at}: there is no level {level!r}; there are {', '.join(_EFFORTS)}", param=at)
    return said


def _response_format(config: RequestObject) -> dict[str, Any] | None:
    kind = config.text("responseMimeType") or ""
    if kind not in {"", _JSON, _PLAIN}:
        at = config.at("responseMimeType")
        raise HarnessError(f"{at}: {kind!r} is not supported, only {_JSON} and {_PLAIN} are", param=at)
    if kind != _JSON:
        return None
    schema = _schema(config, "responseJsonSchema", "responseSchema")
    if schema is None:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}


def _tools(request: RequestObject) -> dict[str, Any]:
    tools = [function for tool in request.objects("tools") for function in _functions(tool)]
    if not tools:
        return {}
    choice = (request.inner("toolConfig") or RequestObject({}, "toolConfig")).inner("functionCallingConfig")
    if choice is None:
        return {"tools": tools}
    mode = (choice.text("mode") or "AUTO").upper()
    allowed = choice.texts("allowedFunctionNames")
    if allowed:
        _check_allowed(choice, mode, allowed, tools)
        if mode == "ANY" and len(allowed) == 1:
            return {"tools": tools, "tool_choice": {"type": "function", "function": {"name": allowed[0]}}}
        tools = [tool for tool in tools if tool["function"]["name"] in allowed]
    match mode:
        case "AUTO" | "VALIDATED" | "MODE_UNSPECIFIED":
            return {"tools": tools}
        case "NONE":
            return {"tools": tools, "tool_choice": "none"}
        case "ANY":
            return {"tools": tools, "tool_choice": "required"}
    raise HarnessError(f"{choice.at('mode')}: there is no mode {mode!r}", param=choice.at("mode"))


def _check_allowed(choice: RequestObject, mode: str, allowed: list[str], tools: list[dict[str, Any]]) -> None:
    at = choice.at("allowedFunctionNames")
    if mode not in {"ANY", "VALIDATED"}:
        raise HarnessError(f"{at} can be set in mode ANY only, not in mode {mode}", param=at)
    if unknown := set(allowed) - {tool["function"]["name"] for tool in tools}:
        raise HarnessError(f"{at}: no function is declared as {', '.join(sorted(unknown))}", param=at)


def _functions(tool: RequestObject) -> list[dict[str, Any]]:
    """The functions that a tool declares."""
    for name in tool.named():
        if name not in {"functionDeclarations", "function_declarations"}:
            raise HarnessError(f"{tool.at(name)} is not supported: only functionDeclarations are", param=tool.at(name))
    return [_function(declared) for declared in tool.objects("functionDeclarations")]


def _function(declared: RequestObject) -> dict[str, Any]:
    name = declared.text("name")
    if not name:
        raise HarnessError(f"{declared.at('name')} is missing", param=declared.at("name"))
    function: dict[str, Any] = {"name": name}
    if (description := declared.text("description")) is not None:
        function["description"] = description
    if (schema := _schema(declared, "parametersJsonSchema", "parameters")) is not None:
        function["parameters"] = schema
    return {"type": "function", "function": function}


def _schema(said: RequestObject, plain: str, theirs: str) -> dict[str, Any] | None:
    """A schema that may be written in either of two members: in JSON Schema, or in Gemini's own dialect."""
    if (schema := said.inner(plain)) is not None:
        return schema.members
    own = said.inner(theirs)
    return json_schema(own) if own is not None else None
