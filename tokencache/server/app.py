"""The application: routes, start and stop.

Three kinds of requests come in: the proxy's own (`/healthz`, `/readyz`, `/metrics`, `/tokencache/…`), model calls within
a session, and everything else, which is relayed byte for byte.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from aiohttp import web
from multidict import CIMultiDict
from prometheus_client import CONTENT_TYPE_LATEST

from tokencache import metrics
from tokencache.adapters.load import load_all
from tokencache.api.auth import AdminAuth
from tokencache.api.engines import add_engine_routes, engine_object
from tokencache.api.routes import add_trainer_routes
from tokencache.api.viewer.routes import add_viewer_routes
from tokencache.config import Settings, names_in
from tokencache.core.incidents import IncidentKind
from tokencache.dialects.base import TranslatedDialect
from tokencache.dialects.chat.incremental import IncrementalParser
from tokencache.dialects.chat.routes import CHAT, COMPLETIONS, TOKENIZE
from tokencache.dialects.chat.routes import ROUTES as CHAT_ROUTES
from tokencache.dialects.registry import CHAT as CHAT_DIALECT
from tokencache.dialects.registry import credential_headers, dialect_of, use_bearer
from tokencache.engine.drivers.registry import DriverOptions, drivers
from tokencache.engine.membership import EngineMembership
from tokencache.engine.model import Engine
from tokencache.engine.pool import Pool
from tokencache.engine.probe import Capability
from tokencache.engine.template.local import LocalRenderer
from tokencache.engine.upstream import Upstream
from tokencache.errors import HarnessError, TokencacheError
from tokencache.net import end_to_end_headers
from tokencache.proxy.call import Services
from tokencache.proxy.dedup.in_flight import HEARTBEAT_SECONDS, CallsInFlight
from tokencache.proxy.endpoints import Caller, Visit
from tokencache.proxy.harness_profile import HEADER as HARNESS_HEADER
from tokencache.proxy.harness_profile import HarnessProfiles, ModelAliases
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.passthrough import relay_to
from tokencache.proxy.prefix_cache import PrefixCache
from tokencache.proxy.prompts import Prompts
from tokencache.proxy.request_body import KEPT, body_of
from tokencache.proxy.response import keep_headers
from tokencache.proxy.routed_experts import RoutedExperts, open_files
from tokencache.proxy.sessions import Origin, SessionFinder, SessionInBody, SessionSources
from tokencache.server.http_guard import check_head, check_path
from tokencache.session_url import route_of
from tokencache.store import StoreOptions, open_store
from tokencache.store.base import Store, StoreError

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_FAULT_OF_OURS = 500
_UNRECORDED = "/inference/v1/generate"
"""Samples tokens, and no dialect of ours records it: within a session it leaves a hole, and it is said."""
_MODELS = "/v1/models"
_FOR_TENANTS = frozenset({("GET", _MODELS), ("GET", "/health"), ("GET", "/version"), ("POST", "/tokenize"), ("POST", "/detokenize")})
"""What of the engine's other routes a session may use that is not trusted: they neither sample nor change anything (vLLM 0.32)."""
_DIALECT = web.RequestKey("dialect", TranslatedDialect)


class Proxy:
    """The proxy's parts, wired together."""

    def __init__(self, settings: Settings, store: Store | None = None) -> None:
        self.settings = settings
        self.store = store or open_store(
            settings.store,
            StoreOptions(
                ttl_seconds=settings.store_ttl,
                timeout_seconds=settings.store_timeout,
                max_sessions=settings.max_sessions,
                max_bytes=settings.max_store_bytes,
                may_evict=settings.store_may_evict,
            ),
        )
        local = LocalRenderer(settings.tokenizer) if settings.tokenizer is not None else None
        self._parser = Upstream(settings.derender) if settings.derender else None
        kinds = drivers(settings.engine, DriverOptions(settings.sampling, streams=not settings.whole_replies, parser=self._parser))

        def engine_at(url: str) -> Engine:
            upstream = Upstream(url, key=settings.upstream_key)
            noted = partial(_note_level, upstream.url)
            return Engine(upstream, kinds, local=local, on_probe=noted, required=settings.require)

        self.pool = Pool(engine_at, names_in(settings.upstream))
        prefixes = PrefixCache(self.store, max_bytes=settings.prefix_memory)
        experts = RoutedExperts(open_files(settings.experts)) if settings.experts else None
        self.ledger = Ledger(self.store, prefixes, strict=settings.on_store_error == "fail", experts=experts)
        self.membership = EngineMembership(self.pool, self.store, self.ledger.replica)
        aliases = ModelAliases(settings.model_aliases)
        self._bodies = IncrementalParser()
        prompts = Prompts(self.pool, self.ledger)
        services = Services(self.pool, self.ledger, prompts.plan, settings.hold)
        self._calls = CallsInFlight(services, policy=settings.repeats, grace=settings.linger)
        self.caller = Caller(
            self.pool,
            self.ledger,
            self._bodies,
            aliases,
            keep_alive=settings.keep_alive,
            sampling=settings.sampling,
            token_ids=settings.return_token_id_information,
            budget=settings.budget,
            prompts=prompts,
            calls=self._calls,
            retry_policy=settings.repeats,
        )
        own = (settings.adapters,) if settings.adapters is not None else ()
        self.profiles = HarnessProfiles(load_all(own), names_in(settings.rules_off))
        self._auth = AdminAuth(settings.admin_key)
        self._sources = SessionSources.read(names_in(settings.session_from))
        self._session_headers = (settings.session_header, *self._sources.headers)
        own_headers = {*self._session_headers, HARNESS_HEADER, "Content-Length", "Accept-Encoding", "Host", "Expect"}
        self._dropped = frozenset(name.lower() for name in own_headers)
        self._credentials = frozenset(name.lower() for name in credential_headers())
        self._affinity = names_in(settings.affinity_headers)
        self._no_session_logged = False
        self.sessions = SessionFinder(
            self.store, header=settings.session_header, sources=self._sources, registered_only=settings.registered_only
        )

    @property
    def engine(self) -> Engine:
        """The first of the engines, and mostly the only one.

        Raises:
            IndexError: there is none yet.
        """
        return self.pool.monitors[0].engine

    @property
    def upstream(self) -> Upstream:
        """That engine's URL and connections.

        Raises:
            IndexError: there is none yet.
        """
        return self.engine.upstream

    def application(self) -> web.Application:
        """Build the aiohttp application."""
        app = web.Application(client_max_size=self.settings.max_body, middlewares=[_errors])
        app.on_response_prepare.append(keep_headers)
        app.cleanup_ctx.append(self._running)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._auth(self._metrics))
        add_viewer_routes(app, self._auth, self.ledger, self.pool)
        add_engine_routes(app, self._auth, self.membership, self.pool)
        add_trainer_routes(app, self._auth, self.ledger, self.profiles, self.pool)
        app.router.add_route("*", "/{path:.*}", self._any)
        return app

    async def _running(self, _app: web.Application) -> AsyncIterator[None]:
        await self.store.open()
        await self._agree_on_secret()
        if self._parser is not None:
            await self._parser.open()
        async with self.pool.open(), self.membership.following(), self._calls.heartbeats():
            agreeing = asyncio.create_task(self._keep_agreeing())
            yield
            agreeing.cancel()
            await self._calls.close()
            await self.ledger.close()
        if self._parser is not None:
            await self._parser.close()
        await self.store.close()

    async def _agree_on_secret(self) -> None:
        """Have the store's secret, as all replicas have, and give it ours if it lost it: else none would find what another recorded."""
        self._bodies.secret = await self.store.secret(self._bodies.secret)

    async def _keep_agreeing(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            with contextlib.suppress(StoreError):
                await self._agree_on_secret()

    async def _any(self, request: web.Request) -> web.StreamResponse:
        path = request.raw_path if request.raw_path.startswith("/") else request.rel_url.raw_path_qs  # `GET http://host/path`
        route = route_of(path)
        dialect = dialect_of(request.method, route, request.headers) if route != CHAT else None  # looking for one costs 10 µs
        if dialect is not None:
            request[_DIALECT] = dialect  # whatever goes wrong from here on is said in its words
        check_head(request, self._session_headers)
        calls_model = request.method == "POST" and (dialect is not None or route in CHAT_ROUTES)
        in_body = await self._name_in_body(request) if calls_model and self._sources.members else None
        origin = await self.sessions.find(path, request.headers, in_body and in_body.session)
        check_path(origin.path)
        if origin.session is None:
            if calls_model:
                self._note_no_session(request, route)
            return await relay_to(self.pool, None, request, origin.path)
        if in_body is not None:
            request[KEPT] = in_body.rest
        return await self._within(request, origin.session, origin, route, dialect)

    async def _within(
        self, request: web.Request, session: str, origin: Origin, route: str, dialect: TranslatedDialect | None
    ) -> web.StreamResponse:
        """Serve a request of a session: the proxy's own routes itself, the engine's by relaying them."""
        harness = origin.harness or self.profiles.recognise(request.headers.get("User-Agent", ""))
        headers = self._headers(request, origin, translated=dialect is not None)
        visit = Visit(request, session, origin, route, headers, harness, self.profiles.leniency(harness))
        if dialect is not None:
            return await self.caller.answer(visit, dialect)
        if request.method == "POST" and route == CHAT:
            return await self.caller.chat(visit)
        if request.method == "POST" and route == COMPLETIONS:
            return await self.caller.complete(visit)
        if request.method == "POST" and route == TOKENIZE:
            return await self.caller.tokenize(visit)
        if request.method == "POST" and route == _UNRECORDED and not origin.tenant:
            await self.caller.admit(visit, "generate")
            incident = IncidentKind.UNRECORDED_ROUTE.incident(f"{route} is relayed, not recorded", at=time.time())
            await self.ledger.add_incidents(session, [incident])
        if origin.tenant and (request.method, route) not in _FOR_TENANTS:
            said = f"{request.method} {route[:80]} is not for a tenant's session: it may make model calls, and ask for the models"
            raise HarnessError(said, status=403, kind="permission_error")
        if (request.method, route) == ("GET", _MODELS):
            return await self.caller.models(visit)
        return await relay_to(self.pool, session, request, origin.path, headers=headers)

    async def _name_in_body(self, request: web.Request) -> SessionInBody | None:
        """Read a body that may name the session; `None` if it is compressed, which only the engine can read."""
        if request.headers.get("Content-Encoding", "identity") != "identity":
            return None
        request[KEPT] = body = await body_of(request)
        return self._sources.in_body(body)

    def _note_no_session(self, request: web.Request, route: str) -> None:
        """Log once that a model call without a session gets no token ids, where replies are meant to carry them."""
        if not self.settings.return_token_id_information or self._no_session_logged:
            return
        self._no_session_logged = True
        log.warning(
            "%s %s: the request names no session, so it is relayed to the engine and not recorded, and its reply carries no token ids, "
            "although --return-token-id-information is on. Name the rollout's session in the base URL (http://HOST:PORT/s/SESSION), "
            "in the header %s or with --session-from. NeMo Gym's agents name it once observability_enabled or token_id_capture.enabled "
            "is set (docs/topologies/nemo-gym.md). Further requests of this kind are not logged",
            request.method,
            route,
            self.settings.session_header,
        )

    def _headers(self, request: web.Request, origin: Origin, *, translated: bool) -> CIMultiDict[str]:
        """The headers of a call within a session, as they go to the engine; one that is `translated` goes as OpenAI's clients send it."""
        headers = end_to_end_headers(request.headers, drop=self._dropped | self._credentials if origin.own_key else self._dropped)
        if translated:
            use_bearer(headers)
            headers["Content-Type"] = "application/json"
        for name in self._affinity:  # engines and routers keep a session's cache warm by it
            headers.setdefault(name, origin.session or "")
        return headers

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _readyz(self, request: web.Request) -> web.Response:
        """Say whether calls can be served; what there is to say of engines and store, to the trainer alone."""
        store = "ok"
        try:
            await self.store.ping()
            await self._agree_on_secret()
        except StoreError as why:
            store = str(why)
        ready = self.pool.ready and store == "ok"
        status = 200 if ready else 503
        if not self._auth.admits(request):
            return web.json_response({"ready": ready}, status=status)
        engines = [engine_object(self.pool, monitor) for monitor in self.pool.monitors]
        first = next((state for state in engines if state["serves"]), engines[0] if engines else None)
        return web.json_response({"ready": ready, "engine": first, "engines": engines, "store": store}, status=status)

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=metrics.shown(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _note_level(engine: str, found: Capability) -> None:
    metrics.ENGINE_LEVEL.labels(engine, found.model).set(found.level == "exact")


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error in the shape that the dialect's clients expect; OpenAI's where it is unknown."""
    try:
        return await handler(request)
    except TokencacheError as error:
        response = _error(request, error.status, error.client_message, error.kind, error.param)
        response.headers.update(error.headers)
        return response
    except web.HTTPRequestEntityTooLarge as error:
        return _error(request, 413, f"the request body is too large: {error.text}", "invalid_request_error")
    except (web.HTTPException, ConnectionError):
        raise
    except Exception:
        log.exception("%s %s: our own error", request.method, request.path)
        if request.writer.output_size:
            raise  # an answer is under way: aiohttp breaks the connection off
        return _error(request, 500, "Internal error in tokencache; see its log.", "internal_error")


def _error(request: web.Request, status: int, message: str, kind: str, param: str | None = None) -> web.Response:
    body = request.get(_DIALECT, CHAT_DIALECT).error(status, message, kind, param)
    headers = {"x-should-retry": "false"} if status < _FAULT_OF_OURS else None  # OpenAI's and Anthropic's SDKs repeat a 409 else
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")
