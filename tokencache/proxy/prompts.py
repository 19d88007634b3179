"""Prompts: the one that a call will have, planned for an engine; or the one that it would have, for who only wants to know.

Whatever fails on our side while a call is planned ends in a plain plan: the harness gets its reply, the trainer the reason.
"""

import logging
from collections.abc import Sequence

import msgspec

from tokencache.core import ids
from tokencache.core.reasons import Reason
from tokencache.dialects.chat.request import ChatCall
from tokencache.engine.model import Engine, Model
from tokencache.engine.pool import Pool
from tokencache.engine.template.renderer import RenderError, TemplateRefusedError
from tokencache.errors import EngineError, HarnessError
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.planner import Plan, Planner, keys_wanted
from tokencache.store.base import BeginResult, StoreError

log = logging.getLogger(__name__)

_OURS: dict[type[Exception], str] = {StoreError: Reason.STORE_ERROR, KeyError: Reason.TORN_RECORD, ValueError: Reason.TORN_RECORD}


class Prompts:
    """Finds the prompts of calls, on the engines of a pool."""

    def __init__(self, pool: Pool, ledger: Ledger) -> None:
        self._pool, self._store = pool, ledger.store
        self._planner = Planner(ledger.store, ledger.prefixes)

    async def plan(
        self, engine: Engine, session: str, call: ChatCall, keys: Sequence[bytes], begun: BeginResult | None
    ) -> tuple[Plan, Model | None]:
        """Plan a call that has begun, for an engine; what fails on our side ends in a plain plan.

        Raises:
            EngineError: the engine cannot be reached, or does not serve now: whatever was sent would not be this session's next prompt.
        """
        if begun is None:
            return Plan(match="plain", reason=Reason.STORE_ERROR), None
        model = None
        try:
            model = await engine.model(call.model)
            return await self._planner.plan(session, call, keys, begun.hits, model, first=begun.calls == 1), model
        except EngineError as why:
            if why.passing:
                raise
            log.debug("session %s: a call is not planned: %s", session, why)
            return Plan(match="plain", reason=Reason.ENGINE_UNKNOWN), model
        except Exception as why:  # whatever it is, it is ours, and the harness must not suffer for it
            log.exception("session %s: a call is not planned", session)
            return Plan(match="plain", reason=_OURS.get(type(why), Reason.INTERNAL_ERROR)), model

    async def next(self, session: str, call: ChatCall) -> tuple[bytes, Model] | None:
        """Find the packed ids that a call would send; `None` if the engine would render."""
        keys = keys_wanted(call)
        try:
            hits = await self._store.find(session, keys)
            model = await self._pool.order(session)[0].model(call.model)
            plan = await self._planner.plan(session, call, keys, hits, model)
        except (StoreError, EngineError, KeyError, ValueError) as why:
            log.warning("session %s: the next prompt is not planned: %s", session, type(why).__name__)
            return None  # a call would be rendered now
        return (plan.prompt, model) if plan.prompt is not None and plan.whole else None

    async def count(self, session: str, call: ChatCall) -> int:
        """Count the tokens of the prompt that a call would have."""
        found = await self.next(session, call)
        if found is not None:
            return ids.count(found[0])
        model = await self._pool.order(session)[0].model(call.model)
        args, generation = call.as_written()
        try:
            return ids.count(await model.renderer.render(call.model, call.safe_messages(), args, generation=generation))
        except TemplateRefusedError as why:
            raise HarnessError(str(why)) from None
        except RenderError as why:
            raise EngineError(f"the engine cannot render this: {why}") from None


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
