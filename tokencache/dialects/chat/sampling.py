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


NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "temperature": (1, None),
    "top_p": (1, None),
    "top_k": (0, -1, None),
    "min_p": (0, None),
    "repetition_penalty": (1, None),
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "min_tokens": (0, None),
    "watermarking": (None, False),
    "logits_processors": (None, []),
    "tool_choice": ("none", "auto", None),
    "response_format": (None, {"type": "text"}),
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"), (None,)),
}
"""The values with which a parameter changes nothing (vLLM 0.32, `SamplingParams`). Without it the engine's own default counts."""

BUDGET = "thinking_token_budget"


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


def bending(sampling: Mapping[str, Any]) -> str:
    """Return the first recorded parameter that changes the distribution, with its value; `""` if none does.

    An engine's *raw* log probabilities are those of the model's own distribution. They are the policy's only if no parameter changed it.
    """
    for name, value in sampling.items():
        if value not in NEUTRAL.get(name, (value,)) or (name == STRICT_TOOLS and sampling.get("tool_choice") != "none"):
            return f"{name} is {value}"
    return ""


def budget_of(fields: Mapping[str, msgspec.Raw]) -> int | None:
    """Return the thinking budget in a request's members (raw), in tokens; `None` if there is none (-1 sets no limit)."""
    found = value_of(fields[BUDGET]) if BUDGET in fields else None
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else None
