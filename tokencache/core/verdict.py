"""Verdicts: is the message that came back the one that was served?

A key that matched (`match`) only says where to look. This module looks at the fields themselves: it names the rules
that were needed (they are counted, and shown with the turn), and it refuses whatever no rule explains, above all *other
reasoning* than the model's, on which a digest is silent, and other words beside an id of ours.

=============  =====================================================================================================
`same`         nothing differs that the model said
`equivalent`   only canonical rules apart
`rewritten`    a value differs, in a way that is known: supplied only if every rule is vouched for and none switched off
`foreign`      no rule makes this of what the model said: it did not say this, whatever id stands beside it
=============  =====================================================================================================

Interrupts: a harness that left in mid-stream, and sends back what it had heard.

What it had heard ends with an event of the stream. So of an aborted turn it is recorded after which events a text could
have ended (`Cut`), and an echo is recognised if it is the text up to one of them, to the letter; where white space
around it was lost, only if there is just one such place.

That says which characters were heard, not which tokens: a parser holds text back, a character may be half of a token.
Where the tokens end is to be proven by decoding them (`DeliveredPrefix` says between which bounds); the core cannot do that.
A turn that had begun a call is never taken: nobody can say how much of it the harness kept.
"""

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from tokencache.core import ids
from tokencache.core.messages import BLANK, Message, ToolCall, canonical_arguments, split_think
from tokencache.core.rules import RULES, STRICT, Leniency, Rules, explain_call, rewritings
from tokencache.core.turn import Turn

_RANDOM = re.compile(r"[0-9A-Za-z]{8,}$")
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")


class Verdict(NamedTuple):
    """What an echoed reply is, and the rules that were needed, or would have been.

    `ids_kept`: the ids of its calls are those issued (of a foreign reply: one is). `supplied`: it counts as the model's turn.
    """

    kind: Literal["same", "equivalent", "rewritten", "foreign"]
    rules: tuple[str, ...] = ()
    ids_kept: bool = True
    supplied: bool = True


def safe_id(name: str) -> str:
    """Write a call's id as harnesses do that allow `[A-Za-z0-9_-]` only."""
    return _UNSAFE.sub("_", name)


def is_unique(name: str) -> bool:
    """Whether a call's id looks drawn at random: others (`functions.bash:0`) count calls, and a harness may count the same way."""
    drawn = _RANDOM.search(name)
    return drawn is not None and any(map(str.isdigit, drawn[0]))


def judge(served: Message, echoed: Message, leniency: Leniency = STRICT) -> Verdict:
    """Compare an echoed assistant message with the one that was served, field by field."""
    told = _tell(served, echoed, leniency)
    if told is None:
        return _foreign(served, echoed)
    served, rules = told
    ids_kept = True
    for ours, theirs in zip(served.calls, echoed.calls, strict=True):
        if ours.arguments != theirs.arguments or ours.name != theirs.name:
            needed = _judge_call(ours, theirs, leniency)
            if needed is None:
                return _foreign(served, echoed)
            rules.update(needed)
        if ours.id != theirs.id:
            if _same_make(ours.id, theirs.id):
                return _foreign(served, echoed)
            rules.add("tool-ids")
            ids_kept = ids_kept and safe_id(ours.id) == theirs.id
    thought = _judge_reasoning(served, echoed, leniency)
    if thought is None:
        return Verdict("rewritten", ids_kept=ids_kept, supplied=False)
    rules |= thought
    rewritten = any(RULES[rule].verdict == "rewritten" for rule in rules)
    supplied = all(map(leniency.allows, rules)) and (ids_kept or not rewritten)  # who changes values must keep the ids
    kind: Literal["same", "equivalent", "rewritten"] = "rewritten" if rewritten or not supplied else "equivalent" if rules else "same"
    return Verdict(kind, tuple(sorted(rules)), ids_kept, supplied)


def _tell(served: Message, echoed: Message, leniency: Leniency) -> tuple[Message, set[str]] | None:
    """Tell the reply as its text came back, with the rules for that; `None` if no rule makes this text of it."""
    if served.media != echoed.media:
        return None
    if served.text == echoed.text and len(served.calls) == len(echoed.calls):
        return served, _judge_text(served, echoed)
    ways = [(rules, told) for rules, told in rewritings(served) if told.text == echoed.text and len(told.calls) == len(echoed.calls)]
    if not ways:
        return None
    rules = _preferred([rules for rules, _ in ways], leniency)
    trimmed = {"whitespace"} if _edges(served.content) != _edges(echoed.content) else set()
    return next(told for by, told in ways if by == rules), {*rules, *trimmed}


def _edges(content: str | None) -> tuple[str, str]:
    """The white space around a text."""
    text = content or ""
    return text[: len(text) - len(text.lstrip(BLANK))], text[len(text.rstrip(BLANK)) :]


def _preferred(ways: Sequence[Rules], leniency: Leniency) -> Rules:
    """Of the sets of rules that explain something, the first that is allowed; else the first, to be named."""
    return next((rules for rules in ways if all(map(leniency.allows, rules))), ways[0])


def _foreign(served: Message, echoed: Message) -> Verdict:
    issued = {call.id for call in served.calls}
    return Verdict("foreign", (), any(call.id in issued for call in echoed.calls), supplied=False)


def _same_make(ours: str, theirs: str) -> bool:
    """Whether another id looks issued where ours was: then the call is another one, not ours with its id rewritten."""
    one, other = _RANDOM.search(ours), _RANDOM.search(theirs)
    if one is None or other is None:
        return False
    return ours[: one.start()] == theirs[: other.start()] and len(one[0]) == len(other[0])


def _judge_call(ours: ToolCall, theirs: ToolCall, leniency: Leniency) -> Rules | None:
    if ours.name == theirs.name and canonical_arguments(ours.arguments) == canonical_arguments(theirs.arguments):
        return ("args-json",)
    ways = explain_call(ours, theirs)
    return _preferred(ways, leniency) if ways else None


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


def _judge_reasoning(served: Message, echoed: Message, leniency: Leniency) -> set[str] | None:
    ours, theirs = _thoughts(served), _thoughts(echoed)
    if any(thought and thought not in ours for thought in theirs):
        return None
    rules = set()
    if any(thought and thought not in theirs for thought in ours):
        emptied = echoed.reasoning == "" and leniency.allows("reasoning-emptied")
        rules.add("reasoning-emptied" if emptied else "reasoning-dropped")
    if any(thought and thought != mine for mine, thought in zip(ours, theirs, strict=True)):
        rules.add("inline-think")
    if None not in (echoed.reasoning, served.reasoning) and echoed.reasoning != served.reasoning and ours[0] == theirs[0]:
        rules.add("whitespace")
    return rules


def _thoughts(message: Message) -> tuple[str, str]:
    """The reasoning in its own member and that at the beginning of the text: a reply may hold both."""
    return (message.reasoning or "").strip(BLANK), split_think(message.content)[0]


INTERRUPTED = "interrupted"


class Cut(NamedTuple):
    """An event after which a harness may have left.

    `before` and `after` count the sampled tokens before and after it, `content` and `reasoning` the characters so far.
    """

    before: int
    after: int
    content: int
    reasoning: int


class DeliveredPrefix(NamedTuple):
    """What a harness had heard of an aborted turn.

    `text` is spelled by the tokens from some place between `first` (inclusive) and `begun` (exclusive) on, and they end
    at `after` or a little before.
    """

    turn: Turn
    text: str
    first: int
    begun: int
    after: int
    rules: tuple[str, ...]


def pack_cuts(cuts: Sequence[Cut]) -> bytes:
    """Pack cuts: 16 bytes each."""
    return ids.pack(number for cut in cuts for number in cut)


def unpack_cuts(packed: bytes) -> list[Cut]:
    """Unpack cuts."""
    numbers = ids.unpack(packed)
    return [Cut(*numbers[i : i + len(Cut._fields)]) for i in range(0, len(numbers), len(Cut._fields))]


def delivered_prefix(turn: Turn, echoed: Message, leniency: Leniency) -> DeliveredPrefix | None:
    """Find up to where of an aborted turn a harness had heard; `None` if this is not what it said, or it is not certain.

    A text is the turn's `content` up to a cut, its reasoning whole or gone; without any text it is its reasoning.
    """
    if not leniency.allows(INTERRUPTED):
        return None
    said = _beginnings(turn, echoed)
    member = "content" if echoed.text else "reasoning"
    found = [both for both in said if getattr(both[1], member) == getattr(echoed, member)] or said
    if len(found) != 1:
        return None
    ((cut, message),) = found
    verdict = judge(message, echoed, leniency)
    if not verdict.supplied:
        return None
    begin = next(cut for cut in unpack_cuts(turn.cuts) if getattr(cut, member))
    rules = tuple(sorted({*verdict.rules, INTERRUPTED}))
    return DeliveredPrefix(turn, getattr(message, member) or "", begin.before, begin.after, cut.after, rules)


def may_be_delivered(turn: Turn, echoed: Message) -> bool:
    """Whether an echo may be what was heard of an aborted turn, certain or not."""
    return bool(_beginnings(turn, echoed))


def _beginnings(turn: Turn, echoed: Message) -> list[tuple[Cut, Message]]:
    """The beginnings of an aborted turn that an echo may be, white space aside."""
    if turn.served.calls or echoed.calls or not (echoed.text or echoed.thought):
        return []
    cuts = [cut for cut in unpack_cuts(turn.cuts) if (cut.content if echoed.text else not cut.content and cut.reasoning)]
    said = [(cut, _up_to(turn.served, cut)) for cut in cuts]
    return [both for both in said if both[1].text == echoed.text and (echoed.text or both[1].thought == echoed.thought)]


def _up_to(served: Message, cut: Cut) -> Message:
    return Message("assistant", (served.content or "")[: cut.content] or None, (served.reasoning or "")[: cut.reasoning] or None)
