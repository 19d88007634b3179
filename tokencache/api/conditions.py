"""The handler that says under which conditions the proxy records: versions, settings, adapters and engines. Exports write it down."""

import hashlib
import platform
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from tokencache import __version__
from tokencache.adapters.schema import Adapter
from tokencache.api.auth import AdminAuth
from tokencache.api.engines import engine_object
from tokencache.api.http import json_response
from tokencache.api.openapi import register
from tokencache.engine.health import EngineMonitor, sample_rendering
from tokencache.engine.model import Model
from tokencache.engine.pool import Pool
from tokencache.engine.template.renderer import RenderError
from tokencache.errors import EngineError
from tokencache.trajectories.values import Conditions


def add_conditions_route(
    app: web.Application, auth: AdminAuth, pool: Pool, adapters: Mapping[str, Adapter], *, settings: Mapping[str, Any], digest: str
) -> None:
    """Add the route to an application. `settings` and `digest` are `Settings.shown` and `Settings.digest`."""
    hashes = {name: hashlib.sha256(msgspec.json.encode(adapter)).hexdigest() for name, adapter in adapters.items()}

    async def conditions(_request: web.Request) -> web.StreamResponse:
        engines = [await _engine(pool, monitor) for monitor in pool.monitors]
        python = platform.python_version()
        found = Conditions(
            version=__version__, python=python, settings=dict(settings), settings_digest=digest, adapters=hashes, engines=engines
        )
        return json_response(found)

    register(app, auth, {"getConditions": conditions})


async def _engine(pool: Pool, monitor: EngineMonitor) -> dict[str, Any]:
    renderings = {model.capability.model: await _rendering(model) for model in monitor.engine.models}
    found = engine_object(pool, monitor)
    models = [{**model, "rendering": renderings.get(model["model"], "")} for model in found["models"]]
    return {**found, "models": models, "weight_label": monitor.engine.weight_label}


async def _rendering(model: Model) -> str:
    if not model.capability.tokenizes:
        return ""
    try:
        return await sample_rendering(model)
    except (EngineError, RenderError):
        return ""
