"""Handlers of the trainer's API: sessions, turns, trajectories, drift and keys.

`openapi` lists the routes with their paths. If an admin key is set, each request needs `Authorization: Bearer <admin key>`.
"""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from aiohttp import web

from tokencache.api.auth import AdminAuth, Handler
from tokencache.api.drift import DriftMeter
from tokencache.api.export_worker import ExportWorker
from tokencache.api.http import choice, flag, json_response, not_found, read_body
from tokencache.api.openapi import BASE, DRIFT_MODES, document, register
from tokencache.api.reader import SessionReader, no_session, state_object
from tokencache.core.session import Reward
from tokencache.dialects.chat.vocabulary import check_policy
from tokencache.engine.pool import Pool
from tokencache.errors import HarnessError
from tokencache.proxy.harness_profile import HarnessProfiles
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.sessions import hash_key
from tokencache.session_url import REGISTERED_KEY, check_name
from tokencache.store.base import Binding, SealOutcome, SessionInfo
from tokencache.trajectories.formats.native import drift_object, turn_object
from tokencache.trajectories.formats.registry import export, format_named
from tokencache.trajectories.lengths import lengths_of

DRIFT_TIMEOUT = 10.0
"""Seconds for measuring the drift of a session. Turns that remain are reported as not measured."""
_PUBLIC = frozenset({"/healthz", "/readyz"})
"""Routes that need no admin key."""


def add_trainer_routes(app: web.Application, auth: AdminAuth, ledger: Ledger, profiles: HarnessProfiles, pool: Pool) -> None:
    """Add the trainer's routes to an application."""
    worker = ExportWorker()
    api = _TrainerApi(ledger, profiles, worker, DriftMeter(pool, worker, timeout=DRIFT_TIMEOUT))

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
        "sealSession": api.seal,
        "deleteSession": api.delete,
        "registerKey": api.register_key,
        "revokeKey": api.revoke_key,
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
        raise HarnessError(f"{request.method} {request.path}: this route has only {methods}", status=405, headers={"Allow": methods})

    return refuse


async def _unknown(request: web.Request) -> web.StreamResponse:
    raise not_found(f"there is no {request.method} {request.path}; see {BASE}/sessions")


async def _openapi(_request: web.Request) -> web.StreamResponse:
    return json_response(document())


class _TrainerApi:
    def __init__(self, ledger: Ledger, profiles: HarnessProfiles, worker: ExportWorker, meter: DriftMeter) -> None:
        self._store = ledger.store
        self._ledger = ledger
        self._profiles = profiles
        self._reader = SessionReader(ledger)
        self._worker = worker
        self._meter = meter

    async def sessions(self, _request: web.Request) -> web.StreamResponse:
        return json_response({"sessions": [self._state(info) async for info in self._store.sessions()]})

    async def session(self, request: web.Request) -> web.StreamResponse:
        return json_response(self._state(await self._reader.info(request)))

    async def turns(self, request: web.Request) -> web.StreamResponse:
        info = await self._reader.info(request)
        reward = info.reward or Reward()
        return json_response({"session": info.id, "turns": [turn_object(turn, reward) for turn in await self._store.turns(info.id)]})

    async def trajectories(self, request: web.Request) -> web.StreamResponse:
        wanted = format_named(request.query.get("format", "native"))
        mode = choice(request, "drift", DRIFT_MODES, "sequences" if wanted.name == "native" else "off")
        lengths = lengths_of(request.query)
        info = await self._reader.info(request)
        records = await self._reader.records(info, contexts=wanted.reads_contexts or mode != "off")
        if mode != "off":
            records = await self._meter.measure(records, mode)
        body = await self._worker.run(records.token_count, export, records, wanted, lengths)
        return web.Response(body=body, content_type="application/json")

    async def drift(self, request: web.Request) -> web.StreamResponse:
        mode = choice(request, "drift", DRIFT_MODES, "turns")
        records = await self._reader.records(await self._reader.info(request), contexts=True)
        measured = await self._meter.measure(records, mode)
        turns = {turn: drift_object(drift) for turn, drift in measured.drift.items()}
        return json_response({"session": records.info.id, "turns": turns, "unmeasured": measured.unmeasured})

    async def seal(self, request: web.Request) -> web.StreamResponse:
        name = check_name(request.match_info["session"])
        await self._store.finish(name)
        if await self._store.seal(name, force=True, at=time.time()) is SealOutcome.MISSING:
            raise no_session(name)
        return json_response({"session": name, "sealed": True})

    async def delete(self, request: web.Request) -> web.StreamResponse:
        name = check_name(request.match_info["session"])
        reuse = flag(request, "reuse")
        known = await self._ledger.delete(name, reuse=reuse)
        if not known and not reuse:  # with `reuse` the name only has to be free afterwards
            raise no_session(name)
        return json_response({"session": name, "deleted": known})

    async def register_key(self, request: web.Request) -> web.StreamResponse:
        form = '{"session": "<name>", "harness"?: "<adapter>", "models"?: {…}, "sampling"?: {…}, "budget"?: {…}, "tenant"?: "<name>"}'
        binding = await read_body(request, Binding, form)
        check_name(binding.session)
        self._profiles.leniency(binding.harness)
        try:
            check_policy(binding.sampling)
        except ValueError as error:
            raise HarnessError(f"sampling: {error}", param="sampling") from None
        key = REGISTERED_KEY + secrets.token_urlsafe(32)
        await self._store.lift_tombstone(binding.session)  # if the session was deleted, its name may be used again
        await self._store.bind_key(hash_key(key), binding)
        return json_response({**msgspec.to_builtins(binding), "key": key, "id": hash_key(key)}, status=201)

    async def revoke_key(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["key"]
        if not await self._store.unbind_key(name):
            raise not_found(f"there is no key with the id {name[:80]!r}")
        return json_response({"id": name, "revoked": True})

    def _state(self, info: SessionInfo) -> dict[str, Any]:
        return state_object(info, self._ledger.unsaved(info.id))
