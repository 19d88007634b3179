"""Gemini's contents → chat messages.

A conversation is a list of `contents`, each of a role and parts. What becomes of them, and why:

* All contents of the model up to the next entry of somebody else are one reply and become one message, for the Python SDK
  keeps each chunk of a stream as a content of its own. Its texts are joined with nothing between (we split them, the
  engine said one string), thoughts likewise. Two contents that bring two different handles are two replies.
* A user's texts stay parts, which vLLM joins with newlines; a lone text is a string. So are those of `systemInstruction`.
* A function's response becomes a tool message. By the API's own words (google-genai 3.4, `FunctionResponse.response`)
  "output" holds the output, and without "output" and "error" the whole object is the output: so `{"output": "text"}`
  alone is that text, as a chat harness would send it; everything else is the object's compact JSON, an error with its
  mark. In one content, responses stand before texts, as vLLM puts tool results of Messages before the user's words.
* Calls and responses may come without ids: the n-th response of a name then answers the n-th call of that name in the
  reply before it. Gemini CLI (0.61) writes `<name>__` before the ids it was given; that is taken off again.
* What a chat message has no place for is refused by its name: files by reference, executable code, sound.

https://ai.google.dev/api/caching#Content


Gemini's tools and generation settings → members of a chat request.

DialectRequest for and not to be had from vLLM is refused by its name (tools that Google runs, several candidates, sound); what
changes nothing in the text is left out (`safetySettings`, `labels`, `responseLogprobs`). Of `thinkingConfig`,

* a `thinkingBudget` of 0 turns thinking off: `reasoning_effort: "none"`, as vLLM 0.32 does for Messages;
* any other budget is left out. It is guidance in this dialect, Gemini CLI sends one with every call, and vLLM refuses its
  own `thinking_token_budget` wherever no reasoning parser is set up (0.32, `v1/engine/input_processor.py`);
* a `thinkingLevel` is the `reasoning_effort` of the same name;
* without `includeThoughts` the harness sees no thoughts, and the turn is recorded as one that showed none.

One of `allowedFunctionNames` is a named `tool_choice`. Several are said by offering only those, for vLLM 0.32 has no
`allowed_tools`: the prompt is another one then.

https://ai.google.dev/api/generate-content#generationconfig


Gemini's schemas → JSON Schema.

`parameters` and `responseSchema` are written in a dialect of OpenAPI 3.0: types in upper case, `nullable` beside the type,
whole numbers as text, members in either spelling. What both know under one name stays; what only Gemini knows is said
in JSON Schema's words or, where it constrains nothing, left out. (`parametersJsonSchema` and `responseJsonSchema` need
none of this.)

https://ai.google.dev/api/caching#Schema
"""

from typing import Any

from tokencache.dialects import json_io
from tokencache.dialects.gemini.vocabulary import RequestObject, entry, wrong
from tokencache.dialects.thinking import NOT_IN_TEXT, Mark, folded, read_signature
from tokencache.errors import HarnessError

_BESIDE = frozenset(
    {"thought", "thoughtSignature", "thought_signature", "videoMetadata", "video_metadata", "mediaResolution", "media_resolution"}
    | {"partMetadata", "part_metadata", "callIndex"}
)
"""Members that say something of a part and are none themselves (`callIndex` is Gemini CLI's own)."""
_SIGNATURE = "thoughtSignature"


class Contents:
    """Collects the messages of a conversation."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.handles: dict[int, str] = {}
        self._marks: dict[int, Mark] = {}
        """Where the thinking of a message with a handle stood."""
        self._reply: dict[str, Any] | None = None
        """The model's message that further contents of the model are part of."""
        self._open: list[tuple[str, str]] = []
        """Calls not yet answered: name, id."""

    def system(self, instruction: Any) -> None:
        """Take the system instruction: a text, or a content.

        Raises:
            HarnessError: it is neither, or has parts that are no text.
        """
        path = "systemInstruction"
        if instruction is None:
            return
        if isinstance(instruction, str):
            self.messages.append({"role": "system", "content": instruction})
            return
        if not isinstance(instruction, dict):
            raise wrong(path, "a string or a content", instruction)
        parts = [_text_part(_words(part)) for part in RequestObject(instruction, path).objects("parts")]
        if parts:
            self.messages.append({"role": "system", "content": _alone(parts)})

    def add(self, content: RequestObject) -> None:
        """Take one content.

        Raises:
            HarnessError: it cannot be said in chat.
        """
        role = content.text("role") or "user"
        if role == "model":
            self._say(content)
        elif role in {"user", "function"}:
            self._reply = None
            self._hear(content)
        else:
            raise HarnessError(f"{content.at('role')}: please use a valid role: user, model, function", param=content.at("role"))

    def close(self) -> None:
        """Put thinking that stood in a reply's text there again."""
        for at, mark in self._marks.items():
            self.messages[at] = folded(self.messages[at], mark)

    def _say(self, content: RequestObject) -> None:
        """Add to the model's reply."""
        parts = content.objects("parts")
        signatures = [read_signature(part.get(_SIGNATURE)) for part in parts]
        handle, mark = next((found for found in signatures if found[0]), (None, NOT_IN_TEXT))
        at = len(self.messages) - 1
        if self._reply is None or (handle is not None and self.handles.get(at, handle) != handle):
            self._reply = {"role": "assistant"}
            self.messages.append(self._reply)
            self._open = []
            at += 1
        if handle is not None:
            self.handles[at], self._marks[at] = handle, mark
        for part in parts:
            kind = _kind(part)
            if kind == "text":
                thought = len(part.members) > 1 and part.flag("thought")  # most texts have nothing beside them
                name = "reasoning" if thought else "content"
                self._reply[name] = self._reply.get(name, "") + (part.text("text") or "")
            elif kind == "functionCall":
                self._call(self._reply, part)
            elif kind:
                raise HarnessError(f"{part.path}: {kind!r} is not supported in a content of the model", param=part.path)
        if "tool_calls" not in self._reply:
            self._reply.setdefault("content", "")
        elif self._reply.get("content") == "":
            del self._reply["content"]

    def _call(self, reply: dict[str, Any], part: RequestObject) -> None:
        call = part.inner("functionCall")
        if call is None:
            raise wrong(part.at("functionCall"), "an object", None)
        name = call.text("name")
        if not name:
            raise HarnessError(f"{call.at('name')} is missing", param=call.at("name"))
        args = call.inner("args")
        given = _own_id(call.text("id"), name) or f"call_{len(self.messages) - 1}_{len(self._open)}"
        self._open.append((name, given))
        function = {"name": name, "arguments": json_io.write(args.members if args is not None else {}).decode()}
        reply.setdefault("tool_calls", []).append({"id": given, "type": "function", "function": function})

    def _hear(self, content: RequestObject) -> None:
        """Take what the user says and what functions answered."""
        said: list[dict[str, Any]] = []
        for part in content.objects("parts"):
            kind = _kind(part)
            if kind == "functionResponse":
                self.messages.append(self._result(part))
            elif kind == "text":
                said.append(_text_part(part.text("text") or ""))
            elif kind == "inlineData":
                said.append(_image(part, "inlineData"))
            elif kind:
                raise HarnessError(f"{part.path}: {kind!r} is not supported: chat completions have no such part", param=part.path)
        if said:
            self.messages.append({"role": "user", "content": _alone(said)})

    def _result(self, part: RequestObject) -> dict[str, Any]:
        response = part.inner("functionResponse")
        if response is None:
            raise wrong(part.at("functionResponse"), "an object", None)
        name = response.text("name") or ""
        body = response.inner("response")
        text = _output(body.members if body is not None else {})
        images = [_image(inner, "inlineData") for inner in response.objects("parts")]
        content = [_text_part(text), *images] if images else text
        return {"role": "tool", "tool_call_id": self._answered(response, name), "content": content}

    def _answered(self, response: RequestObject, name: str) -> str:
        """The id of the call that a response answers."""
        given = _own_id(response.text("id"), name)
        for call in self._open:
            if call[1] == given or (given is None and call[0] == name):
                self._open.remove(call)
                return call[1]
        return given or f"call_{len(self.messages)}"


def _kind(part: RequestObject) -> str:
    """Which of its kinds a part is, by the name of its member; `""` for one with a signature and nothing else."""
    named = [name for name, value in part.members.items() if value is not None and name not in _BESIDE]
    if len(named) == 1:
        return _camel(named[0])
    if named:
        raise HarnessError(f"{part.path} must have one kind of data, not {' and '.join(map(_camel, named))}", param=part.path)
    if part.get(_SIGNATURE) is None:
        raise HarnessError(f"{part.path} has no data: it must have text, functionCall, functionResponse or inlineData", param=part.path)
    return ""


def _camel(name: str) -> str:
    if "_" not in name:  # nearly always, and of every part
        return name
    head, *humps = name.split("_")
    return head + "".join(hump[:1].upper() + hump[1:] for hump in humps)


def _own_id(given: str | None, name: str) -> str | None:
    """A call's id as it was given out."""
    return (given.removeprefix(f"{name}__") or given) if given else None


def _words(part: RequestObject) -> str:
    kind = _kind(part)
    if kind not in {"", "text"}:
        raise HarnessError(f"{part.path}: {kind!r} is not supported in the system instruction", param=part.path)
    return part.text("text") or ""


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _alone(parts: list[dict[str, Any]]) -> Any:
    """Parts as a message's content: a lone text is a string."""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _image(part: RequestObject, name: str) -> dict[str, Any]:
    """An image as chat's `image_url`: whether the model takes images is for the engine to say."""
    blob = part.inner(name)
    if blob is None:
        raise HarnessError(f"{part.path} is not supported: only {name} is", param=part.path)
    kind, data = blob.text("mimeType") or "", blob.text("data") or ""
    if not kind.startswith("image/"):
        raise HarnessError(f"{blob.path}: data of type {kind!r} is not supported, only images are", param=blob.at("mimeType"))
    standard = data.translate(str.maketrans("-_", "+/"))  # either alphabet of base64 is right in this dialect
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{standard}"}}


def _output(response: dict[str, Any]) -> str:
    """A function's output as text."""
    if list(response) == ["output"]:
        output = response["output"]
        return output if isinstance(output, str) else json_io.write(output).decode()
    return json_io.write(response).decode()


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


_TYPES = frozenset({"string", "number", "integer", "boolean", "array", "object", "null"})
_AS_IS = ("title", "description", "default", "pattern", "minimum", "maximum", "required", "$ref")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


def json_schema(schema: RequestObject) -> dict[str, Any]:
    """Say one schema in JSON Schema.

    Raises:
        HarnessError: it has a type that there is not, or members of a wrong type.
    """
    said: dict[str, Any] = _type(schema) | {name: value for name in _AS_IS if (value := schema.get(name)) is not None}
    if (ref := schema.text("ref")) is not None:
        said["$ref"] = ref
    said |= {name: count for name in _COUNTS if (count := schema.integer(name)) is not None}
    if (form := schema.text("format")) not in {None, "enum"}:  # "enum" repeats that there is one
        said["format"] = form
    if values := schema.values("enum"):
        said["enum"] = values
    if (example := schema.get("example")) is not None:
        said["examples"] = [example]
    said |= _inner(schema)
    return _nullable(said) if schema.flag("nullable") else said


def _type(schema: RequestObject) -> dict[str, Any]:
    kind = (schema.text("type") or "").lower()
    if kind in {"", "type_unspecified"}:
        return {}
    if kind not in _TYPES:
        raise HarnessError(f"{schema.at('type')}: there is no type {kind.upper()!r}", param=schema.at("type"))
    return {"type": kind}


def _inner(schema: RequestObject) -> dict[str, Any]:
    """The schemas within a schema."""
    said: dict[str, Any] = {}
    properties = schema.inner("properties")
    if properties is not None:
        order = schema.texts("propertyOrdering")
        names = [*(name for name in order if name in properties.members), *(name for name in properties.members if name not in order)]
        said["properties"] = {name: json_schema(entry(properties.members[name], properties.at(name))) for name in names}
    if (items := schema.inner("items")) is not None:
        said["items"] = json_schema(items)
    if choices := schema.objects("anyOf"):
        said["anyOf"] = [json_schema(choice) for choice in choices]
    rest = schema.get("additionalProperties")
    if rest is not None:
        said["additionalProperties"] = rest if isinstance(rest, bool) else json_schema(entry(rest, schema.at("additionalProperties")))
    defs = schema.inner("$defs") or schema.inner("defs")
    if defs is not None:
        said["$defs"] = {name: json_schema(entry(inner, defs.at(name))) for name, inner in defs.members.items()}
    return said


def _nullable(said: dict[str, Any]) -> dict[str, Any]:
    if "type" in said:
        said["type"] = [said["type"], "null"]
    if "enum" in said and None not in said["enum"]:
        said["enum"] = [*said["enum"], None]
    if "anyOf" in said:
        said["anyOf"] = [*said["anyOf"], {"type": "null"}]
    return said
