"""Handlers that list, add, drain and remove engines while the proxy runs (`engine.membership`).

`openapi` lists the routes with their paths. If an admin key is set, each request needs `Authorization: Bearer <admin key>`.
"""

from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web
from yarl import URL

from tokencache.api.auth import AdminAuth
from tokencache.api.http import flag, json_response, read_body
from tokencache.api.openapi import EngineUrl, register
from tokencache.engine.health import EngineMonitor
from tokencache.engine.membership import EngineMember, EngineMembership
from tokencache.engine.pool import Pool
from tokencache.errors import HarnessError
from tokencache.net import is_base_url


def add_engine_routes(app: web.Application, auth: AdminAuth, membership: EngineMembership, pool: Pool) -> None:
    """Add the routes of engines to an application."""
    api = _EngineApi(membership, pool)
    handlers = {"listEngines": api.list, "addEngine": api.add, "drainEngine": api.drain, "removeEngine": api.remove}
    register(app, auth, handlers)


def engine_object(pool: Pool, monitor: EngineMonitor) -> dict[str, Any]:
    """Write the state of an engine. `error` is the reason if it does not serve. `note` says if no other engine serves its model."""
    found = {capability.model: capability for capability in monitor.engine.capabilities}.values()
    serves = pool.serves(monitor)
    error = "" if serves else pool.why_unused(monitor)
    group = next((group for group in pool.groups.values() if monitor in group.monitors), None)
    note = ""
    if group is not None and len(pool.groups) > 1 and len(group.monitors) == 1:
        note = f"it is the only engine that serves {group.model}: a group of its own, for calls that name this model"
    return {
        "url": monitor.url,
        "serves": serves,
        "error": error,
        "group": group.model if group is not None else "",
        "names": monitor.engine.names,
        "trainable": monitor.engine.trains,
        "note": note,
        "models": [msgspec.to_builtins(capability) for capability in found],
    }


class _EngineApi:
    def __init__(self, membership: EngineMembership, pool: Pool) -> None:
        self._membership, self._pool = membership, pool

    async def list(self, _request: web.Request) -> web.StreamResponse:
        return json_response({"engines": [self._object(member) for member in await self._membership.members()]})

    async def add(self, request: web.Request) -> web.StreamResponse:
        url = await _url_in(request)
        if _is_own(URL(url), request):  # each request would be sent again and again
            raise HarnessError(f"url: {request.host} is the address of this proxy: name the engine's", param="url")
        status = HTTPStatus.CREATED if self._pool.find(url) is None else HTTPStatus.OK
        return json_response(self._object(await self._membership.add(url)), status)

    async def drain(self, request: web.Request) -> web.StreamResponse:
        return json_response(self._object(await self._membership.drain(await _url_in(request))))

    async def remove(self, request: web.Request) -> web.StreamResponse:
        url = _base_url(request.query.get("url", ""))
        await self._membership.remove(url, force=flag(request, "force"))
        return json_response({"url": url, "removed": True})

    def _object(self, member: EngineMember) -> dict[str, Any]:
        return {
            **engine_object(self._pool, member.monitor),
            "state": member.state,
            "calls": member.calls,
            "drained": member.drained,
        }


async def _url_in(request: web.Request) -> str:
    return _base_url((await read_body(request, EngineUrl)).url)


def _is_own(engine: URL, request: web.Request) -> bool:
    """Whether a URL is the one under which a client reached this proxy. A gateway or a forwarded port in between may lead to an engine."""
    address = request.get_extra_info("sockname")
    return engine.authority == request.host and engine.path in {"", "/"} and isinstance(address, tuple) and engine.port == address[1]


def _base_url(given: str) -> str:
    """Return an engine's base URL without `/v1`. The URLs that NeMo RL gives its workers end with it."""
    if not is_base_url(given):
        raise HarnessError(f"url: must be the base URL of an engine, such as http://10.0.0.7:8000, not {given[:200]!r}", param="url")
    if URL(given).user is not None:
        raise HarnessError("url: must not contain a key; set the key for engines with --upstream-key", param="url")
    return given.rstrip("/").removesuffix("/v1")
