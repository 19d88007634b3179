"""Begins and ends calls in the store, and lets calls continue when the store fails.

A call does not fail because the store does, unless that is configured (`on_store_error = fail`). While the store cannot be reached, a call
continues without its session's history. Its incidents are kept in memory and saved when the store answers again. So the trainer sees that
the session is incomplete, and why.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from tokencache import metrics
from tokencache.background import repeat
from tokencache.core.incidents import Incident, IncidentKind
from tokencache.core.session import SessionStage
from tokencache.core.turn import TurnMark
from tokencache.engine.placement import Placement
from tokencache.pauses import LARGE, pause
from tokencache.proxy.facts import BegunCall, CallFacts
from tokencache.proxy.known_epochs import KnownEpochs
from tokencache.proxy.media_record import MediaRecord
from tokencache.proxy.prefix_cache import PrefixCache
from tokencache.proxy.recorder import Recorded, turns_of
from tokencache.proxy.routed_experts import RoutedExperts
from tokencache.recent import Recent
from tokencache.store.base import (
    BeginResult,
    Join,
    SessionFinishedError,
    SessionGoneError,
    SessionInfo,
    SessionOverError,
    SessionSealedError,
    Store,
    StoreError,
    TurnLostError,
)
from tokencache.store.clock import RECORD_CLOCK
from tokencache.wakeup import Wakeup, end

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""Seconds between attempts to save incidents."""
ONE_BY_ONE = 16
"""Number of the first events of a session that are all selected (`SampledCounter`)."""
_REFUSED = "the store failed when the call began, and it was refused; nothing was sampled"
_LOST = "the store failed; the turn of this call may not be recorded"
_NONE: Mapping[str, bytes] = MappingProxyType({})
_MOST_UNANSWERED = 4096
"""Maximum number of calls of a session that are closed when the store answers again: a client may repeat a refused call endlessly."""
_MOST_SESSIONS = 4096
"""Maximum number of sessions that a counter remembers; a session that was dropped starts at 0 again."""


class SampledCounter:
    """Counts events of each session in this process, and selects those that become incidents.

    A client may repeat a refused call endlessly, and the list of incidents must not grow with every call. So the first `ONE_BY_ONE` events
    are selected, then the 32nd, the 64th and so on. An incident that the outcome of a session needs (`core.outcome`) must not depend on
    that: other processes do not count, and do not notice when a session is deleted.
    """

    def __init__(self) -> None:
        self._counts: Recent[str, int] = Recent(_MOST_SESSIONS)

    def count(self, session: str) -> int:
        """Count an event and return its number if it is selected, otherwise 0."""
        number = self._counts[session] = self._counts.get(session, 0) + 1
        return number if number <= ONE_BY_ONE or number.bit_count() == 1 else 0

    def forget(self, session: str) -> None:
        """Forget a session that was deleted."""
        self._counts.pop(session, None)


class _Unsaved(NamedTuple):
    """What the store must still get: incidents, the end of a call with its incidents, or the end of a call that it may have opened.

    Attributes:
        incidents: the incidents.
        epoch: the session's epoch when the call began; `""` if that is not known.
        call: id of the call that has ended; `""` if none has.
        if_stored: what is saved in place of `incidents` if the call has turns: the store wrote them, and its answer was lost.
    """

    incidents: Sequence[Incident]
    epoch: str = ""
    call: str = ""
    if_stored: Sequence[Incident] | None = None

    @property
    def number(self) -> int:
        return len(self.incidents) + bool(self.call)


class Backlog:
    """What the store must still get after it failed. It is tried again until the store answers.

    `changed` is notified of each call that ends in the store.
    """

    def __init__(self, store: Store, changed: Wakeup) -> None:
        self._store, self._changed = store, changed
        self._waiting: dict[str, list[_Unsaved]] = {}  # by session
        self._unopened: dict[str, set[str]] = {}  # by session: calls that the store did not confirm to have opened, and that have not ended
        self._task: asyncio.Task[None] | None = None

    def of(self, session: str) -> list[Incident]:
        """Return the incidents of a session that are not saved yet."""
        return [incident for one in self._waiting.get(session, ()) for incident in one.incidents]

    @property
    def saving(self) -> set[asyncio.Task[None]]:
        """The task that saves, while there is one."""
        return {self._task} if self._task is not None and not self._task.done() else set()

    def add(
        self,
        session: str,
        incidents: Sequence[Incident],
        *,
        epoch: str = "",
        call: str = "",
        if_stored: Sequence[Incident] | None = None,
        newest: bool = False,
    ) -> None:
        """Keep the incidents of a session until they are saved; with `newest`, one in place of the last of its kind that waits.

        With `call` they are those of a call that has ended, and its end is kept with them. `epoch` is `""` if the store did not answer when
        the call began (`begin_unopened`), and may have opened it. `if_stored`: see `_Unsaved`.
        """
        if call and not epoch and not self._end_unopened(session, call):
            return
        waiting, added = self._waiting.setdefault(session, []), list[_Unsaved]()
        if epoch:
            added.append(_Unsaved(incidents, epoch, call, if_stored))
        elif incidents and not (newest and _replaced(waiting, incidents[0])):
            added.append(_Unsaved(incidents))
        if call and not epoch and len(waiting) < _MOST_UNANSWERED:
            added.append(_Unsaved((), call=call))
        waiting += added
        metrics.UNSAVED.inc(sum(one.number for one in added))
        if not self.saving:
            self._task = asyncio.create_task(repeat("incidents", self._try_to_save, RETRY_SECONDS, wanted=lambda: bool(self._waiting)))

    def begin_unopened(self, session: str, call: str) -> None:
        """Note a call that the store did not confirm to have opened, until it ends (`add`)."""
        self._unopened.setdefault(session, set()).add(call)

    def _end_unopened(self, session: str, call: str) -> bool:
        """Forget such a call; false if its session was deleted meanwhile."""
        calls = self._unopened.get(session, set())
        known = call in calls
        calls.discard(call)
        if not calls:
            self._unopened.pop(session, None)
        return known

    def forget(self, session: str) -> None:
        """Forget a session that was deleted: one that is created again under its name must not get its incidents."""
        self._unopened.pop(session, None)
        metrics.UNSAVED.dec(sum(one.number for one in self._waiting.pop(session, ())))

    async def close(self) -> None:
        """Try once more to save incidents, and log which are lost."""
        if self._task is not None:
            await end(self._task)
        found = await asyncio.gather(*[self._save_session(*one) for one in self._waiting.items()], return_exceptions=True)
        if failed := [why for why in found if isinstance(why, Exception)]:
            log.error("INCIDENTS OF %d SESSIONS ARE LOST: the store does not answer: %s", len(self._waiting), failed[0])
            for session in sorted(self._waiting):
                incidents = self.of(session)
                kinds = Counter(incident.kind for incident in incidents)
                listed = ", ".join(f"{kind} ({number} times)" if number > 1 else kind for kind, number in kinds.items())
                wrong = any(incident.hole for incident in incidents)
                effect = "so its `complete` flag may be WRONG" if wrong else "its `complete` flag is not affected"
                log.error("session %s: incidents not saved, %s: %s", session, effect, listed)

    async def _try_to_save(self) -> None:
        with contextlib.suppress(StoreError):
            await self._save()

    async def _save(self) -> None:
        for session, waiting in list(self._waiting.items()):
            try:
                await self._save_session(session, waiting)
            except StoreError:
                if self._waiting.get(session) is waiting:  # the others come first next time: its own record may be damaged
                    self._waiting[session] = self._waiting.pop(session)
                raise

    async def _save_session(self, session: str, waiting: list[_Unsaved]) -> None:
        while self._waiting.get(session) is waiting:  # it was not forgotten meanwhile
            unsaved = waiting[0]
            await self._write(session, unsaved)
            if self._waiting.get(session) is waiting and waiting[0] is unsaved:  # it was not replaced either
                metrics.UNSAVED.dec(waiting.pop(0).number)
                if not waiting:
                    del self._waiting[session]

    async def _write(self, session: str, unsaved: _Unsaved) -> None:
        """Save incidents, and the end of a call together with its own, so that the session never looks complete in between."""
        if unsaved.if_stored is not None and await self._has_turns(session, unsaved.call):
            unsaved = unsaved._replace(incidents=unsaved.if_stored)
        try:
            if unsaved.epoch:
                await self._store.settle(session, unsaved.epoch, unsaved.call, unsaved.incidents)
            elif unsaved.call:
                await self._close_unanswered(session, unsaved.call)
            else:
                await self._store.add_incidents(session, unsaved.incidents)
        except SessionGoneError as why:
            if unsaved.epoch and not why.deleted:
                await self._store.add_incidents(session, unsaved.incidents)
        if unsaved.call:
            self._changed.notify()

    async def _has_turns(self, session: str, call: str) -> bool:
        try:
            return any(turn.call == call for turn in await self._store.turns(session))
        except (StoreError, KeyError, ValueError):  # as far as is known, it has none
            return False

    async def _close_unanswered(self, session: str, call: str) -> None:
        info = await self._store.session(session)
        if info is not None and any(one.call == call for one in info.open_calls):
            await self._store.settle(session, info.epoch, call)


def _replaced(waiting: list[_Unsaved], incident: Incident) -> bool:
    """Replace the last waiting incident of the same kind; return false if there is none."""
    for place in range(len(waiting) - 1, -1, -1):
        unsaved = waiting[place]
        if unsaved.incidents and any((one.kind, one.hole) == (incident.kind, incident.hole) for one in unsaved.incidents):
            kept = [one for one in unsaved.incidents if (one.kind, one.hole) != (incident.kind, incident.hole)]
            waiting[place] = unsaved._replace(incidents=[*kept, incident])
            return True
    return False


class Ledger:
    """Begins and ends calls in a store.

    Attributes:
        store: the store.
        prefixes: the cached prefixes of its turns.
        placement: the tokens that sessions hold on each engine.
        replica: the id of this process in the store, random.
        keeps_experts: whether routed experts are written.
        changed: wakes those who wait for a session to be finished, or for its last call to end.
        over_budget: counts the calls after the budget of an epoch was used up.
    """

    def __init__(
        self,
        store: Store,
        prefixes: PrefixCache,
        *,
        strict: bool = False,
        experts: RoutedExperts | None = None,
        max_media_bytes: int = 0,
        placement: Placement | None = None,
        rebound: Callable[[str, str], str] | None = None,
        ended: Callable[[str], None] | None = None,
    ) -> None:
        """Wrap a store.

        Args:
            store: the store.
            prefixes: the cached prefixes of its turns.
            placement: the tokens that sessions hold on each engine.
            strict: whether a store error fails the call.
            experts: writes routed experts; `None` if they are not kept.
            max_media_bytes: how many bytes of images and other media are stored in a session.
            rebound: returns what the record of a session names after a turn, from what it named and the engine of the turn; `""` to leave
                it. `None`: it names no engine.
            ended: is called once with each session that ends.
        """
        self.store, self.prefixes, self.placement = store, prefixes, placement or Placement()
        self._rebound, self._ended_session = rebound, ended
        self.replica, self.changed, self._strict = secrets.token_hex(8), Wakeup(), strict
        self._experts, self.keeps_experts = experts, experts is not None
        self._media, self._epochs = MediaRecord(store, max_media_bytes), KnownEpochs(store, self.add_incidents)
        self.over_budget, self._late, self._refused = SampledCounter(), SampledCounter(), SampledCounter()
        self._backlog = Backlog(store, self.changed)
        self._tasks: set[asyncio.Task[Any]] = set()

    async def begin(
        self, session: str, call: str, keys: Sequence[bytes], *, fingerprint: bytes = b"", join: Join = "never", settings: bytes = b""
    ) -> BeginResult | None:
        """Begin a call; `None` if the store does not answer. `fingerprint`, `join` and `settings` as in `Store.begin`.

        Raises:
            SettingsChangedError: the session has other settings. Other errors of `Store.begin` are raised too.
            StoreError: the store failed and the policy is strict.
        """
        replica = self.replica
        try:
            begun = await self.store.begin(session, call, keys, fingerprint=fingerprint, replica=replica, join=join, settings=settings)
            if (known := self._epochs.last.get(session)) is None or known.epoch != begun.epoch:
                known = await self._epochs.note(session, call, begun, keys[bool(fingerprint) :][:1])
            known.at = time.monotonic()
        except SessionOverError as why:
            await _read_outcome(self.store, session, why)
            raise
        except StoreError as why:
            self._backlog.begin_unopened(session, call)
            if self._strict:
                refused = IncidentKind.STORE_ERROR.incident(_REFUSED, call=call, at=RECORD_CLOCK.now(), hole=False)
                self._backlog.add(session, [refused], call=call, newest=not self._refused.count(session))
            self._failed("begin", session, call, why)
            return None
        return begun

    async def end(self, begun: BeginResult | None, facts: CallFacts, recorded: Recorded, documents: Mapping[str, bytes]) -> None:
        """Store the turns of a call and its documents; called before the last byte of the reply is sent.

        Raises:
            StoreError: the store failed and the policy is strict.
        """
        session, call, tokens = facts.call.session, facts.call.id, 0
        for entry in recorded.entries:
            turn = entry.turn
            tokens = max(tokens, turn.prompt_tokens + turn.completion_tokens)
            metrics.counter(metrics.TURNS, turn.match, turn.reason).add(1)
            source = "mixed" if TurnMark.MIXED_WEIGHTS in turn.marks else turn.version_source or "unknown"
            metrics.counter(metrics.TURN_VERSIONS, source).add(1)
            metrics.PROMPT_TOKENS.add(turn.prompt_tokens)
            metrics.COMPLETION_TOKENS.add(turn.completion_tokens)
            for rule in turn.applied_rules:
                metrics.counter(metrics.APPLIED_RULES, rule).add(1)
        for rule in facts.call.chat.left_out:
            metrics.counter(metrics.APPLIED_RULES, rule).inc()
        _count(recorded.incidents)
        self.placement.begin(call, session, facts.planned.at, tokens)
        if begun is None:
            self._lose(session, "", call, recorded.incidents)
            return
        try:
            if recorded.entries:
                engine = self._rebound(begun.engine, facts.planned.at) if self._rebound and begun.engine != facts.planned.at else ""
                recorded = await self._commit(begun.epoch, facts, recorded, documents, engine)
            else:
                await self.store.settle(session, begun.epoch, call, recorded.incidents)
            self.changed.notify()
        except SessionGoneError as why:
            await _drop_experts(self._experts, facts)
            await self._gone(why, begun, session, call)
            return
        except StoreError as why:
            self._lose(session, begun.epoch, call, recorded.incidents)
            self._failed("commit", session, call, why)
            return
        parent = facts.planned.plan.parent
        for entry, prefix in zip(recorded.entries, recorded.prefixes, strict=True):
            self.prefixes.add(begun.epoch, entry.turn.id, entry.turn.model, prefix, instead_of=parent)

    async def _commit(self, epoch: str, facts: CallFacts, recorded: Recorded, documents: Mapping[str, bytes], engine: str) -> Recorded:
        """Store turns; all their tokens and messages if the store has lost a turn with which they share some. Returns what was stored.

        Turns that continue the lost one, or whose messages were released (`Response.release_body`), are not stored: they would be torn.
        """
        session, call = facts.call.session, facts.call.id
        try:
            await self.store.commit(session, epoch, call, recorded.entries, recorded.incidents, documents=documents, engine=engine)
        except TurnLostError:
            log.warning("session %s call %s: the store has lost turns of the session that were recorded before", session, call)
            lost = IncidentKind.SESSION_LOST.incident("the store has lost turns of the session", call=call, at=RECORD_CLOCK.now())
            _count([lost])
            self.prefixes.forget(epoch, {name for one in recorded.entries for name in (one.turn.base, one.turn.context_base) if name})
            recorded = await turns_of(facts, self.prefixes)
            recorded.incidents.append(lost)
            await self.store.commit(session, epoch, call, recorded.entries, recorded.incidents, documents=documents, engine=engine)
        if len(recorded.entries[0].tokens.delta) > LARGE:  # the store has packed them
            await pause()
        return recorded

    async def settle(
        self, begun: BeginResult | None, session: str, call: str, incidents: Sequence[Incident], *, documents: Mapping[str, bytes] = _NONE
    ) -> None:
        """End a call without a turn; `documents` are still stored.

        Raises:
            StoreError: the store failed and the policy is strict.
        """
        _count(incidents)
        if begun is None:
            self._backlog.add(session, incidents, call=call)
            return
        try:
            if documents:
                await self.store.commit(session, begun.epoch, call, [], incidents, documents=documents)
            else:
                await self.store.settle(session, begun.epoch, call, incidents)
            self.changed.notify()
        except SessionGoneError as why:
            await self._gone(why, begun, session, call)
        except StoreError as why:
            self._backlog.add(session, incidents, epoch=begun.epoch, call=call)
            self._failed("settle", session, call, why)

    async def add_incidents(self, session: str, incidents: Sequence[Incident]) -> None:
        """Add incidents to a session, outside of any call.

        Raises:
            StoreError: the store failed and the policy is strict.
        """
        _count(incidents)
        try:
            await self.store.add_incidents(session, incidents)
        except StoreError as why:
            self._backlog.add(session, incidents)
            self._failed("note", session, "-", why)

    async def admit(self, session: str) -> None:
        """Check that a session still accepts calls, before a request that samples and is not recorded.

        Raises:
            SessionFinishedError, SessionSealedError: it does not.
            StoreError: the store failed and the policy is strict.
        """
        try:
            info = await self.store.session(session)
        except StoreError as why:
            self._failed("session", session, "-", why)
            return
        if info is not None and info.sealed:
            raise SessionSealedError(session)
        if info is not None and info.finished is not None:
            raise SessionFinishedError(session)

    async def note_late_call(self, session: str, detail: str) -> None:
        """Add an incident for a call that arrived after its session was finished; nothing was sampled. `detail` names the kind of call."""
        log.warning("session %s is finished: %s is refused", session, detail)
        if number := self._late.count(session):
            with contextlib.suppress(StoreError):  # the call is refused in any case
                late = IncidentKind.LATE_CALL.incident(f"{detail}: late call no. {number}", at=RECORD_CLOCK.now())
                await self.add_incidents(session, [late])

    async def note_refused_call(self, session: str, kind: IncidentKind, detail: str, *, at: float = 0.0, status: int = 0) -> None:
        """Add an incident for a call that ended before it began, so that nothing was sampled; none if it would tell nothing new."""
        incident = kind.incident(detail, at=at or RECORD_CLOCK.now(), hole=False, status=status)
        try:
            if _is_new(incident, await self.store.session(session)):
                _count([incident])
                await self.store.add_incidents(session, [incident])
        except StoreError:  # the call is refused in any case
            self._backlog.add(session, [incident], newest=not self._refused.count(session))

    async def keep_experts(self, facts: CallFacts) -> CallFacts:
        """Write the routed experts of a reply, before its turns are made. Returns the facts with the files."""
        return msgspec.structs.replace(facts, experts=await self._experts.keep(facts)) if self._experts is not None else facts

    async def keep_media(self, begun: BeginResult | None, call: BegunCall) -> bool:
        """Store the images and other media of a call with a reply, before its turns are made; false if some are certainly not stored.

        Raises:
            StoreError: the store failed and the policy is strict.
        """
        if begun is None:
            return True
        try:
            return await self._media.keep(call.session, begun.epoch, call.chat)
        except StoreError as why:
            if self._strict:  # the turn is not stored
                self._lose(call.session, begun.epoch, call.id, call.noted)
            self._failed("put_media", call.session, call.id, why)
            return False

    async def delete(self, session: str, *, reuse: bool = False) -> bool:
        """Delete a session and its files; false if the session does not exist. With `reuse` its name may be used again at once.

        Raises:
            StoreError: the store failed; nothing was deleted.
        """
        info = await self.store.session(session)
        known = await self.store.delete(session, reuse=reuse)
        if info is not None:
            await self.store.withdraw(session, info.epoch)
            self.release(info)
        for kept in (self._late, self._refused, self._backlog, self._epochs):
            kept.forget(session)
        if self._experts is not None:  # after the store, because a call that ends later removes its own files
            await self._experts.drop([session])
        return known

    def release(self, info: SessionInfo) -> None:
        """Release what a session holds that ends now; `info` is its state before. Its last call counts for the mean footprint."""
        turn = info.latest if info.state is SessionStage.OPEN else None
        self.placement.release(info.id, turn.prompt_tokens + turn.completion_tokens if turn is not None else 0)
        if self._ended_session is not None and info.state is SessionStage.OPEN:
            self._ended_session(info.id)

    def detach(self, work: "asyncio.Task[Any]") -> None:
        """Keep a task that must finish although its client has left."""
        self._tasks.add(work)
        work.add_done_callback(self._ended)
        metrics.UNSAVED.inc()

    def _ended(self, work: "asyncio.Task[Any]") -> None:
        self._tasks.discard(work)
        metrics.UNSAVED.dec()
        if not work.cancelled() and (why := work.exception()) is not None:
            log.error("a call failed while it ended; its turn may be missing", exc_info=why)

    def unsaved(self, session: str) -> list[Incident]:
        """Return the incidents of a session that are not saved yet."""
        return self._backlog.of(session)

    async def settled(self) -> None:
        """Wait until all detached tasks have ended and all incidents are saved."""
        while pending := self._tasks or self._backlog.saving:
            await asyncio.wait(pending)

    async def close(self) -> None:
        """Wait for the detached tasks, try once more to save incidents, and log which incidents are lost."""
        while self._tasks:  # a task may start others
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._backlog.close()

    async def _gone(self, why: SessionGoneError, begun: BeginResult, session: str, call: str) -> None:
        """Report a session, or turns, that are gone when a call ends. If it was deleted, it may have been created again: no incident."""
        lost = _dropped(session, call)
        if isinstance(why, TurnLostError):  # the session is there, and the call is open in it
            await self.settle(begun, session, call, [lost])
        elif not why.deleted:
            await self.add_incidents(session, [lost])

    def _failed(self, operation: str, session: str, call: str, why: StoreError) -> None:
        metrics.STORE_ERRORS.labels(operation).inc()
        log.error("session %s call %s: the store failed at %s: %s", session, call, operation, why)
        if self._strict:
            raise why

    def _lose(self, session: str, epoch: str, call: str, incidents: Sequence[Incident]) -> None:
        """Keep the incidents of a call, and its end, until the store answers again; its turns could not be stored."""
        lost = IncidentKind.STORE_ERROR.incident(_LOST, call=call, at=RECORD_CLOCK.now())
        _count([lost])
        stored = [msgspec.structs.replace(lost, hole=False)] if self._strict else []  # no client has received the reply
        self._backlog.add(session, [*incidents, lost], epoch=epoch, call=call, if_stored=stored)


async def _read_outcome(store: Store, session: str, why: SessionOverError) -> None:
    with contextlib.suppress(StoreError):
        info = await store.session(session)
        why.outcome = info.outcome if info is not None else None


async def _drop_experts(experts: RoutedExperts | None, facts: CallFacts) -> None:
    """Remove the files of the routed experts of turns that are not recorded."""
    if experts is not None:
        await experts.drop([path for path, _ in facts.experts.values()])


async def settle_refused(
    ledger: Ledger, begun: BeginResult | None, session: str, refused: Incident, documents: Mapping[str, bytes]
) -> None:
    """End a call that was refused after it had begun, with its incident unless that would tell nothing new.

    Raises:
        StoreError: the store failed and the policy is strict.
    """
    noted = [refused]
    with contextlib.suppress(StoreError):
        noted = [refused] if _is_new(refused, await ledger.store.session(session)) else []
    await ledger.settle(begun, session, refused.call, noted, documents=documents)


def _is_new(refused: Incident, info: SessionInfo | None) -> bool:
    """Whether the incident of a refused call tells something new of its session; `info` is its state, `None` if it does not exist yet.

    It does not if the session accepts no calls, or if its last incident is of such a call, too, and no turn began since: a client may
    repeat a refused call endlessly. What is refused for what it says makes no session: anybody can send it under any name.
    """
    if info is None:
        return refused.kind != IncidentKind.CALL_REFUSED
    if info.state is not SessionStage.OPEN:
        return False
    last, began = info.incidents[-1] if info.incidents else None, info.latest.created if info.latest is not None else 0.0
    if last is None or last.kind != refused.kind or last.at < began:
        return True
    return last.hole or bool(last.call and last.kind != IncidentKind.CALL_REFUSED)


def _dropped(session: str, call: str) -> Incident:
    """Log that the turns of a call are dropped, and return the incident. A store does not keep it if the session was deleted."""
    log.warning("session %s call %s: the session was deleted or lost during the call; its turns are dropped", session, call)
    detail = "the store had lost the session, or turns that this call continues, when the call ended"
    return IncidentKind.SESSION_LOST.incident(detail, call=call, at=RECORD_CLOCK.now())


def _count(incidents: Sequence[Incident]) -> None:
    for incident in incidents:
        metrics.counter(metrics.INCIDENTS, incident.kind).inc()
