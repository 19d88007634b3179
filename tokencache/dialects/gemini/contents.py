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
"""

from typing import Any

from tokencache.dialects import lenient
from tokencache.dialects.gemini.entry import RequestObject, wrong
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
        function = {"name": name, "arguments": lenient.write(args.members if args is not None else {}).decode()}
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
        return output if isinstance(output, str) else lenient.write(output).decode()
    return lenient.write(response).decode()
