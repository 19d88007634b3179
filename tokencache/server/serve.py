"""Runs the proxy on a socket until it receives a signal to stop.

`serving` is for tests and for programs that embed the proxy. `run` is for `tokencache serve` in one process, and for each of several
workers (`server.workers`). It raises the limit of open files, stops on SIGTERM and SIGINT, and lets calls in progress finish.
"""

import asyncio
import contextlib
import gc
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial

from tokencache.config import Settings
from tokencache.server.app import Proxy
from tokencache.server.drain import CANCEL_SECONDS, Drain, StopSignal, run_until
from tokencache.server.http_guard import GuardedRunner
from tokencache.server.listener import Listener, bind, raise_file_limit
from tokencache.server.routing import send_errors
from tokencache.store.base import Store

log = logging.getLogger(__name__)

LAST_REQUEST_SECONDS = 1.0
"""How long a stopping server waits for requests on open connections. Their responses close the connection."""


@contextlib.asynccontextmanager
async def serving(
    settings: Settings,
    store: Store | None = None,
    *,
    drain_seconds: float = 1.0,
    last_request_seconds: float = 0.0,
    stop: StopSignal | None = None,
    shared: bool = False,
) -> AsyncIterator[tuple[str, Proxy]]:
    """Serve while the context is open. Yields the base URL (without `/v1`) and the proxy.

    Args:
        settings: settings of the proxy.
        store: store to use instead of the one that the settings name.
        drain_seconds: time for requests in progress to finish when the context is left.
        last_request_seconds: how long open connections may send another request when the context is left.
        stop: its second signal cancels the requests in progress at once.
        shared: whether other processes of this user may listen on the port too.

    Raises:
        OSError: the address is in use or does not exist.
        StoreError: the store cannot be opened.
    """
    stop = stop or StopSignal()
    proxy = Proxy(settings, store)
    app = proxy.application()
    drain = Drain(app)
    # handler_cancellation: a client that disconnects ends its call, and with it the generation.
    # auto_decompress: a compressed body is forwarded as it was received.
    runner = GuardedRunner(
        app,
        lambda handler: drain.tracked(partial(send_errors, handler=handler)),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=CANCEL_SECONDS,
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
        assert server is not None  # noqa: S101 - `setup` makes it
        listener = Listener(server, sockets)
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    loop = asyncio.get_running_loop()
    try:
        listener.open()
        yield f"http://{host}:{port}", proxy
    finally:
        deadline = loop.time() + drain_seconds
        drain.begin()
        proxy.ledger.changed.close()
        proxy.router.sockets.close()
        listener.close()
        await run_until(drain.wait_idle(last_request_seconds if server.connections else 0.0), deadline, stop.at_once)
        await drain.cancel()
        await run_until(proxy.ledger.settled(), deadline, stop.at_once)
        await runner.cleanup()


def freeze_memory() -> None:
    """Exclude present objects from garbage collection, and collect less often: calls leave few cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


async def run(
    settings: Settings, stop: StopSignal | None = None, *, shared: bool = False, ready: Callable[[], None] = lambda: None
) -> None:
    """Serve until SIGTERM or SIGINT, or until `stop`. Calls `ready` once it listens.

    Raises:
        OSError: the address is in use or does not exist.
        StoreError: the store cannot be opened.
    """
    raise_file_limit()
    stop = stop or StopSignal()
    stop.on_signals()
    seconds = LAST_REQUEST_SECONDS
    async with serving(settings, drain_seconds=settings.drain, last_request_seconds=seconds, stop=stop, shared=shared) as (url, proxy):
        urls = ", ".join(monitor.url for monitor in proxy.pool.monitors)
        engines = f"the engine at {urls}" if urls else "no engine yet (add one: POST /tokencache/v1/engines)"
        where = settings.shown.get("store", settings.store)  # without its password
        public = f" (harnesses: {settings.public_url})" if settings.public_url else ""
        log.info("tokencache listens on %s%s for %s, store %s", url, public, engines, where)
        freeze_memory()
        ready()
        await stop.requested.wait()
        log.info("stopping: calls in progress may finish")
