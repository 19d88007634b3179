"""Drift: where a plain rendering of the same messages differs from the prompt that was sent.

Without the proxy an engine renders the harness's messages anew with every call. What that would have given is compared
with what was sent, token by token. A *site* is one place where they differ, and it has a cause (`drift_causes`): the words
were changed on the way, the template leaves something out, or nothing is different but the tokenization of the same text.

The two are aligned with the fewest changes of single tokens (insert, delete, replace: Levenshtein's distance). Sites are
what is not aligned; where several alignments are equally short, each site stands as far to the right as it can. So the
sites of one pair are always the same, and with the prompt they say the rendering: nothing else need be kept of it.

The causes of drift: why a plain rendering differs, site by site, each told from evidence.

================  ===================================================================================================
`retokenized`     both sides read the same: the engine tokenizes the text otherwise than the model sampled it
a rule's name     the harness sent the reply back changed in that way (`rules`); had it not, the site would not be there
`template`        everything else: given the reply exactly as it was served, the template still writes it otherwise or
                  leaves it out (thinking before the last question, a call's arguments serialised anew)
================  ===================================================================================================

What reads the same is found out by reading both sides. Whether the harness or the template is to blame is found out by
trial: the messages are rendered once more with the model's own words put back (`restore_member`), one *member* of the replies
after the other (calls, text, reasoning), and a site is due to that member with which most of it vanishes (`Trial`), or to
the template if more is left in the end. Which rules a reply needed is the verdict on it (`verdict`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from rapidfuzz.distance import Levenshtein

from tokencache.core import ids
from tokencache.core.messages import Message
from tokencache.core.rules import RULES, Leniency
from tokencache.core.rules.base import Part
from tokencache.core.turn import Anchor, Turn, TurnMark
from tokencache.core.verdict import INTERRUPTED, judge


class Site(msgspec.Struct, frozen=True):
    """One place where a plain rendering differs.

    Attributes:
        start, end: the half-open range of the prompt's tokens that the rendering has not.
        rendered: the ids that it has in their place.
        cause: `retokenized` (the same text in other tokens), a rule by which the reply there was forgiven, or `template`
            (the template writes it otherwise, or leaves it out).
        turn: the turn that sampled the tokens; `""` outside all replies.
    """

    start: int
    end: int
    rendered: tuple[int, ...]
    cause: str
    turn: str = ""


class Drift(msgspec.Struct, frozen=True):
    """How a turn's prompt differs from a plain rendering of its messages.

    Attributes:
        rendered: how many tokens the plain rendering has.
        tokens: how many of the prompt's tokens it has not, in their order.
        sites: where; empty if it is the very same prompt.
    """

    rendered: int
    tokens: int
    sites: tuple[Site, ...] = ()

    @property
    def at(self) -> int | None:
        """The first token of the prompt that differs; `None` if none does."""
        return self.sites[0].start if self.sites else None


def no_drift(prompt_tokens: int) -> Drift:
    """The drift of a prompt that is its own plain rendering."""
    return Drift(prompt_tokens, 0)


def differences(prompt: bytes, rendering: bytes) -> list[Site]:
    """Find where a rendering differs from a prompt, both packed; the sites have no cause yet.

    They are in order and apart from each other, and no others need fewer insertions, deletions and replacements.
    Costs about 0.2 s for 100,000 tokens that differ in dozens of places, and no memory to speak of (rapidfuzz 3, which
    parts long sequences as Hirschberg did).
    """
    head = ids.common_head(prompt, rendering)
    ours, theirs = ids.tail(prompt, head), ids.tail(rendering, head)
    end = ids.common_end(ours, theirs)
    a, b = ids.unpack(ids.head(ours, ids.count(ours) - end)), ids.unpack(ids.head(theirs, ids.count(theirs) - end))
    distance = abs(len(a) - len(b))  # nearly all changes leave something out: a narrow band is tried first
    codes = Levenshtein.opcodes(a, b, score_hint=distance + distance // 4 + 64)
    gaps = [_Gap(code.src_start, code.src_end, code.dest_start, code.dest_end) for code in codes if code.tag != "equal"]
    whole, other = ids.unpack(ids.tail(prompt, head)), ids.unpack(ids.tail(rendering, head))
    return [Site(head + g.start, head + g.end, tuple(other[g.first : g.last]), "") for g in _to_the_right(gaps, whole, other)]


class _Gap(NamedTuple):
    """A range of the prompt, `start` to `end`, and what the rendering has for it, `first` to `last`."""

    start: int
    end: int
    first: int
    last: int


def _to_the_right(gaps: Sequence[_Gap], ours: Sequence[int], theirs: Sequence[int]) -> list[_Gap]:
    """Write an alignment in the one way: gaps that touch are one, and each stands as far right as it can, the last one first."""
    placed: list[_Gap] = []
    for gap in reversed(gaps):
        now = _shrunk(gap, ours, theirs)
        while True:
            limit = placed[-1].start if placed else len(ours)
            if placed and now.end == limit:
                after = placed.pop()
                now = _shrunk(_Gap(now.start, after.end, now.first, after.last), ours, theirs)
            elif now.end < limit and _may_move(now, ours, theirs):
                now = _Gap(*(place + 1 for place in now))
            else:
                break
        placed.append(now)
    return placed[::-1]


def _may_move(gap: _Gap, ours: Sequence[int], theirs: Sequence[int]) -> bool:
    """Whether a gap that stands before an aligned token says the same one token further on."""
    if gap.first == gap.last:
        return gap.start < gap.end and ours[gap.start] == ours[gap.end]
    return gap.start == gap.end and theirs[gap.first] == theirs[gap.last]


def _shrunk(gap: _Gap, ours: Sequence[int], theirs: Sequence[int]) -> _Gap:
    """Take off what a gap begins with on both sides."""
    start, first = gap.start, gap.first
    while start < gap.end and first < gap.last and ours[start] == theirs[first]:
        start, first = start + 1, first + 1
    return _Gap(start, gap.end, first, gap.last)


def plain_rendering(prompt: Sequence[int], sites: Sequence[Site]) -> list[int]:
    """Put the plain rendering together again: the prompt with what its sites say in their places."""
    found: list[int] = []
    at = 0
    for site in sites:
        found += prompt[at : site.start]
        found += site.rendered
        at = site.end
    found += prompt[at:]
    return found


class MeasuredTurn(NamedTuple):
    """A turn of a sequence: where its prompt and its completion end, and the drift of its prompt (`None`: not measured)."""

    prompt: int
    completion: int
    drift: Drift | None


def break_points(token_ids: Sequence[int], steps: Sequence[MeasuredTurn]) -> list[int] | None:
    """Find the turns of a sequence at which it would break if every prompt were rendered plainly.

    That is what happens to who has only the text: a turn goes on from the one before it if its plain rendering starts
    with that turn's plain rendering and the tokens that were sampled behind it. A difference that was there already
    breaks nothing a second time.

    Returns:
        Places in `steps`, without 0; `None` if the drift of some turn was not measured.
    """
    found = []
    before: list[int] = []
    for place, step in enumerate(steps):
        if step.drift is None:
            return None
        rendering = plain_rendering(token_ids[: step.prompt], step.drift.sites)
        if place and rendering[: len(before)] != before:
            found.append(place)
        before = rendering + list(token_ids[step.prompt : step.completion])
    return found


RETOKENIZED, TEMPLATE = "retokenized", "template"

Member = Part
MEMBERS: tuple[Member, ...] = ("calls", "text", "reasoning")
"""In the order in which they are put back."""

_EVERYONE = Leniency(harness_rules=frozenset(RULES))
_REACH = 3
"""Tokens read on either side of a site: a character's bytes may be spread over four tokens."""


def member_of(rule: str) -> Member:
    """Say which member of a reply a rule touches."""
    return RULES[rule].part


def own_spans(turn: Turn, turns: Mapping[str, Turn], prefix_of: Callable[[str], bytes]) -> list[Anchor]:
    """Find the replies of the model within a turn's prompt: whose, and where, in order.

    `turns` holds the turn and all that it rests on; `prefix_of` gives a turn's packed prompt and completion.

    Raises:
        KeyError: a turn that it rests on is missing.
    """
    line: list[Anchor] = []
    at: Turn | None = turn
    while at is not None:
        if at.match == "resplice":
            line += _respliced(at, turns, prefix_of)
            break
        before = turns[at.parent] if at.parent is not None else None
        if before is not None:
            line.append(Anchor(before.id, before.prompt_tokens, before.prompt_tokens + before.completion_tokens))
        at = before
    return sorted(line, key=lambda span: span.start)


def _respliced(turn: Turn, turns: Mapping[str, Turn], prefix_of: Callable[[str], bytes]) -> list[Anchor]:
    """The anchors of a resplice, and what its prompt still begins with of the turn it came from."""
    found = {anchor.start: anchor for anchor in turn.anchors}
    if turn.origin is not None:
        origin = turns[turn.origin]
        same = ids.common_head(prefix_of(origin.id), ids.head(prefix_of(turn.id), turn.prompt_tokens))
        whole = Anchor(origin.id, origin.prompt_tokens, origin.prompt_tokens + origin.completion_tokens)
        for span in (*own_spans(origin, turns, prefix_of), whole):
            if span.end <= same:
                found.setdefault(span.start, span)
    return list(found.values())


class FoundReply(NamedTuple):
    """A reply as it stands in a request: at which place among the messages, and the rules that recognise it there."""

    place: int
    rules: tuple[str, ...]


def find_replies(spans: Sequence[Anchor], turns: Mapping[str, Turn], messages: Sequence[Message]) -> dict[str, FoundReply]:
    """Find the message that each of a prompt's own spans came back as, by turn; one that cannot be found is left out."""
    found: dict[str, FoundReply] = {}
    at = 0
    for span in spans:
        turn = turns[span.turn]
        for place in range(at, len(messages)):
            if messages[place].role != "assistant":
                continue
            verdict = judge(turn.served, messages[place], _EVERYONE)
            partly = verdict.kind == "foreign" and TurnMark.ABORTED in turn.marks
            if verdict.kind != "foreign" or partly:
                found[turn.id] = FoundReply(place, (INTERRUPTED,) if partly else verdict.rules)
                at = place + 1
                break
    return found


def restore_member(entry: dict[str, Any], served: Message, member: Member) -> dict[str, Any]:
    """Write one member of an assistant's message (chat completions) as it had been served."""
    told = dict(entry)
    if member == "text":
        told["content"] = served.content
    elif member == "reasoning":
        told.pop("reasoning_content", None)
        told["reasoning"] = served.reasoning
    else:
        calls = [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in served.calls]
        told = {**told, "tool_calls": calls} if calls else {name: value for name, value in told.items() if name != "tool_calls"}
    return told


def assign_turns(sites: Sequence[Site], spans: Sequence[Anchor]) -> list[Site]:
    """Name the turn whose reply each site touches; `spans` are in order, and a site at a reply's border is the reply's."""
    found = []
    at = 0
    for site in sites:
        while at < len(spans) and spans[at].end < site.start:
            at += 1
        inside = at < len(spans) and spans[at].start <= site.end
        found.append(msgspec.structs.replace(site, turn=spans[at].turn) if inside else site)
    return found


def texts_to_decode(prompt: Sequence[int], sites: Sequence[Site]) -> list[list[int]]:
    """List what must be read to tell which sites are the same text: see `same_text`."""
    asked: list[list[int]] = []
    for group in _by_reply(sites):
        asked += _sides(prompt, sites, group)
        for place in group if len(group) > 1 else ():
            asked += _sides(prompt, sites, range(place, place + 1))
    return asked


def same_text(sites: Sequence[Site], texts: Sequence[str]) -> list[bool]:
    """Say of each site whether both sides read the same; `texts` are those of `texts_to_decode`, in its order.

    Where all of a reply reads the same, from its first site to its last, so does each: an alignment of ids may pair the
    pieces of one word crosswise.
    """
    found = [False] * len(sites)
    at = 0
    for group in _by_reply(sites):
        whole = texts[at] == texts[at + 1]
        at += 2
        for place in group:
            found[place] = whole
            if len(group) > 1:
                found[place] |= texts[at] == texts[at + 1]
                at += 2
    return found


def _by_reply(sites: Sequence[Site]) -> list[range]:
    """Part the places of sites into runs of one reply."""
    begins = [place for place, site in enumerate(sites) if not place or site.turn != sites[place - 1].turn]
    return [range(a, b) for a, b in zip(begins, [*begins[1:], len(sites)], strict=True)]


def _sides(prompt: Sequence[int], sites: Sequence[Site], group: range) -> tuple[list[int], list[int]]:
    """Both sides of a run of sites, from a little before the first to a little behind the last, without its neighbours."""
    first, last = sites[group[0]], sites[group[-1]]
    low = max(first.start - _REACH, sites[group[0] - 1].end if group[0] else 0)
    high = min(last.end + _REACH, sites[group[-1] + 1].start if group[-1] + 1 < len(sites) else len(prompt))
    theirs: list[int] = []
    at = low
    for place in group:
        theirs += [*prompt[at : sites[place].start], *sites[place].rendered]
        at = sites[place].end
    return list(prompt[low:high]), [*theirs, *prompt[at:high]]


class Trial(NamedTuple):
    """One more member of the replies put back.

    `changed` are the replies that it concerns (turn → rules); `left` the sites that are left by then and read otherwise.
    """

    member: Member
    changed: Mapping[str, Sequence[str]]
    left: Sequence[Site]


def name_causes(sites: Sequence[Site], same: Sequence[bool], trials: Sequence[Trial]) -> tuple[Site, ...]:
    """Give every site its cause; `same` is that of `same_text`, `trials` are in the order in which they were made."""
    size = max((site.end for site in [*sites, *(site for trial in trials for site in trial.left)]), default=0)
    standing = [max(site.end - site.start, 1) for site in sites]
    best: list[tuple[int, str]] = [(0, TEMPLATE)] * len(sites)
    for trial in trials:
        covered, added = bytearray(size), {(site.start, site.rendered) for site in trial.left}
        for site in trial.left:
            covered[site.start : site.end] = b"\x01" * (site.end - site.start)
        for place, site in enumerate(sites):
            now = covered.count(1, site.start, site.end) if site.end > site.start else int((site.start, site.rendered) in added)
            gone = standing[place] - now
            if gone > best[place][0] and site.turn in trial.changed:
                best[place] = (gone, rule_for_site(trial.changed[site.turn], trial.member))
            standing[place] = now
    found = []
    for site, alike, (gone, cause), rest in zip(sites, same, best, standing, strict=True):
        found.append(msgspec.structs.replace(site, cause=RETOKENIZED if alike else cause if gone > rest else TEMPLATE))
    return tuple(found)


def rule_for_site(rules: Sequence[str], member: Member) -> str:
    """Of the rules that a reply needed, choose the one that a member's site is called after; `template` if none touches it.

    One that changes a value comes before one that says the same otherwise; of equals, the first in the list of rules.
    """
    touching = [rule for rule in RULES.values() if rule.name in rules and member_of(rule.name) == member]
    ranked = sorted(touching, key=lambda rule: rule.verdict != "rewritten")
    return ranked[0].name if ranked else TEMPLATE
