"""Compares an echo, a reply that a harness sends back, with the reply that was served.

A key (`chain`) only finds candidates. `judge` compares the fields, lists the rules that were needed, and rejects every difference that no
rule explains. In particular it rejects *other reasoning* than the model's, which a digest does not cover, and another text next to a call
id that was issued here.

=============  ==============================================================================================================
`same`         nothing that the model wrote differs
`equivalent`   only canonical rules were needed
`rewritten`    a value differs in a known way: supplied only if each rule applies in the session
`foreign`      no rule explains the difference, so the model did not write this reply, whatever its ids
=============  ==============================================================================================================

**Interrupted replies.** A harness that disconnects during a stream sends back the text that it received, which ends with an event. So an
aborted turn records the events after which its text could have ended (`Cut`). An echo is recognized if it equals the text up to one of
them, character for character. If whitespace around the text was lost, there must be only one such cut. A cut shows which characters were
received, not which tokens: a parser holds text back, and a character may be a part of a token. `DeliveredPrefix` has the bounds between
which the tokens end; the exact place is proven by decoding the tokens, which the core cannot do.

If a stream was cut during a call, nothing shows how much of that call the harness kept. But an echo without calls is the text before the
first one, up to an event. And some harnesses execute each call that arrived completely (Codex), so an echo may end after a complete call.
It is recognized if its calls are the first ones that were served, and their arguments are whole JSON objects: no beginning of such an
object is one. Both also hold if the engine broke the stream off.
"""

import re
import string
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Literal, NamedTuple

import msgspec

from tokencache.core import ids
from tokencache.core.messages import BLANK, Message, ToolCall, canonical_arguments, inline_end, split_think
from tokencache.core.rules import RULES, STRICT, Leniency, Rules, explain_call, rewritings, understood_calls
from tokencache.core.rules.harness import parse_object
from tokencache.core.strict_json import read_object
from tokencache.core.turn import Turn, TurnMark

INTERRUPTED = "interrupted"
"""The name of the rule for an echo that is only the beginning of a reply."""
CALLS_HIDDEN = "calls-hidden"
"""The name of the rule for an echo without the calls that the dialect of its turn could not show."""
_HIDING_CALLS = frozenset({"gemini"})
"""The dialects that do not send a call whose arguments are not a JSON object."""
CUT_OFF = frozenset({TurnMark.ABORTED, TurnMark.UPSTREAM_BROKE})
"""The marks of a turn whose stream ended before the reply did."""

_ALPHANUMERIC = string.ascii_letters + string.digits
_SHORTEST_RANDOM = 8
_UNSAFE, _NOT_ALPHANUMERIC = re.compile(r"[^A-Za-z0-9_-]"), re.compile(r"[^A-Za-z0-9]+")

Kind = Literal["same", "equivalent", "rewritten", "foreign"]


class Verdict(NamedTuple):
    """The result of a comparison.

    Attributes:
        kind: see the table in the module's docstring.
        rules: the rules that were needed, including rules that do not apply in this session.
        ids_kept: whether the ids of the calls are those that were issued; for a foreign reply, whether at least one is.
        supplied: whether the echo counts as the model's reply, so that the proxy supplies its exact tokens.
    """

    kind: Kind
    rules: tuple[str, ...] = ()
    ids_kept: bool = True
    supplied: bool = True


_SAME = Verdict("same")


def bare_id(name: str) -> str:
    """Return the letters and digits of a call's id: what all harnesses keep that do not number the calls anew."""
    return _NOT_ALPHANUMERIC.sub("", name)


def keeps_id(ours: str, theirs: str) -> bool:
    """Whether `theirs` is the id `ours` of a call as a harness writes it.

    Some replace what is not in `[A-Za-z0-9_-]` by `_` (Kimi Code, Hermes, LiteLLM), OpenClaw removes all but letters and digits. The
    latter counts only for an id that looks random: `f1.0` and `f.10` have the same letters and digits.
    """
    return theirs in {ours, _UNSAFE.sub("_", ours)} or (is_unique(ours) and theirs == bare_id(ours))


def is_unique(name: str) -> bool:
    """Whether a call's id looks random. Other ids (`functions.bash:0`) number the calls, and a harness may do the same."""
    drawn = _split_random(name)[1]
    return any(map(str.isdigit, drawn))


def _split_random(name: str) -> tuple[str, str]:
    """Split a call's id into its scheme and the random letters and digits at its end, `""` if there are too few."""
    name = name.removesuffix("\n")
    scheme = name.rstrip(_ALPHANUMERIC)
    return (scheme, name[len(scheme) :]) if len(name) - len(scheme) >= _SHORTEST_RANDOM else (name, "")


def judge(served: Message, echoed: Message, leniency: Leniency = STRICT) -> Verdict:
    """Compare an echoed assistant message with the one that was served, field by field."""
    if echoed == served:
        return _SAME
    first = None
    for form in _explain_text(served, echoed):
        for rules, calls in chain([((), form.served.calls)], understood_calls(form.served.calls, leniency.tools)):
            verdict = _judge_form(form, rules, calls, echoed, leniency)
            if verdict is not None and verdict.supplied:
                return verdict
            first = first or verdict
    return first or _foreign(served, echoed)


class _Form(msgspec.Struct, frozen=True):
    """The served message with the echoed text, and the rules that explain that text."""

    served: Message
    rules: set[str]


def _explain_text(served: Message, echoed: Message) -> Iterable[_Form]:
    """Return the forms of the served message with the echoed text; fewest rules first."""
    if served.media != echoed.media:
        return ()
    if served.content == echoed.content or served.text == echoed.text:
        return (_Form(served, _judge_text(served, echoed)),)
    return _explain_other_text(served, echoed)


def _explain_other_text(served: Message, echoed: Message) -> Iterator[_Form]:
    closed = bool(inline_end(echoed.content or ""))
    trimmed = {"whitespace"} if echoed.text and _edges(served.content) != _edges(echoed.content) else set()
    for rules, form in rewritings(served):
        cut_off = form.reasoning != served.reasoning
        if form.text == echoed.text and not (closed and cut_off):  # a block that was cut off is not returned closed
            yield _Form(form, {*rules, *trimmed})


def _judge_form(form: _Form, understood: Rules, calls: Sequence[ToolCall], echoed: Message, leniency: Leniency) -> Verdict | None:
    """Compare the calls as a harness may have `understood` them, and the reasoning; `None` if no rule explains a call."""
    rules = {*form.rules, *understood}
    if len(calls) != len(echoed.calls):
        return None
    unproven, ids_kept, rewritten = False, True, False
    for rule in rules:
        unproven = unproven or (RULES[rule].verbatim_calls and not _verbatim(calls, echoed.calls))
    for ours, theirs in zip(calls, echoed.calls, strict=True):
        if ours.arguments != theirs.arguments or ours.name != theirs.name:
            needed = _judge_call(ours, theirs, leniency)
            if needed is None:
                return None
            rules.update(needed)
        if ours.id != theirs.id:
            kept = keeps_id(ours.id, theirs.id)
            if not kept and _same_scheme(ours.id, theirs.id):
                return None
            rules.add("tool-ids")
            ids_kept = ids_kept and kept
    reasoning = _judge_reasoning(form.served, echoed, leniency)
    if reasoning is None:
        return Verdict("rewritten", ids_kept=ids_kept, supplied=False)
    rules |= reasoning
    for rule in rules:
        rewritten = rewritten or RULES[rule].verdict == "rewritten"
    # if a value changed, the ids must be unchanged
    supplied = all(map(leniency.allows, rules)) and (ids_kept or not rewritten) and not unproven
    kind: Kind = "rewritten" if rewritten or not supplied else "equivalent" if rules else "same"
    return Verdict(kind, tuple(sorted(rules)), ids_kept, supplied)


def judge_reply(turn: Turn, echoed: Message, leniency: Leniency = STRICT) -> Verdict:
    """Compare an echo with a turn's reply. Reasoning that the client itself wrote must come back: the reply was sampled after it.

    If it is missing, the rules of the verdict still show that the echo may be this reply, so that another one is in doubt. Calls that the
    turn's dialect did not send cannot come back.
    """
    verdict = judge(turn.served, echoed, leniency)
    if verdict.kind == "foreign" and turn.dialect in _HIDING_CALLS:
        shown = tuple(call for call in turn.served.calls if read_object(call.arguments) is not None)
        found = judge(msgspec.structs.replace(turn.served, calls=shown), echoed, leniency) if shown != turn.served.calls else verdict
        if found.supplied or found.rules:
            rules, supplied = tuple(sorted({*found.rules, CALLS_HIDDEN})), found.supplied and leniency.allows(CALLS_HIDDEN)
            verdict = found._replace(kind="rewritten", rules=rules, supplied=supplied)
    if verdict.kind != "foreign" and lacks_own_reasoning(turn, echoed):
        return verdict._replace(kind="rewritten", supplied=False)
    return verdict


def lacks_own_reasoning(turn: Turn, echoed: Message) -> bool:
    """Whether an echo lacks the reasoning that the client itself wrote before the beginning of a turn's reply."""
    return has_own_reasoning(turn) and turn.served.thought != echoed.thought


def has_own_reasoning(turn: Turn) -> bool:
    """Whether the client itself wrote the reasoning of a turn's reply: it sent a beginning that is not a recorded reply."""
    return bool(turn.begun and turn.match == "plain" and turn.served.thought)


def _verbatim(ours: Sequence[ToolCall], theirs: Sequence[ToolCall]) -> bool:
    """Whether calls came back exactly as they were issued, under ids that look random."""
    return ours == theirs and all(is_unique(call.id) for call in ours)


def _edges(content: str | None) -> tuple[str, str]:
    """Return the whitespace around a text."""
    text = content or ""
    return text[: len(text) - len(text.lstrip(BLANK))], text[len(text.rstrip(BLANK)) :]


def _preferred(explanations: Sequence[Rules], leniency: Leniency) -> Rules:
    """Return the first explanation with rules that all apply; otherwise the first, so that it can be reported."""
    return next((rules for rules in explanations if all(map(leniency.allows, rules))), explanations[0])


def _foreign(served: Message, echoed: Message) -> Verdict:
    issued = {call.id for call in served.calls}
    return Verdict("foreign", (), any(call.id in issued for call in echoed.calls), supplied=False)


def _same_scheme(ours: str, theirs: str) -> bool:
    """Whether `theirs` also looks like an id issued here, or its letters and digits like those of one.

    Then it belongs to another call, and is not a rewritten form of `ours`.
    """
    (scheme, drawn), (other_scheme, other_drawn) = _split_random(ours), _split_random(theirs)
    if not drawn:
        return False
    bare = bare_id(scheme)
    return (scheme == other_scheme and len(drawn) == len(other_drawn)) or (
        bool(bare) and theirs == bare_id(theirs) and theirs.startswith(bare) and len(theirs) == len(bare) + len(drawn)
    )


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
    # the reasoning in its own member, and that at the beginning of the text: a reply may have both
    inline = split_think(served.content)[0]
    ours = (served.reasoning or "").strip(BLANK), inline
    theirs = (echoed.reasoning or "").strip(BLANK), inline if echoed.content == served.content else split_think(echoed.content)[0]
    if not {*theirs} <= {"", *ours}:
        return None
    rules = set()
    if not {*ours} <= {"", *theirs}:
        emptied = echoed.reasoning == "" and leniency.allows("reasoning-emptied")
        rules.add("reasoning-emptied" if emptied else "reasoning-dropped")
    if theirs[0] not in {"", ours[0]} or theirs[1] not in {"", ours[1]}:
        rules.add("inline-think")
    if None not in (echoed.reasoning, served.reasoning) and echoed.reasoning != served.reasoning and ours[0] == theirs[0]:
        rules.add("whitespace")
    return rules


# Interrupted replies.


class Cut(NamedTuple):
    """An event with text after which a harness may have disconnected, or an event with which a call began.

    `before` and `after` are the numbers of tokens sampled before the event and up to its end. `content` and `reasoning` are the numbers of
    characters up to its end; both are 0 if a call began with it.
    """

    before: int
    after: int
    content: int
    reasoning: int


class DeliveredPrefix(NamedTuple):
    """The part of an aborted turn's reply that a harness received.

    The tokens of `text` start at an index from `first` (inclusive) to `begun` (exclusive) and end at index `after` or slightly before it.
    If it ends after a call instead, `calls` is the number of its calls. The first begins after index `first`, the last after `begun`, and
    it ends at most at `after`.
    `rules` are the rules that were needed.
    """

    turn: Turn
    text: str
    first: int
    begun: int
    after: int
    rules: tuple[str, ...]
    calls: int = 0


def pack_cuts(cuts: Sequence[Cut]) -> bytes:
    """Pack cuts: 16 bytes each."""
    return ids.pack(number for cut in cuts for number in cut)


def unpack_cuts(packed: bytes) -> list[Cut]:
    """Unpack cuts."""
    numbers = ids.unpack(packed)
    return [Cut(*numbers[i : i + len(Cut._fields)]) for i in range(0, len(numbers), len(Cut._fields))]


def delivered_prefix(turn: Turn, echoed: Message, leniency: Leniency) -> DeliveredPrefix | None:
    """Find how much of an aborted turn's reply an echo contains; `None` if it is not a beginning of the reply, or if that is uncertain.

    The text is the turn's `content` up to a cut, with complete reasoning or none. If the echo has no text, it is the reasoning up to a cut.
    An echo with calls ends after its last call; without them it ends before the first call of the reply.
    """
    if not leniency.allows(INTERRUPTED):
        return None
    if echoed.calls:
        return _delivered_calls(turn, echoed, leniency)
    cuts = _cuts_of(turn, echoed)
    member = "content" if echoed.text else "reasoning"
    length = _exact_length(getattr(turn.served, member), getattr(echoed, member))
    found = [cut for cut in cuts if getattr(cut, member) == length] or cuts
    if len(found) != 1:
        return None
    (cut,) = found
    message = _up_to(turn.served, cut)
    verdict = judge(message, echoed, leniency)
    if not verdict.supplied:
        return None
    begin = next(cut for cut in unpack_cuts(turn.cuts) if getattr(cut, member))
    rules = tuple(sorted({*verdict.rules, INTERRUPTED}))
    return DeliveredPrefix(turn, getattr(message, member) or "", begin.before, begin.after, cut.after, rules)


def _delivered_calls(turn: Turn, echoed: Message, leniency: Leniency) -> DeliveredPrefix | None:
    calls = turn.served.calls[: len(echoed.calls)]
    cuts = [cut for cut in unpack_cuts(turn.cuts) if not (cut.content or cut.reasoning)]
    if CUT_OFF.isdisjoint(turn.marks) or len(cuts) != len(turn.served.calls) or not calls:
        return None
    if not all(map(_arrived, calls)):
        return None
    verdict = judge(msgspec.structs.replace(turn.served, calls=calls), echoed, leniency)
    if not verdict.supplied or not verdict.ids_kept:
        return None
    rules = tuple(sorted({*verdict.rules, INTERRUPTED}))
    after = cuts[len(calls)].after if len(calls) < len(cuts) else turn.completion_tokens
    return DeliveredPrefix(turn, "", cuts[0].before, cuts[len(calls) - 1].before, after, rules, len(calls))


def _arrived(call: ToolCall) -> bool:
    """Whether a call had arrived completely when its stream was cut: no beginning of a JSON object is one."""
    return bool(call.arguments.strip(BLANK)) and parse_object(call.arguments) is not None


def may_be_delivered(turn: Turn, echoed: Message) -> bool:
    """Whether an echo may be a beginning of an aborted turn's reply, certain or not."""
    if echoed.calls and turn.served.calls:
        ours, theirs = turn.served.calls[0], echoed.calls[0]
        if CUT_OFF.isdisjoint(turn.marks) or not keeps_id(ours.id, theirs.id):
            return False
        # an id that counts does not tell the call, and its arguments only if they arrived completely
        forms = [ours, *[calls[0] for _, calls in understood_calls((ours,), (theirs.name,))]]
        return is_unique(ours.id) or not _arrived(ours) or any(_judge_call(form, theirs, STRICT) is not None for form in forms)
    if not (echoed.calls or echoed.text or echoed.thought):
        return _may_have_said_nothing(turn)
    return bool(_cuts_of(turn, echoed))


def _may_have_said_nothing(turn: Turn) -> bool:
    """Whether a harness may have received nothing of an interrupted reply that it shows, or only blank text."""
    if CUT_OFF.isdisjoint(turn.marks):
        return False
    content, cuts = turn.served.content or "", unpack_cuts(turn.cuts)
    return not (cuts and content[inline_end(content) : cuts[0].content].strip(BLANK))


def _cuts_of(turn: Turn, echoed: Message) -> list[Cut]:
    """Return the cuts up to which an aborted turn's reply equals an echo, apart from whitespace.

    A reply has a cut for each event, so the text is not cut for each of them.
    """
    if echoed.calls or not (echoed.text or echoed.thought):
        return []
    cuts = unpack_cuts(turn.cuts)
    if not echoed.text:
        thoughts = _lengths(turn.served.reasoning or "", 0, echoed.thought)
        return [cut for cut in cuts if not cut.content and cut.reasoning in thoughts]
    content = turn.served.content or ""
    inline = inline_end(content)  # up to here, the beginning of a thought is text
    unclosed, texts = _lengths(content, 0, echoed.text), _lengths(content, inline, echoed.text)
    return [cut for cut in cuts if cut.content in (texts if cut.content >= inline else unclosed)]


def _lengths(text: str, start: int, wanted: str) -> range:
    """Return the lengths to which a text can be cut so that it has exactly these words after `start`, apart from whitespace around them."""
    begin = len(text) - len(text[start:].lstrip(BLANK))
    if not text.startswith(wanted, begin):
        return range(0)
    end = begin + len(wanted)
    return range(end, len(text) - len(text[end:].lstrip(BLANK)) + 1)


def _exact_length(text: str | None, beginning: str | None) -> int:
    """Return the length of the beginning of a text; 0 if it is none."""
    return len(beginning) if text and beginning and text.startswith(beginning) else 0


def _up_to(served: Message, cut: Cut) -> Message:
    return Message("assistant", (served.content or "")[: cut.content] or None, (served.reasoning or "")[: cut.reasoning] or None)
