"""The queue of finished sessions: deliveries, groups, leases, acknowledgement, back-pressure, and waiting.

`play` lets consumers work on a queue at random: they are killed and started again, lose answers, let leases end and give deliveries back.
`problems` checks that each session was acknowledged by exactly one delivery.
"""

import asyncio
import contextlib
import random
from collections import defaultdict
from typing import NamedTuple

import pytest

from tests.core.forest import line
from tests.proxy.kit import proxied, user
from tests.support.waiting import PATIENCE
from tokencache.api import queue as queue_module
from tokencache.api.queue import SessionQueue
from tokencache.api.requests import Acknowledge, Await, Deliveries, Extend, Take
from tokencache.core.outcome import Outcome
from tokencache.core.session import LabelChanges, Labels, Reward, SessionSettings
from tokencache.core.weights import WeightsState
from tokencache.engine.announced_weights import AnnouncedWeights
from tokencache.engine.pool import Pool
from tokencache.errors import HarnessError
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.prefix_cache import PrefixCache
from tokencache.store.base import DamagedError, Entry, RemoveOutcome, StoreError
from tokencache.store.memory import MemoryStore

API = "/tokencache/v1"
SHORT = 0.01
"""Seconds of a lease that ends during a test."""


def queue_of(made):
    return SessionQueue(Ledger(made, PrefixCache(made, max_bytes=0)), AnnouncedWeights(Pool(None, ()), made))


async def finish(made, *names, group="", reward=None):
    for name in names:
        await made.define(name, SessionSettings(), Labels(group))
        if reward is not None:
            await made.add_reward(name, Reward(reward))
        await made.offer(name, (await made.session(name)).epoch, 1.0)
        await made.finish(name)


async def take(queue, asked):
    """The deliveries that a consumer takes."""
    return (await queue.take(asked))[0]


def names_of(deliveries):
    return [[info.id for info in one.sessions] for one in deliveries]


async def refusal(work):
    with pytest.raises(HarnessError) as refused:
        await work
    return refused.value.status, refused.value.kind


class TestDeliveries:
    async def test_a_damaged_session_does_not_keep_consumers_from_the_others(self):
        class Damaged(MemoryStore):
            async def session(self, session):
                if session == "damaged":
                    raise DamagedError("the data of session damaged is damaged")
                return await super().session(session)

        store = Damaged()
        queue = queue_of(store)
        await store.define("damaged", SessionSettings(), Labels())
        await store.offer("damaged", "epoch", 0.0)
        await finish(store, "a")
        finished, unknown = await queue.wait(Await(["damaged", "a"]))
        assert ([info.id for info in finished], unknown) == (["a"], [])
        assert names_of(await take(queue, Take("c"))) == [["a"]]
        assert await queue.wait(Await(["damaged"], wait=0)) == ([], [])
        assert [entry.session for entry in await store.queue()] == ["damaged", "a"], "somebody may still be able to read it"

    @pytest.mark.parametrize("wanted", [{"model": "m"}, {"max_lag": 5}])
    async def test_damaged_turns_do_not_keep_consumers_from_other_sessions(self, wanted):
        class Damaged(MemoryStore):
            async def turns(self, session):
                if session == "damaged":
                    raise DamagedError("a turn of session damaged is damaged")
                return await super().turns(session)

        store = Damaged()
        queue = queue_of(store)
        for at, name in enumerate(("damaged", "a")):
            await store.define(name, SessionSettings(), Labels())
            begun, forest = await store.begin(name, name, []), line(1)
            forest.change("t0", model="m", versions=[{"version": "8", "start": 0, "end": 2}], version_source="trainer")
            await store.commit(name, begun.epoch, name, [Entry(one, forest.tokens[one.id], (), b"") for one in forest.turns], [])
            await store.offer(name, begun.epoch, float(at))
            await store.finish(name)
        assert await store.replace_weights(WeightsState().announce("8", 1.0))
        assert names_of(await take(queue, Take("c", **wanted))) == [["a"]]
        assert [entry.session for entry in await store.queue()] == ["damaged", "a"]

    async def test_a_session_is_taken_sealed_and_gone_when_it_is_acknowledged(self, store):
        queue = queue_of(store)
        await finish(store, "a", "b")
        (one,) = await take(queue, Take("c1"))
        assert ([info.id for info in one.sessions], one.attempt, one.sessions[0].sealed) == (["a"], 1, True)
        (two,) = await take(queue, Take("c2"))
        assert names_of([two]) == [["b"]]
        assert await queue.counts() == {
            "candidates": 0,
            "ready": 0,
            "invalid": 0,
            "taken": 2,
            "consumers": {"c1": 1, "c2": 1},
            "groups": [],
        }
        assert await queue.acknowledge(Acknowledge([one.id])) == 1
        assert await queue.acknowledge(Acknowledge([one.id])) == 0  # again, because the answer was lost
        assert (await store.session("a"), (await store.session("b")).sealed) == (None, True)
        assert await queue.acknowledge(Acknowledge([two.id], delete=False)) == 0
        assert (await store.session("b")).sealed
        assert await store.queue_length() == 0

    async def test_a_consumer_that_is_killed_gets_its_delivery_again(self, store):
        queue = queue_of(store)
        await finish(store, "a", "b")
        (one,) = await take(queue, Take("c1"))
        assert names_of(await take(queue, Take("c2"))) == [["b"]]
        (again,) = await take(queue, Take("c1"))  # it names no delivery that it has
        assert (again.id, again.attempt, names_of([again])) == (one.id, 2, [["a"]])
        assert await take(queue, Take("c1", holding=[one.id])) == []
        await finish(store, "c", "d")
        assert names_of(await take(queue, Take("c1"))) == [["a"]]  # and no more than it asks for

    async def test_the_delivery_of_a_dead_consumer_goes_to_another_one(self, store):
        queue = queue_of(store)
        await finish(store, "a")
        (lost,) = await take(queue, Take("c1", lease=SHORT))
        (one,) = await take(queue, Take("c2", wait=PATIENCE))
        assert (names_of([one]), one.attempt, one.id != lost.id) == ([["a"]], 2, True)
        assert await refusal(queue.acknowledge(Acknowledge([lost.id]))) == (409, "delivery_expired")
        assert await refusal(queue.extend(Extend([lost.id]))) == (409, "delivery_expired")
        assert await store.session("a") is not None
        assert await queue.acknowledge(Acknowledge([one.id])) == 1

    async def test_what_was_acknowledged_is_not_delivered_again_if_its_deletion_fails(self, store, monkeypatch):
        queue = queue_of(store)
        await finish(store, "a", "b", group="g")
        ((one,), delete) = (await take(queue, Take("c1", group_size=2))), store.delete

        async def fail_at_b(session, *, reuse=False):
            if session == "b":
                raise StoreError("down")
            return await delete(session, reuse=reuse)

        monkeypatch.setattr(store, "delete", fail_at_b)
        monkeypatch.setattr(queue_module, "_DELETING_SECONDS", SHORT)
        with pytest.raises(StoreError):
            await queue.acknowledge(Acknowledge([one.id]))
        assert [await store.session("a"), (await store.session("b")).id] == [None, "b"]
        monkeypatch.setattr(store, "delete", delete)
        while await store.session("b") is not None:
            assert [await take(queue, Take(consumer)) for consumer in ("c1", "c2")] == [[], []]
        assert (await store.queue_length(), (await queue.counts())["taken"]) == (0, 0)

    async def test_a_delivery_that_is_released_is_free_at_once(self, store):
        queue = queue_of(store)
        await finish(store, "a")
        (one,) = await take(queue, Take("c1"))
        await queue.release(Deliveries([one.id]))
        await queue.release(Deliveries([one.id]))
        assert names_of(await take(queue, Take("c2"))) == [["a"]]

    async def test_a_group_is_delivered_when_it_is_whole(self, store):
        queue = queue_of(store)
        await finish(store, "a1", "a2", group="a")
        await finish(store, "b1", group="b")
        await finish(store, "lone", "lonely")
        assert await take(queue, Take("c", group_size=3)) == []
        await finish(store, "b2", "b3", "b4", group="b")
        (one,) = await take(queue, Take("c", group_size=3))
        assert (one.group, names_of([one])) == ("b", [["b1", "b2", "b3"]])
        await store.set_labels("lone", LabelChanges(group="a"))
        (two,) = await take(queue, Take("c", group_size=3, holding=[one.id]))
        assert (two.group, sorted(info.id for info in two.sessions)) == ("a", ["a1", "a2", "lone"])

    async def test_a_failed_session_does_not_let_its_group_wait_for_a_reward(self, store):
        queue = queue_of(store)
        await finish(store, "rewarded", reward=0.0, group="g")
        await finish(store, "waiting", group="g")
        assert await take(queue, Take("c", rewarded=True, group_size=2)) == []
        await store.finish("rewarded", Outcome("ok"))
        await store.finish("waiting", Outcome("sandbox"))
        assert (await queue.counts())["invalid"] == 1
        (one,) = await take(queue, Take("c", rewarded=True, group_size=2))
        assert names_of([one]) == [["rewarded", "waiting"]]

    async def test_filters(self, store):
        queue = queue_of(store)
        await finish(store, "plain")
        await finish(store, "rewarded", reward=0.0)
        await store.define("other", SessionSettings(harness="hermes"), Labels("g", tags=("t",)))
        await store.offer("other", (await store.session("other")).epoch, 1.0)
        assert await take(queue, Take("c", harness="hermes")) == []  # it is offered, but not finished
        await store.finish("other")
        for filters in ({"rewarded": True}, {"group": "g"}, {"tag": "t"}, {"harness": "hermes"}):
            wanted = "rewarded" if "rewarded" in filters else "other"
            (one,) = await take(queue, Take("c", **filters))
            assert names_of([one]) == [[wanted]]
            await queue.release(Deliveries([one.id]))
        assert await take(queue, Take("c", tag="none")) == []

    async def test_a_group_waits_for_sessions_that_are_young_enough(self, store):
        """Sessions without a turn lag by nothing; those with a turn of no known version count, and stay."""
        queue, forest = queue_of(store), line(1)
        await finish(store, "a1", "a2", group="a")
        await store.define("a3", SessionSettings(), Labels("a"))
        begun = await store.begin("a3", "c", [])
        (turn,) = forest.turns
        await store.commit("a3", begun.epoch, "c", [Entry(turn, forest.tokens[turn.id], (), b"")], [])
        await store.offer("a3", begun.epoch, 1.0)
        await store.finish("a3")
        assert await refusal(queue.take(Take("c", max_lag=1))) == (422, "weights_unknown")
        assert await store.replace_weights(WeightsState().announce("7", 1.0))
        assert await queue.take(Take("c", group_size=3, max_lag=1)) == ([], {"stale": 0, "unknown_lag": 1})
        (two,), left = await queue.take(Take("c", group_size=2, max_lag=1))
        assert (names_of([two]), left) == ([["a1", "a2"]], {"stale": 0, "unknown_lag": 0})
        (rest,), left = await queue.take(Take("c", holding=[two.id]))
        assert (names_of([rest]), left) == ([["a3"]], {})

    async def test_what_a_fork_shares_does_not_make_it_old(self, store):
        queue, forest = queue_of(store), line(2)
        await store.define("fork", SessionSettings(), Labels())
        begun = await store.begin("fork", "c", [])
        for name, version, marks in (("t0", "7", ("shared",)), ("t1", "8", ())):
            forest.change(name, versions=[{"version": version, "start": 0, "end": 2}], version_source="trainer", marks=marks)
        entries = [Entry(turn, forest.tokens[turn.id], (), b"") for turn in forest.turns]
        await store.commit("fork", begun.epoch, "c", entries, [])
        await store.offer("fork", begun.epoch, 1.0)
        await store.finish("fork")
        assert await store.replace_weights(WeightsState().announce("8", 1.0))
        (one,), left = await queue.take(Take("c", max_lag=0))
        assert (names_of([one]), left) == ([["fork"]], {"stale": 0, "unknown_lag": 0})

    async def test_a_session_that_is_deleted_while_it_is_taken_is_not_delivered(self, store, monkeypatch):
        queue, states = queue_of(store), store.states
        await finish(store, "a", "b")

        async def deleted_once_sealed(names):
            if len(names) == 1 and (info := (await states(names))[0]) is not None and info.sealed and info.id == "a":
                await store.delete("a")
            return await states(names)

        monkeypatch.setattr(store, "states", deleted_once_sealed)
        assert names_of(await take(queue, Take("c", limit=2))) == [["b"]]

    async def test_a_deleted_session_leaves_the_queue(self, store):
        queue = queue_of(store)
        await finish(store, "a", "b")
        await store.delete("a", reuse=True)
        await store.define("a", SessionSettings(), Labels())  # another rollout of the same name
        (one,) = await take(queue, Take("c", limit=5))
        assert names_of([one]) == [["b"]]
        assert await store.queue_length() == 1
        await store.delete("b", reuse=True)
        await store.define("b", SessionSettings(), Labels())
        assert await queue.acknowledge(Acknowledge([one.id])) == 0
        assert await store.session("b") is not None  # what is acknowledged was another rollout

    async def test_deliveries_of_another_store_are_refused(self, store):
        foreign = queue_of(MemoryStore())
        await finish(foreign._store, "a")
        (one,) = await take(foreign, Take("c"))
        queue = queue_of(store)
        for ids in ([one.id], ["nonsense"]):
            assert await refusal(queue.acknowledge(Acknowledge(ids))) == (422, "unknown_delivery")
            assert await refusal(queue.release(Deliveries(ids))) == (422, "unknown_delivery")
            assert await refusal(queue.extend(Extend(ids))) == (422, "unknown_delivery")
            assert await refusal(take(queue, Take("c", holding=ids))) == (422, "unknown_delivery")

    async def test_several_deliveries_at_once(self, store):
        queue = queue_of(store)
        await finish(store, *(f"s{n}" for n in range(5)))
        assert [len(one) for one in names_of(await take(queue, Take("c", limit=3)))] == [1, 1, 1]
        assert len(await take(queue, Take("c2", limit=3))) == 2


class TestWaiting:
    async def test_an_end_in_the_same_process_wakes_at_once(self, monkeypatch):
        monkeypatch.setattr("tokencache.api.queue.FIRST_PAUSE", 60.0)  # it does not look again by itself
        monkeypatch.setattr("tokencache.api.queue.LONGEST_PAUSE", 60.0)
        async with proxied() as rig:
            await rig.say("s", [user("EPISODE:talk")])
            for path, body in (("queue/take", {"consumer": "c", "wait": 30}), ("wait", {"sessions": ["s"], "wait": 30})):
                waiting = asyncio.create_task(rig.http.post(f"{rig.url}{API}/{path}", json=body).__aenter__())
                await asyncio.sleep(0)
                async with rig.http.post(f"{rig.url}{API}/sessions/s/finish") as answer:
                    assert answer.status == 200
                async with asyncio.timeout(PATIENCE):
                    found = await (await waiting).json()
                assert (found.get("deliveries") or found["finished"])[0]

    async def test_another_replica_finds_it_by_looking(self, store):
        waiting = asyncio.create_task(take(queue_of(store), Take("c", wait=30)))
        awaited = asyncio.create_task(queue_of(store).wait(Await(["s"], 30)))
        await asyncio.sleep(0)
        assert (await awaited) == ([], ["s"])
        await store.define("s", SessionSettings(), Labels())
        awaited = asyncio.create_task(queue_of(store).wait(Await(["s"], 30)))
        await finish_defined(store, "s")
        assert names_of(await waiting) == [["s"]]
        assert [info.id for info in (await awaited)[0]] == ["s"]

    async def test_a_session_with_a_call_in_flight_is_not_delivered_unless_it_is_sealed(self, store):
        queue = queue_of(store)
        begun = await store.begin("s", "call", [])
        await finish_defined(store, "s")
        assert await take(queue, Take("c")) == []
        assert (await queue.counts())["ready"] == 0
        await store.seal("s", force=True, at=1.0)
        (one,) = await take(queue, Take("c"))
        assert [incident.kind for incident in one.sessions[0].incidents] == ["sealed-early"]
        await store.settle("s", begun.epoch, "call")

    async def test_a_call_of_a_replica_that_is_gone_does_not_hold_its_session_back(self, store, monkeypatch):
        """A proxy that was killed closes nothing."""
        monkeypatch.setattr("tokencache.proxy.dedup.lost_calls.HEARTBEAT_SECONDS", 0.05)
        await store.heartbeat("living", 60.0)
        for session, replica in (("a", "dead"), ("b", "living")):
            await store.begin(session, f"call of {session}", [], replica=replica)
            await finish_defined(store, session)
        queue = queue_of(store)
        (one,) = await take(queue, Take("c", wait=PATIENCE))
        assert (names_of([one]), [incident.kind for incident in one.sessions[0].incidents]) == ([["a"]], ["replica-lost"])
        assert await take(queue, Take("c", wait=0.2, holding=[one.id])) == []


async def finish_defined(made, name):
    await made.offer(name, (await made.session(name)).epoch, 1.0)
    await made.finish(name)


class TestBackPressure:
    async def test_no_sessions_are_created_while_too_many_are_ready(self):
        async with proxied(max_ready=2) as rig:
            for name in ("a", "b"):
                await self.create(rig, name, 201)
                async with rig.http.post(f"{rig.url}{API}/sessions/{name}/finish"):
                    pass
            answer = await self.create(rig, "c", 429)
            assert answer.headers["Retry-After"]
            assert (await answer.json())["error"]["type"] == "too_many_ready"
            await self.create(rig, "a", 200, exist_ok=True)  # nothing new
            await rig.say("d", [user("EPISODE:talk")])  # calls are never refused
            async with rig.http.delete(f"{rig.url}{API}/sessions/a"):
                pass
            await self.create(rig, "c", 201)

    async def create(self, rig, name, status, **more):
        answer = await rig.http.post(f"{rig.url}{API}/sessions", json={"session": name, **more})
        assert answer.status == status, await answer.text()
        return answer


# --- exactly once ---


class Acknowledged(NamedTuple):
    """A delivery that a consumer acknowledged, and its sessions."""

    delivery: str
    sessions: tuple[str, ...]


def problems(log, names):
    """What is wrong with a history: sessions that were acknowledged never, or by several deliveries."""
    by_session = defaultdict(set)
    for one in log:
        for session in one.sessions:
            by_session[session].add(one.delivery)
    never = [f"{name} was never acknowledged" for name in names if name not in by_session]
    return never + [f"{name} was acknowledged by {len(ids)} deliveries" for name, ids in sorted(by_session.items()) if len(ids) > 1]


class Consumer:
    """A consumer: it takes, acknowledges, loses answers, and forgets everything when it is killed."""

    def __init__(self, name, queue, log, chance, group_size):
        self.name, self.queue, self.log, self.chance, self.group_size = name, queue, log, chance, group_size
        self.held = {}

    async def take(self, *, lease=600.0):
        for one in await take(self.queue, Take(self.name, lease=lease, group_size=self.group_size, holding=list(self.held))):
            self.held[one.id] = tuple(info.id for info in one.sessions)

    async def acknowledge(self):
        if not self.held:
            return
        delivery = self.chance.choice(list(self.held))
        sessions = self.held.pop(delivery)
        with contextlib.suppress(HarnessError):  # its lease ended, and another consumer has it
            for _ in range(self.chance.randint(1, 2)):  # sometimes the answer is lost, and the request is repeated
                await self.queue.acknowledge(Acknowledge([delivery]))
            self.log.append(Acknowledged(delivery, sessions))

    async def release(self):
        if self.held:
            await self.queue.release(Deliveries([self.held.popitem()[0]]))

    async def expire(self):
        """Take, and be slow."""
        await self.take(lease=SHORT)
        await asyncio.sleep(2 * SHORT)

    async def die(self):
        self.held = {}


async def play(made, seed, *, group_size):
    """Let consumers work at random until the queue is empty. Returns the log and the names of all sessions."""
    chance, log = random.Random(seed), []
    names = [f"s{seed}-{n}" for n in range(12)]
    left = list(names)
    consumers = [Consumer(f"c{n}", queue_of(made), log, chance, group_size) for n in range(3)]

    async def finish_one():
        if left:
            name = left.pop()
            await finish(made, name, group=f"g{names.index(name) // group_size}")

    for _ in range(80):
        one = chance.choice(consumers)
        step = chance.choice((one.take, one.take, one.acknowledge, one.acknowledge, one.release, one.expire, one.die, finish_one))
        await step()
    while left:
        await finish_one()
    for _ in range(60):
        for one in consumers:
            await one.die()
            await one.take()
            await one.acknowledge()
        if not await made.queue_length():
            break
    return log, names


@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("seed", range(4))
async def test_each_session_is_acknowledged_exactly_once(store, seed, group_size):
    log, names = await play(store, seed, group_size=group_size)
    assert problems(log, names) == []
    assert {len(one.sessions) for one in log} == {group_size}
    assert [info async for info in store.sessions() if info.id in names] == []


class Forgetful(MemoryStore):
    """Does not remember what was removed from the queue, and leaves it there."""

    async def remove(self, delivery):
        await self.release(delivery)
        return RemoveOutcome.REMOVED

    async def delete(self, session, *, reuse=False):
        return False


class Losing(MemoryStore):
    """Loses sessions that are released."""

    async def release(self, delivery):
        return await self.remove(delivery) is RemoveOutcome.REMOVED


@pytest.mark.parametrize(("broken", "words"), [(Forgetful, "was acknowledged by"), (Losing, "was never acknowledged")])
async def test_the_checker_finds_a_queue_that_is_not_exact(broken, words):
    found = []
    for seed in range(4):
        found += problems(*await play(broken(), seed, group_size=1))
    assert any(words in problem for problem in found)
