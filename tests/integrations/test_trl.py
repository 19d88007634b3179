"""The `rollout_func` for TRL, with a stand-in for the trainer. `tests/system/e2e/test_trl.py` runs TRL itself."""

import asyncio
import signal
import threading
from types import SimpleNamespace

import msgspec
import openai
import pytest

from tests.support.waiting import until
from tests.trajectories.rollouts import ROLLOUTS
from tokencache.client import AsyncClient
from tokencache.config import Settings
from tokencache.integrations.rollouts import TooManyFailuresError
from tokencache.integrations.rows import RowsError
from tokencache.integrations.trl import TrlRollouts, connect, recorded_reward, row_of
from tokencache.server.serve import serving
from tokencache.testing import SimulatedEngine
from tokencache.trajectories.formats.native import native
from tokencache.trajectories.values import Trajectory


def trajectory_of(shape, **changes):
    return msgspec.structs.replace(msgspec.convert(native(ROLLOUTS[shape]), Trajectory), **changes)


def trainer_of(**changes):
    """What `TrlRollouts` reads from a `GRPOTrainer`."""
    fields = {"num_generations": 2, "num_generations_eval": 1, "temperature": 1.0, "top_p": 0.9, "top_k": 0, "min_p": None}
    fields |= {"repetition_penalty": 1.0, "use_vllm": False, "model": SimpleNamespace(training=True)}
    fields |= {"accelerator": SimpleNamespace(process_index=1, num_processes=1), "state": SimpleNamespace(global_step=7)}
    return SimpleNamespace(**fields | changes)


@pytest.mark.parametrize("shape", ["linear", "thrown-away", "respliced"])
def test_a_row_is_a_sequence_split_at_its_first_sampled_token(shape):
    trajectory = trajectory_of(shape, reward=0.5)
    row = row_of(trajectory, "longest")
    (sequence,) = [one for one in trajectory.sequences if one.token_ids == row["prompt_ids"] + row["completion_ids"]]
    assert row["env_mask"][0] == 1
    assert sum(row["env_mask"]) == sum(sequence.loss_mask)
    assert [0.0] * len(row["prompt_ids"]) + row["logprobs"] == sequence.logprobs
    assert len(row["completion_ids"]) == len(row["logprobs"]) == len(row["env_mask"])
    assert row["reward"] == 0.5
    assert row["tokens_left_out"] + sum(row["env_mask"]) == sum(sum(one.loss_mask) for one in trajectory.sequences)


@pytest.mark.parametrize(
    ("of_session", "of_sequence", "reward"), [(None, 0.75, 0.75), (0.5, 0.0, 0.0), (0.5, None, 0.5), (None, None, None)]
)
def test_the_reward_of_a_row_is_that_of_its_sequence_as_in_the_export(of_session, of_sequence, reward):
    trajectory = trajectory_of("linear", reward=of_session)
    (sequence,) = trajectory.sequences
    rewarded = msgspec.structs.replace(trajectory, sequences=[msgspec.structs.replace(sequence, reward=of_sequence)])
    assert row_of(rewarded, "single")["reward"] == reward


def test_two_lines_are_refused_unless_one_is_asked_for():
    with pytest.raises(RowsError):
        row_of(trajectory_of("respliced"), "main")
    assert row_of(trajectory_of("respliced"), "longest")["tokens_left_out"] > 0


def test_a_policy_with_several_rows_is_refused():
    with pytest.raises(ValueError, match="one row for each prompt"):
        TrlRollouts("http://127.0.0.1:1", None, rows="all")


async def test_who_interrupts_a_notebook_does_not_wait_for_the_rollouts():
    ended = []

    class Rollouts(TrlRollouts):
        async def play_all(self, prompts, trainer):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(prompts)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # as in the kernel of a notebook
    try:
        with pytest.raises(KeyboardInterrupt):
            Rollouts("http://127.0.0.1:1", None)(["a"], None)
    finally:
        signal.signal(signal.SIGINT, before)
    await until(lambda: ended == [["a"]])


async def test_a_trainer_in_a_notebook_has_an_event_loop_that_runs():
    class Rollouts(TrlRollouts):
        async def play_all(self, prompts, trainer):
            return {"prompt_ids": [[len(prompts)]], "trainer": [trainer]}

    assert Rollouts("http://127.0.0.1:1", None)(["a", "b"], "me") == {"prompt_ids": [[2]], "trainer": ["me"]}


def test_weights_are_not_transferred_twice():
    with pytest.raises(ValueError, match="leave out `connect`"):
        connect(trainer_of(use_vllm=True), None, [])


@pytest.mark.parametrize("delete", [False, True])
async def test_each_prompt_is_played_in_a_session_of_its_group(delete):
    """Prompts of one group share it. What the harness asks for does not change the trainer's sampling."""

    async def play(session, prompt):
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as model:
            messages = [{"role": "user", "content": prompt}]
            await model.chat.completions.create(model="sim", messages=messages, temperature=0.1)
        return float(len(prompt))

    engine = SimulatedEngine(logprobs_mode="processed_logprobs")
    async with engine.serve() as upstream, serving(Settings(upstream=upstream, port=0)) as (url, _), AsyncClient(url) as client:
        function = TrlRollouts(url, play, delete=delete, run="r", sampling={"max_tokens": 64})
        found = await function.play_all(["a", "a", "bb", "bb"], trainer_of())
        states = {state.session: state for state in await client.sessions()}
    assert recorded_reward([], **found) == [1.0, 1.0, 2.0, 2.0]
    assert all(found["complete"])
    assert len(set(found["session"])) == 4
    assert {tuple(ids) for ids in found["completion_ids"]} <= {tuple(one.completion_ids) for one in engine.ground_truth}
    asked = {
        (body["temperature"], body["top_p"], body["max_tokens"]) for body in engine.requests if body["messages"][0]["content"] in ("a", "b")
    }
    assert asked == {(1.0, 0.9, 64)}
    if delete:
        assert not states
    else:
        assert [states[name].group for name in found["session"]] == ["r-7-0-2", "r-7-0-2", "r-7-0-3", "r-7-0-3"]
        assert all(state.state == "sealed" for state in states.values())


async def test_a_group_may_be_spread_over_processes():
    """This process has two of its four rollouts."""
    engine = SimulatedEngine(logprobs_mode="processed_logprobs")

    async def play(session, prompt):
        return 1.0

    trainer = trainer_of(num_generations=4)
    async with engine.serve() as upstream, serving(Settings(upstream=upstream, port=0)) as (url, _), AsyncClient(url) as client:
        await TrlRollouts(url, play, run="r", max_failures=2).play_all(["a", "b"], trainer)
        states = await client.sessions(tag="run:r")
    assert [(state.group, state.metadata["group_size"]) for state in states] == [("r-7-0-0", 4)] * 2


async def test_a_failed_rollout_has_a_masked_row_without_a_reward():
    """TRL leaves a row out of its group if all its rewards are `None`."""

    async def play(session, prompt):
        if prompt == "breaks":
            raise RuntimeError("no such program")
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as model:
            await model.chat.completions.create(model="sim", messages=[{"role": "user", "content": prompt}])
        return 1.0

    engine = SimulatedEngine(logprobs_mode="processed_logprobs")
    async with engine.serve() as upstream, serving(Settings(upstream=upstream, port=0)) as (url, _), AsyncClient(url) as client:
        found = await TrlRollouts(url, play, run="r", timeout=1).play_all(["a", "breaks"], trainer_of())
        (failed,) = [state for state in await client.sessions(tag="run:r") if not state.valid]
        with pytest.raises(TooManyFailuresError, match="no such program"):
            await TrlRollouts(url, play).play_all(["breaks", "breaks"], trainer_of())
    assert recorded_reward([], **found) == [1.0, None]
    assert (found["outcome"], found["session"][1]) == (["ok", "harness"], failed.session)
    prompt, completion, logprobs, mask = (found[name][1] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask"))
    assert (len(prompt), len(completion), logprobs, mask) == (1, 1, [0.0], [0])
    assert sum(found["env_mask"][0])
