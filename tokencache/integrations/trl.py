"""Trains with TRL's `GRPOTrainer` on rollouts of any harness: its `rollout_func`, a reward function, and the transfer of weights.

`TrlRollouts` is a `rollout_func`. For each prompt it creates a session, lets the trainer's own coroutine run the harness, finishes the
session with its reward, and returns the recorded tokens. TRL accepts one row for each prompt, so `rows` says which sequence of a session is
taken (`tokencache.integrations.rows`); the number of trainable tokens that are left out is returned and logged.

Source: trl 1.16.0 on PyPI (github.com/huggingface/trl), `trl/trainer/grpo_trainer.py`: `_generate` calls `rollout_func(prompts, trainer)`
and reads `prompt_ids`, `completion_ids`, `logprobs` and `env_mask` ("model tokens (1) vs external tokens (0)"). In `prompts` each prompt
occurs once for each of its generations. All other names are passed to the reward functions.

TRL uses `logprobs` only with `use_vllm=True`, whose weight transfer needs NCCL. `connect` provides another transfer, through a folder, and
makes TRL use the recorded log probabilities. This module does not import TRL.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import httpx2

from tokencache.client import AsyncClient, AsyncSession, Trajectory
from tokencache.client.operations import SessionOptions
from tokencache.integrations.rollouts import play_and_finish
from tokencache.integrations.rows import RowPolicy, check_policy, choose_rows

log = logging.getLogger(__name__)

Play = Callable[[AsyncSession, Any], Awaitable[float | None]]
"""Runs the harness for one prompt, with the session's `base_url` and `key`. Returns the reward; `None` if somebody else posts it."""

_ENGINE_SECONDS = 600.0
"""How long an engine may take to load weights."""


class TrlRow(TypedDict):
    """One completion, as `rollout_func` returns it.

    `prompt_ids` are the tokens before the first sampled one, `completion_ids` all others. `logprobs` and `env_mask` have one entry for each
    token of the completion. Reward functions receive the other members: `session` is its name, `tokens_left_out` the number of trainable
    tokens of the session that are in no row.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    env_mask: list[int]
    reward: float | None
    session: str
    complete: bool
    tokens_left_out: int


class TrlRollouts:
    """A `rollout_func` for `GRPOTrainer` that plays each prompt in a session of its own.

    All generations of a prompt have the same `group`. Sessions sample with the trainer's `temperature`, `top_p`, `top_k`, `min_p` and
    `repetition_penalty`, whatever the harness asks for. If a harness fails, its exception ends the step; to go on, catch it in `play`
    and call `session.finish(failed="harness")`: the rollout is then left out of its group.
    """

    def __init__(
        self,
        url: str,
        play: Play,
        *,
        rows: RowPolicy = "main",
        admin_key: str | None = None,
        delete: bool = False,
        concurrency: int = 64,
        **options: Unpack[SessionOptions],
    ) -> None:
        """Make the function. It opens no connection before it is called.

        Args:
            url: base URL of the proxy, without `/v1`.
            play: runs the harness for one prompt.
            rows: which sequence of a session becomes its row: `single`, `main` or `longest`.
            admin_key: the trainer's key.
            delete: whether sessions are deleted once their rows are made. Otherwise they expire as all sessions do.
            concurrency: how many prompts are played at the same time.
            options: options of `AsyncClient.create`, for all sessions. `sampling` adds to the trainer's parameters.

        Raises:
            ValueError: `rows` is not a policy with one row for each prompt.
        """
        check_policy(rows, several=False)
        self._url, self._play, self._rows, self._admin_key = url, play, rows, admin_key
        self._delete, self._concurrency, self._options = delete, concurrency, options
        self._calls = itertools.count()

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Play the prompts. TRL calls this; the result and the errors are those of `play_all`."""
        return asyncio.run(self.play_all(prompts, trainer))

    async def play_all(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Play the prompts and return a `TrlRow` for each, as lists by name.

        Raises:
            ExceptionGroup: of what `play` raised, of `RowsError` if a session does not have one row under the policy, or of `ClientError`
                if the proxy cannot be reached or refuses. Prompts that are still being played are cancelled.
        """
        call, slots = next(self._calls), asyncio.Semaphore(self._concurrency)
        size = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        first = trainer.accelerator.process_index * len(prompts)
        sampling = sampling_of(trainer) | dict(self._options.get("sampling", {}))
        options: SessionOptions = {**self._options, "sampling": sampling}
        async with AsyncClient(self._url, self._admin_key) as client:

            async def one(index: int, prompt: Any) -> TrlRow:
                async with slots:
                    group = f"trl-{trainer.state.global_step}-{call}-{(first + index) // size}"
                    settings: SessionOptions = {**options, "group": group}
                    return await self._one(await client.create(**settings), prompt)

            async with asyncio.TaskGroup() as running:
                tasks = [running.create_task(one(index, prompt)) for index, prompt in enumerate(prompts)]
        rows = [task.result() for task in tasks]
        return {name: [row[name] for row in rows] for name in TrlRow.__annotations__}  # type: ignore[literal-required]

    async def _one(self, session: AsyncSession, prompt: Any) -> TrlRow:
        await play_and_finish(self._play, session, prompt)
        row = row_of(await session.trajectory(drift="off"), self._rows)
        if self._delete:
            await session.delete()
        return row


def sampling_of(trainer: Any) -> dict[str, float]:
    """Return the sampling parameters of a `GRPOTrainer`, as a session's `sampling`. Those that are `None` there are left out."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: value for name in names if (value := getattr(trainer, name)) is not None}


def row_of(trajectory: Trajectory, rows: RowPolicy) -> TrlRow:
    """Make the row of a rollout.

    TRL needs a row. A rollout that is not valid, or sampled no trainable token, gets a completion of one masked token, and no reward, so
    TRL leaves it out of the group.

    Raises:
        RowsError: the rollout does not have one row under the policy.
    """
    trainable = sum(sum(sequence.loss_mask) for sequence in trajectory.sequences) if trajectory.valid else 0
    if not trainable:
        why = "" if trajectory.valid else f", because it is not valid ({trajectory.outcome})"
        log.warning("session %r: nothing to train on%s: it has a masked row and no reward", trajectory.session, why)
        ids = trajectory.sequences[0].token_ids if trajectory.sequences else [0, 0]
        return TrlRow(
            prompt_ids=ids[:-1],
            completion_ids=ids[-1:],
            logprobs=[0.0],
            env_mask=[0],
            reward=None,
            session=trajectory.session,
            complete=trajectory.complete,
            tokens_left_out=0,
        )
    (chosen,) = choose_rows(trajectory, rows, several=False).kept
    sequence = chosen.sequence
    start = sequence.loss_mask.index(1)
    return TrlRow(
        prompt_ids=sequence.token_ids[:start],
        completion_ids=sequence.token_ids[start:],
        logprobs=sequence.logprobs[start:],
        env_mask=sequence.loss_mask[start:],
        reward=trajectory.reward,
        session=trajectory.session,
        complete=trajectory.complete,
        tokens_left_out=trainable - sum(sequence.loss_mask),
    )


def recorded_reward(completions: list[Any], reward: list[float | None], **_: Any) -> list[float | None]:
    """Return the rewards of the sessions: for `GRPOTrainer(reward_funcs=recorded_reward)`. TRL leaves out rows whose reward is `None`."""
    del completions
    return reward


class FolderWeights:
    """Gives vLLM the trainer's weights through a folder that the engines can read. Needs `VLLM_SERVER_DEV_MODE=1` there."""

    def __init__(self, trainer: Any, folder: Path, engines: Sequence[str]) -> None:
        """Name the folder, which is overwritten at each transfer, and the base URLs of the engines, without `/v1`."""
        self._trainer, self._folder, self._engines = trainer, folder, engines

    def sync_weights(self) -> None:
        """Write the weights, load them into each engine, and clear its prefix cache. TRL calls this before it generates.

        Raises:
            httpx2.HTTPError: an engine cannot be reached, or refused.
            RuntimeError: an engine did not clear its prefix cache, because it has calls in progress.
        """
        self._trainer.save_model(str(self._folder))
        if self._trainer.accelerator.is_main_process:
            with httpx2.Client(timeout=_ENGINE_SECONDS) as http:
                for engine in self._engines:
                    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}}
                    http.post(f"{engine}/collective_rpc", json=reload).raise_for_status()
                    cleared = http.post(f"{engine}/reset_prefix_cache").raise_for_status()
                    if cleared.json().get("success") is False:
                        raise RuntimeError(
                            f"{engine} has calls in progress, so its prefix cache has keys of the old weights: pause it first"
                        )
        self._trainer.accelerator.wait_for_everyone()


def connect(trainer: Any, folder: Path, engines: Sequence[str]) -> None:
    """Let a `GRPOTrainer` with `use_vllm=False` transfer its weights through a folder, and use the recorded log probabilities.

    Call it before `trainer.train()`. TRL then transfers the weights before each generation, and corrects for the difference between the
    engine's and its own log probabilities (`vllm_importance_sampling_correction`), as with `use_vllm=True`. Where trainer and engines can
    use NCCL, prefer TRL's own `use_vllm=True, vllm_mode="server"`.

    Raises:
        ValueError: the trainer transfers its weights itself.
    """
    if trainer.use_vllm:
        raise ValueError("the trainer has use_vllm=True, so TRL transfers its weights itself: leave out `connect`, or set use_vllm=False")
    trainer.vllm_generation = FolderWeights(trainer, folder, engines)
    trainer.use_vllm, trainer._last_loaded_step = True, -1  # noqa: SLF001 - the state that TRL sets with use_vllm=True
