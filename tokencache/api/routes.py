"""Handlers of the trainer's API that read sessions and that use the queue; `lifecycle` has those that change sessions.

`openapi` lists the routes with their paths. If an admin key is set, each request needs `Authorization: Bearer <admin key>`.
"""

from collections.abc import AsyncIterator, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from aiohttp import web

from tokencache.api.admission import AdmissionWait
from tokencache.api.auth import AdminAuth, Handler
from tokencache.api.drift import DriftMeter
from tokencache.api.export_worker import ExportWorker
from tokencache.api.http import choice, flag, json_response, not_found, number, read_body
from tokencache.api.lifecycle import LifecycleRoutes
from tokencache.api.listing import listed
from tokencache.api.openapi import BASE, DRIFT_MODES, document, register
from tokencache.api.queue import SessionQueue, TakenDelivery, lag_limit
from tokencache.api.reader import SessionReader, owed_incidents, state_object
from tokencache.api.requests import Acknowledge, Await, Deliveries, Extend, Take
from tokencache.core.session import Reward
from tokencache.engine.announced_weights import AnnouncedWeights
from tokencache.engine.pool import Pool
from tokencache.errors import HarnessError
from tokencache.proxy.harness_profile import HarnessProfiles
from tokencache.proxy.ledger import Ledger
from tokencache.store.base import SessionInfo
from tokencache.trajectories.formats.native import drift_object, turn_object
from tokencache.trajectories.formats.registry import export, format_named
from tokencache.trajectories.lengths import lengths_of

DRIFT_TIMEOUT = 10.0
"""Seconds for measuring the drift of a session. Turns that remain are reported as not measured."""
_PUBLIC = frozenset({"/healthz", "/readyz"})
"""Routes that need no admin key."""


def add_trainer_routes(
    app: web.Application,
    auth: AdminAuth,
    ledger: Ledger,
    profiles: HarnessProfiles,
    pool: Pool,
    *,
    queue: SessionQueue,
    weights: AnnouncedWeights,
    max_ready: int,
    admission: AdmissionWait | None,
    public_url: str,
) -> None:
    """Add the trainer's routes to an application. `max_ready`, `admission` and `public_url` as in `LifecycleRoutes`."""
    worker = ExportWorker()
    api = _TrainerApi(ledger, queue, worker, DriftMeter(pool, worker, timeout=DRIFT_TIMEOUT), weights)
    lifecycle = LifecycleRoutes(ledger, profiles, queue, pool, max_ready=max_ready, admission=admission, public_url=public_url)

    async def worker_running(_app: web.Application) -> AsyncIterator[None]:
        yield
        await worker.close()

    app.cleanup_ctx.append(worker_running)
    handlers = {
        "listSessions": api.sessions,
        "getSession": api.session,
        "listTurns": api.turns,
        "getTrajectories": api.trajectories,
        "getDrift": api.drift,
        "createSession": lifecycle.create,
        "forkSession": lifecycle.fork,
        "labelSession": lifecycle.label,
        "finishSession": lifecycle.finish,
        "sealSession": lifecycle.seal,
        "deleteSession": lifecycle.delete,
        "getReward": lifecycle.reward,
        "setReward": lifecycle.set_reward,
        "registerKey": lifecycle.register_key,
        "revokeKey": lifecycle.revoke_key,
        "awaitSessions": api.wait,
        "getQueue": api.queue,
        "takeDeliveries": api.take,
        "acknowledgeDeliveries": api.acknowledge,
        "releaseDeliveries": api.release,
        "extendDeliveries": api.extend,
        "getOpenapi": _openapi,
    }
    register(app, auth, handlers)


def add_refusals(app: web.Application, auth: AdminAuth) -> None:
    """Refuse the requests that no route of an application serves: 405 if its path has a route, and 404 below `/tokencache/`.

    Call it once all routes of the API are added, and before any route that relays requests.
    """
    by_path: dict[str, list[web.Resource]] = {}
    for resource in app.router.resources():
        if isinstance(resource, web.Resource):
            by_path.setdefault(resource.canonical, []).append(resource)
    for path, resources in by_path.items():
        refusal = _wrong_method(sorted({route.method for resource in resources for route in resource}))
        resources[-1].add_route("*", refusal if path in _PUBLIC else auth(refusal))  # the last one: requests reach it after all others
    app.router.add_route("*", "/tokencache/{rest:.*}", auth(_unknown))


def _wrong_method(allowed: Sequence[str]) -> Handler:
    async def refuse(request: web.Request) -> web.StreamResponse:
        methods = ", ".join(allowed)
        raise HarnessError(
            f"{request.method} {request.path}: this route has only {methods}",
            status=HTTPStatus.METHOD_NOT_ALLOWED,
            headers={"Allow": methods},
        )

    return refuse


async def _unknown(request: web.Request) -> web.StreamResponse:
    raise not_found(f"there is no {request.method} {request.path}; see {BASE}/sessions")


async def _openapi(_request: web.Request) -> web.StreamResponse:
    return json_response(document())


class _TrainerApi:
    def __init__(self, ledger: Ledger, queue: SessionQueue, worker: ExportWorker, meter: DriftMeter, weights: AnnouncedWeights) -> None:
        self._ledger = ledger
        self._queue = queue
        self._reader = SessionReader(ledger, weights)
        self._weights = weights
        self._worker = worker
        self._meter = meter

    async def sessions(self, request: web.Request) -> web.StreamResponse:
        found, cursor = await listed(request, self._ledger)
        return json_response({"sessions": [await self._state(info) for info in found], "cursor": cursor})

    async def session(self, request: web.Request) -> web.StreamResponse:
        return json_response(await self._state(await self._reader.info(request)))

    async def turns(self, request: web.Request) -> web.StreamResponse:
        info = await self._reader.info(request)
        reward = info.reward or Reward()
        return json_response({"session": info.id, "turns": [turn_object(turn, reward) for turn in await self._reader.turns(info)]})

    async def trajectories(self, request: web.Request) -> web.StreamResponse:
        wanted = format_named(request.query.get("format", "native"))
        mode = choice(request, "drift", DRIFT_MODES, "sequences" if wanted.name == "native" else "off")
        lengths = lengths_of(request.query)
        lag = lag_limit(await self._weights.read(), number(request, "max_lag", 0)) if request.query.get("max_lag") else None
        text = flag(request, "text")
        if text and wanted.name != "native":
            raise HarnessError(
                f"format {wanted.name} has the text that its trainer reads: text=true is for the native format", param="text"
            )
        info = await self._reader.info(request)
        records = await self._reader.records(info, contexts=text or wanted.reads_contexts or mode != "off")
        if mode != "off":
            records = await self._meter.measure(records, mode)
        write = partial(export, lag=lag, model=request.query.get("model", ""), text=text)
        body = await self._worker.run(records.token_count, write, records, wanted, lengths)
        return web.Response(body=body, content_type="application/json")

    async def drift(self, request: web.Request) -> web.StreamResponse:
        mode = choice(request, "drift", DRIFT_MODES, "turns")
        records = await self._reader.records(await self._reader.info(request), contexts=True)
        measured = await self._meter.measure(records, mode)
        turns = {turn: drift_object(drift) for turn, drift in measured.drift.items()}
        return json_response({"session": records.info.id, "turns": turns, "unmeasured": measured.unmeasured})

    async def wait(self, request: web.Request) -> web.StreamResponse:
        asked = await read_body(request, Await, invalid=HTTPStatus.UNPROCESSABLE_ENTITY)
        finished, unknown = await self._queue.wait(asked)
        return json_response({"finished": [await self._state(info) for info in finished], "unknown": unknown})

    async def queue(self, _request: web.Request) -> web.StreamResponse:
        return json_response(await self._queue.counts())

    async def take(self, request: web.Request) -> web.StreamResponse:
        found, left = await self._queue.take(await read_body(request, Take, invalid=HTTPStatus.UNPROCESSABLE_ENTITY))
        return json_response({"deliveries": [await self._delivery(one) for one in found], **left})

    async def acknowledge(self, request: web.Request) -> web.StreamResponse:
        asked = await read_body(request, Acknowledge, invalid=HTTPStatus.UNPROCESSABLE_ENTITY)
        deleted = await self._queue.acknowledge(asked)
        return json_response({"acknowledged": asked.deliveries, "deleted": deleted})

    async def release(self, request: web.Request) -> web.StreamResponse:
        asked = await read_body(request, Deliveries, invalid=HTTPStatus.UNPROCESSABLE_ENTITY)
        await self._queue.release(asked)
        return json_response({"released": asked.deliveries})

    async def extend(self, request: web.Request) -> web.StreamResponse:
        asked = await read_body(request, Extend, invalid=HTTPStatus.UNPROCESSABLE_ENTITY)
        await self._queue.extend(asked)
        return json_response({"extended": asked.deliveries})

    async def _delivery(self, one: TakenDelivery) -> dict[str, Any]:
        sessions = [await self._state(info) for info in one.sessions]
        valid = [state["session"] for state in sessions if state["valid"]]
        return {
            "id": one.id,
            "group": one.group,
            "attempt": one.attempt,
            "until": one.until,
            "missing": one.missing,
            "valid": valid,
            "sessions": sessions,
        }

    async def _state(self, info: SessionInfo) -> dict[str, Any]:
        return state_object(info, await owed_incidents(self._ledger, info))
