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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict, Unpack

import httpx2
import msgspec

from tokencache.client import AsyncClient, AsyncSession, Trajectory
from tokencache.client.operations import SessionOptions
from tokencache.integrations.rollouts import FailedRollout, Play, Rollouts, new_run
from tokencache.integrations.rows import RowPolicy, check_policy, choose_rows
from tokencache.session_url import is_local

_ENGINE_SECONDS = 600.0
"""How long an engine may take to load weights."""


class TrlRow(TypedDict):
    """One completion, as `rollout_func` returns it.

    `prompt_ids` are the tokens before the first sampled one, `completion_ids` all others. `logprobs` and `env_mask` have one entry for each
    token of the completion. Reward functions receive the other members: `reward` is that of the row's sequence, otherwise of the session,
    `session` is its name, `outcome` is `ok` or what failed, and
    `tokens_left_out` the number of trainable tokens of the session that are in no row.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    env_mask: list[int]
    reward: float | None
    session: str
    complete: bool
    outcome: str
    tokens_left_out: int


class TrlRollouts:
    """A `rollout_func` for `GRPOTrainer` that plays each prompt in a session of its own.

    All generations of a prompt have the same `group`. Sessions sample with the trainer's `temperature`, `top_p`, `top_k`, `min_p` and
    `repetition_penalty`, whatever the harness asks for. A rollout that fails has a masked row without a reward, so TRL leaves it out of
    its group.
    """

    def __init__(
        self,
        url: str,
        play: Play[Any],
        *,
        rows: RowPolicy = "main",
        admin_key: str | None = None,
        delete: bool = False,
        concurrency: int = 64,
        timeout: float = 60.0,
        retries: int = 0,
        max_failures: int | None = None,
        run: str = "",
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
            timeout: seconds to wait for calls that are still in flight when `play` returns.
            retries: how often a rollout that failed is played again.
            max_failures: how many rollouts of a call may fail in a process; `None`: all but one.
            run: the id of the run (`docs/integrations/README.md`); by default a new one.
            options: options of `AsyncClient.create`, for all sessions. `sampling` adds to the trainer's parameters.

        Raises:
            ValueError: `rows` is not a policy with one row for each prompt.
        """
        check_policy(rows, several=False)
        self._url, self._admin_key = url, admin_key
        self._calls = itertools.count()

        async def read(_session: AsyncSession, trajectory: Trajectory) -> TrlRow:
            return row_of(trajectory, rows)

        self._rollouts: Rollouts[Any, TrlRow] = Rollouts(
            play=play,
            read=read,
            run=run or new_run(),
            options=options,
            timeout=timeout,
            delete=delete,
            retries=retries,
            concurrency=concurrency,
            max_failures=max_failures,
        )

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Play the prompts. TRL calls this; the result and the errors are those of `play_all`."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self.play_all(prompts, trainer))
        begun: list[asyncio.Task[dict[str, list[Any]]]] = []

        async def play() -> dict[str, list[Any]]:
            begun.append(asyncio.create_task(self.play_all(prompts, trainer)))
            return await begun[0]

        with ThreadPoolExecutor(1) as thread:  # in a notebook, the thread of the trainer has an event loop that runs
            try:
                return thread.submit(asyncio.run, play()).result()
            except KeyboardInterrupt:
                for task in begun:
                    with suppress(RuntimeError):  # it has ended
                        task.get_loop().call_soon_threadsafe(task.cancel)
                raise

    async def play_all(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Play the prompts and return a `TrlRow` for each, as lists by name.

        Raises:
            TooManyFailuresError: more than `max_failures` rollouts failed.
            ExceptionGroup: of `RowsError` if a session does not have one row under the policy, or of `ClientError` if the setup is wrong.
                Prompts that are still being played are cancelled.
        """
        self._share_run(trainer.accelerator)
        call = next(self._calls)
        size = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        first = trainer.accelerator.process_index * len(prompts)
        groups = [f"{trainer.state.global_step}-{call}-{(first + index) // size}" for index in range(len(prompts))]
        async with AsyncClient(self._url, self._admin_key) as client:
            played = await self._rollouts.step(client, list(zip(groups, prompts, strict=True)), sampling_of(trainer), size=size)
        rows = [masked_row(one) if isinstance(one, FailedRollout) else one for one in played]
        return {name: [row[name] for row in rows] for name in TrlRow.__annotations__}  # type: ignore[literal-required]

    def _share_run(self, accelerator: Any) -> None:
        """Give all processes of the trainer the run of the first one: the generations of a prompt may be on several."""
        if accelerator.num_processes > 1:
            from accelerate.utils import broadcast_object_list  # noqa: PLC0415 - TRL requires it

            self._rollouts = msgspec.structs.replace(self._rollouts, run=broadcast_object_list([self._rollouts.run])[0])


def sampling_of(trainer: Any) -> dict[str, float]:
    """Return the sampling parameters of a `GRPOTrainer`, as a session's `sampling`. Those that are `None` there are left out."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: value for name in names if (value := getattr(trainer, name)) is not None}


def row_of(trajectory: Trajectory, rows: RowPolicy) -> TrlRow:
    """Make the row of a valid rollout.

    Raises:
        NothingToTrainError: the rollout sampled no trainable token.
        RowsError: the rollout does not have one row under the policy.
    """
    (chosen,) = choose_rows(trajectory, rows, several=False).kept
    sequence = chosen.sequence
    start = sequence.loss_mask.index(1)
    return TrlRow(
        prompt_ids=sequence.token_ids[:start],
        completion_ids=sequence.token_ids[start:],
        logprobs=sequence.logprobs[start:],
        env_mask=sequence.loss_mask[start:],
        reward=trajectory.reward if sequence.reward is None else sequence.reward,
        session=trajectory.session,
        complete=trajectory.complete,
        outcome=trajectory.outcome,
        tokens_left_out=sum(sum(one.loss_mask) for one in trajectory.sequences) - sum(sequence.loss_mask),
    )


def masked_row(failed: FailedRollout) -> TrlRow:
    """Make the row of a rollout that failed. TRL needs one: a masked token without a reward, which TRL leaves out of the group."""
    return TrlRow(
        prompt_ids=[0],
        completion_ids=[0],
        logprobs=[0.0],
        env_mask=[0],
        reward=None,
        session=failed.session,
        complete=False,
        outcome=failed.kind,
        tokens_left_out=0,
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
            for engine in self._engines:
                with httpx2.Client(timeout=_ENGINE_SECONDS, trust_env=not is_local(engine)) as http:
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
