"""Compares a reply that came back with the one that was served.

A key that matched (`chain`) only says where to look. `judge` compares the fields: it names the rules that were needed, and refuses
everything that no rule explains. Above all it refuses *other reasoning* than the model's, which a digest does not cover, and another text
beside a call id that was issued here.

=============  ==============================================================================================================
`same`         nothing that the model wrote differs
`equivalent`   only canonical rules were needed
`rewritten`    a value differs in a known way: supplied only if each rule applies in the session
`foreign`      no rule makes this of the served reply, so the model did not write it, whatever id is beside it
=============  ==============================================================================================================

**Interrupted replies.** A harness that disconnects during a stream sends back what it received, which ends with an event. So an aborted
turn records after which events its text could have ended (`Cut`), and an echo is recognized if it is the text up to one of them,
character for character; if whitespace around it was lost, only if there is just one such cut. That says which characters were received,
not which tokens: a parser holds text back, and a character may be a part of a token. `DeliveredPrefix` says between which bounds the
tokens end; where exactly is proven by decoding them, which the core cannot do. An aborted turn with calls is never recognized, because
nothing shows how much of a call the harness kept.
"""

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from tokencache.core import ids
from tokencache.core.messages import BLANK, Message, ToolCall, canonical_arguments, split_think
from tokencache.core.rules import RULES, STRICT, Leniency, Rules, explain_call, rewritings
from tokencache.core.turn import Turn

INTERRUPTED = "interrupted"
"""The rule by which a beginning of a reply is recognized."""

_RANDOM = re.compile(r"[0-9A-Za-z]{8,}$")
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")

Kind = Literal["same", "equivalent", "rewritten", "foreign"]


class Verdict(NamedTuple):
    """The result of a comparison.

    Attributes:
        kind: see the module.
        rules: the rules that were needed, or would have been.
        ids_kept: the ids of the calls are those that were issued; for a foreign reply: at least one is.
        supplied: the reply counts as the model's, so its exact tokens are supplied.
    """

    kind: Kind
    rules: tuple[str, ...] = ()
    ids_kept: bool = True
    supplied: bool = True


def safe_id(name: str) -> str:
    """Write a call's id as harnesses do that allow `[A-Za-z0-9_-]` only."""
    return _UNSAFE.sub("_", name)


def is_unique(name: str) -> bool:
    """Whether a call's id looks random. Others (`functions.bash:0`) count calls, and a harness may count in the same way."""
    drawn = _RANDOM.search(name)
    return drawn is not None and any(map(str.isdigit, drawn[0]))


def judge(served: Message, echoed: Message, leniency: Leniency = STRICT) -> Verdict:
    """Compare an echoed assistant message with the one that was served, field by field."""
    explained = _explain_text(served, echoed, leniency)
    if explained is None:
        return _foreign(served, echoed)
    served, rules = explained
    ids_kept = True
    for ours, theirs in zip(served.calls, echoed.calls, strict=True):
        if ours.arguments != theirs.arguments or ours.name != theirs.name:
            needed = _judge_call(ours, theirs, leniency)
            if needed is None:
                return _foreign(served, echoed)
            rules.update(needed)
        if ours.id != theirs.id:
            if _same_scheme(ours.id, theirs.id):
                return _foreign(served, echoed)
            rules.add("tool-ids")
            ids_kept = ids_kept and safe_id(ours.id) == theirs.id
    reasoning = _judge_reasoning(served, echoed, leniency)
    if reasoning is None:
        return Verdict("rewritten", ids_kept=ids_kept, supplied=False)
    rules |= reasoning
    rewritten = any(RULES[rule].verdict == "rewritten" for rule in rules)
    supplied = all(map(leniency.allows, rules)) and (ids_kept or not rewritten)  # a harness that changes values must keep the ids
    kind: Kind = "rewritten" if rewritten or not supplied else "equivalent" if rules else "same"
    return Verdict(kind, tuple(sorted(rules)), ids_kept, supplied)


def _explain_text(served: Message, echoed: Message, leniency: Leniency) -> tuple[Message, set[str]] | None:
    """Return the served message with the text that came back, and the rules for that; `None` if no rule makes this text of it."""
    if served.media != echoed.media:
        return None
    if served.text == echoed.text and len(served.calls) == len(echoed.calls):
        return served, _judge_text(served, echoed)
    forms = [(rules, form) for rules, form in rewritings(served) if form.text == echoed.text and len(form.calls) == len(echoed.calls)]
    if not forms:
        return None
    rules = _preferred([rules for rules, _ in forms], leniency)
    trimmed = {"whitespace"} if _edges(served.content) != _edges(echoed.content) else set()
    return next(form for by, form in forms if by == rules), {*rules, *trimmed}


def _edges(content: str | None) -> tuple[str, str]:
    """The whitespace around a text."""
    text = content or ""
    return text[: len(text) - len(text.lstrip(BLANK))], text[len(text.rstrip(BLANK)) :]


def _preferred(explanations: Sequence[Rules], leniency: Leniency) -> Rules:
    """The first explanation whose rules all apply; otherwise the first, so that it is named."""
    return next((rules for rules in explanations if all(map(leniency.allows, rules))), explanations[0])


def _foreign(served: Message, echoed: Message) -> Verdict:
    issued = {call.id for call in served.calls}
    return Verdict("foreign", (), any(call.id in issued for call in echoed.calls), supplied=False)


def _same_scheme(ours: str, theirs: str) -> bool:
    """Whether another id looks as if it was issued here too: then it belongs to another call, and is not ours rewritten."""
    one, other = _RANDOM.search(ours), _RANDOM.search(theirs)
    if one is None or other is None:
        return False
    return ours[: one.start()] == theirs[: other.start()] and len(one[0]) == len(other[0])


def _judge_call(ours: ToolCall, theirs: ToolCall, leniency: Leniency) -> Rules | None:
    if ours.name == theirs.name and canonical_arguments(ours.arguments) == canonical_arguments(theirs.arguments):
        return ("args-json",)
    explanations = explain_call(ours, theirs)
    return _preferred(explanations, leniency) if explanations else None


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
    ours, theirs = _reasonings(served), _reasonings(echoed)
    if any(text and text not in ours for text in theirs):
        return None
    rules = set()
    if any(text and text not in theirs for text in ours):
        emptied = echoed.reasoning == "" and leniency.allows("reasoning-emptied")
        rules.add("reasoning-emptied" if emptied else "reasoning-dropped")
    if any(text and text != mine for mine, text in zip(ours, theirs, strict=True)):
        rules.add("inline-think")
    if None not in (echoed.reasoning, served.reasoning) and echoed.reasoning != served.reasoning and ours[0] == theirs[0]:
        rules.add("whitespace")
    return rules


def _reasonings(message: Message) -> tuple[str, str]:
    """The reasoning in its own member and that at the beginning of the text: a reply may have both."""
    return (message.reasoning or "").strip(BLANK), split_think(message.content)[0]


# Interrupted replies.


class Cut(NamedTuple):
    """An event after which a harness may have disconnected.

    `before` and `after` count the sampled tokens before and after it, `content` and `reasoning` the characters up to it.
    """

    before: int
    after: int
    content: int
    reasoning: int


class DeliveredPrefix(NamedTuple):
    """The part of an aborted turn's reply that a harness received.

    `text` is spelled by the tokens that start at some place from `first` (inclusive) to `begun` (exclusive); they end at `after` or a
    little before. `rules` are the rules that were needed.
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
    """Find how much of an aborted turn's reply an echo is; `None` if it is not a beginning of it, or that is uncertain.

    The text is the turn's `content` up to a cut, with its reasoning whole or gone. Without any text it is its reasoning.
    """
    if not leniency.allows(INTERRUPTED):
        return None
    beginnings = _beginnings(turn, echoed)
    member = "content" if echoed.text else "reasoning"
    found = [both for both in beginnings if getattr(both[1], member) == getattr(echoed, member)] or beginnings
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
    """Whether an echo may be a beginning of an aborted turn's reply, certain or not."""
    return bool(_beginnings(turn, echoed))


def _beginnings(turn: Turn, echoed: Message) -> list[tuple[Cut, Message]]:
    """The beginnings of an aborted turn's reply that an echo may be, apart from whitespace."""
    if turn.served.calls or echoed.calls or not (echoed.text or echoed.thought):
        return []
    cuts = [cut for cut in unpack_cuts(turn.cuts) if (cut.content if echoed.text else not cut.content and cut.reasoning)]
    beginnings = [(cut, _up_to(turn.served, cut)) for cut in cuts]
    return [both for both in beginnings if both[1].text == echoed.text and (echoed.text or both[1].thought == echoed.thought)]


def _up_to(served: Message, cut: Cut) -> Message:
    return Message("assistant", (served.content or "")[: cut.content] or None, (served.reasoning or "")[: cut.reasoning] or None)
