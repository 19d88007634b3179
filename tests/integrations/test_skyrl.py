"""SkyRL 0.3.0 reads what the generator returns: its own `concatenate_generator_outputs` and `validate_generator_output`.

The trainer, Ray and the inference engines are not needed for this and not started. Run it in an environment with skyrl and torch:
`make integrations`.
"""

import sys
import typing

import pytest
import typing_extensions

from tests.support.material import require_package
from tests.support.plugin_engine import PluginEngine

require_package("skyrl")
if sys.version_info < (3, 12):
    # skyrl 0.3.0 uses typing.TypedDict in pydantic models, which pydantic refuses on Python 3.11 (skyrl/tinker/types.py).
    typing.TypedDict = typing_extensions.TypedDict

import openai
import torch
from omegaconf import OmegaConf
from skyrl.backends.skyrl_train.training_batch import TensorList, TrainingInputBatch
from skyrl.train.dataset.preprocess import compute_prompt_mini_batch_boundaries
from skyrl.train.generators.base import BatchMetadata, GeneratorInput, TrajectoryID
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.trainer_utils import validate_generator_output

from examples.integrations.guessing import play
from tests.integrations.kit import (
    branching,
    failing,
    guessing_engine,
    looking,
    rewarding_a_part,
    rewarding_its_only_row,
    truth,
    without_reward,
)
from tests.proxy.kit import proxied
from tokencache.client import AsyncClient
from tokencache.integrations.rollouts import TooManyFailuresError
from tokencache.integrations.rows import RowsError
from tokencache.integrations.skyrl import TokencacheGenerator

pytestmark = pytest.mark.ran_with(trainer="skyrl")


def batch_of(*secrets, repetitions=1):
    prompts = [(secret, repetition) for secret in secrets for repetition in range(repetitions)]
    return GeneratorInput(
        prompts=[[{"role": "user", "content": "Guess."}] for _ in prompts],
        env_classes=["guessing" for _ in prompts],
        env_extras=[{"secret": secret} for secret, _ in prompts],
        sampling_params={"temperature": 0.5, "top_p": 0.9, "max_tokens": 64, "min_tokens": 1, "logprobs": 1, "stop": None},
        trajectory_ids=[TrajectoryID(f"guess-{secret}", repetition) for secret, repetition in prompts],
        batch_metadata=BatchMetadata(global_step=3, training_phase="train"),
    )


async def test_a_batch_has_the_ids_that_the_engine_used():
    async with proxied(guessing_engine()) as rig, AsyncClient(rig.url) as client:
        output = await TokencacheGenerator(rig.url, play, run="mine").generate(batch_of(2, 9, repetitions=2))
        validate_generator_output(4, output)
        assert output["rewards"] == [0.75, 0.75, 0.0, 0.0]
        assert [one.to_string() for one in output["trajectory_ids"]] == ["guess-2_0", "guess-2_1", "guess-9_0", "guess-9_1"]
        known = truth(rig.engine)
        columns = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs", "tokencache")
        for prompt, response, mask, logprobs, labels in zip(*(output[name] for name in columns), strict=True):
            last = known[*prompt, *response]
            size = len(last.completion_ids)
            assert (response[-size:], mask[-size:], logprobs[-size:]) == (last.completion_ids, [1] * size, last.logprobs)
            trajectory = await client.session(labels["session"]).trajectory()
            assert trajectory.group in {"mine-0-guess-2", "mine-0-guess-9"}
            assert trajectory.sequences[0].turns[0].sampling["max_tokens"] == 64
        assert output["rollout_metrics"]["generate/trajectory_completion_time_max"] > 0


@pytest.mark.parametrize("harness", [branching, rewarding_a_part])
async def test_step_wise_training_gets_all_rows_of_a_trajectory(harness):
    """SkyRL gives the advantage of the last row to all, so that has the reward of the rollout."""
    async with proxied(guessing_engine()) as rig:
        output = await TokencacheGenerator(rig.url, harness, rows="all", step_wise=True).generate(batch_of(1, 2))
        validate_generator_output(2, output, step_wise=True)
        assert output["is_last_step"] == [False, True] * 2
        assert output["rewards"] == [0.5] * 4
        trained = sum(map(sum, output["loss_masks"]))
        assert trained == sum(len(call.completion_ids) for call in rig.engine.ground_truth if call.session)


async def test_the_last_steps_of_a_group_have_the_rewards_of_their_rollouts():
    """SkyRL compares them, so a rollout of one step must not have another kind of reward than one of two."""
    async with proxied(guessing_engine()) as rig:
        output = await TokencacheGenerator(rig.url, rewarding_its_only_row, rows="all", step_wise=True).generate(batch_of(1))
        assert output["rewards"] == [0.5]


async def test_one_row_for_each_prompt_is_a_stated_choice():
    with pytest.raises(ValueError, match="accepts one row"):
        TokencacheGenerator("http://127.0.0.1:1", branching, rows="all")
    async with proxied(guessing_engine()) as rig:
        with pytest.raises(ExceptionGroup) as raised:
            await TokencacheGenerator(rig.url, branching, rows="single").generate(batch_of(1))
        assert raised.group_contains(RowsError, match="rows='main' or rows='longest'")
        output = await TokencacheGenerator(rig.url, branching, rows="longest").generate(batch_of(1))
        validate_generator_output(1, output)
        (labels,) = output["tokencache"]
        (dropped,) = labels["dropped"]
        assert dropped["trainable_tokens"] > 0


async def rewarding_one_row(session, sample):
    """A harness whose grader rewards the longest row only."""
    await branching(session, sample)
    longest = max((await session.trajectory()).sequences, key=lambda one: one.trainable_tokens)
    await session.set_reward(None, sequences={longest.id: 0.75})


async def test_a_row_that_is_left_out_needs_no_reward():
    async with proxied(guessing_engine()) as rig:
        output = await TokencacheGenerator(rig.url, rewarding_one_row, rows="longest").generate(batch_of(1))
        assert output["rewards"] == [0.75]
        with pytest.raises(ExceptionGroup) as raised:
            await TokencacheGenerator(rig.url, rewarding_one_row, rows="all", step_wise=True).generate(batch_of(1))
        assert raised.group_contains(ValueError, match="return it from play")


async def test_a_rollout_without_a_reward_is_refused():
    async with proxied(guessing_engine()) as rig:
        with pytest.raises(ExceptionGroup) as raised:
            await TokencacheGenerator(rig.url, without_reward, rows="longest").generate(batch_of(1))
        assert raised.group_contains(ValueError, match="return it from play")


def breaking(*repetitions):
    """A harness that fails for these repetitions of the prompt `1`. The reward of the others is 0.1 for each repetition."""

    async def harness(session, sample):
        one = sample["trajectory_id"]
        if one.instance_id == "guess-1" and one.repetition_id in repetitions:
            await failing(session, sample)
        await branching(session, sample)
        return one.repetition_id / 10

    return harness


def advantages(output, *, step_wise):
    """What SkyRL computes of a batch with its own functions, for each row. Without step-wise training, all prompts are groups of four."""
    trainer = object.__new__(RayPPOTrainer)
    trainer.all_metrics = {}
    trainer.cfg = OmegaConf.create(
        {
            "generator": {"step_wise_trajectories": step_wise, "merge_stepwise_output": False, "n_samples_per_prompt": 4},
            "trainer": {"algorithm": {"zero_variance_filter": False, "advantage_estimator": "grpo", "gamma": 1.0, "lambd": 1.0}},
        }
    )
    trainer.cfg.trainer.algorithm.grpo_norm_by_std = True
    uids = [one.instance_id for one in output["trajectory_ids"]]
    output, uids = trainer.postprocess_generator_output(output, uids)
    boundaries = compute_prompt_mini_batch_boundaries(uids, 1, 2, step_wise, 4)
    assert len(boundaries) == 2, "a mini-batch of each prompt"
    width = max(map(len, output["response_ids"]))
    padded = {
        name: torch.tensor([[0.0] * (width - len(row)) + [float(one) for one in row] for row in output[field]])
        for name, field in (("rewards", "rewards"), ("loss_mask", "loss_masks"))
    }
    padded["response_mask"] = torch.tensor([[0.0] * (width - len(row)) + [1.0] * len(row) for row in output["response_ids"]])
    batch = TrainingInputBatch(padded | {"values": None})
    batch.metadata = {"uids": uids, "is_last_step": output["is_last_step"], "avg_response_length": 0.0}
    made = trainer.compute_advantages_and_returns(batch)["advantages"]
    return [round(float(row[-1]), 4) for row in made]


def of_the_valid_ones(rewards):
    return [round(float(one), 4) for one in (torch.tensor(rewards) - torch.tensor(rewards).mean()) / (torch.tensor(rewards).std() + 1e-6)]


async def test_a_failed_rollout_is_left_out_of_its_group_with_step_wise_training():
    async with proxied(guessing_engine()) as rig:
        generator = TokencacheGenerator(rig.url, breaking(1), rows="all", step_wise=True)
        output = await generator.generate(batch_of(1, 2, repetitions=4))
    validate_generator_output(8, output, step_wise=True)
    names = [one.to_string() for one in output["trajectory_ids"]]
    assert "guess-1_1" not in names
    found = advantages(output, step_wise=True)
    assert [found[names.index(f"guess-1_{one}")] for one in (0, 2, 3)] == of_the_valid_ones([0.0, 0.2, 0.3])


async def test_a_failed_rollout_is_a_masked_row_with_the_mean_reward_of_its_group():
    async with proxied(guessing_engine()) as rig, AsyncClient(rig.url) as client:
        output = await TokencacheGenerator(rig.url, breaking(1), rows="longest", delete=True).generate(batch_of(1, 2, repetitions=4))
        (failed,) = await client.sessions()
    validate_generator_output(8, output)
    assert (failed.turns, failed.outcome, failed.reward) == (3, "harness", None), "it stays"
    assert output["rewards"] == pytest.approx([0.0, 0.5 / 3, 0.2, 0.3, 0.0, 0.1, 0.2, 0.3])
    assert [bool(sum(mask)) for mask in output["loss_masks"]] == [True, False, *[True] * 6]
    assert (output["tokencache"][1]["session"], output["tokencache"][1]["outcome"]) == (failed.session, "harness")
    factor = (3 / 2) ** 0.5  # SkyRL's deviation is that of four rows, one of which is the mean
    scaled = [one * factor for one in of_the_valid_ones([0.0, 0.2, 0.3])]
    found = advantages(output, step_wise=False)
    assert [found[0], *found[2:4]] == pytest.approx(scaled, abs=1e-3)
    assert found[1] == 0.0


@pytest.mark.parametrize("step_wise", [False, True])
async def test_a_group_in_which_all_failed_trains_nothing(step_wise):
    async with proxied(guessing_engine()) as rig:
        generator = TokencacheGenerator(rig.url, breaking(0, 1, 2, 3), rows="longest", step_wise=step_wise, max_failures=4)
        output = await generator.generate(batch_of(1, 2, repetitions=4))
        validate_generator_output(8, output, step_wise=step_wise)
        assert advantages(output, step_wise=step_wise)[:4] == [0.0] * 4
        assert not any(map(sum, output["loss_masks"][:4]))
        with pytest.raises(TooManyFailuresError, match=r"4 of 4 rollouts failed.*harness 4 \(session .*the harness broke"):
            await TokencacheGenerator(rig.url, breaking(0, 1, 2, 3), rows="longest").generate(batch_of(1, repetitions=4))


async def test_sessions_are_deleted_only_on_request():
    async with proxied(guessing_engine()) as rig, AsyncClient(rig.url) as client:
        await TokencacheGenerator(rig.url, play, delete=True).generate(batch_of(2))
        assert not await client.sessions()
        await TokencacheGenerator(rig.url, play).generate(batch_of(2))
        assert len(await client.sessions()) == 1


class Patches:
    """An image processor like those of the Qwen-VL family, with patches of the simulated engine's size."""

    merge_size = 1

    def __init__(self, patch=28):
        self.patch = patch

    def __call__(self, images, return_tensors):
        assert return_tensors == "pt"
        grids = torch.tensor([[1, -(-image.height // self.patch), -(-image.width // self.patch)] for image in images])
        return {"pixel_values": torch.zeros(int(grids.prod(-1).sum()), 8), "image_grid_thw": grids}


def looks(*widths):
    """A batch of rollouts that look at images; a width of 0 is a rollout without images."""
    batch = batch_of(*range(len(widths)))
    return batch | {"env_extras": [{"secret": 5, "width": width} for width in widths]}


async def looking_or_failing(session, sample):
    reward = await looking(session, sample)
    return reward if sample["width"] == 28 else await failing(session, sample)


async def looking_or_not(session, sample):
    if sample["width"]:
        return await looking(session, sample)
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as model:
        await model.chat.completions.create(model="sim", messages=[{"role": "user", "content": "Hello."}])
    return 1.0


async def test_the_images_of_a_row_are_tensors_that_skyrl_takes():
    async with proxied(PluginEngine(seed=7, images="plugin")) as rig:
        output = await TokencacheGenerator(rig.url, looking, image_processor=Patches()).generate(looks(28, 56))
        validate_generator_output(2, output)
        lengths = [[medium["length"] for medium in labels["media"]] for labels in output["tokencache"]]
        assert [grid.prod(-1).tolist() for grid in TensorList(output["image_grid_thw"])] == lengths
        assert [len(pixels) for pixels in TensorList(output["pixel_values"])] == [sum(row) for row in lengths]
        assert [len(row) for row in lengths] == [3, 3]


async def test_the_masked_row_of_a_failed_rollout_has_images_too():
    async with proxied(PluginEngine(seed=7, images="plugin")) as rig:
        output = await TokencacheGenerator(rig.url, looking_or_failing, image_processor=Patches()).generate(looks(56, 28))
    validate_generator_output(2, output)
    assert [bool(sum(mask)) for mask in output["loss_masks"]] == [False, True]
    assert len(output["pixel_values"]) == 2


async def test_images_that_skyrl_cannot_take_are_refused():
    async with proxied(PluginEngine(seed=7, images="plugin")) as rig:
        for processor, batch, words in (
            (None, looks(28), "passes none to its trainer"),
            (Patches(14), looks(28), "this processor makes"),
            (Patches(), looks(28, 0), "in all rows or in none"),
        ):
            with pytest.raises((ExceptionGroup, ValueError)) as failed:
                await TokencacheGenerator(rig.url, looking_or_not, image_processor=processor).generate(batch)
            errors = failed.value.exceptions if isinstance(failed.value, ExceptionGroup) else [failed.value]
            assert words in str(errors[0])
