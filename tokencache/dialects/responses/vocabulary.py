"""Errors, tools and item ids of the Responses dialect.

Errors (platform.openai.com, "Error codes"; openai 3.52 reads `type`, `param` and `code`): vLLM's types are the names of its exceptions.
OpenAI has few types, and a `code` for errors that clients handle: an unknown model, a response that is not stored, a conversation that
is too long (Codex then compacts it).

Tools:

=============  ==========================================================================================================
`function`     the chat function of the same name; `strict` unchanged
`custom`       a function with one string, `input` (vLLM 0.32: `tool_parsers/utils.py`, `custom_tool_parameters`). vLLM refuses a
               tool with a grammar. Here the grammar is part of the description, and nothing enforces it. So clients that always
               offer such a tool work (Codex's `apply_patch`); they check the input anyway
`namespace`    its tools, as `<namespace>__<name>`; a call is returned with name and `namespace` (as vLLM 0.32 does;
               Codex 0.169 always offers one and expects the namespace in the call)
all others     tools that OpenAI runs on its servers (`web_search`, `file_search`, `code_interpreter`, `mcp`, …): left out,
               because calls of them would get no answer. vLLM leaves them out too, and Codex offers `web_search` by default.
               A request that requires one (`tool_choice`) is refused
=============  ==========================================================================================================

Tools may also be in items (`additional_tools`): Codex 0.171 offers all its tools there for models that it knows by name. Templates see one
list.

The input of a custom tool is streamed, although it arrives as pieces of a JSON string: every complete escape is decoded and sent at once.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tokencache.core import strict_json
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
"""OpenAI's error types by vLLM's (0.32, `entrypoints/utils.py`); other types stay."""
_TOO_LONG = ("maximum context length", "maximum model length")


def error_members(message: str, kind: str, param: str | None) -> dict[str, Any]:
    """Return the members of an error; `kind` is vLLM's type or the proxy's."""
    code = _code(message, kind, param)
    named = "invalid_request_error" if code == "context_length_exceeded" else _TYPES.get(kind, kind)
    return {"message": message, "type": named, "param": param, "code": code}


def _code(message: str, kind: str, param: str | None) -> str | None:
    if any(words in message for words in _TOO_LONG):
        return "context_length_exceeded"
    if kind == "NotFoundError" and (param == "model" or message.startswith("The model ")):
        return "model_not_found"
    return kind if kind == NO_PREVIOUS else None


_OPENING = ("{", '"input"', ":", '"')
_UNITS = re.compile(r'(?:[^"\\]++|\\(?:[^u]|u[0-9a-fA-F]{4}))*+')
_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")
_LONGEST_ESCAPE = 12
"""Characters of a surrogate pair, the longest escape that is decoded as a whole."""


def shim(name: str, tool: dict[str, Any], path: str) -> dict[str, Any]:
    """Describe a custom tool as a function for the model; `path` names the tool in errors.

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
    """Extracts the input of a custom tool's call from its arguments, piece by piece."""

    def __init__(self) -> None:
        self._arguments: list[str] = []
        self._decoded: list[str] = []
        self._rest = ""  # characters that are not decoded yet
        self._opening: tuple[str, ...] = _OPENING  # what precedes the input and has not arrived
        self._closed = False  # whether no more of the input can be decoded

    def feed(self, piece: str) -> str:
        """Add a piece of the arguments; returns the text that it adds to the input."""
        self._arguments.append(piece)
        if self._closed:
            return ""
        self._rest += piece
        while self._opening:
            self._rest, token = self._rest.lstrip(), self._opening[0]
            if not self._rest.startswith(token):
                self._closed = not token.startswith(self._rest)
                return ""
            self._opening, self._rest = self._opening[1:], self._rest[len(token) :]
        units = _UNITS.match(self._rest)
        whole = units[0] if units is not None else ""
        self._closed = self._rest[len(whole) : len(whole) + 1] == '"'
        if not self._closed:
            whole = _HALF.sub("", whole)  # the other half of a surrogate pair is missing
        self._rest = self._rest[len(whole) :]
        self._closed = self._closed or len(self._rest) > _LONGEST_ESCAPE
        try:
            text = strict_json.replace_surrogates(json.loads(f'"{whole}"', strict=False))
        except ValueError:  # an escape that JSON does not define
            text = whole
        self._decoded.append(text)
        return text

    def whole(self) -> str:
        """Return the whole input: the decoded part if the arguments were cut off, the arguments themselves if they contain no input."""
        arguments = "".join(self._arguments)
        try:
            read = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            return "".join(self._decoded) if not self._opening else arguments
        text = read.get("input") if isinstance(read, dict) else None
        return strict_json.replace_surrogates(text) if isinstance(text, str) else arguments


class ToolName(msgspec.Struct, frozen=True):
    """The client's name of a tool that the model knows by its flat name."""

    name: str
    namespace: str | None = None
    custom: bool = False


class Offer(msgspec.Struct, frozen=True):
    """The tools of a request: chat functions, the client's names by flat name, and the types of tools that were left out."""

    functions: list[dict[str, Any]] = []
    names: dict[str, ToolName] = {}
    hosted: frozenset[str] = frozenset()


class ToolSelection(msgspec.Struct, frozen=True):
    """The tools of an offer that may be called: chat's `tools` and `tool_choice`; `None` leaves the member out."""

    tools: list[dict[str, Any]] | None = None
    choice: str | dict[str, Any] | None = None


def read_tools(lists: Mapping[str, list[Any]]) -> Offer:
    """Read lists of tools, each by its path in the request: `tools`, and those of `additional_tools` items. The last of a name counts.

    Raises:
        HarnessError: an entry is malformed.
    """
    functions: dict[str, dict[str, Any]] = {}
    names: dict[str, ToolName] = {}
    hosted: set[str] = set()
    for path, tool in _entries(lists):
        kind = _kind(tool, path)
        inner = {f"{path}.tools": tool.get("tools")} if kind == "namespace" else None
        namespace = _name(tool, path) if inner is not None else None
        for where, entry in [(path, tool)] if inner is None else _entries(inner):
            own = _kind(entry, where)
            if own not in {"function", "custom"}:
                hosted.add(own)
                continue
            name = _name(entry, where)
            flat = flat_name(name, namespace)
            names[flat] = ToolName(name, namespace, own == "custom")
            functions[flat] = {"type": "function", "function": (shim if own == "custom" else _function)(flat, entry, where)}
    return Offer([*functions.values()], names, frozenset(hosted))


def _entries(lists: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of lists, each with its path."""
    for path, listed in lists.items():
        if not isinstance(listed, list):
            raise HarnessError(f"'{path}' must be a list", param=path)
        yield from ((f"{path}[{i}]", entry) for i, entry in enumerate(listed))


def choose(offer: Offer, wanted: Any) -> ToolSelection:
    """Read `tool_choice`. For `allowed_tools` only the allowed tools are offered to the model, because chat has no equivalent.

    Raises:
        HarnessError: it is malformed, or names a tool that is not offered.
    """
    mode = wanted
    shown = offer.functions
    if isinstance(wanted, dict) and wanted.get("type") == "allowed_tools":
        allowed = wanted.get("tools")
        if not isinstance(allowed, list):
            raise HarnessError("'tool_choice.tools' must be a list", param="tool_choice")
        of_ours = [entry for entry in allowed if not isinstance(entry, dict) or str(entry.get("type")) not in offer.hosted]
        by_name = _by_name(offer)
        flat = {_chosen(by_name, entry) for entry in of_ours}
        shown = [tool for tool in shown if tool["function"]["name"] in flat]
        mode = wanted.get("mode", "auto")
    if isinstance(mode, dict):
        return ToolSelection(shown, {"type": "function", "function": {"name": _chosen(_by_name(offer), mode)}})
    if not isinstance(mode, str) or mode not in {"auto", "none", "required"}:
        raise HarnessError("'tool_choice' must be 'auto', 'none', 'required' or an object", param="tool_choice")
    if not shown:
        if mode == "required":
            raise HarnessError("'tool_choice' is 'required', but no tool is offered that the model can call", param="tool_choice")
        return ToolSelection()
    return ToolSelection(shown, mode if mode != "auto" else None)


def _by_name(offer: Offer) -> dict[str, str]:
    """Map each name of a tool, its flat name or the client's, to its flat name; `""` for a name that several tools have."""
    found: dict[str, str] = {}
    for flat, tool in offer.names.items():
        found[tool.name] = "" if tool.name in found else flat
    return found | {flat: flat for flat in offer.names}


def _chosen(by_name: dict[str, str], entry: Any) -> str:
    """Return the flat name of a tool reference."""
    kind = entry.get("type") if isinstance(entry, dict) else entry
    if not isinstance(entry, dict) or not isinstance(kind, str) or kind not in {"function", "custom"}:
        raise HarnessError(f"'tool_choice': tools of type {kind!r} cannot be chosen here", param="tool_choice")
    name = entry.get("name")
    flat = by_name.get(name) if isinstance(name, str) else None
    if not flat:
        raise HarnessError(f"'tool_choice': {name!r} is not in 'tools', or is there more than once", param="tool_choice")
    return flat


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
"""An item's JSON, `b""` if it is not stored, and its decoded form."""
INLINE, INLINE_CLOSED = "rst", "rsc"
"""Prefixes of the id of a reasoning item whose thinking was in the text (`dialects.thinking`): of any, and of one that is known to be
closed when the item begins. A streamed item begins before that is known."""
_ITEM_ID = re.compile(r"(rs|rst|rsc|msg|fc|ctc)_([0-9a-f]{32})_\d+")


def item_id(prefix: str, handle: str, index: int) -> str:
    """Make the id of an output item: the prefix of its kind, the call's handle, its index in the output."""
    return f"{prefix}_{handle}_{index}"


def handle_of(item: Mapping[str, Any]) -> str:
    """Find the handle in an item; `""` if it has none."""
    sealed, _ = read_signature(item.get("encrypted_content"))
    ours = None if sealed else own_id(item)
    return ours[2] if ours is not None else sealed


def own_id(item: Mapping[str, Any]) -> re.Match[str] | None:
    """Match an item's id if this dialect wrote it; groups: prefix, handle."""
    name = item.get("id")
    return _ITEM_ID.fullmatch(name) if isinstance(name, str) else None


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model knows a function in a namespace, as vLLM 0.32 makes it."""
    return f"{namespace}__{name}" if namespace else name
