"""A clock that is set while sessions run puts nothing out of order: neither turns, nor outcomes, nor the queue, nor updates.

That is the system clock, or that of the store: the primary that takes over may have another one.
"""

import time

import pytest

from tests.api.test_lifecycle import SESSIONS, call
from tests.proxy.kit import echo, user
from tokencache.store.clock import RECORD_CLOCK
from tokencache.testing import Fault

DAY = 86400.0
WEIGHTS = "/tokencache/v1/weights"


@pytest.fixture
def set_clock(monkeypatch):
    """Set the system clock by so many seconds; the machine's monotonic clock goes on."""
    real = time.time

    def by(seconds):
        monkeypatch.setattr("time.time", lambda: real() + seconds)

    return by


@pytest.fixture
def set_clock_of_store(monkeypatch):
    """Let the clock of records notice that the store's clock was set by so many seconds."""
    monkeypatch.setattr(RECORD_CLOCK, "offset", RECORD_CLOCK.offset)
    monkeypatch.setattr(RECORD_CLOCK, "_follows", True)
    monkeypatch.setattr("tokencache.store.clock.MOST_BACK", 1e-4)  # the engine of the tests answers in less than the usual step
    return lambda seconds: RECORD_CLOCK.follow(RECORD_CLOCK.now() + seconds, time.monotonic())


@pytest.fixture(params=["set_clock", "set_clock_of_store"])
def set_a_clock(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("step", [DAY, 300.0, -300.0, -DAY])
async def test_turns_and_the_outcome_keep_their_order(rig, set_a_clock, step):
    history = [user("EPISODE:talk")]
    history += [echo(await rig.say("s", history)), user("go on")]
    rig.engine.choose_fault = lambda _, body: Fault.answer(500, "{}") if "go on" in str(body) else None
    assert (await rig.post("s", messages=history))[0] == 500
    rig.engine.choose_fault = None
    assert (await rig.info())["outcome"] == "engine"
    set_a_clock(step)
    await rig.say("s", history)
    _, state = await call(rig, "POST", f"{SESSIONS}/s/finish", {"reward": 1.0})
    assert (state["outcome"], state["valid"]) == ("ok", True), "the harness called again, and went on"
    first, last = await rig.turns()
    assert 0 < last["created"] - first["created"] < 60 + max(0.0, step)
    assert (await rig.store.session("s")).latest.id == last["turn"]


@pytest.mark.parametrize("step", [DAY, -DAY])
async def test_a_call_takes_as_long_as_it_takes(rig, set_a_clock, step):
    rig.engine.choose_fault = lambda *_: set_a_clock(step)
    await rig.say("s", [user("EPISODE:talk")])
    (turn,) = await rig.turns()
    assert 0 <= turn["seconds"] < 60
    assert 0 <= (await rig.store.session("s")).call_ms < 60_000


async def test_the_queue_keeps_its_order(rig, set_clock):
    for name, step in (("a", 0.0), ("b", -DAY), ("c", DAY), ("d", -300.0)):
        set_clock(step)
        await rig.say(name, [user("EPISODE:talk")])
        await call(rig, "POST", f"{SESSIONS}/{name}/finish", {"reward": 1.0})
    assert [entry.session for entry in await rig.store.queue()] == ["a", "b", "c", "d"]


async def test_an_update_of_the_weights_goes_on(rig, set_clock):
    _, begun = await call(rig, "POST", f"{WEIGHTS}/update", {"mode": "none", "timeout": 600})
    set_clock(DAY)
    assert (await rig.get(WEIGHTS))["phase"] == "updating"
    status, ended = await call(rig, "POST", f"{WEIGHTS}/update/{begun['id']}/finish", {"version": "7"})
    assert (status, ended["version"]) == (200, "7")
