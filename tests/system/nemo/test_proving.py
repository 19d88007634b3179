"""Parents that token ids prove, where Gym's matcher found none; and what no ids prove, which stays unresolved."""

import pytest

from tests.system.nemo.gym_rollouts import Rollout, Status, delivered, gym, resolution
from tokencache.integrations.nemo_gym.proving import PROVEN, ProvingSource, prove

pytestmark = pytest.mark.ran_with(trainer="nemo-gym")
ROOT, UNRESOLVED = resolution(Status.ROOT), resolution(Status.UNRESOLVED)


def recorded(*, deltas=False):
    """A rollout of three calls, the last of which Gym did not recognize."""
    rollout = Rollout("r", deltas=deltas)
    first = rollout.record(ROOT)
    second = rollout.record(resolution(Status.RESOLVED, first))
    return [first, second, rollout.record(UNRESOLVED)]


def parents(entries):
    return [entry.parent_call_id for entry in prove(entries)]


@pytest.mark.parametrize("deltas", [False, True], ids=["whole prompts", "delta records"])
def test_the_longest_beginning_of_the_prompt_is_the_parent(deltas):
    entries = recorded(deltas=deltas)
    assert entries[1].prompt_is_delta is deltas
    assert delivered(entries) is None
    assert parents(entries[::-1]) == ["r-2", "r-1", None]
    assert delivered(prove(entries)) == gym.cumulative_tokens(entries[2])
    assert prove(entries)[2].parent_resolution_reason == PROVEN


def test_of_two_calls_with_the_same_tokens_the_first_is_the_parent_as_in_gym():
    first, second, third = recorded()
    again = second.model_copy(update={"model_call_id": "r-0"})
    assert parents([first, second, again, third])[-1] == "r-0"


@pytest.mark.parametrize(
    "change",
    [
        {"generation_token_ids": [202, 8]},
        {"prompt_token_ids": [9, 2, 3, 101, 201, 7, 102]},
        {"digest": "0" * 64},
        {"digest": None},
        {"generation_token_ids": [], "generation_log_probs": []},
    ],
    ids=["another completion", "another prompt", "damaged", "no digest", "nothing sampled"],
)
def test_a_call_whose_tokens_do_not_begin_the_prompt_is_no_parent(change):
    first, second, third = recorded()
    second = second.model_copy(update=change)
    second.cum_len = None
    if "digest" not in change:
        second.digest = gym.compute_digest(gym.cumulative_tokens(second))
    assert parents([first, second, third])[-1] == "r-1"
    assert parents([second, third])[-1] is None


def test_a_call_that_gym_called_a_root_stays_one():
    first, second, third = recorded()
    third.parent_resolution = Status.ROOT
    assert prove([first, second, third]) == [first, second, third]


@pytest.mark.parametrize("parent", ["r-2", "absent"], ids=["of itself", "that is absent"])
def test_a_delta_without_its_parent_proves_nothing(parent):
    first, second, third = recorded(deltas=True)
    second.parent_call_id = parent
    assert parents([first, second, third])[-1] == "r-1"


async def test_gym_s_own_files_are_left_as_they_are(tmp_path):
    store = gym.TokenCaptureStore(tmp_path)
    source = ProvingSource(store)
    for entry in recorded():
        await store.put(entry)
    before = await store.freeze("r")
    proven = await source.freeze("r")
    assert (delivered(before.entries), delivered(proven.entries)) == (None, gym.cumulative_tokens(recorded()[2]))
    assert (proven.snapshot_id, proven.version, proven.incomplete) == (before.snapshot_id, before.version, before.incomplete)
    assert await store.freeze("r") == before
    assert not await source.drop("r", snapshot_id=proven.snapshot_id, version=proven.version + 1)
    assert await source.drop("r", snapshot_id=proven.snapshot_id, version=proven.version)
    await source.close()
