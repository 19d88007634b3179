"""A rig, and a client of either kind to its proxy."""

import pytest

from tests.client.faces import KINDS, Face
from tests.proxy.kit import proxied


@pytest.fixture
async def rig():
    async with proxied() as made:
        yield made


@pytest.fixture(params=KINDS)
async def client(request, rig):
    async with Face(KINDS[request.param](rig.url)) as face:
        yield face
