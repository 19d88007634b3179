"""Reports how many sessions fit into the KV caches of the engines, for trainers, metrics and the viewer."""

import math
import time

from aiohttp import web

from tokencache import metrics
from tokencache.api.auth import AdminAuth
from tokencache.api.http import json_response
from tokencache.api.openapi import register
from tokencache.engine.admission import Admission
from tokencache.engine.capacity import sessions_that_fit
from tokencache.engine.pool import Pool
from tokencache.trajectories.values import Capacity, EngineCapacity, WaitingSession


def add_capacity_route(app: web.Application, auth: AdminAuth, pool: Pool, admission: Admission) -> None:
    """Add the route to an application."""

    async def capacity(_request: web.Request) -> web.StreamResponse:
        return json_response(capacity_of(pool, admission))

    register(app, auth, {"getCapacity": capacity})


def capacity_of(pool: Pool, admission: Admission) -> Capacity:
    """Describe the capacity of the engines. Only those count for the sums that serve, and have a model that is trained."""
    now, placement = time.monotonic(), pool.placement
    engines = [
        EngineCapacity(
            url=monitor.url,
            serves=pool.serves(monitor),
            tokens=sum(monitor.capacity.values()) or None,
            ranks=monitor.capacity,
            error=monitor.capacity_error,
            live_tokens=pool.load(monitor, now),
        )
        for monitor in pool.monitors
    ]
    counting = [engine for engine, monitor in zip(engines, pool.monitors, strict=True) if engine.serves and monitor.engine.trains]
    tokens = sum(engine.tokens or 0 for engine in counting)
    footprint = placement.footprint
    return Capacity(
        tokens=tokens,
        live_tokens=sum(engine.live_tokens for engine in counting),
        footprint=footprint.tokens,
        ended=footprint.sessions,
        sessions_fit=sessions_that_fit(tokens, footprint.tokens),
        engines=engines,
        waiting=[
            WaitingSession(session=session, since=since, place=admission.place(session))
            for session, since in admission.waiting(now).items()
        ],
    )


def set_capacity_metrics(pool: Pool, admission: Admission) -> None:
    """Set the metrics of capacity."""
    found = capacity_of(pool, admission)
    metrics.SESSIONS_WAITING.set(len(found.waiting))
    for engine in found.engines:
        metrics.ENGINE_KV.labels(engine.url).set(math.nan if engine.tokens is None else engine.tokens)
        metrics.ENGINE_LIVE.labels(engine.url).set(engine.live_tokens)
    metrics.SESSIONS_FIT.set(math.nan if found.sessions_fit is None else found.sessions_fit)
