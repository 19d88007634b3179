"""Follows what trainers announce about the weights of the engines (`core.weights`), on all replicas that share the store.

The announcement is one value in the store. A change replaces it only if no other replica did so meanwhile (`change`). Once anything was
announced, each replica reads the value from the store whenever it must be certain (`current`). Before that, a call costs nothing: the
replica looks every `POLL_SECONDS` seconds whether a first announcement was made elsewhere. So announce the first version before the first
rollout.

An update that nobody ends has a timeout. The first replica that notices that it has passed resumes the engines that the proxy had paused,
and ends the update; the version is then unknown.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence

from tokencache.core.weights import Update, WeightsState
from tokencache.engine.membership import POLL_SECONDS
from tokencache.engine.pool import Pool
from tokencache.engine.upstream import Upstream
from tokencache.errors import EngineError
from tokencache.store.base import Store, StoreError
from tokencache.wakeup import Wakeup

log = logging.getLogger(__name__)

_OK = 200


class AnnouncedWeights:
    """What is announced about the weights of a pool's engines, as this replica knows it.

    Attributes:
        changed: wakes those who wait for an update to end.
    """

    def __init__(self, pool: Pool, store: Store) -> None:
        self._pool, self._store = pool, store
        self._known = WeightsState()
        self._store_failed = False
        self.changed = Wakeup()

    @property
    def active(self) -> bool:
        """Whether anything was ever announced, as far as this replica knows."""
        return self._known.revision > 0

    @property
    def known(self) -> WeightsState:
        """What was announced when this replica read it last."""
        return self._known

    async def current(self) -> WeightsState:
        """Return what is announced now. Costs nothing before the first announcement.

        Raises:
            StoreError: the store does not answer.
        """
        return await self.read() if self.active else self._known

    async def read(self) -> WeightsState:
        """Read what is announced now, and end an update whose timeout has passed.

        Raises:
            StoreError: the store does not answer.
        """
        state = await self._store.weights()
        lost = self._known.update if state.revision < self._known.revision else None
        self._learn(state)
        if lost is not None and lost.paused:  # the store lost its data: nobody could resume these engines any more
            await self._give_up(lost, "the store has lost it")
        if state.update is None or state.expire(time.time()) is state:
            return state
        await self._give_up(state.update, "its timeout has passed")
        return await self.change(lambda latest: latest.expire(time.time()))

    async def change(self, transition: Callable[[WeightsState], WeightsState]) -> WeightsState:
        """Apply a transition to the newest state, and store the result.

        Args:
            transition: makes the next state; returns the same one if nothing is to change. It may be called several times.

        Raises:
            StoreError: the store does not answer. It may or may not have stored the change.
        """
        while True:
            state = await self._store.weights()
            following = transition(state)
            if following is state or await self._store.replace_weights(following):
                self._learn(following)
                return following

    def _learn(self, state: WeightsState) -> None:
        if state != self._known:
            self._known = state
            self.changed.notify()

    async def _give_up(self, update: Update, why: str) -> None:
        log.warning("the update of the weights by %r ends, and their version is unknown: %s", update.owner, why)
        if update.paused:
            for url, problem in (await self.resume(update.engines)).items():
                log.error("engine %s: it could not be resumed after the update of its weights: %s", url, problem)

    def upstreams(self, engines: Sequence[str]) -> list[Upstream]:
        """Return the connections to some engines, or to all if none are named. Engines that are gone are left out."""
        return [monitor.engine.upstream for monitor in self._pool.monitors if not engines or monitor.url in engines]

    async def resume(self, engines: Sequence[str]) -> dict[str, str]:
        """Let paused engines go on (`POST /resume`; vLLM answers 200 if it is not paused). Returns what failed, by URL."""
        return await self.tell(engines, "/resume")

    async def tell(self, engines: Sequence[str], path: str, body: object = None) -> dict[str, str]:
        """Post to some engines at once, or to all if none are named. Returns what failed, by URL."""

        async def post(upstream: Upstream) -> str:
            try:
                answer = await upstream.post(path, {} if body is None else body)
            except EngineError as why:
                return str(why)
            return "" if answer.status == _OK else f"{path} answered {answer.status}: {answer.body[:200].decode(errors='replace')}"

        asked = self.upstreams(engines)
        problems = await asyncio.gather(*map(post, asked))
        return {upstream.url: problem for upstream, problem in zip(asked, problems, strict=True) if problem}

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Follow the announcements to other replicas while the context is open."""
        await self._try_to_read()
        task = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.changed.close()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self._try_to_read()

    async def _try_to_read(self) -> None:
        try:
            await self.read()
        except StoreError as why:
            if not self._store_failed:
                log.warning("what trainers announce about the weights is not known until the store answers: %s", why)
            self._store_failed = True
        else:
            self._store_failed = False
