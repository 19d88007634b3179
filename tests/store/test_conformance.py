"""All stores pass the conformance checks, and each check fails for a store that breaks its promise."""

import asyncio
import inspect
from secrets import token_bytes
from types import MappingProxyType

import fakeredis
import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from tests.store import conformance
from tests.store.conformance import CHECKS, check_replicas
from tests.support.material import require
from tests.support.redis_server import RealRedis, find_binary
from tests.support.waiting import until
from tokencache.core.turn import Prefix
from tokencache.store.base import BeginResult, OpenCall, Page, SealOutcome, SessionExistsError, SessionGoneError, SessionSealedError
from tokencache.store.memory import MemoryStore
from tokencache.store.redis import RedisStore

NONE = MappingProxyType({})


def short(check):
    return check.__name__.removeprefix("check_")


@pytest.mark.product
@pytest.mark.parametrize("check", CHECKS, ids=short)
async def test_store_conforms(store, check):
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


@pytest.mark.whole
@pytest.mark.redis
async def test_a_cluster_node_passes_all_checks():
    """A cluster refuses every command and script that touches keys of two slots."""
    require("redis-server", find_binary())
    with RealRedis("--cluster-enabled", "yes") as server:
        client = Redis.from_url(server.url)
        await client.execute_command("CLUSTER ADDSLOTS", *range(16_384))

        async def ready():
            return (await client.execute_command("CLUSTER INFO"))["cluster_state"] == "ok"

        await until(ready)
        await client.aclose()
        store = RedisStore(server.url)
        await store.open()
        for check in CHECKS:
            await check(store)
        await store.close()


class ReplacesMedia(MemoryStore):
    async def put_media(self, session, epoch, medium, content, *, limit):
        self._use_epoch(session, epoch).media.pop(medium.sha256, None)
        return await super().put_media(session, epoch, medium, content, limit=limit)


class SharesMedia(MemoryStore):
    async def media(self, session, sha256):
        return next((held.media[sha256] for held in self._sessions.values() if sha256 in held.media), None)


class IgnoresMediaLimit(MemoryStore):
    async def put_media(self, session, epoch, medium, content, *, limit):
        return await super().put_media(session, epoch, medium, content, limit=10**9)


class AcceptsLateMedia(MemoryStore):
    async def put_media(self, session, epoch, medium, content, *, limit):
        held = self._sessions.get(session)
        return await super().put_media(session, held.epoch if held else epoch, medium, content, limit=limit)


class LooksUpAllKeys(MemoryStore):
    async def begin(self, session, call, keys, **options):
        return BeginResult((await super().begin(session, call, [], **options)).epoch, await self.find(session, keys))


class ForgetsContinuations(MemoryStore):
    async def commit(self, session, epoch, call, entries, incidents=(), *, documents=NONE, **more):
        await super().commit(session, epoch, call, entries, incidents, documents=documents)
        self._sessions[session].continued.clear()


class AcceptsLateCommits(MemoryStore):
    def _use_epoch(self, session, epoch):
        held = self._sessions.get(session)
        return held if held is not None else super()._use_epoch(session, epoch)


class RecreatesDeletedSessions(MemoryStore):
    async def commit(self, session, epoch, call, entries, incidents=(), *, documents=NONE, **more):
        if session not in self._sessions:
            self._tombstones.clear()
            epoch = (await self.begin(session, call, [])).epoch
        await super().commit(session, epoch, call, entries, incidents, documents=documents)


class OpensThenRefuses(MemoryStore):
    async def begin(self, session, call, keys, **options):
        try:
            return await super().begin(session, call, keys, **options)
        except SessionSealedError:
            self._sessions[session].calls[call] = OpenCall(call, 1.0)
            raise


class LeavesCallsOpen(MemoryStore):
    async def commit(self, session, epoch, call, entries, incidents=(), *, documents=NONE, **more):
        await super().commit(session, epoch, "", entries, incidents, documents=documents)


class IgnoresShared(MemoryStore):
    async def prefix(self, session, turn):
        held, packed, line = self._sessions[session], b"", []
        at = turn
        while at is not None:
            line.append(at)
            at = held.turn(at).base
        tokens = await self.tokens(session, line)
        for name in reversed(line):
            packed += tokens[name].delta + tokens[name].completion
        return Prefix(packed, held.turn(turn).completion_tokens)


class ListsTwice(MemoryStore):
    async def sessions(self):
        for _ in range(2):
            async for info in super().sessions():
                yield info


class Interleaves(MemoryStore):
    async def commit(self, session, epoch, call, entries, incidents=(), *, documents=NONE, **more):
        held = self._use_epoch(session, epoch)
        before = dict(held.index)
        await asyncio.sleep(0)
        held.index = before
        await super().commit(session, epoch, call, entries, incidents, documents=documents)


class NewestFirst(MemoryStore):
    async def turns(self, session):
        return (await super().turns(session))[::-1]


class DropsIncidents(MemoryStore):
    async def settle(self, session, epoch, call, incidents=()):
        await super().settle(session, epoch, call)


class BindsAKeyOnce(MemoryStore):
    async def bind_key(self, key, binding):
        if key not in self._bindings:
            await super().bind_key(key, binding)


class KeepsFirstDocument(MemoryStore):
    async def commit(self, session, epoch, call, entries, incidents=(), *, documents=NONE, **more):
        kept = self._use_epoch(session, epoch).documents
        await super().commit(session, epoch, call, entries, incidents, documents={**documents, **kept})


class SharesKeys(MemoryStore):
    async def find(self, session, keys):
        found = [await super(SharesKeys, self).find(name, keys) for name in self._sessions]
        return [[hit for hits in under for hit in hits] for under in zip(*found, strict=True)] if found else [[] for _ in keys]


class AddsIncidentsToDeletedSessions(MemoryStore):
    async def add_incidents(self, session, incidents):
        self._tombstones.clear()
        await super().add_incidents(session, incidents)


class ForgetsTombstones(MemoryStore):
    async def delete(self, session, *, reuse=False):
        return await super().delete(session, reuse=True)


class ForgetsDeletedEpochs(MemoryStore):
    async def delete(self, session, *, reuse=False):
        known = await super().delete(session, reuse=reuse)
        self._deleted.clear()
        return known


class TakesLostEpochsForDeleted(MemoryStore):
    def _use_epoch(self, session, epoch):
        try:
            return super()._use_epoch(session, epoch)
        except SessionGoneError:
            raise SessionGoneError(session, deleted=True) from None


class NeverLiftsTombstones(MemoryStore):
    async def delete(self, session, *, reuse=False):
        return await self.session(session) is not None and await super().delete(session, reuse=reuse)


class JoinsAnyCall(MemoryStore):
    async def begin(self, session, call, keys, *, fingerprint=b"", replica="", join="never"):
        return await super().begin(
            session, call, keys, fingerprint=fingerprint, replica=replica, join="any" if join == "orphaned" else join
        )


class OpensDuplicates(MemoryStore):
    async def begin(self, session, call, keys, *, fingerprint=b"", replica="", join="never"):
        begun = await super().begin(session, call, keys, fingerprint=fingerprint, replica=replica, join=join)
        if begun.duplicate:
            self._sessions[session].calls[call] = OpenCall(call, 1.0)
        return begun


class LooksThenOpens(MemoryStore):
    async def begin(self, session, call, keys, *, fingerprint=b"", replica="", join="never"):
        info = await self.session(session)
        await asyncio.sleep(0)
        known = {one.fingerprint for one in info.open_calls} if info else set()
        return await super().begin(
            session, call, keys, fingerprint=fingerprint, replica=replica, join=join if fingerprint in known else "never"
        )


class ForgetsWanted(MemoryStore):
    async def mark_orphaned(self, session, call):
        await super().mark_orphaned(session, call)
        return False


class CountsOnlyCommits(MemoryStore):
    async def begin(self, session, call, keys, **options):
        begun = await super().begin(session, call, keys, **options)
        return replace(begun, calls=len(await self.turns(session)))


class IgnoresExpiry(MemoryStore):
    async def heartbeat(self, replica, seconds):
        await super().heartbeat(replica, 3600)


class ChangesSecret(MemoryStore):
    async def secret(self, known=b""):
        return token_bytes(32)


class AcceptsAnySecret(MemoryStore):
    async def secret(self, known=b""):
        self._secret = known or self._secret
        return await super().secret()


class IgnoresGivenUp(MemoryStore):
    async def mark_wanted(self, session, call, *, given_up=False):
        await super().mark_wanted(session, call)


class KeepsOneEntryForEachEngine(MemoryStore):
    async def put_engine(self, entry):
        self._engines[entry.url, ""] = entry


class SharesLogprobs(MemoryStore):
    async def share(self, session, source, turns):
        await super().share(session, source, turns)
        self._sessions[session].tokens |= {turn.id: self._sessions[source].tokens[turn.id] for turn in turns}


class ForksWithoutKeys(MemoryStore):
    async def share(self, session, source, turns):
        await super().share(session, source, turns)
        self._sessions[session].index.clear()


class TakesKeysFromForks(MemoryStore):
    async def delete(self, session, *, reuse=False):
        for held in self._sessions.values():
            held.index.clear()
        return await super().delete(session, reuse=reuse)


class SharesWhatItCan(MemoryStore):
    async def share(self, session, source, turns):
        await super().share(session, source, [turn for turn in turns if turn.id in self._sessions[source].turns])


class SealsAnything(MemoryStore):
    async def seal(self, session, *, force=False, at=0.0):
        return await super().seal(session, force=True, at=at)


class SealsSilently(MemoryStore):
    async def seal(self, session, *, force=False, at=0.0):
        outcome = await super().seal(session, force=force, at=at)
        if outcome is SealOutcome.SEALED:
            self._sessions[session].incidents.clear()
        return outcome


class FinishesTwice(MemoryStore):
    async def finish(self, session):
        if (held := self._sessions.get(session)) is not None:
            held.finished = None
        return await super().finish(session)


class KeepsEngineOfFinishedSessions(MemoryStore):
    async def finish(self, session, outcome=None):
        engine = held.engine if (held := self._sessions.get(session)) is not None else ""
        known = await super().finish(session, outcome)
        if known:
            self._sessions[session].engine = engine
        return known


class BindsEndedSessions(MemoryStore):
    async def commit(self, session, epoch, call, entries, incidents=(), *, documents=NONE, engine=""):
        await super().commit(session, epoch, call, entries, incidents, documents=documents)
        self._sessions[session].engine = engine or self._sessions[session].engine


class JoinsOnDefinition(MemoryStore):
    async def define(self, session, settings, labels, *, exist_ok=False, adopt=False):
        return await super().define(session, settings, labels, exist_ok=True, adopt=adopt)


class LastDefinitionWins(MemoryStore):
    async def define(self, session, settings, labels, *, exist_ok=False, adopt=False):
        known = await self.session(session)
        await asyncio.sleep(0)
        if known is not None:
            raise SessionExistsError(session)
        await self.delete(session, reuse=True)
        return await super().define(session, settings, labels)


class IgnoresSettings(MemoryStore):
    async def begin(self, session, call, keys, *, settings=b"", **options):
        held = self._sessions.get(session)
        return await super().begin(session, call, keys, settings=held.digest if held else b"", **options)


class MergesLabels(MemoryStore):
    async def set_labels(self, session, changes):
        held = self._sessions.get(session)
        if held is not None and changes.metadata:
            changes = replace(changes, metadata=held.labels.metadata | changes.metadata)
        return await super().set_labels(session, changes)


class KeepsOneReward(MemoryStore):
    async def rewards(self, session):
        return (await super().rewards(session))[-1:]


class SetsLabelsOfDeletedSessions(MemoryStore):
    async def set_labels(self, session, changes):
        await super().set_labels(session, changes)
        return True


class CountsNoTokens(MemoryStore):
    async def session(self, session):
        info = await super().session(session)
        return info and replace(info, sampled=0)


class SkipsOnDeletion(MemoryStore):
    async def page(self, cursor, limit):
        start, names = int(cursor or 0), sorted(self._sessions)
        infos = await self.states(names[start : start + limit])
        return Page(infos, b"%d" % (start + limit) if start + limit < len(names) else b"")


class AcceptsAnyCursor(MemoryStore):
    async def page(self, cursor, limit):
        return await super().page(cursor if cursor.isascii() else b"", limit)


class LeavesOutMissingStates(MemoryStore):
    async def states(self, sessions):
        return [info for info in await super().states(sessions) if info is not None]


class OffersAgain(MemoryStore):
    async def offer(self, session, epoch, at):
        self._entries.pop(session, None)
        await super().offer(session, epoch, at)


class LeasesSome(MemoryStore):
    async def lease(self, sessions, delivery, consumer, seconds):
        free = [one.session for one in await self.queue() if one.session in sessions and (not one.leased or one.delivery == delivery)]
        return await super().lease(free, delivery, consumer, seconds) and len(free) == len(sessions)


class LooksThenLeases(MemoryStore):
    async def lease(self, sessions, delivery, consumer, seconds):
        free = {one.session for one in await self.queue() if not one.leased}
        await asyncio.sleep(0)
        if free >= set(sessions):
            for session in sessions:
                self._entries[session] = replace(self._entries[session], until=0.0)
        return await super().lease(sessions, delivery, consumer, seconds)


class KeepsExpiredDeliveries(MemoryStore):
    async def lease(self, sessions, delivery, consumer, seconds):
        kept = dict(self._deliveries)
        leased = await super().lease(sessions, delivery, consumer, seconds)
        self._deliveries = kept | self._deliveries
        return leased


class KeepsFirstDemand(MemoryStore):
    async def put_demand(self, consumer, demand):
        self._demands.setdefault(consumer, demand)


class ForgetsRemovals(MemoryStore):
    async def remove(self, delivery):
        outcome = await super().remove(delivery)
        self._removed.clear()
        return outcome


BROKEN = [
    (SealsAnything, "check_life_cycle"),
    (FinishesTwice, "check_life_cycle"),
    (SealsSilently, "check_forced_seal"),
    (KeepsEngineOfFinishedSessions, "check_engine"),
    (BindsEndedSessions, "check_engine"),
    (JoinsOnDefinition, "check_definition"),
    (LastDefinitionWins, "check_concurrent_definitions"),
    (IgnoresSettings, "check_settings"),
    (MergesLabels, "check_labels"),
    (KeepsOneReward, "check_rewards"),
    (SetsLabelsOfDeletedSessions, "check_deleted_definition"),
    (CountsNoTokens, "check_summary"),
    (SkipsOnDeletion, "check_pages"),
    (AcceptsAnyCursor, "check_foreign_cursor"),
    (LeavesOutMissingStates, "check_states"),
    (OffersAgain, "check_offers"),
    (KeepsFirstDemand, "check_demands"),
    (LeasesSome, "check_leases"),
    (KeepsExpiredDeliveries, "check_expired_leases"),
    (LooksThenLeases, "check_concurrent_leases"),
    (ForgetsRemovals, "check_leases"),
    (LeasesSome, "check_queue_histories"),
    (ForgetsRemovals, "check_queue_histories"),
    (KeepsOneEntryForEachEngine, "check_engines"),
    (AddsIncidentsToDeletedSessions, "check_delete"),
    (ForgetsTombstones, "check_delete"),
    (ForgetsDeletedEpochs, "check_reuse"),
    (TakesLostEpochsForDeleted, "check_reuse"),
    (NeverLiftsTombstones, "check_reuse"),
    (JoinsAnyCall, "check_duplicates"),
    (OpensDuplicates, "check_duplicates"),
    (LooksThenOpens, "check_concurrent_duplicates"),
    (ForgetsWanted, "check_orphaned_calls"),
    (CountsOnlyCommits, "check_counts"),
    (IgnoresExpiry, "check_heartbeats"),
    (ChangesSecret, "check_secret"),
    (AcceptsAnySecret, "check_secret"),
    (IgnoresGivenUp, "check_given_up_calls"),
    (LooksUpAllKeys, "check_look_up"),
    (ForgetsContinuations, "check_continued"),
    (AcceptsLateCommits, "check_reuse"),
    (RecreatesDeletedSessions, "check_delete"),
    (OpensThenRefuses, "check_seal"),
    (LeavesCallsOpen, "check_open_calls"),
    (IgnoresShared, "check_prefix"),
    (ListsTwice, "check_sessions"),
    (Interleaves, "check_concurrency"),
    (NewestFirst, "check_round_trip"),
    (DropsIncidents, "check_incidents"),
    (BindsAKeyOnce, "check_keys"),
    (KeepsFirstDocument, "check_documents"),
    (SharesKeys, "check_isolation"),
    (SharesLogprobs, "check_forks"),
    (ForksWithoutKeys, "check_forks"),
    (TakesKeysFromForks, "check_forks_outlive"),
    (SharesWhatItCan, "check_forks_refused"),
    (ReplacesMedia, "check_media"),
    (SharesMedia, "check_media"),
    (IgnoresMediaLimit, "check_media_limit"),
    (AcceptsLateMedia, "check_media_deletion"),
]


@pytest.mark.parametrize(("broken", "check"), BROKEN, ids=lambda case: getattr(case, "__name__", case))
async def test_a_broken_store_fails(broken, check):
    (found,) = [one for one in CHECKS if one.__name__ == check]
    with pytest.raises(AssertionError):
        await found(broken())


def test_every_check_is_listed():
    modules = [module for module in vars(conformance).values() if inspect.ismodule(module)]
    named = {value for module in modules for name, value in vars(module).items() if name.startswith("check_")}
    assert named == {*CHECKS, check_replicas}
