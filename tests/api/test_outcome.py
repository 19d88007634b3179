"""The outcome of a session over HTTP: what the proxy saw, what its owner says, and what is refused."""

import asyncio
import contextlib

import msgspec
import pytest

from tests.api.test_lifecycle import SESSIONS, InFlight, call, refused, say
from tests.proxy.kit import CHAT, HEADER, proxied, user
from tests.proxy.test_client_gone import leave_after
from tests.proxy.test_store_faults import Flaky
from tests.support.waiting import PATIENCE, until
from tokencache.batching import group_advantages, select
from tokencache.core.incidents import IncidentKind
from tokencache.proxy.dedup import lost_calls
from tokencache.proxy.dedup.lost_calls import LostCalls
from tokencache.testing import Fault
from tokencache.trajectories.values import Trajectory

FINISH = f"{SESSIONS}/s/finish"


@pytest.fixture
async def rig():
    async with proxied() as made:
        yield made


async def finished(rig, **members):
    """The outcome of session `s` in its state and its trajectory after it is finished: kind, words in its detail, valid."""
    status, state = await call(rig, "POST", FINISH, members)
    assert status == 200, state
    _, trajectory = await call(rig, "GET", f"{SESSIONS}/s/trajectories")
    names = ("outcome", "outcome_detail", "valid", "complete")
    assert [trajectory[name] for name in names] == [state[name] for name in names]
    return state["outcome"], state["outcome_detail"], state["valid"]


async def test_a_rollout_that_ends_well_is_valid(rig):
    await say(rig)
    assert await finished(rig, reward=0.0) == ("ok", "", True)


async def test_an_engine_that_fails_in_the_second_turn_is_no_reward(rig):
    await say(rig)
    rig.engine.faults.append(Fault.answer(500, '{"error": {"message": "out of memory"}}'))
    assert (await say(rig))[0] == 500
    kind, detail, valid = await finished(rig, reward=0.0)
    assert (kind, "out of memory" in detail, valid) == ("engine", True, False)
    assert (await rig.info())["complete"]


async def test_a_harness_that_repeats_the_failed_call_ends_well(rig):
    await say(rig)
    rig.engine.faults.append(Fault.answer(500, "{}"))
    await say(rig)
    assert not (await rig.info())["valid"]  # so far
    assert (await say(rig))[0] == 200
    assert (await finished(rig))[0] == "ok"


async def test_a_call_that_the_engine_refuses_is_no_failure_of_the_engine(rig):
    await say(rig)
    rig.engine.faults.extend([Fault.answer(400, "{}")] * 2)
    await say(rig)
    assert await finished(rig) == ("ok", "", True)


async def test_an_engine_that_is_not_reached(rig):
    await say(rig)
    rig.engine.faults.extend([Fault.close()] * 9)
    assert (await say(rig))[0] >= 500
    assert (await finished(rig))[0] == "engine"


async def test_a_session_without_a_call(rig):
    await call(rig, "POST", SESSIONS, {"session": "s"})
    assert (await rig.info())["outcome"] == "ok"  # the call may still come
    assert await finished(rig, reward=1.0) == ("harness", "no call was recorded", False)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_harness_that_leaves_during_a_reply(stream):
    async with proxied(linger=0) as rig:
        rig.engine.faults.append(Fault.stall() if stream else Fault.hang())
        asking = asyncio.create_task(rig.post("s", messages=[user("EPISODE:talk")], stream=stream))

        async def begun():
            info = await rig.store.session("s")
            return info is not None and info.open_calls

        async def ended():
            return not (await rig.info())["open_calls"]

        await until(begun)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        await until(ended)
        assert (await finished(rig))[0] == "harness"


@pytest.mark.parametrize(("stream", "mark"), [(True, "aborted"), (False, "unanswered")])
async def test_a_call_that_the_harness_left_is_made_up_for_by_a_later_one_that_is_recorded_before_it(stream, mark):
    async with proxied(linger=60) as rig:
        commit, go, held = rig.store.commit, asyncio.Event(), set()

        async def slow(session, epoch, ended, *args, **kwargs):
            if ended in held:
                await go.wait()
            await commit(session, epoch, ended, *args, **kwargs)

        async def ended():
            return not (await rig.info())["open_calls"]

        rig.store.commit, rig.engine.token_delay = slow, 0.01
        left = asyncio.create_task(rig.post("s", messages=[user("EPISODE:talk")]) if not stream else leave_after(rig, 3))
        await rig.engine.until(lambda: bool(rig.ground_truth("s")))
        held |= {one.call for one in (await rig.store.session("s")).open_calls}
        if not stream:
            left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        rig.engine.token_delay = 0
        await rig.say("s", [user("EPISODE:demo")])
        go.set()
        await until(ended)
        assert [turn["marks"] for turn in await rig.turns()] == [[], [mark]]
        assert await finished(rig) == ("ok", "", True)


@pytest.mark.parametrize("repeated", [False, True])
async def test_a_harness_that_leaves_before_an_engine_takes_its_call(repeated):
    async with proxied(hold=PATIENCE) as rig:
        await say(rig)
        rig.engine.faults.extend([Fault.answer(503, "{}")] * 200)
        asking = asyncio.create_task(say(rig))

        async def waits():
            return (await rig.info())["open_calls"]

        await until(waits)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking

        async def ended():
            return not await waits()

        await until(ended)
        rig.engine.faults.clear()
        if repeated:
            await say(rig)
        assert await finished(rig) == (
            ("ok", "", True) if repeated else ("harness", "client-gone: the client left before an engine took the call", False)
        )


async def test_a_session_whose_budget_is_spent():
    async with proxied(max_calls=1) as rig:
        await say(rig)
        await rig.post("s", messages=[user("EPISODE:demo")])
        kind, detail, valid = await finished(rig, reward=0.0)
        assert (kind, "1 calls" in detail, valid) == ("budget", True, False)


async def test_a_session_that_is_sealed_by_force(rig):
    async with InFlight(rig):
        _, state = await call(rig, "POST", f"{SESSIONS}/s/seal?force=true")
    assert (state["outcome"], state["valid"]) == ("canceled", False)


async def test_a_replica_that_dies_before_it_records_a_failure_leaves_an_invalid_rollout(rig):
    await say(rig)
    epoch = (await rig.store.begin("s", "k", [], replica="killed")).epoch
    kind, _, valid = await finished(rig, reward=0.0)
    assert (kind, valid) == ("ok", False)  # the call is open: what became of it is not known

    lost = IncidentKind.REPLICA_LOST.incident("the proxy that served this call is gone", call="k", at=1.0)
    await rig.store.settle("s", epoch, "k", [lost])  # as whoever waits for the session does
    state = await rig.info()
    assert (state["complete"], state["valid"]) == (False, False)


@pytest.mark.parametrize("went_on", [False, True])
async def test_a_replica_that_dies_in_the_only_call_is_no_fault_of_the_harness(rig, monkeypatch, went_on):
    monkeypatch.setattr(lost_calls, "HEARTBEAT_SECONDS", 0.0)
    await rig.store.begin("s", "k", [], replica="killed")
    if went_on:  # its SDK does not join the call
        await say(rig)
    assert (await finished(rig, reward=0.0))[2] is False
    watch = LostCalls(rig.store)
    for _ in range(2):  # a replica is gone if it was missed for a while
        await watch.close(await rig.store.session("s"))
    state = await rig.info()
    assert (state["outcome"], state["complete"]) == ("ok" if went_on else "engine", False)


async def test_a_failure_counts_although_the_store_cannot_record_it():
    async with proxied(store=Flaky()) as rig:
        await say(rig)
        rig.store.broken |= {"settle", "add_incidents"}
        rig.engine.faults.append(Fault.answer(500, "{}"))
        await say(rig)
        assert [(await rig.info())[name] for name in ("outcome", "valid")] == ["engine", False]
        rig.store.broken.clear()

        async def saved():
            return not (await rig.info())["open_calls"]

        await until(saved)
        assert (await finished(rig))[0] == "engine"


async def test_a_store_that_fails_calls_is_a_failure_unless_they_are_repeated():
    async with proxied(store=Flaky(), on_store_error="fail") as rig:
        await say(rig)
        rig.store.broken.add("begin")
        assert (await say(rig))[0] == 503
        assert [(await rig.info())[name] for name in ("outcome", "complete", "valid")] == ["store", True, False]
        rig.store.broken.clear()
        await say(rig)
        assert await finished(rig) == ("ok", "", True)


async def test_failures_of_the_infrastructure_move_no_advantage(rig):
    """One rollout meets a failing engine, one a harness that dies before its first call; both get a reward of 0 as the others could."""
    rewards = {"good": 1.0, "bad": 0.0, "failed": 0.0, "dead": 0.0}
    for name, reward in rewards.items():
        await call(rig, "POST", SESSIONS, {"session": name, "group": "g"})
        if name != "dead":
            await say(rig, name)
        if name == "failed":
            rig.engine.faults.append(Fault.answer(500, "{}"))
            await say(rig, name)
        await call(rig, "POST", f"{SESSIONS}/{name}/finish", {"reward": reward})
    group = [msgspec.convert((await call(rig, "GET", f"{SESSIONS}/{name}/trajectories"))[1], Trajectory) for name in rewards]
    assert [one.complete for one in group] == [True] * 4
    assert group_advantages(group) == {**group_advantages(group[:2]), "failed": 0.0, "dead": 0.0}
    assert {row.trajectory.session for row in select(group).kept} == {"good", "bad"}


@pytest.mark.parametrize("failed", ["sandbox", "my-word_2"])
async def test_what_the_owner_says_decides(rig, failed):
    await say(rig)
    assert await finished(rig, reward=0.5, failed=failed, detail="no disk") == (failed, "no disk", False)
    assert await finished(rig, failed=failed, detail="other words") == (failed, "no disk", False)


async def test_the_owner_may_overrule_what_the_proxy_saw(rig):
    await say(rig)
    rig.engine.faults.append(Fault.answer(500, "{}"))
    await say(rig)
    assert await finished(rig, reward=0.0, failed="ok") == ("ok", "", True)


async def test_a_second_outcome_is_refused_and_changes_nothing(rig):
    await say(rig)
    await finished(rig, failed="sandbox")
    status, kind, message = await refused(rig, "POST", FINISH, {"failed": "ok", "reward": 1.0, "group": "g"})
    assert (status, kind) == (409, "outcome_conflict")
    assert "'sandbox', which cannot become 'ok'" in message
    state = await rig.info()
    assert (state["reward"], state["group"], state["outcome"]) == (None, "", "sandbox")
    assert (await finished(rig, reward=1.0))[0] == "sandbox"


async def test_a_failure_that_is_known_after_the_end_counts_until_the_session_is_sealed(rig):
    await say(rig)
    assert (await finished(rig))[0] == "ok"
    assert (await finished(rig, failed="sandbox"))[0] == "sandbox"
    await rig.post("other", messages=[user("EPISODE:talk")])
    await call(rig, "POST", f"{SESSIONS}/other/finish")
    await call(rig, "POST", f"{SESSIONS}/other/seal")
    status, kind, message = await refused(rig, "POST", f"{SESSIONS}/other/finish", {"failed": "sandbox"})
    assert (status, kind, "is sealed" in message) == (409, "outcome_conflict", True)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"failed": "Sand box"}, "one of ok, engine, harness, sandbox, timeout, budget, canceled, store"),
        ({"failed": ""}, "not ''"),
        ({"failed": 1}, "str"),
        ({"detail": "x"}, "`failed`"),
        ({"faild": "sandbox"}, "did you mean 'failed'"),
    ],
)
async def test_an_unknown_outcome_is_refused_by_name(rig, body, words):
    await say(rig)
    status, _, message = await refused(rig, "POST", FINISH, {"reward": 1.0, **body})
    assert (status, words in message) == (422, True), message
    assert ((await rig.info())["state"], (await rig.info())["reward"]) == ("open", None)


async def test_finished_sessions_are_counted_once_by_their_outcome(rig):
    async def counted():
        async with rig.http.get(f"{rig.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return {line.split('"')[1]: float(line.split()[-1]) for line in lines if line.startswith("tokencache_sessions_finished_total{")}

    before = await counted()
    for name, body in (("s", None), ("t", {"failed": "sandbox"}), ("u", {"failed": "own-word"})):
        async with rig.http.post(rig.url + CHAT, json={"model": "sim", "messages": [user("EPISODE:talk")]}, headers={HEADER: name}):
            pass
        for _ in range(2):
            await call(rig, "POST", f"{SESSIONS}/{name}/finish", body)
    after = await counted()
    assert {kind: after[kind] - before.get(kind, 0) for kind in ("ok", "sandbox", "other")} == {"ok": 1, "sandbox": 1, "other": 1}
