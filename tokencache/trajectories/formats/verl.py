"""Writes rollouts for verl: the keyword arguments of `AgentLoopOutput`, which a custom agent loop returns.

Source: verl 0.9.1 on PyPI (github.com/verl-project/verl), `verl/experimental/agent_loop/agent_loop.py`.

=====================  =======  ================================================================================================
`prompt_ids`           [int]    tokens before the first sampled token
`response_ids`         [int]    "LLM generated token, tool response token"
`response_mask`        [int]    "1 for LLM generated token, 0 for tool response token"
`response_logprobs`    [float]  one for each token of the response. verl needs them for all rows of a batch, or for none
`reward_score`         float?   the reward of the sequence, otherwise of the session; `None` if none was given: verl then computes
                                one. For a list of outputs verl uses the score of the last one for all
`num_turns`            int      "including user, assistant, tool": each turn here counts a reply and the messages before it
`metrics`              object   `generate_sequences`: total seconds of the calls. The others keep the defaults of verl
`extra_fields`         object   our labels under `tokencache`, and `min_global_steps` and `max_global_steps`: the oldest and newest
                                policy version, if all trainable tokens have one and all are whole numbers. verl makes a column
                                of each name
=====================  =======  ================================================================================================

An agent loop returns one output, or a list of them (`verl/trainer/ppo/v1/agent_loop_tq.py`): `AgentLoopOutput(**one)` for each of the
`outputs` here. verl expects its training step in `min_global_steps` and `max_global_steps`: the policy versions are these steps if the
trainer announces them so (`PUT /tokencache/v1/weights`). Where they are missing, its own value stays.

verl does not cut outputs. Its own agent loops shorten the response to `rollout.response_length` (`tool_agent_loop.py`) and the prompt to
`rollout.prompt_length` (`_cap_text_prompt_length`) before they return. `AgentLoopWorker` then only pads to these lengths
(`_pad_token_ids`), and the tensors of a longer output do not fit into the batch (`torch.cat` in `_postprocess` raises). The worker for
TransferQueue stores outputs at any length. So request `max_prompt_length` and `max_response_length` with these values
(`trajectories.lengths`).
"""

from collections.abc import Mapping
from typing import Any

from tokencache.core.lineage import TokenSequence
from tokencache.trajectories.formats.rows import ExportedRow, ExportedTokens, Row, rows_of, session_object
from tokencache.trajectories.rollout import Rollout


def verl(rollout: Rollout) -> dict[str, Any]:
    """Write each sequence of a rollout as keyword arguments of `AgentLoopOutput`."""
    return {**session_object(rollout), "outputs": [_output(row) for row in rows_of(rollout)]}


def read_verl(row: Mapping[str, Any]) -> list[ExportedRow]:
    """Read one row back."""
    tokens = ExportedTokens(row["prompt_ids"], row["response_ids"], row["response_mask"], row["response_logprobs"])
    return [ExportedRow(row["extra_fields"]["tokencache"], tokens)]


def _output(row: Row) -> dict[str, Any]:
    turns = row.sequence.turns
    return {
        "prompt_ids": row.prompt_ids,
        "response_ids": row.response_ids,
        "response_mask": row.response_mask,
        "response_logprobs": row.response_logprobs,
        "reward_score": row.reward,
        "num_turns": 2 * len(turns),
        "metrics": {"generate_sequences": sum(span.turn.seconds for span in turns)},
        "extra_fields": {"tokencache": row.labels, **_global_steps(row.sequence)},
    }


def _global_steps(sequence: TokenSequence) -> dict[str, int]:
    """Return the steps of the oldest and newest policy version; empty if those of some trainable tokens are not known."""
    known = sequence.trainable == sum(sequence.versions.values())
    if not known or not sequence.versions or not all(version.isdecimal() for version in sequence.versions):
        return {}
    return {"min_global_steps": int(sequence.oldest_version), "max_global_steps": int(sequence.newest_version)}
