"""Sessions with a deadline or a limit of silence are finished as a timeout, by any replica, and their harness is told so."""

import time

import pytest

from tests.api.test_lifecycle import SESSIONS, InFlight, call, refused, say
from tests.proxy.kit import CHAT, HEADER, proxied, user
from tests.support.waiting import until
from tokencache.core.outcome import Outcome
from tokencache.core.session import Labels, SessionSettings
from tokencache.proxy.finishing import TimeLimits
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.prefix_cache import PrefixCache
from tokencache.store.base import DamagedError, StoreError
from tokencache.store.memory import MemoryStore

PASSED, TO_COME = time.time() - 10, time.time() + 86400


@pytest.fixture
async def rig():
    async with proxied() as made:
        yield made


def replica(store):
    """A proxy of its own on a store."""
    return TimeLimits(Ledger(store, PrefixCache(store, max_bytes=0)))


async def defined(store, **limits):
    """Define session `s` as a proxy that is killed at once: its time to be looked at has come."""
    await store.watch("s", -1.0)
    await store.define("s", SessionSettings(**limits), Labels())


@pytest.mark.parametrize(
    ("limits", "state", "words"),
    [
        ({"deadline": PASSED}, "finished", "its deadline passed at"),
        ({"deadline": TO_COME}, "open", ""),
        ({"silent_for": 1e-9}, "finished", "no call began or ended for"),
        ({"silent_for": 60.0}, "open", ""),
        ({"deadline": TO_COME, "silent_for": 1e-9}, "finished", "no call began"),
        ({}, "open", ""),
    ],
)
async def test_any_replica_finishes_a_session_whose_time_is_up(limits, state, words):
    store = MemoryStore()
    await defined(store, **limits)
    other = replica(store)
    for _ in range(2):  # silence begins with the first look
        await other.look()
        if (await store.session("s")).state == "open":
            await store.watch("s", -1.0)
    info = await store.session("s")
    assert info.state == state
    assert (info.outcome is not None and info.outcome.kind == "timeout" and words in info.outcome.detail) == (state == "finished")
    assert [entry.session for entry in await store.queue()] == ["s"] * (state == "finished")
    assert (await store.overdue()).sessions == ["s"] * (state == "open")


async def test_a_pause_of_the_process_is_no_silence():
    """A call that was sent meanwhile waits in a socket; the timers of a process that goes on run before it is read."""
    store = MemoryStore()
    limits = replica(store)

    async def look(after):
        store._clock.offset += after
        await store.watch("s", -1.0)
        await limits.look()
        return (await store.session("s")).state

    await limits.look()
    await defined(store, silent_for=60.0)
    assert await look(5.0) == "open"
    assert await look(100.0) == "open"
    assert [await look(9.0) for _ in range(7)] == ["open"] * 6 + ["finished"]


async def test_a_call_in_flight_is_no_silence_but_does_not_stop_a_deadline():
    store = MemoryStore()
    settings = SessionSettings(silent_for=1e-9)
    await defined(store, silent_for=1e-9)
    epoch = (await store.begin("s", "k", [], settings=settings.digest)).epoch
    limits = replica(store)
    await limits.look()
    assert (await store.session("s")).state == "open"
    await store.settle("s", epoch, "k")
    await store.watch("s", -1.0)
    await limits.look()
    assert (await store.session("s")).state == "finished"


async def test_what_its_owner_said_stays():
    store = MemoryStore()
    await defined(store, deadline=PASSED)
    await store.finish("s", Outcome("sandbox"))
    await replica(store).look()
    assert ((await store.session("s")).outcome, (await store.overdue()).sessions) == (Outcome("sandbox"), [])


async def test_a_session_that_is_gone_is_watched_no_longer():
    store = MemoryStore()
    await defined(store, deadline=PASSED)
    await store.delete("s")
    await replica(store).look()
    assert (await store.overdue()).sessions == []


class Damaged(MemoryStore):
    """A store whose record of session `damaged` cannot be read."""

    async def session(self, session):
        if session == "damaged":
            raise DamagedError("the record is damaged")
        return await super().session(session)


async def test_a_damaged_record_does_not_keep_others_from_being_finished():
    store = Damaged()
    await store.watch("damaged", -2.0)
    await defined(store, deadline=PASSED)
    limits = replica(store)
    with pytest.raises(StoreError):
        await limits.look()
    await limits.look()
    assert (await store.session("s")).state == "finished"


async def test_a_lost_harness_over_http(rig):
    status, state = await call(rig, "POST", SESSIONS, {"session": "s", "silent_for": 0.2, "deadline": TO_COME})
    assert (status, state["state"]) == (201, "open")

    async def over():
        return (await rig.info())["state"] == "finished"

    await until(over)
    state = await rig.info()
    assert (state["outcome"], state["valid"]) == ("timeout", False)
    status, answer = await say(rig)
    assert (status, answer["error"]["type"]) == (409, "session_finished")
    assert "is finished (timeout: no call began or ended for 0.2 seconds) and accepts no new calls" in answer["error"]["message"]
    body = {"model": "sim", "messages": [user("hello")], "max_tokens": 5}
    async with rig.http.post(f"{rig.url}/v1/messages", json=body, headers={HEADER: "s"}) as answer:
        assert (answer.status, "(timeout: no call" in (await answer.json())["error"]["message"]) == (409, True)
    assert (await refused(rig, "POST", f"{SESSIONS}/s/finish", {"failed": "ok"}))[:2] == (409, "outcome_conflict")
    assert (await call(rig, "POST", f"{SESSIONS}/s/finish", {"reward": 0.0}))[1]["outcome"] == "timeout"


async def test_a_call_in_flight_at_the_deadline_ends_normally(rig):
    await call(rig, "POST", SESSIONS, {"session": "s", "deadline": time.time() + 1.5})
    async with InFlight(rig):

        async def over():
            return (await rig.info())["state"] == "finished"

        await until(over)
        assert len((await rig.info())["open_calls"]) == 1


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        *(({"deadline": passed}, f"`deadline` {passed:.0f} is in the past") for passed in (PASSED, 0, -5)),
        ({"deadline": "soon"}, "deadline"),
        ({"silent_for": 0}, "silent_for"),
        ({"silent_for": -1}, "silent_for"),
        ({"silentfor": 1}, "did you mean 'silent_for'"),
    ],
    ids=["passed", "0", "negative", "text", "silent 0", "silent negative", "misspelled"],
)
async def test_impossible_limits_are_refused_by_name(rig, limits, words):
    status, _, message = await refused(rig, "POST", SESSIONS, {"session": "s", **limits})
    assert (status in {400, 422}, words in message) == (True, True), message
    assert await rig.store.session("s") is None


async def test_a_session_with_limits_serves_calls(rig):
    await call(rig, "POST", SESSIONS, {"session": "s", "silent_for": 600, "deadline": TO_COME})
    async with rig.http.post(rig.url + CHAT, json={"model": "sim", "messages": [user("EPISODE:talk")]}, headers={HEADER: "s"}) as answer:
        assert answer.status == 200
    status, kind, _ = await refused(rig, "POST", SESSIONS, {"session": "s", "silent_for": 601, "exist_ok": True})
    assert (status, kind) == (409, "settings_conflict")
