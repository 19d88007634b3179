"""The caller: what can be asked within a session, and the plan for it.

Whatever fails on our side while a call is planned ends in a plain plan: the harness gets its reply, the trainer the reason.
"""

import logging
from collections.abc import Sequence

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from tokencache import metrics
from tokencache.core import ids
from tokencache.dialects import chat
from tokencache.dialects.chat import ChatCall
from tokencache.dialects.growth import Bodies
from tokencache.engines.engine import Engine, Model
from tokencache.errors import EngineError
from tokencache.proxy.call import Call
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.plan import Plan, Planner, keys_wanted
from tokencache.store.contract import Begun, StoreError

log = logging.getLogger(__name__)

CHAT = "/v1/chat/completions"
_OURS: dict[type[Exception], str] = {StoreError: "store-error", KeyError: "torn-record", ValueError: "torn-record"}


class Caller:
    """Serves the model calls of all sessions through one engine and one ledger."""

    def __init__(self, engine: Engine, ledger: Ledger, bodies: Bodies) -> None:
        self._engine = engine
        self._ledger = ledger
        self._bodies = bodies
        self._planner = Planner(ledger.store, ledger.prefixes)

    async def chat(self, request: web.Request, session: str, path: str, headers: CIMultiDict[str]) -> web.StreamResponse:
        """Serve a chat completion.

        Raises:
            HarnessError: the request cannot be served.
            EngineError: the engine cannot be reached; nothing was answered yet.
            SessionSealedError: the session takes no more calls.
            StoreError: the store failed and the policy is strict.
        """
        call = chat.read(await request.read(), self._bodies, session)
        live = Call(request, session, call, plan=self._plan, engine=self._engine, ledger=self._ledger, path=path, headers=headers)
        with metrics.IN_FLIGHT.track_inprogress():
            return await live.run()

    async def tokens_of_next(self, request: web.Request, session: str) -> tuple[bytes, Model] | None:
        """Find the packed ids that a chat call with this `/tokenize` body would send; `None` if the engine would render."""
        call = chat.read_tokenize(await request.read(), self._bodies)
        if call is None:
            return None
        keys = keys_wanted(call)
        try:
            hits = await self._ledger.store.find(session, keys)
            model = await self._engine.model(call.model)
            plan = await self._planner.plan(session, call, keys, hits, model)
        except (StoreError, EngineError, KeyError, ValueError) as why:
            log.warning("session %s: /tokenize is not planned: %s", session, why)
            return None  # a call would be rendered now
        return (plan.prompt, model) if plan.prompt is not None else None

    async def _plan(self, session: str, call: ChatCall, keys: Sequence[bytes], begun: Begun | None) -> tuple[Plan, Model | None]:
        """Plan a call that has begun; what fails on our side ends in a plain plan."""
        if begun is None:
            return Plan(match="plain", reason="store-error"), None
        model = None
        try:
            model = await self._engine.model(call.model)
            return await self._planner.plan(session, call, keys, begun.hits, model), model
        except EngineError as why:
            log.debug("session %s: a call is not planned: %s", session, why)
            return Plan(match="plain", reason="engine-unknown"), model
        except Exception as why:  # whatever it is, it is ours, and the harness must not suffer for it
            log.exception("session %s: a call is not planned", session)
            return Plan(match="plain", reason=_OURS.get(type(why), "internal-error")), model


def tokenized(prompt: bytes, model: Model) -> bytes:
    """Write the answer of `/tokenize` for packed ids, as vLLM 0.32 writes it."""
    return msgspec.json.encode(
        {
            "count": ids.count(prompt),
            "max_model_len": model.capability.max_model_len,
            "tokens": msgspec.Raw(b"[" + ids.fragment(prompt) + b"]"),
            "token_strs": None,
        }
    )
