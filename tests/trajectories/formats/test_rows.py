"""Prompt and response, labels, and the facts about the whole rollout."""

import json

import pytest

from tests.trajectories.rollouts import ROLLOUTS, text, torn, turn_of
from tokencache.core.finish import ending
from tokencache.trajectories.formats.registry import FORMATS
from tokencache.trajectories.formats.rows import rows_of

ROWS = ("verl", "slime", "miles", "skyrl", "trl", "tinker")


def test_the_prompt_ends_at_the_first_sampled_token():
    (row,) = rows_of(ROLLOUTS["linear"])
    assert text(row.prompt_ids).endswith("How many lines has a.py?<|end|><|begin|>assistant\n")
    assert text(row.response_ids).startswith("<think>I count them.</think>Let me look.<tool_call>")
    assert "no such file" in text(row.response_ids)
    assert row.prompt_ids + row.response_ids == row.sequence.token_ids


def test_the_replies_that_a_branch_repeats_are_prompt():
    _, branch = rows_of(ROLLOUTS["thrown-away"])
    assert "<tool_call>" in text(branch.prompt_ids)
    assert text(branch.response_ids) == "Eleven.<|end|>"
    assert branch.response_mask == [1] * len(branch.response_ids)


def test_a_reply_without_log_probabilities_is_context_in_the_response():
    (row,) = rows_of(ROLLOUTS["without-logprobs"])
    assert row.sequence.turns[1].turn.marks == ("no-logprobs",)
    start, end = (at - len(row.prompt_ids) for at in row.sequence.turns[1].completion)
    assert "I see." in text(row.response_ids[start:end])
    assert not any(row.response_mask[start:end] + row.response_logprobs[start:end])


@pytest.mark.parametrize(
    ("finish", "stopped", "means"),
    [
        ("stop", True, "stop"),
        ("stop", False, "stop"),
        ("tool_calls", True, "stop"),
        ("length", False, "length"),
        ("length", True, "length"),  # with `ignore_eos`
        ("abort", False, "abort"),
        ("error", False, "abort"),
        (None, False, "abort"),
        ("repetition", False, "length"),  # vLLM, `repetition_detection`
        ("content_filter", False, "length"),
        ("of-a-later-version", True, "stop"),
    ],
)
def test_how_a_reply_ended(finish, stopped, means):
    assert ending(finish, stopped=stopped) == means


def labels_of(name, made):
    written = json.loads(json.dumps(FORMATS[name].write(made)))
    if name == "skyrl":
        return written["generator_output"]["tokencache"]
    rows = written[FORMATS[name].rows]
    where = {"verl": "extra_fields", "slime": "metadata", "miles": "metadata"}.get(name)
    return [(row[where] if where else row)["tokencache"] for row in rows]


@pytest.mark.parametrize("name", ROWS)
def test_each_row_has_labels(name):
    root, branch = labels_of(name, ROLLOUTS["thrown-away"])
    assert (branch["session"], branch["complete"], branch["id"], branch["parent"]) == ("thrown-away", True, "t1", "t0")
    assert (root["start"], branch["start"], root["continued"], branch["continued"]) == ("root", "branch", True, False)
    assert root["weight"] + branch["weight"] == 1.0
    assert branch["tools"] == 1
    (turn,) = branch["turns"]
    assert turn["sampling"] == {"temperature": 0.7, "top_p": 0.95, "max_tokens": 512}
    assert turn["replaced"] == {"temperature": 1.0, "seed": None}
    assert (turn["model"], turn["logprob_kind"]) == ("qwen3", "raw")
    own = turn_of(ROLLOUTS["thrown-away"], "t1")
    assert turn["weight_versions"] == own.versions
    assert turn["completion"] == [own.prompt_tokens, own.prompt_tokens + own.completion_tokens]


@pytest.mark.parametrize("name", ROWS)
def test_each_row_of_an_incomplete_session_is_marked(name):
    assert [labels["complete"] for labels in labels_of(name, ROLLOUTS["aborted"])] == [False, False]
    written = FORMATS[name].write(ROLLOUTS["aborted"])
    assert written["complete"] is False
    assert [one["kind"] for one in written["incidents"]] == ["client-gone", "call-open"]
    assert written["figures"]["turns"] == 3


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("made", [ROLLOUTS["empty"], ROLLOUTS["lost"], torn()], ids=["empty", "lost", "torn"])
def test_an_empty_session_has_no_rows(name, made):
    assert labels_of(name, made) == []


@pytest.mark.parametrize("name", ROWS)
def test_a_session_in_which_nothing_was_sampled_keeps_its_row(name):
    (labels,) = labels_of(name, ROLLOUTS["speechless"])
    assert (labels["trainable_tokens"], labels["weight"]) == (0, 0.0)
