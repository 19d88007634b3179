"""Handlers of the routes about runs. `trajectories.runs` computes the figures."""

import asyncio

from aiohttp import web

from tokencache.api.auth import AdminAuth
from tokencache.api.gauges import Gauges
from tokencache.api.http import finite, flag, json_response, not_found, number
from tokencache.api.openapi import register
from tokencache.api.summaries import SessionList
from tokencache.store.clock import RECORD_CLOCK
from tokencache.trajectories.reports import PASSING
from tokencache.trajectories.runs import Asked, list_runs, report, selected
from tokencache.trajectories.summaries import SessionSummary

_MOST_RUNS = 1000
_MOST_GROUPS = 1000


def add_run_routes(app: web.Application, auth: AdminAuth, listing: SessionList, gauges: Gauges) -> None:
    """Add the routes about runs to an application."""
    api = _RunsApi(listing, gauges)
    register(app, auth, {"listRuns": api.runs, "reportRun": api.report})


class _RunsApi:
    def __init__(self, listing: SessionList, gauges: Gauges) -> None:
        self._list, self._gauges = listing, gauges

    async def runs(self, request: web.Request) -> web.StreamResponse:
        found = await asyncio.to_thread(list_runs, await self._sessions(request))
        return json_response({"runs": found[:_MOST_RUNS]})

    async def report(self, request: web.Request) -> web.StreamResponse:
        asked = Asked(
            run=request.query.get("run", ""),
            tag=request.query.get("tag", ""),
            passing=finite(request, "passing", PASSING),
            with_failed=flag(request, "failed"),
            offset=number(request, "offset", 0),
            limit=number(request, "limit", 100, most=_MOST_GROUPS),
        )
        sessions = selected(await self._sessions(request), asked)
        if not sessions and (asked.run or asked.tag):
            raise not_found(f"no session is in run {asked.run[:80]!r}" if asked.run else f"no session has the tag {asked.tag[:80]!r}")
        groups = await self._gauges.groups()
        return json_response(await asyncio.to_thread(report, sessions, asked, now=RECORD_CLOCK.now(), queue=groups))

    async def _sessions(self, request: web.Request) -> list[SessionSummary]:
        return await (self._list.recent() if flag(request, "recent") else self._list.now())
