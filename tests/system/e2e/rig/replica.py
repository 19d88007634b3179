"""Runs `tokencache serve` in a process of its own, as a deployment does."""

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import aiohttp

from tests.ports import free_port
from tests.support.waiting import PATIENCE, until


@contextlib.asynccontextmanager
async def replica(http, *options):
    """`tokencache serve` with these options, ready; yields its process and URL."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).parent / "tokencache",
        "serve",
        "--port",
        str(port),
        *options,
        env=os.environ | {"TOKENCACHE_LOG_LEVEL": "warning"},
    )
    try:
        await until(lambda: is_ready(http, f"http://127.0.0.1:{port}/readyz"))
        yield process, f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait_for(process.wait(), PATIENCE)


async def is_ready(http, url):
    with contextlib.suppress(aiohttp.ClientError):
        async with http.get(url) as answer:
            return answer.status == 200
    return False
