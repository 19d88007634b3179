"""Tasks of the background: they end when they are told, whatever the libraries that they call do."""

import asyncio

import pytest

from tokencache import wakeup


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(wakeup, "CANCEL_AGAIN_SECONDS", 0.01)


async def test_a_task_whose_cancellation_gets_lost_ends():
    lost = 0

    async def repeat():
        nonlocal lost
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                lost += 1
                if lost > 2:
                    raise

    task = asyncio.create_task(repeat())
    await asyncio.sleep(0)
    await wakeup.end(task)
    assert (task.cancelled(), lost) == (True, 3)


async def test_a_task_that_has_failed_or_ended_is_no_error():
    async def fail():
        raise ValueError

    failed, done = asyncio.create_task(fail()), asyncio.create_task(asyncio.sleep(0))
    await asyncio.wait({failed, done})
    await wakeup.end(failed, done)
    await wakeup.end()
