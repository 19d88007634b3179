"""Proxies in these tests act by what happens, not by the clock. Tests of the queue run on each kind of store."""

import contextlib

import pytest
import redis.asyncio

from tests.store import conftest
from tests.store.conftest import fake_store, redis_server  # noqa: F401 - fixtures
from tests.support.patient import patient  # noqa: F401 - a fixture


@pytest.fixture(params=conftest.KINDS)
async def store(request):
    """Each kind of store, empty."""
    if request.param == "redis":
        async with redis.asyncio.from_url(request.getfixturevalue("redis_server").url) as server:
            await server.flushall()
    async with contextlib.aclosing(conftest.store.__wrapped__(request)) as made:
        yield await anext(made)
