"""Groups in the queue: parts of groups, what a group waits for, and `--max-ready`.

`play` lets a producer create the sessions of groups in some order while consumers take whole groups. `problems` checks that this never
ends before all of them were taken, each once.
"""

import random
from collections import Counter

import pytest

from tests.api.test_queue import API, finish, names_of, queue_of, take
from tests.proxy.kit import proxied
from tests.support.waiting import PATIENCE
from tokencache.api.demand import LIVING_SECONDS
from tokencache.api.requests import Acknowledge, Take
from tokencache.core.outcome import Outcome
from tokencache.core.session import LabelChanges, Labels, SessionSettings
from tokencache.core.weights import WeightsState
from tokencache.store.memory import MemoryStore
from tokencache.trajectories.values import GroupState

SOON, LATE = 0.01, 600.0
"""Seconds after which a part of a group is delivered: during a test, or not."""


def part(consumer, seconds, **more):
    return Take(consumer, group_size=3, min_group=2, group_timeout=seconds, **more)


class TestPartsOfGroups:
    async def test_a_group_that_waits_too_long_is_delivered_in_part(self, store):
        queue = queue_of(store)
        await finish(store, "b1", group="b")  # fewer than min_group
        await finish(store, "a1", "a2", group="a")
        await store.define("a3", SessionSettings(), Labels("a"))
        assert await take(queue, part("c", LATE)) == []
        (one,) = await take(queue, part("c", SOON, wait=PATIENCE, limit=5))
        assert (names_of([one]), one.missing) == ([["a1", "a2"]], 1)
        (again,) = await take(queue_of(store), part("c", SOON))  # restarted, at another replica
        assert (again.id, again.missing) == (one.id, 1)
        await queue.acknowledge(Acknowledge([one.id]))
        await finish(store, "b2", "b3", group="b")
        (whole,) = await take(queue, part("c", LATE))
        assert (names_of([whole]), whole.missing) == ([["b1", "b2", "b3"]], 0)

    async def test_members_that_finish_later_begin_the_next_delivery(self, store):
        queue = queue_of(store)
        await finish(store, "a1", "a2", group="a")
        (one,) = await take(queue, part("c", SOON, wait=PATIENCE))
        await finish(store, "a3", group="a")
        for held in ([one.id], []):
            assert await take(queue, part("c", SOON, holding=held)) == ([] if held else [one._replace(attempt=2, until=ANY, sessions=ANY)])
        await queue.acknowledge(Acknowledge([one.id]))
        assert await take(queue, part("c", SOON)) == []
        (state,) = (await queue.counts())["groups"]
        assert (
            str(GroupState(**state | {"waited": 412.0})) == "group a: 1 of 3 ready, waits since 412 s, and no other session of it is open"
        )
        await finish(store, "a4", group="a")
        (late,) = await take(queue, part("c", SOON, wait=PATIENCE))
        assert names_of([late]) == [["a3", "a4"]]

    async def test_whole_groups_come_first(self, store):
        queue = queue_of(store)
        await finish(store, "a1", "a2", group="a")
        await take(queue, part("other", SOON, harness="none"))
        await finish(store, "b1", "b2", "b3", group="b")
        found = await take(queue, part("c", SOON, wait=PATIENCE, limit=1))
        assert names_of(found) == [["b1", "b2", "b3"]]

    @pytest.mark.parametrize(
        ("asked", "words"),
        [
            ({"group_size": 3, "min_group": 4, "group_timeout": 1}, "`min_group` 4 is larger than `group_size` 3"),
            ({"group_size": 3, "min_group": 2}, "`min_group` and `group_timeout` need each other"),
            ({"group_size": 3, "group_timeout": 1}, "`min_group` and `group_timeout` need each other"),
            ({"group_size": 3, "min_group": 0, "group_timeout": 1}, "Expected `int` >= 1"),
        ],
    )
    async def test_what_cannot_be_is_refused(self, asked, words):
        async with proxied() as rig, rig.http.post(f"{rig.url}{API}/queue/take", json={"consumer": "c", **asked}) as answer:
            assert answer.status == 422
            assert words in (await answer.json())["error"]["message"]


class Anything:
    """Equal to everything."""

    def __eq__(self, other):
        return True

    __hash__ = None


ANY = Anything()


class TestState:
    async def states(self, queue):
        return [str(GroupState(**state | {"waited": 412.0})) for state in (await queue.counts())["groups"]]

    async def test_a_group_says_what_it_waits_for(self, store):
        queue = queue_of(store)
        await finish(store, "a1", "a2", group="a", reward=1.0)
        await store.define("a3", SessionSettings(), Labels("a"))
        assert await self.states(queue) == ["group a: 2 ready, waits for a3 since 412 s"]  # nobody asked for it
        await take(queue, Take("c", group_size=3, rewarded=True))
        assert await self.states(queue_of(store)) == ["group a: 2 of 3 ready, waits for a3 since 412 s"]
        begun = await store.begin("a3", "call", [])
        await finish(store, "b", group="")
        await store.offer("a3", begun.epoch, 2.0)
        await store.finish("a3")
        assert await self.states(queue) == [
            "group a: 2 of 3 ready, waits for a3 since 412 s",
            "no group: 1 of 3 ready, and consumers take groups only",
        ]
        await store.settle("a3", begun.epoch, "call")
        assert (await self.states(queue))[0] == "group a: 3 of 3 ready, without a reward: a3"

    async def test_the_size_is_that_of_the_last_request_for_such_sessions(self, store):
        queue = queue_of(store)
        await finish(store, "a1", group="a")
        for consumer, size, group in (("c", 3, ""), ("c", 2, ""), ("d", 5, "other")):
            await take(queue, Take(consumer, group_size=size, group=group))
        assert await self.states(queue) == ["group a: 1 of 2 ready, waits since 412 s, and no other session of it is open"]


class TestBackPressure:
    async def test_sessions_that_wait_for_others_do_not_count(self, store):
        """A limit of 6, groups of 4, and two groups of which a session is missing."""
        queue = queue_of(store)
        await take(queue, Take("trainer", group_size=4))
        for group in "ab":
            await finish(store, *(f"{group}{n}" for n in range(3)), group=group)
        assert [await queue_of(store).too_many(group, 6) for group in ("a", "b", "new", "")] == [0, 0, 0, 0]
        for group in "abc":
            await finish(store, f"{group}3", group=group)
        assert [await queue_of(store).too_many(group, 6) for group in ("a", "new", "", "c")] == [8, 8, 8, 0]
        (one,) = await take(queue, Take("trainer", group_size=4))
        assert await queue.too_many("new", 6) == 0  # what is taken can be taken by nobody else
        await store.release(one.id)
        assert await queue.too_many("new", 6) == 8

    async def test_a_group_is_completed_also_if_nobody_has_asked_for_it(self, store):
        await finish(store, "a1", "a2", group="a")
        assert [await queue_of(store).too_many(group, 2) for group in ("a", "new", "")] == [0, 2, 2]

    async def test_each_session_counts_for_a_consumer_of_single_ones(self, store):
        queue = queue_of(store)
        await take(queue, Take("c"))
        await finish(store, "a1", "a2", group="a")
        assert [await queue.too_many(group, 2) for group in ("a", "")] == [2, 2]

    async def test_parts_that_are_delivered_count(self, store):
        queue = queue_of(store)
        await take(queue, part("c", SOON))
        await finish(store, "a1", "a2", group="a")
        while not await queue.too_many("new", 2):
            pass
        assert await queue.too_many("a", 2) == 0

    async def test_sessions_that_wait_for_a_reward_count_and_those_that_are_too_old_do_not(self, store):
        queue = queue_of(store)
        assert await store.replace_weights(WeightsState().announce("7", 1.0))
        await take(queue, Take("c", rewarded=True, max_lag=1))
        await finish(store, "a")
        assert await queue.too_many("", 1) == 1
        queue._fits = lambda *_: no()
        assert await queue.too_many("", 1) == 0

    async def test_a_consumer_that_left_does_not_count(self, store, monkeypatch):
        queue, now = queue_of(store), [1e9]
        monkeypatch.setattr("tokencache.api.queue.RECORD_CLOCK.now", lambda: now[0])
        await take(queue, Take("old"))
        now[0] += LIVING_SECONDS + 1
        await take(queue, Take("trainer", group_size=2))
        await finish(store, "a1", group="a")
        assert await queue.too_many("new", 1) == 0
        await take(queue, Take("old"))  # it takes a1
        await finish(store, "b1", group="b")
        assert await queue.too_many("new", 1) == 1
        now[0] += 2 * 86400
        await take(queue, Take("trainer", group_size=2))
        await queue.takeable()
        assert len(await store.demands()) == 1


async def no():
    return False


# --- no deadlock ---


def in_some_order(groups, size, chance):
    """The sessions of groups, in an order in which a producer could create them."""
    rows = [[(group, f"{group}-{n}") for n in range(size)] for group in groups]
    match chance.randrange(3):
        case 0:
            return [one for row in rows for one in row]
        case 1:
            return [one for column in zip(*rows, strict=True) for one in column]
    order = [one for row in rows for one in row]
    chance.shuffle(order)
    return order


class Run:
    """A producer that creates sessions in a fixed order, and a trainer that needs some groups for a step."""

    def __init__(self, made, seed, too_many):
        self.chance = chance = random.Random(seed)
        self.size, self.most, self.batch = chance.randint(2, 4), chance.randint(1, 6), chance.randint(1, 3)
        self.late_labels = chance.random() < 1 / 3
        self.left = in_some_order([f"{seed}-{n}" for n in range(5)], self.size, chance)
        self.names, self.begun, self.held, self.taken = [name for _, name in self.left], [], [], []
        self.store, self.too_many, self.replicas = made, too_many, [queue_of(made), queue_of(made)]

    async def create(self):
        if not self.left:
            return
        group, name = self.left[0]
        known = "" if self.late_labels else group
        if not await self.too_many(self.chance.choice(self.replicas), known, self.most):
            await self.store.define(name, SessionSettings(), Labels(known))
            self.begun.append(self.left.pop(0))

    async def finish(self):
        if self.begun:
            group, name = self.begun.pop(self.chance.randrange(len(self.begun)))
            await self.store.set_labels(name, LabelChanges(group))
            await self.store.offer(name, (await self.store.session(name)).epoch, float(len(self.taken)))
            await self.store.finish(name, Outcome(self.chance.choice(["ok", "sandbox"])))

    async def consume(self):
        for one in await take(self.chance.choice(self.replicas), Take("trainer", group_size=self.size, holding=self.held)):
            self.held.append(one.id)
            self.taken += [info.id for info in one.sessions]
        if len(self.held) >= self.batch:
            await self.replicas[0].acknowledge(Acknowledge(self.held))
            self.held = []


async def play(made, seed, too_many):
    """Create, finish and take groups at random, then as long as anything happens. Returns the sessions, and those that were taken."""
    run, before = Run(made, seed, too_many), None
    steps = run.create, run.finish, run.consume
    for _ in range(100):
        await run.chance.choice(steps)()
    while before != (before := (len(run.left), len(run.begun), len(run.taken))):
        for step in steps:
            await step()
    return run.names, run.taken


def problems(names, taken):
    """What is wrong at the end: sessions that were never taken, or twice."""
    counts = Counter(taken)
    return [f"{name} was taken {counts[name]} times" for name in names if counts[name] != 1]


async def by_rule(queue, group, most):
    return await queue.too_many(group, most)


async def by_length(queue, _group, most):
    """All sessions that are not acknowledged count."""
    return await queue._store.queue_length() >= most


async def without_sizes(queue, _group, most):
    """All sessions that are not taken count."""
    return (await queue.counts())["ready"] >= most


@pytest.mark.parametrize("seed", range(30))
async def test_no_order_ends_in_a_deadlock(seed):
    assert problems(*await play(MemoryStore(), seed, by_rule)) == []


@pytest.mark.parametrize("seed", range(2))
async def test_no_order_ends_in_a_deadlock_in_any_store(store, seed):
    assert problems(*await play(store, seed, by_rule)) == []


@pytest.mark.parametrize("rule", [by_length, without_sizes])
async def test_the_checker_finds_a_deadlock(rule):
    found = [problems(*await play(MemoryStore(), seed, rule)) for seed in range(30)]
    assert any("was taken 0 times" in one for several in found for one in several)
