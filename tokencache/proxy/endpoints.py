"""Serves the requests of sessions: model calls in every dialect, token counts, lists of models, and the engine's other routes.

A model call is parsed in its dialect, read as a chat call, and passed to `dedup.in_flight`.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec
from aiohttp import web

from tokencache import metrics
from tokencache.core import agents, ids
from tokencache.core.chain import REQUEST_KEY, keyed_hash
from tokencache.core.incidents import IncidentKind
from tokencache.core.outcome import MAX_DETAIL
from tokencache.core.rules import ToolNames
from tokencache.core.session import Budget, History, SessionSettings
from tokencache.dialects import gym_request
from tokencache.dialects.base import CallReader, Dialect, DialectRequest, DirectReply, ParsedCall, ServedModel, TokenCount
from tokencache.dialects.chat.incremental import IncrementalParser
from tokencache.dialects.chat.request import ChatCall, read_tokenize, with_messages
from tokencache.dialects.chat.routes import TOKENIZE
from tokencache.dialects.chat.vocabulary import as_reminders
from tokencache.dialects.probes import model_list
from tokencache.dialects.registry import credential_headers
from tokencache.dialects.reply_encoder import ReplyEncoder
from tokencache.engine.model import Engine, Model
from tokencache.engine.pool import Pool
from tokencache.engine.probe import whole
from tokencache.engine.routes import samples_nothing
from tokencache.errors import EngineError, HarnessError, MemoryFullError, SlowBodyError, TokencacheError, UnexpectedAnswerError, is_refusal
from tokencache.net import end_to_end_headers
from tokencache.proxy.call import CallRequest
from tokencache.proxy.call_states import may_answer_with_status
from tokencache.proxy.client_ids import require_prefix
from tokencache.proxy.dedup.fingerprint import Fingerprint, Policy, fingerprint_of
from tokencache.proxy.dedup.in_flight import CallsInFlight
from tokencache.proxy.fetched_media import FetchedMedia
from tokencache.proxy.harness_profile import HarnessProfiles, ModelAliases
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.passthrough import LIST_MODELS, all_models, relay_to
from tokencache.proxy.planner import Planner
from tokencache.proxy.request_body import RequestBodies
from tokencache.proxy.response import REQUEST_ID, RETURNED_ID, Exchange, Response
from tokencache.proxy.sessions import Origin, SessionRequest, SettingsCache
from tokencache.request_memory import Owner, holding_of
from tokencache.store.base import SessionFinishedError, SessionSealedError, SettingsChangedError, StoreError
from tokencache.store.clock import RECORD_CLOCK

log = logging.getLogger(__name__)

_NO_CALLS = ("/count_tokens", "/input_tokens", ":countTokens", "/cancel")
"""Ends of the paths that count tokens, or cancel a response, in all dialects."""
_REFUSALS: Mapping[type[Exception], IncidentKind] = MappingProxyType(
    {
        StoreError: IncidentKind.STORE_ERROR,
        EngineError: IncidentKind.UPSTREAM_DOWN,
        MemoryFullError: IncidentKind.REQUEST_NOT_READ,
        SlowBodyError: IncidentKind.CLIENT_GONE,
        HarnessError: IncidentKind.CALL_REFUSED,
    }
)
_MOST_SETTINGS = 4
"""Attempts to serve a request while the settings of its session change: those that are known, the true ones, and spare ones."""
_FOR_TENANTS = frozenset({LIST_MODELS, ("GET", "/health"), ("GET", "/version"), ("POST", TOKENIZE), ("POST", "/detokenize")})
"""The engine's routes that a tenant's session may use in addition to model calls: they neither sample nor change anything (vLLM 0.32)."""


class EndpointOptions(NamedTuple):
    """Settings that hold for the requests of all sessions.

    Attributes:
        keep_alive: seconds for which a stream may be silent.
        sampling: pinned sampling parameters.
        budget: limits of sessions without their own.
        token_ids: whether replies contain their token ids like those of NeMo Gym's model server (`dialects.gym`), and requests are sent as
            that server sends them (`dialects.gym_request`).
        retries: which requests are treated as retries.
        dropped_headers: headers that are not sent to the engine, in lower case.
        affinity_headers: headers that are set to the session's name, so that routers send a session to one engine.
        history: whether prompts keep the thinking of earlier replies, in sessions that do not choose.
    """

    keep_alive: float
    sampling: Mapping[str, Any]
    budget: Budget
    token_ids: bool
    retries: Policy
    dropped_headers: frozenset[str]
    affinity_headers: Sequence[str]
    history: History


class _Call(msgspec.Struct, frozen=True):
    """A model call that was read, and can run."""

    request: CallRequest
    fingerprint: Fingerprint
    route: str

    @property
    def response(self) -> Response:
        """The response to the client."""
        return self.request.response


class Endpoints:
    """Serves the requests of all sessions."""

    def __init__(
        self,
        pool: Pool,
        ledger: Ledger,
        planner: Planner,
        calls: CallsInFlight,
        *,
        parser: IncrementalParser,
        profiles: HarnessProfiles,
        aliases: ModelAliases,
        options: EndpointOptions,
        media: FetchedMedia | None,
    ) -> None:
        self._pool, self._ledger, self._planner, self._calls = pool, ledger, planner, calls
        self._parser, self._profiles, self._aliases, self._options = parser, profiles, aliases, options
        self._settings = SettingsCache(ledger.store)
        self._bodies = RequestBodies(self._settings, media)
        self._dropped_with_own_key = options.dropped_headers | {name.lower() for name in credential_headers()}

    async def serve(self, request: web.Request, session: str, origin: Origin, route: str, dialect: Dialect | None) -> web.StreamResponse:
        """Serve a request of a session. Routes of the engine that are not served here are relayed.

        Raises:
            HarnessError: the request cannot be served.
            EngineError: the engine cannot be reached; nothing was sent to the client.
            SessionFinishedError, SessionSealedError: the session accepts no calls.
            StoreError: the store failed and the policy is strict.
        """
        for _ in range(_MOST_SETTINGS):
            settings, call = self._settings.of(session, origin), None
            try:
                asked = self._session_request(request, session, origin, settings, route)
                ready = await (self._serve_route(asked) if dialect is None else self._prepare(asked, dialect))
                if not isinstance(ready, _Call):
                    return ready
                call = ready
                del asked  # what this frame names, it keeps for as long as a stream
                return await self._calls.serve(call.request, call.fingerprint, settings.budget.over(self._options.budget))
            except SettingsChangedError as changed:
                await self._settings.learn(session, origin, changed.settings)
                if call is not None and not may_answer_with_status(call.response.client.state):
                    message = "the call was given up: this replica did not know its session's settings; repeat it"
                    await self._ledger.note_refused_call(session, IncidentKind.INTERNAL_ERROR, message)
                    return await call.response.fail(HTTPStatus.SERVICE_UNAVAILABLE, message)
            except TokencacheError as why:
                if call is None:
                    raise
                return await self._give_up(call, why)
            except Exception as why:
                if call is None and dialect is not None and not isinstance(why, web.HTTPException | ConnectionError):
                    await self.note_refusal(request, session, why)  # a bug in tokencache
                raise
        raise HarnessError(f"the settings of session {session} change all the time", status=HTTPStatus.CONFLICT, kind="settings_conflict")

    async def note_refusal(self, request: web.Request, session: str, why: BaseException) -> None:
        """Add an incident for a call that was refused before it began. A token count or a cancellation is none."""
        if not _makes_a_call(request):
            return
        kind = next((kind for cause, kind in _REFUSALS.items() if isinstance(why, cause)), IncidentKind.INTERNAL_ERROR)
        at = why.began if isinstance(why, SlowBodyError) else 0.0
        detail = str(why)[:MAX_DETAIL] if isinstance(why, TokencacheError) else type(why).__name__  # it may quote the request
        status = why.status if isinstance(why, HarnessError) else 0
        await self._ledger.note_refused_call(session, kind, detail, at=at, status=status)

    def _session_request(self, request: web.Request, session: str, origin: Origin, settings: SessionSettings, route: str) -> SessionRequest:
        """Return a request as it is served by the given settings.

        Raises:
            MemoryFullError: requests hold as much memory as they may; nothing was done.
        """
        holding = holding_of(request)
        holding.belong_to(Owner(settings.tenant, True) if settings.tenant else Owner(session))
        dropped = self._dropped_with_own_key if origin.own_key else self._options.dropped_headers
        headers = end_to_end_headers(request.headers, drop=dropped)
        for name in self._options.affinity_headers:
            headers.setdefault(name, session)
        harness = settings.harness or origin.harness or self._profiles.recognise(request.headers.get("User-Agent", ""))
        path = "".join((route, *origin.path.partition("?")[1:]))
        began, leniency = time.monotonic() + RECORD_CLOCK.offset, self._profiles.leniency(harness)
        return SessionRequest(request, session, origin, settings, route, path, headers, harness, leniency, holding, began)

    async def _serve_route(self, asked: SessionRequest) -> web.StreamResponse:
        """Serve a request in no dialect.

        Raises:
            SettingsChangedError: the session has other settings; nothing was done.
        """
        request, settings, route = asked.request, asked.settings, asked.route
        if request.method == "POST" and route == TOKENIZE:
            return await self._tokenize(asked)
        await self._settings.check(asked.session, asked.settings)
        method_and_route = request.method, route
        if settings.tenant and method_and_route not in _FOR_TENANTS:
            message = f"{request.method} {route[:80]} is not allowed in a tenant's session: it may make model calls and list the models"
            raise HarnessError(message, status=HTTPStatus.FORBIDDEN, kind="permission_error")
        if method_and_route == LIST_MODELS:
            return await self._list_models(asked)
        if samples_nothing(*method_and_route):
            return await self._relay(asked)
        return await self._relay_unrecorded(asked, f"{request.method} {route[:80]}", path=asked.origin.path)

    async def _prepare(self, asked: SessionRequest, dialect: Dialect) -> _Call | web.StreamResponse:
        """Read a request in a dialect, and return its call. A request that is not a call, or cannot be recorded truthfully, is served here.

        A call runs after this coroutine has ended, so that none of its names keeps the body for as long as a stream.

        Raises:
            SettingsChangedError: the session has other settings; nothing was done.
        """
        try:
            request = self._dialect_request(asked, await self._bodies.read(asked))
            if request.method != "POST":  # it may have an effect, so it is not served again
                await self._settings.check(asked.session, asked.settings)
            parsed = await dialect.parse(request)
            if isinstance(parsed, ParsedCall):
                call = await self._read(asked, request, parsed, f"{asked.session}\0{dialect.name}")
                self._pin(asked, call)
        except (EngineError, StoreError, asyncio.CancelledError) as why:
            gone = isinstance(why, asyncio.CancelledError)
            await (_note_left(self._ledger, self._options.retries, asked) if gone else self.note_refusal(asked.request, asked.session, why))
            raise
        if isinstance(parsed, DirectReply):
            return web.Response(body=parsed.body, status=parsed.status, content_type="application/json")
        if isinstance(parsed, TokenCount):
            await self._settings.check(asked.session, asked.settings)
            call = await self._read(asked, request, parsed, "")
            return web.Response(body=parsed.write(await self._planner.count_tokens(asked.session, call)), content_type="application/json")
        call.dialect = dialect.name
        end = request.body[-agents.SEARCHED :]
        if not agents.HEADERS.isdisjoint(map(str.lower, request.headers)) or agents.MEMBERS[0] in end or agents.MEMBERS[1] in end:
            call.agent = agents.read_agent(request.headers, request.body)
        if what := parsed.unrecorded(call):
            await self._settings.check(asked.session, asked.settings)
            return await self._relay_unrecorded(asked, what, body=msgspec.json.encode(call.safe_fields()))
        encoder = parsed.reply_encoder(call)

        async def encoder_for(handle: str) -> ReplyEncoder:
            again = await dialect.parse(msgspec.structs.replace(request, handle=handle))
            return again.reply_encoder(call) if isinstance(again, ParsedCall) else encoder

        exchange = Exchange(
            path=parsed.address(asked.path, asked.headers, credential_headers()),
            headers=asked.headers,
            dialect=dialect,
            encoder=encoder,
            keep_alive=self._options.keep_alive,
            media_type=parsed.media_type,
            token_ids=self._options.token_ids and dialect.carries_ids,
            body=parsed.engine_body(call),
        )
        if own := asked.request.headers.get(REQUEST_ID):
            asked.request[RETURNED_ID] = own
        response = Response(asked.request, call, exchange, asked.holding, encoder_for)
        fingerprint = fingerprint_of(self._options.retries, asked.path, asked.request.headers, request.body, asked.harness)
        return _Call(CallRequest(asked.session, call, response, fingerprint.digest, asked.settings.digest), fingerprint, asked.route)

    async def _read(self, asked: SessionRequest, request: DialectRequest, parsed: ParsedCall | TokenCount, known_as: str) -> ChatCall:
        """Read a call. If the template accepts no later system messages, they may become reminders.

        `known_as` is the incremental parser's key of the earlier body that this one may continue.
        """
        body = await self._bodies.with_media(asked, parsed.body)
        call = await parsed.read(request, body, CallReader(self._parser, known_as, self._served(asked)))
        later = parsed.reminds and any(message.role == "system" for message in call.messages[1:])
        if later and not await self._takes_later_system(asked, call):
            known_as = known_as and f"{known_as}\0reminders"
            call = await parsed.read(request, with_messages(call, as_reminders(call.raw_messages)), CallReader(self._parser, known_as))
        if len(self._pool.monitors) > 1:
            await self._pool.check_model(call.model)
        self._apply(asked, call)
        return call

    async def _takes_later_system(self, asked: SessionRequest, call: ChatCall) -> bool:
        """Whether the template accepts a system message after the first one; while the engine is unreachable, the last finding counts."""
        try:
            return (await self._pool.engine_of(asked.session, call.model).model(call.model)).capability.later_system
        except EngineError:
            return self._pool.later_system

    async def _tokenize(self, asked: SessionRequest) -> web.StreamResponse:
        """Answer with the ids that a chat call with this body would send. If the engine would render that call, forward the request."""
        await self._settings.check(asked.session, asked.settings)
        body = await self._bodies.with_media(asked, await self._bodies.read(asked))
        rewrite = gym_request.chat_members if self._options.token_ids else None
        call = await read_tokenize(body, self._parser, served=self._served(asked), rewrite=rewrite)
        if call is not None:
            self._apply(asked, call)
            if (found := await self._planner.next_prompt(asked.session, call)) is not None:
                require_prefix(asked.session, call, found[0])
                return web.Response(body=_tokenize_answer(*found), content_type="application/json")
        return await self._relay(asked, body=body)

    async def _list_models(self, asked: SessionRequest) -> web.StreamResponse:
        """Answer with the engine's own list, or with the models that the probe found if the engine has none (NeMo RL's worker)."""
        if len(self._pool.groups) > 1:
            return await all_models(self._pool)
        engine = self._pool.engine_of(asked.session)
        await engine.model()
        if all(capability.lists_models for capability in engine.capabilities):
            return await self._relay(asked)
        return web.Response(body=model_list(_models_of(engine)), content_type="application/json")

    async def _give_up(self, call: _Call, why: TokencacheError) -> web.StreamResponse:
        """End a call that failed: raise the error, or send it in the stream that has begun."""
        why.reported = True
        if isinstance(why, SessionFinishedError | SessionSealedError):
            await self._ledger.note_late_call(call.request.session, f"{call.request.chat.dialect}, {call.route}")
        if may_answer_with_status(call.response.client.state):
            raise why
        status = why.status if isinstance(why, EngineError | HarnessError) else HTTPStatus.SERVICE_UNAVAILABLE
        return await call.response.fail(status, f"the call was given up: {why.client_message}")

    async def _relay(self, asked: SessionRequest, *, body: bytes | None = None) -> web.StreamResponse:
        """Relay a request that samples nothing. Raises the errors of `relay_to` and `RequestBodies.with_media`."""
        body = await self._bodies.without_addresses(asked, body)
        return await relay_to(self._pool, asked.session, asked.request, asked.path, headers=asked.headers, body=body)

    async def _relay_unrecorded(self, asked: SessionRequest, what: str, *, path: str = "", body: bytes | None = None) -> web.StreamResponse:
        """Relay a request that may sample, and add an incident before the client receives an answer that may hold sampled tokens.

        Args:
            asked: the request.
            what: what is relayed, for the incident.
            path: the path at the engine, if the proxy does not know the route.
            body: the body to send, if it is not the request's own.

        Raises:
            HarnessError: the session has a budget, and tokens that are not recorded cannot be counted.
            SessionFinishedError, SessionSealedError: the session accepts no calls.
            StoreError: the store failed and the policy is strict.
            EngineError: see `relay_to`.
        """
        if asked.settings.budget.over(self._options.budget):
            raise HarnessError(f"{asked.route} is not recorded like this, and this session has a budget: its tokens could not be counted")
        try:
            await self._ledger.admit(asked.session)
        except (SessionFinishedError, SessionSealedError):
            await self._ledger.note_late_call(asked.session, f"{asked.request.method} {asked.route[:80]}")
            raise
        body = await self._bodies.without_addresses(asked, body)
        return await _relay_noted(self._pool, self._ledger, asked, what, path=path or asked.path, body=body)

    def _apply(self, asked: SessionRequest, call: ChatCall) -> None:
        """Set what the session and its harness decide about a call's history."""
        call.harness = asked.harness
        call.leniency = msgspec.structs.replace(asked.leniency, tools=ToolNames(call.fields.get("tools")))
        call.history = asked.settings.history or self._options.history

    def _pin(self, asked: SessionRequest, call: ChatCall) -> None:
        """Write the pinned parameters into a call's members.

        A session's own policy takes precedence. `Dispatch` adds what the engine requires beside it. Each tenant gets a separate part of the
        engine's prefix cache, by a salt that no other tenant can compute (`cache_salt`, vLLM 0.20 to 0.32).
        """
        if asked.settings.tenant:
            salt = keyed_hash(self._parser.secret, b"tenant" + asked.settings.tenant.encode())
            call.fields["cache_salt"] = msgspec.Raw(b'"%s"' % salt.hex().encode())
        policy = {**self._options.sampling, **asked.settings.sampling}
        if policy:
            metrics.count_replaced(call.pin(policy))

    def _dialect_request(self, asked: SessionRequest, body: bytes) -> DialectRequest:
        store, session = self._ledger.store, asked.session
        return DialectRequest(
            method=asked.request.method,
            path=asked.route,
            query=dict(asked.request.query),
            headers=asked.request.headers,
            body=body,
            handle=os.urandom(16).hex(),
            served=partial(self._served_models, asked),
            documents=lambda names: store.documents(session, names),
            forget=lambda name: store.delete_document(session, name),
            token_ids=self._options.token_ids,
        )

    def _served(self, asked: SessionRequest) -> Callable[[str], str]:
        """Return the function that maps a harness's name for a model to the served model."""
        return partial(self._aliases.served, own=asked.settings.models)

    async def _served_models(self, asked: SessionRequest) -> list[ServedModel]:
        """List the served models, and the requested one under its own name if that is an alias."""
        if len(self._pool.groups) > 1:
            listed = await self._pool.list_models()
            found = {name: ServedModel(name, whole(entry.get("max_model_len"))) for name, entry in listed.items()}
        else:
            engine = self._pool.engine_of(asked.session)
            await engine.model()
            found = {model.name: model for model in _models_of(engine)}
        requested = unquote(asked.route.rpartition("/")[2])
        served = found.get(self._served(asked)(requested))
        alias = [ServedModel(requested, served.max_model_len)] if served is not None and requested not in found else []
        return [*found.values(), *alias]


def _makes_a_call(request: web.Request) -> bool:
    return request.method == "POST" and not request.path.endswith(_NO_CALLS)


async def _note_left(ledger: Ledger, retries: Policy, asked: SessionRequest) -> None:
    """Add an incident for a call whose client left before it began; none if an equal call is recorded: this one may be late."""
    if (body := asked.holding.body) is None or not _makes_a_call(asked.request):
        return
    digest = fingerprint_of(retries, asked.path, asked.request.headers, body, asked.harness).digest
    with contextlib.suppress(StoreError):
        if digest and (await ledger.store.find(asked.session, [REQUEST_KEY + digest]))[0]:
            return
    await ledger.note_refused_call(asked.session, IncidentKind.CLIENT_GONE, "the client left before its call began", at=asked.began)


async def _relay_noted(
    pool: Pool, ledger: Ledger, asked: SessionRequest, what: str, *, path: str, body: bytes | None
) -> web.StreamResponse:
    """Relay a request, and add an incident if the engine sampled, or may have; otherwise if no engine was reached.

    Raises the errors of `Ledger.add_incidents` and `relay_to`.
    """
    answered = False

    async def note(kind: IncidentKind, detail: str) -> None:
        await ledger.add_incidents(asked.session, [kind.incident(f"{what} is relayed, {detail}", at=RECORD_CLOCK.now())])

    async def before_answer(status: int) -> None:
        nonlocal answered
        answered = True
        if not is_refusal(status):
            await note(IncidentKind.UNRECORDED_ROUTE, "not recorded")

    try:
        return await relay_to(pool, asked.session, asked.request, path, headers=asked.headers, body=body, before_answer=before_answer)
    except EngineError as why:
        if not isinstance(why, UnexpectedAnswerError):
            with contextlib.suppress(StoreError):
                await note(IncidentKind.UNRECORDED_ROUTE if why.reached else IncidentKind.UPSTREAM_DOWN, f"and got no answer: {why}")
        raise
    except asyncio.CancelledError:
        if not answered:
            detail = "and its client left before the engine answered"
            ledger.detach(asyncio.create_task(note(IncidentKind.UNRECORDED_ROUTE, detail)))
        raise


def _models_of(engine: Engine) -> list[ServedModel]:
    """Return the models that the probe found on an engine."""
    return list({found.model: ServedModel(found.model, found.max_model_len) for found in engine.capabilities if found.model}.values())


def _tokenize_answer(prompt: bytes, model: Model) -> bytes:
    """Write the answer of `/tokenize` for packed ids in the format of vLLM 0.32."""
    return msgspec.json.encode(
        {
            "count": ids.count(prompt),
            "max_model_len": model.capability.max_model_len,
            "tokens": msgspec.Raw(b"[" + ids.fragment(prompt) + b"]"),
            "token_strs": None,
        }
    )
