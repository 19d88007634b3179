"""Timeouts are for the server: a late process must not report it as unresponsive."""

import asyncio
import time

import pytest

from tokencache.store.redis.timeouts import TICK, Limit, LoopTimeouts

LIMIT = 4 * TICK


async def rounds(n):
    for _ in range(n):
        await asyncio.sleep(0)


async def test_an_endless_wait_times_out():
    timeouts = LoopTimeouts()
    with pytest.raises(TimeoutError):
        async with Limit(timeouts, LIMIT):
            await asyncio.Event().wait()
    with pytest.raises(TimeoutError):  # the timer had stopped with nothing to wait for
        async with Limit(timeouts, LIMIT):
            await asyncio.Event().wait()


async def test_each_has_its_own_limit():
    timeouts, ended = LoopTimeouts(), []

    async def wait(name, seconds):
        with pytest.raises(TimeoutError):
            async with Limit(timeouts, seconds):
                await asyncio.Event().wait()
        ended.append(name)

    await asyncio.gather(wait("long", 3 * LIMIT), wait("short", LIMIT))
    assert ended == ["short", "long"]


async def test_a_late_event_loop_does_not_use_up_the_limit():
    """Each round of the loop takes longer than the limit, but work of three rounds is in time."""
    timeouts, over = LoopTimeouts(), False

    async def busy():
        while not over:
            time.sleep(1.5 * LIMIT)  # noqa: ASYNC251 - that is the point
            await asyncio.sleep(0)

    others = asyncio.create_task(busy())
    began = time.monotonic()
    async with Limit(timeouts, LIMIT):
        await rounds(3)
    over = True
    await others
    assert time.monotonic() - began > LIMIT


async def test_an_error_in_the_context_is_raised_unchanged():
    with pytest.raises(ValueError, match="ours"):
        async with Limit(LoopTimeouts(), LIMIT):
            raise ValueError("ours")
