"""Follows what trainers announce about the weights of the engines (`core.weights`), on all replicas that share the store.

The announcement is one value in the store. A change replaces it only if no other replica did so meanwhile (`change`). Once anything was
announced, each replica reads the value from the store whenever it must be certain (`current`). Before that, a call costs nothing: the
replica looks every `POLL_SECONDS` seconds whether a first announcement was made elsewhere. So announce the first version before the first
rollout.

An update that nobody ends has a timeout. The first replica that notices that it has passed ends the update; the version is then unknown.

At the end of an update the engines that the proxy had paused are resumed. Until that is done the update stays in the state
(`Update.ended`), so that another replica does it if this one dies.

An engine that was down may be another process with other weights, those on its disk. So a version counts only if it was announced after
the engine was seen down the last time, and while it answered. vLLM takes longer to start than the time between two checks of its health
(`health.CHECK_EVERY`), so a process that was replaced is seen down.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from tokencache.background import repeat
from tokencache.core.weights import Update, WeightsState
from tokencache.engine.health import EngineMonitor
from tokencache.engine.membership import POLL_SECONDS
from tokencache.engine.pool import Pool
from tokencache.engine.upstream import Upstream
from tokencache.errors import EngineError
from tokencache.store.base import Store, StoreError
from tokencache.store.clock import RECORD_CLOCK
from tokencache.wakeup import Wakeup, end

log = logging.getLogger(__name__)

ANSWER_SECONDS = 20.0
"""Seconds to wait for an engine's answer, except to a pause."""


class Failure(NamedTuple):
    """Why an engine did not do what it was told; `reached` is false if there is no connection to it."""

    reason: str
    reached: bool


class AnnouncedWeights:
    """What is announced about the weights of a pool's engines, as this replica knows it.

    Attributes:
        known: what was announced when this replica read it last; its revision is 0 if nothing was ever announced.
        changed: wakes those who wait for an update to end.
    """

    def __init__(self, pool: Pool, store: Store) -> None:
        self._pool, self._store = pool, store
        self.known = WeightsState()
        self._falls: dict[
            str, tuple[int, int]
        ] = {}  # of each engine: the newest announcement, and its falls when this replica learned of it
        self._store_failed = False
        self.changed = Wakeup()

    async def current(self) -> WeightsState:
        """Return what is announced now. Costs nothing before the first announcement.

        Raises:
            StoreError: the store does not answer.
        """
        return await self.read() if self.known.revision else self.known

    async def read(self) -> WeightsState:
        """Read what is announced now. Ends an update whose timeout has passed, and resumes engines that nobody else resumes.

        Raises:
            StoreError: the store does not answer.
        """
        state = await self._store.weights()
        if self._started_later(state):
            state, _ = await self._replace(lambda latest: latest)
        lost = self.known.update if state.revision < self.known.revision else None
        self._learn(state)
        if lost is not None and lost.paused:  # the store lost its data: no replica could resume these engines any more
            log.warning("the update of the weights by %r is over, because the store has lost it; its engines are resumed", lost.owner)
            await self.resume(lost.engines)
        if state.update is None or RECORD_CLOCK.now() < state.update.until:
            return state
        if state.update.ended:
            return await self._resume_again(state.update)
        log.warning("the update of the weights by %r has passed its timeout: the version is unknown", state.update.owner)
        return await self.change(lambda latest: latest.expire(RECORD_CLOCK.now()))

    async def change(self, transition: Callable[[WeightsState], WeightsState]) -> WeightsState:
        """Apply a transition to the newest state, and store the result. If it ends an update, resume the engines that the proxy paused.

        If an engine cannot be resumed, the update stays in the state, as one that has ended; replicas try it again.

        Args:
            transition: makes the next state; returns the same one if nothing is to change. It may be called several times.

        Raises:
            StoreError: the store does not answer. It may or may not have stored the change.
        """
        following, changed = await self._replace(transition)
        if changed and following.update is not None and following.update.ended:
            return await self._resume_ended(following.update)
        return following

    async def _replace(self, transition: Callable[[WeightsState], WeightsState]) -> tuple[WeightsState, bool]:
        while True:
            stored = await self._store.weights()
            restarted = self._started_later(stored)
            following = transition(stored.restarted(restarted, RECORD_CLOCK.now()))
            changed = following is not stored
            if changed:
                following = msgspec.structs.replace(following, revision=stored.revision + 1)
            if not changed or await self._store.replace_weights(following):
                for url in restarted:
                    log.warning("engine %s: it was down, so the version of its weights is unknown until it is announced again", url)
                self._learn(following)
                return following, changed

    async def _resume_again(self, update: Update) -> WeightsState:
        """Resume the engines of an update that ended some time ago, unless another replica does so now."""
        state, changed = await self._replace(lambda latest: latest.postponed(update.id, RECORD_CLOCK.now()))
        return await self._resume_ended(update) if changed else state

    async def _resume_ended(self, update: Update) -> WeightsState:
        problems = await self.resume(update.engines)
        for url, failure in problems.items():
            log.error("engine %s: it could not be resumed after the update of its weights: %s", url, failure.reason)
        if any(failure.reached for failure in problems.values()):
            return self.known
        state, _ = await self._replace(lambda latest: latest.resumed(update.id))  # a process that is gone is not paused
        return state

    def _started_later(self, state: WeightsState) -> list[str]:
        """Return the engines that were down since their version was announced: another process may run there now.

        If this replica knew the announcement before, the order is certain. Otherwise the clocks of the replicas decide.
        """
        found = []
        for monitor in self._pool.monitors:
            weights = state.of(monitor.url)
            update, falls = self._falls.get(monitor.url, (0, 0))
            if weights.version and (weights.at < monitor.gone_at or (weights.update == update and falls < monitor.falls)):
                found.append(monitor.url)
        return found

    async def silent(self, engines: Sequence[str]) -> list[str]:
        """Return the engines that do not answer now, of some or of all that are trained."""
        asked = self._named(engines)
        answers = await asyncio.gather(*(monitor.answers() for monitor in asked))
        return [monitor.url for monitor, answered in zip(asked, answers, strict=True) if not answered]

    def _learn(self, state: WeightsState) -> None:
        if state != self.known:
            self.known = state
            self.changed.notify()
        for monitor in self._pool.monitors:
            update = state.of(monitor.url).update
            if self._falls.get(monitor.url, (0, 0))[0] != update:
                self._falls[monitor.url] = update, monitor.falls

    def upstreams(self, engines: Sequence[str]) -> list[Upstream]:
        """Return the connections to some engines, or to all that are trained if none are named. Engines that are gone are left out."""
        return [monitor.engine.upstream for monitor in self._named(engines)]

    def _named(self, engines: Sequence[str]) -> list[EngineMonitor]:
        return [one for one in self._pool.monitors if (one.url in engines if engines else one.engine.trains)]

    async def resume(self, engines: Sequence[str]) -> dict[str, Failure]:
        """Let paused engines go on (`POST /resume`; vLLM answers 200 if it is not paused). Returns what failed, by URL."""
        return await self.tell(engines, "/resume")

    async def tell(self, engines: Sequence[str], path: str, body: object = None, *, seconds: float = ANSWER_SECONDS) -> dict[str, Failure]:
        """Post to some engines at once, or to all if none are named. Returns what failed, by URL."""

        async def post(upstream: Upstream) -> Failure | None:
            try:
                async with asyncio.timeout(seconds):
                    answer = await upstream.post(path, {} if body is None else body)
            except EngineError as why:
                return Failure(str(why), why.reached)
            except TimeoutError:
                return Failure(f"{path} was not answered within {seconds:.0f} s", reached=True)
            if answer.status == HTTPStatus.OK:
                return None
            return Failure(f"{path} answered {answer.status}: {answer.body[:200].decode(errors='replace')}", reached=True)

        asked = self.upstreams(engines)
        problems = await asyncio.gather(*map(post, asked))
        return {upstream.url: problem for upstream, problem in zip(asked, problems, strict=True) if problem is not None}

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Follow the announcements to other replicas while the context is open."""
        await self._try_to_read()
        task = asyncio.create_task(repeat("weights", self._try_to_read, POLL_SECONDS))
        try:
            yield
        finally:
            await end(task)
            self.changed.close()

    async def _try_to_read(self) -> None:
        try:
            await self.read()
        except StoreError as why:
            if not self._store_failed:
                log.warning("what trainers announce about the weights is not known until the store answers: %s", why)
            self._store_failed = True
        else:
            self._store_failed = False
