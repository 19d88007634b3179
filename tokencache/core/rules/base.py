"""What a rule is, the table of all rules, and which rules apply in a session."""

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from tokencache.core.messages import Message, ToolCall

Part = Literal["calls", "text", "reasoning"]
"""A part of a reply."""


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One difference that a reply may have when it comes back.

    A harness rule has at least one of the functions; each rule is one change, and a reply may need several.

    Attributes:
        name: as counted in metrics, recorded with turns, and named by adapters.
        kind: see `core.rules`.
        verdict: what a reply is that needs no other rule (`core.verdict`).
        harnesses: the harnesses that do it, as `docs/rules.md` shows them.
        what: what came back, in words.
        source: where that was seen.
        part: the part of the reply that it changes.
        rewrites_text: makes the text that comes back of the served text; returns its argument if the rule does not apply.
        rewrites_reply: makes the message that comes back of the served one; `None` if the rule does not apply.
        explains_call: whether the second call, with these arguments, is what the harness makes of the first.
        explains_member: whether the harness makes the last value of the one before it. Arguments: the tool's name, the member's name, the
            served value (`msgspec.UNSET` if there was none), the value that came back.
        order: of rules that change one reply, those with a lower number are applied first.
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
    explains_call: Callable[[ToolCall, ToolCall, dict[str, Any]], bool] | None = None
    explains_member: Callable[[str, str, Any, Any], bool] | None = None
    order: int = 0


RULES: dict[str, Rule] = {}
"""Every rule by its name, in the order in which `docs/rules.md` shows them."""


def register(rule: Rule) -> None:
    """Add a rule to `RULES`.

    Raises:
        ValueError: there is a rule of this name.
    """
    if rule.name in RULES:
        raise ValueError(f"the rule {rule.name!r} is defined twice")
    RULES[rule.name] = rule


class Leniency(msgspec.Struct, frozen=True):
    """Which rules apply in a session: `off` are switched off, `harness_rules` are those that the session's adapter names."""

    off: frozenset[str] = frozenset()
    harness_rules: frozenset[str] = frozenset()

    def allows(self, rule: str) -> bool:
        """Whether a rule applies, by its name."""
        return rule not in self.off and (RULES[rule].kind != "harness" or rule in self.harness_rules)


STRICT = Leniency()
"""The canonical rules only."""
