"""Finds in a chat request whether a grammar binds the reply.

The engine decides: an option of the server (`--tool-strict-level`), or its parser of tool calls, may bind the calls of any tools
(`may_be_bound`).
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from tokencache.dialects.chat.sampling import STRICT_TOOLS, recorded
from tokencache.dialects.json_io import NULL, value_of

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag")
_FREE = frozenset({None, "text"})


def is_bound(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Whether the members of a request (raw) certainly bind the reply by a grammar."""
    found = recorded(fields)
    choice = found.get("tool_choice")
    calls = choice == "required" or isinstance(choice, dict) or (STRICT_TOOLS in found and choice != "none")
    return calls or _has_format(found)


def may_be_bound(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Whether a grammar may bind the reply: the request has one, or offers tools."""
    return is_bound(fields) or bool(value_of(fields.get("tools", NULL)) and value_of(fields.get("tool_choice", NULL)) != "none")


def _has_format(found: Mapping[str, Any]) -> bool:
    response, outputs = found.get("response_format"), found.get("structured_outputs")
    formatted = isinstance(response, dict) and response.get("type") not in _FREE
    structured = isinstance(outputs, dict) and any(value is not None for value in outputs.values())
    return formatted or structured or any(found.get(name) is not None for name in _GUIDED)
