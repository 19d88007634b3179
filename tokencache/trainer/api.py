"""The trainer's routes.

    GET    /tokencache/v1/sessions                         all sessions
    GET    /tokencache/v1/sessions/{id}                    one session: counts, open calls, incidents
    GET    /tokencache/v1/sessions/{id}/turns              its turns, in the order they were recorded
    GET    /tokencache/v1/sessions/{id}/trajectories       its sequences (`?format=native`)
    POST   /tokencache/v1/sessions/{id}/seal               take no more calls
    DELETE /tokencache/v1/sessions/{id}                    forget it
    POST   /tokencache/v1/keys  {"session": …}             an API key that stands for a session; also "harness", whose
                                                           habits are forgiven, and "models", {"claude-*": "qwen3"}

With an admin key set, each needs `Authorization: Bearer <admin key>`.
"""

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from tokencache.errors import HarnessError
from tokencache.proxy.habits import Habits
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.sessions import REGISTERED, check_name, hash_key
from tokencache.store.contract import Binding, SessionInfo, Store
from tokencache.trainer.native import incident_object, trajectory, turn_object

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

BASE = "/tokencache/v1"
FORMATS = ("native",)
_ENCODER = msgspec.json.Encoder()


def trainer_routes(app: web.Application, store: Store, ledger: Ledger, habits: Habits, *, admin_key: str | None) -> None:
    """Add the trainer's routes to an application."""
    api = _Api(store, ledger, habits)

    def guarded(handler: Handler) -> Handler:
        async def guard(request: web.Request) -> web.StreamResponse:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
            if admin_key is not None and not hmac.compare_digest(given.encode(), admin_key.encode()):
                raise HarnessError("this needs the admin key: Authorization: Bearer …", status=401, kind="authentication_error")
            return await handler(request)

        return guard

    one = BASE + "/sessions/{session}"
    app.router.add_get(BASE + "/sessions", guarded(api.sessions))
    app.router.add_get(one, guarded(api.session))
    app.router.add_get(one + "/turns", guarded(api.turns))
    app.router.add_get(one + "/trajectories", guarded(api.trajectories))
    app.router.add_post(one + "/seal", guarded(api.seal))
    app.router.add_delete(one, guarded(api.delete))
    app.router.add_post(BASE + "/keys", guarded(api.keys))
    app.router.add_route("*", "/tokencache/{rest:.*}", guarded(_unknown))


async def _unknown(request: web.Request) -> web.StreamResponse:
    raise HarnessError(f"there is no {request.method} {request.path}; see {BASE}/sessions", status=404, kind="not_found_error")


class _Api:
    def __init__(self, store: Store, ledger: Ledger, habits: Habits) -> None:
        self._store = store
        self._habits = habits
        self._ledger = ledger

    async def sessions(self, _request: web.Request) -> web.StreamResponse:
        return _json({"sessions": [self._object(info) async for info in self._store.sessions()]})

    async def session(self, request: web.Request) -> web.StreamResponse:
        return _json(self._object(await self._info(request)))

    async def turns(self, request: web.Request) -> web.StreamResponse:
        info = await self._info(request)
        return _json({"session": info.id, "turns": [turn_object(turn) for turn in await self._store.turns(info.id)]})

    async def trajectories(self, request: web.Request) -> web.StreamResponse:
        wanted = request.query.get("format", "native")
        if wanted not in FORMATS:
            raise HarnessError(f"format {wanted!r} is not one of: {', '.join(FORMATS)}", param="format")
        info = await self._info(request)
        turns = await self._store.turns(info.id)
        try:
            tokens = await self._store.tokens(info.id, [turn.id for turn in turns]) if turns else {}
        except KeyError:
            raise _no_session(info.id) from None  # deleted just now
        # A long session takes a while to lay out, and live calls must not wait for it.
        body = await asyncio.to_thread(lambda: _ENCODER.encode(trajectory(info, turns, tokens, self._ledger.owed(info.id))))
        return web.Response(body=body, content_type="application/json")

    async def seal(self, request: web.Request) -> web.StreamResponse:
        name = _name(request)
        if not await self._store.seal(name):
            raise _no_session(name)
        return _json({"session": name, "sealed": True})

    async def delete(self, request: web.Request) -> web.StreamResponse:
        name = _name(request)
        if not await self._store.delete(name):
            raise _no_session(name)
        return _json({"session": name, "deleted": True})

    async def keys(self, request: web.Request) -> web.StreamResponse:
        try:
            binding = msgspec.json.decode(await request.read(), type=Binding, strict=True)
        except msgspec.ValidationError as why:
            raise HarnessError(f'a body {{"session": "<name>", "harness"?: "<adapter>", "models"?: {{…}}}} is needed: {why}') from None
        except msgspec.DecodeError as why:
            raise HarnessError(f"the request body is not valid JSON: {why}") from None
        check_name(binding.session)
        self._habits.leniency(binding.harness)
        key = REGISTERED + secrets.token_urlsafe(32)
        await self._store.bind_key(hash_key(key), binding)
        return _json({**msgspec.to_builtins(binding), "key": key}, status=201)

    async def _info(self, request: web.Request) -> SessionInfo:
        name = _name(request)
        info = await self._store.session(name)
        if info is not None:
            return info
        if self._ledger.owed(name):  # the store failed before the session could begin: the trainer must see it all the same
            return SessionInfo(name, 0.0, 0.0, False, 0, (), ())
        raise _no_session(name)

    def _object(self, info: SessionInfo) -> dict[str, Any]:
        incidents = [*info.incidents, *self._ledger.owed(info.id)]
        return {
            "session": info.id,
            "created": info.created,
            "used": info.used,
            "sealed": info.sealed,
            "turns": info.turns,
            "complete": not info.open_calls and not any(incident.hole for incident in incidents),
            "open_calls": [msgspec.to_builtins(call) for call in info.open_calls],
            "incidents": [incident_object(incident) for incident in incidents],
        }


def _name(request: web.Request) -> str:
    return check_name(request.match_info["session"])


def _no_session(name: str) -> HarnessError:
    return HarnessError(f"there is no session {name!r}", status=404, kind="not_found_error")


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=_ENCODER.encode(body), status=status, content_type="application/json")
