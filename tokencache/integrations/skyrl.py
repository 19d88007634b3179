"""A generator for SkyRL that runs any harness through tokencache.

    class Experiment(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return TokencacheGenerator("http://127.0.0.1:8100", play, step_wise=cfg.generator.step_wise_trajectories)

`docs/integrations/skyrl.md` has the complete setup. Source: skyrl 0.3.0, `skyrl/train/generators/base.py` (`GeneratorInterface`,
`GeneratorInput`, `GeneratorOutput`), `skyrl/train/generators/utils.py` (`concatenate_generator_outputs`).
"""

import itertools
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokencache.batching.media import image_inputs, images_of
from tokencache.client import AsyncClient, AsyncSession, Trajectory
from tokencache.integrations.fetching import Fetching, FinishedRollout
from tokencache.integrations.rollouts import FailedRollout, Play, Rollouts, load_play, new_run
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
        retries: how often a rollout that failed is played again.
        max_failures: how many rollouts of a batch may fail; `None`: all but one.
        run: the id of the run (`docs/integrations/README.md`); by default a new one.
        image_processor: the image processor (transformers) of a model that accepts images. Rows then have their images as SkyRL takes them:
            `pixel_values` and `image_grid_thw`, as the Qwen-VL family has them. Without it, rows with images are refused.
        admin_key: the proxy's admin key; by default the value of TOKENCACHE_ADMIN_KEY.

    Raises:
        ValueError: an option is invalid.
    """

    def __init__(
        self,
        url: str,
        play: Play[Any] | str,
        *,
        rows: RowPolicy = "main",
        step_wise: bool = False,
        concurrency: int = 64,
        lengths: ExportOptions | None = None,
        harness: str = "",
        timeout: float = 60.0,
        delete: bool = False,
        retries: int = 0,
        max_failures: int | None = None,
        run: str = "",
        image_processor: Any = None,
        admin_key: str | None = None,
    ) -> None:
        check_policy(rows, several=step_wise)
        self._url, self._admin_key = url, admin_key or os.environ.get("TOKENCACHE_ADMIN_KEY")
        self._processor, self._step_wise, self._calls = image_processor, step_wise, itertools.count()
        limits = lengths or ExportOptions()
        images = image_processor is not None
        self._fetch = Fetching(form="skyrl", rows=rows, several=step_wise, images=images, lengths=limits)
        self._rollouts: Rollouts[Mapping[str, Any], GeneratorOutput] = Rollouts(
            play=load_play(play),
            read=self._read,
            run=run or new_run(),
            options={"harness": harness},
            timeout=timeout,
            delete=delete,
            retries=retries,
            concurrency=concurrency,
            max_failures=max_failures,
        )

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Run all prompts of a batch. Returns their rows in the same order.

        Raises:
            TooManyFailuresError: more than `max_failures` rollouts failed.
            ExceptionGroup: of `RowsError` if the rows of a rollout do not fit the policy, or of `ValueError` if it has no reward, which
                SkyRL requires.
            ValueError: only some rows of the batch have images.
        """
        extras = input_batch.get("env_extras") or [{}] * len(input_batch["prompts"])
        given = input_batch.get("trajectory_ids")
        ids = given or [TrajectoryID(instance_id=str(place), repetition_id=0) for place in range(len(input_batch["prompts"]))]
        wanted = input_batch.get("sampling_params") or {}
        sampling = {name: wanted[name] for name in _SAMPLING if wanted.get(name) is not None}
        call = next(self._calls)
        samples = [
            (f"{call}-{one.instance_id}", {**extra, "prompt": prompt, "env_class": env, "trajectory_id": one})
            for prompt, env, extra, one in zip(input_batch["prompts"], input_batch["env_classes"], extras, ids, strict=True)
        ]
        seconds: dict[str, float] = {}
        async with AsyncClient(self._url, self._admin_key) as client:
            rollouts = msgspec.structs.replace(self._rollouts, play=_timed(self._rollouts.play, seconds))
            played = await rollouts.step(client, samples, sampling)
        outputs = self._outputs(played, ids)
        for output in outputs:
            output["trajectory_generation_times"] = [seconds.get(labels["session"], 0.0) for labels in output["tokencache"]]
        if len({"pixel_values" in output for output in outputs}) > 1:
            raise ValueError("some rollouts of this batch have images and some have none, and SkyRL accepts images in all rows or in none")
        return concatenate_generator_outputs(outputs, step_wise=self._step_wise)

    async def _read(self, session: AsyncSession, trajectory: Trajectory) -> GeneratorOutput:
        rollout = await self._fetch(session, trajectory)
        batch = rollout.export["generator_output"]
        places = [place for place, labels in enumerate(batch["tokencache"]) if labels["id"] in rollout.kept]
        output = {field: [values[place] for place in places] for field, values in batch.items() if isinstance(values, list)}
        # `rewards` of the export is `None` if a row that is not kept has none
        rewards = [labels["session_reward"] if labels["reward"] is None else labels["reward"] for labels in output["tokencache"]]
        if None in rewards:
            raise ValueError(
                f"session {rollout.trajectory.session!r} has no reward, and SkyRL requires one: return it from play, "
                "or store it with session.set_reward"
            )
        if self._step_wise and rollout.trajectory.reward is not None:
            rewards[-1] = rollout.trajectory.reward  # SkyRL compares the last steps of a group, and gives the advantage of one to all steps
        for labels in output["tokencache"]:
            labels["dropped"] = rollout.dropped
        output["rewards"] = rewards
        output["is_last_step"] = [place == places[-1] for place in places]
        made: GeneratorOutput = output | self._images(rollout)
        return made

    def _outputs(self, played: Sequence[GeneratorOutput | FailedRollout], ids: Sequence[TrajectoryID]) -> list[GeneratorOutput]:
        """Return the rows of all rollouts.

        SkyRL compares the rewards of all rows of a group, also of masked ones. With step-wise training, failed rollouts are left out of
        their group. Otherwise SkyRL needs a row of each: it gets a masked one, with the mean reward of its group, which stays the mean.
        A group in which all failed consists of masked rows, whose reward of 0 trains nothing.
        """
        rewards: dict[str, list[float]] = {}
        for name, one in zip(ids, played, strict=True):
            if not isinstance(one, FailedRollout):
                rewards.setdefault(name.instance_id, []).append(one["rewards"][-1])
        example = next((one for one in played if not isinstance(one, FailedRollout)), None)
        outputs = []
        for name, one in zip(ids, played, strict=True):
            group = rewards.get(name.instance_id, [])
            if not isinstance(one, FailedRollout):
                output = one
            elif self._step_wise and group:
                continue
            else:
                output = _masked(one, statistics.fmean(group) if group else 0.0, example)
            output["trajectory_ids"] = [name] * len(output["response_ids"])
            outputs.append(output)
        return outputs

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


def _timed(play: Play[Any], seconds: dict[str, float]) -> Play[Any]:
    """Return a function that does the same, and stores how long it took under the name of the session."""

    async def timed(session: AsyncSession, sample: Any) -> float | None:
        start = time.monotonic()
        try:
            return await play(session, sample)
        finally:
            seconds[session.id] = time.monotonic() - start

    return timed


def _masked(failed: FailedRollout, reward: float, example: GeneratorOutput | None) -> GeneratorOutput:
    """Return a row that trains nothing: a single token, or a row of another rollout if that has images, because then all rows need some."""
    row: GeneratorOutput = {"prompt_token_ids": [[0]], "response_ids": [[0]], "rollout_logprobs": [[0.0]], "stop_reasons": ["abort"]}
    if example is not None and "pixel_values" in example:
        row |= {field: values[-1:] for field, values in example.items()}
    labels = {"session": failed.session, "valid": False, "outcome": failed.kind, "outcome_detail": failed.detail}
    masks = [[0] * len(row["response_ids"][0])]
    return row | {"rewards": [reward], "loss_masks": masks, "is_last_step": [True], "tokencache": [labels]}
