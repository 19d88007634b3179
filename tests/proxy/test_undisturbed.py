"""A cancellation that comes while the store is written to waits until it is; any other does not."""

import asyncio

import pytest

from tokencache.proxy.undisturbed import Undisturbed


class Store:
    """Answers when it is told to; `written` is what it has taken."""

    def __init__(self):
        self.asked, self.answers, self.written = asyncio.Event(), asyncio.Event(), []

    async def write(self, what):
        self.asked.set()
        await self.answers.wait()
        self.written.append(what)
        return what


async def test_the_work_is_done_and_then_the_task_ends():
    store, undisturbed, behind = Store(), Undisturbed(), []

    async def call():
        behind.append(await undisturbed.work(store.write("turn")))

    task = asyncio.create_task(call())
    await store.asked.wait()
    undisturbed.cancel(task)
    store.answers.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert store.written == ["turn"]
    assert behind == []


async def test_what_is_cancelled_once_can_write_how_it_ended():
    store, undisturbed = Store(), Undisturbed()

    async def call():
        try:
            await undisturbed.work(store.write("begun"))
        finally:
            await undisturbed.work(store.write("ended"))

    task = asyncio.create_task(call())
    await store.asked.wait()
    undisturbed.cancel(task)
    store.answers.set()
    await asyncio.wait({task})
    assert task.cancelled()
    assert store.written == ["begun", "ended"]


async def test_elsewhere_the_task_ends_at_once():
    store, undisturbed = Store(), Undisturbed()

    async def call():
        await undisturbed.work(asyncio.sleep(0))
        await store.write("never")

    task = asyncio.create_task(call())
    await store.asked.wait()
    undisturbed.cancel(task)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert store.written == []


async def test_work_that_fails_says_so():
    store, undisturbed = Store(), Undisturbed()

    async def failing():
        await store.write("half")
        raise ValueError("no store")

    task = asyncio.create_task(undisturbed.work(failing()))
    await store.asked.wait()
    undisturbed.cancel(task)
    store.answers.set()
    with pytest.raises(ValueError, match="no store"):
        await task
