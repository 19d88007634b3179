"""Repeats: a call that is made twice is one call.

Two things are done for a call that may be a repetition (`imprint`), or be repeated:

- *joined, or said again*: while another call like it is in flight it waits for that one's reply (`twins`); and where the reply is
  recorded it gets that (`again`). So the engine samples once. A call that says that it is a repetition gets the recorded reply
  every time; one that does not say so gets it once, and only a reply that nobody has heard: otherwise it is a second sample, a
  sibling of the first, and marked.
- *let go on*: a harness that leaves before anything of the reply was shown may have lost patience with a slow engine, and comes back.
  The call lingers: the engine goes on for a while, and for as long as another call says that it waits. What is whole although nobody
  listened is recorded, marked `unanswered`. A stream of which something was shown ends at once: the harness has what it has.

Patience has an end: a call for which somebody waited in vain is joined by nobody any more. An engine may hang on just this one, and who
comes again must not be worse off than without a proxy.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from aiohttp import web

from tokencache import metrics
from tokencache.core.budget import Budget
from tokencache.core.chain import request_key
from tokencache.core.turn import Turn
from tokencache.dialects.chat.call import ChatCall
from tokencache.errors import EngineError
from tokencache.proxy.call import Beginning, Call
from tokencache.proxy.dedup import replay as again
from tokencache.proxy.dedup.fingerprint import Policy, Repeat, claim, passed_over, repeat_of
from tokencache.proxy.dedup.in_flight import Ended
from tokencache.proxy.engine_retry import Hold
from tokencache.proxy.exchange import Exchange
from tokencache.proxy.latecomers import Latecomers
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.recorder import UNANSWERED
from tokencache.store.base import Incident, Join, StoreError

log = logging.getLogger(__name__)

JOINED, REPLAYED = "retry-joined", "retry-replayed"

_Task = asyncio.Task[web.StreamResponse | Beginning | None]


class Asking(NamedTuple):
    """A harness that asks, and what is needed to answer it."""

    request: web.Request
    session: str
    call: ChatCall
    exchange: Exchange
    hold: Hold
    repeat: Repeat
    budget: Budget

    @property
    def can_be_said(self) -> bool:
        """Whether a recorded reply can be all that it asks for."""
        return bool(self.repeat.imprint) and again.can_be_said(self.call, self.exchange)


class Repeats:
    """Serves calls, each as one; `linger` is for how many seconds a call goes on that nobody listens to, 0: it does not."""

    def __init__(self, ledger: Ledger, *, policy: Policy, linger: float) -> None:
        self._ledger, self._policy, self._linger = ledger, policy, linger
        self._told = Latecomers()
        self._lingering: dict[_Task, Call] = {}

    def look(self, request: web.Request, path: str, body: bytes, harness: str) -> Repeat:
        """Look whether a request may be a repetition; `path` with its query."""
        return repeat_of(self._policy, path, request.headers, body, harness)

    async def serve(self, asking: Asking, attempt: Callable[[Budget], Call]) -> web.StreamResponse:
        """Answer a call; each `attempt` makes it anew, within a budget.

        Raises:
            EngineError: and what else `Call.begin` and `Call.run` raise.
        """
        join = asking.repeat.join if asking.can_be_said else "never"
        budget = asking.budget
        while True:
            answer = await self._outlived(asking, attempt(budget), join)
            if isinstance(answer, Beginning):
                ended = await self._end_of_twin(asking, answer)
                turns = again.whole(ended.turns, asking.call.n) if ended.turns else ()
                if turns:
                    return await self._joined(asking, turns)
                join = join if ended.died else "never"
            elif answer is not None:
                return answer
            else:
                budget = Budget()  # who was let in is not turned away because the engine dropped its reply
                await asking.hold.before_next()

    async def close(self) -> None:
        """Let nothing go on any more that nobody listens to."""
        for task, live in self._lingering.items():
            live.stop(task)
        await asyncio.gather(*self._lingering, return_exceptions=True)

    async def _served(self, asking: Asking, live: Call, join: Join) -> web.StreamResponse | Beginning | None:
        """Begin a call and answer it; what is known of its twin, if there is one, and `None` if it is to be made again."""
        async with asking.hold.awake():
            known = await live.begin(join)
        if known.duplicate is not None:
            return known
        turns = again.whole(known.earlier, asking.call.n) if known.earlier else ()
        if turns and await self._is_due(asking, turns):
            return await self._replayed(asking, live, turns)
        if turns:
            metrics.REPEATS.labels("sampled").inc()
        return await live.run(second=turns[0].call if turns else "")

    async def _end_of_twin(self, asking: Asking, known: Beginning) -> Ended:
        assert known.duplicate is not None  # noqa: S101 - the caller looked
        duplicate = known.duplicate.call
        wanting = asyncio.create_task(self._keep_wanting(asking.session, duplicate))
        try:
            async with asking.hold.awake():
                return await self._ledger.twins.ended(asking.session, known.epoch, known.duplicate, request_key(asking.repeat.imprint))
        except StoreError as why:
            log.warning("session %s: the reply of call %s is not waited for: %s", asking.session, duplicate, why)
            return Ended(())
        except asyncio.CancelledError:
            self._ledger.detach(asyncio.create_task(self._give_up(asking.session, duplicate)))
            raise
        finally:
            wanting.cancel()

    async def _keep_wanting(self, session: str, call: str) -> None:
        """Say again and again that a call is waited for: well within the time for which it goes on unheard."""
        while self._linger:
            await asyncio.sleep(self._linger / 3)
            with contextlib.suppress(StoreError):
                await self._ledger.store.mark_wanted(session, call)

    async def _give_up(self, session: str, call: str) -> None:
        with contextlib.suppress(StoreError):
            await self._ledger.store.mark_wanted(session, call, given_up=True)

    async def _is_due(self, asking: Asking, turns: tuple[Turn, ...]) -> bool:
        """Whether this call is to get the recorded reply."""
        if not asking.can_be_said:
            return False
        if asking.repeat.marked:
            return not await self._is_passed_over(asking, turns)
        return self._policy == "join" and await self._is_first_to_hear(asking, turns)

    async def _is_passed_over(self, asking: Asking, turns: tuple[Turn, ...]) -> bool:
        """Whether it was a later call that this one repeats, and that one came to nothing."""
        try:
            (held,) = await self._ledger.store.documents(asking.session, [passed_over(asking.repeat.imprint)])
        except StoreError:
            return True  # as if nothing were known
        return held == turns[0].call.encode()

    async def _is_first_to_hear(self, asking: Asking, turns: tuple[Turn, ...]) -> bool:
        """Claim a reply that nobody has heard; false if there is nothing to claim."""
        if UNANSWERED not in turns[0].marks:
            return False
        try:
            return await self._ledger.store.delete_document(asking.session, claim(turns[0].call))
        except StoreError:
            return False

    async def _joined(self, asking: Asking, turns: tuple[Turn, ...]) -> web.StreamResponse:
        await self._is_first_to_hear(asking, turns)
        with contextlib.suppress(StoreError):  # the reply is there, and recorded
            if incidents := self._told_of(JOINED, asking, turns):
                await self._ledger.add_incidents(asking.session, incidents)
        return await self._said(JOINED, asking, turns)

    async def _replayed(self, asking: Asking, live: Call, turns: tuple[Turn, ...]) -> web.StreamResponse:
        if asking.repeat.marked:
            await self._is_first_to_hear(asking, turns)
        with contextlib.suppress(StoreError):
            await live.close(self._told_of(REPLAYED, asking, turns))
        return await self._said(REPLAYED, asking, turns)

    def _told_of(self, kind: str, asking: Asking, turns: tuple[Turn, ...]) -> list[Incident]:
        """What the trainer is told: a harness may repeat for ever, and a session's incidents do not grow with that."""
        number = self._told.count(asking.session)
        if not number:
            return []
        detail = f"a repeated call got the recorded reply: repetition no. {number}"
        return [Incident(kind, detail, False, turns[0].call, turns[0].id, time.time())]

    async def _said(self, kind: str, asking: Asking, turns: tuple[Turn, ...]) -> web.StreamResponse:
        metrics.REPEATS.labels(kind.removeprefix("retry-")).inc()
        metrics.CALLS.labels(asking.call.dialect, kind).inc()
        return await again.say_again(asking.request, asking.call, asking.exchange, asking.hold, turns)

    async def _outlived(self, asking: Asking, live: Call, join: Join) -> web.StreamResponse | Beginning | None:
        """Serve a call by a task that may outlive its harness."""
        task = asyncio.create_task(self._served(asking, live, join))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done() and self._linger and live.may_go_on:
                self._lingering[task] = live
                self._ledger.detach(asyncio.create_task(self._let_go_on(live, task)))
            elif task.done():
                task.cancelled() or task.exception()  # nobody is there to be told
            else:
                live.stop(task)
                self._ledger.detach(asyncio.create_task(self._ended_with(live, task)))
            raise

    async def _let_go_on(self, live: Call, task: _Task) -> None:
        await live.leave()
        while (await asyncio.wait({task}, timeout=self._linger))[1]:
            if not await live.leave():
                live.stop(task)
                break
        await self._ended_with(live, task)
        del self._lingering[task]

    @staticmethod
    async def _ended_with(live: Call, task: _Task) -> None:
        """Wait for the end of a task that nobody else waits for; what it came to is recorded."""
        await asyncio.wait({task})
        if not task.cancelled():
            if (why := task.exception()) is not None and not isinstance(why, (EngineError, StoreError)):
                log.error("a call that nobody listens to failed", exc_info=why)
        else:
            await live.stopped()
