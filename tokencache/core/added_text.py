"""Recognizes an echo that has more text than was served.

A reply that ended at a stop string has sampled ids beyond its text: vLLM (0.32) cuts the stop string out of the text, and its ids stay in
the completion. Harnesses write it back (`stop-restored`). Others continue the model's own message with words of theirs, and send no message
after it (`words-added`): a ReAct agent adds its observation.

An echo is the served text, character for character, and the added text. If the reply ended at a stop string, the added text must begin with
that string, because its ids follow the text. The harness's own words begin where the recorded ids end. Only decoding the ids can prove that
place, which the core cannot do (`proxy.sampled_text`).
"""

from typing import NamedTuple

import msgspec

from tokencache.core.messages import BLANK, Message, inline_end
from tokencache.core.rules import Leniency
from tokencache.core.turn import Turn
from tokencache.core.verdict import CUT_OFF, Verdict, delivered_prefix, judge, judge_reply, lacks_own_reasoning

STOP_RESTORED, WORDS_ADDED = "stop-restored", "words-added"
"""The names of the rules for added text."""


class AddedText(NamedTuple):
    """The text that an echo has after the text of a turn's reply.

    Attributes:
        turn: the turn.
        text: the added text.
        verdict: the verdict on the echo.
        restored: whether the text is only the stop string at which the reply ended.
    """

    turn: Turn
    text: str
    verdict: Verdict
    restored: bool

    def words_after(self, sampled: str) -> str | None:
        """Return the words of the harness if the reply's ids have the text `sampled` after the served one; `None` if they have another."""
        if self.restored:
            return "" if sampled.startswith(self.text.rstrip(BLANK)) else None
        return self.text.removeprefix(sampled) if self.text.startswith(sampled) else None


def added_text(turn: Turn, echoed: Message, leniency: Leniency) -> AddedText | None:
    """Find the text that an echo has after a turn's text; `None` if it has none, or if the echo is not the reply with added text.

    Calls follow the text in a prompt, so a reply with calls has no added text.
    """
    served, text = turn.served, text_behind(turn, echoed)
    if not text:
        return None
    stop = stop_string(turn.stop_reason)
    restored = bool(stop) and text.rstrip(BLANK) == stop.rstrip(BLANK)
    if stop and not restored and not text.startswith(stop):
        return None
    verdict = judge(msgspec.structs.replace(served, content=(served.content or "") + text), echoed, leniency)
    needed = {*verdict.rules, *([STOP_RESTORED] if stop else []), *([] if restored else [WORDS_ADDED])}
    if not verdict.supplied or not all(map(leniency.allows, needed)):
        return None
    kind = verdict.kind if restored and verdict.kind == "rewritten" else "equivalent" if restored else "rewritten"
    return AddedText(turn, text, Verdict(kind, tuple(sorted(needed)), supplied=not lacks_own_reasoning(turn, echoed)), restored)


def text_behind(turn: Turn, echoed: Message) -> str:
    """Return the text that an echo has after a turn's text; `""` if it is only blank, or if the echo does not begin with that text."""
    served = turn.served
    if served.calls or echoed.calls or not served.text or not CUT_OFF.isdisjoint(turn.marks):
        return ""
    ours, theirs = _visible(served.content), _visible(echoed.content)
    text = theirs.removeprefix(ours)
    return text if theirs.startswith(ours) and text.strip(BLANK) else ""


def judge_echo(turn: Turn, echoed: Message, leniency: Leniency) -> Verdict:
    """Compare an echo with a turn's reply, also one with added text, and one that is only the beginning of the reply."""
    verdict = judge_reply(turn, echoed, leniency)
    if verdict.kind != "foreign":
        return verdict
    if (added := added_text(turn, echoed, leniency)) is not None:
        return added.verdict
    part = delivered_prefix(turn, echoed, leniency)
    return Verdict("rewritten", part.rules) if part is not None else verdict


def is_exactly(turn: Turn, sampled: str, echoed: Message) -> bool:
    """Whether an echo has exactly the text of a reply's ids: that which was served, and then `sampled`. Blanks at its end count."""
    return _visible(echoed.content) == _visible(turn.served.content) + sampled


def with_stop_string(served: Message, stop_reason: int | str | None) -> Message | None:
    """Return a reply as a harness sends it back that restores its stop string; `None` if none ended it, or if it has no text."""
    stop = stop_string(stop_reason)
    if not stop or served.calls or not served.text:
        return None
    return msgspec.structs.replace(served, content=(served.content or "") + stop)


def stop_string(stop_reason: int | str | None) -> str:
    """Return the stop string that ended a reply; `""` if none did."""
    return stop_reason if isinstance(stop_reason, str) else ""


def _visible(content: str | None) -> str:
    """Return a text without its leading inline reasoning and the blanks before it."""
    text = content or ""
    return text[inline_end(text) :].lstrip(BLANK)
