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
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tokencache import metrics
from tokencache.backoff import delays
from tokencache.core import ids
from tokencache.core.forced import ThinkingMarks
from tokencache.core.incidents import IncidentKind
from tokencache.core.reasons import Reason
from tokencache.dialects.chat.request import ChatCall
from tokencache.dialects.chat.sampling import budget_of
from tokencache.dialects.chat.whole import as_stream, as_whole
from tokencache.dialects.reply_encoder import EVENT_STREAM
from tokencache.engine.connections import Answer
from tokencache.engine.derender import ANY_MESSAGES, DerenderRequest
from tokencache.engine.image_names import ImageNames
from tokencache.engine.images import read_places
from tokencache.engine.model import Endpoint, Engine, Model
from tokencache.engine.pool import Pool
from tokencache.engine.prefixes import PrefixUse
from tokencache.engine.ranks import is_refused_rank
from tokencache.engine.reply import WEIGHT_VERSION_HEADER, Reply
from tokencache.errors import NOT_NOW, OK, EngineError, HarnessError, WeightsUpdatingError, is_error
from tokencache.pauses import LARGE, pause
from tokencache.proxy.call_states import Party, RequestEvent, RequestState
from tokencache.proxy.client_ids import require_prefix
from tokencache.proxy.continuation import NO_EXACT_IMAGES, AbortedPolicy, Continuation, ContinuationError, reason_against
from tokencache.proxy.earlier_thoughts import is_asked_whole
from tokencache.proxy.engine_sender import REFUSED, EngineSender
from tokencache.proxy.facts import BegunCall, PlannedCall
from tokencache.proxy.kv_salt import MEMBER, SaltedRequest
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.plan import Plan
from tokencache.proxy.planner import media_reason
from tokencache.proxy.policy_version import PolicyVersions
from tokencache.proxy.response import Exchange
from tokencache.store.base import BeginResult
from tokencache.wakeup import wait_for

if TYPE_CHECKING:
    from tokencache.proxy.spans import CallSpans

log = logging.getLogger(__name__)

MAX_RESAMPLES = 4
"""Maximum number of times that an aborted call is made again: weights may change faster than a reply is sampled."""
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0
"""Seconds. Each pause is twice the one before, reduced at random by up to half."""
_PLACES_SECONDS = 10.0
"""Seconds to wait for the places of the images in a prompt."""


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
        spans: writes a span for each call; `None` if no traces are written.
    """

    pool: Pool
    ledger: Ledger
    plan: Callable[[Engine, str, ChatCall, Sequence[bytes], BeginResult | None], Awaitable[tuple[Plan, Model | None]]]
    versions: PolicyVersions
    hold: float
    aborted: AbortedPolicy
    image_names: ImageNames
    prefixes: PrefixUse
    spans: "CallSpans | None" = None


class _Refusal(NamedTuple):
    """Why an engine did not accept a request: its answer, or the error if there is none."""

    words: str
    answer: Answer | None = None
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

    def result(self) -> Answer:
        """Return the answer; without one, raise the error."""
        if self.error is not None:
            raise self.error
        assert self.answer is not None  # noqa: S101 - a refusal has an answer or an error
        return self.answer


class Dispatch:
    """Plans and posts the requests of one call.

    Attributes:
        planned: the call as it was planned for the engine that was tried last; after `accepted`, for the one that accepted the request.
        sender: writes the requests.
        epoch: the session's epoch; `""` if the store failed.
    """

    __slots__ = (
        "_bound", "_call", "_chat", "_exchange", "_keeps_experts", "_known", "_request", "_services", "_since", "epoch", "planned",
        "sender",
    )  # fmt: skip

    planned: PlannedCall

    def __init__(
        self,
        call: BegunCall,
        exchange: Exchange,
        services: Services,
        keys: Sequence[bytes],
        begun: BeginResult | None,
        *,
        request: Party[RequestState, RequestEvent],
    ) -> None:
        """Prepare to send a call.

        Args:
            call: the call.
            exchange: what its dialect sends.
            services: the engines, and what plans for them.
            keys: the look-up keys of the call (`planner.keys_wanted`).
            begun: what the store found under them; `None` if the store failed.
            request: the state of the request.
        """
        self._call, self._chat, self._exchange, self._services = call, call.chat, exchange, services
        self._known: tuple[Sequence[bytes], BeginResult | None] | None = keys, begun
        self._bound, self._request = begun.engine if begun is not None else None, request
        self.epoch = begun.epoch if begun is not None else ""
        self._keeps_experts = services.ledger.keeps_experts
        self.sender = EngineSender(call, exchange, services.image_names, services.prefixes, experts=self._keeps_experts)
        self._since = call.started - call.offset

    async def accepted(self, continuation: Continuation | None = None) -> Answer:
        """Send the call, or the request for the next piece of its reply, until an engine accepts it or `Services.hold` seconds have passed.

        Returns:
            The engine's answer. If the time is over, the last answer that refuses the request.

        Raises:
            EngineError: the time is over and no engine answered, or an engine failed after it may have begun to sample.
            HarnessError: the prompt would not begin with the ids that the client requires; or no engine serves the model any more.
            ContinuationError: the reply cannot be continued.
        """
        updates, refused, refused_at = self._services.versions.changed, None, 0.0
        call, bound = self._call, self._bound
        begun = self.planned.model if continuation is not None else None
        name = begun.capability.model if begun is not None else self._chat.model  # a request may name none
        pauses: Iterator[float] | None = None
        while True:
            change = updates.next
            for endpoint in self._services.pool.endpoints_of(call.id, call.session, bound, self._chat.raw_messages, name):
                engine = endpoint.engine
                if refused is not None:
                    refused.close()
                try:
                    if continuation is not None:
                        answer = await self._post_piece(continuation, endpoint)
                    else:
                        self.planned = await self._plan(endpoint)
                        answer = await self._post_call()
                except EngineError as why:
                    refused = self._failed(engine, why)
                else:
                    metrics.counter(metrics.ENGINE_CALLS, engine.upstream.url).add(1)
                    if answer.status == OK or not await self._refuses_for_now(engine, answer.status):
                        if refused is not None and refused_at:
                            self._call.note(IncidentKind.HELD, f"{time.monotonic() - refused_at:.1f} s: {refused.words}")
                        self._known = None  # the call is not planned again: a long stream must not keep it
                        return answer
                    refused = _Refusal(f"the engine at {engine.upstream.url} answered {answer.status}", answer=answer)
                self._since = 0.0
                self._request.advance(RequestEvent.NOT_TAKEN)
                log.info("session %s call %s: not accepted: %s", self._call.session, self._call.id, refused.words)
            refused_at = refused_at or time.monotonic()
            left = self._services.hold - (time.monotonic() - refused_at)
            refused = refused or _Refusal("no engine takes calls", error=self._services.pool.unavailable())
            if left <= 0:
                return refused.result()
            metrics.QUEUED_CALLS.labels(refused.kind).inc()
            refused.close()
            pauses = pauses or delays(FIRST_PAUSE, LONGEST_PAUSE, jitter=0.5)
            pause = min(left, max(refused.retry_after, next(pauses)))
            await (wait_for(change, pause) if refused.kind == "updating" else asyncio.sleep(pause))
            refused = _Refusal(refused.words, error=self._services.pool.unavailable())  # if no engine is asked after the pause

    async def _refuses_for_now(self, engine: Engine, status: int) -> bool:
        """Whether a status says that the engine may accept the request later. An engine that cannot be asked says nothing."""
        if status in NOT_NOW or not is_error(status):
            return status in NOT_NOW
        with contextlib.suppress(EngineError):
            return await engine.driver.refuses_for_now(engine.upstream, status, self.sender.request.path, self._chat.model)
        return False

    def _failed(self, engine: Engine, why: EngineError) -> _Refusal:
        """Return the refusal that an error means; raise the error if the engine may have begun to sample a new reply."""
        if not why.passing and self._request.state not in {RequestState.BROKEN, RequestState.CONTINUING}:
            raise why
        self._services.pool.mark_down(engine, why)
        return _Refusal(str(why), error=why)

    async def _plan(self, endpoint: Endpoint) -> PlannedCall:
        """Plan the call for an endpoint.

        Raises:
            EngineError: the engine cannot be reached, or cannot serve now.
            HarnessError: the prompt would not begin with the ids that the client requires.
        """
        chat, session, engine, started = self._chat, self._call.session, endpoint.engine, self._since or time.monotonic()
        assert self._known is not None  # noqa: S101 - a call is planned until an engine accepts it
        plan, model = await self._services.plan(engine, session, chat, *self._known)
        if engine.driver.pinned.keys() - chat.pinned:  # those of the trainer's and the session's policy are pinned already
            metrics.count_replaced(chat.pin(engine.driver.pinned))
        budget = budget_of(chat.fields)
        thinking = await self._thinking_marks(model) if model is not None and budget is not None else None
        metrics.BEFORE.observe(time.monotonic() - started)
        if plan.prefix is not None:
            tokens = (len(plan.prefix) + len(plan.tail)) // ids.ID_BYTES
            self._services.pool.placement.begin(self._call.id, session, endpoint.key, tokens)
        if chat.required_prefix:
            require_prefix(session, chat, plan.prompt, plan.reason)
        weights = await self._services.versions.begin(engine, model, self._salted())
        continues, again = None, ""
        if self._services.aborted == "continue" and model is not None:
            again = self._reason_against(model)
            continues = None if again else engine.driver.derender
        whole = bool(plan.changed) and is_asked_whole(chat, plan.changed)
        streams = chat.stream and not whole
        return PlannedCall(
            engine=engine,
            at=endpoint.key,
            rank=endpoint.rank,
            model=model,
            frozen=engine.frozen,
            plan=plan,
            weights=weights,
            budget=budget,
            thinking=thinking,
            whole=whole,
            gathers=continues is not None and not (streams or self._keeps_experts),  # streams have no routed experts
            continues=continues,
            again=again,
        )

    async def _post_call(self) -> Answer:
        """Post the planned call. If the engine refuses the exact prompt, post the call again as the client wrote it.

        Raises:
            EngineError: the engine cannot be reached.
        """
        call, planned = self._call, self.planned
        chat = as_stream(call.chat) if planned.gathers else as_whole(call.chat) if planned.whole else call.chat
        exact = planned.plan.exact
        named = planned.model is not None and planned.model.capability.prefixes
        if exact is not None and not named and len(exact.prefix) + len(exact.tail) > LARGE:
            while exact.fragment.write_part():
                await pause()
        self._request.advance(RequestEvent.SEND)
        answer = await self.sender.post(planned, exact, chat)
        if self.sender.request.not_exact:
            self.planned = planned = planned.rendered(self.sender.request.not_exact)
        if exact is None or self.sender.request.not_exact or answer.status not in REFUSED:
            return answer
        # A refusal means that nothing was sampled. The engine may refuse only our ids, so send what the client wrote.
        words = await answer.read()
        if self._exchange.token_ids and planned.engine.driver.is_overflow(answer.status, words):
            return answer  # a rendering may be shorter, but would not continue the rollout's ids
        answer.close()
        log.warning("session %s call %s: the engine refused the spliced prompt with %d", call.session, call.id, answer.status)
        log.debug("session %s call %s: the engine answered: %s", call.session, call.id, words[:300].decode(errors="replace"))
        self.planned = planned = planned.rendered(Reason.ENGINE_REFUSED_IDS)
        answer = await self.sender.post(planned, None, chat)
        if answer.status == OK:  # so the ids were the cause: the vocabulary may have changed since the probe
            planned.engine.doubt("it refused the ids that it was sent")
        return answer

    async def next_piece(self, continuation: Continuation) -> Answer | None:
        """Send the request for the next piece of a broken reply; `None` if the limits of the request allow no more tokens.

        Raises:
            ContinuationError: the engine refuses the request.
            EngineError: no engine accepted it in time.
        """
        self._request.advance(RequestEvent.BREAK)
        model = self.planned.model
        if not continuation.has_room(model.capability.max_model_len if model is not None else 0):
            return None
        try:
            answer = await self.accepted(continuation)
        except HarnessError as why:  # no engine serves the model any more
            raise ContinuationError(str(why)) from why
        if answer.status != OK or answer.content_type != EVENT_STREAM:
            words = (await answer.read())[:300].decode(errors="replace")
            answer.close()
            raise ContinuationError(f"the engine answered {answer.status}: {words}")
        continuation.check_places(read_places(answer.headers))
        return answer

    async def _post_piece(self, continuation: Continuation, endpoint: Endpoint) -> Answer:
        """Post the request for the next piece of a reply to an endpoint.

        Raises:
            EngineError: the engine cannot be reached, or cannot serve now.
            ContinuationError: the reply cannot be continued there.
        """
        engine = endpoint.engine
        model = await engine.model(self._chat.model)
        begun = self.planned.model
        name, base = model.capability.model, model.capability.adapter_of
        if begun is None or (name, base) != (begun.capability.model, begun.capability.adapter_of):
            raise ContinuationError(f"the engine serves {name}, and another model began the reply")
        weights = await self._services.versions.begin(engine, model, self._salted())
        at = {"engine": engine, "at": endpoint.key, "rank": endpoint.rank}
        self.planned = planned = msgspec.structs.replace(self.planned, **at, model=model, weights=weights)
        exact = continuation.exact(model.capability)
        await continuation.find_own_limit(self.derender_request(b""), model.capability.max_model_len)
        self._request.advance(RequestEvent.SEND)
        return await self.sender.post(planned, exact, continuation.call)

    def begin_reply(self, reply: Reply, answer: Answer) -> None:
        """Note what is known of a reply before it arrives: from the plan, and from the head of the engine's answer."""
        planned = self.planned
        if planned.model is not None:
            reply.vocabulary, reply.must_count = planned.model.capability.vocabulary, planned.model.capability.counts
        request, reply.prompt.limit = self.sender.request, 0 if self._chat.media else reply.vocabulary
        reply.prompt.sent = planned.plan.sent if request.sent is None else request.sent
        reply.count_proves = request.counted
        if self.sender.proven:
            reply.prompt.confirm()
        if self._chat.media:
            reply.places = read_places(answer.headers)
        reply.version = answer.headers.get(WEIGHT_VERSION_HEADER, "")

    def derender_request(self, prompt: bytes) -> DerenderRequest:
        """Return what derender needs to make the words of a reply to a prompt (raw JSON list of its ids)."""
        fields = {**self._chat.fields, "messages": ANY_MESSAGES} if self._chat.media else self._chat.safe_fields()
        return DerenderRequest(self.planned.engine.upstream, fields, prompt, self._exchange.headers)

    async def find_places(self, reply: Reply) -> None:
        """Ask the engine where the images of a reply's prompt are, if it rendered the prompt and has not said so."""
        prompt = reply.prompt.packed
        if reply.places is not None or prompt is None or self.planned.plan.exact is not None:
            return
        try:
            async with asyncio.timeout(_PLACES_SECONDS):
                reply.places = await self.planned.engine.driver.places(self._chat, prompt, self.sender.target(self.planned))
        except (EngineError, TimeoutError) as why:
            log.warning("session %s call %s: the places of its images are not known: %s", self._call.session, self._call.id, why)

    def check(self, found: set[str], reply: Reply) -> None:
        """Probe the engine again if its reply, or its incidents, contradict the probe: another engine may run at its URL now."""
        engine, model, rank = self.planned.engine, self.planned.model, self.planned.rank
        if IncidentKind.ENGINE_DISAGREES in found:
            hint = engine.driver.ignored_hint
            engine.doubt("it used other ids than were sent" + (f" ({hint})" if hint else ""))
        elif IncidentKind.NO_TOKEN_IDS in found and model is not None and model.capability.level != "relay":
            engine.doubt("it no longer says which ids it used")
        elif rank is not None and is_refused_rank(reply.refusal, reply.error):  # vLLM refuses a rank after it began a stream
            engine.lost_rank(rank)

    def _reason_against(self, model: Model) -> str:
        """Return why a reply that the engine breaks off is not continued; `""` if it is."""
        if not model.capability.derenders:
            return "the engine has no derender (--enable-scale-out, or --derender)"
        if self._chat.media and (model.capability.images != "plugin" or media_reason(self._chat, model)):
            return NO_EXACT_IMAGES
        return reason_against(self._chat.fields)

    async def _thinking_marks(self, model: Model) -> ThinkingMarks | None:
        """Return the ids around a thought; `None` if they are not known now. The call is made in any case."""
        try:
            return await model.thinking_marks()
        except EngineError as why:
            words = "session %s call %s: it is not known which ids a thinking budget forces: %s"
            log.warning(words, self._call.session, self._call.id, why)
            return None

    def _salted(self) -> SaltedRequest:
        salt = bytes(self._chat.fields.get(MEMBER, b"null"))
        return SaltedRequest(self._call.session, self.epoch, self._chat.model, salt)


async def pause_before_resample() -> None:
    """Wait shortly before an aborted call is made again."""
    metrics.QUEUED_CALLS.labels("aborted").inc()
    await asyncio.sleep(next(delays(FIRST_PAUSE, LONGEST_PAUSE, jitter=0.5)))
