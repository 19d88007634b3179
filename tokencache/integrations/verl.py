"""An agent loop for verl that runs any harness through tokencache.

verl creates it by name, from the file that `actor_rollout_ref.rollout.agent.agent_loop_config_path` names:

    - name: my_harness
      _target_: tokencache.integrations.verl.TokencacheAgentLoop
      url: http://127.0.0.1:8100
      play: my_package.rollouts:play

`docs/integrations/verl.md` has the complete setup. Source: verl 0.9.1, `verl/experimental/agent_loop/agent_loop.py` (`AgentLoopBase`,
`AgentLoopOutput`, `AgentLoopWorker`) and `verl/trainer/ppo/v1/agent_loop_tq.py`.
"""

import os
from collections.abc import Mapping
from typing import Any

from tokencache.batching.media import images_of
from tokencache.client import AsyncClient
from tokencache.integrations.fetching import Fetching, FinishedRollout
from tokencache.integrations.rollouts import FailedRollout, FailedRolloutError, Play, Rollouts, load_play, new_run
from tokencache.integrations.rows import RowPolicy, check_policy
from tokencache.trajectories.lengths import ExportOptions
from tokencache.trajectories.values import Sequence

try:
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"tokencache.integrations.verl runs inside verl (0.9.1): {error}. pip install verl", name=error.name
    ) from error

_SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty")
"""The sampling parameters that verl gives to an agent loop. It also gives `logprobs`: the proxy always requests them."""

_RUN = new_run()
"""The run of the agent loops of this process that name none."""


class TokencacheAgentLoop(AgentLoopBase):
    """Runs the harness of one sample in a session of its own.

    Each argument but those of `AgentLoopBase` is a member of the entry in the agent loop file.

    Args:
        url: the URL of the proxy.
        play: runs the harness (`tokencache.integrations.rollouts`), as `package.module:function`. Its `sample` has the columns of the
            data set: `raw_prompt`, `index`, …
        rows: which rows of a rollout are trained (`tokencache.integrations.rows`). `all` needs verl's default trainer
            (`trainer.use_v1: true`): the older one accepts one output for each sample.
        overlong: what happens to a row that is longer than `rollout.prompt_length` or `rollout.response_length`: `cut` after the last
            whole turn that fits, or `drop`. verl cannot batch a longer one.
        harness: name of the harness adapter; `""` for none.
        timeout: seconds to wait for calls that are still in flight when `play` returns.
        delete: delete each session once its rollout was fetched.
        retries: how often a rollout that failed is played again.
        run: the id of the run (`docs/integrations/README.md`); by default a new one in each process of verl.
        admin_key: the proxy's admin key; by default the value of TOKENCACHE_ADMIN_KEY.

    Raises:
        ValueError: an option is invalid.
    """

    def __init__(
        self,
        *args: Any,
        url: str,
        play: Play[Any] | str,
        rows: RowPolicy = "main",
        overlong: str = "cut",
        harness: str = "",
        timeout: float = 60.0,
        delete: bool = False,
        retries: int = 0,
        run: str = "",
        admin_key: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        check_policy(rows, several=True)
        if overlong not in {"cut", "drop"}:
            raise ValueError(f"overlong: {overlong!r} is neither 'cut' nor 'drop'")
        self._url, self._admin_key = url, admin_key or os.environ.get("TOKENCACHE_ADMIN_KEY")
        lengths = ExportOptions(
            max_prompt_length=self.rollout_config.prompt_length,
            max_response_length=self.rollout_config.response_length,
            overlong=overlong,
        )
        self._several = rows == "all"
        self._rollouts: Rollouts[Mapping[str, Any], FinishedRollout] = Rollouts(
            play=load_play(play),
            read=Fetching(form="verl", rows=rows, several=self._several, images=True, lengths=lengths),
            run=run or _RUN,
            options={"harness": harness},
            timeout=timeout,
            delete=delete,
            retries=retries,
        )

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Run the harness for one sample. Returns one output, or with `rows: all` a list.

        Raises:
            FailedRolloutError: the rollout failed. verl then leaves it out of its group (`docs/integrations/verl.md`).
            RowsError: the rows of the rollout do not fit the policy.
        """
        sampling = {name: sampling_params[name] for name in _SAMPLING if sampling_params.get(name) is not None}
        async with AsyncClient(self._url, self._admin_key) as client:
            rollout = await self._rollouts.one(client, kwargs, group=str(kwargs.get("uid", "")), sampling=sampling)
        if isinstance(rollout, FailedRollout):
            raise FailedRolloutError(f"{rollout.kind}: {rollout}")
        outputs = _outputs(rollout, _default_steps(kwargs))
        if self._several and rollout.trajectory.reward is not None:
            outputs[-1].reward_score = rollout.trajectory.reward  # verl compares the last ones of a group, and gives the advantage to all
        return outputs if self._several else outputs[0]


def _default_steps(sample: Mapping[str, Any]) -> dict[str, int]:
    """Return the steps of the policy versions of a sample where the proxy does not know them: those of the weights that verl sent last.

    verl's default trainer fails without them (`verl/trainer/ppo/v1/trainer_base.py`, `_compute_metrics`); the older one has no such column.
    """
    if "global_steps" not in sample:
        return {}
    sent = int(sample["global_steps"]) - 1
    return {"min_global_steps": sent, "max_global_steps": sent}


def _outputs(rollout: FinishedRollout, steps: Mapping[str, int]) -> list[AgentLoopOutput]:
    """Return the kept rows as outputs. `steps`: see `_default_steps`.

    `multi_modal_data` holds the images of a row in order, as images of Pillow: verl's worker processes them again.
    `reward_extra_info` holds the components of the reward. verl requires it beside a reward, and the same names in a whole batch.
    """
    outputs = []
    sequences = {sequence.id: sequence for sequence in rollout.trajectory.sequences}
    for row in rollout.export["outputs"]:
        labels = row["extra_fields"]["tokencache"]
        if labels["id"] in rollout.kept:
            own = {"tokencache": {**labels, "dropped": rollout.dropped}, "reward_extra_info": rollout.trajectory.reward_components}
            images = _images(sequences[labels["id"]], rollout.media)
            outputs.append(AgentLoopOutput(**{**row, **images, "extra_fields": {**steps, **row["extra_fields"], **own}}))
    return outputs


def _images(sequence: Sequence, media: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the images of a row as verl's member; nothing if it has none.

    Raises:
        ValueError: an image was sent as a URL, or it cannot be read, or there is video or audio.
    """
    if not sequence.media:
        return {}
    return {"multi_modal_data": {"images": images_of(sequence, lambda medium: media[medium.sha256])}}
