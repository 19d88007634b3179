"""Compares the prompt that was sent with a plain rendering of the same messages, and finds the cause of each difference.

Without the proxy an engine renders the harness's messages again for every call. That rendering is compared with what was sent, token by
token. A *site* is one place where they differ.

The two are aligned with the fewest changes of single tokens (insert, delete, replace: Levenshtein distance). Tokens that are not aligned
form the sites. If several alignments are equally short, the one with its sites furthest to the right is used. So the sites of a pair are
unique, and the rendering can be rebuilt from the prompt and its sites.

Each site has a cause:

================  ======================================================================================================
`retokenized`     both sides decode to the same text: the engine tokenizes it differently than the model sampled it
a rule's name     the harness sent the reply back changed in that way (`core.rules`); otherwise there would be no site
`template`        everything else: the template writes even the unchanged reply differently or leaves it out (thinking before
                  the last question, a call's arguments serialized again)
================  ======================================================================================================

Decoding both sides shows whether their texts are equal. Trials show whether the harness or the template is the cause: the parts of the
replies (calls, text, reasoning) are restored one after another to what was served (`restore_part`), and the messages are rendered again.
The cause is the part whose restoration removes most of the site (`Trial`), or the template if more than that remains in the end. `verdict`
lists the rules that a reply needed.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from rapidfuzz.distance import Levenshtein

from tokencache.core import ids
from tokencache.core.messages import Message
from tokencache.core.rules import RULES, Leniency, Part
from tokencache.core.turn import Anchor, Turn, TurnMark
from tokencache.core.verdict import INTERRUPTED, judge_reply


class Site(msgspec.Struct, frozen=True):
    """One place where a plain rendering differs.

    Attributes:
        start, end: the half-open range of the prompt's tokens that the rendering lacks.
        rendered: the ids that the rendering has in their place.
        cause: `retokenized`, the name of a rule, or `template`; `""` if it is not known yet.
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
        rendered: the number of tokens in the plain rendering.
        tokens: the number of the prompt's tokens that the plain rendering lacks.
        sites: the places where they differ, in order; empty if they are equal.
    """

    rendered: int
    tokens: int
    sites: tuple[Site, ...] = ()

    @property
    def at(self) -> int | None:
        """The index of the first token of the prompt that differs; `None` if none does."""
        return self.sites[0].start if self.sites else None


def no_drift(prompt_tokens: int) -> Drift:
    """Return the drift of a prompt that equals its plain rendering."""
    return Drift(prompt_tokens, 0)


def differences(prompt: bytes, rendering: bytes) -> list[Site]:
    """Find where a rendering differs from a prompt, both packed; the sites have no cause yet.

    The sites are in order, do not touch, and need the fewest insertions, deletions and replacements. 100,000 tokens that differ in dozens
    of places take about 0.2 s and little memory (rapidfuzz 3 uses Hirschberg's algorithm for long sequences).
    """
    head = ids.common_head(prompt, rendering)
    ours, theirs = ids.tail(prompt, head), ids.tail(rendering, head)
    end = ids.common_end(ours, theirs)
    a, b = ids.unpack(ids.head(ours, ids.count(ours) - end)), ids.unpack(ids.head(theirs, ids.count(theirs) - end))
    distance = abs(len(a) - len(b))  # most changes only leave something out, so try a narrow band first
    codes = Levenshtein.opcodes(a, b, score_hint=distance + distance // 4 + 64)
    gaps = [_Gap(code.src_start, code.src_end, code.dest_start, code.dest_end) for code in codes if code.tag != "equal"]
    whole, other = ids.unpack(ids.tail(prompt, head)), ids.unpack(ids.tail(rendering, head))
    return [Site(head + g.start, head + g.end, tuple(other[g.first : g.last]), "") for g in _to_the_right(gaps, whole, other)]


class _Gap(NamedTuple):
    """A range of the prompt, `start` to `end`, and the rendering's range in its place, `first` to `last`."""

    start: int
    end: int
    first: int
    last: int


def _to_the_right(gaps: Sequence[_Gap], ours: Sequence[int], theirs: Sequence[int]) -> list[_Gap]:
    """Make an alignment unique: join gaps that touch, and move each as far to the right as possible, the last one first."""
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
    """Whether a gap before an aligned token means the same one token further to the right."""
    if gap.first == gap.last:
        return gap.start < gap.end and ours[gap.start] == ours[gap.end]
    return gap.start == gap.end and theirs[gap.first] == theirs[gap.last]


def _shrunk(gap: _Gap, ours: Sequence[int], theirs: Sequence[int]) -> _Gap:
    """Remove the tokens with which both ranges of a gap begin."""
    start, first = gap.start, gap.first
    while start < gap.end and first < gap.last and ours[start] == theirs[first]:
        start, first = start + 1, first + 1
    return _Gap(start, gap.end, first, gap.last)


def plain_rendering(prompt: Sequence[int], sites: Sequence[Site]) -> list[int]:
    """Rebuild the plain rendering from the prompt and its sites."""
    found: list[int] = []
    at = 0
    for site in sites:
        found += prompt[at : site.start]
        found += site.rendered
        at = site.end
    found += prompt[at:]
    return found


class MeasuredTurn(NamedTuple):
    """A turn of a sequence: where its prompt and completion end (in tokens), and the drift of its prompt (`None` if not measured)."""

    prompt: int
    completion: int
    drift: Drift | None


def break_points(token_ids: Sequence[int], steps: Sequence[MeasuredTurn]) -> list[int] | None:
    """Find the turns at which a sequence would break if every prompt were rendered plainly, as without the proxy.

    A turn continues the one before it if its plain rendering starts with that turn's plain rendering and the tokens that were sampled
    after it. A difference that the preceding turn already has does not break the sequence a second time.

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

PARTS: tuple[Part, ...] = ("calls", "text", "reasoning")
"""The parts of a reply, in the order in which trials restore them."""

_REACH = 3
"""Number of tokens decoded on either side of a site: up to four tokens may share one character."""


def own_spans(turn: Turn, turns: Mapping[str, Turn], prefix_of: Callable[[str], bytes]) -> list[Anchor]:
    """Find the replies of the model within a turn's prompt, in order.

    `turns` contains the turn and all its ancestors and origins. `prefix_of` returns a turn's packed prompt and completion.

    Raises:
        KeyError: an ancestor or origin is missing.
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
    """Return the anchors of a resplice, and the replies in the part of its prompt that it shares with the beginning of its origin."""
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
    """A reply in a request: its place among the messages, and the rules that were needed to recognize it."""

    place: int
    rules: tuple[str, ...]


def find_replies(
    spans: Sequence[Anchor], turns: Mapping[str, Turn], messages: Sequence[Message], tools: Container[str] = ()
) -> dict[str, FoundReply]:
    """Find the echo of each of a prompt's own spans among the messages, by turn; spans without an echo are left out.

    `tools` are the names of the request's tools.
    """
    every_rule = Leniency(harness_rules=frozenset(RULES), tools=tools)
    found: dict[str, FoundReply] = {}
    at = 0
    for span in spans:
        turn = turns[span.turn]
        for place in range(at, len(messages)):
            if messages[place].role != "assistant":
                continue
            verdict = judge_reply(turn, messages[place], every_rule)
            partly = verdict.kind == "foreign" and TurnMark.ABORTED in turn.marks
            if verdict.kind != "foreign" or partly:
                found[turn.id] = FoundReply(place, (INTERRUPTED,) if partly else verdict.rules)
                at = place + 1
                break
    return found


def restore_part(entry: dict[str, Any], served: Message, part: Part) -> dict[str, Any]:
    """Return an assistant message (chat completions) with one part restored to what was served."""
    restored = dict(entry)
    if part == "text":
        restored["content"] = served.content
    elif part == "reasoning":
        restored.pop("reasoning_content", None)
        restored["reasoning"] = served.reasoning
    else:
        calls = [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in served.calls]
        restored = {**restored, "tool_calls": calls} if calls else {name: value for name, value in restored.items() if name != "tool_calls"}
    return restored


def assign_turns(sites: Sequence[Site], spans: Sequence[Anchor]) -> list[Site]:
    """Set the turn of each site; `spans` are in order, and a site at a reply's border belongs to the reply."""
    found = []
    at = 0
    for site in sites:
        while at < len(spans) and spans[at].end < site.start:
            at += 1
        inside = at < len(spans) and spans[at].start <= site.end
        found.append(msgspec.structs.replace(site, turn=spans[at].turn) if inside else site)
    return found


def texts_to_decode(prompt: Sequence[int], sites: Sequence[Site]) -> list[list[int]]:
    """List the ids that must be decoded for `same_text`."""
    asked: list[list[int]] = []
    for group in _by_reply(sites):
        asked += _sides(prompt, sites, group)
        for place in group if len(group) > 1 else ():
            asked += _sides(prompt, sites, range(place, place + 1))
    return asked


def same_text(sites: Sequence[Site], texts: Sequence[str]) -> list[bool]:
    """Return for each site whether both sides decode to the same text; `texts` are the decoded `texts_to_decode`, in the same order.

    If both sides of a reply decode to the same text from its first site to its last, every site in it counts as the same text: the
    alignment of ids may pair the pieces of one word crosswise.
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
    """Group the indexes of sites by reply."""
    begins = [place for place, site in enumerate(sites) if not place or site.turn != sites[place - 1].turn]
    return [range(a, b) for a, b in zip(begins, [*begins[1:], len(sites)], strict=True)]


def _sides(prompt: Sequence[int], sites: Sequence[Site], group: range) -> tuple[list[int], list[int]]:
    """Return both sides of a run of sites, with a few tokens around them, but without neighbouring sites."""
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
    """A rendering with one more part of the replies restored.

    `changed` maps the turns whose reply had that part changed to the rules that they needed. `left` are the remaining sites with different
    texts.
    """

    part: Part
    changed: Mapping[str, Sequence[str]]
    left: Sequence[Site]


def name_causes(sites: Sequence[Site], same: Sequence[bool], trials: Sequence[Trial]) -> tuple[Site, ...]:
    """Set the cause of every site; `same` is the result of `same_text`, `trials` are in the order of `PARTS`."""
    size = max((site.end for site in [*sites, *(site for trial in trials for site in trial.left)]), default=0)
    remaining = [max(site.end - site.start, 1) for site in sites]
    best: list[tuple[int, str]] = [(0, TEMPLATE)] * len(sites)
    for trial in trials:
        covered, added = bytearray(size), {(site.start, site.rendered) for site in trial.left}
        for site in trial.left:
            covered[site.start : site.end] = b"\x01" * (site.end - site.start)
        for place, site in enumerate(sites):
            now = covered.count(1, site.start, site.end) if site.end > site.start else int((site.start, site.rendered) in added)
            gone = remaining[place] - now
            if gone > best[place][0] and site.turn in trial.changed:
                best[place] = (gone, rule_for_site(trial.changed[site.turn], trial.part))
            remaining[place] = now
    found = []
    for site, alike, (gone, cause), rest in zip(sites, same, best, remaining, strict=True):
        found.append(msgspec.structs.replace(site, cause=RETOKENIZED if alike else cause if gone > rest else TEMPLATE))
    return tuple(found)


def rule_for_site(rules: Sequence[str], part: Part) -> str:
    """Choose the rule that is the cause of a site, among those that a reply needed; `template` if none concerns this part.

    A rule that changes a value takes precedence; among equals, the first in the list of rules.
    """
    touching = [rule for rule in RULES.values() if rule.name in rules and rule.part == part]
    ranked = sorted(touching, key=lambda rule: rule.verdict != "rewritten")
    return ranked[0].name if ranked else TEMPLATE
