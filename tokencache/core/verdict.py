"""Verdicts: is the message that came back the one that was served?

A digest that matched says that text and calls are equal under the rules of `canonical`. This module looks at the
fields themselves: it names the rules that were needed (they are counted, and shown with the turn), and it refuses
where a digest is silent, above all where the harness sends *other reasoning* than the model's.

=============  =====================================================================================================
`same`         nothing differs that the model said
`equivalent`   only named rules apart
`rewritten`    a value differs: the model did not say this
=============  =====================================================================================================
"""

import re
from typing import Literal, NamedTuple

from tokencache.core.canonical import BLANK, Message, canonical_arguments, split_think

_RANDOM = re.compile(r"[0-9A-Za-z]{8,}$")
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")


class Verdict(NamedTuple):
    """What an echoed reply is, the rules that were needed, and whether its tool-call ids are those issued."""

    kind: Literal["same", "equivalent", "rewritten"]
    rules: tuple[str, ...] = ()
    ids_kept: bool = True


REWRITTEN = Verdict("rewritten", ids_kept=False)


def judge(served: Message, echoed: Message) -> Verdict:
    """Compare an echoed assistant message with the one that was served, field by field."""
    if served.text != echoed.text or len(served.calls) != len(echoed.calls) or served.media != echoed.media:
        return REWRITTEN
    thought = _judge_reasoning(served, echoed)
    if thought is None:
        return REWRITTEN
    rules = {*thought, *_judge_text(served, echoed)}
    ids_kept = True
    for ours, theirs in zip(served.calls, echoed.calls, strict=True):
        if ours.name != theirs.name:
            return REWRITTEN
        if ours.arguments != theirs.arguments:
            if canonical_arguments(ours.arguments) != canonical_arguments(theirs.arguments):
                return REWRITTEN
            rules.add("args-json")
        if ours.id != theirs.id:
            if _same_make(ours.id, theirs.id):
                return REWRITTEN
            rules.add("tool-ids")
            ids_kept = ids_kept and _UNSAFE.sub("_", ours.id) == theirs.id
    return Verdict("equivalent" if rules else "same", tuple(sorted(rules)), ids_kept)


def _same_make(ours: str, theirs: str) -> bool:
    """Whether another id looks issued where ours was: then the call is another one, not ours with its id rewritten."""
    one, other = _RANDOM.search(ours), _RANDOM.search(theirs)
    if one is None or other is None:
        return False
    return ours[: one.start()] == theirs[: other.start()] and len(one[0]) == len(other[0])


def _judge_text(served: Message, echoed: Message) -> set[str]:
    ours, theirs = served.content or "", echoed.content or ""
    rules = set()
    if served.content != echoed.content and not (ours and theirs):
        rules.add("content-shape")  # null, "", absent or blank
    elif ours != theirs:
        rules.add("inline-think" if split_think(ours)[0] != split_think(theirs)[0] else "whitespace")
    if echoed.parts != served.parts:
        rules.add("content-shape")
    return rules


def _judge_reasoning(served: Message, echoed: Message) -> set[str] | None:
    ours, theirs = _thoughts(served), _thoughts(echoed)
    if any(thought and thought not in ours for thought in theirs):
        return None
    rules = set()
    if any(thought and thought not in theirs for thought in ours):
        rules.add("reasoning-dropped")
    if any(thought and thought != mine for mine, thought in zip(ours, theirs, strict=True)):
        rules.add("inline-think")
    if None not in (echoed.reasoning, served.reasoning) and echoed.reasoning != served.reasoning and ours[0] == theirs[0]:
        rules.add("whitespace")
    return rules


def _thoughts(message: Message) -> tuple[str, str]:
    """The reasoning in its own member and that at the beginning of the text: a reply may hold both."""
    return (message.reasoning or "").strip(BLANK), split_think(message.content)[0]
