"""All stores keep the contract; and the suite notices a store that does not."""

import asyncio
from types import MappingProxyType

import fakeredis
import pytest
from redis.asyncio import Redis

from tokencache.core.turn import Prefix
from tokencache.store import conformance
from tokencache.store.conformance import CHECKS, check_replicas
from tokencache.store.contract import Begun, SessionSealedError
from tokencache.store.memory import MemoryStore
from tokencache.store.redis import RedisStore
from tokencache.testing.redis_server import RealRedis, find_binary

NONE = MappingProxyType({})


def short(check):
    return check.__name__.removeprefix("check_")


@pytest.mark.parametrize("check", CHECKS, ids=short)
async def test_store_keeps_the_contract(store, check):
    await check(store)


async def test_replicas_share_fakeredis(fake_store):
    server = fakeredis.FakeServer()
    one, other = fake_store(server), fake_store(server)
    await check_replicas(one, other)
    await one.close()
    await other.close()


@pytest.mark.redis
async def test_replicas_share_redis(redis_server):
    one, other = RedisStore(redis_server.url), RedisStore(redis_server.url)
    await one.open()
    await other.open()
    await check_replicas(one, other)
    await one.close()
    await other.close()


@pytest.mark.redis
async def test_a_cluster_node_takes_it_all():
    """A cluster refuses every command and script that touches keys of two slots."""
    if find_binary() is None:
        pytest.skip("no redis-server on this machine")
    with RealRedis("--cluster-enabled", "yes") as server:
        client = Redis.from_url(server.url)
        await client.execute_command("CLUSTER ADDSLOTS", *range(16_384))
        for _ in range(2000):
            if (await client.execute_command("CLUSTER INFO"))["cluster_state"] == "ok":
                break
            await asyncio.sleep(0.01)
        await client.aclose()
        store = RedisStore(server.url)
        await store.open()
        for check in CHECKS:
            await check(store)
        await store.close()


class ReadsOn(MemoryStore):
    async def begin(self, session, call, keys):
        return Begun((await super().begin(session, call, [])).life, await self.find(session, keys))


class ForgetsChildren(MemoryStore):
    async def commit(self, session, life, call, entries, incidents=(), *, documents=NONE):
        await super().commit(session, life, call, entries, incidents, documents=documents)
        self._sessions[session].continued.clear()


class TakesLateCommits(MemoryStore):
    def _alive(self, session, life):
        held = self._sessions.get(session)
        return held if held is not None else super()._alive(session, life)


class RevivesTheDead(MemoryStore):
    async def commit(self, session, life, call, entries, incidents=(), *, documents=NONE):
        if session not in self._sessions:
            life = (await self.begin(session, call, [])).life
        await super().commit(session, life, call, entries, incidents, documents=documents)


class OpensThenRefuses(MemoryStore):
    async def begin(self, session, call, keys):
        try:
            return await super().begin(session, call, keys)
        except SessionSealedError:
            self._sessions[session].calls[call] = 1.0
            raise


class LeavesCallsOpen(MemoryStore):
    async def commit(self, session, life, call, entries, incidents=(), *, documents=NONE):
        await super().commit(session, life, "", entries, incidents, documents=documents)


class TakesBasesWhole(MemoryStore):
    async def prefix(self, session, turn):
        held, packed, line = self._sessions[session], b"", []
        at = turn
        while at is not None:
            line.append(at)
            at = held.turn(at).base
        for name in reversed(line):
            packed += held.tokens[name].delta + held.tokens[name].completion
        return Prefix(packed, held.turn(turn).completion_tokens)


class ListsTwice(MemoryStore):
    async def sessions(self):
        for _ in range(2):
            async for info in super().sessions():
                yield info


class Interleaves(MemoryStore):
    async def commit(self, session, life, call, entries, incidents=(), *, documents=NONE):
        held = self._alive(session, life)
        before = dict(held.index)
        await asyncio.sleep(0)
        held.index = before
        await super().commit(session, life, call, entries, incidents, documents=documents)


class NewestFirst(MemoryStore):
    async def turns(self, session):
        return (await super().turns(session))[::-1]


class DropsIncidents(MemoryStore):
    async def settle(self, session, life, call, incidents=()):
        await super().settle(session, life, call)


class NamesAKeyOnce(MemoryStore):
    async def bind_key(self, key, binding):
        self._keys.setdefault(key, binding)


class KeepsTheFirst(MemoryStore):
    async def commit(self, session, life, call, entries, incidents=(), *, documents=NONE):
        kept = self._alive(session, life).documents
        await super().commit(session, life, call, entries, incidents, documents={**documents, **kept})


class SharesKeys(MemoryStore):
    async def find(self, session, keys):
        found = [await super(SharesKeys, self).find(name, keys) for name in self._sessions]
        return [[hit for hits in under for hit in hits] for under in zip(*found, strict=True)] if found else [[] for _ in keys]


BROKEN = [
    (ReadsOn, conformance.check_look_up),
    (ForgetsChildren, conformance.check_continued),
    (TakesLateCommits, conformance.check_delete),
    (RevivesTheDead, conformance.check_delete),
    (OpensThenRefuses, conformance.check_seal),
    (LeavesCallsOpen, conformance.check_open_calls),
    (TakesBasesWhole, conformance.check_prefix),
    (ListsTwice, conformance.check_sessions),
    (Interleaves, conformance.check_concurrency),
    (NewestFirst, conformance.check_round_trip),
    (DropsIncidents, conformance.check_incidents),
    (NamesAKeyOnce, conformance.check_keys),
    (KeepsTheFirst, conformance.check_documents),
    (SharesKeys, conformance.check_isolation),
]


@pytest.mark.parametrize(("broken", "check"), BROKEN, ids=lambda case: getattr(case, "__name__", None))
async def test_a_broken_store_is_noticed(broken, check):
    with pytest.raises(AssertionError):
        await check(broken())


def test_every_check_is_listed():
    named = {value for name, value in vars(conformance).items() if name.startswith("check_")}
    assert named == {*CHECKS, check_replicas}
