"""Responses: errors in OpenAI's vocabulary (platform.openai.com, "Error codes"; openai 3.52 reads `type`, `param` and `code`).

vLLM's types are the names of its exceptions; OpenAI has few types, and a `code` for what harnesses look for: an unknown model,
a response that is not kept, a conversation that has grown too long (Codex then compacts it).


Responses: custom tools, whose input is free text.

Chat knows only functions, so a custom tool is shown to the model as a function with one text, `input` (vLLM 0.32 does
the same: `tool_parsers/utils.py`, `custom_tool_parameters`), and its call is turned back. A custom tool may bring a
grammar. vLLM answers 400 then; here it is told to the model in the description and enforced by nobody: a harness that
always offers such a tool (Codex's `apply_patch`) works, and checks what it is given anyway.

The input streams although it comes as JSON in pieces: whatever escapes of the text are whole are said at once.


Responses: the tools on offer, and which of them the model may choose.

=============  ==========================================================================================================
`function`     the chat function of the same name; `strict` as given
`custom`       a function with one text (`freeform`)
`namespace`    its tools one by one, as `<namespace>__<name>`; a call is said again with name and `namespace` (as vLLM
               0.32 does; Codex 0.169 always offers one and expects the namespace back)
all others     tools that OpenAI runs on its own side (`web_search`, `file_search`, `code_interpreter`, `mcp`, …): left
               out, for the model could call them but nobody would answer. vLLM leaves them out too, and Codex offers
               `web_search` by default. A request that insists on one (`tool_choice`) is refused.
=============  ==========================================================================================================
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tokencache.dialects import json_io
from tokencache.dialects.thinking import read_signature
from tokencache.errors import HarnessError

NO_PREVIOUS = "previous_response_not_found"
_TYPES = {
    "BadRequestError": "invalid_request_error",
    "NotFoundError": "invalid_request_error",
    "NotImplementedError": "invalid_request_error",
    "InternalServerError": "server_error",
    NO_PREVIOUS: "invalid_request_error",
}
"""OpenAI's word for vLLM's (0.32, `entrypoints/utils.py`); types that are not vLLM's stay."""
_TOO_LONG = ("maximum context length", "maximum model length")


def error_members(message: str, kind: str, param: str | None) -> dict[str, Any]:
    """What an error consists of; `kind` is vLLM's type, or ours."""
    code = _code(message, kind, param)
    said = "invalid_request_error" if code == "context_length_exceeded" else _TYPES.get(kind, kind)
    return {"message": message, "type": said, "param": param, "code": code}


def _code(message: str, kind: str, param: str | None) -> str | None:
    if any(words in message for words in _TOO_LONG):
        return "context_length_exceeded"
    if kind == "NotFoundError" and (param == "model" or message.startswith("The model ")):
        return "model_not_found"
    return kind if kind == NO_PREVIOUS else None


_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_UNITS = re.compile(r'(?:[^"\\]+|\\(?:[^u]|u[0-9a-fA-F]{4}))*')
_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")


def shim(name: str, tool: dict[str, Any], path: str) -> dict[str, Any]:
    """Describe a custom tool as the function that the model is shown; `path` says where the tool stood.

    Raises:
        HarnessError: its description or its format is malformed.
    """
    described, form = tool.get("description"), tool.get("format")
    if (described is not None and not isinstance(described, str)) or (form is not None and not isinstance(form, dict)):
        raise HarnessError(f"'{path}' is no custom tool: 'description' is a string, 'format' an object", param=path)
    if form is not None and form.get("type") == "grammar":
        syntax, definition = form.get("syntax"), form.get("definition")
        if not isinstance(syntax, str) or not isinstance(definition, str):
            raise HarnessError(f"'{path}.format' must have 'syntax' and 'definition'", param=f"{path}.format")
        described = f"{described or ''}\n\nThe input must match this grammar ({syntax}):\n{definition}".lstrip()
    text = {"type": "string", "description": "The freeform text payload for this tool."}
    parameters = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    return {"name": name, **({} if described is None else {"description": described}), "parameters": parameters}


class FreeformInput:
    """Reads the input of a custom tool's call out of the arguments, piece by piece."""

    def __init__(self) -> None:
        self._arguments: list[str] = []
        self._said: list[str] = []
        self._rest = ""  # what was not decoded yet
        self._opened = self._closed = False

    def feed(self, piece: str) -> str:
        """Take a piece of the arguments; returns what it adds to the input."""
        self._arguments.append(piece)
        if self._closed:
            return ""
        self._rest += piece
        if not self._opened:
            opening = _OPENING.match(self._rest)
            if opening is None:
                return ""
            self._opened, self._rest = True, self._rest[opening.end() :]
        units = _UNITS.match(self._rest)
        whole = units[0] if units is not None else ""
        self._closed = self._rest[len(whole) : len(whole) + 1] == '"'
        if not self._closed:
            whole = _HALF.sub("", whole)  # waits for its other half
        self._rest = self._rest[len(whole) :]
        try:
            said = json_io.replace_surrogates(json.loads(f'"{whole}"', strict=False))
        except ValueError:  # an escape that JSON does not know
            said = whole
        self._said.append(said)
        return said

    def whole(self) -> str:
        """The whole input: of arguments cut short what was said of it, of others that hold none the arguments themselves."""
        arguments = "".join(self._arguments)
        try:
            read = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            return "".join(self._said) if self._opened else arguments
        text = read.get("input") if isinstance(read, dict) else None
        return json_io.replace_surrogates(text) if isinstance(text, str) else arguments


class ToolName(msgspec.Struct, frozen=True):
    """How the harness calls a tool that the model knows by its flat name."""

    name: str
    namespace: str | None = None
    custom: bool = False


class Offer(msgspec.Struct, frozen=True):
    """The tools of a request: as chat functions in order, the harness's names by flat name, the types left out."""

    functions: list[dict[str, Any]] = []
    names: dict[str, ToolName] = {}
    hosted: frozenset[str] = frozenset()


class ToolSelection(msgspec.Struct, frozen=True):
    """What of an offer may be called: chat's tools and `tool_choice`; `None` where chat is to be told nothing."""

    tools: list[dict[str, Any]] | None = None
    choice: str | dict[str, Any] | None = None


def read_tools(tools: list[Any]) -> Offer:
    """Read `tools`.

    Raises:
        HarnessError: an entry is malformed.
    """
    functions: list[dict[str, Any]] = []
    names: dict[str, ToolName] = {}
    hosted: set[str] = set()
    for i, tool in enumerate(tools):
        path = f"tools[{i}]"
        kind = _kind(tool, path)
        if kind == "namespace":
            inner = tool.get("tools")
            if not isinstance(inner, list):
                raise HarnessError(f"'{path}.tools' must be a list", param=f"{path}.tools")
            listed = [(entry, f"{path}.tools[{j}]") for j, entry in enumerate(inner)]
        else:
            listed = [(tool, path)]
        namespace = _name(tool, path) if kind == "namespace" else None
        for entry, where in listed:
            own = _kind(entry, where)
            if own not in {"function", "custom"}:
                hosted.add(own)
                continue
            name = _name(entry, where)
            flat = flat_name(name, namespace)
            names[flat] = ToolName(name, namespace, own == "custom")
            functions.append({"type": "function", "function": (shim if own == "custom" else _function)(flat, entry, where)})
    return Offer(functions, names, frozenset(hosted))


def choose(offer: Offer, wanted: Any) -> ToolSelection:
    """Read `tool_choice`. Of `allowed_tools` only those are shown to the model that it may call: chat has no other way.

    Raises:
        HarnessError: it is malformed, or names what is not on offer.
    """
    mode = wanted
    shown = offer.functions
    if isinstance(wanted, dict) and wanted.get("type") == "allowed_tools":
        allowed = wanted.get("tools")
        if not isinstance(allowed, list):
            raise HarnessError("'tool_choice.tools' must be a list", param="tool_choice")
        of_ours = [entry for entry in allowed if not isinstance(entry, dict) or str(entry.get("type")) not in offer.hosted]
        flat = {_chosen(offer, entry) for entry in of_ours}
        shown = [tool for tool in shown if tool["function"]["name"] in flat]
        mode = wanted.get("mode", "auto")
    if isinstance(mode, dict):
        return ToolSelection(shown, {"type": "function", "function": {"name": _chosen(offer, mode)}})
    if not isinstance(mode, str) or mode not in {"auto", "none", "required"}:
        raise HarnessError("'tool_choice' must be 'auto', 'none', 'required' or an object", param="tool_choice")
    if not shown:
        if mode == "required":
            raise HarnessError("'tool_choice' is 'required', but no tool is on offer that the model can call", param="tool_choice")
        return ToolSelection()
    return ToolSelection(shown, mode if mode != "auto" else None)


def _chosen(offer: Offer, entry: Any) -> str:
    """The flat name of a tool that is referred to."""
    kind = entry.get("type") if isinstance(entry, dict) else entry
    if not isinstance(entry, dict) or not isinstance(kind, str) or kind not in {"function", "custom"}:
        raise HarnessError(f"'tool_choice': tools of type {kind!r} cannot be chosen here", param="tool_choice")
    name = entry.get("name")
    found = [flat for flat, tool in offer.names.items() if isinstance(name, str) and name in {flat, tool.name}]
    exact = [flat for flat in found if flat == name] or found
    if len(exact) != 1:
        raise HarnessError(f"'tool_choice': {name!r} is not in 'tools', or is there more than once", param="tool_choice")
    return exact[0]


def _kind(tool: Any, path: str) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        raise HarnessError(f"'{path}' must be an object with a 'type'", param=path)
    return kind


def _name(tool: dict[str, Any], path: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise HarnessError(f"'{path}.name' must be a string that is not empty", param=f"{path}.name")
    return name


def _function(name: str, tool: dict[str, Any], path: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    for member, kind in (("description", str), ("parameters", dict), ("strict", bool)):
        value = tool.get(member)
        if value is None:
            continue
        if not isinstance(value, kind):
            raise HarnessError(f"'{path}.{member}' must be of type {kind.__name__}", param=f"{path}.{member}")
        function[member] = value
    return function


Item = tuple[bytes, Any]
"""An item's JSON, `b""` where nobody keeps it, and the same decoded."""
INLINE = "rst"
"""What the id of a reasoning item begins with that stood in the text (`dialects.thinking`)."""
_ITEM_ID = re.compile(r"(rs|rst|msg|fc|ctc)_([0-9a-f]{32})_\d+")


def item_id(prefix: str, handle: str, place: int) -> str:
    """Name an output item: its kind's prefix, the call's handle, its place in the output."""
    return f"{prefix}_{handle}_{place}"


def handle_of(item: Mapping[str, Any]) -> str:
    """Find our handle in an item; `""` if it has none."""
    sealed, _ = read_signature(item.get("encrypted_content"))
    ours = None if sealed else own_id(item)
    return ours[2] if ours is not None else sealed


def own_id(item: Mapping[str, Any]) -> re.Match[str] | None:
    """Match an item's id if this dialect wrote it; groups: prefix, handle."""
    name = item.get("id")
    return _ITEM_ID.fullmatch(name) if isinstance(name, str) else None


def flat_name(name: str, namespace: str | None) -> str:
    """Name a function of a namespace as the model is shown it (as vLLM 0.32 does)."""
    return f"{namespace}__{name}" if namespace else name
