"""Serves each call once: duplicates wait for the call in flight, and orphaned generations may finish.

*Duplicates.* While a call with the same fingerprint is in flight, a retry waits for its reply. If the reply is already recorded, the retry
receives that (`replay`). So the engine samples once. If this process serves the earlier call, the retry waits for its end. If another
replica serves it, this process asks the store, with growing pauses, whether the call is still open and whether that replica is alive: a
killed replica closes nothing. Each replica writes a heartbeat to the store every few seconds. A call of a replica without a heartbeat is
closed here, with an incident, because the engine's reply to it is missing.

*Orphaned generations.* A client that leaves before it received anything may have timed out because the engine is slow, and may retry. Its
call continues for a grace period, and for as long as a retry waits for it. A complete reply to a client that has left is recorded with the
mark `unanswered`. If the client received a part of the stream, the call ends at once.

If a retry gave up waiting for a call, no further retry joins that call: the engine may hang on it, and a retry must not wait longer than
without a proxy.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import NamedTuple

import msgspec
from aiohttp import web

from tokencache import metrics
from tokencache.background import repeat
from tokencache.backoff import delays
from tokencache.core.chain import REQUEST_KEY
from tokencache.core.incidents import Incident, IncidentKind
from tokencache.core.session import Budget
from tokencache.core.turn import Turn
from tokencache.dialects.members import UNRECORDED
from tokencache.errors import TokencacheError
from tokencache.proxy.call import CallAttempt, CallRequest, Opening, undelivered
from tokencache.proxy.dedup.fingerprint import Fingerprint, Policy
from tokencache.proxy.dedup.lost_calls import HEARTBEAT_SECONDS, LIVE_SECONDS, lost
from tokencache.proxy.dedup.replay import Claim, claim, claim_due, refused_second_sample, send_again, was_received, whole_reply_of
from tokencache.proxy.dispatch import MAX_RESAMPLES, Services, pause_before_resample
from tokencache.proxy.facts import RequestSample
from tokencache.proxy.ledger import SampledCounter
from tokencache.proxy.response import Response
from tokencache.store.base import BeginResult, Join, OpenCall, SessionGoneError, SettingsChangedError, StoreError
from tokencache.store.clock import RECORD_CLOCK
from tokencache.wakeup import end, to_the_end

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
"""Seconds between two checks of a call that another replica serves."""
_MAY_BE_OURS = frozenset({Claim.OURS, Claim.UNKNOWN})
_OFF = frozenset({b"null", b"false"})
_Task = asyncio.Task[web.StreamResponse | Opening | None]


class _Ended(NamedTuple):
    """How a call in flight ended: its turns, empty if there are none, and whether its replica died."""

    turns: tuple[Turn, ...]
    died: bool = False


class CallsInFlight:
    """Serves the model calls of all sessions.

    Args:
        services: engines, ledger and planner.
        policy: which requests are treated as retries.
        grace: seconds for which a call continues after its client left; 0 to end it at once.
    """

    def __init__(self, services: Services, *, policy: Policy, grace: float) -> None:
        self._services, self._ledger, self._store = services, services.ledger, services.ledger.store
        self._policy, self._grace = policy, grace
        self._retries = SampledCounter()
        self._calls: dict[str, CallAttempt] = {}
        self._watched: dict[str, asyncio.Task[_Ended]] = {}
        self._orphans: dict[_Task, CallAttempt] = {}

    async def serve(self, asked: CallRequest, fingerprint: Fingerprint, budget: Budget) -> web.StreamResponse:
        """Answer a request, with as many attempts as needed.

        Raises:
            EngineError: no engine took the call. Other errors of `CallAttempt.open` and `CallAttempt.run` are raised too.
        """
        replayable = bool(fingerprint.digest) and _can_be_replayed(asked.response)
        join: Join = fingerprint.join if replayable else "never"
        resamples, began, loop = 0, time.monotonic(), asyncio.get_running_loop()
        metrics.IN_FLIGHT.add(1)
        if asked.chat.stream:
            asked.response.keep_alive()
        try:
            while True:
                may_resample = self._services.hold > 0 and self._services.aborted != "pass" and resamples < MAX_RESAMPLES
                call = CallAttempt(asked, self._services, budget, may_resample=may_resample)
                task = loop.create_task(self._attempt(call, asked, fingerprint, join, replayable=replayable))
                try:  # in a separate task, which may continue after the client has left
                    await _until_done(task)
                    result = task.result()
                except asyncio.CancelledError:
                    self._leave(asked, call, task)
                    raise
                if isinstance(result, Opening):
                    ended = await self._end_of_duplicate(asked, call, result)
                    if turns := whole_reply_of(ended.turns, asked.chat.n):
                        call.report(IncidentKind.RETRY_JOINED)
                        return await self._join(asked, result.epoch, turns, since=RECORD_CLOCK.now() - (time.monotonic() - began))
                    join = join if ended.died else "never"
                elif result is not None:
                    return result
                else:
                    budget = Budget()  # a call that was within the budget may be made again
                    resamples += 1
                    await pause_before_resample()
        finally:
            metrics.IN_FLIGHT.add(-1)
            metrics.CALL_SECONDS.observe(time.monotonic() - began)
            if asked.chat.stream:
                await asked.response.end_keep_alive()

    async def _attempt(
        self, call: CallAttempt, asked: CallRequest, fingerprint: Fingerprint, join: Join, *, replayable: bool
    ) -> web.StreamResponse | Opening | None:
        """Make one attempt at a call.

        Returns:
            The response; an `Opening` if a duplicate is in flight; `None` if the call must be made again.
        """
        if fingerprint.digest:
            self._calls[call.id] = call
        try:
            opening = await call.open(join)
            if opening.duplicate is not None:
                return opening
            turns = whole_reply_of(opening.earlier, asked.chat.n) if opening.earlier else ()
            if turns:
                return await self._repeat(call, asked, fingerprint, opening, turns, replayable=replayable)
            if opening.left:
                raise asyncio.CancelledError  # noqa: TRY301 - the call ends as if it had been raised meanwhile
            del opening  # what this frame names, it keeps for as long as a stream
            return await call.run()
        except BaseException as why:
            await call.fail(why)
            raise
        finally:
            self._calls.pop(call.id, None)

    async def _repeat(
        self,
        call: CallAttempt,
        asked: CallRequest,
        fingerprint: Fingerprint,
        opening: Opening,
        turns: tuple[Turn, ...],
        *,
        replayable: bool,
    ) -> web.StreamResponse | None:
        """Answer a request that has a whole reply, `turns`: send that, or sample again. Returns `None` as `_attempt`."""
        claimed, left = Claim.NOT_DUE, opening.left
        if replayable:
            claimed, gone = await to_the_end(claim_due(self._store, self._policy, asked.session, fingerprint, turns))
            left = left or gone
        if claimed is Claim.OURS or (fingerprint.marked and claimed is not Claim.NOT_DUE):
            return await self._replay(call, asked, opening.epoch, turns, claimed, left=left)
        received = claimed is Claim.RECEIVED
        if claimed is Claim.NOT_DUE:
            received, gone = await to_the_end(was_received(self._store, asked.session, opening.earlier))
            left = left or gone
        if left:
            self._give_back(asked.session, opening.epoch, turns, claimed, [])
            if received:  # the network may deliver a call after its retry: this is no evidence that the harness left
                call.report(IncidentKind.CLIENT_GONE)
                await call.close()
            raise asyncio.CancelledError
        metrics.RETRIED_CALLS.labels("sampled").inc()
        documents = {refused_second_sample(fingerprint.digest): turns[0].call.encode()}
        return await call.run(RequestSample(second=True, never_answered=not received, documents=documents))

    # Duplicates

    async def _join(self, asked: CallRequest, epoch: str, turns: tuple[Turn, ...], *, since: float) -> web.StreamResponse:
        """Send the reply of a call that was in flight. The request for it arrived at `since`."""
        claimed, left = await to_the_end(claim(self._store, asked.session, turns))
        found = [] if left else self._incidents(IncidentKind.RETRY_JOINED, asked.session, turns, claimed)
        incidents = [msgspec.structs.replace(one, since=since) for one in found]
        if incidents:
            _, left = await to_the_end(self._note(asked.session, incidents))
        give_back = partial(self._give_back, asked.session, epoch, turns, claimed, incidents)
        return await _send_again(IncidentKind.RETRY_JOINED, asked, turns, give_back, left=left)

    async def _note(self, session: str, incidents: list[Incident]) -> None:
        with contextlib.suppress(StoreError):  # the reply is recorded either way
            await self._ledger.add_incidents(session, incidents)

    async def _replay(
        self, call: CallAttempt, asked: CallRequest, epoch: str, turns: tuple[Turn, ...], claimed: Claim, *, left: bool
    ) -> web.StreamResponse:
        """Send a recorded reply, unless the client has left."""
        call.report(IncidentKind.CLIENT_GONE if left else IncidentKind.RETRY_REPLAYED)
        incidents = [] if left else self._incidents(IncidentKind.RETRY_REPLAYED, asked.session, turns, claimed)
        try:
            with contextlib.suppress(StoreError):  # the reply is recorded either way
                await call.close(incidents)
        except asyncio.CancelledError:
            left = True
        give_back = partial(self._give_back, asked.session, epoch, turns, claimed, incidents)
        return await _send_again(IncidentKind.RETRY_REPLAYED, asked, turns, give_back, left=left)

    def _give_back(self, session: str, epoch: str, turns: tuple[Turn, ...], claimed: Claim, noted: list[Incident]) -> None:
        """Let another retry claim a reply whose client left before it was sent; `noted` says that it received the reply."""
        if claimed in _MAY_BE_OURS:
            detail = "the client of a repeated call left before the recorded reply was sent"
            at = noted[0].at if noted else RECORD_CLOCK.now()
            gone = IncidentKind.CLIENT_GONE.incident(detail, call=turns[0].call, turn=turns[0].id, at=at)
            self._ledger.detach(asyncio.create_task(self._note_unsent(session, epoch, gone)))

    async def _note_unsent(self, session: str, epoch: str, gone: Incident) -> None:
        with contextlib.suppress(StoreError):
            documents = {undelivered(gone.call): b"1"}
            await self._ledger.settle(BeginResult(epoch, []), session, gone.call, [gone], documents=documents)

    def _incidents(self, kind: IncidentKind, session: str, turns: tuple[Turn, ...], claimed: Claim) -> list[Incident]:
        """Return the incident for a retry, if it is selected (`SampledCounter`); a session must not grow with every retry.

        One that claimed its reply, or may have, always has its incident: it shows that the client came back (`core.outcome`).
        """
        number = self._retries.count(session)
        if not number and claimed is Claim.RECEIVED:
            return []
        detail = "a repeated call got the recorded reply" + (f": repetition no. {number}" if number else "")
        return [kind.incident(detail, call=turns[0].call, turn=turns[0].id, at=RECORD_CLOCK.now())]

    async def _end_of_duplicate(self, asked: CallRequest, call: CallAttempt, opening: Opening) -> _Ended:
        """Wait until the call in flight has ended. Meanwhile mark it in the store as wanted."""
        assert opening.duplicate is not None  # noqa: S101 - the caller looked
        session, duplicate = asked.session, opening.duplicate
        wanting = asyncio.create_task(self._keep_wanting(session, duplicate.call))
        try:
            return await self._watched_end(session, opening.epoch, duplicate, REQUEST_KEY + asked.fingerprint)
        except StoreError as why:
            log.warning("session %s: cannot wait for the reply of call %s: %s", session, duplicate.call, why)
            return _Ended(())
        except asyncio.CancelledError:
            call.report(IncidentKind.CLIENT_GONE)
            self._ledger.detach(asyncio.create_task(self._mark_wanted(session, duplicate.call, given_up=True)))
            raise
        finally:
            await end(wanting)

    async def _keep_wanting(self, session: str, call: str) -> None:
        if self._grace:
            await repeat("wanted", lambda: self._mark_wanted(session, call), self._grace / 3)  # well within the grace period

    async def _mark_wanted(self, session: str, call: str, *, given_up: bool = False) -> None:
        with contextlib.suppress(StoreError):
            await self._store.mark_wanted(session, call, given_up=given_up)

    async def _watched_end(self, session: str, epoch: str, duplicate: OpenCall, key: bytes) -> _Ended:
        """Wait until a call has ended; its turns are found under `key`. All retries that wait for a call share one task.

        Raises:
            StoreError: the store failed.
        """
        task = self._watched.get(duplicate.call)
        if task is None:
            task = self._watched[duplicate.call] = asyncio.create_task(self._watch(session, epoch, duplicate, key))
            task.add_done_callback(lambda done: self._unwatch(duplicate.call, done))
        return await asyncio.shield(task)

    def _unwatch(self, call: str, done: asyncio.Task[_Ended]) -> None:
        del self._watched[call]
        if not done.cancelled() and (why := done.exception()) is not None:
            log.info("call %s is no longer watched: %s", call, why)

    async def _watch(self, session: str, epoch: str, duplicate: OpenCall, key: bytes) -> _Ended:
        local, died = self._calls.get(duplicate.call), False
        if local is None or local.ended or not await local.until_ended():
            died = await self._closed_for_lost_replica(session, epoch, duplicate)
        found = (await self._store.find(session, [key]))[0]
        return _Ended(tuple(hit.turn for hit in found if hit.turn.call == duplicate.call), died)

    async def _closed_for_lost_replica(self, session: str, epoch: str, duplicate: OpenCall) -> bool:
        """Wait until a call that is not served here is closed; true if it was closed here because its replica did not close it."""
        silent = 0.0
        for pause in delays(FIRST_PAUSE, LONGEST_PAUSE, factor=1.5):
            info = await self._store.session(session)
            if info is None or all(one.call != duplicate.call for one in info.open_calls):
                return False
            if duplicate.replica == self._ledger.replica:  # the store failed when the call ended here; an incident reports that
                return await self._close(session, epoch, duplicate, [])
            if not await self._store.live_replicas([duplicate.replica]):
                if silent >= HEARTBEAT_SECONDS:  # a restarted store lost the heartbeats, but has received the next ones by now
                    return await self._close(session, epoch, duplicate, [lost(duplicate)])
                silent += pause
            else:
                silent = 0.0
            await asyncio.sleep(pause)
        raise AssertionError("delays never end")

    async def _close(self, session: str, epoch: str, duplicate: OpenCall, incidents: list[Incident]) -> bool:
        log.warning("session %s call %s: closed in place of replica %s, which did not close it", session, duplicate.call, duplicate.replica)
        with contextlib.suppress(SessionGoneError):
            await self._store.settle(session, epoch, duplicate.call, incidents)
        return True

    # Orphaned generations

    def _leave(self, asked: CallRequest, call: CallAttempt, task: _Task) -> None:
        """End an attempt whose client has left, or let it continue as an orphaned generation."""
        if task.done():
            task.cancelled() or task.exception()  # marks the exception as retrieved
            return
        asked.response.holding.keep(task)
        if self._grace and call.may_be_orphaned:
            call.orphan()
            self._orphans[task] = call
            self._ledger.detach(asyncio.create_task(self._wait_for_orphan(asked.session, call, task)))
        else:
            call.cancel(task)
            self._ledger.detach(asyncio.create_task(_log_failure(task)))

    async def _wait_for_orphan(self, session: str, call: CallAttempt, task: _Task) -> None:
        """Let an orphaned generation continue for the grace period, and for as long as a retry waits for it."""
        await self._is_wanted(session, call)
        while (await asyncio.wait({task}, timeout=self._grace))[1]:
            if not await self._is_wanted(session, call):
                call.cancel(task)
                break
        await _log_failure(task)
        del self._orphans[task]

    async def _is_wanted(self, session: str, call: CallAttempt) -> bool:
        """Mark the call in the store as orphaned; true if a retry waits for it."""
        try:
            return await self._store.mark_orphaned(session, call.id)
        except StoreError:
            return False

    async def close(self) -> None:
        """Cancel the orphaned generations."""
        for task, call in self._orphans.items():
            call.cancel(task)
        await asyncio.gather(*self._orphans, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def heartbeats(self) -> AsyncIterator[None]:
        """Write this replica's heartbeat while the context is open."""
        await self._beat()
        heartbeat = asyncio.create_task(repeat("heartbeat", self._beat, HEARTBEAT_SECONDS))
        try:
            yield
        finally:
            await end(heartbeat, *self._watched.values())

    async def _beat(self) -> None:
        try:
            await self._store.heartbeat(self._ledger.replica, LIVE_SECONDS)
        except StoreError as why:
            log.debug("replica %s: no heartbeat written: %s", self._ledger.replica, why)


async def _send_again(
    kind: str, asked: CallRequest, turns: tuple[Turn, ...], give_back: Callable[[], None], *, left: bool
) -> web.StreamResponse:
    """Send a recorded reply, and `give_back` the reply if the client has left, or leaves before it is sent."""
    with contextlib.suppress(asyncio.CancelledError):
        if not left:
            metrics.RETRIED_CALLS.labels(kind.removeprefix("retry-")).inc()
            metrics.CALLS.labels(asked.chat.dialect, kind).inc()
            return await send_again(asked.response, turns)
    give_back()
    raise asyncio.CancelledError


def _until_done(task: _Task) -> asyncio.Future[None]:
    """Return a future that is done when a task is. If the future is cancelled, the task is not.

    `asyncio.shield` does the same with two more functions, and holds 400 bytes more for as long as a stream.
    """
    waiter = asyncio.get_running_loop().create_future()
    task.add_done_callback(partial(_wake, waiter))
    return waiter


def _wake(waiter: asyncio.Future[None], _: _Task) -> None:
    if not waiter.done():
        waiter.set_result(None)


async def _log_failure(task: _Task) -> None:
    """Wait for a task without a client, and log an unexpected failure; the call is recorded in any case."""
    await asyncio.wait({task})
    if not task.cancelled() and (why := task.exception()) is not None and not isinstance(why, TokencacheError | SettingsChangedError):
        log.error("a call without a client failed", exc_info=why)


def _can_be_replayed(response: Response) -> bool:
    """Whether everything that the client requests is recorded with a turn."""
    chat = response.chat
    for name in UNRECORDED:
        if name in chat.fields and bytes(chat.fields[name]) not in _OFF:
            return False
    return not (chat.shows_ids or chat.shows_logprobs or response.exchange.token_ids)
