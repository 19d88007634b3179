"""Format `tinker`: rows become `Datum`, `ModelInput` and `TensorData` of Tinker."""

import json

import msgspec
import pytest
import tinker as sdk

from tests.trajectories.rollouts import ROLLOUTS, rewarded
from tokencache.core.outcome import Outcome
from tokencache.trajectories.formats.registry import FORMATS, write
from tokencache.trajectories.formats.tinker import tinker


def datum(row, **more):
    tensors = {name: sdk.TensorData(**tensor) for name, tensor in row["loss_fn_inputs"].items()}
    return sdk.Datum(sdk.ModelInput(**row["model_input"]), {**tensors, **more})


@pytest.mark.parametrize("shape", sorted(ROLLOUTS.keys() - {"pictures"}))
def test_every_row_is_a_datum(shape):
    rows = tinker(ROLLOUTS[shape])["data"]
    assert len(rows) == len(ROLLOUTS[shape].sequences)
    for row, sequence in zip(rows, ROLLOUTS[shape].sequences, strict=True):
        made = datum(row)
        inputs = {name: tensor.to_numpy() for name, tensor in made.loss_fn_inputs.items()}
        assert made.model_input.to_ints() == sequence.token_ids[:-1]
        assert inputs["target_tokens"].tolist() == sequence.token_ids[1:]
        assert inputs["logprobs"].tolist() == sequence.logprobs[1:]  # to the last bit, although they are float32 there
        assert inputs["mask"].tolist() == sequence.loss_mask[1:]
        assert {name: str(values.dtype) for name, values in inputs.items()} == {
            "target_tokens": "int64",
            "logprobs": "float32",
            "mask": "float32",
        }


def test_position_i_predicts_target_i():
    (row,) = tinker(ROLLOUTS["cut-off"])["data"]
    (sequence,) = ROLLOUTS["cut-off"].sequences
    mask = row["loss_fn_inputs"]["mask"]["data"]
    first = mask.index(1.0)
    assert first + 1 == sequence.turns[0].completion[0]  # the last token of the prompt predicts the first that was sampled
    assert row["model_input"]["chunks"][0]["tokens"][first] == sequence.token_ids[first]


def test_a_trainer_adds_its_advantages():
    (row,) = tinker(ROLLOUTS["linear"])["data"]
    made = datum(row, advantages=[0.5 * one for one in row["loss_fn_inputs"]["mask"]["data"]])
    assert made.loss_fn_inputs["advantages"].to_numpy().sum() == 0.5 * ROLLOUTS["linear"].figures.trainable_tokens


def test_a_failed_rollout_is_a_datum_whose_advantages_are_all_zero():
    failed = msgspec.structs.replace(rewarded(ROLLOUTS["linear"]), outcome=Outcome("sandbox"))
    (row,) = json.loads(write(failed, FORMATS["tinker"]))["data"]
    mask = datum(row).loss_fn_inputs["mask"].to_numpy()
    made = datum(row, advantages=[0.5 * one for one in mask])
    assert not mask.any()
    assert not made.loss_fn_inputs["advantages"].to_numpy().any()
    assert (row["tokencache"]["session_reward"], row["tokencache"]["reward"]) == (None, None)
