"""Handlers for the weights of the engines: what trainers announce, and updates that the proxy carries out (`engine.weight_updates`)."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus

from aiohttp import web

from tokencache.api.auth import AdminAuth
from tokencache.api.http import json_response, read_body
from tokencache.api.openapi import register
from tokencache.api.requests import FinishedUpdate, NewUpdate, NewVersion
from tokencache.core.weights import RESERVED, EngineWeights, Update, UpdateConflictError, VersionSource, WeightsPhase, WeightsState
from tokencache.engine.announced_weights import AnnouncedWeights
from tokencache.engine.health import EngineMonitor
from tokencache.engine.pool import Pool
from tokencache.engine.weight_updates import WeightUpdates
from tokencache.errors import HarnessError
from tokencache.proxy.policy_version import UNKNOWN_HINT
from tokencache.store.clock import RECORD_CLOCK
from tokencache.trajectories.values import EngineWeightsInfo, WeightsInfo


def add_weight_routes(app: web.Application, auth: AdminAuth, announced: AnnouncedWeights, pool: Pool) -> None:
    """Add the routes of weights to an application."""
    api = _WeightsApi(announced, pool)
    handlers = {
        "getWeights": api.show,
        "setWeights": api.announce,
        "beginWeightUpdate": api.begin,
        "finishWeightUpdate": api.finish,
        "cancelWeightUpdate": api.cancel,
    }
    register(app, auth, handlers)


class _WeightsApi:
    def __init__(self, announced: AnnouncedWeights, pool: Pool) -> None:
        self._announced, self._pool = announced, pool
        self._updates = WeightUpdates(announced)

    async def show(self, _request: web.Request) -> web.StreamResponse:
        return json_response(self._info(await self._announced.read()))

    async def announce(self, request: web.Request) -> web.StreamResponse:
        given = await read_body(request, NewVersion)
        engines, now = self._known(given.engines), RECORD_CLOCK.now()
        with _refusals():
            if given.phase == "updating":
                mode = "" if given.mode == "none" else given.mode
                clears = bool(mode) and given.clear_cache
                update = Update(secrets.token_hex(8), given.owner, now, now + given.timeout, engines, mode=mode, clears_cache=clears)
                return json_response(self._info(await self._updates.begin(update)))
            version, lost = str(given.version), await self._announced.silent(engines)
            state = await self._announced.change(
                lambda latest: latest.announce(version, RECORD_CLOCK.now(), engines=engines, owner=given.owner, lost=lost)
            )
            return json_response(self._info(state))

    async def begin(self, request: web.Request) -> web.StreamResponse:
        given = await read_body(request, NewUpdate)
        name, now, paused = given.id or secrets.token_hex(8), RECORD_CLOCK.now(), given.mode != "none"
        update = Update(
            id=name,
            owner=given.owner,
            since=now,
            until=now + given.timeout,
            engines=self._known(given.engines),
            paused=paused,
            mode=given.mode if paused else "",
            clears_cache=paused and given.clear_cache,
        )
        with _refusals():
            return json_response(self._info(await self._updates.begin(update)), HTTPStatus.CREATED)

    async def finish(self, request: web.Request) -> web.StreamResponse:
        given = await read_body(request, FinishedUpdate)
        with _refusals():
            return json_response(self._info(await self._updates.end(request.match_info["update"], str(given.version))))

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        with _refusals():
            return json_response(self._info(await self._updates.end(request.match_info["update"], "")))

    def _known(self, engines: Sequence[str]) -> tuple[str, ...]:
        found = tuple(url.rstrip("/").removesuffix("/v1") for url in engines)
        for url in found:
            if self._pool.find(url) is None:
                message = f"engines: there is no engine {url}; `tokencache weights show` lists them (GET /tokencache/v1/engines)"
                raise HarnessError(message, status=HTTPStatus.NOT_FOUND, param="engines", kind="not_found_error")
        return found

    def _info(self, state: WeightsState) -> WeightsInfo:
        update = state.under_way
        engines = [engine_weights(state, monitor) for monitor in self._pool.monitors]
        ready = WeightsPhase.READY if state.current else WeightsPhase.UNKNOWN
        return WeightsInfo(
            version=state.current,
            phase=WeightsPhase.UPDATING if update is not None else ready,
            update=state.last,
            engines=engines,
            id=update.id if update is not None else "",
            owner=update.owner if update is not None else "",
            until=update.until if update is not None else None,
            history=list(state.history),
        )


def engine_weights(state: WeightsState, monitor: EngineMonitor) -> EngineWeightsInfo:
    """Describe what is known of an engine's weights, from what is announced and the label that the engine reported last."""
    known = state.of(monitor.url) if monitor.engine.trains else EngineWeights()
    label = monitor.engine.weight_label
    version, source = known.version, VersionSource.TRAINER
    if not known.update and not known.updating and label not in RESERVED:
        version, source = label, VersionSource.ENGINE
    phase = known.phase if known.updating or not version else WeightsPhase.READY
    if phase is WeightsPhase.UNKNOWN:
        return EngineWeightsInfo(url=monitor.url, version="", phase=phase, hint=UNKNOWN_HINT)
    return EngineWeightsInfo(url=monitor.url, version=version, phase=phase, source=source if version else "")


@contextmanager
def _refusals() -> Iterator[None]:
    """Answer a transition that is not legal with a refusal that says what to do."""
    try:
        yield
    except UpdateConflictError as why:
        raise HarnessError(_conflict(why.update), status=HTTPStatus.CONFLICT, kind="weights_conflict") from None
    except ValueError as why:
        raise HarnessError(f"version: {why}", status=HTTPStatus.UNPROCESSABLE_ENTITY, param="version") from None


def _conflict(update: Update | None) -> str:
    if update is None:
        return (
            "no such update of the weights is under way: it was finished or cancelled, or its timeout has passed. If the engines have the "
            "new weights, announce their version: `tokencache weights set VERSION`, or PUT /tokencache/v1/weights"
        )
    if update.ended:
        return f"the engines of the last update, by {update.owner or 'another trainer'!r}, are being resumed; send this request again"
    return (
        f"{update.owner or 'another trainer'!r} is updating the weights; its update ends by itself in "
        f"{max(0.0, update.until - RECORD_CLOCK.now()):.0f} s. Wait for it, or send the same owner to take part in it"
    )
