"""A generator for SkyRL that runs any harness through tokencache.

    class Experiment(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return TokencacheGenerator("http://127.0.0.1:8100", play, step_wise=cfg.generator.step_wise_trajectories)

`docs/integrations/skyrl.md` has the complete setup. Source: skyrl 0.3.0, `skyrl/train/generators/base.py` (`GeneratorInterface`,
`GeneratorInput`, `GeneratorOutput`), `skyrl/train/generators/utils.py` (`concatenate_generator_outputs`).
"""

import asyncio
import os
import time
from typing import Any

from tokencache.batching.media import image_inputs, images_of
from tokencache.client import AsyncClient
from tokencache.integrations.rollouts import FinishedRollout, Play, Rollouts, load_play
from tokencache.integrations.rows import RowPolicy, check_policy
from tokencache.trajectories.lengths import ExportOptions

try:
    from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput, TrajectoryID
    from skyrl.train.generators.utils import concatenate_generator_outputs
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"tokencache.integrations.skyrl runs inside SkyRL (0.3.0): {error}. pip install 'skyrl[skyrl-train]'", name=error.name
    ) from error

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")
"""Sampling parameters of SkyRL that hold for every call of a rollout. The others (`stop`, `logprobs`, …) are up to harness and proxy."""


class TokencacheGenerator(GeneratorInterface):
    """Runs the harness of each prompt in a session of its own.

    Args:
        url: the URL of the proxy.
        play: runs the harness (`tokencache.integrations.rollouts`). Its `sample` has `prompt`, `env_class`, `trajectory_id`, and the
            members of the prompt's `env_extras`.
        rows: which rows of a rollout are trained (`tokencache.integrations.rows`).
        step_wise: the value of `generator.step_wise_trajectories`. Without it, SkyRL accepts one row for each prompt.
        concurrency: how many rollouts run at a time.
        lengths: limits for the length of rows; `overlong` is `cut` or `drop` (`docs/formats.md`).
        harness: name of the harness adapter; `""` for none.
        timeout: seconds to wait for calls that are still in flight when `play` returns.
        delete: delete each session once its rollout was fetched.
        image_processor: the image processor (transformers) of a model that accepts images. Rows then have their images as SkyRL takes them:
            `pixel_values` and `image_grid_thw`, as the Qwen-VL family has them. Without it, rows with images are refused.
        admin_key: the proxy's admin key; by default the value of TOKENCACHE_ADMIN_KEY.

    Raises:
        ValueError: an option is invalid.
    """

    def __init__(
        self,
        url: str,
        play: Play | str,
        *,
        rows: RowPolicy = "main",
        step_wise: bool = False,
        concurrency: int = 64,
        lengths: ExportOptions | None = None,
        harness: str = "",
        timeout: float = 60.0,
        delete: bool = False,
        image_processor: Any = None,
        admin_key: str | None = None,
    ) -> None:
        check_policy(rows, several=step_wise)
        self._url, self._admin_key, self._lengths = url, admin_key or os.environ.get("TOKENCACHE_ADMIN_KEY"), lengths
        self._places = asyncio.Semaphore(concurrency)
        self._processor = image_processor
        self._rollouts = Rollouts(
            play=load_play(play),
            rows=rows,
            several=step_wise,
            form="skyrl",
            harness=harness,
            timeout=timeout,
            images=image_processor is not None,
            delete=delete,
        )

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Run all prompts of a batch. Returns their rows in the same order.

        Raises:
            RowsError: the rows of a rollout do not fit the policy.
            ValueError: a rollout has no reward, which SkyRL requires; or only some rows of the batch have images.
        """
        extras = input_batch.get("env_extras") or [{}] * len(input_batch["prompts"])
        given = input_batch.get("trajectory_ids")
        ids = given or [TrajectoryID(instance_id=str(place), repetition_id=0) for place in range(len(input_batch["prompts"]))]
        wanted = input_batch.get("sampling_params") or {}
        sampling = {name: wanted[name] for name in _SAMPLING if wanted.get(name) is not None}
        async with AsyncClient(self._url, self._admin_key) as client, asyncio.TaskGroup() as rollouts:
            running = [
                rollouts.create_task(self._one(client, {**extra, "prompt": prompt, "env_class": env, "trajectory_id": one}, one, sampling))
                for prompt, env, extra, one in zip(input_batch["prompts"], input_batch["env_classes"], extras, ids, strict=True)
            ]
        outputs = [task.result() for task in running]
        if len({"pixel_values" in output for output in outputs}) > 1:
            raise ValueError("some rollouts of this batch have images and some have none, and SkyRL accepts images in all rows or in none")
        return concatenate_generator_outputs(outputs, step_wise=self._rollouts.several)

    async def _one(self, client: AsyncClient, sample: dict[str, Any], name: TrajectoryID, sampling: dict[str, Any]) -> GeneratorOutput:
        async with self._places:
            start = time.monotonic()
            rollout = await self._rollouts.run(client, sample, sampling=sampling, group=name.instance_id, lengths=self._lengths)
            seconds = time.monotonic() - start
        batch = rollout.export["generator_output"]
        places = [place for place, labels in enumerate(batch["tokencache"]) if labels["id"] in rollout.kept]
        output = {field: [values[place] for place in places] for field, values in batch.items() if isinstance(values, list)}
        if "rewards" not in output:
            failed = "" if rollout.trajectory.valid else f" that counts, because it is not valid ({rollout.trajectory.outcome})"
            raise ValueError(
                f"session {rollout.trajectory.session!r} has no reward{failed}, and SkyRL requires one: return it from play, "
                "or store it with session.set_reward"
            )
        for labels in output["tokencache"]:
            labels["dropped"] = rollout.dropped
        output["is_last_step"] = [place == places[-1] for place in places]
        output["trajectory_ids"] = [name] * len(places)
        output["trajectory_generation_times"] = [seconds] * len(places)
        made: GeneratorOutput = output | self._images(rollout)
        return made

    def _images(self, rollout: FinishedRollout) -> dict[str, list[Any]]:
        """Return the images of the rows, as tensors; nothing if no row has any.

        Raises:
            ValueError: only some rows have images, or the processor has other settings than the engine's.
        """
        sequences = [row.sequence for row in rollout.rows.kept]
        if not any(sequence.media for sequence in sequences):
            return {}
        if not all(sequence.media for sequence in sequences):
            raise ValueError("some rows of a rollout have images and some have none, and SkyRL accepts images in all rows or in none")
        inputs = [
            image_inputs(sequence, images_of(sequence, lambda medium: rollout.media[medium.sha256]), self._processor)
            for sequence in sequences
        ]
        return {name: [one[name] for one in inputs] for name in ("pixel_values", "image_grid_thw")}
