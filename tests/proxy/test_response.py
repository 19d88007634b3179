"""Signs of life: given while a context is open, and not a moment longer."""

import asyncio
import gc
import weakref

from tests.support.waiting import PATIENCE
from tokencache.proxy.response import KeepAlive


async def test_signs_come_again_and_again_and_end_with_the_context():
    given = asyncio.Semaphore(0)

    async def sign() -> None:
        given.release()

    signs = KeepAlive(0.001, sign)
    async with signs:
        assert signs.active
        for _ in range(3):
            await asyncio.wait_for(given.acquire(), PATIENCE)
    assert not signs.active
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_unread_keep_alive_is_cancelled_with_the_context():
    begun, broken = asyncio.Event(), asyncio.Event()

    async def sign() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            broken.set()

    async with KeepAlive(0.001, sign):
        await asyncio.wait_for(begun.wait(), PATIENCE)
    assert broken.is_set()


async def test_a_disconnected_client_gets_no_further_keep_alive():
    asked: asyncio.Queue[asyncio.Task] = asyncio.Queue()

    async def sign() -> None:
        asked.put_nowait(asyncio.current_task())
        raise ConnectionResetError

    async with KeepAlive(0.001, sign):
        await asyncio.wait_for(await asyncio.wait_for(asked.get(), PATIENCE), PATIENCE)  # it ends, and as no failure of ours
    assert asked.empty()


async def test_a_client_that_sends_data_is_forgotten_at_once():
    class Speaker:
        def __init__(self) -> None:
            self.signs = KeepAlive(60, self.sign)

        async def sign(self) -> None:
            """Say nothing."""

    gc.disable()
    try:
        speaker = Speaker()
        async with speaker.signs:
            pass
        gone = weakref.ref(speaker)
        del speaker
        assert gone() is None
    finally:
        gc.enable()
