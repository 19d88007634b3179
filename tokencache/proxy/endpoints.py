"""The caller: what can be asked within a session.

Each route is read in its own words and becomes one call in chat, with an exchange that says how its reply is said.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from tokencache import metrics
from tokencache.core import ids
from tokencache.core.budget import Budget
from tokencache.core.chain import keyed_hash
from tokencache.core.incidents import IncidentKind
from tokencache.core.rules import Leniency
from tokencache.dialects import gym_request, text_completions
from tokencache.dialects.base import (
    DialectRequest,
    DirectReply,
    ModelCall,
    ReplyEncoder,
    ServedModel,
    TokenCount,
    TranslatedDialect,
    parse_engine_error,
)
from tokencache.dialects.chat.incremental import IncrementalParser
from tokencache.dialects.chat.reply import ChatReplyEncoder
from tokencache.dialects.chat.request import ChatCall, read_chat, read_tokenize, with_messages
from tokencache.dialects.chat.routes import CHAT
from tokencache.dialects.chat.vocabulary import as_reminders, pin
from tokencache.dialects.gym import prefix_of
from tokencache.dialects.probes import model_list
from tokencache.engine.model import Engine, Model
from tokencache.engine.pool import Pool
from tokencache.errors import EngineError, HarnessError, TokencacheError
from tokencache.proxy.call import CallRequest
from tokencache.proxy.client_ids import require_prefix
from tokencache.proxy.dedup.fingerprint import Policy, fingerprint_of
from tokencache.proxy.dedup.in_flight import CallsInFlight
from tokencache.proxy.harness_profile import ModelAliases
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.passthrough import relay_to
from tokencache.proxy.planner import Planner
from tokencache.proxy.request_body import body_of
from tokencache.proxy.response import Exchange, Response
from tokencache.proxy.sessions import Origin
from tokencache.store.base import SessionSealedError


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
    `token_ids` is whether replies carry their ids
    as NeMo Gym's do (`dialects.gym`), and requests are sent as it sends them (`dialects.gym_request`);
    `budget` holds for every session, as far as it has no own; `calls` serves each call once.
    """

    def __init__(
        self,
        pool: Pool,
        ledger: Ledger,
        bodies: IncrementalParser,
        aliases: ModelAliases,
        *,
        keep_alive: float,
        sampling: Mapping[str, Any],
        budget: Budget,
        planner: Planner,
        calls: CallsInFlight,
        retry_policy: Policy,
        token_ids: bool = False,
    ) -> None:
        self._pool = pool
        self._ledger = ledger
        self._bodies = bodies
        self._aliases = aliases
        self._keep_alive = keep_alive
        self._sampling = sampling
        self._token_ids = token_ids
        self._rewrite_chat = gym_request.chat_members if token_ids else None
        self._rewrite_translated = gym_request.translated_members if token_ids else None
        self._budget = budget
        self._calls, self._retry_policy = calls, retry_policy
        self._planner = planner

    async def chat(self, visit: Visit) -> web.StreamResponse:
        """Serve a chat completion.

        Raises:
            HarnessError: the request cannot be served.
            EngineError: the engine cannot be reached; nothing was answered yet.
            SessionSealedError: the session takes no more calls.
            StoreError: the store failed and the policy is strict.
        """
        body = await body_of(visit.request)
        call = read_chat(body, self._bodies, visit.session, served=self._served(visit), rewrite=self._rewrite_chat)
        call.harness, call.leniency = visit.harness, visit.leniency
        call.replaced = self._pin(visit, call.fields)
        exchange = Exchange(visit.origin.path, visit.headers, ChatReplyEncoder(call), self._keep_alive, token_ids=self._token_ids)
        return await self._run(visit, call, exchange, body)

    async def complete(self, visit: Visit) -> web.StreamResponse:
        """Serve a text completion: in its own format, recorded unless it cannot be recorded truthfully.

        Raises:
            As `chat` does.
        """
        body = await body_of(visit.request)
        asked = text_completions.read(body, served=self._served(visit))
        replaced = self._pin(visit, asked.fields)
        if asked.unrecorded:
            await self.admit(visit, "completions")
            detail = f"a text completion with {asked.unrecorded} is relayed, not recorded"
            hole = IncidentKind.UNRECORDED_ROUTE.incident(detail, at=time.time())
            await self._ledger.add_incidents(visit.session, [hole])
            path = visit.origin.path
            return await relay_to(self._pool, visit.session, visit.request, path, headers=visit.headers, body=asked.for_engine())
        exchange = Exchange(
            visit.origin.path, visit.headers, text_completions.TextReplyEncoder(asked), self._keep_alive, body=asked.for_engine()
        )
        call = asked.as_chat()
        call.replaced = replaced
        return await self._run(visit, call, exchange, body)

    async def answer(self, visit: Visit, dialect: TranslatedDialect) -> web.StreamResponse:
        """Answer a request in a dialect that is turned into chat.

        Raises:
            As `chat` does.
        """
        asked = self._asked(visit, await body_of(visit.request))
        meant = await dialect.parse(asked)
        if isinstance(meant, DirectReply):
            return web.Response(body=meant.body, status=meant.status, content_type="application/json")
        if isinstance(meant, TokenCount):
            call = await self._translated(visit, meant.body, "")
            return web.Response(body=meant.write(await self._planner.count_tokens(visit.session, call)), content_type="application/json")
        call = await self._translated(visit, meant.body, f"{visit.session}\0{dialect.name}")
        call.dialect, call.handle = dialect.name, asked.handle
        call.replaced = self._pin(visit, call.fields)
        call.handles, call.echoes, call.left_out = meant.handles, meant.echoes, meant.left_out
        call.required_prefix = prefix_of(asked.body)

        def refuse(status: int, body: bytes) -> bytes:
            return dialect.error(status, *parse_engine_error(status, body))

        async def encoder_for(handle: str) -> ReplyEncoder:
            again = await dialect.parse(msgspec.structs.replace(asked, handle=handle))
            return again.encoder if isinstance(again, ModelCall) else meant.encoder

        exchange = Exchange(CHAT, visit.headers, meant.encoder, self._keep_alive, refuse, meant.media_type, self._token_ids, encoder_for)
        return await self._run(visit, call, exchange, asked.body)

    async def _translated(self, visit: Visit, body: bytes, known_as: str) -> ChatCall:
        """Read a chat request that a codec has written, `known_as` in what is remembered of bodies, so that the template takes it."""
        call = read_chat(body, self._bodies, known_as, served=self._served(visit), rewrite=self._rewrite_translated)
        if any(message.role == "system" for message in call.messages[1:]) and not await self._takes_later_system(visit, call):
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

    async def tokenize(self, visit: Visit) -> web.StreamResponse:
        """Answer `/tokenize` with the ids that a chat call with this body would send; where the engine would render, it answers.

        Raises:
            HarnessError: the request cannot be read.
            EngineError: the engine cannot be reached; nothing was answered yet.
        """
        body = await body_of(visit.request)
        call = read_tokenize(body, self._bodies, served=self._served(visit), rewrite=self._rewrite_chat)
        if call is not None:
            call.harness, call.leniency = visit.harness, visit.leniency
            if (found := await self._planner.next_prompt(visit.session, call)) is not None:
                require_prefix(visit.session, call, found[0])
                return web.Response(body=_tokenize_answer(*found), content_type="application/json")
        return await relay_to(self._pool, visit.session, visit.request, visit.origin.path, headers=visit.headers, body=body)

    async def models(self, visit: Visit) -> web.StreamResponse:
        """Answer `GET /v1/models`: the engine's own list, or what the probe found where the engine has none (NeMo RL's worker).

        Raises:
            EngineError: the engine cannot be reached; nothing was answered yet.
        """
        engine = self._engine(visit.session)
        await engine.model()
        if all(capability.lists_models for capability in engine.capabilities):
            return await relay_to(self._pool, visit.session, visit.request, visit.origin.path, headers=visit.headers)
        return web.Response(body=model_list(_served_by(engine)), content_type="application/json")

    def _engine(self, session: str) -> Engine:
        """The engine that a session is with."""
        return self._pool.order(session)[0]

    async def _run(self, visit: Visit, call: ChatCall, exchange: Exchange, body: bytes) -> web.StreamResponse:
        response = Response(visit.request, call, exchange)
        fingerprint = fingerprint_of(self._retry_policy, visit.origin.path, visit.request.headers, body, visit.harness)
        asked = CallRequest(visit.session, call, response, fingerprint.digest)
        with metrics.IN_FLIGHT.track_inprogress():
            try:
                return await self._calls.serve(asked, fingerprint, visit.origin.budget.over(self._budget))
            except TokencacheError as why:
                if isinstance(why, SessionSealedError):
                    await self._ledger.note_late_call(visit.session, f"{call.dialect}, {visit.route}")
                if response.opened is None:
                    raise
                return await response.fail(why.status, f"the call was given up: {why}")

    async def admit(self, visit: Visit, dialect: str) -> None:
        """Let a request pass that samples and is only relayed, unless its session is sealed or has a budget.

        Raises:
            HarnessError: it has one: what is not recorded cannot be counted.
            SessionSealedError: it is.
            StoreError: the store failed and the policy is strict.
        """
        if visit.origin.budget.over(self._budget):
            raise HarnessError(f"{visit.route} is not recorded like this, and this session has a budget: its tokens could not be counted")
        try:
            await self._ledger.admit(visit.session)
        except SessionSealedError:
            await self._ledger.note_late_call(visit.session, f"{dialect}, {visit.route}")
            raise

    def _pin(self, visit: Visit, fields: dict[str, msgspec.Raw]) -> dict[str, Any]:
        """Write what is pinned into a request's members; what the harness had asked for instead. A session's own policy wins.

        A tenant has a part of the engine's prefix cache to itself, by a salt nobody else can compute (`cache_salt`, vLLM 0.20 to 0.32).
        """
        if visit.origin.tenant:
            salt = keyed_hash(self._bodies.secret, b"tenant" + visit.origin.tenant.encode())
            fields["cache_salt"] = msgspec.Raw(b'"%s"' % salt.hex().encode())
        policy = {**self._engine(visit.session).driver.pinned, **self._sampling, **visit.origin.sampling}
        if not policy:
            return {}
        replaced = pin(fields, policy)
        for name in replaced:
            metrics.REPLACED.labels(name).inc()
        return replaced

    def _asked(self, visit: Visit, body: bytes) -> DialectRequest:
        store, session = self._ledger.store, visit.session
        return DialectRequest(
            method=visit.request.method,
            path=visit.route,
            query=dict(visit.request.query),
            headers=visit.request.headers,
            body=body,
            handle=secrets.token_hex(16),
            served=partial(self._models, visit),
            documents=lambda names: store.documents(session, names),
            forget=lambda name: store.delete_document(session, name),
            token_ids=self._token_ids,
        )

    def _served(self, visit: Visit) -> Callable[[str], str]:
        return partial(self._aliases.served, own=visit.origin.models)

    async def _models(self, visit: Visit) -> list[ServedModel]:
        """List the models that are served, and the one that is asked for if its name stands for one of them."""
        engine = self._engine(visit.session)
        await engine.model()
        found = {model.name: model for model in _served_by(engine)}
        asked = unquote(visit.route.rpartition("/")[2])
        meant = found.get(self._served(visit)(asked))
        return [*found.values(), *([ServedModel(asked, meant.max_model_len)] if meant is not None and asked not in found else [])]


def _served_by(engine: Engine) -> list[ServedModel]:
    """The models that were found on an engine."""
    return list({found.model: ServedModel(found.model, found.max_model_len) for found in engine.capabilities if found.model}.values())


def _tokenize_answer(prompt: bytes, model: Model) -> bytes:
    """Write the answer of `/tokenize` for packed ids, as vLLM 0.32 writes it."""
    return msgspec.json.encode(
        {
            "count": ids.count(prompt),
            "max_model_len": model.capability.max_model_len,
            "tokens": msgspec.Raw(b"[" + ids.fragment(prompt) + b"]"),
            "token_strs": None,
        }
    )
