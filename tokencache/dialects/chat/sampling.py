"""Finds what bends or replaces the policy's choice of the next token in a request, so that it is recorded with the turn.

Such a member (`members.BENDING`) changes the distribution that a token is drawn from, puts another token in its place, or decides where the
reply ends. It is recorded as it was sent.

What no member shows: the engine's own defaults (`--generation-config`, `--override-generation-config`, a watermark), its own logits
processors (`--logits-processors`), and a grammar for all tool calls (`--tool-strict-level`).
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from tokencache.dialects.json_io import member, value_of
from tokencache.dialects.members import RECORDED

STRICT_TOOLS = "strict_tools"
"""The name under which the tools with `strict` are recorded: a grammar forces the arguments of their calls (vLLM 0.32)."""

BEAM_SEARCH = "beam-search"
"""What a reply that was selected among several is called in incidents."""


def recorded(fields: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """Return the members of a request (raw) that bend or replace the choice, with their values, and the names of strict tools."""
    found = {name: value_of(fields[name]) for name in RECORDED if name in fields}
    if b'"strict"' in bytes(fields.get("tools", b"")):
        tools = value_of(fields["tools"])
        strict = [name for tool in tools if isinstance(tool, dict) and (name := _strict(tool))] if isinstance(tools, list) else []
        if strict:
            found[STRICT_TOOLS] = strict
    return found


def _strict(tool: Mapping[str, Any]) -> str:
    """Return the name of a tool with `strict`; `""` for any other."""
    function = tool.get("function")
    return str(function.get("name", "")) if isinstance(function, dict) and function.get("strict") is True else ""


def is_search(fields: dict[str, msgspec.Raw]) -> bool:
    """Whether a request selects its reply among several (beam search): none of its tokens is a sample of the policy.

    Raises:
        HarnessError: the member has the wrong type.
    """
    return "use_beam_search" in fields and bool(member(fields, "use_beam_search", (bool,), False))
