"""Format `verifiers`: its classes accept it, and every version of prime-rl makes exactly the sequences of it."""

import json

import msgspec
import pytest

from tests.support.material import require_package
from tests.trajectories.formats.readers import read_verifiers
from tests.trajectories.formats.schemas import Trace
from tests.trajectories.rollouts import ROLLOUTS, linear, rewarded, torn
from tokencache.core.outcome import Outcome
from tokencache.trajectories.formats.registry import FORMATS, write
from tokencache.trajectories.formats.verifiers import verifiers
from tokencache.trajectories.rollout import rollout


def written(made):
    return json.loads(msgspec.json.encode(verifiers(made)))


@pytest.mark.parametrize("shape", ROLLOUTS)
def test_verifiers_accepts_it(shape):
    Trace.model_validate(written(ROLLOUTS[shape]))


def test_the_class_of_verifiers_accepts_it_and_has_the_same_branches():
    trace_class = require_package("verifiers", "verifiers.v1.trace").WireTrace
    for made in ROLLOUTS.values():
        trace = trace_class.model_validate(written(made))
        assert [branch.token_ids for branch in trace.branches] == [s.token_ids for s in made.sequences]
        assert [branch.sampled_mask for branch in trace.branches] == [list(map(bool, s.loss_mask)) for s in made.sequences]
        assert [branch.logprobs for branch in trace.branches] == [s.logprobs for s in made.sequences]


def test_the_class_of_verifiers_says_that_a_rollout_failed():
    trace_class = require_package("verifiers", "verifiers.v1.trace").WireTrace
    failed = msgspec.structs.replace(rewarded(ROLLOUTS["linear"]), outcome=Outcome("sandbox", "no disk"))
    trace = trace_class.model_validate_json(write(failed, FORMATS["verifiers"]))
    assert trace.has_error
    assert (trace.last_error.type, trace.last_error.message) == ("sandbox", "no disk")
    assert not any(any(branch.sampled_mask) for branch in trace.branches)
    assert not trace_class.model_validate_json(write(rewarded(ROLLOUTS["linear"]), FORMATS["verifiers"])).has_error


@pytest.mark.parametrize("shared_once", [False, True], ids=["every-branch", "first-branch"])
@pytest.mark.parametrize("shape", ROLLOUTS)
def test_prime_rl_makes_the_same_sequences(shape, shared_once):
    trained = [s for s in ROLLOUTS[shape].sequences if s.trainable]
    rows = read_verifiers(written(ROLLOUTS[shape]), shared_once=shared_once)
    assert rows == [(s.token_ids, s.loss_mask, s.logprobs) for s in trained]


def test_a_node_in_two_branches_would_be_trained_twice_by_one_version():
    trace = written(ROLLOUTS["thrown-away"])
    second = next(at for at, node in enumerate(trace["nodes"]) if at and node["parent"] is None)
    stem = next(at for at, node in enumerate(trace["nodes"]) if node.get("sampled"))
    trace["nodes"][second]["parent"] = stem  # as if the branch hung where it branched off
    every, once = (sum(sum(row.mask) for row in read_verifiers(trace, shared_once=flag)) for flag in (False, True))
    assert every > once == ROLLOUTS["thrown-away"].figures.trainable_tokens


def test_a_reward_that_was_given():
    trace = written(rewarded(ROLLOUTS["linear"]))
    Trace.model_validate(trace)
    assert trace["rewards"] == {"reward": {"score": 0.5, "weight": 1.0}}
    assert trace["metrics"] == {"tests": 1.0, "style": -0.25}
    assert written(ROLLOUTS["linear"])["rewards"] == {}  # not 0


def test_a_branch_for_each_sequence_with_its_labels():
    trace = written(ROLLOUTS["sub-agent"])
    sequences = trace["info"]["tokencache"]["sequences"]
    assert [one["id"] for one in sequences] == [s.id for s in ROLLOUTS["sub-agent"].sequences]
    parents = {node["parent"] for node in trace["nodes"]}
    assert [one["leaf"] for one in sequences] == [at for at in range(len(trace["nodes"])) if at not in parents]
    assert [len(node["tools"]) for node in trace["nodes"] if node["parent"] is None] == [one["tools"] for one in sequences]
    assert [tool["name"] for tool in trace["tools"]] == ["bash"]


def test_messages_are_in_order_and_answers_carry_the_tokens():
    nodes = written(ROLLOUTS["linear"])["nodes"]
    roles = ["system", "user", "assistant", "tool", "assistant", "tool", "tool", "assistant"]
    assert [node["message"]["role"] for node in nodes] == roles
    assert [bool(node.get("token_ids")) for node in nodes] == [role == "assistant" for role in roles]
    assert [node["parent"] for node in nodes] == [None, *range(7)]
    assert nodes[2]["message"]["reasoning_content"] == "I count them."


def test_calls_have_their_node_and_finish_reason():
    trace = written(ROLLOUTS["aborted"])
    assert all(trace["nodes"][call["node"]]["sampled"] for call in trace["calls"])
    assert [call["finish_reason"] for call in trace["calls"]] == ["stop", None, "stop"]
    assert [call["sampling"]["temperature"] for call in trace["calls"]] == [0.7] * 3


def test_calls_are_in_the_order_in_which_they_ended():
    """verifiers reads from the last one whether the trace was truncated."""
    trace = written(ROLLOUTS["sub-agent"])
    times = [call["time"]["end"] for call in trace["calls"]]
    assert times == sorted(times)
    assert trace["nodes"][trace["calls"][-1]["node"]]["message"]["content"] == "It has twelve."


def test_the_turns_that_a_fork_shares_are_no_calls_of_it():
    talk = linear()
    for turn in ("t0", "t1"):
        talk.change(turn, marks=("shared",), logprobs=b"", logprobs_hash=b"")
    trace = written(rollout(talk.records()))
    assert [call["node"] for call in trace["calls"]] == [at for at, node in enumerate(trace["nodes"]) if node.get("sampled")] == [7]


def test_an_incomplete_rollout_is_not_ok():
    for made, kind in ((ROLLOUTS["lost"], "store-error"), (ROLLOUTS["aborted"], "call-open"), (torn(), "torn-record")):
        trace = written(made)
        assert not trace["ok"]
        assert kind in [one["type"] for one in trace["errors"]]
    assert written(ROLLOUTS["linear"])["ok"]


def test_without_messages_only_the_answer_is_a_node():
    trace = written(ROLLOUTS["media"])
    sequence = trace["info"]["tokencache"]["sequences"][0]
    assert sequence["wordless"] == ["t0"]
    assert trace["nodes"][0]["message"]["role"] == "assistant"
    assert len(trace["nodes"][0]["token_ids"]) == sequence["tokens"]


def test_images_are_parts_with_a_reference():
    messages = [node["message"] for node in written(ROLLOUTS["pictures"])["nodes"]]
    assert [part["type"] for part in messages[0]["content"]] == ["text", "image_url", "text"]
    assert [part["image_url"]["url"] for part in messages[2]["content"]] == ["media:" + "b" * 64, "media:" + "a" * 64]


def test_the_tokens_of_images_have_a_type():
    assert written(ROLLOUTS["pictures"])["mm_token_type_id_map"] == {"1": 1}
    assert written(ROLLOUTS["linear"])["mm_token_type_id_map"] == {}


def test_prime_rl_reads_it_under_either_name():
    assert FORMATS["prime-rl"].write is FORMATS["verifiers"].write
