"""Gym's results finish the sessions of its rollouts. Needs nemo-gym, whose own function makes the rollout ids."""

import asyncio

import pytest

from tests.proxy.kit import proxied, user
from tests.support.material import require_package
from tokencache.client import Client, NotFoundError

finish = require_package("nemo_gym", "tokencache.integrations.nemo_gym.results").finish

pytestmark = pytest.mark.ran_with(trainer="nemo-gym")

RESULTS = [
    {"_ng_task_index": 5, "_ng_rollout_index": 0, "reward": 1.0},
    {"_ng_task_index": 5, "_ng_rollout_index": 1, "reward": 0.0, "_ng_attempt_index": 0},
    {"_ng_rollout_id": "mine", "_ng_task_index": 6, "reward": 0.5},
]


async def test_results_finish_their_sessions_with_the_verifiers_rewards():
    async with proxied() as rig:
        for name in ("5-0", "5-1", "mine"):
            await rig.say(name, [user("EPISODE:demo")])
        with Client(rig.url) as client:
            await asyncio.to_thread(finish, client, RESULTS)
        infos = [await rig.info(name) for name in ("5-0", "5-1", "mine")]
        assert [(info["state"], info["reward"], info["group"]) for info in infos] == [
            ("finished", 1.0, "5"),
            ("finished", 0.0, "5"),
            ("finished", 0.5, "6"),
        ]


async def test_results_that_are_no_measurement_finish_their_sessions_as_failed():
    results = [
        {"_ng_rollout_id": "a", "_ng_failure_class": "agent_run_error", "_ng_failure_message": "no such program"},
        {"_ng_rollout_id": "b", "reward": 0.0, "mask_sample": True, "failure_kind": "browser:lost", "failure_reason": "gone"},
        {"_ng_rollout_id": "c", "_ng_failure_class": "agent_run_error"},
        {"_ng_rollout_id": "c", "reward": 1.0, "failure_kind": "judge_failed", "mask_sample": False},
        {"_ng_rollout_id": "d", "_ng_failure_class": "agent_run_error"},
        {"_ng_rollout_id": "d", "_ng_failure_class": "agent_timeout"},
    ]
    async with proxied() as rig:
        for name in "abcd":
            await rig.say(name, [user("EPISODE:demo")])
        with Client(rig.url) as client:
            await asyncio.to_thread(finish, client, results)
        infos = [await rig.info(name) for name in "abcd"]
    assert [(info["outcome"], info["outcome_detail"], info["reward"]) for info in infos] == [
        ("agent_run_error", "no such program", None),
        ("browser-lost", "gone", 0.0),
        ("ok", "", 1.0),
        ("agent_run_error", "agent_run_error", None),
    ]


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "0.5", [1.0]])
async def test_a_reward_that_is_no_finite_number_ends_its_own_rollout_only(reward):
    results = [
        {"_ng_rollout_id": "a", "_ng_task_index": 7, "reward": reward},
        {"_ng_rollout_id": "b", "reward": reward, "mask_sample": True, "failure_kind": "judge", "failure_reason": "gone"},
        {"_ng_rollout_id": "c", "reward": 1.0},
    ]
    async with proxied() as rig:
        for name in "abc":
            await rig.say(name, [user("EPISODE:demo")])
        with Client(rig.url) as client:
            await asyncio.to_thread(finish, client, results)
        infos = [await rig.info(name) for name in "abc"]
    assert [(info["outcome"], info["reward"], info["state"]) for info in infos] == [
        ("verifier", None, "finished"),
        ("judge", None, "finished"),
        ("ok", 1.0, "finished"),
    ]
    assert (infos[0]["group"], "its reward was refused" in infos[0]["outcome_detail"], infos[1]["outcome_detail"]) == ("7", True, "gone")


@pytest.mark.parametrize(("kind", "outcome"), [("AgentTimeout", "agenttimeout"), ("5xx", "gym-5xx"), (500, "gym-500")])
async def test_gyms_word_for_a_failure_becomes_an_outcome(kind, outcome):
    async with proxied() as rig:
        await rig.say("a", [user("EPISODE:demo")])
        with Client(rig.url) as client:
            await asyncio.to_thread(finish, client, [{"_ng_rollout_id": "a", "mask_sample": True, "failure_kind": kind}])
        assert (await rig.info("a"))["outcome"] == outcome


async def test_a_result_without_a_session_is_named_after_all_others_are_finished():
    async with proxied() as rig:
        await rig.say("mine", [user("EPISODE:demo")])
        with Client(rig.url) as client, pytest.raises(NotFoundError, match="rollout 5-0, 5-1; all others are finished"):
            await asyncio.to_thread(finish, client, RESULTS)
        assert (await rig.info("mine"))["reward"] == 0.5
