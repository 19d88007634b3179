"""Applies harness rules to served replies, and finds the rules that explain a changed tool call."""

from collections.abc import Iterator
from typing import Any

import msgspec

from tokencache.core.messages import Message, ToolCall, canonical_json
from tokencache.core.rules.base import RULES, Leniency, Rule
from tokencache.core.rules.harness import parse_object

Rules = tuple[str, ...]
"""Names of the rules that together explain one difference."""


def rewritings(served: Message, *, among: Leniency | None = None) -> Iterator[tuple[Rules, Message]]:
    """Yield every form in which a harness may send a reply back with changed text, with the rules needed; fewest rules first.

    Only rules that `among` allows are used; `None` allows all. Calls stay unchanged, unless a rule converts them to text.
    """
    rules = [rule for rule in _in_order() if among is None or among.allows(rule.name)]
    for rule in rules:
        if rule.rewrites_reply is not None and (message := rule.rewrites_reply(served)) is not None:
            yield (rule.name,), message
    forms: list[tuple[tuple[int, ...], str]] = [((), served.text)] if served.text else []
    for place, rule in enumerate(rules):
        if rule.rewrites_text is not None:  # a rule that changes nothing is not tried together with others
            changed = [((*places, place), text, rule.rewrites_text(text)) for places, text in forms]
            forms += [(places, after) for places, before, after in changed if after != before]
    for places, text in sorted(forms[1:], key=lambda form: (len(form[0]), form[0])):
        yield tuple(rules[place].name for place in places), msgspec.structs.replace(served, content=text)


def expected_rewritings(served: Message, leniency: Leniency) -> list[Message]:
    """List the changed forms in which a reply may be sent back in this session."""
    if not leniency.harness_rules and "<think>" not in (served.content or ""):
        return []  # no rule that always applies changes any other reply
    return [message for _, message in rewritings(served, among=leniency)]


def explain_call(ours: ToolCall, theirs: ToolCall) -> list[Rules]:
    """Find the sets of rules that each explain how `ours` became `theirs`; the calls differ in name or arguments. Empty if none does."""
    value = parse_object(theirs.arguments)
    if value is None:
        return []
    found: list[Rules] = [
        (rule.name,) for rule in _in_order() if rule.explains_call is not None and rule.explains_call(ours, theirs, value)
    ]
    members = _explain_members(ours, value) if ours.name == theirs.name else None
    return [*found, members] if members else found


def _explain_members(ours: ToolCall, theirs: dict[str, Any]) -> Rules | None:
    """Find one rule for each member that differs; `None` if no rule explains a member."""
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
