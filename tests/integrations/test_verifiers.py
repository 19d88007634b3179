"""verifiers 0.4.0 runs the example's episode: its own environment, interception server, client and scoring, on a simulated engine.

Run it in an environment with verifiers: `make integrations`.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.material import require_package
from tests.support.plugin_engine import PluginEngine

vf = require_package("verifiers", "verifiers.v1")

from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from tests.integrations.kit import looking, truth
from tests.proxy.kit import proxied
from tokencache.client import AsyncClient
from tokencache.integrations.verifiers import record
from tokencache.store.base import StoreError
from tokencache.testing import SimulatedEngine

EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations"

pytestmark = pytest.mark.ran_with(trainer="verifiers")


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


def guessing_engine():
    engine = SimulatedEngine(seed=7)
    engine.replies.script = lambda request: [f"<think>\nHm ☕.\n</think>\n\n  I guess {6 + len(request.body['messages']) // 4}"]
    return engine


async def episode_of(url, **members):
    config = resolve_env_config(
        {"taskset": {"id": "guessing_verifiers"}, "agent": {"runtime": {"type": "subprocess"}}, "proxy": url, **members}
    )
    env = load_environment(config)
    (task,) = env.taskset
    # The policy's own endpoint, which prime-rl would give: nothing listens there.
    model = vf.ModelContext(model="sim", client=vf.TrainClientConfig(base_url="http://127.0.0.1:9/v1"))
    async with env.serving():
        return await env.run_slot(env.slots(task)[0], model)


async def test_a_trace_has_the_ids_that_the_engine_used():
    async with proxied(guessing_engine(), session_from=("header:X-Session-ID",)) as rig, AsyncClient(rig.url) as client:
        episode = await episode_of(rig.url, run="r")
        assert episode.ok, episode.errors
        (trace,) = episode.traces
        assert trace.ok
        assert trace.reward == 1.0
        (branch,) = trace.branches
        trajectory = await client.session(trace.id).trajectory()
        (sequence,) = trajectory.sequences
        assert len(sequence.turns) == 3
        assert branch.token_ids == sequence.token_ids
        assert list(map(int, branch.sampled_mask)) == sequence.loss_mask
        assert branch.logprobs == sequence.logprobs
        assert tuple(branch.token_ids) in truth(rig.engine)
        assert (trajectory.reward, trajectory.reward_components, trajectory.state) == (1.0, {"guessed": 1.0}, "sealed")
        assert trajectory.group == f"r-{episode.task.key}"
        assert [call.finish_reason for call in trace.calls] == ["stop"] * 3
        assert trace.info["tokencache"]["complete"]


async def test_without_the_header_the_episode_fails_and_says_why():
    async with proxied(guessing_engine()) as rig:
        episode = await episode_of(rig.url)
    assert not episode.ok
    assert "--session-from header:X-Session-ID" in episode.errors[-1].message


async def test_an_incomplete_session_is_not_trained():
    engine = guessing_engine()
    async with proxied(engine, session_from=("header:X-Session-ID",)) as rig:

        async def lose_a_turn(*_args, **_kwargs):
            raise StoreError("it is gone")

        commits = rig.store.commit
        calls = iter(range(9))
        rig.store.commit = lambda *args, **kwargs: lose_a_turn() if next(calls) == 1 else commits(*args, **kwargs)
        episode = await episode_of(rig.url)
        (trace,) = episode.traces
        assert not trace.ok
        assert trace.errors


async def test_a_trace_with_an_error_is_a_failed_session(monkeypatch):
    """The harness breaks after its calls; verifiers records that, and goes on to `finalize`."""

    async def launch(*args, **members):
        await launched(*args, **members)
        raise RuntimeError("no such program")

    from guessing_verifiers import GuessingHarness

    launched = GuessingHarness.launch
    monkeypatch.setattr(GuessingHarness, "launch", launch)
    async with proxied(guessing_engine(), session_from=("header:X-Session-ID",)) as rig, AsyncClient(rig.url) as client:
        episode = await episode_of(rig.url)
        (trace,) = episode.traces
        (state,) = await client.sessions()
    assert not trace.ok
    assert (state.session, state.outcome, state.turns, state.sealed) == (trace.id, "harness", 3, True)
    assert "no such program" in state.outcome_detail


async def test_sessions_are_deleted_only_on_request():
    async with proxied(guessing_engine(), session_from=("header:X-Session-ID",)) as rig, AsyncClient(rig.url) as client:
        await episode_of(rig.url)
        assert len(await client.sessions()) == 1
        await episode_of(rig.url, delete=True)
        assert len(await client.sessions()) == 1


@pytest.mark.parametrize("images", ["plugin", "stock"])
async def test_a_trace_with_images_is_not_trained(images):
    """The nodes of a trace have no place for them. A stock engine does not even report which tokens stand for them."""
    trace_id = "seeing"
    async with proxied(PluginEngine(seed=7, images=images)) as rig, AsyncClient(rig.url) as client:
        await looking(await client.create(trace_id), {"width": 56})
        trace = SimpleNamespace(id=trace_id, rewards={}, reward=None, nodes=[], calls=[], info={}, ok=True, errors=[], last_error=None)
        await record(trace, client.session(trace_id))
    assert not trace.ok
    assert "images" in trace.errors[0].message
    assert len(trace.nodes) >= 2
