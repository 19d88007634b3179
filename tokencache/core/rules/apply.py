"""Applies harness rules to served replies, and finds the rules that explain a call that came back."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import msgspec

from tokencache.core.messages import Message, ToolCall, canonical_json
from tokencache.core.rules.base import RULES, Leniency, Rule
from tokencache.core.rules.harness import parse_object

Rules = tuple[str, ...]
"""Names of the rules that together explain one difference."""


def rewritings(served: Message, *, among: Leniency | None = None) -> Iterator[tuple[Rules, Message]]:
    """Yield every other form in which a reply's text may come back, with its rules; forms with the fewest rules come first.

    `among` leaves out the rules that it does not allow. Calls stay as they are, unless a rule turns them into text.
    """
    rules = [rule for rule in _in_order() if among is None or among.allows(rule.name)]
    for rule in rules:
        if rule.rewrites_reply is not None and (message := rule.rewrites_reply(served)) is not None:
            yield (rule.name,), message
    able = [(rule.name, rule.rewrites_text) for rule in rules if rule.rewrites_text is not None] if served.text else []
    for n in range(1, len(able) + 1):
        for chosen in combinations(able, n):
            text, changes = served.text, True
            for _, rewrite in chosen:
                before, text = text, rewrite(text)
                changes = changes and text != before
            if changes:
                yield tuple(name for name, _ in chosen), msgspec.structs.replace(served, content=text)


def expected_rewritings(served: Message, leniency: Leniency) -> list[Message]:
    """List the other forms in which a reply may come back in this session; empty where no harness rule applies."""
    return [message for _, message in rewritings(served, among=leniency)] if leniency.harness_rules else []


def explain_call(ours: ToolCall, theirs: ToolCall) -> list[Rules]:
    """Find the sets of rules that each make `theirs` of `ours`, whose arguments or names differ; empty if none does."""
    value = parse_object(theirs.arguments)
    if value is None:
        return []
    found: list[Rules] = [
        (rule.name,) for rule in _in_order() if rule.explains_call is not None and rule.explains_call(ours, theirs, value)
    ]
    members = _explain_members(ours, value) if ours.name == theirs.name else None
    return [*found, members] if members else found


def _explain_members(ours: ToolCall, theirs: dict[str, Any]) -> Rules | None:
    """Find one rule for each member that differs; `None` if a member differs otherwise."""
    mine = parse_object(ours.arguments)
    if mine is None or mine.keys() - theirs.keys():
        return None
    needed = set()
    for name, value in theirs.items():
        if name in mine and canonical_json(mine[name]) == canonical_json(value):
            continue
        served = mine.get(name, msgspec.UNSET)
        able = (rule for rule in _in_order() if rule.explains_member is not None)
        rule = next(
            (rule.name for rule in able if rule.explains_member is not None and rule.explains_member(ours.name, name, served, value)), None
        )
        if rule is None:
            return None
        needed.add(rule)
    return tuple(sorted(needed))


def _in_order() -> list[Rule]:
    return sorted(RULES.values(), key=lambda rule: rule.order)
