"""The meter: has the engine render a session's messages plainly, and compares that with what was sent.

Only prompts that the proxy put together can drift; those that the engine rendered itself are their own rendering, and
nobody is asked. A measurement costs one rendering, and one more for each member of the replies (calls, text, reasoning)
that the harness sent back changed. It must not be in anybody's way: one is made at a time, within a time limit, and what
an engine that is away or slow leaves unmeasured is no error but a reason. A turn never changes, so what was measured is
remembered for as long as the engine is the one that was probed.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

import msgspec

from tokencache.api.export_worker import Press
from tokencache.core import drift as causes
from tokencache.core import ids
from tokencache.core.context import Context, whole_context
from tokencache.core.drift import Drift, Site, differences, no_drift
from tokencache.core.lineage import lineages
from tokencache.core.turn import Turn, rebuild_prefix
from tokencache.dialects.chat.messages import read_message, with_stand_ins
from tokencache.dialects.chat.rendering import RenderArgs
from tokencache.engine.model import Model
from tokencache.engine.pool import Pool
from tokencache.engine.template.renderer import RenderError, TemplateRefusedError
from tokencache.errors import EngineError, HarnessError
from tokencache.trajectories.rollout import Records

Mode = Literal["off", "sequences", "turns"]
MODES: tuple[Mode, ...] = ("off", "sequences", "turns")

REMEMBERED = 8192
"""Turns whose drift is remembered."""
_SPLICED = frozenset({"continue", "branch", "resplice"})


def mode_named(name: str) -> Mode:
    """Read a mode.

    Raises:
        HarnessError: there is none of this name.
    """
    for mode in MODES:
        if mode == name:
            return mode
    raise HarnessError(f"drift {name[:80]!r} is not one of: {', '.join(MODES)}", param="drift")


def wanted(turns: Sequence[Turn], mode: Mode) -> list[Turn]:
    """Choose the turns to measure: none, the last of each sequence (its prompt holds all others), or all."""
    if mode == "sequences":
        return [line[-1] for line in lineages(turns)]
    return list(turns) if mode == "turns" else []


class Meter:
    """Measures; `limit` is in seconds, for all of a session's turns together."""

    def __init__(self, engine: Pool, press: Press, *, limit: float) -> None:
        self._engine = engine
        self._press = press
        self._limit = limit
        self._one_at_a_time = asyncio.Lock()
        self._known: WeakKeyDictionary[Model, OrderedDict[str, Drift]] = WeakKeyDictionary()

    async def measured(self, records: Records, mode: Mode) -> Records:
        """Add to a session's records (with contexts) the drift of its turns, and of those left unmeasured the reason.

        ==================  ========================================================================
        `not-kept`          its messages are not there
        `engine-disagrees`  the engine used other ids than were sent, and did not say whose
        `engine-away`       the engine gave no rendering
        `template-refuses`  the template, or the engine, will not have these messages
        `time-limit`        measuring the turns before it took too long
        `torn-record`       what was stored does not fit together
        ==================  ========================================================================
        """
        found: dict[str, Drift] = {}
        unmeasured: dict[str, str] = {}
        chosen = wanted(records.turns, mode)
        try:
            async with asyncio.timeout(self._limit):
                for turn in chosen:
                    result = await self._turn(turn, records)
                    if isinstance(result, Drift):
                        found[turn.id] = result
                    else:
                        unmeasured[turn.id] = result
        except TimeoutError:
            unmeasured |= {turn.id: "time-limit" for turn in chosen if turn.id not in found and turn.id not in unmeasured}
        return msgspec.structs.replace(records, drift=found, unmeasured=unmeasured)

    async def _turn(self, turn: Turn, records: Records) -> Drift | str:
        """Measure one turn; a word for why it cannot be."""
        if turn.match not in _SPLICED:
            return "engine-disagrees" if "engine-disagrees" in turn.marks else no_drift(turn.prompt_tokens)
        if not records.contexts.get(turn.id):
            return "not-kept"
        try:
            return await self._spliced(turn, records)
        except (EngineError, RenderError) as why:
            return "template-refuses" if isinstance(why, TemplateRefusedError) else "engine-away"
        except (KeyError, ValueError):
            return "torn-record"

    async def _spliced(self, turn: Turn, records: Records) -> Drift:
        model = await self._engine.model(turn.model)
        known = self._known.setdefault(model, OrderedDict())
        async with self._one_at_a_time:
            if turn.id not in known:
                known[turn.id] = await self._compare(await asyncio.to_thread(_Asked, turn, records, model))
                if len(known) > REMEMBERED:
                    known.popitem(last=False)
        known.move_to_end(turn.id)
        return known[turn.id]

    async def _compare(self, asked: "_Asked") -> Drift:
        """Compare a spliced prompt with the plain rendering of its messages.

        Raises:
            RenderError: the engine renders nothing, or cannot read its own tokens.
        """
        rendering, sites = await self._sites(asked, asked.messages)
        if not sites:
            return no_drift(ids.count(asked.prompt))
        same = await asked.same_text(sites)
        trials = []
        for member, changed in asked.changed().items():
            if any(site.turn in changed for site, alike in zip(sites, same, strict=True) if not alike):
                _, left = await self._sites(asked, asked.put_back(member))
                others = [site for site, alike in zip(left, await asked.same_text(left), strict=True) if not alike]
                trials.append(causes.Trial(member, changed, others))
        return Drift(rendering, sum(site.end - site.start for site in sites), causes.name_causes(sites, same, trials))

    async def _sites(self, asked: "_Asked", messages: Sequence[bytes]) -> tuple[int, list[Site]]:
        """Have messages rendered: how many tokens that makes, and where they are not those of the prompt."""
        rendering = await asked.rendered(messages)
        found = await self._press.run(ids.count(rendering), differences, asked.prompt, rendering)
        return ids.count(rendering), causes.assign_turns(found, asked.spans)


class _Asked:
    """A turn as it is asked about: its prompt, its messages as the harness wrote them, and the replies among them."""

    def __init__(self, turn: Turn, records: Records, model: Model) -> None:
        self._turns = {one.id: one for one in records.turns}
        lookup = {one.id: (one, records.tokens[one.id]) for one in records.turns}
        context = whole_context(turn.id, self._turns, records.contexts)
        self._turn, self._model, self._args = turn, model, _arguments(context)
        self._entries: list[dict[str, Any]] = [msgspec.json.decode(raw) for raw in context.messages]
        self.messages = [bytes(raw) for raw in context.messages]
        self.prompt = rebuild_prefix(lookup, turn.id).prompt
        self.spans = causes.own_spans(turn, self._turns, lambda name: rebuild_prefix(lookup, name).ids)
        self._echoes = causes.find_replies(self.spans, self._turns, [read_message(entry) for entry in self._entries])

    def changed(self) -> Mapping[causes.Member, dict[str, tuple[str, ...]]]:
        """The replies that came back changed, by the members that were, in the order of putting back: turn → rules."""
        by_member: dict[causes.Member, dict[str, tuple[str, ...]]] = {}
        for member in causes.MEMBERS:
            touched = {
                turn: echo.rules for turn, echo in self._echoes.items() if causes.rule_for_site(echo.rules, member) != causes.TEMPLATE
            }
            if touched:
                by_member[member] = touched
        return by_member

    def put_back(self, member: causes.Member) -> list[bytes]:
        """The messages with all replies as they had been served, up to this member; what a harness did not hear stays away."""
        names: dict[str, str] = {}
        members = causes.MEMBERS[: causes.MEMBERS.index(member) + 1]  # a call may have come back as text
        for turn, echo in self._echoes.items():
            if causes.INTERRUPTED not in echo.rules:
                before = told = self._entries[echo.place]
                for each in members:
                    told = causes.restore_member(told, self._turns[turn].served, each)
                self._entries[echo.place] = told
                pairs = zip(before.get("tool_calls") or (), told.get("tool_calls") or (), strict=False)
                names.update((old["id"], new["id"]) for old, new in pairs if "id" in old)
        for entry in self._entries:
            if entry.get("tool_call_id") in names:
                entry["tool_call_id"] = names[entry["tool_call_id"]]
        return [msgspec.json.encode(entry) for entry in self._entries]

    async def rendered(self, messages: Iterable[bytes]) -> bytes:
        """Have messages rendered as the engine would for a call without ids; packed."""
        safe = [with_stand_ins(raw) if b'"tool_calls"' in raw else raw for raw in messages]
        return await self._model.renderer.render(self._turn.model, safe, self._args, generation=True)

    async def same_text(self, sites: Sequence[Site]) -> list[bool]:
        """Say of each site whether prompt and rendering read the same there."""
        return causes.same_text(sites, await self._read(causes.texts_to_decode(ids.unpack(self.prompt), sites)))

    async def _read(self, pieces: Sequence[Sequence[int]]) -> list[str]:
        """Read pieces of tokens as text: all at once, parted by more of one token in a row than any of them holds."""
        tokens = iter(dict.fromkeys(ids.unpack(self.prompt)))  # the first two: a special one and a word as a rule
        repeated, guard = next(tokens), next(tokens, None)
        if guard is not None and len(pieces) > 1:
            part = [guard, *[repeated] * (1 + max(_longest_run(piece, repeated) for piece in pieces)), guard]
            mark = await self._text(part)
            texts = (await self._text([token for piece in pieces for token in (*part, *piece)])).split(mark)
            if len(texts) == len(pieces) + 1:
                return texts[1:]
        return [await self._text(piece) for piece in pieces]

    async def _text(self, piece: Sequence[int]) -> str:
        return await self._model.renderer.read(self._turn.model, ids.pack(piece)) if piece else ""


def _longest_run(piece: Sequence[int], token: int) -> int:
    longest = run = 0
    for each in piece:
        run = run + 1 if each == token else 0
        longest = max(longest, run)
    return longest


def _arguments(context: Context) -> RenderArgs:
    return RenderArgs(b"", b"", context.members, {}, context.kwargs, context.tools)
