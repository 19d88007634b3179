"""The bare relay: the least that an aiohttp program can do between a client and an engine. The baseline."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping

import aiohttp
import uvloop
from aiohttp import web

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that go from one connection to the other."""
    return {k: v for k, v in headers.items() if k.lower() not in HOP_BY_HOP}


def begun(answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """Starts the client's response from the head of the engine's answer."""
    return web.StreamResponse(status=answer.status, headers=passed_on(answer.headers))


def pool() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)
    return aiohttp.ClientSession(connector=connector, auto_decompress=False, read_bufsize=256 * 1024)


async def listening(port: int, handler: Handler) -> web.AppRunner:
    """A server for all paths; the caller cleans it up."""
    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    return runner


def serve(program: Callable[..., "Relay"], connect: Callable[[], aiohttp.ClientSession] = pool, **more: bool) -> None:
    """Serves a program until the process ends, as its command line says: PORT UPSTREAM."""

    async def forever() -> None:
        async with connect() as engine:
            await listening(int(sys.argv[1]), program(sys.argv[2], engine, **more).handle)
            await asyncio.Event().wait()

    uvloop.run(forever())


class Relay:
    """Relays every request unchanged."""

    def __init__(self, upstream: str, engine: aiohttp.ClientSession) -> None:
        self.upstream, self.engine = upstream, engine

    async def handle(self, request: web.Request) -> web.StreamResponse:
        url, headers = self.upstream + request.path_qs, passed_on(request.headers)
        async with self.engine.request(request.method, url, headers=headers, data=await request.read()) as answer:
            response = begun(answer)
            if answer.content_length is not None:
                response.content_length = answer.content_length
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response


if __name__ == "__main__":
    serve(Relay)
