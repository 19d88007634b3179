"""Defines what a rule is, the table of all rules, and which rules apply in a session."""

from collections.abc import Callable, Container
from typing import Any, Literal

import msgspec

from tokencache.core.messages import Message, ToolCall

Part = Literal["calls", "text", "reasoning"]
"""A part of a reply."""


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One difference that an echo may have from the served reply.

    Each rule is one change, and an echo may need several rules. Most harness rules have one or more of the functions.

    Attributes:
        name: the name in metrics, in recorded turns and in adapters.
        kind: see `core.rules`.
        verdict: the verdict on an echo that needs only this rule (`core.verdict`).
        harnesses: the harnesses that make this change, as `docs/rules.md` shows them.
        what: the change, in words.
        source: where the change was observed.
        part: the part of the reply that changes.
        rewrites_text: computes the echoed text from the served text; returns its argument unchanged if the rule does not apply.
        rewrites_reply: computes the echoed message from the served one; `None` if the rule does not apply.
        rewrites_calls: computes the echoed calls from the served ones and the names of the request's tools; returns the served calls if the
            rule does not apply.
        explains_call: whether the harness changes the first call (as served) to the second call (as echoed), which has these parsed
            arguments.
        explains_member: whether the harness changes one value to the other. Arguments: the tool's name, the member's name, the served value
            (`msgspec.UNSET` if there was none), the echoed value (`msgspec.UNSET` if there is none).
        order: rules with a lower number are applied first.
        only_with: `rewrites_text` and `rewrites_reply` are tried only for a reply whose text contains this.
        verbatim_calls: whether the rule counts only if all calls come back as they were issued, under ids that look random. These ids find
            the reply, so the changed form is not predicted.
        without_adapter: whether the rule also applies in a session of an unknown harness, because what it requires identifies the reply.
    """

    name: str
    kind: Literal["canonical", "harness", "dialect"]
    verdict: Literal["same", "equivalent", "rewritten"]
    harnesses: tuple[str, ...]
    what: str
    source: str
    part: Part = "calls"
    rewrites_text: Callable[[str], str] | None = None
    rewrites_reply: Callable[[Message], Message | None] | None = None
    rewrites_calls: Callable[[tuple[ToolCall, ...], Container[str]], tuple[ToolCall, ...]] | None = None
    explains_call: Callable[[ToolCall, ToolCall, dict[str, Any]], bool] | None = None
    explains_member: Callable[[str, str, Any, Any], bool] | None = None
    order: int = 0
    only_with: str = ""
    verbatim_calls: bool = False
    without_adapter: bool = False


RULES: dict[str, Rule] = {}
"""Every rule by its name, in the order in which `docs/rules.md` shows them."""


def register(rule: Rule) -> None:
    """Add a rule to `RULES`.

    Raises:
        ValueError: a rule with this name exists already.
    """
    if rule.name in RULES:
        raise ValueError(f"the rule {rule.name!r} is defined twice")
    RULES[rule.name] = rule


class ToolNames(msgspec.Struct, eq=False):
    """The names of the tools in a request of chat completions. Few calls need them, so the tools are parsed when a name is looked up.

    `tools` is the raw JSON list; `None` if there are none. What is not a function has no name.
    """

    tools: msgspec.Raw | None
    _names: frozenset[str] | None = None

    def __contains__(self, name: object) -> bool:
        if self._names is None:
            self._names = frozenset(function_names(self.tools))
        return name in self._names


class Leniency(msgspec.Struct, frozen=True):
    """The rules that apply to a request.

    Attributes:
        off: the rules that are switched off.
        harness_rules: the harness rules that apply: those that the session's adapter names.
        tools: the names of the request's tools, from which some rules compute what a harness understood.
    """

    off: frozenset[str] = frozenset()
    harness_rules: frozenset[str] = frozenset()
    tools: Container[str] = ()

    def allows(self, rule: str) -> bool:
        """Whether the rule with this name applies."""
        return rule not in self.off and (RULES[rule].kind != "harness" or rule in self.harness_rules)


STRICT = Leniency()
"""The canonical rules only."""


def function_names(tools: msgspec.Raw | None) -> list[str]:
    """Return the names of the functions in a raw list of tools, in order; none if it cannot be read."""
    try:
        entries: Any = msgspec.json.decode(tools) if tools is not None else None
    except (ValueError, RecursionError):
        return []
    functions = [entry.get("function") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    return [name for function in functions if isinstance(function, dict) and isinstance(name := function.get("name"), str)]
