"""Tasks of the background: a step that fails is reported and repeated, and a cancellation ends the task."""

import asyncio

import pytest

from tests.support.waiting import until
from tokencache import background, metrics
from tokencache.wakeup import end


def failures(task="test"):
    return metrics.BACKGROUND_FAILURES.labels(task)._value.get()


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(background, "LONGEST_DELAY", 0.01)


@pytest.mark.parametrize("error", [TypeError, KeyError, OSError, AssertionError, asyncio.CancelledError, MemoryError])
async def test_a_step_that_fails_is_reported_and_repeated(error, caplog):
    before, steps, broken = failures(), 0, True

    async def step():
        nonlocal steps
        steps += 1
        if broken:
            raise error("odd")

    task = asyncio.create_task(background.repeat("test", step, 0, about="one"))
    await until(lambda: steps > 3)
    assert background.failing() == {"test one": error.__name__}
    assert failures() - before >= 3
    logged = [record for record in caplog.records if "background task test one: internal error" in record.getMessage()]
    assert len(logged) >= 3
    assert all(record.exc_info for record in logged)
    broken = False
    await until(lambda: not background.failing())
    now = failures()
    await until(lambda: steps > 10)
    assert failures() == now
    assert not task.done()
    await end(task)
    assert task.cancelled()


async def test_a_task_that_ends_fails_no_longer():
    async def fail():
        raise TypeError

    task = asyncio.create_task(background.repeat("test", fail, 0))
    await until(background.failing)
    await end(task)
    assert task.cancelled()
    assert background.failing() == {}


async def test_it_ends_when_nothing_is_left_to_do():
    left = [1, 2, 3]

    async def step():
        left.pop()

    await background.repeat("test", step, 0, wanted=lambda: bool(left))
    assert left == []


async def test_a_cancellation_of_a_step_that_waits_ends_the_task():
    started = asyncio.Event()

    async def step():
        started.set()
        await asyncio.Event().wait()

    before = failures()
    task = asyncio.create_task(background.repeat("test", step, 0, at_once=True))
    await started.wait()
    await end(task)
    assert (task.cancelled(), failures()) == (True, before)
