"""Limits of length: what fits stays as it is, longer sequences are left out, cut or masked, and the rollout reports it."""

import random

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.core.forest import Forest, grow
from tests.core.settings import SOME
from tests.trajectories.formats.readers import READERS, faults, faults_of
from tests.trajectories.formats.test_trained_once import as_received, ground_truth_of
from tests.trajectories.rollouts import ROLLOUTS, SESSIONS, of_forest, torn
from tokencache.errors import HarnessError
from tokencache.trajectories.formats.native import native
from tokencache.trajectories.formats.nemo_gym import nemo_gym
from tokencache.trajectories.formats.registry import FORMATS, export
from tokencache.trajectories.formats.rows import rows_of
from tokencache.trajectories.formats.skyrl import skyrl
from tokencache.trajectories.formats.slime import slime
from tokencache.trajectories.formats.verl import verl
from tokencache.trajectories.lengths import LIMITS, POLICIES, Lengths, lengths_of
from tokencache.trajectories.limiting import limit
from tokencache.trajectories.values import Trajectory
from tokencache.trajectories.verify import verify


def read_back(made):
    return msgspec.json.decode(msgspec.json.encode(native(made)), type=Trajectory)


def remaining(ground_truth, turns, made):
    """What was sampled in the turns that remain. A masked turn counts as one without log probabilities."""
    masked = {span.turn.id: sequence.overlong == "masked" for sequence in made.sequences for span in sequence.turns}
    sampled = zip(turns, ground_truth, strict=True)
    return [(prompt, completion, [] if masked[turn.id] else probs) for turn, (prompt, completion, probs) in sampled if turn.id in masked]


def ends(sequence):
    """The lengths of a sequence after each of its turns."""
    return [span.completion[1] for span in sequence.turns]


def second_end():
    """A length at which the linear rollout has two of its three turns."""
    (sequence,) = ROLLOUTS["linear"].sequences
    return ends(sequence)[1]


def forked():
    """A fork: the line of its first turn is shared, and its own turns go on."""
    forest = Forest()
    first = forest.add([1, 2], [3, 4], marks=("shared",), logprobs=[])
    second = forest.add([9], [5, 6, 7], parent=first, marks=("shared",), logprobs=[])
    third = forest.add([9], [8], parent=second)
    forest.add([9], [8, 8], parent=third)
    return of_forest(forest)


def test_a_line_of_which_a_fork_shares_all_has_a_response():
    """It is there if the fork goes on from an earlier turn. Trainers cannot use a row without one: slime counts from the end."""
    forest = Forest()
    first = forest.add([1, 2], [3, 4], marks=("shared",), logprobs=[])
    forest.add([9], [5, 6], parent=first, marks=("shared",), logprobs=[])
    forest.add([8], [7], parent=first)
    shared, own = rows_of(of_forest(forest))
    assert (shared.prompt_ids, shared.response_ids, any(shared.response_mask)) == ([1, 2], [3, 4, 9, 5, 6], False)
    assert (own.prompt_ids, own.response_ids) == ([1, 2, 3, 4, 8], [7])


def test_the_shared_turns_of_a_fork_are_its_prompt_as_the_context_of_a_branch_is():
    made = forked()
    (row,) = rows_of(made)
    assert (row.prompt_ids, row.response_ids) == ([1, 2, 3, 4, 9, 5, 6, 7, 9], [8, 9, 8, 8])
    assert (row.response_mask, len(row.response_logprobs)) == ([1, 0, 1, 1], 4)
    assert [one.loss_mask for one in limit(made, Lengths("cut", max_response_length=1)).sequences] == [[0] * 9 + [1]]
    assert limit(made, Lengths("cut", max_prompt_length=8, max_response_length=9)).sequences == ()


def test_cut_ends_after_the_last_whole_turn_that_fits():
    (whole,) = ROLLOUTS["linear"].sequences
    for longest, turns in ((second_end(), 2), (ends(whole)[2] - 1, 2), (second_end() - 1, 1)):
        made = limit(ROLLOUTS["linear"], Lengths("cut", max_length=longest))
        (sequence,) = made.sequences
        end = ends(whole)[turns - 1]
        assert [span.turn for span in sequence.turns] == [span.turn for span in whole.turns[:turns]]
        assert (sequence.token_ids, sequence.loss_mask, sequence.logprobs) == (
            whole.token_ids[:end],
            whole.loss_mask[:end],
            whole.logprobs[:end],
        )
        assert made.weights == (1.0,)
        overlong = made.figures.overlong
        assert (overlong.policy, overlong.limits) == ("cut", {"max_length": longest})
        assert (overlong.cut, overlong.dropped, overlong.masked) == (1, 0, 0)
        assert overlong.turns == [span.turn.id for span in whole.turns[turns:]]
        assert overlong.trainable_tokens_lost == whole.trainable - sequence.trainable > 0
        assert made.figures.turns == turns


def test_the_response_is_counted_from_the_first_sampled_token():
    (whole,) = ROLLOUTS["linear"].sequences
    longest = second_end() - whole.response_start
    for response, turns in ((longest, 2), (longest - 1, 1)):
        made = limit(ROLLOUTS["linear"], Lengths("cut", max_response_length=response))
        (row,) = rows_of(made)
        assert len(row.sequence.turns) == turns
        assert len(row.response_ids) <= response


@pytest.mark.parametrize("policy", ["cut", "drop"])
def test_a_prompt_that_is_too_long_leaves_nothing(policy):
    (whole,) = ROLLOUTS["linear"].sequences
    fits = Lengths(policy, max_prompt_length=whole.response_start)
    assert limit(ROLLOUTS["linear"], fits).sequences == ROLLOUTS["linear"].sequences
    made = limit(ROLLOUTS["linear"], msgspec.structs.replace(fits, max_prompt_length=whole.response_start - 1))
    assert made.sequences == made.weights == ()
    assert (made.figures.overlong.dropped, made.figures.overlong.trainable_tokens_lost) == (1, whole.trainable)


def test_cut_leaves_out_a_sequence_whose_first_turn_does_not_fit():
    (whole,) = ROLLOUTS["linear"].sequences
    made = limit(ROLLOUTS["linear"], Lengths("cut", max_length=ends(whole)[0] - 1))
    assert made.sequences == ()
    assert (made.figures.overlong.dropped, made.figures.overlong.cut) == (1, 0)


def test_cut_leaves_out_a_sequence_of_which_nothing_sampled_remains():
    forest = Forest()
    first = forest.add([1, 2], [])
    forest.add([3], [4, 5], first)
    made = limit(of_forest(forest), Lengths("cut", max_length=4))
    assert made.sequences == ()
    assert made.figures.overlong.turns == ["t0", "t1"]


def test_an_anchor_may_name_a_turn_that_was_left_out():
    whole = ROLLOUTS["respliced"]
    first, second = whole.sequences
    assert second.turns[0].turn.anchors
    made = limit(whole, Lengths("cut", max_length=ends(first)[0]))
    kept = msgspec.structs.replace(second, parent=first.id)
    shown = msgspec.structs.replace(made, sequences=(*made.sequences, kept))
    assert [one for one in verify(read_back(msgspec.structs.replace(shown, weights=(0.0, 1.0)))) if one.check == "anchors"] == []


def test_mask_keeps_the_sequence_and_trains_nothing_of_it():
    (whole,) = ROLLOUTS["linear"].sequences
    made = limit(ROLLOUTS["linear"], Lengths("mask", max_length=second_end()))
    (sequence,) = made.sequences
    assert (sequence.token_ids, sequence.turns, sequence.overlong) == (whole.token_ids, whole.turns, "masked")
    assert not any(sequence.loss_mask)
    assert not any(sequence.logprobs)
    assert (made.figures.overlong.masked, made.figures.overlong.trainable_tokens_lost) == (1, whole.trainable)
    assert made.weights == (0.0,)


def test_other_sequences_and_the_state_of_the_session_stay():
    whole = ROLLOUTS["sub-agent"]
    longest = max(len(sequence.token_ids) for sequence in whole.sequences)
    made = limit(whole, Lengths("drop", max_length=longest - 1))
    assert made.sequences == tuple(one for one in whole.sequences if len(one.token_ids) < longest)
    assert sum(made.weights) == pytest.approx(1.0)
    assert (made.complete, made.incidents, made.sealed) == (whole.complete, whole.incidents, whole.sealed)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", [*ROLLOUTS, "torn"])
def test_a_limit_that_all_fit_changes_nothing_and_is_reported(shape, policy):
    whole = ROLLOUTS.get(shape) or torn()
    made = limit(whole, Lengths(policy, max_length=10**6))
    assert made.figures.overlong.limits == {"max_length": 10**6}
    assert msgspec.structs.replace(made, figures=msgspec.structs.replace(made.figures, overlong=None)) == whole


@SOME
@given(st.integers(0, 2**32), st.sampled_from(POLICIES), st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
def test_rollouts_of_any_shape(seed, policy, longest, prompt, response):
    forest = grow(random.Random(seed))
    assume(all(prompt for prompt, _, _ in forest.ground_truth))
    whole = of_forest(forest)
    made = limit(whole, Lengths(policy, longest, prompt, response))
    assert verify(read_back(made)) == []
    sampled = remaining(forest.ground_truth, forest.turns, made)
    for name, read in READERS.items():
        assert faults(read(as_received(name, made)), sampled) == []
    for row in rows_of(made):
        fits = len(row.sequence.token_ids) <= longest and len(row.prompt_ids) <= prompt and len(row.response_ids) <= response
        assert fits == (row.sequence.overlong != "masked")
    counts = made.figures.overlong
    assert counts.trainable_tokens_lost == whole.figures.trainable_tokens - made.figures.trainable_tokens
    assert counts.dropped == len(whole.sequences) - len(made.sequences)
    assert len(counts.turns) == len(forest.turns) - made.figures.turns


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", SESSIONS)
@pytest.mark.parametrize("name", READERS)
def test_every_format_has_what_remains(name, shape, policy):
    whole = ROLLOUTS[shape]
    longest = max((ends(one)[-1] for one in whole.sequences), default=2) - 1
    made = limit(whole, Lengths(policy, max_length=longest))
    sampled = remaining(ground_truth_of(SESSIONS[shape]), SESSIONS[shape].turns, made)
    written = as_received(name, made)
    assert faults_of(name, written, sampled) == []
    figures = written.get("figures") or written["info"]["tokencache"]["figures"]
    assert figures["overlong"] == msgspec.to_builtins(made.figures.overlong)
    assert sum(figures["overlong"][what] for what in ("dropped", "cut", "masked")) == sum(
        len(one.token_ids) > longest for one in whole.sequences
    )


def test_a_row_that_was_cut_ends_as_one_that_reached_the_token_limit():
    made = limit(ROLLOUTS["linear"], Lengths("cut", max_length=second_end()))
    assert verl(made)["outputs"][0]["extra_fields"]["tokencache"]["overlong"] == "cut"
    assert skyrl(made)["generator_output"]["stop_reasons"] == ["length"]
    assert slime(made)["samples"][0]["status"] == "truncated"
    assert nemo_gym(made)["responses"][0]["response"]["status"] == "incomplete"


def test_outputs_for_verl_fit_its_two_lengths():
    """verl pads prompt and response on their own, and never cuts an output of an agent loop."""
    for whole in ROLLOUTS.values():
        for row in verl(limit(whole, Lengths("cut", max_prompt_length=60, max_response_length=80)))["outputs"]:
            assert len(row["prompt_ids"]) <= 60
            assert 0 < len(row["response_ids"]) == len(row["response_mask"]) == len(row["response_logprobs"]) <= 80


@pytest.mark.parametrize("member", ["turns", "overlong"])
def test_verify_fails_without_the_report(member):
    """Turns that are missing, or masked, are accepted only where the export names them."""
    if member == "turns":  # the first answer is a turn of the other sequence's past
        whole = ROLLOUTS["thrown-away"]
        made = limit(whole, Lengths("drop", max_length=min(len(one.token_ids) for one in whole.sequences)))
        assert len(made.sequences) == 1 < len(whole.sequences)
        altered = msgspec.structs.replace(made.figures, overlong=None)
        made_wrong = msgspec.structs.replace(made, figures=altered)
    else:
        made = limit(ROLLOUTS["linear"], Lengths("mask", max_length=1))
        made_wrong = msgspec.structs.replace(made, sequences=tuple(msgspec.structs.replace(one, overlong="") for one in made.sequences))
    assert verify(read_back(made)) == []
    assert verify(read_back(made_wrong)) != []


def test_without_a_limit_nothing_is_reported():
    written = msgspec.json.decode(export(SESSIONS["linear"], FORMATS["native"]))
    assert written["figures"]["overlong"] is None
    assert not any(sequence["overlong"] for sequence in written["sequences"])


@pytest.mark.parametrize(
    ("given_", "param"),
    [
        ({"max_length": "0", "overlong": "cut"}, "max_length"),
        ({"max_length": "-1", "overlong": "cut"}, "max_length"),
        ({"max_response_length": "1e3", "overlong": "cut"}, "max_response_length"),
        ({"max_prompt_length": "9999999999999999", "overlong": "cut"}, "max_prompt_length"),
        ({"max_length": "8"}, "overlong"),
        ({"max_length": "8", "overlong": "truncate"}, "overlong"),
        ({"overlong": "cut"}, "overlong"),
    ],
)
def test_wrong_limits_are_refused(given_, param):
    with pytest.raises(HarnessError, match=param) as refused:
        lengths_of(given_)
    assert refused.value.param == param


def test_limits_are_read_from_parameters():
    assert lengths_of({"format": "verl"}) is None
    given_ = {name: str(n) for n, name in enumerate(LIMITS, 1)} | {"overlong": "drop"}
    assert lengths_of(given_) == Lengths("drop", 1, 2, 3)
