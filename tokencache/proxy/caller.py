"""The caller: what can be asked within a session, and the plan for it.

Whatever fails on our side while a call is planned ends in a plain plan: the harness gets its reply, the trainer the reason.
"""

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from tokencache import metrics
from tokencache.core import ids
from tokencache.core.rules import Leniency
from tokencache.dialects import completions
from tokencache.dialects.chat.call import ChatCall, read_chat, read_tokenize, with_messages
from tokencache.dialects.chat.growth import Bodies
from tokencache.dialects.chat.messages import as_reminders
from tokencache.dialects.chat.reply import ChatPresenter
from tokencache.dialects.chat.sampling import pin
from tokencache.dialects.dialect import Answer, Asked, Counting, Dialect, ServedModel, refusal
from tokencache.engines.driver import Driver, Exact
from tokencache.engines.engine import Engine, Model
from tokencache.engines.pool import Pool
from tokencache.errors import EngineError, HarnessError
from tokencache.proxy.call import Call
from tokencache.proxy.exchange import Exchange
from tokencache.proxy.habits import Aliases
from tokencache.proxy.hold import Hold
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.plan import Plan, Planner, keys_wanted
from tokencache.proxy.relay import relay_to
from tokencache.proxy.sessions import Origin
from tokencache.render.renderer import RenderError, TemplateRefusedError
from tokencache.store.contract import Begun, Incident, SessionSealedError, StoreError

log = logging.getLogger(__name__)

_UNAVAILABLE = 503
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_OURS: dict[type[Exception], str] = {StoreError: "store-error", KeyError: "torn-record", ValueError: "torn-record"}


class Visit(NamedTuple):
    """A request within a session: where it belongs, its path without the query, the headers for the engine, who asks, what is forgiven."""

    request: web.Request
    session: str
    origin: Origin
    route: str
    headers: CIMultiDict[str]
    harness: str
    leniency: Leniency


class Caller:
    """Serves the model calls of all sessions through the engines and one ledger.

    `keep_alive` is how many seconds a stream may be silent; `sampling` are the parameters that are pinned for all sessions;
    `hold` how many seconds a call may wait for an engine; `token_ids` is whether replies carry their ids as NeMo Gym's do (`dialects.gym`).
    """

    def __init__(
        self,
        pool: Pool,
        ledger: Ledger,
        bodies: Bodies,
        aliases: Aliases,
        *,
        keep_alive: float,
        hold: float,
        sampling: Mapping[str, Any],
        token_ids: bool = False,
    ) -> None:
        self._pool = pool
        self._ledger = ledger
        self._bodies = bodies
        self._aliases = aliases
        self._keep_alive = keep_alive
        self._hold = hold
        self._sampling = sampling
        self._token_ids = token_ids
        self._planner = Planner(ledger.store, ledger.prefixes)

    async def chat(self, visit: Visit) -> web.StreamResponse:
        """Serve a chat completion.

        Raises:
            HarnessError: the request cannot be served.
            EngineError: the engine cannot be reached; nothing was answered yet.
            SessionSealedError: the session takes no more calls.
            StoreError: the store failed and the policy is strict.
        """
        call = read_chat(await visit.request.read(), self._bodies, visit.session, served=self._served(visit))
        call.harness, call.leniency = visit.harness, visit.leniency
        call.replaced = self._pin(visit, call.fields)
        path, write = visit.origin.path, partial(_written, call)
        exchange = Exchange(path, visit.headers, write, ChatPresenter(call), self._keep_alive, token_ids=self._token_ids)
        return await self._run(visit, call, exchange)

    async def complete(self, visit: Visit) -> web.StreamResponse:
        """Serve a text completion: in its own format, recorded unless it cannot be recorded truthfully.

        Raises:
            As `chat` does.
        """
        asked = completions.read(await visit.request.read(), served=self._served(visit))
        replaced = self._pin(visit, asked.fields)
        if asked.unrecorded:
            await self.admit(visit, "completions")
            hole = Incident(
                "unrecorded-route", f"a text completion with {asked.unrecorded} is relayed, not recorded", hole=True, at=time.time()
            )
            await self._ledger.note(visit.session, [hole])
            path, body = visit.origin.path, asked.for_engine()
            return await relay_to(self._pool, visit.session, visit.request, path, headers=visit.headers, body=body)
        exchange = Exchange(
            visit.origin.path, visit.headers, lambda *_: asked.for_engine(), completions.CompletionPresenter(asked), self._keep_alive
        )
        call = asked.as_chat()
        call.replaced = replaced
        return await self._run(visit, call, exchange)

    async def answer(self, visit: Visit, dialect: Dialect) -> web.StreamResponse:
        """Answer a request in a dialect that is turned into chat.

        Raises:
            As `chat` does.
        """
        asked = self._asked(visit, await visit.request.read())
        meant = await dialect.read(asked)
        if isinstance(meant, Answer):
            return web.Response(body=meant.body, status=meant.status, content_type="application/json")
        if isinstance(meant, Counting):
            call = await self._translated(visit, meant.body, "")
            return web.Response(body=meant.say(await self._count(visit, call)), content_type="application/json")
        call = await self._translated(visit, meant.body, f"{visit.session}\0{dialect.name}")
        call.dialect, call.handle = dialect.name, asked.handle
        call.replaced = self._pin(visit, call.fields)
        call.handles, call.echoes, call.left_out = meant.handles, meant.echoes, meant.left_out

        def refuse(status: int, body: bytes) -> bytes:
            return dialect.error(status, *refusal(status, body))

        write = partial(_written, call)
        exchange = Exchange(CHAT, visit.headers, write, meant.speaker, self._keep_alive, refuse, meant.media_type, self._token_ids)
        return await self._run(visit, call, exchange)

    async def _translated(self, visit: Visit, body: bytes, known_as: str) -> ChatCall:
        """Read a chat request that a codec has written, `known_as` in what is remembered of bodies, so that the template takes it."""
        call = read_chat(body, self._bodies, known_as, served=self._served(visit))
        if any(seen.message.role == "system" for seen in call.read[1:]) and not await self._takes_later_system(visit, call):
            known_as = known_as and f"{known_as}\0reminders"
            call = read_chat(with_messages(call, as_reminders(call.raw_messages)), self._bodies, known_as)
        call.harness, call.leniency = visit.harness, visit.leniency
        return call

    async def _takes_later_system(self, visit: Visit, call: ChatCall) -> bool:
        """Whether the template takes a system message behind the first one; as it was, while the engine is away."""
        try:
            return (await self._engine(visit.session).model(call.model)).capability.later_system
        except EngineError:
            return self._pool.later_system

    async def tokens_of_next(self, visit: Visit) -> web.StreamResponse | None:
        """Answer `/tokenize` with the ids that a chat call with this body would send; `None` if the engine would render."""
        call = read_tokenize(await visit.request.read(), self._bodies, served=self._served(visit))
        if call is None:
            return None
        call.harness, call.leniency = visit.harness, visit.leniency
        found = await self._planned(visit.session, call)
        return None if found is None else web.Response(body=_tokenized(*found), content_type="application/json")

    def _engine(self, session: str) -> Engine:
        """The engine that a session is with."""
        return self._pool.order(session)[0]

    async def _run(self, visit: Visit, call: ChatCall, exchange: Exchange) -> web.StreamResponse:
        hold = Hold(self._pool, visit.session, visit.request, exchange, stream=call.stream, seconds=self._hold)
        with metrics.IN_FLIGHT.track_inprogress():
            try:
                while True:
                    live = Call(visit.request, visit.session, call, exchange, plan=self._plan, hold=hold, ledger=self._ledger)
                    response = await live.run()
                    if response is not None:
                        return response
                    await hold.before_next()
            except (SessionSealedError, EngineError, StoreError) as why:
                if isinstance(why, SessionSealedError):
                    await self._ledger.turn_away(visit.session, f"{call.dialect}, {visit.route}")
                if hold.opened is None:
                    raise
                return await hold.fail(why.status if isinstance(why, EngineError) else _UNAVAILABLE, f"the call was given up: {why}")

    async def admit(self, visit: Visit, dialect: str) -> None:
        """Let a request pass that samples and is only relayed, unless its session is sealed.

        Raises:
            SessionSealedError: it is.
            StoreError: the store failed and the policy is strict.
        """
        try:
            await self._ledger.admit(visit.session)
        except SessionSealedError:
            await self._ledger.turn_away(visit.session, f"{dialect}, {visit.route}")
            raise

    def _pin(self, visit: Visit, fields: dict[str, msgspec.Raw]) -> dict[str, Any]:
        """Write what is pinned into a request's members; what the harness had asked for instead. A session's own policy wins."""
        policy = {**self._engine(visit.session).driver.pinned, **self._sampling, **visit.origin.sampling}
        if not policy:
            return {}
        replaced = pin(fields, policy)
        for name in replaced:
            metrics.REPLACED.labels(name).inc()
        return replaced

    def _asked(self, visit: Visit, body: bytes) -> Asked:
        store, session = self._ledger.store, visit.session
        return Asked(
            method=visit.request.method,
            path=visit.route,
            query=dict(visit.request.query),
            headers=visit.request.headers,
            body=body,
            handle=secrets.token_hex(16),
            served=partial(self._models, visit),
            documents=lambda names: store.documents(session, names),
            forget=lambda name: store.forget(session, name),
            token_ids=self._token_ids,
        )

    def _served(self, visit: Visit) -> Callable[[str], str]:
        return partial(self._aliases.served, own=visit.origin.models)

    async def _models(self, visit: Visit) -> list[ServedModel]:
        """List the models that are served, and the one that is asked for if its name stands for one of them."""
        engine = self._engine(visit.session)
        await engine.model()
        found = {c.model: ServedModel(c.model, c.max_model_len) for c in engine.capabilities}
        asked = unquote(visit.route.rpartition("/")[2])
        meant = found.get(self._served(visit)(asked))
        return [*found.values(), *([ServedModel(asked, meant.max_model_len)] if meant is not None and asked not in found else [])]

    async def _count(self, visit: Visit, call: ChatCall) -> int:
        """Count the tokens of the prompt that a call would have."""
        found = await self._planned(visit.session, call)
        if found is not None:
            return ids.count(found[0])
        model = await self._engine(visit.session).model(call.model)
        args, generation = call.as_written()
        try:
            return ids.count(await model.renderer.render(call.model, call.safe_messages(), args, generation=generation))
        except TemplateRefusedError as why:
            raise HarnessError(str(why)) from None
        except RenderError as why:
            raise EngineError(f"the engine cannot render this: {why}") from None

    async def _planned(self, session: str, call: ChatCall) -> tuple[bytes, Model] | None:
        """Find the packed ids that a call would send; `None` if the engine would render."""
        keys = keys_wanted(call)
        try:
            hits = await self._ledger.store.find(session, keys)
            model = await self._engine(session).model(call.model)
            plan = await self._planner.plan(session, call, keys, hits, model)
        except (StoreError, EngineError, KeyError, ValueError) as why:
            log.warning("session %s: the next prompt is not planned: %s", session, why)
            return None  # a call would be rendered now
        return (plan.prompt, model) if plan.prompt is not None and plan.whole else None

    async def _plan(
        self, engine: Engine, session: str, call: ChatCall, keys: Sequence[bytes], begun: Begun | None
    ) -> tuple[Plan, Model | None]:
        """Plan a call that has begun, for an engine; what fails on our side ends in a plain plan.

        Raises:
            EngineError: the engine cannot be reached, or does not serve now: whatever was sent would not be this session's next prompt.
        """
        if begun is None:
            return Plan(match="plain", reason="store-error"), None
        model = None
        try:
            model = await engine.model(call.model)
            return await self._planner.plan(session, call, keys, begun.hits, model), model
        except EngineError as why:
            if why.passing:
                raise
            log.debug("session %s: a call is not planned: %s", session, why)
            return Plan(match="plain", reason="engine-unknown"), model
        except Exception as why:  # whatever it is, it is ours, and the harness must not suffer for it
            log.exception("session %s: a call is not planned", session)
            return Plan(match="plain", reason=_OURS.get(type(why), "internal-error")), model


def _written(call: ChatCall, driver: Driver, exact: Exact | None) -> bytes:
    return driver.write(call, exact)


def _tokenized(prompt: bytes, model: Model) -> bytes:
    """Write the answer of `/tokenize` for packed ids, as vLLM 0.32 writes it."""
    return msgspec.json.encode(
        {
            "count": ids.count(prompt),
            "max_model_len": model.capability.max_model_len,
            "tokens": msgspec.Raw(b"[" + ids.fragment(prompt) + b"]"),
            "token_strs": None,
        }
    )
