"""Applies harness rules to served replies, and finds the rules that explain a changed tool call."""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from tokencache.core.messages import Message, ToolCall, canonical_json
from tokencache.core.rules.base import RULES, Leniency, Rule
from tokencache.core.rules.harness import parse_object

T = TypeVar("T")

Rules = tuple[str, ...]
"""Names of the rules that together explain one difference."""


def rewritings(served: Message) -> Iterator[tuple[Rules, Message]]:
    """Yield every form in which a harness may send a reply back with changed text, with the rules needed; fewest rules first.

    Calls stay unchanged, unless a rule converts them to text.
    """
    return _rewritten(served, _able(served))


def expected_rewritings(served: Message, leniency: Leniency) -> list[Message]:
    """List the changed forms in which a reply may be sent back in this session, except for those that the ids of their calls find."""
    content = served.content or ""
    rules = [rule for rule in _expected(leniency.off, leniency.harness_rules) if rule.only_with in content]
    return [message for _, message in _rewritten(served, rules)] if rules else []


@lru_cache(maxsize=256)
def _expected(off: frozenset[str], harness_rules: frozenset[str]) -> list[Rule]:
    """List the rules of a session that may change the text of a reply without calls that its ids find, in order."""
    leniency = Leniency(off, harness_rules)
    return [rule for rule in _rewriting() if not rule.verbatim_calls and leniency.allows(rule.name)]


def _able(served: Message) -> list[Rule]:
    """List the rules that may change the text of a reply, in order."""
    content = served.content or ""
    return [rule for rule in _rewriting() if rule.only_with in content]


def _rewriting() -> list[Rule]:
    return _in_order([rule for rule in RULES.values() if rule.rewrites_reply or rule.rewrites_text])


def _rewritten(served: Message, rules: Sequence[Rule]) -> Iterator[tuple[Rules, Message]]:
    for rule in rules:
        if rule.rewrites_reply is not None and (message := rule.rewrites_reply(served)) is not None:
            yield (rule.name,), message
    changes = [(rule.name, rule.rewrites_text) for rule in rules if rule.rewrites_text is not None]
    for names, text in _combinations(served.text, changes) if served.text else ():
        yield names, msgspec.structs.replace(served, content=text)


def understood_calls(calls: tuple[ToolCall, ...], tools: Container[str]) -> Iterator[tuple[Rules, tuple[ToolCall, ...]]]:
    """Yield every other form in which a harness may have understood the served calls, with the rules needed; fewest rules first.

    `tools` are the names of the request's tools.
    """
    changes = [(rule.name, _given(tools, rule.rewrites_calls)) for rule in _in_order(RULES.values()) if rule.rewrites_calls is not None]
    yield from _combinations(calls, changes)


def _given(tools: Container[str], change: Callable[[T, Container[str]], T]) -> Callable[[T], T]:
    return lambda value: change(value, tools)


def _combinations(value: T, changes: Sequence[tuple[str, Callable[[T], T]]]) -> list[tuple[Rules, T]]:
    """List what changes make of a value, each alone and several in their order, with their names; fewest first."""
    forms: list[tuple[tuple[int, ...], T]] = [((), value)]
    for place, (_, change) in enumerate(changes):  # a change without an effect is not tried together with others
        changed = [((*places, place), before, change(before)) for places, before in forms]
        forms += [(places, after) for places, before, after in changed if after != before]
    ordered = sorted(forms[1:], key=lambda form: (len(form[0]), form[0]))
    return [(tuple(changes[place][0] for place in places), after) for places, after in ordered]


def explain_call(ours: ToolCall, theirs: ToolCall) -> list[Rules]:
    """Find the sets of rules that each explain how `ours` became `theirs`; the calls differ in name or arguments. Empty if none does."""
    value = parse_object(theirs.arguments)
    if value is None:
        return []
    found: list[Rules] = [
        (rule.name,) for rule in _in_order(RULES.values()) if rule.explains_call is not None and rule.explains_call(ours, theirs, value)
    ]
    members = _explain_members(ours, value) if ours.name == theirs.name else None
    return [*found, members] if members else found


def _explain_members(ours: ToolCall, theirs: dict[str, Any]) -> Rules | None:
    """Find one rule for each member that differs, was dropped or was inserted; `None` if no rule explains a member."""
    mine = parse_object(ours.arguments)
    if mine is None:
        return None
    needed = set()
    for name in {**mine, **theirs}:
        served, echoed = mine.get(name, msgspec.UNSET), theirs.get(name, msgspec.UNSET)
        if name in mine and name in theirs and canonical_json(served) == canonical_json(echoed):
            continue
        able = (rule for rule in _in_order(RULES.values()) if rule.explains_member is not None)
        rule = next(
            (rule.name for rule in able if rule.explains_member is not None and rule.explains_member(ours.name, name, served, echoed)), None
        )
        if rule is None:
            return None
        needed.add(rule)
    return tuple(sorted(needed))


def _in_order(rules: Iterable[Rule]) -> list[Rule]:
    return sorted(rules, key=attrgetter("order"))
