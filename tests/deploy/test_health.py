"""`tokencache-health` finds the proxy where the container's command started it."""

import asyncio
import pathlib
import runpy
import sys

import pytest
from yarl import URL

from tests.deploy import reading
from tokencache.config import Settings
from tokencache.server.serve import serving
from tokencache.store.memory import MemoryStore


@pytest.mark.parametrize("command", [["serve", "--port", "{port}"], ["serve", "--host=127.0.0.1", "--port={port}"], ["sleep"]])
async def test_the_address_is_that_of_the_containers_command(command, monkeypatch):
    async with serving(Settings(port=0), MemoryStore()) as (url, _):
        port = URL(url).port
        monkeypatch.setenv("TOKENCACHE_PORT", "1" if "serve" in command else str(port))
        line = "\0".join(["/opt/tokencache/bin/python", "/opt/tokencache/bin/tokencache", *command, ""]).format(port=port)
        monkeypatch.setattr(pathlib.Path, "read_bytes", lambda path: {"/proc/1/cmdline": line.encode()}[str(path)])
        monkeypatch.setattr(sys, "argv", ["tokencache-health", "/healthz"])
        with pytest.raises(SystemExit) as ended:
            await asyncio.to_thread(runpy.run_path, str(reading.DEPLOY / "health.py"))
    assert not ended.value.code
