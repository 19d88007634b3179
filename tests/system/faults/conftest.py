from __future__ import annotations

import aiohttp
import pytest

from tests.support.material import require
from tests.support.redis_server import find_binary
from tests.support.waiting import PATIENCE
from tests.system.faults.dialects import DIALECTS
from tests.system.faults.stack import Stack

PATIENT = ("--store-timeout", str(PATIENCE), "--hold", str(PATIENCE), "--linger", "0.5")
"""Calls wait for the store and for an engine as long as a busy machine needs."""
QUICK = (*PATIENT, "--store-timeout", "1")
"""For tests in which the store fails: calls soon go on without it."""


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/system/faults" in item.path.as_posix():
            item.add_marker(pytest.mark.redis)


def usually(name):
    """Each dialect, for tests that start servers; a usual run has only this one."""
    marks = {dialect.name: () if dialect.name == name else pytest.mark.whole for dialect in DIALECTS}
    return pytest.mark.parametrize("dialect", [pytest.param(dialect, id=dialect.name, marks=marks[dialect.name]) for dialect in DIALECTS])


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Starts stacks that a module's tests share; the arguments describe them."""
    require("redis-server", find_binary())
    stacks: dict[str, Stack] = {}

    def get(**made):
        name = repr(sorted(made.items()))
        if name not in stacks:
            made.setdefault("options", PATIENT)
            stacks[name] = Stack(tmp_path_factory.mktemp("stack"), **made).__enter__()
        return stacks[name]

    yield get
    for stack in stacks.values():
        stack.__exit__(None, None, None)


@pytest.fixture
async def http():
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as client:
        yield client
