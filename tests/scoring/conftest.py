import contextlib

import aiohttp
import pytest

from tests.scoring.kit import Recorder
from tokencache.testing import SimulatedEngine


@pytest.fixture
async def serve():
    """Serves an engine whose weights have a name. Returns its URL and a recorder."""
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())

        async def start(engine=None, weights="v1"):
            engine = engine or SimulatedEngine(seed=5, dev_mode=True)
            engine.weights.loaded = weights
            url = await stack.enter_async_context(engine.serve())

            async def post(path, body):
                async with http.post(url + path, json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    return await answer.json()

            return engine, url, Recorder(post)

        yield start
