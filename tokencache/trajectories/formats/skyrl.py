"""SkyRL: `GeneratorOutput`, what a generator of one's own returns.

Source: skyrl 0.3.0 on PyPI (github.com/NovaSky-AI/SkyRL), `skyrl/train/generators/base.py`; what must hold of it says
`validate_generator_output` in `skyrl/train/utils/trainer_utils.py`. It is a batch: a list for each field, with one entry for
each of our sequences.

====================  =========  ==============================================================================================
`prompt_token_ids`    [[int]]    before the first sampled token
`response_ids`        [[int]]    all behind it
`loss_masks`          [[int]]    over the response; 1: sampled here
`rollout_logprobs`    [[float]]  over the response
`stop_reasons`        [str]      `stop`, `length` or `abort`: of the last turn, as an engine says it; SkyRL can mask or punish
                                 whatever is not `stop`
`rewards`             `None`     the trainer's: one for each response, or one for each of its tokens
`is_last_step`        [bool]     true for the last sequence: with `generator.step_wise_trajectories` the advantage of the last is
                                 that of all of them, so that a session counts as one; without, SkyRL trains each on its own
`tokencache`          [object]   our labels; SkyRL joins such lists as it joins its own
====================  =========  ==============================================================================================

`concatenate_generator_outputs` makes one batch of many sessions. `trajectory_ids` are the trainer's, too: only it knows which
sessions answered the same prompt. A session without a sequence has empty lists, and SkyRL refuses those.
"""

from typing import Any

from tokencache.trajectories.formats.rows import rows_of, session_object
from tokencache.trajectories.rollout import Rollout


def skyrl(rollout: Rollout) -> dict[str, Any]:
    """Write a rollout as a batch for SkyRL: its `generator_output` holds one entry for each sequence."""
    rows = rows_of(rollout)
    return {
        **session_object(rollout),
        "generator_output": {
            "prompt_token_ids": [row.prompt_ids for row in rows],
            "response_ids": [row.response_ids for row in rows],
            "loss_masks": [row.response_mask for row in rows],
            "rollout_logprobs": [row.response_logprobs for row in rows],
            "stop_reasons": [row.ending for row in rows],
            "rewards": None,
            "is_last_step": [row is rows[-1] for row in rows],
            "tokencache": [row.labels for row in rows],
        },
    }
