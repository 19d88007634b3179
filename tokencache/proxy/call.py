"""One model call within a session, from its body to its last byte.

    read → begin (store) → plan → send → stream through as it comes → record → the last byte

The turn is stored before the reply's last byte leaves: of a stream everything is passed on at once up to the event
with which the last choice is finished; that one waits until the turn stands in the store. So a harness that has seen
the end of a reply can send the next call to any replica.

A harness that leaves ends its call, by cancelling the task that serves it: unless it is let go on unheard (`repeats`), because who
asked may ask again.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import aiohttp
import msgspec
from aiohttp import web

from tokencache import metrics
from tokencache.core.budget import Budget
from tokencache.core.chain import request_key
from tokencache.core.turn import Turn
from tokencache.dialects.chat.call import ChatCall
from tokencache.engine.model import Engine, Model
from tokencache.engine.reply import Reply
from tokencache.engine.weights import HEADER as WEIGHT_VERSION
from tokencache.errors import NOT_NOW, EngineError, HarnessError
from tokencache.proxy import echoes
from tokencache.proxy.answering import Answering
from tokencache.proxy.budget import SPENT, last_reply
from tokencache.proxy.client_ids import require_prefix
from tokencache.proxy.dedup.fingerprint import Repeat, passed_over
from tokencache.proxy.delivery import LEFT, Delivery
from tokencache.proxy.ending import Ending
from tokencache.proxy.engine_retry import Hold
from tokencache.proxy.exchange import Exchange
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.planner import Plan, keys_wanted
from tokencache.proxy.recorder import ABORTED, BROKE, Outcome
from tokencache.proxy.sending import Sending
from tokencache.proxy.undisturbed import Undisturbed
from tokencache.store.base import BeginResult, Incident, Join, OpenCall, StoreError

log = logging.getLogger(__name__)

PlanFor = Callable[[Engine, str, ChatCall, Sequence[bytes], BeginResult | None], Awaitable[tuple[Plan, Model | None]]]


class Beginning(NamedTuple):
    """What is known of other calls of this life of the session that asked for the same: one in flight, recorded turns in order."""

    epoch: str = ""
    duplicate: OpenCall | None = None
    earlier: tuple[Turn, ...] = ()


class Call:
    """A model call of one session, under way: `begin`, and then, unless it has a twin, `run` or `close`.

    `run` raises `EngineError` where no engine takes it in time, or breaks off, and nothing was answered yet,
    and under a strict policy `StoreError`; `HarnessError` where the prompt would not begin as the client requires.
    """

    def __init__(
        self,
        request: web.Request,
        session: str,
        call: ChatCall,
        exchange: Exchange,
        *,
        plan: PlanFor,
        hold: Hold,
        ledger: Ledger,
        budget: Budget,
        repeat: Repeat,
    ) -> None:
        self._budget, self._repeat = budget, repeat
        self._plan, self._hold, self._ledger = plan, hold, ledger
        self._session = session
        self._call = call
        self._exchange = exchange
        self._sent = False  # an engine may have begun to sample
        self._keys = keys_wanted(call)
        self._id = os.urandom(8).hex()
        self._undisturbed = Undisturbed()
        self._ending = Ending(session, self._id, ledger, exchange.speaker, hold, undisturbed=self._undisturbed)
        self._reply = Reply(call.n)
        self._delivery = Delivery(request, call, exchange, self._reply, hold)
        self._outcome: Outcome
        self._sending = Sending(self._id, call, exchange)
        self._started = self._asking = time.time()

    async def begin(self, join: Join) -> Beginning:
        """Open the call in the store; not where there is a twin that it may `join`.

        Raises:
            SessionSealedError: and what else `Store.begin` raises.
            StoreError: the store failed and the policy is strict.
        """
        return await self._undisturbed.work(self._begun(join))

    async def _begun(self, join: Join) -> Beginning:
        imprint = self._repeat.imprint
        first = [request_key(imprint)] if imprint else []  # behind a known `c` key nothing is looked up
        begun = await self._ledger.begin(self._session, self._id, [*first, *self._keys], fingerprint=imprint, join=join)
        if begun is not None and begun.duplicate is None:
            self._ending.begun = msgspec.structs.replace(begun, hits=begun.hits[len(first) :])
        self._outcome = self._nothing_yet()
        if begun is None:
            return Beginning()
        return Beginning(begun.epoch, begun.duplicate, tuple(hit.turn for hits in begun.hits[: len(first)] for hit in hits))

    async def close(self, incidents: Sequence[Incident]) -> None:
        """End a call that has begun, and that no engine is asked for.

        Raises:
            StoreError: the store failed and the policy is strict.
        """
        await self._ending.close(incidents)

    async def run(self, *, second: str = "") -> web.StreamResponse | None:
        """Serve the call to its last byte; `None` if the engine aborted it before anything was shown: to be made again.

        `second` is the call that asked the same before and was answered, `""` if there is none: then this is another sample.
        """
        self._outcome.second = second
        if second:
            self._ending.left_behind = {passed_over(self._repeat.imprint): second.encode()}
        try:
            return await self._served()
        except Exception as why:
            if not self._ending.under_way:  # ours, and whoever waits for this call must not wait for ever
                await self._ending.settle(self._outcome, "internal-error", f"{type(why).__name__}: {why}", hole=self._sent)
            raise

    async def _served(self) -> web.StreamResponse | None:
        try:
            if spent := self._spent():
                return await self._stop(spent)
            async with self._hold.awake():  # while it is planned, and an engine queues it before it says a first byte
                answer = await self._hold.taken(self._ask)
        except asyncio.CancelledError:
            # The harness left. What it was given is recorded all the same: this task outlives its.
            if self._sent:
                await self._gone()
            elif not self._ending.under_way:
                await self._ending.close()
            raise
        except HarnessError:
            await self._ending.close()
            raise
        except EngineError as why:
            await self._ending.settle(self._outcome, BROKE if why.reached else "upstream-down", str(why), hole=why.reached)
            raise
        try:
            return await self._answered(answer)
        except asyncio.CancelledError:
            if not self._ending.under_way:
                await self._gone()
            raise

    def _nothing_yet(self) -> Outcome:
        return Outcome(
            session=self._session,
            epoch=self._ending.begun.epoch if self._ending.begun is not None else "",
            call_id=self._id,
            call=self._call,
            plan=Plan(match="plain"),
            reply=self._reply,
            model=None,
            started=self._started,
            asked=self._repeat.imprint,
        )

    def _spent(self) -> str:
        """What of the session's budget is used up, in words; without the store nobody knows."""
        begun = self._ending.begun
        if begun is None or not self._budget:
            return ""
        return self._budget.spent(calls=begun.calls, tokens=begun.tokens, seconds=time.time() - begun.created)

    async def _stop(self, spent: str) -> web.StreamResponse:
        """End the episode: no engine is asked."""
        metrics.CALLS.labels(self._call.dialect, SPENT).inc()
        number = self._ledger.count_spent(self._session)
        log.info("session %s call %s: %s: %s", self._session, self._id, SPENT, spent)
        incidents = [self._outcome.incident(SPENT, f"{spent}: stopped call no. {number}")] if number else []
        await self._ending.close(incidents)
        return await self._delivery.say(last_reply(self._call, self._id))

    async def _gone(self) -> None:
        self._outcome.broke, self._outcome.detail = ABORTED, LEFT
        await self._ending.record(self._outcome)

    def stop(self, task: "asyncio.Task[Any]") -> None:
        """Cancel the task that serves it; if that is just writing to the store, as soon as this is done."""
        self._undisturbed.cancel(task)

    async def stopped(self) -> None:
        """End it if its task was cancelled between `begin` and `run`: then nobody else does."""
        if self._ending.begun is not None and not self._ending.under_way:
            await self._ending.close()

    @property
    def may_go_on(self) -> bool:
        """Whether it makes sense to go on although the harness has left: something is being sampled, and nothing of it was shown."""
        return self._sent and not self._ending.under_way and self._ending.begun is not None and not self._delivery.shown

    async def leave(self) -> bool:
        """Go on unheard; true if another call waits for the reply by now."""
        self._delivery.unheard = self._outcome.unanswered = True
        try:
            return await self._ledger.store.mark_orphaned(self._session, self._id)
        except StoreError:
            return False

    async def _ask(self, engine: Engine) -> aiohttp.ClientResponse:
        """Plan the call for an engine, and send it there.

        Raises:
            EngineError: the engine cannot be reached, or not now.
            HarnessError: the client requires a beginning of the prompt that it will not have.
        """
        self._sent = False
        began, self._asking = self._asking or time.time(), 0.0  # what it waited for another engine is not what planning costs
        self._outcome.plan, self._outcome.model = await self._plan(engine, self._session, self._call, self._keys, self._ending.begun)
        metrics.BEFORE.observe(time.time() - began)
        require_prefix(self._session, self._call, self._outcome.plan.prompt, self._outcome.plan.reason)
        self._sent = True
        try:
            answer = await self._sending.send(engine, self._outcome)
        except EngineError as why:
            self._sent = why.reached
            engine.forget(str(why))
            raise
        self._sent = answer.status not in NOT_NOW
        return answer

    async def _answered(self, answer: aiohttp.ClientResponse) -> web.StreamResponse | None:
        if self._hold.waited:
            self._outcome.noted.append(self._outcome.incident("held", f"{self._hold.waited:.1f} s: {self._hold.why}"))
        if self._call.echoes:
            wrong = await echoes.compared(self._session, self._call, self._outcome.plan, self._ledger)
            self._outcome.noted += [self._outcome.incident(kind, detail) for kind, detail in wrong]
        self._reply.prompt.sent = self._outcome.plan.sent
        self._reply.version = answer.headers.get(WEIGHT_VERSION, "")
        answering = Answering(self._exchange, self._hold, self._delivery, self._ending, self._sending)
        return await answering.answer(answer, self._sending.driver, self._reply, self._outcome)
