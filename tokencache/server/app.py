"""Makes the parts of the proxy, wires them together, and starts and stops them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from tokencache import metrics
from tokencache.adapters.load import load_all
from tokencache.api.admission import AdmissionWait
from tokencache.api.auth import AdminAuth
from tokencache.api.capacity import add_capacity_route, capacity_of, set_capacity_metrics
from tokencache.api.conditions import add_conditions_route
from tokencache.api.engines import add_engine_routes, engine_object
from tokencache.api.gauges import Gauges
from tokencache.api.media import add_media_routes
from tokencache.api.queue import SessionQueue
from tokencache.api.reader import SessionReader
from tokencache.api.routes import add_refusals, add_trainer_routes
from tokencache.api.runs import add_run_routes
from tokencache.api.scores import add_score_route
from tokencache.api.summaries import SessionList
from tokencache.api.viewer.routes import add_viewer_routes
from tokencache.api.weights import add_weight_routes, engine_weights
from tokencache.background import failing, repeat
from tokencache.config import Settings, names_in
from tokencache.dialects.chat.incremental import IncrementalParser
from tokencache.engine.admission import Admission
from tokencache.engine.announced_weights import AnnouncedWeights
from tokencache.engine.drivers.registry import DriverOptions, drivers
from tokencache.engine.image_names import ImageNames
from tokencache.engine.membership import EngineMembership
from tokencache.engine.model import Engine
from tokencache.engine.pool import Pool
from tokencache.engine.prefixes import PrefixUse
from tokencache.engine.probe import Capability
from tokencache.engine.session_ends import SessionEnds
from tokencache.engine.template.local import LocalRenderer
from tokencache.engine.upstream import Sidecar, Upstream
from tokencache.errors import extra_missing
from tokencache.proxy.dedup.in_flight import CallsInFlight
from tokencache.proxy.dedup.lost_calls import HEARTBEAT_SECONDS
from tokencache.proxy.dispatch import Services
from tokencache.proxy.edited_context import EditedContexts
from tokencache.proxy.endpoints import EndpointOptions, Endpoints
from tokencache.proxy.fetched_media import FetchedMedia
from tokencache.proxy.finishing import TimeLimits
from tokencache.proxy.harness_profile import HEADER as HARNESS_HEADER
from tokencache.proxy.harness_profile import HarnessProfiles, ModelAliases
from tokencache.proxy.kv_salt import KvSalts
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.planner import Planner
from tokencache.proxy.policy_version import PolicyVersions
from tokencache.proxy.prefix_cache import PrefixCache
from tokencache.proxy.request_body import note_expectation
from tokencache.proxy.response import finish_headers
from tokencache.proxy.routed_experts import RoutedExperts, open_files
from tokencache.proxy.sessions import SessionFinder, SessionSources
from tokencache.request_memory import MEMORY_PART, REQUEST_MEMORY, RequestMemory, machine_memory
from tokencache.server.routing import RequestRouter
from tokencache.store import StoreOptions, open_store
from tokencache.store.base import SECRET_BYTES, Store, StoreError
from tokencache.wakeup import end

if TYPE_CHECKING:
    from tokencache.proxy.spans import CallSpans


class Proxy:
    """The parts of a proxy. `application` makes the aiohttp application that serves it."""

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
        self._parser = Sidecar(settings.derender) if settings.derender else None
        kinds = drivers(settings.engine, DriverOptions(settings.sampling, streams=not settings.whole_replies, parser=self._parser))

        frozen = frozenset(names_in(settings.not_trainable))

        def engine_at(url: str) -> Engine:
            upstream = Upstream(url, key=settings.upstream_key)
            report = partial(_count_level, upstream.url)
            return Engine(upstream, kinds, local=local, on_probe=report, required=settings.require, frozen=frozen)

        self.pool = Pool(engine_at, names_in(settings.upstream), settings.placement)
        prefixes = PrefixCache(self.store, max_bytes=settings.prefix_memory)
        experts = RoutedExperts(open_files(settings.experts)) if settings.experts else None
        strict = settings.on_store_error == "fail"
        self._ends = SessionEnds(self.pool)
        self.ledger = Ledger(
            self.store,
            prefixes,
            strict=strict,
            experts=experts,
            max_media_bytes=settings.max_media_bytes,
            placement=self.pool.placement,
            rebound=self.pool.rebound if settings.placement in {"auto", "sticky"} else None,
            ended=self._ends.tell,
        )
        self.admission = Admission(self.pool.placement, settings.admission)
        self.membership = EngineMembership(self.pool, self.store, self.ledger.replica, self.admission)
        self.weights = AnnouncedWeights(self.pool, self.store)
        own_adapters = (settings.adapters,) if settings.adapters is not None else ()
        self.adapters = load_all(own_adapters)
        self.profiles = HarnessProfiles(self.adapters, names_in(settings.rules_off))
        sources = SessionSources.read(names_in(settings.session_from))
        own_headers = {settings.session_header, *sources.headers, HARNESS_HEADER, "Content-Length", "Accept-Encoding", "Host", "Expect"}
        options = EndpointOptions(
            keep_alive=settings.keep_alive,
            sampling=settings.sampling,
            budget=settings.budget,
            token_ids=settings.return_token_id_information,
            retries=settings.repeats,
            dropped_headers=frozenset(name.lower() for name in own_headers),
            affinity_headers=names_in(settings.affinity_headers),
            history=settings.history,
        )
        self._bodies = IncrementalParser()
        planner = Planner(self.pool, self.store, prefixes)
        salts = KvSalts(settings.kv, self.store, lambda: self._bodies.secret)
        self.versions = PolicyVersions(self.weights, salts)
        names = ImageNames(lambda: self._bodies.secret)
        self._spans = _spans() if settings.traces else None
        services = Services(
            self.pool, self.ledger, planner.plan, self.versions, settings.hold, settings.aborted, names, PrefixUse(), self._spans
        )
        self._calls = CallsInFlight(services, policy=settings.repeats, grace=settings.linger)
        aliases = ModelAliases(settings.model_aliases)
        self._media = FetchedMedia() if settings.fetch_media else None
        endpoints = Endpoints(
            self.pool,
            self.ledger,
            planner,
            self._calls,
            parser=self._bodies,
            profiles=self.profiles,
            aliases=aliases,
            options=options,
            media=self._media,
        )
        self._edited = EditedContexts(self.store, self._bodies, self.profiles, settings.history)
        self._auth = AdminAuth(settings.admin_key)
        self.sessions = SessionFinder(
            self.store,
            header=settings.session_header,
            sources=sources,
            registered_only=settings.registered_only,
        )
        memory = settings.request_memory or machine_memory() // MEMORY_PART // settings.workers
        self._queue = SessionQueue(self.ledger, self.weights)
        self._gauges = Gauges(self._queue, self.store)
        self.request_memory = RequestMemory(memory, least=settings.max_body)
        self.router = RequestRouter(settings, self.pool, endpoints, self.sessions)

    @property
    def engine(self) -> Engine:
        """The first engine, often the only one. Raises `IndexError` if there is no engine yet."""
        return self.pool.monitors[0].engine

    @property
    def upstream(self) -> Upstream:
        """URL and connections of the first engine. Raises `IndexError` if there is no engine yet."""
        return self.engine.upstream

    def application(self) -> web.Application:
        """Make the aiohttp application."""
        app = web.Application(client_max_size=self.settings.max_body)
        app[REQUEST_MEMORY] = self.request_memory
        app.on_response_prepare.append(finish_headers)
        app.cleanup_ctx.append(self._running)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._auth(self._metrics))
        listing = SessionList(self.ledger)
        add_viewer_routes(app, self._auth, self.ledger, self.pool, self.weights, listing, self._gauges)
        add_run_routes(app, self._auth, listing, self._gauges)
        add_engine_routes(app, self._auth, self.membership, self.pool)
        add_capacity_route(app, self._auth, self.pool, self.admission)
        add_conditions_route(app, self._auth, self.pool, self.adapters, settings=self.settings.shown, digest=self.settings.digest)
        add_weight_routes(app, self._auth, self.weights, self.pool)
        most, queue, weights = self.settings.max_ready, self._queue, self.weights
        waits = AdmissionWait(self.admission, self.pool, self.ledger) if self.settings.admission else None
        add_trainer_routes(
            app,
            self._auth,
            self.ledger,
            self.profiles,
            self.pool,
            queue=queue,
            weights=weights,
            max_ready=most,
            admission=waits,
            public_url=self.settings.public_url,
        )
        add_media_routes(app, self._auth, self.ledger, self.weights)
        add_score_route(app, self._auth, SessionReader(self.ledger, self.weights), self._edited, self.pool)
        add_refusals(app, self._auth)
        app.router.add_route("*", "/{path:.*}", self.router.route, expect_handler=note_expectation)
        return app

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Open the store, and probe the engines while the context is open. Nothing in it acts on sessions.

        Raises:
            StoreError: the store cannot be opened.
        """
        async with contextlib.AsyncExitStack() as opened:  # closes in reverse order what is open, also if a later step fails
            if self._spans is not None:
                opened.push_async_callback(self._spans.close)
            opened.push_async_callback(self.store.close)
            await self.store.open()
            await self._share_secret()
            if self._parser is not None:
                opened.push_async_callback(self._parser.close)
                await self._parser.open()
            if self._media is not None:
                opened.push_async_callback(self._media.close)
            await opened.enter_async_context(self.pool.open())
            yield

    async def _running(self, _app: web.Application) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as opened:
            await opened.enter_async_context(self.connected())
            await opened.enter_async_context(self.membership.following())
            await opened.enter_async_context(self.weights.following())
            await opened.enter_async_context(self._calls.heartbeats())
            opened.push_async_callback(self._ends.close)
            opened.push_async_callback(self.ledger.close)
            await opened.enter_async_context(TimeLimits(self.ledger).enforced())
            opened.push_async_callback(self._calls.close)
            opened.push_async_callback(end, asyncio.create_task(repeat("secret", self._try_to_share_secret, HEARTBEAT_SECONDS)))
            yield

    async def _share_secret(self) -> None:
        """Use the store's secret, which all replicas share. If the store has lost it, write ours back: turns are found only with it.

        Raises:
            StoreError: the store failed, or holds an invalid secret. The current secret stays in use.
        """
        secret = await self.store.secret(self._bodies.secret)
        if not isinstance(secret, bytes) or len(secret) != SECRET_BYTES:
            raise StoreError(f"the secret of the deployment that the store has is damaged: it must be {SECRET_BYTES} bytes")
        self._bodies.secret = secret

    async def _try_to_share_secret(self) -> None:
        with contextlib.suppress(StoreError):
            await self._share_secret()

    async def _healthz(self, _request: web.Request) -> web.Response:
        public = self.settings.public_url
        return web.json_response({"status": "ok"} | ({"public_url": public} if public else {}))

    async def _readyz(self, request: web.Request) -> web.Response:
        """Report whether calls can be served. Details of engines and store need the admin key."""
        store = "ok"
        try:
            await self.store.ping()
            await self._share_secret()
        except StoreError as why:
            store = str(why)
        ready = self.pool.ready and store == "ok"
        status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
        if not self._auth.admits(request):
            return web.json_response({"ready": ready}, status=status)
        engines = [engine_object(self.pool, monitor) for monitor in self.pool.monitors]
        first = next((state for state in engines if state["serves"]), engines[0] if engines else None)
        weights = [msgspec.to_builtins(engine_weights(self.weights.known, monitor)) for monitor in self.pool.monitors]
        capacity = msgspec.to_builtins(capacity_of(self.pool, self.admission))
        found = {"ready": ready, "engine": first, "engines": engines, "weights": weights, "store": store, "capacity": capacity}
        if tasks := failing():
            found["failing_tasks"] = tasks
        return web.json_response(found, status=status)

    async def _metrics(self, _request: web.Request) -> web.Response:
        await self._gauges.update()
        set_capacity_metrics(self.pool, self.admission)
        return web.Response(body=metrics.exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _spans() -> "CallSpans":
    """Make the writer of spans. Raises `ValueError` if the extra is missing."""
    try:
        from tokencache.proxy.spans import CallSpans  # noqa: PLC0415 - needs the extra `otel`
    except ModuleNotFoundError as why:
        raise ValueError(extra_missing("--traces", "otel", why.name)) from None
    return CallSpans()


def _count_level(engine: str, found: Capability) -> None:
    metrics.ENGINE_LEVEL.labels(engine, found.model).set(found.level == "exact")
