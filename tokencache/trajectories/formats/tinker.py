"""Writes rollouts for Tinker: a `Datum` for each sequence.

Source: tinker 0.38.0 on PyPI, `tinker/types/datum.py`, `model_input.py` and `tensor_data.py`. The names and meanings of the inputs follow
tinker-cookbook 0.6.1 (github.com/thinking-machines-lab/tinker-cookbook), `tinker_cookbook/rl/data_processing.py`, `trajectory_to_data`.

Tinker expects next-token prediction: the input is all tokens but the last, the targets are all tokens but the first, so that position `i`
predicts target `i`. Everything in `loss_fn_inputs` is aligned with the targets. So the first token of a sequence is never a target. It is
never a sampled token either, because engines do not answer an empty prompt.

============================  ==========  ==================================================================================
`model_input.chunks`          one chunk   `{"type": "encoded_text", "tokens": [...]}`
`loss_fn_inputs`              tensors     `{"data": [...], "dtype": "int64" or "float32", "shape": [n]}`
- `target_tokens`             int64
- `logprobs`                  float32     as sampled; 0.0 where the mask is 0
- `mask`                      float32     1.0: sampled here. Used by the cookbook, which removes it before `forward_backward`
`tokencache`                  object      our labels. `turns[].completion` counts the tokens of the sequence, not the targets
============================  ==========  ==================================================================================

The trainer adds `advantages`: one number times `mask`. The rewards are labels: `tokencache.reward` (of the sequence) and
`tokencache.session_reward`. In Python:

    Datum(ModelInput(**row["model_input"]), {name: TensorData(**tensor) for name, tensor in row["loss_fn_inputs"].items()})
"""

from typing import Any

from tokencache.core.lineage import TokenSequence
from tokencache.trajectories.formats.rows import rows_of, session_object
from tokencache.trajectories.rollout import Rollout


def tinker(rollout: Rollout) -> dict[str, Any]:
    """Write each sequence of a rollout as a `Datum`, without the advantages."""
    return {
        **session_object(rollout),
        "data": [{**_datum(row.sequence), "tokencache": row.labels} for row in rows_of(rollout)],
    }


def _datum(sequence: TokenSequence) -> dict[str, Any]:
    return {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": sequence.token_ids[:-1]}]},
        "loss_fn_inputs": {
            "target_tokens": _tensor(sequence.token_ids[1:], "int64"),
            "logprobs": _tensor(sequence.logprobs[1:], "float32"),
            "mask": _tensor([float(one) for one in sequence.loss_mask[1:]], "float32"),
        },
    }


def _tensor(values: list[Any], dtype: str) -> dict[str, Any]:
    return {"data": values, "dtype": dtype, "shape": [len(values)]}
