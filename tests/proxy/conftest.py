"""One rig per test: engine, proxy, client."""

import pytest

from tests.proxy.kit import proxied


@pytest.fixture
async def rig():
    async with proxied() as made:
        yield made
