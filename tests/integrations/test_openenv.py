"""TRL's own rollout worker plays harnesses in sessions of the proxy, before a simulated engine.

`tests/system/e2e/test_trl_harness.py` does the same with real harness programs and a real vLLM. Run it in an environment with TRL and
OpenEnv: `make integrations`.
"""

import asyncio
import functools
import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from tests.support.material import require_package

require_package("openenv")
trl_harness = require_package("trl", "trl.experimental.async_grpo.openenv_harness")

from accelerate import PartialState
from openenv.core.harness import TrainableSession
from openenv.core.harness.capture.upstream import training_sampling
from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.experimental.async_grpo.async_rollout_worker import _chain_to_sequences

from tests.core.forest import grow
from tests.integrations.kit import guessing_engine
from tests.proxy.kit import proxied
from tests.support.waiting import PATIENCE, until
from tests.trajectories.rollouts import ROLLOUTS, of_forest
from tokencache.adapters.load import AdapterError
from tokencache.client import AsyncClient, UnreachableError
from tokencache.integrations.openenv import HarnessSessionFactory, turns_of
from tokencache.integrations.rollouts import FailedRolloutError
from tokencache.store.base import StoreError
from tokencache.testing import Fault
from tokencache.trajectories.formats.native import native
from tokencache.trajectories.values import Trajectory

pytestmark = pytest.mark.ran_with(trainer="trl")
AGENT = Path(__file__).with_name("chat_agent.py")
SAMPLING = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}


def start(task, workspace):
    return [sys.executable, str(AGENT), json.dumps(task)]


def grade(task, workspace):
    return float((workspace / "reward.txt").read_text())


def broken_grade(task, workspace):
    raise RuntimeError("no test ran")


@pytest.fixture
async def rig():
    async with proxied(guessing_engine()) as made, AsyncClient(made.url) as client:
        made.client = client
        yield made


def factory_of(rig, grade=grade, **more):
    members = {"harness": "openai", "run": "r", "sampling": training_sampling(SAMPLING), **more}
    return asyncio.to_thread(HarnessSessionFactory, rig.url, start, grade, **members)


async def session_of(rig, task, **more):
    return (await factory_of(rig, **more)).create(task, seed=3, episode_id="e")


def rows_of(trajectory, fork_threshold=AsyncGRPOConfig.fork_threshold_tokens):
    """What TRL makes of a rollout: ids, mask and log probabilities of each row."""
    trace = trl_harness.TrainingTrace(turns=list(turns_of(trajectory.sequences)))
    rows, _ = _chain_to_sequences(trl_harness._turns_from_training_trace(trace), "id", fork_threshold)
    return [(row.input_ids, row.completion_mask, row.old_log_probs) for row in rows]


def exported(trajectory):
    return [(one.token_ids, one.loss_mask, one.logprobs) for one in trajectory.sequences if any(one.loss_mask)]


@pytest.mark.parametrize("shape", sorted(name for name, rollout in ROLLOUTS.items() if rollout.sequences))
def test_the_rows_of_trl_are_the_sequences_of_the_export(shape):
    trajectory = msgspec.convert(native(ROLLOUTS[shape]), Trajectory)
    assert rows_of(trajectory) == rows_of(trajectory, 0) == exported(trajectory)


@pytest.mark.parametrize("seed", range(40))
def test_trl_trains_each_token_of_any_forest(seed):
    """Two answers to one prompt, an answer that comes back without its thinking: TRL would overwrite the first with the second."""
    whole = msgspec.convert(native(of_forest(grow(random.Random(seed)))), Trajectory)
    with_prompts = [one for one in whole.sequences if one.turns[0].completion[0]]  # as those of any engine
    trajectory = msgspec.structs.replace(whole, sequences=with_prompts)
    rows = rows_of(trajectory)
    assert sum(sum(mask) for _, mask, _ in rows) == sum(sum(one.loss_mask) for one in trajectory.sequences)
    assert sorted(value for _, mask, values in rows for value, own in zip(values, mask, strict=True) if own) == sorted(
        value for one in trajectory.sequences for value, own in zip(one.logprobs, one.loss_mask, strict=True) if own
    )


def test_trl_joins_a_sequence_that_begins_with_all_of_the_one_before():
    """The proxy did not recognise the history, and the engine rendered it with the same ids. No token is trained twice, or not at all."""
    trajectory = msgspec.convert(native(ROLLOUTS["linear"]), Trajectory)
    (whole,) = trajectory.sequences
    *before, last = whole.turns
    start, end = before[-1].completion[1], last.completion[0]
    cut = {name: getattr(whole, name)[:start] for name in ("token_ids", "loss_mask", "logprobs")}
    context = {"loss_mask": [0] * end + whole.loss_mask[end:], "logprobs": [0.0] * end + whole.logprobs[end:]}
    first = msgspec.structs.replace(whole, turns=before, **cut)
    second = msgspec.structs.replace(whole, id="2", turns=[msgspec.structs.replace(last, prompt=(0, end))], **context)
    assert rows_of(msgspec.structs.replace(trajectory, sequences=[first, second])) == exported(trajectory)


async def test_a_session_is_one_rollout_of_the_harness(rig):
    """It samples as TRL says, whatever the harness asks for. Its labels name the run, TRL's group and TRL's rollout."""
    session = await session_of(rig, {"turns": 3}, max_tokens=64)
    assert isinstance(session, TrainableSession)
    assert await asyncio.to_thread(session.wait_for_completion) == 0
    trace = session.fetch_training_trace()
    (state,) = await rig.client.sessions()
    assert (state.state, state.group, state.metadata["episode"], "run:r" in state.tags) == ("sealed", "r-3", "e", True)
    trajectory = await rig.client.session(state.session).trajectory()
    assert session.verify([]).env_reward == trajectory.reward
    assert 0 < trajectory.reward < 1
    (row,) = exported(trajectory)
    assert (trace.turns[-1].prompt_token_ids + trace.turns[-1].completion_token_ids) == row[0]
    assert [len(turn.completion_token_ids) for turn in trace.turns] == [
        len(call.completion_ids) for call in rig.engine.ground_truth if call.session
    ]
    assert trl_harness._messages_from_trace(trace.to_trace_entries())[-1]["content"].strip().startswith("I guess")
    asked = [body for body in rig.engine.requests if body["messages"][0]["content"] == "Guess."]
    assert {(body["temperature"], body["top_k"], body["max_tokens"]) for body in asked} == {(0.7, -1, 64)}


@pytest.mark.parametrize(
    ("task", "more", "outcome", "words"),
    [
        ({"exit": 3}, {}, "harness", "ended with exit code 3"),
        ({"turns": 0}, {"grade": None}, "harness", "no call was recorded"),
        ({"hang": True, "pid": "pid"}, {"timeout_s": 0.01}, "timeout", "ran for more than 0.01 seconds"),
        ({}, {"grade": broken_grade}, "harness", "no test ran"),
    ],
)
async def test_a_failed_rollout_has_neither_trace_nor_reward(rig, task, more, outcome, words):
    """TRL then leaves it out of its group: a reward of 0 would be a lie about the policy."""
    session = await session_of(rig, task, **more)
    with pytest.raises(FailedRolloutError, match=words):
        await asyncio.to_thread(session.wait_for_completion)
    (state,) = await rig.client.sessions()
    assert (state.valid, state.outcome, state.reward) == (False, outcome, None)
    with pytest.raises(RuntimeError, match="no valid rollout"):
        session.fetch_training_trace()
    with pytest.raises(RuntimeError, match="no valid rollout"):
        session.verify([])


async def test_what_the_engine_broke_is_the_engines_fault(rig):
    """The harness ends with an exit code of its own, because the engine failed."""
    session = await session_of(rig, {})
    rig.engine.faults += [None, *[Fault.answer(500, "{}")] * 9]
    with pytest.raises(FailedRolloutError, match="engine: session"):
        await asyncio.to_thread(session.wait_for_completion)


async def test_an_incomplete_session_is_a_failed_rollout(rig):
    commits, calls = rig.store.commit, iter(range(9))

    async def lose_a_turn(*_args, **_kwargs):
        raise StoreError("it is gone")

    rig.store.commit = lambda *args, **kwargs: lose_a_turn() if next(calls) == 1 else commits(*args, **kwargs)
    session = await session_of(rig, {"turns": 3})
    with pytest.raises(FailedRolloutError, match="store"):
        await asyncio.to_thread(session.wait_for_completion)


async def test_a_wrong_setup_stops_the_worker_of_trl(rig):
    """TRL stops only for an error of this kind, and of this method."""
    session = await session_of(rig, {}, models={"*": "no such model"}, budget=3)
    assert await asyncio.to_thread(session.wait_for_completion) == 1
    with pytest.raises(ValueError, match="budget"):
        session.fetch_training_trace()


async def test_what_is_missing_is_said_before_a_rollout(rig, monkeypatch):
    with pytest.raises(ValueError, match="name the adapter"):
        await factory_of(rig, harness="")
    with pytest.raises(AdapterError, match="no adapter 'vim'"):
        await factory_of(rig, harness="vim")
    with pytest.raises(UnreachableError):
        await factory_of(SimpleNamespace(url="http://127.0.0.1:9"))
    with pytest.raises(ValueError, match="rows"):
        await factory_of(rig, rows="some")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        with pytest.raises(AdapterError, match="codex is not on the PATH; install Codex CLI with: npm install"):
            await factory_of(rig, harness="codex")
    await rig.client.drain_engine(rig.up)
    with pytest.raises(RuntimeError, match=f"no engine of {rig.url} serves: {rig.up}: it is drained"):
        await factory_of(rig)


async def test_a_closed_session_kills_its_harness(rig, tmp_path):
    pid = tmp_path / "pid"
    session = await session_of(rig, {"hang": True, "pid": str(pid)})
    running = asyncio.create_task(asyncio.to_thread(session.wait_for_completion))
    await until(lambda: pid.exists() and pid.read_text())
    session.close()
    with pytest.raises(FailedRolloutError, match="closed before its end"):
        await running
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    (state,) = await rig.client.sessions()
    assert state.outcome == "canceled"
    again = await session_of(rig, {})
    again.close()
    with pytest.raises(FailedRolloutError, match="closed before its end"):
        await asyncio.to_thread(again.wait_for_completion)
    assert len(await rig.client.sessions()) == 1


async def test_the_worker_of_trl_gets_the_rows_of_the_export(rig, tmp_path):
    """A harness breaks in each group. TRL computes the advantages of the others as if that rollout had not been."""
    PartialState()
    tasks = [{"prompt": {"turns": 2 + number, "once": str(tmp_path / f"{number}")}} for number in range(2)]
    worker = trl_harness.HarnessRolloutWorker(
        model_name="sim",
        dataset=tasks,
        reward_funcs=[],
        processing_class=SimpleNamespace(response_template="", pad_token_id=0),
        eos_token_ids=[0],
        num_generations=3,
        max_inflight_tasks=2,
        temperature=0.7,
        harness_session_factory=functools.partial(HarnessSessionFactory, rig.url, start, grade, harness="openai", run="r"),
    )
    try:
        await asyncio.to_thread(worker.start)
        samples = []
        while len(samples) < 4:  # a later group may be ready before the second one
            sample = await asyncio.to_thread(worker.rollout_buffer.get, timeout=PATIENCE)
            samples += [sample] * (sample.group_id < 2)
        worker.check_health(PATIENCE)
    finally:
        await asyncio.to_thread(worker.stop)
    states = [state for state in await rig.client.sessions() if state.group in {"r-0", "r-1"}]
    assert Counter(state.outcome for state in states) == {"ok": 4, "harness": 2}
    rewards, rows = {}, {}
    for state in states:
        if state.valid:
            trajectory = await rig.client.session(state.session).trajectory()
            (row,) = exported(trajectory)
            rows[tuple(row[0])], rewards[tuple(row[0])] = row, (state.group, trajectory.reward)
    assert len(rows) == 4
    for sample in samples:
        ids, mask, logprobs = rows[tuple(sample.input_ids.tolist())]
        assert sample.completion_mask.tolist() == mask
        assert sample.old_log_probs.tolist() == pytest.approx(logprobs, abs=1e-6)
        group, reward = rewards[tuple(ids)]
        assert (f"r-{sample.group_id}", sample.metrics["reward"]) == (group, reward)
        values = [one for other, one in rewards.values() if other == group]
        mean = sum(values) / 2
        spread = (sum((one - mean) ** 2 for one in values) / 2) ** 0.5
        assert sample.advantage == pytest.approx((reward - mean) / (spread + 1e-8), abs=1e-4)
