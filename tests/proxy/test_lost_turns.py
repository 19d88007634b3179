"""A Redis that took over lacks the parent of a call in flight: a turn that does not need the parent is recorded, others are named."""

import pytest
from redis.asyncio import Redis

from tests.proxy.kit import EPISODES, echo, proxied, user
from tests.proxy.test_contexts import contexts
from tests.support.material import require
from tests.support.redis_server import RealRedis, find_binary
from tokencache.store.redis import RedisStore
from tokencache.testing import SimulatedEngine


class Behind(RedisStore):
    """A store that loses the only turn of a session before the next call ends."""

    def __init__(self, url):
        super().__init__(url)
        self.url, self.loses = url, False

    async def commit(self, session, *args, **kwargs):
        if self.loses:
            self.loses = False
            (turn,) = await self.turns(session)
            async with Redis.from_url(self.url) as redis:
                await redis.hdel(f"tokencache:{{{session}}}", f"#{turn.id}", "H1", "T1", "L1", "M1")
                await redis.hset(f"tokencache:{{{session}}}", "turns", 0)
        await super().commit(session, *args, **kwargs)


@pytest.fixture(scope="module")
def redis_url():
    require("redis-server", find_binary())
    with RealRedis() as server:
        yield server.url


@pytest.mark.redis
@pytest.mark.parametrize(
    ("honours_ids", "stream", "kept"),
    [(False, False, True), (False, True, False), (True, False, False)],
    ids=["a prompt of other ids", "messages that were released", "a turn that continues it"],
)
async def test_a_turn_whose_parent_is_lost(redis_url, honours_ids, stream, kept):
    store = Behind(redis_url)
    async with proxied(SimulatedEngine(episodes=EPISODES), store) as rig:
        await store.delete("s", reuse=True)
        asked = [user("EPISODE:talk " + "go on " * 50)]
        messages = [*asked, echo(await rig.say("s", asked)), user("and then?")]
        rig.engine.honours_ids, store.loses = honours_ids, True
        assert (await rig.say("s", messages, stream=stream))["content"]
        assert not (await store.session("s")).open_calls
        exported = await rig.exported("s")
        assert (exported["complete"], "session-lost" in {one["kind"] for one in exported["incidents"]}) == (False, True)
        found = [sequence["token_ids"] for sequence in exported["sequences"]]
        sampled = rig.ground_truth("s")[1]
        assert found == ([[*sampled.prompt_ids, *sampled.completion_ids]] if kept else [])
        assert [whole for whole, _ in await contexts(store)] == ([messages] if kept else [])
