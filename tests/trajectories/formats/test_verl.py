"""Format `verl`: the fields of `AgentLoopOutput` as published, and what padding and batching assume."""

from typing import Any

import msgspec
import pytest
from pydantic import BaseModel, ConfigDict

from tests.trajectories.rollouts import ROLLOUTS, rewarded, text
from tokencache.trajectories.formats.verl import verl


class Metrics(BaseModel):
    """`AgentLoopMetrics` of verl 0.9.1, strictly."""

    model_config = ConfigDict(extra="forbid", strict=True)
    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


class Output(BaseModel):
    """`AgentLoopOutput` of verl 0.9.1 (verl/experimental/agent_loop/agent_loop.py), strictly."""

    model_config = ConfigDict(extra="forbid", strict=True)
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any | None = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: Metrics
    extra_fields: dict[str, Any] = {}
    mm_processor_kwargs: dict[str, Any] | None = None
    mm_processor_output: list[dict[str, Any]] | None = None


@pytest.mark.parametrize("shape", ROLLOUTS)
def test_every_output_has_the_fields_of_verl(shape):
    outputs = [Output(**one) for one in verl(ROLLOUTS[shape])["outputs"]]
    assert len(outputs) == len(ROLLOUTS[shape].sequences)
    for one in outputs:
        assert len(one.response_ids) == len(one.response_mask) == len(one.response_logprobs)
        assert one.reward_score is None
        assert set(one.extra_fields) <= {"tokencache", "min_global_steps", "max_global_steps"}


def test_global_steps_are_the_oldest_and_newest_version_if_all_are_known_numbers():
    def steps(versions, mixed=0):
        made = ROLLOUTS["linear"]
        (sequence,) = made.sequences
        ends = {"oldest_version": min(versions, default=""), "newest_version": max(versions, default="")}
        counted = msgspec.structs.replace(sequence, versions=versions, mixed_tokens=mixed, **ends)
        (one,) = verl(msgspec.structs.replace(made, sequences=(counted,)))["outputs"]
        return {name: value for name, value in one["extra_fields"].items() if name != "tokencache"}

    tokens = ROLLOUTS["linear"].sequences[0].trainable
    assert steps({"7": tokens - 1, "8": 1}) == {"min_global_steps": 7, "max_global_steps": 8}
    assert steps({"7": tokens - 1}, mixed=1) == steps({"7": tokens - 1}) == steps({"v7": tokens}) == steps({}) == {}


def test_the_reward_is_that_of_the_sequence_or_of_the_session():
    sequences = ROLLOUTS["sub-agent"].sequences
    outputs = verl(rewarded(ROLLOUTS["sub-agent"], **{sequences[1].id: -1.0}))["outputs"]
    assert [Output(**one).reward_score for one in outputs] == [0.5, -1.0] + [0.5] * (len(sequences) - 2)


def test_an_unknown_field_is_refused():
    (one,) = verl(ROLLOUTS["linear"])["outputs"]
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        Output(**one, mask=[])


def test_turns_and_seconds_are_counted():
    (one,) = verl(ROLLOUTS["linear"])["outputs"]
    assert one["num_turns"] == 6  # a question and two rounds of tool results, each with a reply
    assert one["metrics"] == {"generate_sequences": 1.5}
    assert text(one["response_ids"]).endswith("There is no a.py.<|end|>")
