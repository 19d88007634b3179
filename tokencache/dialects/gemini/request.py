"""Translates a Gemini request into a chat request: contents, settings and tools, and their schemas.

Contents (https://ai.google.dev/api/caching#Content):

* Consecutive contents of the model are one reply and become one message, because the Python SDK stores each chunk of a stream as a
  separate content. Their texts are joined without a separator (the engine wrote one string, which the dialect split), and so are thoughts.
  Two contents with different handles are two replies.
* Texts of the user and of `systemInstruction` stay parts, which vLLM joins with newlines; a single text becomes a string.
* A function's response becomes a tool message. By the API's definition (google-genai 3.4, `FunctionResponse.response`) "output" holds the
  output, and without "output" and "error" the whole object is the output. So `{"output": "text"}` becomes that text, as a chat harness
  would send it; anything else becomes the object's compact JSON. In one content, responses precede texts, as in vLLM's Messages.
* Calls and responses may lack ids. Then the n-th response with a name answers the n-th call with that name in the previous reply. Gemini
  CLI (0.61) puts `<name>__` before the ids that it received; this prefix is removed.
* An image may be at a public URL (`fileData`), as in Google's API. A part that chat has no equivalent for is refused by name: files
  that Google stores, executable code, sound. Data that a function returns
  (in its response, or after it in the same content, as Gemini CLI sends it) is left out unless it is an image.

Settings (https://ai.google.dev/api/generate-content#generationconfig): those that vLLM cannot follow are refused by name (tools that Google
runs, several candidates, sound). Those that do not change the text are ignored (`safetySettings`, `labels`, `responseLogprobs`).
`thinkingConfig` is translated like this:

* a `thinkingBudget` of 0 turns thinking off: `reasoning_effort: "none"`, as vLLM 0.32 does for Messages;
* any other budget is ignored. In this dialect it is a guideline, Gemini CLI sends one with every call, and vLLM refuses its own
  `thinking_token_budget` if it has no reasoning parser (0.32, `v1/engine/input_processor.py`);
* a `thinkingLevel` becomes the `reasoning_effort` of the same name;
* without `includeThoughts` the client gets no thoughts, and the turn is recorded as one that showed none.

A single entry of `allowedFunctionNames` becomes a named `tool_choice`. For several entries, only these tools are offered, which changes the
prompt, because vLLM 0.32 has no `allowed_tools`.

Schemas (https://ai.google.dev/api/caching#Schema): `parameters` and `responseSchema` are in a form of OpenAPI 3.0: types are in upper case,
`nullable` is a separate member, integers may be strings, and members have either spelling. Members that JSON Schema has too stay; the
others are translated, or left out if they constrain nothing. `parametersJsonSchema`, `responseJsonSchema` and that of `responseFormat` are
JSON Schema already.
"""

from collections import deque
from typing import Any

from tokencache.dialects import json_io
from tokencache.dialects.gemini.vocabulary import RequestObject, entry, wrong
from tokencache.dialects.thinking import NOT_IN_TEXT, Mark, folded, read_signature
from tokencache.errors import HarnessError

_USERS = ("user", "function", "tool")
"""Roles of what is not the model's. google-genai's own examples return results as `tool` (3.4, README)."""
_BESIDE = frozenset(
    {"thought", "thoughtSignature", "thought_signature", "mediaResolution", "media_resolution", "mediaProcessing", "media_processing"}
    | {f"{kind}{name}" for kind in ("video", "part", "speech", "document", "spreadsheet", "audio") for name in ("Metadata", "_metadata")}
    | {"callIndex"}
)
"""Members of a part besides its data (google-genai 3.4, `types.Part`; `callIndex` is Gemini CLI's own)."""
_SIGNATURE = "thoughtSignature"
_MEDIA = ("inlineData", "fileData")
_IMAGES = "image/"
_STORED = "https://generativelanguage.googleapis.com/"
"""Where Google keeps the files of its clients: nobody can read them without the client's key."""
_STANDARD_BASE64 = str.maketrans("-_", "+/")


class Contents:
    """Translates a conversation: `system`, then `add` for each content, then `close`.

    Attributes:
        messages: chat messages.
        handles: index of a message → the handle that the client sent back with it.
        left_out: rules by which parts were left out.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.handles: dict[int, str] = {}
        self.left_out: tuple[str, ...] = ()
        self._marks: dict[int, Mark] = {}
        """Where the thinking of a message with a handle was."""
        self._reply: dict[str, Any] | None = None
        """The model's message that its next contents belong to."""
        self._open: dict[int, str] = {}
        """The ids of the reply's calls without a response, by number."""
        self._numbers: dict[tuple[str, str], deque[int]] = {}
        """The numbers of the reply's calls with an id, and with a name."""

    def system(self, instruction: Any) -> None:
        """Add the system instruction: a string or a content.

        Raises:
            HarnessError: it is neither, or has parts other than text.
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
        """Add one content.

        Raises:
            HarnessError: chat has no equivalent.
        """
        role = content.text("role") or "user"
        if role == "model":
            self._add_reply(content)
        elif role in _USERS:
            self._reply = None
            self._add_user(content)
        else:
            raise HarnessError(f"{content.at('role')}: please use a valid role: model, {', '.join(_USERS)}", param=content.at("role"))

    def close(self) -> None:
        """Complete the model's messages, and put thinking that was in a reply's text back into it."""
        for message in self.messages:
            if message["role"] == "assistant":
                message |= {name: "".join(message[name]) for name in ("content", "reasoning") if name in message}
                if "tool_calls" not in message:
                    message.setdefault("content", "")
                elif message.get("content") == "":
                    del message["content"]
        for at, mark in self._marks.items():
            self.messages[at] = folded(self.messages[at], mark)

    def _add_reply(self, content: RequestObject) -> None:
        """Add a content of the model to its reply."""
        parts = content.objects("parts")
        signatures = [read_signature(part.get(_SIGNATURE)) for part in parts]
        handle, mark = next((found for found in signatures if found[0]), (None, NOT_IN_TEXT))
        at = len(self.messages) - 1
        if self._reply is None or (handle is not None and self.handles.get(at, handle) != handle):
            self._reply = {"role": "assistant"}
            self.messages.append(self._reply)
            self._open, self._numbers = {}, {}
            at += 1
        if handle is not None:
            self.handles[at], self._marks[at] = handle, mark
        for part in parts:
            kind = _kind(part)
            if kind == "text":
                thought = len(part.members) > 1 and part.flag("thought")  # most texts have no other member
                name = "reasoning" if thought else "content"
                self._reply.setdefault(name, []).append(part.text("text") or "")
            elif kind == "functionCall":
                self._call(self._reply, part)
            elif kind:
                raise HarnessError(f"{part.path}: {kind!r} is not supported in a content of the model", param=part.path)

    def _call(self, reply: dict[str, Any], part: RequestObject) -> None:
        call = part.inner("functionCall")
        if call is None:
            raise wrong(part.at("functionCall"), "an object", None)
        name = call.text("name")
        if not name:
            raise HarnessError(f"{call.at('name')} is missing", param=call.at("name"))
        args = call.inner("args")
        given = _own_id(call.text("id"), name) or f"call_{len(self.messages) - 1}_{len(self._open)}"
        number = len(reply.get("tool_calls", ()))
        self._open[number] = given
        for key in (("id", given), ("name", name)):
            self._numbers.setdefault(key, deque()).append(number)
        function = {"name": name, "arguments": json_io.write(args.members if args is not None else {}).decode()}
        reply.setdefault("tool_calls", []).append({"id": given, "type": "function", "function": function})

    def _add_user(self, content: RequestObject) -> None:
        """Add a content of the user, or responses of functions."""
        parts: list[dict[str, Any]] = []
        answers = False  # what follows a response may belong to it
        for part in content.objects("parts"):
            kind = _kind(part)
            if kind == "functionResponse":
                self.messages.append(self._result(part))
                answers = True
            elif kind == "text":
                parts.append(_text_part(part.text("text") or ""))
            elif kind in _MEDIA:
                parts += self._images([part]) if answers else [_image(part)]
            elif kind:
                raise HarnessError(f"{part.path}: {kind!r} is not supported: chat completions have no equivalent", param=part.path)
        if parts:
            self.messages.append({"role": "user", "content": _alone(parts)})

    def _result(self, part: RequestObject) -> dict[str, Any]:
        response = part.inner("functionResponse")
        if response is None:
            raise wrong(part.at("functionResponse"), "an object", None)
        name = response.text("name") or ""
        body = response.inner("response")
        text = _output(body.members if body is not None else {})
        images = self._images(response.objects("parts"))
        content = [_text_part(text), *images] if images else text
        return {"role": "tool", "tool_call_id": self._answered(response, name), "content": content}

    def _images(self, parts: list[RequestObject]) -> list[dict[str, Any]]:
        """Translate the data of a function's response; only images stay, because a model that reads a PDF must not end its rollout."""
        images = [part for part in parts if (blob := _blob(part)) is None or (blob.text("mimeType") or "").startswith(_IMAGES)]
        if len(images) < len(parts):
            self.left_out = ("result-parts",)
        return [*map(_image, images)]

    def _answered(self, response: RequestObject, name: str) -> str:
        """Return the id of the call that a response answers."""
        given = _own_id(response.text("id"), name)
        numbers = self._numbers.get(("name", name) if given is None else ("id", given), ())
        while numbers:
            if (call := self._open.pop(numbers.popleft(), None)) is not None:
                return call
        return given or f"call_{len(self.messages)}"


def _kind(part: RequestObject) -> str:
    """Return the kind of a part, the name of its member with data; `""` if it has only a signature."""
    named = [name for name, value in part.members.items() if value is not None and name not in _BESIDE]
    if len(named) == 1:
        return _camel(named[0])
    if named:
        raise HarnessError(f"{part.path} must have one kind of data, not {' and '.join(map(_camel, named))}", param=part.path)
    if part.get(_SIGNATURE) is None:
        raise HarnessError(f"{part.path} has no data: it must have text, functionCall, functionResponse or inlineData", param=part.path)
    return ""


def _camel(name: str) -> str:
    if "_" not in name:  # the fast path, for every part of a long history
        return name
    head, *humps = name.split("_")
    return head + "".join(hump[:1].upper() + hump[1:] for hump in humps)


def _own_id(given: str | None, name: str) -> str | None:
    """Return a call's id as this dialect wrote it, without the prefix of Gemini CLI."""
    return (given.removeprefix(f"{name}__") or given) if given else None


def _words(part: RequestObject) -> str:
    kind = _kind(part)
    if kind not in {"", "text"}:
        raise HarnessError(f"{part.path}: {kind!r} is not supported in the system instruction", param=part.path)
    return part.text("text") or ""


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _alone(parts: list[dict[str, Any]]) -> Any:
    """Return parts as a message's content: a single text becomes a string."""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _blob(part: RequestObject) -> RequestObject | None:
    return next((blob for name in _MEDIA if (blob := part.inner(name)) is not None), None)


def _image(part: RequestObject) -> dict[str, Any]:
    """Translate an image into chat's `image_url`; the engine decides whether its model accepts images."""
    blob = _blob(part)
    if blob is None:
        raise HarnessError(f"{part.path} is not supported: only inlineData and fileData are", param=part.path)
    kind, data, uri = blob.text("mimeType") or "", blob.text("data") or "", blob.text("fileUri")
    if not kind.startswith(_IMAGES):
        raise HarnessError(f"{blob.path}: data of type {kind!r} is not supported, only images are", param=blob.at("mimeType"))
    if uri is not None:
        if not uri.startswith(("https://", "http://")) or uri.startswith(_STORED):
            at = blob.at("fileUri")
            raise HarnessError(f"{at}: files are not stored here; send inlineData or a public URL", param=at)
        return {"type": "image_url", "image_url": {"url": uri}}
    # protocol buffers in JSON accept both alphabets, and no padding (https://protobuf.dev/programming-guides/json/); vLLM 0.32 does not
    standard = data.translate(_STANDARD_BASE64).rstrip("=")
    standard += "=" * (-len(standard) % 4)
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{standard}"}}


def _output(response: dict[str, Any]) -> str:
    """Return a function's output as text."""
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
    """Translate everything besides the conversation into members of a chat request.

    Raises:
        HarnessError: a member is not supported or has the wrong type.
    """
    if request.text("cachedContent"):
        raise HarnessError("cachedContent is not supported: send the contents themselves", param="cachedContent")
    config = request.inner("generationConfig") or RequestObject({}, "generationConfig")
    chat = _sampling(config) | _thinking(config)
    if form := _response_format(config):
        chat["response_format"] = form
    return chat | _tools(request)


def _sampling(config: RequestObject) -> dict[str, Any]:
    chat: dict[str, Any] = {}
    for name, theirs in _NUMBERS.items():
        if (number := config.number(name)) is not None:
            chat[theirs] = number
    for name, theirs in _INTEGERS.items():
        if (whole := config.integer(name)) is not None:
            chat[theirs] = whole
    if stops := config.texts("stopSequences"):
        chat["stop"] = stops
    if (config.integer("candidateCount") or 1) != 1:
        raise HarnessError("generationConfig.candidateCount: only one candidate is supported", param="generationConfig.candidateCount")
    for modality in config.texts("responseModalities"):
        if modality.upper() != "TEXT":
            at = config.at("responseModalities")
            raise HarnessError(f"{at}: {modality} is not supported, only TEXT is", param=at)
    if config.inner("speechConfig") is not None:
        raise HarnessError("generationConfig.speechConfig is not supported", param="generationConfig.speechConfig")
    return chat


def _thinking(config: RequestObject) -> dict[str, Any]:
    thinking = config.inner("thinkingConfig") or RequestObject({}, config.at("thinkingConfig"))
    chat: dict[str, Any] = {} if thinking.flag("includeThoughts") else {"include_reasoning": False}
    level = (thinking.text("thinkingLevel") or "").upper()
    if thinking.integer("thinkingBudget") == 0:
        chat["reasoning_effort"] = "none"
    elif level in _EFFORTS:
        chat["reasoning_effort"] = _EFFORTS[level]
    elif level not in {"", "THINKING_LEVEL_UNSPECIFIED"}:
        at = thinking.at("thinkingLevel")
        raise HarnessError(f"{at}: unknown level {level!r}; known are {', '.join(_EFFORTS)}", param=at)
    return chat


def _response_format(config: RequestObject) -> dict[str, Any] | None:
    """Translate `responseFormat`, or the older members in its place."""
    texts: list[RequestObject] = []
    for form in config.objects("responseFormat"):
        if others := [name for name in form.named() if name != "text"]:
            raise HarnessError(f"{form.at(others[0])} is not supported, only text is", param=form.at(others[0]))
        texts += [text] if (text := form.inner("text")) is not None else []
    if texts:
        given = texts[0].inner("schema")
        kind, schema = _text_kind(texts[0], "mimeType"), given.members if given is not None else None
    else:
        kind, schema = _text_kind(config, "responseMimeType"), _schema(config, "responseJsonSchema", "responseSchema")
    if kind != _JSON:
        return None
    if schema is None:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}


def _text_kind(form: RequestObject, name: str) -> str:
    """Read a media type, which may also be a name of Google's enum: `APPLICATION_JSON`."""
    given = form.text(name) or ""
    kind = given.lower().replace("_", "/", 1)
    if kind not in {"", _JSON, _PLAIN}:
        raise HarnessError(f"{form.at(name)}: {given!r} is not supported, only {_JSON} and {_PLAIN} are", param=form.at(name))
    return kind


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
        names = set(allowed)
        tools = [tool for tool in tools if tool["function"]["name"] in names]
    match mode:
        case "AUTO" | "VALIDATED" | "MODE_UNSPECIFIED":
            return {"tools": tools}
        case "NONE":
            return {"tools": tools, "tool_choice": "none"}
        case "ANY":
            return {"tools": tools, "tool_choice": "required"}
    raise HarnessError(f"{choice.at('mode')}: unknown mode {mode!r}", param=choice.at("mode"))


def _check_allowed(choice: RequestObject, mode: str, allowed: list[str], tools: list[dict[str, Any]]) -> None:
    at = choice.at("allowedFunctionNames")
    if mode not in {"ANY", "VALIDATED"}:
        raise HarnessError(f"{at} can be set in mode ANY only, not in mode {mode}", param=at)
    if unknown := set(allowed) - {tool["function"]["name"] for tool in tools}:
        raise HarnessError(f"{at}: no function is declared as {', '.join(sorted(unknown))}", param=at)


def _functions(tool: RequestObject) -> list[dict[str, Any]]:
    """Translate the functions that a tool declares."""
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


def _schema(chat: RequestObject, plain: str, theirs: str) -> dict[str, Any] | None:
    """Return the schema of two alternative members: `plain` in JSON Schema, `theirs` in Gemini's own form."""
    if (schema := chat.inner(plain)) is not None:
        return schema.members
    own = chat.inner(theirs)
    return json_schema(own) if own is not None else None


_TYPES = frozenset({"string", "number", "integer", "boolean", "array", "object", "null"})
_AS_IS = ("title", "description", "default", "pattern", "minimum", "maximum", "required", "$ref")
_SEVERAL = ("anyOf", "oneOf", "allOf")
"""Members with several schemas. Google's API defines the first; AI SDK (`@ai-sdk/google`) sends all three."""
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


def json_schema(schema: RequestObject) -> dict[str, Any]:
    """Translate one schema into JSON Schema.

    Raises:
        HarnessError: it has an unknown type, or members of the wrong type.
    """
    translated: dict[str, Any] = _type(schema) | {name: value for name in _AS_IS if (value := schema.get(name)) is not None}
    if (ref := schema.text("ref")) is not None:
        translated["$ref"] = ref
    translated |= {name: count for name in _COUNTS if (count := schema.integer(name)) is not None}
    if (form := schema.text("format")) not in {None, "enum"}:  # "enum" adds nothing to the member of that name
        translated["format"] = form
    if values := schema.values("enum"):
        translated["enum"] = values
    if (example := schema.get("example")) is not None:
        translated["examples"] = [example]
    translated |= _inner(schema)
    return _nullable(translated) if schema.flag("nullable") else translated


def _type(schema: RequestObject) -> dict[str, Any]:
    kind = (schema.text("type") or "").lower()
    if kind in {"", "type_unspecified"}:
        return {}
    if kind not in _TYPES:
        raise HarnessError(f"{schema.at('type')}: unknown type {kind.upper()!r}", param=schema.at("type"))
    return {"type": kind}


def _inner(schema: RequestObject) -> dict[str, Any]:
    """Translate the schemas within a schema."""
    translated: dict[str, Any] = {}
    properties = schema.inner("properties")
    if properties is not None:
        order = [name for name in schema.texts("propertyOrdering") if name in properties.members]
        names = dict.fromkeys([*order, *properties.members])
        translated["properties"] = {name: json_schema(entry(properties.members[name], properties.at(name))) for name in names}
    if (items := schema.inner("items")) is not None:
        translated["items"] = json_schema(items)
    for name in _SEVERAL:
        if choices := schema.objects(name):
            translated[name] = [json_schema(choice) for choice in choices]
    rest = schema.get("additionalProperties")
    if rest is not None:
        translated["additionalProperties"] = rest if isinstance(rest, bool) else json_schema(entry(rest, schema.at("additionalProperties")))
    defs = schema.inner("$defs") or schema.inner("defs")
    if defs is not None:
        translated["$defs"] = {name: json_schema(entry(inner, defs.at(name))) for name, inner in defs.members.items()}
    return translated


def _nullable(translated: dict[str, Any]) -> dict[str, Any]:
    if "type" in translated:
        translated["type"] = [translated["type"], "null"]
    if "enum" in translated and None not in translated["enum"]:
        translated["enum"] = [*translated["enum"], None]
    for name in _SEVERAL[:2]:
        if name in translated:
            translated[name] = [*translated[name], {"type": "null"}]
    return translated
