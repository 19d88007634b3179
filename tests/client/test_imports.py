"""What the client may import: it runs in the trainer's process, next to the trainer's own versions of everything."""

import subprocess
import sys

SERVER_ONLY = ("aiohttp", "isal", "pydantic", "pydantic_settings", "prometheus_client", "redis", "typer", "rich", "uvloop")
"""Packages that only the proxy and the command line need."""


def imported_with(blocked):
    """Use both clients in a fresh interpreter in which some packages cannot be imported."""
    program = f"""
import asyncio, sys
sys.modules.update(dict.fromkeys({list(blocked)!r}))
from tokencache.client import AsyncClient, Client, ClientError
with Client("http://127.0.0.1:9") as client:
    print(client.session("r1").base_url, client.create)
async def use():
    async with AsyncClient("http://127.0.0.1:9") as client:
        print(client.session("r1").base_url)
asyncio.run(use())
"""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_the_client_imports_nothing_of_the_server():
    done = imported_with(SERVER_ONLY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("/s/r1/v1") == 2


def test_a_package_that_the_client_needs_is_noticed_if_it_is_missing():
    assert "msgspec" in imported_with(["msgspec"]).stderr
