"""The ledger: the store as calls see it, and what is done when it fails.

A harness never fails because the cache does (unless asked for: `on_store_error = fail`). Where the store cannot be
reached the call goes on without its session's past, and what must be said about it is kept here and written as soon as
the store is back, so that the trainer sees a session that is incomplete, and why.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from cachetools import LRUCache

from tokencache import metrics
from tokencache.core.incidents import Incident, IncidentKind
from tokencache.proxy.prefix_cache import PrefixCache
from tokencache.proxy.recorder import Outcome, Recorded
from tokencache.proxy.routed_experts import RoutedExperts
from tokencache.store.base import BeginResult, Join, SessionGoneError, SessionSealedError, Store, StoreError

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
ONE_BY_ONE = 16
"""So many events of a session are noted one by one (`SampledCounter`)."""
_MOST_SESSIONS = 4096
"""Sessions that a counter knows at a time; for a session that it dropped it starts again."""


class SampledCounter:
    """Counts events of each session in this process, and selects those that become incidents.

    A harness may repeat a refused call for ever, and a session's incidents must not grow with that. So the first `ONE_BY_ONE` events are
    noted, and after those the 32nd, the 64th and so on, each with the number of all so far.
    """

    def __init__(self) -> None:
        self._counts: LRUCache[str, int] = LRUCache(_MOST_SESSIONS)

    def count(self, session: str) -> int:
        """Count one more event. Returns its number if it is to be noted, else 0."""
        number = self._counts[session] = self._counts.get(session, 0) + 1
        return number if number <= ONE_BY_ONE or number.bit_count() == 1 else 0

    def forget(self, session: str) -> None:
        """Start again for a session that was deleted."""
        self._counts.pop(session, None)


class Ledger:
    """Begins and ends calls on a store; `strict` lets store errors through to the harness.

    `experts` keeps what is too large for a store; `None` where it is not wanted.
    """

    def __init__(self, store: Store, prefixes: PrefixCache, *, strict: bool = False, experts: RoutedExperts | None = None) -> None:
        self.store = store
        self.prefixes = prefixes
        self.replica = secrets.token_hex(8)
        self._strict = strict
        self._experts = experts
        self._late = SampledCounter()
        self._spent = SampledCounter()
        self._owed: dict[str, list[Incident]] = {}
        self._unended: list[tuple[str, str, str]] = []  # session, life and name of calls that are over, and stand open in the store
        self._payer: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def begin(
        self, session: str, call: str, keys: Sequence[bytes], *, fingerprint: bytes = b"", join: Join = "never"
    ) -> BeginResult | None:
        """Begin a call; `None` where the store cannot be asked. `fingerprint` and `join` as in `Store.begin`.

        Raises:
            SessionSealedError: the session takes no more calls.
            StoreError: the store failed and the policy is strict.
        """
        try:
            return await self.store.begin(session, call, keys, fingerprint=fingerprint, replica=self.replica, join=join)
        except StoreError as why:
            self._failed("begin", session, call, why)
            return None

    async def end(self, begun: BeginResult | None, outcome: Outcome, recorded: Recorded, documents: Mapping[str, bytes]) -> None:
        """Store what a call came to, and the documents that its reply is to be found by again, before the last byte leaves.

        Raises:
            StoreError: the store failed and the policy is strict.
        """
        for entry in recorded.entries:
            _count(entry.turn.match, entry.turn.reason, entry.turn.prompt_tokens, entry.turn.completion_tokens, entry.turn.forgiven)
        for rule in outcome.call.left_out:
            metrics.FORGIVEN.labels(rule).inc()
        _tally(recorded.incidents)
        if begun is None:
            self._lose(outcome, recorded)
            return
        try:
            if recorded.entries:
                await self.store.commit(
                    outcome.session, begun.epoch, outcome.call_id, recorded.entries, recorded.incidents, documents=documents
                )
            else:
                await self.store.settle(outcome.session, begun.epoch, outcome.call_id, recorded.incidents)
        except SessionGoneError:
            if self._experts is not None:
                await self._experts.drop(list(outcome.experts.values()))
            await self._gone(outcome.session, outcome.call_id)
            return
        except StoreError as why:
            self._unended.append((outcome.session, begun.epoch, outcome.call_id))
            self._lose(outcome, recorded)
            self._failed("commit", outcome.session, outcome.call_id, why)
            return
        parent = outcome.plan.parent
        for entry, held in zip(recorded.entries, recorded.held, strict=True):
            self.prefixes.add(begun.epoch, entry.turn.id, held, instead_of=parent)

    async def settle(
        self,
        begun: BeginResult | None,
        session: str,
        call: str,
        incidents: Sequence[Incident],
        *,
        documents: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """End a call that brought no turn, with documents that are to be kept all the same.

        Raises:
            StoreError: the store failed and the policy is strict.
        """
        _tally(incidents)
        if begun is None:
            self._owe(session, list(incidents))
            return
        try:
            if documents:
                await self.store.commit(session, begun.epoch, call, [], incidents, documents=documents)
            else:
                await self.store.settle(session, begun.epoch, call, incidents)
        except SessionGoneError:
            await self._gone(session, call)
        except StoreError as why:
            self._unended.append((session, begun.epoch, call))
            self._owe(session, list(incidents))
            self._failed("settle", session, call, why)

    async def add_incidents(self, session: str, incidents: Sequence[Incident]) -> None:
        """Say something about a session, outside any call.

        Raises:
            StoreError: the store failed and the policy is strict.
        """
        _tally(incidents)
        try:
            await self.store.add_incidents(session, incidents)
        except StoreError as why:
            self._owe(session, list(incidents))
            self._failed("note", session, "-", why)

    async def admit(self, session: str) -> None:
        """Let a request pass that samples and is not recorded, unless its session takes no more calls.

        Raises:
            SessionSealedError: it does not.
            StoreError: the store failed and the policy is strict.
        """
        try:
            info = await self.store.session(session)
        except StoreError as why:
            self._failed("session", session, "-", why)
            return
        if info is not None and info.sealed:
            raise SessionSealedError(session)

    async def turn_away(self, session: str, detail: str) -> None:
        """Note that a call came after its session was sealed: nothing was sampled. `detail` says what kind of call."""
        number = self._late.count(session)
        log.warning("session %s is sealed: %s is refused", session, detail)
        if number:
            with contextlib.suppress(StoreError):  # it is refused either way
                await self.add_incidents(session, [IncidentKind.LATE_CALL.incident(f"{detail}: late call no. {number}", at=time.time())])

    def count_spent(self, session: str) -> int:
        """Count a call that came when the session's budget was used up; its number if it is to be noted, else 0."""
        return self._spent.count(session)

    async def keep_experts(self, outcome: Outcome) -> None:
        """Keep the routed experts of a reply, before its turns are made."""
        if self._experts is not None:
            await self._experts.keep(outcome)

    async def delete(self, session: str, *, reuse: bool = False) -> bool:
        """Forget a session and all that is kept of it; false if there was none. With `reuse` its name may be used again at once.

        Raises:
            StoreError: the store failed; nothing was forgotten.
        """
        known = await self.store.delete(session, reuse=reuse)
        self._late.forget(session)
        self._spent.forget(session)
        if self._experts is not None:  # after the store: a call that ends from now on removes its own
            await self._experts.drop([session])
        return known

    def detach(self, work: "asyncio.Task[Any]") -> None:
        """Keep a task that must end even though its harness has left."""
        self._tasks.add(work)
        work.add_done_callback(self._ended)

    def _ended(self, work: "asyncio.Task[Any]") -> None:
        self._tasks.discard(work)
        if not work.cancelled() and (why := work.exception()) is not None:
            log.error("a call could not be ended", exc_info=why)

    def owed(self, session: str) -> list[Incident]:
        """Incidents of a session that could not be written yet."""
        return list(self._owed.get(session, ()))

    async def settled(self) -> None:
        """Return when the calls that outlive their harnesses have ended, and nothing is owed any more."""
        while pending := self._tasks or ({self._payer} if self._payer is not None and not self._payer.done() else set()):
            await asyncio.wait(pending)

    async def close(self) -> None:
        """Finish what is under way, try once more to write what is owed, and name the sessions that will not be told."""
        while self._tasks:  # one may leave others behind
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._payer is not None:
            self._payer.cancel()
            await asyncio.gather(self._payer, return_exceptions=True)
        try:
            await self._pay()
        except StoreError as why:
            log.error("INCIDENTS OF %d SESSIONS COULD NOT BE WRITTEN: %s", len(self._owed), why)  # noqa: TRY400
            for session, incidents in self._owed.items():
                kinds = Counter(incident.kind for incident in incidents)
                said = ", ".join(f"{kind} ({number} times)" if number > 1 else kind for kind, number in kinds.items())
                hole = "LOOKS MORE COMPLETE THAN IT IS" if any(incident.hole for incident in incidents) else "has no hole by that"
                log.error("session %s %s: not written: %s", session, hole, said)  # noqa: TRY400

    async def _gone(self, session: str, call: str) -> None:
        """A session ended under a call. If it was deleted, the store drops what is said of it now; if not, the store lost it."""
        log.warning("session %s call %s: the session ended meanwhile; what was recorded is dropped", session, call)
        detail = "the store had lost the session when this call ended, and all its turns before"
        lost = IncidentKind.SESSION_LOST.incident(detail, call=call, at=time.time())
        await self.add_incidents(session, [lost])

    def _failed(self, operation: str, session: str, call: str, why: StoreError) -> None:
        metrics.STORE_ERRORS.labels(operation).inc()
        log.error("session %s call %s: the store failed at %s: %s", session, call, operation, why)
        if self._strict:
            raise why

    def _lose(self, outcome: Outcome, recorded: Recorded) -> None:
        """The store could not take what a call came to: the trainer is told when it can."""
        detail = "the store failed; the turn of this call may not be recorded"
        lost = IncidentKind.STORE_ERROR.incident(detail, call=outcome.call_id, at=time.time())
        _tally([lost])
        self._owe(outcome.session, [*recorded.incidents, lost])

    def _owe(self, session: str, incidents: list[Incident]) -> None:
        self._owed.setdefault(session, []).extend(incidents)
        if self._payer is None or self._payer.done():
            self._payer = asyncio.create_task(self._keep_paying())

    async def _keep_paying(self) -> None:
        while self._owed or self._unended:
            await asyncio.sleep(RETRY_SECONDS)
            try:
                await self._pay()
            except StoreError:
                continue

    async def _pay(self) -> None:
        for session in list(self._owed):
            incidents = list(self._owed[session])  # more may come meanwhile
            await self.store.add_incidents(session, incidents)
            del self._owed[session][: len(incidents)]
            if not self._owed[session]:
                del self._owed[session]
        while self._unended:  # after the incidents, so that no moment looks complete: whoever waits for such a call goes on
            session, epoch, call = self._unended[0]
            with contextlib.suppress(SessionGoneError):
                await self.store.settle(session, epoch, call)
            self._unended.pop(0)


def _tally(incidents: Sequence[Incident]) -> None:
    for incident in incidents:
        metrics.INCIDENTS.labels(incident.kind).inc()


def _count(match: str, reason: str, prompt: int, completion: int, forgiven: Sequence[str]) -> None:
    metrics.counter(metrics.TURNS, match, reason).inc()
    metrics.PROMPT_TOKENS.inc(prompt)
    metrics.COMPLETION_TOKENS.inc(completion)
    for rule in forgiven:
        metrics.FORGIVEN.labels(rule).inc()
