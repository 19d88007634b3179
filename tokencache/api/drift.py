"""Measures drift: the engine renders the messages of a session plainly, and the result is compared with the prompts that were sent.

Only spliced prompts can drift. A prompt that the engine rendered itself is its own plain rendering and needs no request. A measurement
costs one rendering, and one more for each part of the replies (calls, text, reasoning) that the harness sent back changed. Measurements
must not slow down calls: they run one at a time and within a time limit. A turn that the engine cannot render is reported with a reason,
not as an error. A turn never changes, so its drift is cached until the engine is probed as a different one.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from tokencache.api.export_worker import ExportWorker, WorkerDiedError
from tokencache.core import drift as causes
from tokencache.core import ids
from tokencache.core.context import Context, whole_context
from tokencache.core.drift import Drift, Site, differences, no_drift
from tokencache.core.lineage import lineages
from tokencache.core.reasons import Reason
from tokencache.core.rules import Part, ToolNames
from tokencache.core.turn import Turn, TurnMark, rebuild_prefix
from tokencache.core.verdict import INTERRUPTED
from tokencache.dialects.chat.rendering import RenderArgs
from tokencache.dialects.chat.vocabulary import read_message, with_stand_ins
from tokencache.engine.model import Model
from tokencache.engine.pool import Pool
from tokencache.engine.template.renderer import RenderError, TemplateRefusedError
from tokencache.errors import EngineError
from tokencache.recent import Recent
from tokencache.trajectories.rollout import Records

CACHED_TURNS = 8192
"""Number of turns of each model whose drift is cached."""
_SPLICED = frozenset({"continue", "branch", "resplice"})


def turns_to_measure(turns: Sequence[Turn], mode: str) -> list[Turn]:
    """Return the turns to measure: none (`off`), the last of each sequence (`sequences`; its prompt holds all others), or all (`turns`)."""
    if mode == "sequences":
        return [line[-1] for line in lineages(turns)]
    return list(turns) if mode == "turns" else []


class DriftMeter:
    """Measures the drift of sessions. `timeout` is the time in seconds for all turns of a session together."""

    def __init__(self, pool: Pool, worker: ExportWorker, *, timeout: float) -> None:
        self._pool = pool
        self._worker = worker
        self._timeout = timeout
        self._lock = asyncio.Lock()
        self._cache: WeakKeyDictionary[Model, Recent[str, Drift]] = WeakKeyDictionary()

    async def measure(self, records: Records, mode: str) -> Records:
        """Return the records of a session (which must have contexts) with the drift of its turns, or why it could not be measured.

        ==================  ========================================================================
        `not-kept`          the messages of the turn are not stored, or its images, or the beginning of a reply that was continued
        `engine-disagrees`  the engine used other ids than were sent
        `engine-away`       the engine returned no rendering
        `template-refuses`  the template, or the engine, refuses these messages
        `time-limit`        measuring earlier turns used up the time
        `torn-record`       the stored records do not fit together
        `worker-died`       the process that compares long prompts died twice
        ==================  ========================================================================
        """
        found: dict[str, Drift] = {}
        unmeasured: dict[str, str] = {}
        chosen = turns_to_measure(records.turns, mode)
        try:
            async with asyncio.timeout(self._timeout):
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
        """Measure one turn; returns the reason if that is not possible."""
        if turn.match not in _SPLICED:
            return TurnMark.ENGINE_DISAGREES if TurnMark.ENGINE_DISAGREES in turn.marks else no_drift(turn.prompt_tokens)
        if not records.contexts.get(turn.id) or TurnMark.MEDIA in turn.marks or turn.begun:
            return "not-kept"
        try:
            return await self._spliced(turn, records)
        except (EngineError, RenderError) as error:
            return Reason.TEMPLATE_REFUSES if isinstance(error, TemplateRefusedError) else "engine-away"
        except WorkerDiedError:
            return "worker-died"
        except (KeyError, ValueError):
            return Reason.TORN_RECORD

    async def _spliced(self, turn: Turn, records: Records) -> Drift:
        model = await self._pool.model(turn.model)
        cache = self._cache.setdefault(model, Recent(CACHED_TURNS))
        async with self._lock:
            drift = cache.get(turn.id)
            if drift is None:
                drift = cache[turn.id] = await self._compare(await asyncio.to_thread(_SentPrompt, turn, records, model))
        return drift

    async def _compare(self, sent: "_SentPrompt") -> Drift:
        """Compare a spliced prompt with the plain rendering of its messages.

        Raises:
            RenderError: the engine cannot render or cannot decode its own tokens.
        """
        rendering, sites = await self._sites(sent, sent.messages)
        if not sites:
            return no_drift(ids.count(sent.prompt))
        same = await sent.same_text(sites)
        trials = []
        for member, changed in sent.changed().items():
            if any(site.turn in changed for site, alike in zip(sites, same, strict=True) if not alike):
                _, left = await self._sites(sent, sent.put_back(member))
                others = [site for site, alike in zip(left, await sent.same_text(left), strict=True) if not alike]
                trials.append(causes.Trial(member, changed, others))
        return Drift(rendering, sum(site.end - site.start for site in sites), causes.name_causes(sites, same, trials))

    async def _sites(self, sent: "_SentPrompt", messages: Sequence[bytes]) -> tuple[int, list[Site]]:
        """Render messages; returns the length of the rendering in tokens and the places where it differs from the prompt."""
        rendering = await sent.render(messages)
        found = await self._worker.run(ids.count(rendering), differences, sent.prompt, rendering)
        return ids.count(rendering), causes.assign_turns(found, sent.spans)


class _SentPrompt:
    """The prompt of a turn, the messages as the harness sent them, and the replies among them."""

    def __init__(self, turn: Turn, records: Records, model: Model) -> None:
        self._turns = {one.id: one for one in records.turns}
        lookup = {one.id: (one, records.tokens[one.id]) for one in records.turns}
        context = whole_context(turn.id, self._turns, records.contexts)
        self._turn, self._model, self._args = turn, model, _arguments(context)
        self._entries: list[dict[str, Any]] = [msgspec.json.decode(raw) for raw in context.messages]
        self.messages = [bytes(raw) for raw in context.messages]
        self.prompt = rebuild_prefix(lookup, turn.id).prompt
        self.spans = causes.own_spans(turn, self._turns, lambda name: rebuild_prefix(lookup, name).ids)
        messages = [read_message(entry) for entry in self._entries]
        self._replies = causes.find_replies(self.spans, self._turns, messages, ToolNames(context.tools))

    def changed(self) -> Mapping[Part, dict[str, tuple[str, ...]]]:
        """Return the replies that the harness sent back changed: changed part → turn → rules. The parts are in the order of `put_back`."""
        rules = {turn: reply.rules for turn, reply in self._replies.items()}
        touched = {
            member: {turn: own for turn, own in rules.items() if causes.rule_for_site(own, member) != causes.TEMPLATE}
            for member in causes.PARTS
        }
        return {member: turns for member, turns in touched.items() if turns}

    def put_back(self, member: Part) -> list[bytes]:
        """Return the messages with the parts of the replies up to `member` as they were served. Interrupted replies stay as they are."""
        names: dict[str, str] = {}
        members = causes.PARTS[: causes.PARTS.index(member) + 1]  # the harness may have sent a call back as text
        for turn, reply in self._replies.items():
            if INTERRUPTED not in reply.rules:
                before = after = self._entries[reply.place]
                for each in members:
                    after = causes.restore_part(after, self._turns[turn].served, each)
                self._entries[reply.place] = after
                pairs = zip(before.get("tool_calls") or (), after.get("tool_calls") or (), strict=False)
                names.update((old["id"], new["id"]) for old, new in pairs if "id" in old)
        for entry in self._entries:
            if entry.get("tool_call_id") in names:
                entry["tool_call_id"] = names[entry["tool_call_id"]]
        return [msgspec.json.encode(entry) for entry in self._entries]

    async def render(self, messages: Iterable[bytes]) -> bytes:
        """Render messages as the engine does for a call without ids; returns packed ids."""
        safe = [with_stand_ins(raw) if b'"tool_calls"' in raw else raw for raw in messages]
        return await self._model.renderer.render(self._turn.model, safe, self._args, generation=True)

    async def same_text(self, sites: Sequence[Site]) -> list[bool]:
        """Return for each site whether prompt and rendering decode to the same text there."""
        return causes.same_text(sites, await self._decode(causes.texts_to_decode(ids.as_array(self.prompt), sites)))

    async def _decode(self, pieces: Sequence[Sequence[int]]) -> list[str]:
        """Decode pieces of tokens, in one request if possible. In the separator, a run of one token is longer than any in the pieces."""
        tokens = ids.as_array(self.prompt)
        repeated = tokens[0]  # usually a special token, and the next one a word
        border = next((token for token in tokens if token != repeated), None)
        if border is not None and len(pieces) > 1:
            separator = [border, *[repeated] * (1 + max(_longest_run(piece, repeated) for piece in pieces)), border]
            mark = await self._text(separator)
            texts = (await self._text([token for piece in pieces for token in (*separator, *piece)])).split(mark)
            if len(texts) == len(pieces) + 1:
                return texts[1:]
        return [await self._text(piece) for piece in pieces]

    async def _text(self, piece: Sequence[int]) -> str:
        return await self._model.renderer.read(self._turn.model, ids.pack(piece)) if piece else ""


def _longest_run(piece: Sequence[int], token: int) -> int:
    return max((len(list(run)) for each, run in groupby(piece) if each == token), default=0)


def _arguments(context: Context) -> RenderArgs:
    return RenderArgs(b"", b"", context.members, {}, context.kwargs, context.tools)
