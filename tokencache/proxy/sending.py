"""Sending: one call on its way to an engine, and what comes back made a chat completion.

Nearly always that is one request. There are two more ways: a call whose exact ids the engine refuses is asked as the harness did (an engine
that refuses has sampled nothing), and a driver may make a detour with exact prompts (`engine.drivers.text_prompts`), whose answer then
has to be parsed.
"""

import logging

import aiohttp

from tokencache.dialects.chat.call import ChatCall
from tokencache.engine.drivers.base import Driver, Exact
from tokencache.engine.drivers.text_prompts import PATH, ParsedCompletion, TokenPrompts
from tokencache.engine.model import Engine
from tokencache.proxy.exchange import Exchange, request_id
from tokencache.proxy.overflow import is_overflow
from tokencache.proxy.planner import Plan
from tokencache.proxy.recorder import Outcome

log = logging.getLogger(__name__)

_OK = 200
_REFUSED = frozenset({400, 422})
NO_WAY = "not-for-completions"
"""Text completions cannot be asked for what this call asks, or it cannot be found out: chat can."""


class Sending:
    """Sends one call, as often as it must be; `call_id` is in the id of each request. `driver` is how it was sent the last time."""

    def __init__(self, call_id: str, call: ChatCall, exchange: Exchange) -> None:
        self._id, self._call, self._exchange = call_id, call, exchange
        self._posts = 0
        self.driver: Driver
        self._detour: TokenPrompts | None = None  # the way on which the reply comes back

    async def send(self, engine: Engine, outcome: Outcome) -> aiohttp.ClientResponse:
        """Send the call as it is planned; where that cannot be done, as a plain one, and then that is its plan.

        Raises:
            EngineError: the engine cannot be reached.
        """
        self.driver, plan = engine.driver, outcome.plan
        detour, written = self.driver.detour, None
        if detour is not None and plan.exact is not None:
            longest = outcome.model.capability.max_model_len if outcome.model is not None else 0
            written = await detour.body(engine.upstream, self._call, plan.exact, longest, self._exchange.headers)
            if written is None:
                plan = outcome.plan = Plan(match="plain", reason=NO_WAY, near=plan.near)
        self._detour = detour if written is not None else None
        answer = await self._post(engine, plan.exact, written)
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
        self._detour = None
        answer = await self._post(engine, None)
        if answer.status == _OK:  # so it was the ids: another vocabulary may stand there than was probed
            engine.doubt("it refused the ids that it was sent")
        return answer

    @property
    def parses(self) -> bool:
        """Whether what comes back is to be parsed."""
        return self._detour is not None

    async def parsed(self, engine: Engine, body: bytes) -> ParsedCompletion:
        """Make a chat completion of what came back; and say why it has no words, if so."""
        if self._detour is None:
            return ParsedCompletion(body)
        return await self._detour.parsed(engine.upstream, self._call.safe_fields(), body, self._exchange.headers)

    async def _post(self, engine: Engine, exact: Exact | None, detour: bytes | None = None) -> aiohttp.ClientResponse:
        """Send the call, or what was written for the detour of its driver."""
        self._posts += 1
        headers = request_id(self._exchange.headers, self._id, self._posts)
        if detour is not None:
            return await engine.upstream.send("POST", PATH, headers=headers, body=detour)
        return await engine.upstream.send("POST", self._exchange.path, headers=headers, body=self._exchange.write(self.driver, exact))
