"""Does what a start of the proxy does, up to the first probe of the engines, and describes it: `tokencache serve --dry-run`.

The address is bound and released, and the store is opened. No port listens, no session changes, and other replicas notice nothing.
"""

import json
from collections.abc import Iterator

from tokencache import __version__
from tokencache.api.engines import engine_object
from tokencache.config import Settings
from tokencache.server.app import Proxy
from tokencache.server.listener import bind


async def rehearse(settings: Settings) -> list[str]:
    """Return what would be started and what the probe finds, in lines.

    Raises:
        AdapterError, OSError, StoreError, ValueError: as a start with these settings would.
    """
    proxy = Proxy(settings)
    for sock in bind(settings.host, settings.port, shared=settings.workers > 1):
        sock.close()
    async with proxy.connected():
        await proxy.store.ping()
        for monitor in proxy.pool.monitors:
            await monitor.checked.wait()
        return list(_described(proxy))


def _described(proxy: Proxy) -> Iterator[str]:
    settings = proxy.settings
    workers = "1 worker" if settings.workers == 1 else f"{settings.workers} workers"
    yield f"tokencache {__version__}, {workers}, would listen on {settings.host} port {settings.port or 'of its choice'}"
    if settings.public_url:
        yield f"harnesses would reach it at {settings.public_url}"
    yield f"settings {settings.digest[:16]}: {json.dumps(settings.shown)}"
    yield f"adapters of harnesses: {', '.join(proxy.adapters)}"
    if not proxy.pool.monitors:
        yield "no engine yet (add one: POST /tokencache/v1/engines)"
    for monitor in proxy.pool.monitors:
        found = engine_object(proxy.pool, monitor)
        yield f"engine {monitor.url}: {'ready' if found['serves'] else 'NOT READY: ' + found['error']}"
        yield from dict.fromkeys(f"  {capability.summary()}" for capability in monitor.engine.capabilities)
