"""A long reply whose client leaves while its prompt is read with pauses is recorded."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tests.support.reading import read_chat
from tokencache.core import ids
from tokencache.dialects.chat.incremental import IncrementalParser
from tokencache.engine.reply import Reply
from tokencache.proxy.reply_source import Body, EndKind

PROMPT = [n % 150_000 for n in range(80_000)]
BODY = msgspec.json.encode(
    {"choices": [{"index": 0, "message": {"content": "x"}, "token_ids": [5], "finish_reason": "stop"}], "prompt_token_ids": PROMPT}
)


class _Answer:
    status = 200
    content = SimpleNamespace(at_eof=lambda: True)

    async def read(self, take: object = None) -> bytes:
        del take
        return BODY


async def test_a_reply_that_has_arrived_is_taken_though_the_client_left_while_it_was_read() -> None:
    driver = SimpleNamespace(read=lambda body: body)
    dispatch = SimpleNamespace(
        sender=SimpleNamespace(request=SimpleNamespace(parse=None)), planned=SimpleNamespace(engine=SimpleNamespace(driver=driver))
    )
    chat = read_chat(b'{"model":"m","messages":[{"role":"user","content":"x"}]}', IncrementalParser())
    source = Body(cast("Any", _Answer()), Reply(), chat, cast("Any", dispatch), cast("Any", SimpleNamespace(take=list)))
    reading = asyncio.create_task(source.read())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not source.reply.choices
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await source.read_for_record()
    assert source.end.kind is EndKind.FINISHED
    assert list(source.reply.choices[0].ids) == [5]
    assert source.reply.prompt.packed == ids.pack(PROMPT)
