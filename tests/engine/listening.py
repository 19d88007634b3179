"""A server for a test: on a free port, as long as the context is open."""

import contextlib

from aiohttp import web


@contextlib.asynccontextmanager
async def listening(app, port=0):
    """Serve an application on loopback; yields the base URL. Bodies are not decompressed. At the end requests in flight are broken off."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0, auto_decompress=False)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
