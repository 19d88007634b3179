"""Reads the names of the tools in a request, once a rule needs them."""

from typing import Any

import msgspec


class ToolNames:
    """The names of the tools in a request of chat completions. Few calls need them, so the tools are parsed when a name is looked up.

    `tools` is the raw JSON list; `None` if there are none. What is not a function has no name.
    """

    __slots__ = ("_names", "_tools")

    def __init__(self, tools: msgspec.Raw | None) -> None:
        self._tools = tools
        self._names: frozenset[str] | None = None

    def __contains__(self, name: object) -> bool:
        if self._names is None:
            self._names = _names(self._tools)
        return name in self._names


def _names(tools: msgspec.Raw | None) -> frozenset[str]:
    try:
        entries: Any = msgspec.json.decode(tools) if tools is not None else None
    except (ValueError, RecursionError):
        return frozenset()
    functions = [entry.get("function") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    return frozenset(name for function in functions if isinstance(function, dict) and isinstance(name := function.get("name"), str))
