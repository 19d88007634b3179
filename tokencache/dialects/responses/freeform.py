"""Responses: custom tools, whose input is free text.

Chat knows only functions, so a custom tool is shown to the model as a function with one text, `input` (vLLM 0.32 does
the same: `tool_parsers/utils.py`, `custom_tool_parameters`), and its call is turned back. A custom tool may bring a
grammar. vLLM answers 400 then; here it is told to the model in the description and enforced by nobody: a harness that
always offers such a tool (Codex's `apply_patch`) works, and checks what it is given anyway.

The input streams although it comes as JSON in pieces: whatever escapes of the text are whole are said at once.
"""

import json
import re
from typing import Any

from tokencache.dialects import lenient
from tokencache.errors import HarnessError

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
            said = lenient.whole(json.loads(f'"{whole}"', strict=False))
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
        return lenient.whole(text) if isinstance(text, str) else arguments
