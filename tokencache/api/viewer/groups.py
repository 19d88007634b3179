"""Compares the sessions of a group: their rewards and advantages, their lengths, their last answers, and where their tokens part.

Of each session one sequence is compared: the longest that begins with a plain prompt (`root`), or else the longest. Sequences that are
equal up to a token and differ there *part* at it. Sequences that are equal after it may part again later, so partings form a tree.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tokencache.api.viewer.sessions import is_scored
from tokencache.api.viewer.tokens import SequenceLayout, TextsUnavailable, TokenTexts, lay_out
from tokencache.api.viewer.transcript import Place, needed_contexts, transcribe
from tokencache.batching.advantages import mean_std
from tokencache.core import ids
from tokencache.core.lineage import lineages
from tokencache.core.turn import Turn
from tokencache.recent import RecentBySize
from tokencache.store.base import Store
from tokencache.trajectories.runs import distribution, has_failed
from tokencache.trajectories.summaries import SessionSummary

MAX_MEMBERS = 64
"""Sessions that are compared: the ones used last."""
_CACHED_BYTES = 64 * 2**20
_MOST_CHARACTERS = 4000
"""Characters of a last answer that are shown, from its end: the verdict is often there."""
_VALUES = ("reward", "trainable", "length", "turns")
"""Members whose distribution over the sessions that did not fail is shown."""
_BEFORE, _AFTER = 8, 16
"""Tokens that are shown before and after a parting."""


class Parting(NamedTuple):
    """Sequences are equal before token `at` and differ there. Each branch holds the names of those that stay equal, and their next parting.

    The parting of a branch is `None` if it has one name, or if its sequences are equal to their end.
    """

    at: int
    branches: Sequence[tuple[Sequence[str], "Parting | None"]]


def find_parting(sequences: Mapping[str, bytes]) -> Parting | None:
    """Find where sequences of packed ids part; `None` if they are equal. One that ends where others go on is a branch of its own."""
    first, last = min(sequences.values(), default=b""), max(sequences.values(), default=b"")
    if first == last:
        return None
    at = ids.common_head(first, last)  # all others are between them in order, so they share at least as much
    by_token: dict[bytes, dict[str, bytes]] = {}
    for name, packed in sequences.items():
        by_token.setdefault(packed[at * ids.ID_BYTES : (at + 1) * ids.ID_BYTES], {})[name] = packed
    return Parting(at, [(list(branch), find_parting(branch)) for branch in by_token.values()])


class _Member(NamedTuple):
    summary: SessionSummary
    layout: SequenceLayout
    turns: Mapping[str, Turn]
    places: Sequence[Place]

    @property
    def tokens(self) -> int:
        return self.layout.tokens

    def object(self) -> dict[str, Any]:
        line, served = self.layout.turns, self.layout.turns[-1].served
        return {
            **msgspec.to_builtins(self.summary),
            "sequence": line[0].id,
            "length": self.tokens,
            "trainable": sum(turn.chosen_tokens for turn in line if is_scored(turn)),
            "answer": _end(
                "\n".join(filter(None, ((served.content or "").strip(), *(f"{one.name}({one.arguments})" for one in served.calls))))
            ),
            "thought": _end((served.reasoning or "").strip()),
        }

    def place(self, token: int) -> dict[str, Any]:
        """Describe where a token is: its message, and the turn that sampled it or has it in its prompt."""
        run = next(run for run in self.layout.runs if token < run.end)
        place = next(place for place in self.places if token < place.tokens[1])
        role = place.message.role if place.message is not None else ""
        return {"message": place.at, "role": role, "turn": list(self.turns).index(run.turn), "kind": run.kind}


class GroupComparison:
    """Compares groups, one at a time."""

    def __init__(self, store: Store, texts: TokenTexts) -> None:
        self._store = store
        self._texts = texts
        self._lock = asyncio.Lock()
        self._known: RecentBySize[tuple[str, float, int], _Member] = RecentBySize(_CACHED_BYTES, lambda member: member.layout.size())

    async def compare(self, summaries: Sequence[SessionSummary]) -> dict[str, Any]:
        """Compare the sessions of a group.

        Sessions beyond the first `MAX_MEMBERS`, and those without turns or with torn records, are counted but not compared.

        Raises:
            StoreError: the store failed.
        """
        async with self._lock:
            read = [await self._member(summary) for summary in summaries[:MAX_MEMBERS]]
            members = {member.summary.session: member for member in read if member is not None}
            parting = await asyncio.to_thread(find_parting, {name: member.layout.packed for name, member in members.items()})
            left_out = [summary for summary in summaries if summary.session not in members]
            advantages, counted = _advantages(summaries), [one.object() for one in members.values() if not has_failed(one.summary)]
            values = {name: [one[name] for one in counted if one[name] is not None] for name in _VALUES}
            return {
                "found": len(summaries),
                "members": [{**member.object(), "advantage": advantages.get(name)} for name, member in members.items()],
                "values": {name: distribution(several) for name, several in values.items() if several},
                "not_compared": left_out[:MAX_MEMBERS],
                "shared": min((member.tokens for member in members.values()), default=0) if parting is None else parting.at,
                "parting": await self._parting(parting, members),
            }

    async def _member(self, summary: SessionSummary) -> _Member | None:
        """Read a session; `None` if it cannot be compared. It is read again only when it has more turns, because a page asks regularly."""
        key = (summary.session, summary.created, summary.turns)
        known = self._known.get(key)
        if known is not None:
            return known._replace(summary=summary)
        member = await self._read(summary) if summary.turns else None
        if member is not None:
            self._known[key] = member
        return member

    async def _read(self, summary: SessionSummary) -> _Member | None:
        name = summary.session
        turns = await self._store.turns(name)
        lines = lineages(turns)
        if not lines:
            return None
        line = max(lines, key=lambda line: (line[0].match == "root", line[-1].prompt_tokens + line[-1].completion_tokens))
        lookup = {turn.id: turn for turn in turns}
        try:
            prefix = await self._store.prefix(name, line[-1].id)
            contexts = await self._store.contexts(name, needed_contexts(line[-1], lookup))
            layout = await asyncio.to_thread(lay_out, line, prefix.ids, {}, lookup)
            places = (await asyncio.to_thread(transcribe, line[-1], lookup, contexts, layout.runs)).places
        except (KeyError, ValueError):  # deleted meanwhile, or torn
            return None
        return _Member(summary, layout, lookup, places)

    async def _parting(self, parting: Parting | None, members: Mapping[str, _Member]) -> dict[str, Any] | None:
        if parting is None:
            return None
        at = parting.at
        going_on = next(members[name] for names, _ in parting.branches for name in names if members[name].tokens > at)
        return {
            "at": at,
            **going_on.place(at),
            "before": await self._text(going_on, max(at - _BEFORE, 0), at),
            "branches": [
                {
                    "sessions": names,
                    "text": await self._text(members[names[0]], at, at + _AFTER),
                    "ends": members[names[0]].tokens == at,
                    "parting": await self._parting(then, members),
                }
                for names, then in parting.branches
            ],
        }

    async def _text(self, member: _Member, start: int, end: int) -> str:
        """Return the text of a range of tokens, or their ids if they cannot be decoded."""
        wanted = member.layout.ids(start, min(end, member.tokens))
        try:
            return "".join(text or "" for text in await self._texts.decode(member.layout.turns[-1].model, wanted))
        except TextsUnavailable:
            return " ".join(map(str, wanted))


def _advantages(summaries: Sequence[SessionSummary]) -> dict[str, float]:
    """Return the advantage (GRPO) of each valid session that has a reward, over all of them that are over."""
    rewards = {one.session: one.reward for one in summaries if one.valid and one.state != "open" and one.reward is not None}
    return dict(zip(rewards, mean_std(list(rewards.values())), strict=True))


def _end(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"…{text[-_MOST_CHARACTERS:]}"
