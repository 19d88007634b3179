"""Either client as a consumer of the queue: whole groups, restarts, several consumers, and back-pressure."""

import asyncio
import re

import pytest

from tests.client.both import KINDS, Wrapped
from tests.client.test_client import chat, left
from tests.proxy.kit import proxied
from tests.support.waiting import PATIENCE
from tokencache.batching import max_lag, select
from tokencache.client import (
    AsyncClient,
    DeliveryExpiredError,
    ExistsError,
    OtherSettingsError,
    RefusedError,
    TooManyReadyError,
    UnfinishedError,
)


async def rollouts(client, *names, group="", reward=None):
    for name in names:
        session = await client.create(name, group=group)
        await chat(session, turns=1)
        await session.finish(reward)


async def test_a_group_is_delivered_when_all_of_it_is_finished(client):
    await rollouts(client, "a1", group="a", reward=1.0)
    await rollouts(client, "b1", "b2", group="b", reward=0.5)
    await rollouts(client, "a2", group="a", reward=0.0)
    found = {}
    async for delivery in client.follow("trainer", group_size=2, rewarded=True, timeout=0):
        assert all(one.state == "sealed" and one.complete and one.sequences for one in delivery.trajectories)
        found[delivery.group] = [(one.session, one.reward) for one in delivery.trajectories]
        await Wrapped(delivery).acknowledge()
    assert found == {"b": [("b1", 0.5), ("b2", 0.5)], "a": [("a1", 1.0), ("a2", 0.0)]}
    assert await left(client) == []


async def test_a_consumer_that_is_killed_continues_under_its_name(client):
    await rollouts(client, "a", "b")
    killed = client.follow("trainer", timeout=0)
    first = await anext(killed)
    second = await anext(killed)  # it works on both
    assert [one.sessions[0].session for one in (first, second)] == ["a", "b"]
    await Wrapped(first).acknowledge()
    await killed.aclose()
    again = [one async for one in client.follow("trainer", timeout=0)]
    assert [(one.id, one.attempt, one.sessions[0].session) for one in again] == [(second.id, 2, "b")]
    assert [one async for one in client.follow("another", timeout=0)] == []
    await Wrapped(again[0]).release()
    (free,) = [one async for one in client.follow("another", timeout=0)]
    assert free.sessions[0].session == "b"
    with pytest.raises(DeliveryExpiredError, match=second.id):
        await Wrapped(second).acknowledge()
    await Wrapped(free).extend(60.0)
    await Wrapped(free).acknowledge(delete=False)
    assert await left(client) == ["b"]
    counts = await client.queue()
    assert (counts.candidates, counts.taken) == (0, 0)


async def test_a_part_of_a_group_says_what_is_missing_and_what_is_valid(client):
    await rollouts(client, "a1", group="a", reward=1.0)
    await (await client.create("a2", group="a")).finish(failed="sandbox")
    await client.create("a3", group="a")
    with pytest.raises(RefusedError, match=r"422.*`min_group` 4 is larger than `group_size` 3"):
        await anext(client.follow("trainer", group_size=3, min_group=4, group_timeout=0.01))
    delivery = await anext(client.follow("trainer", group_size=3, min_group=2, group_timeout=0.01, rewarded=True, timeout=PATIENCE))
    assert [one.session for one in delivery.sessions] == ["a1", "a2"]
    assert (delivery.missing, delivery.valid) == (1, ["a1"])
    assert [one.valid for one in delivery.trajectories] == [True, False]


async def test_it_says_what_it_waited_for(client, caplog):
    await rollouts(client, "a1", "a2", group="a", reward=1.0)
    await client.create("a3", group="a")
    await rollouts(client, "b1", "b2", "b3", group="b")
    assert [one async for one in client.follow("trainer", group_size=3, rewarded=True, timeout=0)] == []
    assert re.search(
        r"consumer trainer ends after 0 s without a delivery. It waited for group a: 2 of 3 ready, waits for a3 since \d+ s; "
        r"group b: 3 of 3 ready, without a reward: b1, b2, b3",
        caplog.text,
    )
    assert [(one.group, one.size, one.ready, one.waits_for) for one in (await client.queue()).groups] == [
        ("a", 3, 2, ["a3"]),
        ("b", 3, 3, []),
    ]


async def test_sessions_of_old_or_unknown_versions_stay_in_the_queue(client, caplog):
    with pytest.raises(RefusedError, match=r"announce it with client\.set_weights"):
        await anext(client.follow("trainer", max_lag=1, timeout=0))
    await rollouts(client, "before")
    for version in ("7", "8", "9"):
        await client.set_weights(version)
        await rollouts(client, f"with-{version}")
    young = [one async for one in client.follow("trainer", max_lag=1, timeout=0)]
    assert [one.sessions[0].session for one in young] == ["with-8", "with-9"]
    assert "1 lag more than 1 policy versions, the lag of 1 is not known" in caplog.text
    assert (await client.queue()).ready == 2
    rest = [one async for one in client.follow("another", timeout=0)]
    assert [one.sessions[0].session for one in rest] == ["before", "with-7"]
    figures = [one.trajectories[0].figures for one in (*rest, *young)]
    assert [(one.oldest_version, one.newest_version, sum(one.versions.values())) for one in figures] == [
        ("", "", 0),
        *((str(number), str(number), one.trainable_tokens) for number, one in zip((7, 8, 9), figures[1:], strict=True)),
    ]


async def test_sequences_of_old_versions_are_left_out_of_a_trajectory(client):
    await client.set_weights("7")
    session = await client.create("a")
    await chat(session, turns=1)
    for version in ("8", "9"):
        await client.set_weights(version)
        await chat(session, turns=1)
    await session.finish()
    whole = await session.fetch()
    assert [one.oldest_version for one in whole.sequences] == ["7", "8", "9"]
    young = await session.fetch(max_lag=1)
    assert [one.id for one in young.sequences] == [one.id for one in whole.sequences[1:]]
    assert (young.figures.stale.dropped, young.figures.stale.current) == (1, "9")
    rows = select([whole], max_lag(1, "9"))
    assert [row.sequence.id for row in rows.kept] == [one.id for one in young.sequences]
    assert rows.dropped[0].reason == "lags 2 policy versions behind 9, 1 are allowed"


async def test_other_formats_and_limits_of_length(client):
    await rollouts(client, "a", reward=0.5)
    (delivery,) = [one async for one in client.follow("trainer", format="verl", max_length=10_000, overlong="drop", timeout=0)]
    assert delivery.trajectories[0]["outputs"][0]["reward_score"] == 0.5


async def test_it_waits_for_rollouts_that_finish_later(client):
    coming = asyncio.create_task(anext(client.follow("trainer", timeout=PATIENCE)))
    await asyncio.sleep(0)
    await rollouts(client, "a")
    assert (await coming).sessions[0].session == "a"


@pytest.mark.parametrize("kind", KINDS.values())
async def test_creating_waits_while_too_many_are_ready(kind):
    async with proxied(max_ready=1) as rig, Wrapped(kind(rig.url)) as client, AsyncClient(rig.url) as consumer:
        await rollouts(client, "a")
        with pytest.raises(TooManyReadyError, match="429: 1 finished sessions are ready and not taken, and --max-ready is 1"):
            await client.create("b")
        waiting = asyncio.create_task(client.create("b", wait=20))
        async for delivery in consumer.follow("trainer"):
            await delivery.acknowledge()
            break
        assert (await waiting).id == "b"


async def test_names_that_exist(client):
    await client.create("a", sampling={"seed": 5})
    with pytest.raises(ExistsError, match="409: session a exists already"):
        await client.create("a")
    with pytest.raises(OtherSettingsError, match=r"other settings \(sampling\)"):
        await client.create("a", sampling={"seed": 6}, exist_ok=True)
    assert (await client.create("a", exist_ok=True)).id == "a"


async def test_rewards_and_labels(client):
    session = await client.create("a", group="g", metadata={"seed": 3}, tags=["t"])
    await chat(session, turns=1)
    with pytest.raises(UnfinishedError, match="409: session a is not finished"):
        await session.seal()
    await session.set_reward(0.5, components={"tests": 1.0})
    (turn,) = (await session.trajectory()).sequences[0].turns
    state = await session.finish(0.75, turns={turn.turn: 0.25})
    assert (state.state, state.reward, state.group, state.metadata, state.tags) == ("finished", 0.75, "g", {"seed": 3}, ["t"])
    found = await session.rewards()
    assert (found.reward, found.turns, found.count, [one.components for one in found.history]) == (
        0.75,
        {turn.turn: 0.25},
        2,
        [{"tests": 1.0}],
    )
    assert (await session.label(group="other", tags=())).tags == []
    assert [one.session for one in await client.sessions(group="other", state="finished")] == ["a"]
    assert await client.sessions(tag="t") == []


async def test_many_sessions_are_listed_in_pages(client, rig, monkeypatch):
    monkeypatch.setattr("tokencache.client.operations._PAGE", 3)
    for n in range(8):
        await client.create(f"s{n}")
    assert sorted(one.session for one in await client.sessions()) == [f"s{n}" for n in range(8)]
