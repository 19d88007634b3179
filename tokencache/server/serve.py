"""The server: the application on a socket, until told to stop.

`serving` is for tests and for those who embed the proxy; `run` is what `tokencache serve` does in one process, and what each
worker does where there are several (`server.workers`): it raises the limit of open files, stops on SIGTERM and SIGINT, and lets
calls that are under way finish.
"""

import asyncio
import contextlib
import gc
import logging
from collections.abc import AsyncIterator, Callable

from tokencache.config import Settings
from tokencache.server.app import Proxy
from tokencache.server.descriptors import raise_limit
from tokencache.server.drain import CUT_SECONDS, Drain, Stop, patiently
from tokencache.server.http_guard import Runner
from tokencache.server.listener import Door, bind
from tokencache.store.base import Store

log = logging.getLogger(__name__)

QUIET_SECONDS = 1.0
"""For who has a connection and is about to ask, when the server stops: it is told then to go elsewhere."""


@contextlib.asynccontextmanager
async def serving(
    settings: Settings,
    store: Store | None = None,
    *,
    drain_seconds: float = 1.0,
    quiet_seconds: float = 0.0,
    stop: Stop | None = None,
    shared: bool = False,
) -> AsyncIterator[tuple[str, Proxy]]:
    """Serve while the context is open; yields the base URL (without `/v1`) and the proxy.

    On leaving, calls that are under way have `drain_seconds` to finish, unless `stop` says that all must end at once, and
    connections have `quiet_seconds` to ask once more. `shared`: others of this user may listen on the port, too.

    Raises:
        OSError: the address cannot be listened on.
        StoreError: the store cannot be opened.
    """
    stop = stop or Stop()
    proxy = Proxy(settings, store)
    app = proxy.application()
    under_way = Drain(app)
    # handler_cancellation: a harness that leaves ends its call, and with it the generation.
    # auto_decompress: a compressed body goes on as it came.
    runner = Runner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=CUT_SECONDS,
        max_line_size=64 * 1024,
        max_field_size=64 * 1024,
        auto_decompress=False,
    )
    sockets = bind(settings.host, settings.port, shared=shared)
    port = sockets[0].getsockname()[1]
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    try:
        await runner.setup()
        server = runner.server
        assert server is not None  # noqa: S101 - it is made by `setup`
        door = Door(server, sockets)
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    loop = asyncio.get_running_loop()
    try:
        door.open()
        yield f"http://{host}:{port}", proxy
    finally:
        until = loop.time() + drain_seconds
        under_way.begin()
        door.close()
        await patiently(under_way.rest(quiet_seconds if server.connections else 0.0), until, stop.at_once)
        await under_way.cut()
        await patiently(proxy.ledger.settled(), until, stop.at_once)
        await runner.cleanup()


def _settle_memory() -> None:
    """Take what is there now for good: the collector need not look at it again, nor look so often; calls leave few cycles behind."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


async def run(settings: Settings, stop: Stop | None = None, *, shared: bool = False, ready: Callable[[], None] = lambda: None) -> None:
    """Serve until told to stop: by `stop`, and by SIGTERM or SIGINT in any case. `ready` is called once it listens.

    Raises:
        OSError: the address cannot be listened on.
        StoreError: the store cannot be opened.
    """
    raise_limit()
    stop = stop or Stop()
    stop.on_signals()
    async with serving(settings, drain_seconds=settings.drain, quiet_seconds=QUIET_SECONDS, stop=stop, shared=shared) as (url, proxy):
        urls = ", ".join(monitor.url for monitor in proxy.pool.monitors)  # never a password
        engines = f"the engine at {urls}" if urls else "no engine yet (add one: POST /tokencache/v1/engines)"
        where = settings.store.rpartition("@")[2]
        log.info("tokencache listens on %s for %s, store %s", url, engines, where)
        _settle_memory()
        ready()
        await stop.asked.wait()
        log.info("stopping: calls that are under way may finish")
