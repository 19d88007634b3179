"""The server: the application on a socket, until told to stop.

`serving` is for tests and for those who embed the proxy; `run` is what `tokencache serve` does: it raises the limit of
open files (a streaming rollout needs two), stops on SIGTERM and SIGINT, and lets calls that are under way finish.
"""

import asyncio
import contextlib
import logging
import resource
import signal
from collections.abc import AsyncIterator

from aiohttp import web

from tokencache.config import Settings
from tokencache.proxy.app import Proxy
from tokencache.store.contract import Store

log = logging.getLogger(__name__)

DRAIN_SECONDS = 60.0


@contextlib.asynccontextmanager
async def serving(settings: Settings, store: Store | None = None, *, drain_seconds: float = 1.0) -> AsyncIterator[tuple[str, Proxy]]:
    """Serve while the context is open; yields the base URL (without `/v1`) and the proxy.

    On leaving, calls that are under way have `drain_seconds` to finish.

    Raises:
        OSError: the address cannot be listened on.
        StoreError: the store cannot be opened.
    """
    proxy = Proxy(settings, store)
    # handler_cancellation: a harness that leaves ends its call, and with it the generation.
    # auto_decompress: a compressed body goes on as it came.
    runner = web.AppRunner(
        proxy.application(),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=drain_seconds,
        max_line_size=64 * 1024,
        max_field_size=64 * 1024,
        auto_decompress=False,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, settings.host, settings.port, backlog=4096)
        await site.start()
        port = runner.addresses[0][1]
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        yield f"http://{host}:{port}", proxy
    finally:
        await runner.cleanup()


async def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        OSError: the address cannot be listened on.
        StoreError: the store cannot be opened.
    """
    _raise_file_limit()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    async with serving(settings, drain_seconds=DRAIN_SECONDS) as (url, _):
        where = settings.store.rpartition("@")[2]  # never a password
        log.info("tokencache listens on %s for the engine at %s, store %s", url, settings.upstream, where)
        await stop.wait()
        log.info("stopping: calls that are under way may finish")


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    log.debug("open files: %s, was %s", resource.getrlimit(resource.RLIMIT_NOFILE)[0], soft)
