"""Signs of life: given after each silent interval until they end, and not a moment longer."""

import asyncio
import gc
import weakref
from types import SimpleNamespace

from tests.support.waiting import PATIENCE
from tokencache.proxy.response import Response

SIGN = b": sign\n\n"


class Pipe:
    """What the client has received; `write` waits for `slow`."""

    def __init__(self, slow=None, broken=None):
        self.written, self.slow, self.broken, self.cancelled = asyncio.Queue(), slow, broken, False

    async def write(self, data):
        self.written.put_nowait(data)
        if self.broken is not None:
            raise self.broken
        if self.slow is not None:
            try:
                await self.slow.wait()
            except asyncio.CancelledError:
                self.cancelled = True
                raise

    async def write_eof(self, data):
        self.written.put_nowait(data)

    async def sign(self):
        return await asyncio.wait_for(self.written.get(), PATIENCE)


def response(pipe, seconds=0.001):
    made = Response(None, None, SimpleNamespace(keep_alive=seconds, encoder=SimpleNamespace(keep_alive=lambda: SIGN)), None, None)
    made.opened = pipe
    return made


async def test_signs_come_again_and_again_until_they_end():
    pipe = Pipe()
    opened = response(pipe)
    opened.keep_alive()
    for _ in range(3):
        assert await pipe.sign() == SIGN
    await opened.end_keep_alive()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert opened._timer is None


async def test_the_rest_of_a_stream_is_the_last_that_is_sent():
    pipe = Pipe()
    opened = response(pipe)
    opened.keep_alive()
    await pipe.sign()
    await opened.finish(b"rest")
    while (sent := await pipe.sign()) == SIGN:
        pass
    assert sent == b"rest"
    assert opened._timer is None
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_who_sends_something_breaks_the_silence():
    pipe = Pipe()
    opened = response(pipe, seconds=60)
    opened.silent = False
    opened._break_silence()
    await asyncio.sleep(0)
    assert pipe.written.empty()
    opened._break_silence()
    assert await pipe.sign() == SIGN
    await opened.end_keep_alive()


async def test_an_unread_keep_alive_is_cancelled():
    pipe = Pipe(slow=asyncio.Event())
    opened = response(pipe, seconds=60)
    opened._break_silence()
    await pipe.sign()
    opened._break_silence()  # the client still has to read the first one
    await asyncio.sleep(0)
    await opened.end_keep_alive()
    assert pipe.cancelled
    assert pipe.written.empty()


async def test_a_disconnected_client_is_no_failure_of_ours():
    pipe = Pipe(broken=ConnectionResetError())
    opened = response(pipe)
    opened.keep_alive()
    await pipe.sign()
    sign = opened._sending
    await asyncio.wait_for(sign, PATIENCE)
    await opened.end_keep_alive()


async def test_a_response_is_forgotten_at_once():
    gc.disable()
    try:
        pipe = Pipe()
        opened, gone = response(pipe, seconds=60), weakref.ref(pipe)
        opened.keep_alive()
        await opened.end_keep_alive()
        del opened, pipe
        assert gone() is None
    finally:
        gc.enable()
