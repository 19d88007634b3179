"""Format `atif`: the class of Harbor accepts it, and copied context is never trained."""

import json

import msgspec
import pytest

from tests.trajectories.formats.readers import read_atif
from tests.trajectories.rollouts import ROLLOUTS, TASK, Talk, pictures, result, rewarded, rollout, torn, user
from tokencache.core.outcome import Outcome
from tokencache.trajectories.formats.atif import atif
from tokencache.trajectories.formats.registry import FORMATS, write

try:
    from harbor.models.trajectories import Trajectory
except ImportError:  # needs Python 3.12 and much else; `atif` holds the same models
    from atif import Trajectory


def written(made):
    return json.loads(msgspec.json.encode(atif(made)))


def trajectories(made):
    return written(made)["trajectories"]


def made_of(*calls):
    talk = Talk()
    for messages, content, more in calls:
        talk.call(messages, content, **more)
    return rollout(talk.records())


@pytest.mark.parametrize("shape", ROLLOUTS)
def test_harbor_accepts_them(shape):
    for trajectory in trajectories(ROLLOUTS[shape]):
        read = Trajectory.model_validate(trajectory)
        assert json.loads(read.model_dump_json(exclude_unset=True)) == trajectory


@pytest.mark.parametrize("shape", ["linear", "thrown-away", "sub-agent"])
def test_harbor_reads_a_failed_rollout_without_a_step_to_train_on(shape):
    """Its log probabilities make a step one that is trained; `extra` says what failed."""
    failed = msgspec.structs.replace(rewarded(ROLLOUTS[shape]), outcome=Outcome("sandbox", "no disk"))
    for row in json.loads(write(failed, FORMATS["atif"]))["trajectories"]:
        read = Trajectory.model_validate(row)
        assert {step.metrics.logprobs for step in read.steps if step.metrics} == {None}
        assert [read.extra[name] for name in ("valid", "outcome", "session_reward")] == [False, "sandbox", None]


def test_what_a_fork_shares_is_copied_context():
    """Harbor's own export of training data leaves out such steps. The session that was forked has them, too."""
    talk = Talk()
    shared = talk.call(TASK, "Which a.py?", marks=("shared",), logprobs=[])
    own = talk.call([*talk.history(shared), user("Mine.")], "I see.", after=shared)
    (trajectory,) = trajectories(rollout(talk.records()))
    read = Trajectory.model_validate(trajectory)
    assert [(step.source, bool(step.is_copied_context)) for step in read.steps] == [
        ("system", True),
        ("user", True),
        ("agent", True),
        ("user", False),
        ("agent", False),
    ]
    (last,) = [span.turn for span in rollout(talk.records()).sequences[0].turns if span.turn.id == own]
    totals = read.final_metrics
    assert (totals.total_prompt_tokens, totals.total_completion_tokens) == (last.prompt_tokens, last.completion_tokens)


def masks(sequence):
    """The turn of each token of a sequence, and its mask."""
    turns = [span.turn for span in sequence.turns for _ in range(span.prompt[0], span.completion[1])]
    return zip(turns, sequence.loss_mask, strict=True)


@pytest.mark.parametrize("shape", ROLLOUTS)
def test_one_trajectory_is_one_sequence(shape):
    made = ROLLOUTS[shape]
    for row, sequence in zip(read_atif(written(made)), made.sequences, strict=True):
        whole = [one if not turn.forced else 0 for turn, one in masks(sequence)]  # a step with forced ids is context
        assert row == (sequence.token_ids, whole, [value * one for value, one in zip(sequence.logprobs, whole, strict=True)])
    assert [one["trajectory_id"] for one in trajectories(made)] == [s.id for s in made.sequences]
    assert {one["session_id"] for one in trajectories(made)} <= {made.session}


def test_steps_have_the_right_source():
    steps = trajectories(ROLLOUTS["linear"])[0]["steps"]
    assert [step["source"] for step in steps] == ["system", "user", "agent", "agent", "agent"]
    assert steps[2]["reasoning_content"] == "I count them."
    assert steps[2]["tool_calls"] == [{"tool_call_id": "c1", "function_name": "bash", "arguments": {"cmd": "wc -l a.py"}}]
    assert steps[3]["observation"]["results"] == [{"source_call_id": "c2", "content": "b.py"}, {"source_call_id": "c3", "content": "/src"}]
    assert steps[2]["timestamp"].endswith("+00:00")
    assert trajectories(ROLLOUTS["linear"])[0]["agent"]["tool_definitions"][0]["function"]["name"] == "bash"


def test_only_the_context_of_a_branch_is_marked_as_copied():
    away = next(one for one in trajectories(ROLLOUTS["thrown-away"]) if one["extra"]["start"] == "branch")
    assert [step.get("is_copied_context", False) for step in away["steps"]] == [True, True, True, False]
    assert away["extra"]["parent"] == "t0"
    main = trajectories(ROLLOUTS["thrown-away"])[0]
    assert not any(step.get("is_copied_context") for step in main["steps"])


def test_a_reply_of_another_sequence_is_not_trained():
    second = trajectories(ROLLOUTS["unrecognized"])[1]
    assert [(step["source"], step.get("is_copied_context", False), "metrics" in step) for step in second["steps"]] == [
        ("system", False, False),
        ("user", False, False),
        ("agent", True, False),
        ("user", False, False),
        ("agent", False, True),
    ]


def test_a_turn_without_log_probabilities_has_none():
    steps = [step for step in trajectories(ROLLOUTS["without-logprobs"])[0]["steps"] if step["source"] == "agent"]
    assert ["logprobs" in step["metrics"] for step in steps] == [True, False, True]
    assert all(step["metrics"]["completion_token_ids"] for step in steps)


@pytest.mark.parametrize("arguments", ['{"cmd": "ls', "[1]", "ls -l", "null"])
def test_arguments_that_are_not_an_object_are_kept_as_text(arguments):
    talk = Talk()
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": arguments}}
    talk.call([*TASK, {"role": "assistant", "content": None, "tool_calls": [call]}, result("c1", "?")], "Sorry.")
    trajectory = trajectories(rollout(talk.records()))[0]
    Trajectory.model_validate(trajectory)
    assert trajectory["steps"][2]["tool_calls"] == [
        {"tool_call_id": "c1", "function_name": "bash", "arguments": {}, "extra": {"arguments": arguments}}
    ]


def test_a_result_without_its_call_is_a_step_of_its_own():
    trajectory = trajectories(made_of(([*TASK, result("gone", "12")], "Twelve.", {})))[0]
    Trajectory.model_validate(trajectory)
    assert trajectory["steps"][2] == {"step_id": 3, "source": "system", "message": "", "observation": {"results": [{"content": "12"}]}}


def test_turns_without_messages_are_named():
    first, second = trajectories(ROLLOUTS["media"])
    assert "t0" in first["notes"]
    assert [step["source"] for step in first["steps"]] == ["agent"]
    assert "notes" not in second


def test_images_are_parts_that_name_their_files():
    (trajectory,) = trajectories(ROLLOUTS["pictures"])
    asked, called, _ = trajectory["steps"]
    assert [part.get("text") or part["source"] for part in asked["message"]] == [
        "What is this?",
        {"media_type": "image/png", "path": "a" * 64 + ".png"},
        "And this?",
    ]
    (seen,) = called["observation"]["results"]
    assert [part["source"]["path"][0] for part in seen["content"]] == ["b", "a"]
    assert trajectory["extra"]["wordless"] == []


def test_an_image_that_the_format_does_not_have_is_named():
    talk = pictures()
    for turn in talk.turns:
        talk.change(turn.id, media=tuple(msgspec.structs.replace(one, media_type="image/bmp") for one in turn.media))
    (trajectory,) = trajectories(rollout(talk.records()))
    assert trajectory["extra"]["wordless"] == ["t0", "t1"]


def test_a_known_harness_is_named():
    made = made_of((TASK, "Twelve.", {"harness": "hermes"}), ([user("?")], "No.", {}))
    assert [one["agent"]["name"] for one in trajectories(made)] == ["hermes", "unknown"]


def test_an_empty_or_torn_rollout_has_no_trajectory():
    assert trajectories(ROLLOUTS["empty"]) == []
    out = written(torn())
    assert (out["complete"], out["trajectories"]) == (False, [])
    assert [one["kind"] for one in out["incidents"]] == ["torn-record"]
