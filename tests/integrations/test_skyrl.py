"""SkyRL 0.3.0 reads what the generator returns: its own `concatenate_generator_outputs` and `validate_generator_output`.

The trainer, Ray and the inference engines are not needed for this and not started. Run it in an environment with skyrl and torch:
`make integrations`.
"""

import sys
import typing

import pytest
import typing_extensions

from tests.support.material import require_package

require_package("skyrl")
if sys.version_info < (3, 12):
    # skyrl 0.3.0 uses typing.TypedDict in pydantic models, which pydantic refuses on Python 3.11 (skyrl/tinker/types.py).
    typing.TypedDict = typing_extensions.TypedDict

import openai
import torch
from skyrl.backends.skyrl_train.training_batch import TensorList
from skyrl.train.generators.base import BatchMetadata, GeneratorInput, TrajectoryID
from skyrl.train.utils.trainer_utils import validate_generator_output

from examples.integrations.guessing import play
from tests.integrations.kit import branching, failing, guessing_engine, looking, truth, without_reward
from tests.proxy.kit import proxied
from tokencache.client import AsyncClient
from tokencache.integrations.rows import RowsError
from tokencache.integrations.skyrl import TokencacheGenerator
from tokencache.testing import SimulatedEngine


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
        output = await TokencacheGenerator(rig.url, play).generate(batch_of(2, 9, repetitions=2))
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
            assert trajectory.group in {"guess-2", "guess-9"}
            assert trajectory.sequences[0].turns[0].sampling["max_tokens"] == 64
        assert output["rollout_metrics"]["generate/trajectory_completion_time_max"] > 0


async def test_step_wise_training_gets_all_rows_of_a_trajectory():
    async with proxied(guessing_engine()) as rig:
        output = await TokencacheGenerator(rig.url, branching, rows="all", step_wise=True).generate(batch_of(1, 2))
        validate_generator_output(2, output, step_wise=True)
        assert output["is_last_step"] == [False, True] * 2
        assert output["rewards"] == [0.5] * 4
        trained = sum(map(sum, output["loss_masks"]))
        assert trained == sum(len(call.completion_ids) for call in rig.engine.ground_truth if call.session)


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


async def test_a_rollout_without_a_reward_is_refused():
    async with proxied(guessing_engine()) as rig:
        with pytest.raises(ExceptionGroup) as raised:
            await TokencacheGenerator(rig.url, without_reward, rows="longest").generate(batch_of(1))
        assert raised.group_contains(ValueError, match="return it from play")


async def test_sessions_of_failed_rollouts_stay_and_others_are_deleted_on_request():
    async with proxied(guessing_engine()) as rig, AsyncClient(rig.url) as client:
        with pytest.raises(ExceptionGroup) as raised:
            await TokencacheGenerator(rig.url, failing, delete=True).generate(batch_of(1))
        assert raised.group_contains(RuntimeError, match="the harness broke")
        (failed,) = await client.sessions()
        assert (failed.turns, failed.state, failed.reward) == (3, "finished", None)
        await TokencacheGenerator(rig.url, play, delete=True).generate(batch_of(2))
        assert [state.session for state in await client.sessions()] == [failed.session]
        assert (await client.queue()).candidates == 1  # the failed one: deleted sessions do not count for --max-ready
        await TokencacheGenerator(rig.url, play).generate(batch_of(2))
        assert len(await client.sessions()) == 2


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


async def looking_or_not(session, sample):
    if sample["width"]:
        return await looking(session, sample)
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as model:
        await model.chat.completions.create(model="sim", messages=[{"role": "user", "content": "Hello."}])
    return 1.0


async def test_the_images_of_a_row_are_tensors_that_skyrl_takes():
    async with proxied(SimulatedEngine(seed=7, images="plugin")) as rig:
        output = await TokencacheGenerator(rig.url, looking, image_processor=Patches()).generate(looks(28, 56))
        validate_generator_output(2, output)
        lengths = [[medium["length"] for medium in labels["media"]] for labels in output["tokencache"]]
        assert [grid.prod(-1).tolist() for grid in TensorList(output["image_grid_thw"])] == lengths
        assert [len(pixels) for pixels in TensorList(output["pixel_values"])] == [sum(row) for row in lengths]
        assert [len(row) for row in lengths] == [3, 3]


async def test_images_that_skyrl_cannot_take_are_refused():
    async with proxied(SimulatedEngine(seed=7, images="plugin")) as rig:
        for processor, batch, words in (
            (None, looks(28), "passes none to its trainer"),
            (Patches(14), looks(28), "this processor makes"),
            (Patches(), looks(28, 0), "in all rows or in none"),
        ):
            with pytest.raises((ExceptionGroup, ValueError)) as failed:
                await TokencacheGenerator(rig.url, looking_or_not, image_processor=processor).generate(batch)
            errors = failed.value.exceptions if isinstance(failed.value, ExceptionGroup) else [failed.value]
            assert words in str(errors[0])
