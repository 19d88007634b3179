"""The trainer's routes for engines that come and go while the proxy runs (`engine.roster`).

`openapi` lists them with their paths. With an admin key set, each needs `Authorization: Bearer <admin key>`.
"""

from typing import Any

import msgspec
from aiohttp import web
from yarl import URL

from tokencache.api.auth import Guard
from tokencache.api.openapi import EngineUrl, register
from tokencache.api.routes import answer, flag
from tokencache.engine.health import Watch
from tokencache.engine.pool import Pool
from tokencache.engine.roster import Member, Roster
from tokencache.errors import HarnessError


def engine_routes(app: web.Application, roster: Roster, pool: Pool, *, admin_key: str | None) -> None:
    """Add the routes to an application."""
    guard, api = Guard(admin_key), _Api(roster, pool)
    handlers = {"listEngines": api.list, "addEngine": api.add, "drainEngine": api.drain, "removeEngine": api.remove}
    register(app, guard, handlers)


def engine_object(pool: Pool, watch: Watch) -> dict[str, Any]:
    """What is known of an engine: `error` says why it does not serve."""
    found = {capability.model: capability for capability in watch.engine.capabilities}.values()
    serves = pool.serves(watch)
    why = "" if serves else pool.why_not(watch)
    return {"url": watch.url, "serves": serves, "error": why, "models": [msgspec.to_builtins(capability) for capability in found]}


class _Api:
    def __init__(self, roster: Roster, pool: Pool) -> None:
        self._roster, self._pool = roster, pool

    async def list(self, _request: web.Request) -> web.StreamResponse:
        return answer({"engines": [self._object(member) for member in await self._roster.members()]})

    async def add(self, request: web.Request) -> web.StreamResponse:
        url = await _url_in(request)
        status = 201 if self._pool.find(url) is None else 200
        return answer(self._object(await self._roster.add(url)), status)

    async def drain(self, request: web.Request) -> web.StreamResponse:
        return answer(self._object(await self._roster.drain(await _url_in(request))))

    async def remove(self, request: web.Request) -> web.StreamResponse:
        url = _checked(request.query.get("url", ""))
        await self._roster.remove(url, force=flag(request, "force"))
        return answer({"url": url, "removed": True})

    def _object(self, member: Member) -> dict[str, Any]:
        return {
            **engine_object(self._pool, member.watch),
            "state": member.state,
            "calls": member.calls,
            "drained": member.drained,
        }


async def _url_in(request: web.Request) -> str:
    try:
        return _checked(msgspec.json.decode(await request.read(), type=EngineUrl).url)
    except (msgspec.ValidationError, ValueError, RecursionError) as why:
        raise HarnessError(f'a body {{"url": "http://HOST:PORT"}} is needed: {why}') from None


def _checked(given: str) -> str:
    """An engine's base URL as the proxy knows it: without `/v1`, which NeMo RL's workers say with it."""
    try:
        url = URL(given)
    except ValueError:
        url = URL()
    if url.scheme not in {"http", "https"} or not url.host or url.query_string or url.fragment or " " in given:
        raise HarnessError(f"url: a base URL of an engine is needed, such as http://10.0.0.7:8000, not {given[:200]!r}", param="url")
    if url.user is not None:
        raise HarnessError("url: a key for engines is set with --upstream-key, and does not stand in the URL", param="url")
    return given.rstrip("/").removesuffix("/v1")
