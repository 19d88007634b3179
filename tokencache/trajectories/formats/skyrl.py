"""Writes rollouts for SkyRL: a `GeneratorOutput`, which a custom generator returns.

Source: skyrl 0.3.0 on PyPI (github.com/NovaSky-AI/SkyRL), `skyrl/train/generators/base.py`; checked by `validate_generator_output` in
`skyrl/train/utils/trainer_utils.py`. The output is a batch: a list for each field, with one entry for each sequence.

====================  =========  ==============================================================================================
`prompt_token_ids`    [[int]]    tokens before the first sampled token
`response_ids`        [[int]]    all tokens after it
`loss_masks`          [[int]]    over the response; 1: sampled here
`rollout_logprobs`    [[float]]  over the response
`stop_reasons`        [str]      `stop`, `length` or `abort`: of the last turn, as an engine names it. SkyRL can mask or penalize
                                 everything but `stop`
`rewards`             [float]?   one for each response: that of the sequence, otherwise of the session. `None` if a response has
                                 none: the trainer sets them
`is_last_step`        [bool]     true for the last sequence. With `generator.step_wise_trajectories` the advantage of the last
                                 sequence is used for all, so that a session counts once. Without it SkyRL trains each on its own
`tokencache`          [object]   our labels. SkyRL concatenates such lists like its own
====================  =========  ==============================================================================================

`concatenate_generator_outputs` joins the batches of several sessions. The trainer sets `trajectory_ids`, because only it knows which
sessions answered the same prompt. A session without a sequence has empty lists, which SkyRL refuses.
"""

from collections.abc import Mapping
from typing import Any

from tokencache.trajectories.formats.rows import ExportedRow, ExportedTokens, rows_of, session_object
from tokencache.trajectories.rollout import Rollout


def skyrl(rollout: Rollout) -> dict[str, Any]:
    """Write a rollout as a batch for SkyRL: its `generator_output` holds one entry for each sequence."""
    rows = rows_of(rollout)
    rewards = [row.reward for row in rows]
    return {
        **session_object(rollout),
        "generator_output": {
            "prompt_token_ids": [row.prompt_ids for row in rows],
            "response_ids": [row.response_ids for row in rows],
            "loss_masks": [row.response_mask for row in rows],
            "rollout_logprobs": [row.response_logprobs for row in rows],
            "stop_reasons": [row.ending for row in rows],
            "rewards": None if None in rewards else rewards,
            "is_last_step": [row is rows[-1] for row in rows],
            "tokencache": [row.labels for row in rows],
        },
    }


def read_skyrl(batch: Mapping[str, Any]) -> list[ExportedRow]:
    """Read a batch back."""
    out = batch["generator_output"]
    tokens = zip(out["prompt_token_ids"], out["response_ids"], out["loss_masks"], out["rollout_logprobs"], strict=True)
    return [ExportedRow(labels, ExportedTokens(*one)) for labels, one in zip(out["tokencache"], tokens, strict=True)]
