"""verl: `AgentLoopOutput`, what an agent loop of one's own returns.

Source: verl 0.9.1 on PyPI (github.com/verl-project/verl), `verl/experimental/agent_loop/agent_loop.py`.

=====================  =======  ================================================================================================
`prompt_ids`           [int]    before the first sampled token
`response_ids`         [int]    "LLM generated token, tool response token"
`response_mask`        [int]    "1 for LLM generated token, 0 for tool response token"
`response_logprobs`    [float]  one for each token of the response; verl wants them of all rows of a batch, or of none
`reward_score`         float?   `None`: the trainer's; of a list of outputs verl gives the last one's score to all
`num_turns`            int      "including user, assistant, tool": each turn here is a reply and what it answered
`metrics`              object   `generate_sequences`: seconds that the calls took, summed; the others keep verl's defaults
`extra_fields`         object   our labels under `tokencache`: verl makes a column of each name
=====================  =======  ================================================================================================

An agent loop returns one output, or (`verl/trainer/ppo/v1/agent_loop_tq.py`) a list of them: the `outputs` here,
`AgentLoopOutput(**one)`. Padding to `prompt_length` and `response_length` is verl's, and so is cutting off what is longer.
`min_global_steps` and `max_global_steps` are the trainer's to fill in: what the engine calls its weight versions
(`tokencache.turns[].weight_versions`) need not be verl's steps.
"""

from typing import Any

from tokencache.trajectories.formats.rows import Row, rows_of, session_object
from tokencache.trajectories.rollout import Rollout


def verl(rollout: Rollout) -> dict[str, Any]:
    """Write a rollout's sequences as keyword arguments of verl's `AgentLoopOutput`."""
    return {**session_object(rollout), "outputs": [_output(row) for row in rows_of(rollout)]}


def _output(row: Row) -> dict[str, Any]:
    turns = row.sequence.turns
    return {
        "prompt_ids": row.prompt_ids,
        "response_ids": row.response_ids,
        "response_mask": row.response_mask,
        "response_logprobs": row.response_logprobs,
        "reward_score": None,
        "num_turns": 2 * len(turns),
        "metrics": {"generate_sequences": sum(span.turn.seconds for span in turns)},
        "extra_fields": {"tokencache": row.labels},
    }
