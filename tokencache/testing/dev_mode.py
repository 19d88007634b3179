"""Simulates the routes with which a trainer replaces weights: those of vLLM 0.32 with `VLLM_SERVER_DEV_MODE=1`.

`POST /pause?mode=` stops the engine: `abort` ends running requests, `keep` freezes them, `wait` lets them end first. Requests that arrive
meanwhile wait. With `clear_cache` (the default) the prefix cache is emptied, and frozen requests are computed again. `POST /resume` ends
it. `GET /weight_info` and `POST /update_weight_version` read and write a label that changes nothing else. `POST /collective_rpc` with the
method `reload_weights` replaces the weights; here the path is their name.
"""

import asyncio
from collections.abc import Callable
from typing import Literal, get_args

from aiohttp import web

from tokencache.testing.chat_request import read_json
from tokencache.testing.weights import SimulatedWeights

PauseMode = Literal["", "abort", "keep", "wait"]


class DevMode:
    """Pauses an engine and replaces its weights. `abort` ends all running requests; `running` counts those that do not wait.

    Attributes:
        paused: how the engine is paused; `""` if it is not.
        calls: the routes that were called, with their queries, in order.
    """

    def __init__(self, weights: SimulatedWeights, abort: Callable[[], None], running: Callable[[], int]) -> None:
        self._weights, self._abort, self._running = weights, abort, running
        self.paused: PauseMode = ""
        self.calls: list[str] = []
        self._changed = asyncio.Event()

    def routes(self) -> list[web.RouteDef]:
        """The routes."""
        return [
            web.post("/pause", self._pause), web.post("/resume", self._resume), web.get("/is_paused", self._is_paused),
            web.post("/abort_requests", self._abort_requests), web.post("/reset_prefix_cache", self._reset),
            web.get("/weight_info", self._info), web.post("/update_weight_version", self._label),
            web.post("/collective_rpc", self._collective),
        ]  # fmt: skip

    def notify(self) -> None:
        """Wake up all that wait in `change`."""
        self._changed.set()
        self._changed = asyncio.Event()

    def holds(self, *, queued: bool) -> bool:
        """Whether a request may not sample now: one that arrived while the engine was paused (`queued`), or that is frozen."""
        return self.paused == "keep" or (queued and bool(self.paused))

    async def change(self) -> None:
        """Wait until something changes: the engine is paused or resumed, or a request ends."""
        await self._changed.wait()

    async def _pause(self, http: web.Request) -> web.Response:
        mode = http.query.get("mode", "abort")
        if mode not in get_args(PauseMode) or not mode:
            return web.json_response({"error": f"mode: {mode}"}, status=422)
        self.calls.append(f"pause {mode}")
        self.paused = mode  # type: ignore[assignment]  # tested above
        if mode == "abort":
            self._abort()
        self.notify()
        while mode in {"wait", "abort"} and self._running():
            await self._changed.wait()
        if http.query.get("clear_cache", "true") == "true":
            self._weights.clear(running=True)
        return web.json_response({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        self.calls.append("resume")
        self.paused = ""
        self.notify()
        return web.json_response({"status": "resumed"})

    async def _is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": bool(self.paused)})

    async def _abort_requests(self, _: web.Request) -> web.Response:
        self.calls.append("abort_requests")
        ended = self._running()
        self._abort()
        self.notify()
        return web.json_response({"status": "aborted", "aborted": ended})

    async def _reset(self, http: web.Request) -> web.Response:
        running = http.query.get("reset_running_requests") == "true"
        if self._running() and not running:
            return web.json_response({"success": False})
        self._weights.clear(running=running)
        return web.json_response({"success": True})

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._weights.label})

    async def _label(self, http: web.Request) -> web.Response:
        version = read_json(await http.read(), http.content_type)["new_version"]
        self.calls.append(f"update_weight_version {version}")
        self._weights.label = version
        return web.json_response({"success": True, "new_version": version})

    async def _collective(self, http: web.Request) -> web.Response:
        body = read_json(await http.read(), http.content_type)
        self.calls.append(f"{body['method']} {body['kwargs']['weights_path']}")
        self._weights.loaded = body["kwargs"]["weights_path"]
        return web.json_response({"results": [None]})
