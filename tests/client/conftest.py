"""A proxy, and a client of either kind for it."""

import pytest

from tests.client.both import KINDS, Wrapped
from tests.proxy.kit import proxied
from tests.support.patient import patient  # noqa: F401 - a fixture


@pytest.fixture
async def rig():
    async with proxied() as made:
        yield made


@pytest.fixture(params=KINDS)
async def client(request, rig):
    async with Wrapped(KINDS[request.param](rig.url)) as wrapped:
        yield wrapped
