"""A system clock that is set, or a machine that is suspended, expires nothing that is in use, and keeps nothing forever."""

import asyncio
import contextlib
import itertools
import logging
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.machine import machine_of
from tests.support.profiles import examples
from tokencache import metrics
from tokencache.core.session import Budget, Labels, SessionSettings
from tokencache.store.base import Binding, SessionDeletedError
from tokencache.store.clock import RECORD_CLOCK, ClockWatch, SteadyClock
from tokencache.store.file import FileStore
from tokencache.store.memory import MemoryStore
from tokencache.store.redis import capacity

TTL, DAY = 7 * 86400.0, 86400.0
KINDS = ["memory", "file"]


@contextlib.asynccontextmanager
async def processes(kind, folder, **options):
    """Two processes with one store; with a memory there is only one."""
    url = f"file:{folder}/sessions.db"
    stores = [MemoryStore(ttl_seconds=TTL, **options)] if kind == "memory" else [FileStore(url, ttl_seconds=TTL, **options) for _ in "ab"]
    for store in stores:
        await store.open()
    yield stores
    for store in stores:
        await store.close()


async def names(store):
    return {info.id async for info in store.sessions()}


STEPS = st.one_of(
    st.tuples(st.just("use"), st.sampled_from("abc")),
    st.tuples(st.just("set"), st.floats(-400 * DAY, 400 * DAY)),
    st.tuples(st.just("pass"), st.floats(0.0, 3 * DAY)),
    st.tuples(st.just("pass"), st.floats(6.9 * DAY, 7.1 * DAY)),
    st.tuples(st.just("suspend"), st.floats(0.0, 30 * DAY)),
    st.tuples(st.just("reopen"), st.integers(0, 1)),
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(60))
@given(steps=st.lists(STEPS, max_size=25))
def test_only_what_was_not_used_for_the_time_to_live_expires(tmp_path_factory, kind, steps):
    async def run(machine):
        used, calls = {}, itertools.count()
        async with processes(kind, tmp_path_factory.mktemp("clock")) as stores:
            for n, (step, value) in enumerate(steps):
                match step:
                    case "use":
                        await stores[n % len(stores)].begin(value, f"k{next(calls)}", [])
                        used[value] = machine.running
                    case "set" | "suspend":
                        machine.system += value
                    case "pass":
                        machine.go_on(value)
                    case "reopen" if kind == "file":
                        await stores[value].close()
                        await stores[value].open()
                expected = {name for name, at in used.items() if machine.running - at < TTL}
                for store in stores:
                    fresh = f"new{next(calls)}"
                    await store.begin(fresh, "k", [])  # a new session deletes what has expired
                    assert await names(store) == {*expected, fresh}
                    await store.delete(fresh, reuse=True)

    with machine_of() as machine:
        asyncio.run(run(machine))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("days", [8, -8])
async def test_all_that_expires_goes_by_a_clock_that_is_not_set(tmp_path, kind, days):
    settings_ = SessionSettings(budget=Budget(seconds=3600))
    with machine_of() as machine:
        async with processes(kind, tmp_path, tombstone_seconds=3600.0) as (store, *_):
            await store.define("s", settings_, Labels())
            begun = await store.begin("s", "k", [], replica="r", settings=settings_.digest)
            await store.bind_key("key", Binding("s"))
            await store.heartbeat("r", 10)
            await store.begin("gone", "k", [])
            await store.delete("gone")
            await store.offer("queued", "e", machine.system)
            assert await store.lease(["queued"], "d", "c", 600)
            machine.system += days * DAY
            machine.go_on(5)
            assert (await store.begin("s", "k", [], settings=settings_.digest)).age == pytest.approx(begun.age + 5), "the budget"
            assert (await store.begin("s", "k", [], settings=settings_.digest)).epoch == begun.epoch
            assert await store.binding_of_key("key") == Binding("s")
            assert await store.live_replicas(["r"]) == {"r"}
            assert not await store.lease(["queued"], "d2", "c2", 600)
            with pytest.raises(SessionDeletedError):
                await store.begin("gone", "k", [])
            machine.go_on(3600)
            assert await store.live_replicas(["r"]) == set()
            assert await store.lease(["queued"], "d2", "c2", 600)
            await store.begin("gone", "k", [])
            machine.go_on(TTL)
            assert await names(store) == set()
            assert await store.binding_of_key("key") is None


@pytest.mark.parametrize("boot_id", ["one", ""], ids=["known", "unknown"])
@pytest.mark.parametrize("days", [400, -400])
async def test_a_file_keeps_its_time_over_a_restart_of_the_machine(tmp_path, boot_id, days):
    """The clock was wrong, and was set while the store was in use. The machine was off for some days."""
    with machine_of(boot_id) as machine:
        for off, kept in ((3 * DAY, {"s", "new"}), (8 * DAY, {"new"})):
            async with processes("file", tmp_path) as (store, _):
                await store.begin("s", "k", [])
                machine.system += days * DAY
                await store.heartbeat("r", 10)
            machine.restart(off)
            async with processes("file", tmp_path) as (store, _):
                await store.begin("new", "k", [])
                assert await names(store) == kept


async def test_a_machine_that_starts_with_a_clock_of_long_ago(tmp_path):
    """It has no clock of its own. The time of the store does not go back, so that what is written now does not expire at the next start."""
    with machine_of() as machine:
        async with processes("file", tmp_path) as (store, _):
            await store.begin("s", "k", [])
        right = machine.system
        machine.restart(-right)
        async with processes("file", tmp_path) as (store, _):
            await store.begin("t", "k", [])
            machine.system += right
            await store.heartbeat("r", 10)
        machine.restart(DAY)
        async with processes("file", tmp_path) as (store, _):
            await store.begin("new", "k", [])
            assert await names(store) == {"s", "t", "new"}
            machine.go_on(TTL)
            assert await names(store) == set()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("step", "words"), [(60.0, "forwards by 60 s"), (-60.0, "backwards by 60 s")])
async def test_a_clock_that_is_set_is_reported_once(tmp_path, caplog, kind, step, words):
    counted = metrics.CLOCK_STEPS.labels("system")
    before = counted._value.get()
    with machine_of() as machine:
        async with processes(kind, tmp_path) as (store, *_):
            for passing in (0.0, 3.0, 3.0 + step, 3.0, 3.0):
                machine.go_on(3.0)
                machine.system += passing - 3.0
                await store.heartbeat("r", 10)
    assert [record.levelno for record in caplog.records if words in record.message] == [logging.WARNING]
    assert counted._value.get() == before + 1


def test_a_clock_that_is_a_little_fast_is_not_reported(caplog):
    with machine_of() as machine:
        watch = ClockWatch("redis", "")
        for _ in range(1000):
            machine.go_on(1.0)
            machine.system += 0.1
            watch.check(machine.system)
    assert caplog.records == []


@pytest.mark.redis
async def test_a_clock_of_redis_that_is_set_is_reported(emptied_redis_store, monkeypatch, caplog):
    """The proxy cannot keep what Redis deletes. It says so."""
    store = emptied_redis_store
    monkeypatch.setattr(RECORD_CLOCK, "offset", RECORD_CLOCK.offset)
    await store._capacity.close()  # only the checks of this test
    run, ahead = store._backend.run, [0]

    async def shifted(*command):
        answer = await run(*command)
        return (answer[0] + ahead[0], answer[1]) if command == ("TIME",) else answer

    monkeypatch.setattr(store._backend, "run", shifted)
    for ahead[0] in (0, 0, 691_200, 691_200, 691_201):
        await store._capacity.check()
    (reported,) = [record.message for record in caplog.records if "CLOCK" in record.message]
    assert reported.startswith("THE CLOCK WAS SET: the redis clock went forwards by 6912")
    assert "sessions in use may be gone" in reported
    assert RECORD_CLOCK.now() == pytest.approx(time.time() + 691_201, abs=5), "all replicas record by the clock of Redis"


@pytest.mark.redis
async def test_the_clock_of_redis_is_not_followed_if_it_answers_late(emptied_redis_store, monkeypatch):
    """It was read at any time since it was asked."""
    await emptied_redis_store._capacity.close()
    monkeypatch.setattr(RECORD_CLOCK, "offset", RECORD_CLOCK.offset - 2)
    for each, behind in ((3, 2), (0, 0)):
        monkeypatch.setattr(capacity, "monotonic", itertools.count(time.monotonic(), each).__next__)
        await emptied_redis_store._capacity.check()
        assert RECORD_CLOCK.now() == pytest.approx(time.time() - behind, abs=1)


async def test_records_have_the_time_of_the_file(tmp_path):
    """So turns keep their order though the clock was set, and one of the processes that use the file has started since."""
    with machine_of() as machine:
        async with processes("file", tmp_path) as (store, _):
            machine.system += DAY
            vars(RECORD_CLOCK).update(vars(SteadyClock()))  # as in a process that starts now
            await store.close()
            await store.open()
            assert RECORD_CLOCK.now() == machine.system - DAY


def test_a_clock_that_runs_follows_one_that_is_behind_in_small_steps():
    """What comes next is not older than what is recorded; a process that starts has recorded nothing yet."""
    with machine_of() as machine:
        clock, readings = SteadyClock(), []
        clock.follow(machine.system - DAY, machine.running)
        assert clock.now() == machine.system - DAY
        for _ in range(400):
            machine.go_on(1.0)
            clock.follow(machine.system - DAY - 30.0, machine.running)
            readings.append(clock.now())
        assert readings == sorted(readings)
        assert readings[-1] == pytest.approx(machine.system - DAY - 30.0, abs=1.0)
