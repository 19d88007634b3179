"""Links answers that return as text to the turns that sampled them.

Two things in a session return as text, and no token connects them:

- the summary of a compaction. A call summarizes the conversation, and a new context begins with that summary (`compaction`);
- the answer of a sub-agent. It becomes a tool result, or a message, of the conversation that started it (`delegation`).

A link is evidence from the recorded texts, not a guess:

- the text is that of a whole answer without tool calls, which no call continued, and which had ended before the request with it was sent;
- the message is none of the model's. It is linked where it first occurs;
- the message consists of the whole answer, or contains it. The inside of `<summary>` in an answer counts too (Claude Code sends only that).
  White space does not count (Claude Code indents the answers of sub-agents), nor do JSON escapes (Codex writes them as JSON);
- the answer has at least `SHORTEST` characters, because short texts such as `Done.` are equal by chance;
- the model did not copy the answer from its own request, where the harness may have it from as well;
- for a delegation, the sub-agent began after the first answer of the conversation that receives the text. So the title of a session, which
  is made before or beside its first call, is no sub-agent.

If several turns sampled the same text, the link names them all. Summaries that a harness sends back as a message of the model (OpenCode)
are recognized by their tokens instead: `anchors`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from tokencache.core.context import Context, Raw
from tokencache.core.turn import BROKEN_OFF, Turn
from tokencache.dialects.chat.vocabulary import read_message
from tokencache.trajectories.values import Link

SHORTEST = 16
"""Characters that an answer must have to be linked, without its white space at both ends."""


class _Answer(NamedTuple):
    """An answer that may return: its turn and request, when its conversation began, and the texts by which it is recognized."""

    turn: Turn
    request: Context
    began: float
    texts: tuple[str, ...]

    def found_in(self, text: str) -> list[str]:
        """Return its texts that a message contains, if the model did not copy them from its own request."""
        found = [one for one in self.texts if one in text]
        return found if found and not any(one in _read(raw)[1] for one in found for raw in self.request.messages) else []


class _Request(NamedTuple):
    """What a turn received.

    Attributes:
        begins: whether a new context begins with it.
        root_ended: when the first call of its tree had ended.
        messages: the messages that its request does not share with that of its context base, with their indices.
    """

    turn: Turn
    begins: bool
    root_ended: float
    messages: list[tuple[int, Raw]]


class Line(NamedTuple):
    """The turns of a sequence, and the id of its root (`core.lineage`)."""

    root: str
    turns: Sequence[Turn]


def links(lines: Sequence[Line], contexts: Mapping[str, Context]) -> list[Link]:
    """Find the links of a session from its sequences and the whole requests of its turns, by turn id. Turns without a request have none."""
    answers = [*_answers(lines, contexts)]
    if not answers or len(lines) < 2:  # noqa: PLR2004  # an answer that no call continues returns in another sequence
        return []
    found: list[Link] = []
    linked: set[str] = set()
    seen: set[tuple[str, str]] = set()
    for request in sorted(_requests(lines, contexts), key=lambda one: one.turn.created):
        for place, raw in request.messages:
            role, text = _read(raw)
            if role == "assistant" or len(text) < SHORTEST or (role, text) in seen:
                continue
            seen.add((role, text))
            link = _link(request, place, role, text, answers)
            if link is not None and not linked.issuperset(link.sources):  # later messages may quote the same answer
                found.append(link)
                linked.update(link.sources)
    return found


def _answers(lines: Sequence[Line], contexts: Mapping[str, Context]) -> Iterator[_Answer]:
    """Find the answers that may return."""
    continued = {turn.parent for line in lines for turn in line.turns}
    for line in lines:
        for turn in line.turns:
            if turn.id in continued or turn.id not in contexts or turn.served.calls or not BROKEN_OFF.isdisjoint(turn.marks):
                continue
            if texts := _texts(turn.served.text):
                yield _Answer(turn, contexts[turn.id], line.turns[0].created, texts)


def _texts(answer: str) -> tuple[str, ...]:
    """Return the texts by which an answer is recognized, each plain and as JSON writes it."""
    inside = answer.partition("<summary>")[2].partition("</summary>")[0]
    plain = [text.strip() for text in (answer, inside) if len(text.strip()) >= SHORTEST]
    escaped = [json.dumps(text, ensure_ascii=ascii_only)[1:-1] for text in plain for ascii_only in (False, True)]
    return tuple(dict.fromkeys(_collapsed(text) for text in (*plain, *escaped)))


def _collapsed(text: str) -> str:
    return " ".join(text.split())


def _requests(lines: Sequence[Line], contexts: Mapping[str, Context]) -> Iterator[_Request]:
    ended = {line.turns[0].id: line.turns[0].created + line.turns[0].seconds for line in lines}
    for line in lines:
        for turn in line.turns:
            if turn.id in contexts:
                shared = turn.context_shared if turn.context_base is not None else 0
                messages = [*enumerate(contexts[turn.id].messages)][shared:]
                yield _Request(turn, turn.parent is None, ended.get(line.root, ended[line.turns[0].id]), messages)


def _read(raw: Raw) -> tuple[str, str]:
    """Read a message: its role, and its text with single spaces; no text if it cannot be read."""
    try:
        message = read_message(msgspec.json.decode(raw))
    except (ValueError, RecursionError):
        return "", ""
    return message.role, _collapsed(message.content or "")


def _link(request: _Request, place: int, role: str, text: str, answers: Sequence[_Answer]) -> Link | None:
    """Link a message to the answers that it contains."""
    kind = "compaction" if request.begins and role != "tool" else "delegation"
    found = {
        answer.turn.id: texts
        for answer in answers
        if answer.turn.created + answer.turn.seconds <= request.turn.created
        and (kind == "compaction" or answer.began >= request.root_ended)
        and (texts := answer.found_in(text))
    }
    if not found:
        return None
    return Link(
        kind=kind,
        sources=[*found],
        turn=request.turn.id,
        message=place,
        evidence="equal" if any(text in texts for texts in found.values()) else "contained",
    )
