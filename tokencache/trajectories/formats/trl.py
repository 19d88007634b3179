"""TRL: what a `rollout_func` returns for each completion.

Source: trl 1.16.0 on PyPI (github.com/huggingface/trl), `trl/trainer/grpo_trainer.py`: the argument `rollout_func` of
`GRPOTrainer`, and `_generate`, which reads it. The function returns a dict of lists, `{name: [row[name] for row in rows]}`.

================  =======  ====================================================================================================
`prompt_ids`      [int]    required; before the first sampled token
`completion_ids`  [int]    required; all behind it
`logprobs`        [float]  required; one for each token of the completion, of the sampled token only
`env_mask`        [int]    "model tokens (1) vs external tokens (0)", over the completion; becomes TRL's `tool_mask`. TRL reads
                           it only where the trainer itself was given no tools
`tokencache`      object   our labels; TRL hands every other name on to the reward functions, one entry for each completion
================  =======  ====================================================================================================

TRL counts completions: a `rollout_func` has to return `num_generations` of them for each prompt, so which sequences of a
session are taken is the trainer's choice. One of which nothing was sampled (`completion_ids` empty) has to be left out: TRL
looks at the last token of each.

For its importance sampling correction TRL wants log probabilities of the distribution that was sampled from: run vLLM with
`--logprobs-mode processed_logprobs`. Which they are says `tokencache.turns[].logprob_kind`.
"""

from typing import Any

from tokencache.trajectories.formats.rows import rows_of, session_object
from tokencache.trajectories.rollout import Rollout


def trl(rollout: Rollout) -> dict[str, Any]:
    """Write a rollout's sequences as rows for TRL's `rollout_func`."""
    return {
        **session_object(rollout),
        "rows": [
            {
                "prompt_ids": row.prompt_ids,
                "completion_ids": row.response_ids,
                "logprobs": row.response_logprobs,
                "env_mask": row.response_mask,
                "tokencache": row.labels,
            }
            for row in rows_of(rollout)
        ],
    }
