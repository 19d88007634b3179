"""Responses: the tools on offer, and which of them the model may choose.

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

from typing import Any

import msgspec

from tokencache.dialects.responses.freeform import shim
from tokencache.dialects.responses.items import flat_name
from tokencache.errors import HarnessError


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
