"""Measures what clients that hold on to sockets and memory cost a proxy: `python bench/limits.py` (docs/budgets.md has the figures).

Each scenario starts `tokencache serve` anew, and prints the highest memory of its process and what the clients were answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import resource
import sys
import time
from collections import Counter
from pathlib import Path

import aiohttp
from aiohttp import web

SERVE = """
from tokencache.proxy.fetched_media import FetchedMedia
FetchedMedia.__init__.__defaults__ = (lambda address: True,)  # the images are on this machine
from tokencache.cli import app
app()
"""
MB = 1_000_000
BODY, IMAGE, REPLY = 62 * MB, int(19.9 * MB), 300 * MB
PATIENCE = 20.0
CHAT = "/v1/chat/completions"


async def engine(request: web.Request) -> web.StreamResponse:
    """Serve images, and huge whole replies."""
    if request.path.endswith(".png"):
        return web.Response(body=bytes(IMAGE), content_type="image/png")
    if "EPISODE" not in (body := await request.text()):
        return web.Response(status=404)
    del body
    choice = {"index": 0, "message": {"role": "assistant", "content": "x" * REPLY}, "finish_reason": "stop", "token_ids": [5, 6]}
    said = {"id": "c", "object": "chat.completion", "created": 1, "model": "sim", "choices": [choice], "prompt_token_ids": [1, 2]}
    return web.json_response({**said, "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}})


class Proxy:
    """A process that serves."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process, self.port = process, port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def memory(self, what: str = "VmHWM") -> str:
        """The highest memory of the process, or with `VmRSS` that of now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (size,) = re.findall(rf"{what}:\s+(\d+) kB", status)
        return f"{int(size) * 1024 / MB:,.0f} MB"


@contextlib.asynccontextmanager
async def proxy(*options: str, files: int = 0):
    """Serve an engine, and a proxy before it."""
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", engine)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    up = f"http://127.0.0.1:{runner.addresses[0][1]}"
    limit = (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))) if files else None
    command = [sys.executable, "-c", SERVE, "serve", "--port", "0", "--upstream", up, *options]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, preexec_fn=limit)
    line = b"-"
    while line and not (found := re.search(rb"listens on http://127.0.0.1:(\d+)", line)):
        line = await process.stderr.readline()
    reading = asyncio.create_task(process.stderr.read())
    try:
        yield Proxy(process, int(found.group(1))), up
    finally:
        process.kill()
        await process.wait()
        await reading
        await runner.cleanup()


async def idle(sockets: int, files: int) -> None:
    """Open sockets that send nothing; then ask whether the proxy lives."""
    async with proxy(files=files) as (served, _):
        held = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(sockets)]
        begun = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE), aiohttp.ClientSession() as http, http.get(f"{served.url}/healthz") as answer:
                said = f"{answer.status} after {time.monotonic() - begun:.1f} s"
        except TimeoutError:
            said = f"no answer within {PATIENCE:g} s"
        print(f"{sockets} idle sockets, {files} files: /healthz: {said}")
        for _, writer in held:
            writer.close()


async def stall(served: Proxy, session: str) -> str:
    """Send most of a body, and stop. Returns the first line of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    head = f"POST /s/{session}{CHAT} HTTP/1.1\r\nHost: h\r\nContent-Length: {BODY + 1}\r\n\r\n"
    writer.write(head.encode())
    try:
        for _ in range(BODY // MB):
            writer.write(bytes(MB))
            await writer.drain()
        async with asyncio.timeout(PATIENCE):
            return (await reader.readline()).decode().strip()
    except TimeoutError:
        return "none yet"
    except ConnectionError:
        return (await reader.readline()).decode().strip() or "closed"
    finally:
        writer.close()


async def bodies(count: int, *options: str, keys: int) -> None:
    """Bodies that stop before their end."""
    async with proxy(*options) as (served, _):
        answers = await asyncio.gather(*(stall(served, f"s{n % keys}") for n in range(count)))
        print(f"{count} bodies of 62 MB that stop, {keys} sessions, {options}: {served.memory()}; answers: {dict(Counter(answers))}")


async def media(*options: str) -> None:
    """One small request with 64 large images."""
    async with proxy("--fetch-media", *options) as (served, up), aiohttp.ClientSession() as http:
        parts = [{"type": "image_url", "image_url": {"url": f"{up}/{n}.png"}} for n in range(64)]
        body = {"model": "sim", "messages": [{"role": "user", "content": parts}]}
        async with http.post(f"{served.url}/s/s{CHAT}", json=body) as answer:
            said = f"{answer.status} {(await answer.text())[:120]}"
        print(f"64 images of 19.9 MB, {options}: {served.memory()}; {said}")


async def replies(count: int, *options: str) -> None:
    """Whole replies of 300 MB, at the same time."""
    async with proxy(*options) as (served, _), aiohttp.ClientSession() as http:

        async def ask(number: int) -> int:
            body = json.dumps({"model": "sim", "messages": [{"role": "user", "content": "EPISODE"}]})
            async with http.post(f"{served.url}/s/s{number}{CHAT}", data=body, headers={"Content-Type": "application/json"}) as answer:
                async for _ in answer.content.iter_any():
                    pass
                return answer.status

        answers = Counter(await asyncio.gather(*map(ask, range(count))))
        print(f"{count} whole replies of 300 MB, {options}: {served.memory()}; answers: {dict(answers)}")


async def main() -> None:
    """Measure, with the default limit and, if the proxy has it, with 256 MiB."""
    small = ("--request-memory", str(2**28))
    limits = [(), small] if "--old" not in sys.argv else [()]
    await idle(200, 400)
    await idle(400, 400)
    for options in limits:
        await bodies(20, *options, keys=1)
        await bodies(20, *options, keys=20)
        await media(*options)
        await replies(4, *options)


if __name__ == "__main__":
    asyncio.run(main())
