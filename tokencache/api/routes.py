"""The trainer's routes.

`openapi` lists them with their paths. With an admin key set, each needs `Authorization: Bearer <admin key>`.
"""

import secrets
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from aiohttp import web

from tokencache.api.auth import Guard
from tokencache.api.drift import Meter, mode_named
from tokencache.api.export_worker import Press
from tokencache.api.openapi import BASE, document, register
from tokencache.api.reader import Reader, no_session
from tokencache.dialects.chat.sampling import check_policy
from tokencache.engine.pool import Pool
from tokencache.errors import HarnessError
from tokencache.proxy.harness_profile import HarnessProfiles
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.sessions import hash_key
from tokencache.session_url import REGISTERED_KEY, check_name
from tokencache.store.base import Binding, SessionInfo
from tokencache.trajectories.formats.native import drift_object, incident_object, turn_object
from tokencache.trajectories.formats.registry import format_named
from tokencache.trajectories.rollout import incidents_of, is_complete

DRIFT_LIMIT = 10.0
"""Seconds that measuring a session's drift may take; what is not measured by then is left out, and said."""
_ENCODER = msgspec.json.Encoder()


def trainer_routes(app: web.Application, ledger: Ledger, profiles: HarnessProfiles, engine: Pool, *, admin_key: str | None) -> None:
    """Add the trainer's routes to an application."""
    guard, press = Guard(admin_key), Press()
    api = _Api(ledger, profiles, press, Meter(engine, press, limit=DRIFT_LIMIT))

    async def pressing(_app: web.Application) -> AsyncIterator[None]:
        yield
        await press.close()

    app.cleanup_ctx.append(pressing)
    handlers = {
        "listSessions": api.sessions,
        "getSession": api.session,
        "listTurns": api.turns,
        "getTrajectories": api.trajectories,
        "getDrift": api.drift,
        "sealSession": api.seal,
        "deleteSession": api.delete,
        "registerKey": api.keys,
        "revokeKey": api.revoke,
        "getOpenapi": _openapi,
    }
    register(app, guard, handlers)
    app.router.add_route("*", "/tokencache/{rest:.*}", guard(_unknown))


async def _unknown(request: web.Request) -> web.StreamResponse:
    raise HarnessError(f"there is no {request.method} {request.path}; see {BASE}/sessions", status=404, kind="not_found_error")


async def _openapi(_request: web.Request) -> web.StreamResponse:
    return answer(document())


class _Api:
    def __init__(self, ledger: Ledger, profiles: HarnessProfiles, press: Press, meter: Meter) -> None:
        self._store = ledger.store
        self._ledger = ledger
        self._profiles = profiles
        self._reader = Reader(ledger)
        self._press = press
        self._meter = meter

    async def sessions(self, _request: web.Request) -> web.StreamResponse:
        return answer({"sessions": [self._object(info) async for info in self._store.sessions()]})

    async def session(self, request: web.Request) -> web.StreamResponse:
        return answer(self._object(await self._reader.info(request)))

    async def turns(self, request: web.Request) -> web.StreamResponse:
        info = await self._reader.info(request)
        return answer({"session": info.id, "turns": [turn_object(turn) for turn in await self._store.turns(info.id)]})

    async def trajectories(self, request: web.Request) -> web.StreamResponse:
        wanted = format_named(request.query.get("format", "native"))
        mode = mode_named(request.query.get("drift", "sequences" if wanted.name == "native" else "off"))
        info = await self._reader.info(request)
        records = await self._reader.records(info, contexts=wanted.reads_contexts or mode != "off")
        if mode != "off":
            records = await self._meter.measured(records, mode)
        return web.Response(body=await self._press.write(records, wanted.name), content_type="application/json")

    async def drift(self, request: web.Request) -> web.StreamResponse:
        mode = mode_named(request.query.get("drift", "turns"))
        records = await self._reader.records(await self._reader.info(request), contexts=True)
        measured = await self._meter.measured(records, mode)
        turns = {turn: drift_object(one) for turn, one in measured.drift.items()}
        return answer({"session": records.info.id, "turns": turns, "unmeasured": measured.unmeasured})

    async def seal(self, request: web.Request) -> web.StreamResponse:
        name = check_name(request.match_info["session"])
        if not await self._store.seal(name):
            raise no_session(name)
        return answer({"session": name, "sealed": True})

    async def delete(self, request: web.Request) -> web.StreamResponse:
        name = check_name(request.match_info["session"])
        reuse = flag(request, "reuse")
        known = await self._ledger.delete(name, reuse=reuse)
        if not known and not reuse:  # a name that may be used again is what was asked for, whether it was used or not
            raise no_session(name)
        return answer({"session": name, "deleted": known})

    async def keys(self, request: web.Request) -> web.StreamResponse:
        try:
            binding = msgspec.json.decode(await request.read(), type=Binding, strict=True)
        except msgspec.ValidationError as why:
            wanted = '{"session": "<name>", "harness"?: "<adapter>", "models"?: {…}, "sampling"?: {…}, "budget"?: {…}}'
            raise HarnessError(f"a body {wanted} is needed: {why}") from None
        except (ValueError, RecursionError) as why:
            raise HarnessError(f"the request body is not valid JSON: {why}") from None
        check_name(binding.session)
        self._profiles.leniency(binding.harness)
        try:
            check_policy(binding.sampling)
        except ValueError as why:
            raise HarnessError(f"sampling: {why}", param="sampling") from None
        key = REGISTERED_KEY + secrets.token_urlsafe(32)
        await self._store.lift_tombstone(binding.session)  # of a deleted session: its name is wanted again
        await self._store.bind_key(hash_key(key), binding)
        return answer({**msgspec.to_builtins(binding), "key": key, "id": hash_key(key)}, status=201)

    async def revoke(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["key"]
        if not await self._store.unbind_key(name):
            raise HarnessError(f"there is no key with the id {name[:80]!r}", status=404, kind="not_found_error")
        return answer({"id": name, "revoked": True})

    def _object(self, info: SessionInfo) -> dict[str, Any]:
        owed = self._ledger.owed(info.id)
        return {
            "session": info.id,
            "created": info.created,
            "used": info.used,
            "sealed": info.sealed,
            "turns": info.turns,
            "complete": is_complete(incidents_of(info, owed)),
            "open_calls": [msgspec.to_builtins(call) for call in info.open_calls],
            "incidents": [incident_object(incident) for incident in (*info.incidents, *owed)],
        }


def flag(request: web.Request, name: str) -> bool:
    """Read a parameter of the query that is true or false; false if it is not there.

    Raises:
        HarnessError: it is something else.
    """
    given = request.query.get(name, "false").lower()
    if given not in {"true", "false"}:
        raise HarnessError(f"{name} is true or false, not {given!r}", param=name)
    return given == "true"


def answer(body: Any, status: int = 200) -> web.Response:
    """Answer with JSON."""
    return web.Response(body=_ENCODER.encode(body), status=status, content_type="application/json")
