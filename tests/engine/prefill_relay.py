"""A proxy that disaggregates prefill and decode, as llm-d's sidecar and vllm-router do: it puts its own `kv_transfer_params` into requests.

Each request that samples goes to the prefill engine with a limit of one token, and then to the decode engine with the `kv_transfer_params`
of that answer (llm-d-router, `pkg/sidecar/proxy/connector_nixlv2.go`). All other requests go to the decode engine unchanged.
"""

import contextlib
import json

import aiohttp
from aiohttp import web

from tests.engine.listening import listening

CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"
SAMPLING = frozenset({CHAT, "/v1/completions", GENERATE})
OF_THE_PROXY = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
OF_ONE_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}


class PrefillRelay:
    """Relays to the engines at two URLs. Requests of fewer than `shortest` bytes go to the decode engine only.

    `prefilled` has the path of each request that went to both.
    """

    def __init__(self, prefill, decode, *, shortest=0):
        self.prefill, self.decode, self.shortest = prefill, decode, shortest
        self.prefilled = []

    @contextlib.asynccontextmanager
    async def serve(self):
        """Serve on a free port; yields the base URL."""
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", self._relay)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as self._http, listening(app) as url:
            yield url

    async def _relay(self, request):
        raw = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in OF_ONE_CONNECTION}
        if request.path in SAMPLING and len(raw) >= self.shortest:
            self.prefilled.append(request.path)
            body = json.loads(raw)
            async with self._http.post(self.prefill + request.path, json=one_token(request.path, body), headers=headers) as answer:
                prefilled = await answer.json()
                if answer.status != 200:
                    return web.json_response(prefilled, status=answer.status)
            raw = json.dumps(body | {"kv_transfer_params": prefilled.get("kv_transfer_params")}).encode()
        async with self._http.request(request.method, self.decode + request.path_qs, data=raw, headers=headers) as answer:
            head = {name: value for name, value in answer.headers.items() if name.lower() not in OF_ONE_CONNECTION}
            response = web.StreamResponse(status=answer.status, headers=head)
            await response.prepare(request)
            async for part in answer.content.iter_any():
                await response.write(part)
            await response.write_eof()
            return response


def one_token(path, body):
    """The request for the prefill engine."""
    asked = body | {"kv_transfer_params": OF_THE_PROXY, "stream": False}
    asked.pop("stream_options", None)
    if path == GENERATE:
        return asked | {"sampling_params": limited(asked["sampling_params"])}
    return limited(asked)


def limited(members):
    return {name: value for name, value in members.items() if name not in {"max_completion_tokens", "min_tokens"}} | {"max_tokens": 1}
