"""Labels, weights and figures of rollouts."""

import math
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.forest import Forest, grow, line
from tests.core.settings import MANY
from tokencache.api.viewer.sessions import outline
from tokencache.core.drift import Drift, Site
from tokencache.core.incidents import Incident
from tokencache.core.session import Labels, Reward
from tokencache.store.base import OpenCall, SessionInfo
from tokencache.trajectories.formats.native import native
from tokencache.trajectories.rollout import Records, rollout
from tokencache.trajectories.values import DriftFigures


def info(turns=0, *, incidents=(), calls=(), sealed=False):
    return SessionInfo("s", 1.0, 2.0, sealed, turns, tuple(calls), tuple(incidents))


def of(forest, **more):
    state = {name: more.pop(name) for name in ("incidents", "calls", "sealed") if name in more}
    return rollout(Records(info(len(forest.turns), **state), forest.turns, forest.tokens, {}, **more))


@MANY
@given(st.randoms(use_true_random=False))
def test_a_rollout_counts_once_however_many_sequences_it_has(rng):
    forest = grow(rng)
    whole = of(forest)
    scored = [(sequence, weight) for sequence, weight in zip(whole.sequences, whole.weights, strict=True)]
    trained = sum(sequence.trainable for sequence in whole.sequences)
    assert math.isclose(sum(whole.weights), 1.0 if trained else 0.0, abs_tol=1e-9)
    # The sum of each sequence's token mean times its weight is the mean over all tokens of the rollout.
    values = [p for s, _ in scored for p, m in zip(s.logprobs, s.loss_mask, strict=True) if m]
    by_weight = sum(w * sum(s.logprobs) / s.trainable for s, w in scored if s.trainable)
    assert math.isclose(by_weight, sum(values) / len(values) if values else 0.0, abs_tol=1e-6)


@MANY
@given(st.randoms(use_true_random=False))
def test_figures_add_up(rng):
    forest = grow(rng)
    whole = of(forest)
    figures = whole.figures
    assert figures.turns == len(forest.turns) == sum(figures.matches.values())
    assert figures.calls == len({turn.call for turn in forest.turns})
    assert figures.sequences == len(whole.sequences)
    assert figures.trainable_tokens + figures.untrainable_tokens == sum(turn.completion_tokens for turn in forest.turns)
    assert figures.trainable_tokens + figures.masked_tokens == sum(len(sequence.token_ids) for sequence in whole.sequences)
    assert figures.untrainable_tokens <= figures.masked_tokens
    assert figures.matches == Counter(turn.match for turn in forest.turns)
    assert figures.drift is None


def test_labels_distinguish_a_title_call_and_a_retry_from_the_main_sequence():
    forest = Forest()
    first = forest.add([1, 2], [3], tools=4)
    forest.add([8, 8], [9])  # no tools and no continuation: a title call
    thrown = forest.add([5], [6], first, tools=4)
    forest.add([5], [7], first, match="branch", tools=4)
    last = forest.turns[-1].id
    forest.add([5], [7], last, tools=4)
    found = {sequence.id: (sequence.start, sequence.parent, sequence.continued, sequence.tools) for sequence in of(forest).sequences}
    assert found == {first: ("root", None, True, 4), "t1": ("root", None, False, 0), thrown: ("branch", first, False, 4)}


def test_a_sequence_with_a_branch_was_continued():
    forest = Forest()
    first = forest.add([1], [2])
    last = forest.add([3], [4], first)
    branch = forest.add([5], [6], first, match="branch")
    assert {s.id: s.continued for s in of(forest).sequences} == {first: True, branch: False}
    assert last not in {s.id for s in of(forest).sequences}


@pytest.mark.parametrize(
    ("state", "complete"),
    [
        ({}, True),
        ({"incidents": [Incident("client-gone")]}, True),
        ({"incidents": [Incident("upstream-broke", hole=True)]}, False),
        ({"calls": [OpenCall("k", 1.0)]}, False),
        ({"owed": [Incident("store-error", hole=True)]}, False),
    ],
)
def test_missing_data_makes_a_rollout_incomplete(state, complete):
    whole = of(line(2), **state)
    assert whole.complete is complete
    assert sum(whole.figures.incidents.values()) == len(whole.incidents) == len(state)


def test_a_torn_record_is_an_incident_not_an_error():
    forest = line(3).change("t1", completion=b"")
    whole = of(forest)
    assert not whole.complete
    assert whole.figures.incidents == {"torn-record": 1}
    assert whole.sequences == ()


def test_measured_drift_is_counted():
    site = Site(1, 3, (7,), "retokenized", "t0")
    figures = of(line(3), drift={"t0": Drift(3, 0), "t1": Drift(7, 2, (site, Site(4, 4, (8,), "template")))}).figures
    assert figures.drift == DriftFigures(measured=1, drifted=1, tokens=2, causes={"retokenized": 1, "template": 1})


def test_rewards_and_labels_are_in_the_native_format():
    forest = Forest()
    first = forest.add([1, 2], [3])
    second = forest.add([1, 2, 9], [4])
    reward = Reward(0.5, {"tests": 1.0}, {second: -1.0}, {first: 0.25}, 3.0)
    state = msgspec.structs.replace(info(2), reward=reward, labels=Labels("prompt-7", {"seed": 3}, ("a", "b")), finished=4.0)
    written = native(rollout(Records(state, forest.turns, forest.tokens, {})))
    names = ("state", "reward", "reward_components", "group", "metadata", "tags")
    assert {name: written[name] for name in names} == {
        "state": "finished",
        "reward": 0.5,
        "reward_components": {"tests": 1.0},
        "group": "prompt-7",
        "metadata": {"seed": 3},
        "tags": ("a", "b"),
    }
    assert [sequence["reward"] for sequence in written["sequences"]] == [0.25, None]
    assert [turn["reward"] for sequence in written["sequences"] for turn in sequence["turns"]] == [None, -1.0]


def rewarded_before(later, *, recorded=None):
    """Records whose sequences were rewarded when there was a turn, two answers to it, and no more. `later` adds turns then."""
    forest = Forest()
    first = forest.add([1, 2], [3])
    answers = [forest.add([9], [reply], parent=first) for reply in (4, 5)]
    number = len(forest.turns)
    later(forest, *answers)
    reward = Reward(1.0, sequences={first: 0.25, answers[1]: 0.75}, at=3.0, recorded=number if recorded is None else recorded)
    made = Records(msgspec.structs.replace(info(len(forest.turns)), reward=reward), forest.turns, forest.tokens, {})
    return made, [first, *answers]


@pytest.mark.parametrize("recorded", [None, 0])
def test_a_sequence_keeps_its_reward_while_it_only_grows(recorded):
    records, (first, _, retry) = rewarded_before(lambda forest, kept, _: forest.add([9], [6], parent=kept), recorded=recorded)
    made = rollout(records)
    assert (made.valid, [(one.id, made.sequence_reward(one)) for one in made.sequences]) == (True, [(first, 0.25), (retry, 0.75)])


def test_a_reward_whose_sequence_joined_another_one_is_neither_lost_in_silence_nor_given_to_other_tokens():
    """The discarded answer is continued after all: it becomes part of the first sequence, and the other answer leaves that."""
    records, (first, kept, retry) = rewarded_before(lambda forest, _, other: forest.add([9], [6], parent=other))
    made = rollout(records)
    assert [[span.turn.id for span in one.turns] for one in made.sequences] == [[first, retry, "t3"], [kept]]
    (incident,) = made.incidents
    assert (incident.kind, incident.hole, made.complete, made.valid) == ("reward-outdated", True, False, False)
    assert f"{first} (0.25), {retry} (0.75)" in incident.detail
    assert [one["reward"] for one in native(made)["sequences"]] == [None, None]
    shown = outline(records.info, records.turns, ())
    assert ([one["reward"] for one in shown["sequences"]], shown["complete"], shown["valid"]) == ([None, None], False, False)
    assert [one["kind"] for one in shown["incidents"]] == ["reward-outdated"]


def test_an_older_reward_of_a_sequence_that_is_gone_is_reported():
    records, (_, _, retry) = rewarded_before(lambda forest, _, other: forest.add([9], [6], parent=other), recorded=0)
    assert [(one.kind, retry in one.detail) for one in rollout(records).incidents] == [("reward-outdated", True)]
