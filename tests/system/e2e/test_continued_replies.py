"""A real vLLM that is paused five times during a reply, as for new weights: the reply goes on where it stopped."""

import asyncio

import pytest
from conftest import proxying
from test_weight_updates import SECONDS, get_json, sampled

from tokencache.core import ids, invariants
from tokencache.store.memory import MemoryStore

CUTS = 5


async def recorded_prefix(proxied, turn):
    return ids.unpack((await proxied.proxy.ledger.prefixes.get("s", turn.id)).prefix.ids)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_reply_that_is_cut_five_times_is_one_reply(weights_server, figures, stream):
    async with proxying(weights_server.url, MemoryStore(), hold=SECONDS) as proxied, asyncio.timeout(SECONDS):
        uncut = proxied.harness("uncut").say("EPISODE:count")
        await uncut.turn()
        expected = await uncut.turn(stream=stream)
        harness = proxied.harness("s").say("EPISODE:count")
        await harness.turn()
        call = asyncio.create_task(harness.turn(stream=stream))
        for _ in range(CUTS):
            before = await sampled(proxied)
            while await sampled(proxied) < before + 15:
                assert not call.done()
                await asyncio.sleep(0.01)
            await get_json(proxied, "/pause?mode=abort")
            await get_json(proxied, "/resume")
        reply = await call
        assert (reply.message, reply.finish_reason) == (expected.message, "stop")
        turns = await proxied.proxy.store.turns("s")
        tokens = await proxied.proxy.store.tokens("s", [turn.id for turn in turns])
        assert not invariants.audit(turns, tokens, session="s")
        _, turn = turns
        assert len(turn.pieces) == CUTS + 1
        assert [piece.ended for piece in turn.pieces] == ["abort"] * CUTS + ["stop"]
        assert reply.ids == ids.unpack(tokens[turn.id].completion)
        assert (list(turn.marks), turn.again) == (["continued"], "")
        later = await harness.turn()
        assert later.prompt[: turn.prompt_tokens + turn.completion_tokens] == await recorded_prefix(proxied, turn)
        figures.append(f"five aborts, stream={stream}: pieces {[(piece.start, piece.end) for piece in turn.pieces]}")
