"""Writes rollouts for TRL: a row for each completion that a `rollout_func` returns.

Source: trl 1.16.0 on PyPI (github.com/huggingface/trl), `trl/trainer/grpo_trainer.py`: the argument `rollout_func` of `GRPOTrainer`, and
`_generate`, which reads its result. The function returns a dict of lists: `{name: [row[name] for row in rows]}`.

================  =======  ====================================================================================================
`prompt_ids`      [int]    required; tokens before the first sampled token
`completion_ids`  [int]    required; all tokens after it
`logprobs`        [float]  required; one for each token of the completion, of the sampled token only
`env_mask`        [int]    "model tokens (1) vs external tokens (0)", over the completion. Becomes the `tool_mask` of TRL, which
                           reads it only if the trainer itself was given no tools
`tokencache`      object   our labels, with `reward` (of the sequence) and `session_reward`. TRL passes every other name to the
                           reward functions, one entry for each completion
================  =======  ====================================================================================================

A `rollout_func` must return `num_generations` completions for each prompt, so the trainer chooses which sequences of a session to take.
Leave out sequences without sampled tokens (empty `completion_ids`): TRL reads the last token of each.

The importance sampling correction of TRL needs log probabilities of the distribution that was sampled from: run vLLM with
`--logprobs-mode processed_logprobs`. `tokencache.turns[].logprob_kind` is their kind.
"""

from collections.abc import Mapping
from typing import Any

from tokencache.trajectories.formats.rows import ExportedRow, ExportedTokens, rows_of, session_object
from tokencache.trajectories.rollout import Rollout


def trl(rollout: Rollout) -> dict[str, Any]:
    """Write each sequence of a rollout as a row for `rollout_func`."""
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


def read_trl(row: Mapping[str, Any]) -> list[ExportedRow]:
    """Read one row back."""
    tokens = ExportedTokens(row["prompt_ids"], row["completion_ids"], row["env_mask"], row["logprobs"])
    return [ExportedRow(row["tokencache"], tokens)]
