"""Writes rollouts for Tinker: a `Datum` for each sequence.

Source: tinker 0.38.0 on PyPI, `tinker/types/datum.py`, `model_input.py` and `tensor_data.py`. The names and meanings of the inputs follow
tinker-cookbook 0.6.1 (github.com/thinking-machines-lab/tinker-cookbook), `tinker_cookbook/rl/data_processing.py`, `trajectory_to_data`.

Tinker expects next-token prediction: the input is all tokens but the last, the targets are all tokens but the first, so that position `i`
predicts target `i`. Everything in `loss_fn_inputs` is aligned with the targets. So the first token of a sequence is never a target. It is
never a sampled token either, because engines do not answer an empty prompt.

============================  ==========  ==================================================================================
`model_input.chunks`          chunks      `{"type": "encoded_text", "tokens": [...]}`, and an image in the place of its tokens:
                                          `{"type": "image_asset_pointer", "format", "location", "expected_tokens"}`
`loss_fn_inputs`              tensors     `{"data": [...], "dtype": "int64" or "float32", "shape": [n]}`
- `target_tokens`             int64
- `logprobs`                  float32     as sampled; 0.0 where the mask is 0
- `mask`                      float32     1.0: sampled here. Used by the cookbook, which removes it before `forward_backward`
`tokencache`                  object      our labels. `turns[].completion` counts the tokens of the sequence, not the targets
============================  ==========  ==================================================================================

The trainer adds `advantages`: one number times `mask`. The rewards are labels: `tokencache.reward` (of the sequence) and
`tokencache.session_reward`. The `location` of an image is the
name of the file that `tokencache media` writes (`<sha256>.png`): put the folder before it, or send an `ImageChunk` with the bytes. Tinker
reads PNG and JPEG. A row with another medium, or with an image without a digest, is written as tokens only and cannot be trained as it is:
`tokencache.media` lists what it needs. In Python:

    Datum(ModelInput(**row["model_input"]), {name: TensorData(**tensor) for name, tensor in row["loss_fn_inputs"].items()})
"""

from collections.abc import Mapping
from typing import Any

from tokencache.core.lineage import TokenSequence
from tokencache.core.media import file_name
from tokencache.trajectories.formats.rows import ExportedRow, ExportedTokens, rows_of, session_object
from tokencache.trajectories.rollout import Rollout

_FORMATS = {"image/png": "png", "image/jpeg": "jpeg"}
"""The formats of images that Tinker reads (`ImageAssetPointerChunk.format`), by media type."""


def tinker(rollout: Rollout) -> dict[str, Any]:
    """Write each sequence of a rollout as a `Datum`, without the advantages."""
    return {
        **session_object(rollout),
        "data": [{**_datum(row.sequence), "tokencache": row.labels} for row in rows_of(rollout)],
    }


def read_tinker(row: Mapping[str, Any]) -> list[ExportedRow]:
    """Read one row back. The target of a token is the token after it, so the first token has no mask.

    Raises:
        ValueError: a target is another token.
    """
    inputs = row["loss_fn_inputs"]
    targets = inputs["target_tokens"]["data"]
    ids: list[int] = []
    for chunk in row["model_input"]["chunks"]:  # the tokens of an image are only among the targets, and no row begins with one
        at = len(ids) - 1
        ids += chunk["tokens"] if "tokens" in chunk else targets[at : at + chunk["expected_tokens"]]
    if ids[1:] != targets[:-1]:
        raise ValueError("a target is not the token after its place")
    mask = [int(value) for value in inputs["mask"]["data"]]
    return [ExportedRow(row["tokencache"], ExportedTokens(ids[:1], targets, mask, inputs["logprobs"]["data"]))]


def _datum(sequence: TokenSequence) -> dict[str, Any]:
    return {
        "model_input": {"chunks": _chunks(sequence)},
        "loss_fn_inputs": {
            "target_tokens": _tensor(sequence.token_ids[1:], "int64"),
            "logprobs": _tensor(sequence.logprobs[1:], "float32"),
            "mask": _tensor([float(one) for one in sequence.loss_mask[1:]], "float32"),
        },
    }


def _chunks(sequence: TokenSequence) -> list[dict[str, Any]]:
    """Split the tokens of the input at its images."""
    end, at = len(sequence.token_ids) - 1, 0
    chunks: list[dict[str, Any]] = []
    for medium in sequence.media:
        if medium.media_type not in _FORMATS or not medium.sha256 or medium.end > end:
            return [_text(sequence.token_ids[:-1])]
        chunks += [_text(sequence.token_ids[at : medium.start])] if medium.start > at else []
        location, at = file_name(medium.sha256, medium.media_type), medium.end
        image = {"type": "image_asset_pointer", "format": _FORMATS[medium.media_type], "location": location}
        chunks.append({**image, "expected_tokens": medium.length})
    return [*chunks, _text(sequence.token_ids[at:-1])] if at < end or not chunks else chunks


def _text(tokens: list[int]) -> dict[str, Any]:
    return {"type": "encoded_text", "tokens": tokens}


def _tensor(values: list[Any], dtype: str) -> dict[str, Any]:
    return {"data": values, "dtype": dtype, "shape": [len(values)]}
