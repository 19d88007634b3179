"""A rollout from creation to rows: settings, labels, reward, limits, and what stays on the proxy if something goes wrong."""

import asyncio

import pytest

from examples.integrations.guessing import play
from tests.integrations.kit import branching, failing, guessing_engine, without_reward
from tests.proxy.kit import proxied
from tokencache.client import AsyncClient, WaitTimeoutError
from tokencache.integrations.rollouts import Rollouts, load_play
from tokencache.integrations.rows import RowsError

SAMPLE = {"secret": 2}


@pytest.fixture
async def rig():
    async with proxied(guessing_engine()) as made, AsyncClient(made.url) as client:
        made.client = client
        yield made


def rollouts(made, **members):
    return Rollouts(**{"play": made, "rows": "main", "several": False, "form": "trl", **members})


async def test_a_rollout_is_rewarded_labelled_and_sealed(rig):
    done = await rollouts(play).run(rig.client, SAMPLE, sampling={"temperature": 1.0}, group="g")
    trajectory = done.trajectory
    assert (trajectory.reward, trajectory.group, trajectory.state, trajectory.complete) == (0.75, "g", "sealed", True)
    assert {turn.sampling["temperature"] for sequence in trajectory.sequences for turn in sequence.turns} == {1.0}
    assert [row["tokencache"]["id"] for row in done.export["rows"]] == [sequence.id for sequence in trajectory.sequences] == list(done.kept)
    assert not done.dropped
    (state,) = await rig.client.sessions()
    assert state.sealed


async def test_what_is_left_out_is_listed(rig):
    done = await rollouts(branching, rows="longest").run(rig.client, SAMPLE, sampling={})
    assert len(done.kept) == 1
    trainable = {sequence.id: sequence.trainable_tokens for sequence in done.trajectory.sequences}
    assert {one["sequence"]: one["trainable_tokens"] for one in done.dropped} == {
        name: tokens for name, tokens in trainable.items() if name not in done.kept
    }
    assert all(one["reason"] for one in done.dropped)


async def test_limits_apply_to_the_rows_and_to_the_choice(rig):
    limits = {"max_response_length": 1, "overlong": "drop"}
    with pytest.raises(RowsError, match="no row to train on"):
        await rollouts(play).run(rig.client, SAMPLE, sampling={}, lengths=limits)


async def test_a_reward_may_be_stored_by_other_means(rig):
    async def rewarding(session, sample):
        await without_reward(session, sample)
        await session.set_reward(0.25, components={"tests": 1.0})

    done = await rollouts(rewarding, rows="longest").run(rig.client, SAMPLE, sampling={})
    assert (done.trajectory.reward, done.trajectory.reward_components) == (0.25, {"tests": 1.0})


async def test_a_harness_that_raises_leaves_a_finished_session_without_a_reward(rig):
    with pytest.raises(RuntimeError, match="the harness broke"):
        await rollouts(failing, delete=True).run(rig.client, SAMPLE, sampling={})
    (state,) = await rig.client.sessions()
    assert (state.state, state.reward, state.turns) == ("finished", None, 3)
    assert (state.outcome, state.outcome_detail, state.valid) == ("harness", "RuntimeError: the harness broke", False)


async def test_a_call_that_does_not_end_leaves_the_session_unsealed(rig):
    rig.engine.replies.script = lambda _request: iter(lambda: "and so on ", None)
    calls = []

    async def hasty(session, sample):
        calls.append(asyncio.create_task(branching(session, sample)))
        while not (await session.state()).open_calls:  # noqa: ASYNC110 - it is asked over HTTP
            await asyncio.sleep(0.01)

    with pytest.raises(WaitTimeoutError):
        await rollouts(hasty, delete=True, timeout=0.1).run(rig.client, SAMPLE, sampling={})
    (state,) = await rig.client.sessions()
    assert (state.state, len(state.open_calls)) == ("finished", 1)
    calls[0].cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_sessions_are_deleted_only_on_request(rig):
    await rollouts(play).run(rig.client, SAMPLE, sampling={})
    await rollouts(play, delete=True).run(rig.client, SAMPLE, sampling={})
    assert len(await rig.client.sessions()) == 1


def test_functions_are_found_by_name():
    assert load_play("examples.integrations.guessing:play") is play
    assert load_play(play) is play
    for name in ("examples.integrations.guessing:missing", "nowhere:play", "examples.integrations.guessing"):
        with pytest.raises((ValueError, TypeError), match="play: "):
            load_play(name)
