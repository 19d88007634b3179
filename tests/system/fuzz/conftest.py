"""A target per test: engine, proxy, a well-behaved session, and the log."""

import logging

import pytest

from tests.proxy.kit import proxied
from tests.support.patient import patient  # noqa: F401 - a fixture
from tests.system.fuzz.kit import Target


@pytest.fixture
async def target(caplog):
    caplog.set_level(logging.INFO)
    async with proxied() as rig:
        made = Target(rig, caplog)
        await made.step()
        yield made
        await made.unharmed()
