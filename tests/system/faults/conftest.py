from __future__ import annotations

import aiohttp
import pytest

from tests.support.material import require
from tests.support.redis_server import find_binary
from tests.system.faults.stack import Stack

QUICK = ("--store-timeout", "0.5", "--hold", "5", "--linger", "0.5")
"""Short timeouts: the tests wait for the same conditions as in operation, but not for long."""


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/system/faults" in item.path.as_posix():
            item.add_marker(pytest.mark.redis)


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Starts stacks that a module's tests share; the arguments describe them."""
    require("redis-server", find_binary())
    stacks: dict[str, Stack] = {}

    def get(**made):
        name = repr(sorted(made.items()))
        if name not in stacks:
            made.setdefault("options", QUICK)
            stacks[name] = Stack(tmp_path_factory.mktemp("stack"), **made).__enter__()
        return stacks[name]

    yield get
    for stack in stacks.values():
        stack.__exit__(None, None, None)


@pytest.fixture
async def http():
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as client:
        yield client
