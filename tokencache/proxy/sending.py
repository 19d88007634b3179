"""Sending: one call on its way to an engine, and what comes back made a chat completion.

Nearly always that is one request. There are two more ways: a call whose exact ids the engine refuses is asked as the harness did (an engine
that refuses has sampled nothing), and the driver may need a second request to parse the answer (`EngineRequest.parse`).
"""

import logging

import aiohttp

from tokencache.dialects.chat.call import ChatCall
from tokencache.engine.drivers.base import Driver, EngineRequest, ExactPrompt, ParsedCompletion, Target
from tokencache.engine.model import Engine
from tokencache.proxy.exchange import Exchange, request_id
from tokencache.proxy.overflow import is_overflow
from tokencache.proxy.planner import Plan
from tokencache.proxy.recorder import Outcome

log = logging.getLogger(__name__)

_OK = 200
_REFUSED = frozenset({400, 422})


class Sending:
    """Sends one call, as often as it must be; `call_id` is in the id of each request. `driver` is how it was sent the last time."""

    def __init__(self, call_id: str, call: ChatCall, exchange: Exchange) -> None:
        self._id, self._call, self._exchange = call_id, call, exchange
        self._posts = 0
        self.driver: Driver
        self._request: EngineRequest

    async def send(self, engine: Engine, outcome: Outcome) -> aiohttp.ClientResponse:
        """Send the call as it is planned; where that cannot be done, as a plain one, and then that is its plan.

        Raises:
            EngineError: the engine cannot be reached.
        """
        self.driver, plan = engine.driver, outcome.plan
        longest = outcome.model.capability.max_model_len if outcome.model is not None else 0
        target = Target(engine.upstream, self._exchange.path, self._exchange.headers, longest)
        self._request = await self._written(plan.exact, target)
        if self._request.not_exact:
            plan = outcome.plan = Plan(match="plain", reason=self._request.not_exact, near=plan.near)
        answer = await self._post(engine)
        if plan.exact is None or answer.status not in _REFUSED:
            return answer
        # An engine that refuses has sampled nothing. Perhaps it refuses the ids, which is our doing: ask as the harness did.
        refusal = await answer.read()
        if self._exchange.token_ids and is_overflow(answer.status, refusal):
            return answer  # a rendering of the history may be shorter, but its ids would not continue the rollout's
        why = refusal[:300].decode(errors="replace")
        answer.close()
        log.warning("session %s call %s: the engine refused the spliced prompt with %d", outcome.session, self._id, answer.status)
        log.debug("session %s call %s: the engine's words: %s", outcome.session, self._id, why)
        outcome.plan = Plan(match="plain", reason="engine-refused-ids", near=plan.near)
        self._request = await self._written(None, target)
        answer = await self._post(engine)
        if answer.status == _OK:  # so it was the ids: another vocabulary may stand there than was probed
            engine.doubt("it refused the ids that it was sent")
        return answer

    @property
    def parses(self) -> bool:
        """Whether what comes back is to be parsed."""
        return self._request.parse is not None

    async def parsed(self, body: bytes) -> ParsedCompletion:
        """Make a chat completion of what came back; and say why it has no words, if so."""
        return ParsedCompletion(body) if self._request.parse is None else await self._request.parse(body)

    async def _written(self, exact: ExactPrompt | None, target: Target) -> EngineRequest:
        if self._exchange.body is not None:
            return EngineRequest(self._exchange.path, self._exchange.body)
        return await self.driver.request(self._call, exact, target)

    async def _post(self, engine: Engine) -> aiohttp.ClientResponse:
        self._posts += 1
        headers = request_id(self._exchange.headers, self._id, self._posts)
        return await engine.upstream.send("POST", self._request.path, headers=headers, body=self._request.body)
