"""The demo's measures on rollouts small enough to count by hand."""

import pytest

from tokencache.demo.figures import DemoFigures, Generation, disagreements, drift, exported_turns, measure, measure_exported

A = Generation([1, 2], [3, 4], [-0.5, -0.25])
B = Generation([1, 2, 3, 4, 9], [5], [-1.0])  # extends A
C = Generation([1, 2, 3, 7, 9, 5], [6, 6], [-1.0, -2.0])  # leaves B's prefix at its fourth token
D = Generation([1, 2, 3], [8], [-3.0])  # shorter than what it shares


@pytest.mark.parametrize(("before", "turn", "lost"), [(A, B, 0), (B, C, 3), (A, C, 1), (A, D, 1), (A, A, 2)])
def test_drift_counts_from_the_first_difference(before, turn, lost):
    assert drift(before, turn) == lost


@pytest.mark.parametrize(
    ("rollout", "expected"),
    [
        ([A], DemoFigures(1, 1, 1, 0, 1, 2)),
        ([A, B], DemoFigures(1, 2, 2, 0, 1, 3)),
        ([A, B, C], DemoFigures(1, 3, 2, 3, 2, 3)),
        ([A, C], DemoFigures(1, 2, 1, 1, 2, 2)),
    ],
)
def test_measure(rollout, expected):
    assert measure(rollout) == expected


def test_figures_add_up():
    assert sum([measure([A, B]), measure([A, C])], DemoFigures()) == DemoFigures(2, 4, 3, 1, 3, 5)


def trajectory():
    return {
        "session": "r",
        "complete": True,
        "incidents": [],
        "sequences": [
            {
                "id": "s",
                "token_ids": [1, 2, 3, 4, 9, 5],
                "loss_mask": [0, 0, 1, 1, 0, 1],
                "logprobs": [0.0, 0.0, -0.5, -0.25, 0.0, -1.0],
                "turns": [{"created": 1.0, "completion": [2, 4]}, {"created": 2.0, "completion": [5, 6]}],
            }
        ],
    }


def test_what_is_exported_can_be_taken_apart():
    assert exported_turns(trajectory()) == [A, B]
    assert measure_exported(trajectory()) == measure([A, B])
    assert disagreements(trajectory(), [A, B], 2) == []


def test_only_masked_in_tokens_of_the_first_sequence_count():
    exported = trajectory()
    exported["sequences"][0]["loss_mask"][2] = 0
    assert measure_exported(exported).trainable_tokens == 2


@pytest.mark.parametrize("ground_truth", [[A], [B], [A, A], [A, B, B], [A, B, C], []])
def test_ground_truth_and_export_must_be_one_to_one(ground_truth):
    assert disagreements(trajectory(), ground_truth, len(ground_truth))


def test_incomplete_is_not_verified():
    exported = trajectory() | {"complete": False, "incidents": [{"kind": "call-open"}]}
    assert "call-open" in str(disagreements(exported, [A, B], 2))


def test_every_call_of_the_harness_must_be_recorded():
    assert "3 calls" in str(disagreements(trajectory(), [A, B], 3))
