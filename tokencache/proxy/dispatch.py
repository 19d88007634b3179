"""Sends the requests of one call to the session's engines until one accepts it.

During a training run, engines are restarted, or paused while their weights are replaced. The whole state of a session is in the proxy's
store, so a call can wait, or use another engine. There are two cases:

- *not accepted*: no connection, a refusal (503, 429) before any answer began, or a trainer updates the weights. Nothing was sampled.
  `Dispatch.accepted` tries each engine in the session's order. If all refuse, it waits with growing pauses and tries them again. Each
  attempt plans the call again.
- *aborted*: the engine ended the reply itself (`finish_reason: "abort"`), and the client received nothing of it. The sampled tokens are
  recorded as a turn that is never continued, and `dedup.in_flight` makes the call again: a new sample for the same prompt. If the client
  received the beginning, the call is not made again, because a stream cannot be undone.

Meanwhile a streaming client receives keep-alive events.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

import aiohttp

from tokencache import metrics
from tokencache.backoff import delays
from tokencache.core.forced import ThinkingMarks
from tokencache.core.incidents import IncidentKind
from tokencache.core.reasons import Reason
from tokencache.dialects.chat.request import ChatCall
from tokencache.dialects.chat.whole import as_stream, as_whole
from tokencache.dialects.reply_encoder import EVENT_STREAM
from tokencache.engine.derender import ANY_MESSAGES, DerenderRequest
from tokencache.engine.drivers.base import Driver, ExactPrompt
from tokencache.engine.image_names import ImageNames
from tokencache.engine.images import read_places
from tokencache.engine.model import Engine, Model
from tokencache.engine.pool import Pool
from tokencache.engine.prefixes import PrefixUse
from tokencache.engine.thinking import budget_of
from tokencache.errors import NOT_NOW, EngineError, WeightsUpdatingError
from tokencache.proxy.call_states import Party, RequestEvent, RequestState
from tokencache.proxy.client_ids import require_prefix
from tokencache.proxy.continuation import NO_EXACT_IMAGES, AbortedPolicy, Continuation, ContinuationError, reason_against
from tokencache.proxy.earlier_thoughts import is_asked_whole
from tokencache.proxy.engine_sender import REFUSED, EngineSender
from tokencache.proxy.kv_salt import MEMBER, SaltedRequest
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.plan import Plan
from tokencache.proxy.planner import media_reason
from tokencache.proxy.policy_version import PolicyVersions
from tokencache.proxy.recorder import Outcome
from tokencache.proxy.response import Exchange
from tokencache.store.base import BeginResult
from tokencache.wakeup import wait_for

log = logging.getLogger(__name__)

MAX_RESAMPLES = 4
"""Maximum number of times that an aborted call is made again: weights may change faster than a reply is sampled."""
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0
"""Seconds. Each pause is twice the one before, reduced at random by up to half."""
_OK = 200

Post = Callable[[Engine], Awaitable[aiohttp.ClientResponse]]
"""Sends a request to an engine, and returns its answer. Raises `EngineError` if the engine cannot be reached, or cannot serve now."""


class Services(NamedTuple):
    """The components that serve the calls of all sessions.

    Attributes:
        pool: the engines.
        ledger: begins and ends calls in the store.
        plan: plans a call for an engine (`planner`).
        versions: reads the policy version of each request's engine.
        hold: seconds for which a call may wait for an engine.
        aborted: what happens to a reply that an engine broke off.
        image_names: names the images of requests.
        prefixes: names the prompts of requests.
    """

    pool: Pool
    ledger: Ledger
    plan: Callable[[Engine, str, ChatCall, Sequence[bytes], BeginResult | None], Awaitable[tuple[Plan, Model | None]]]
    versions: PolicyVersions
    hold: float
    aborted: AbortedPolicy
    image_names: ImageNames
    prefixes: PrefixUse


class _Refusal(NamedTuple):
    """Why an engine did not accept a request: its answer, or the error if there is none."""

    words: str
    answer: aiohttp.ClientResponse | None = None
    error: EngineError | None = None

    @property
    def kind(self) -> str:
        """The reason, as a label of metrics."""
        if isinstance(self.error, WeightsUpdatingError):
            return "updating"
        return "busy" if self.answer is not None else "down"

    @property
    def retry_after(self) -> float:
        """The engine's `Retry-After`, in seconds; 0 if it sent none."""
        seconds = self.answer.headers.get("Retry-After", "") if self.answer is not None else ""
        return float(seconds) if seconds.isdecimal() else 0.0

    def close(self) -> None:
        """Release the answer's connection."""
        if self.answer is not None:
            self.answer.close()

    def result(self) -> aiohttp.ClientResponse:
        """Return the answer; without one, raise the error."""
        if self.error is not None:
            raise self.error
        assert self.answer is not None  # noqa: S101 - a refusal has an answer or an error
        return self.answer


class Dispatch:
    """Plans and posts the requests of one call.

    Attributes:
        engine: the engine that was tried last; after `accepted`, the one that accepted the request.
        driver: its driver.
        sender: writes the requests.
        continues: whether the reply is continued if the engine breaks it off.
        gathers: whether the request asks for a stream, and a whole reply is made from it.
        whole: whether the request asks for a whole reply although the client requested a stream.
    """

    def __init__(
        self,
        outcome: Outcome,
        exchange: Exchange,
        services: Services,
        keys: Sequence[bytes],
        begun: BeginResult | None,
        *,
        request: Party[RequestState, RequestEvent],
    ) -> None:
        """Prepare to send a call.

        Args:
            outcome: the call. Each attempt writes its plan, its model and its weights.
            exchange: what its dialect sends.
            services: the engines, and what plans for them.
            keys: the look-up keys of the call (`planner.keys_wanted`).
            begun: what the store found under them; `None` if the store failed.
            request: the state of the request.
        """
        self._outcome, self._exchange, self._services = outcome, exchange, services
        self._chat, self._keys, self._begun, self._request = outcome.call, keys, begun, request
        self._keeps_experts = services.ledger.keeps_experts
        self.sender = EngineSender(outcome, exchange, services.image_names, services.prefixes, experts=self._keeps_experts)
        self.engine: Engine
        self.driver: Driver
        self.continues = self.gathers = self.whole = False
        self._since = outcome.started

    async def accepted(self, post: Post) -> aiohttp.ClientResponse:
        """Send a request to the session's engines, until one accepts it or `Services.hold` seconds have passed.

        Args:
            post: sends the request to an engine.

        Returns:
            The engine's answer. If the time is over, the last answer that refuses the request.

        Raises:
            EngineError: the time is over and no engine answered, or an engine failed after it may have begun to sample. Other errors of
                `post` are raised, too.
        """
        updates, refused, refused_at = self._services.versions.changed, None, 0.0
        pauses = delays(FIRST_PAUSE, LONGEST_PAUSE, jitter=0.5)
        while True:
            change = updates.next
            for engine in self._services.pool.order(self._outcome.session):
                if refused is not None:
                    refused.close()
                self.engine = engine
                try:
                    answer = await post(engine)
                except EngineError as why:
                    refused = self._failed(engine, why)
                else:
                    metrics.counter(metrics.ENGINE_CALLS, engine.upstream.url).inc()
                    if answer.status not in NOT_NOW:
                        if refused is not None and refused_at:
                            self._note_wait(time.monotonic() - refused_at, refused)
                        return answer
                    refused = _Refusal(f"the engine at {engine.upstream.url} answered {answer.status}", answer=answer)
                self._since = 0.0
                self._request.advance(RequestEvent.NOT_TAKEN)
                log.info("session %s call %s: not accepted: %s", self._outcome.session, self._outcome.call_id, refused.words)
            refused_at = refused_at or time.monotonic()
            left = self._services.hold - (time.monotonic() - refused_at)
            assert refused is not None  # noqa: S101 - `order` is never empty
            if left <= 0:
                return refused.result()
            metrics.QUEUED_CALLS.labels(refused.kind).inc()
            refused.close()
            pause = min(left, max(refused.retry_after, next(pauses)))
            await (wait_for(change, pause) if refused.kind == "updating" else asyncio.sleep(pause))

    def _failed(self, engine: Engine, why: EngineError) -> _Refusal:
        """Return the refusal that an error means; raise the error if the engine may have begun to sample a new reply."""
        if not why.passing and self._request.state not in {RequestState.BROKEN, RequestState.CONTINUING}:
            raise why
        if not why.reached:
            self._services.pool.mark_down(engine, why)
        return _Refusal(str(why), error=why)

    def _note_wait(self, seconds: float, refused: _Refusal) -> None:
        self._outcome.noted.append(self._outcome.incident(IncidentKind.HELD, f"{seconds:.1f} s: {refused.words}"))

    async def post_call(self, engine: Engine) -> aiohttp.ClientResponse:
        """Plan the call for an engine, and post it. If the engine refuses the exact prompt, post the call again as the client wrote it.

        Raises:
            EngineError: the engine cannot be reached, or cannot serve now.
            HarnessError: the prompt would not begin with the ids that the client requires.
        """
        await self._plan(engine)
        self._request.advance(RequestEvent.SEND)
        outcome, plan = self._outcome, self._outcome.plan
        chat = as_stream(self._chat) if self.gathers else as_whole(self._chat) if self.whole else self._chat
        answer = await self._post(engine, plan.exact, chat)
        if self.sender.request.not_exact:
            plan = outcome.plan = plan.rendered(self.sender.request.not_exact)
        if plan.exact is None or answer.status not in REFUSED:
            return answer
        # A refusal means that nothing was sampled. The engine may refuse only our ids, so send what the client wrote.
        words = await answer.read()
        if self._exchange.token_ids and self.driver.is_overflow(answer.status, words):
            return answer  # a rendering may be shorter, but would not continue the rollout's ids
        answer.close()
        log.warning("session %s call %s: the engine refused the spliced prompt with %d", outcome.session, outcome.call_id, answer.status)
        log.debug("session %s call %s: the engine answered: %s", outcome.session, outcome.call_id, words[:300].decode(errors="replace"))
        outcome.plan = plan.rendered(Reason.ENGINE_REFUSED_IDS)
        answer = await self._post(engine, None, chat)
        if answer.status == _OK:  # so the ids were the cause: the vocabulary may have changed since the probe
            engine.doubt("it refused the ids that it was sent")
        return answer

    async def _plan(self, engine: Engine) -> None:
        """Plan the call for an engine. Raises the errors of `post_call`."""
        outcome, started = self._outcome, self._since or time.time()
        outcome.plan, outcome.model = await self._services.plan(engine, outcome.session, self._chat, self._keys, self._begun)
        outcome.budget = budget_of(self._chat.fields)
        if outcome.model is not None:
            if outcome.budget is not None:
                outcome.thinking = await self._thinking_marks(outcome.model)
            found = outcome.model.capability
            outcome.reply.vocabulary, outcome.reply.must_count = found.vocabulary, found.counts
        metrics.BEFORE.observe(time.time() - started)
        if self._chat.required_prefix:
            require_prefix(outcome.session, self._chat, outcome.plan.prompt, outcome.plan.reason)
        outcome.weights = await self._services.versions.begin(engine, outcome.model, self._salted())
        self.driver = engine.driver
        self.continues = self._may_continue()
        self.whole = bool(outcome.plan.changed) and is_asked_whole(self._chat, outcome.plan.changed)
        streams = self._chat.stream and not self.whole
        self.gathers = self.continues and not (streams or self._keeps_experts)  # streams have no routed experts

    async def next_piece(self, continuation: Continuation) -> aiohttp.ClientResponse | None:
        """Send the request for the next piece of a broken reply; `None` if the limits of the request allow no more tokens.

        Raises:
            ContinuationError: the engine refuses the request.
            EngineError: no engine accepted it in time.
        """
        self._request.advance(RequestEvent.BREAK)
        if not continuation.has_room(self._outcome.model.capability.max_model_len if self._outcome.model is not None else 0):
            return None
        answer = await self.accepted(partial(self._post_piece, continuation))
        if answer.status != _OK or answer.content_type != EVENT_STREAM:
            words = (await answer.read())[:300].decode(errors="replace")
            answer.close()
            raise ContinuationError(f"the engine answered {answer.status}: {words}")
        continuation.check_places(read_places(answer.headers))
        return answer

    async def _post_piece(self, continuation: Continuation, engine: Engine) -> aiohttp.ClientResponse:
        """Post the request for the next piece of a reply to an engine.

        Raises:
            EngineError: the engine cannot be reached, or cannot serve now.
        """
        outcome = self._outcome
        outcome.model = await engine.model(self._chat.model)
        outcome.weights = await self._services.versions.begin(engine, outcome.model, self._salted())
        self.driver = engine.driver
        exact = continuation.exact(outcome.model.capability)
        await continuation.find_own_limit(self.derender_request(), outcome.model.capability.max_model_len)
        self._request.advance(RequestEvent.SEND)
        answer = await self._post(engine, exact, continuation.call)
        continuation.begin_piece(self.sender.posted, engine.upstream.url)
        return answer

    async def _post(self, engine: Engine, exact: ExactPrompt | None, chat: ChatCall) -> aiohttp.ClientResponse:
        try:
            return await self.sender.post(engine, exact, chat)
        except EngineError as why:
            engine.forget(str(why))
            raise

    def derender_request(self) -> DerenderRequest:
        """Return what derender needs to make the words of this reply."""
        fields = {**self._chat.fields, "messages": ANY_MESSAGES} if self._chat.media else self._chat.safe_fields()
        return DerenderRequest(self.engine.upstream, fields, self._outcome.reply.prompt.raw, self._exchange.headers)

    def _may_continue(self) -> bool:
        """Whether the reply is continued if the engine breaks it off. If the request is the reason why not, the turn says so."""
        outcome, model = self._outcome, self._outcome.model
        if self._services.aborted != "continue" or model is None:
            return False
        if not model.capability.derenders:
            outcome.again = "the engine has no derender (--enable-scale-out, or --derender)"
        elif self._chat.media and (model.capability.images != "plugin" or media_reason(self._chat, model)):
            outcome.again = NO_EXACT_IMAGES
        else:
            outcome.again = reason_against(self._chat.fields)
        return not outcome.again

    async def _thinking_marks(self, model: Model) -> ThinkingMarks | None:
        """Return the ids around a thought; `None` if they are not known now. The call is made in any case."""
        try:
            return await model.thinking_marks()
        except EngineError as why:
            words = "session %s call %s: it is not known which ids a thinking budget forces: %s"
            log.warning(words, self._outcome.session, self._outcome.call_id, why)
            return None

    def _salted(self) -> SaltedRequest:
        salt = bytes(self._chat.fields.get(MEMBER, b"null"))
        return SaltedRequest(self._outcome.session, self._outcome.epoch, self._chat.model, salt)


async def pause_before_resample() -> None:
    """Wait shortly before an aborted call is made again."""
    metrics.QUEUED_CALLS.labels("aborted").inc()
    await asyncio.sleep(next(delays(FIRST_PAUSE, LONGEST_PAUSE, jitter=0.5)))
