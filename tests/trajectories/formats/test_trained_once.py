"""In every format and for every shape of session, each sampled token is trained once, with its own log probability."""

import json

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.core.forest import grow
from tests.core.settings import SOME
from tests.trajectories.formats.readers import READERS, Trained, faults, faults_of
from tests.trajectories.rollouts import ROLLOUTS, SESSIONS, of_forest
from tokencache.core import ids
from tokencache.core.turn import rebuild_prefix
from tokencache.trajectories.formats.registry import FORMATS


def as_received(name, made):
    """Encode and decode a rollout, as on the way to a trainer."""
    return json.loads(msgspec.json.encode(FORMATS[name].write(made)))


def chosen(turn, logprobs):
    """The log probabilities of a turn, `None` for each token that was forced."""
    return [None if any(start <= i < end for start, end in turn.forced) else value for i, value in enumerate(logprobs)]


def ground_truth_of(records):
    lookup = {turn.id: (turn, records.tokens[turn.id]) for turn in records.turns}
    return [
        (
            ids.unpack(rebuild_prefix(lookup, turn.id).prompt),
            ids.unpack(records.tokens[turn.id].completion),
            chosen(turn, ids.unpack_logprobs(records.tokens[turn.id].logprobs)),
        )
        for turn in records.turns
    ]


def test_every_format_has_a_reader():
    assert set(READERS) == set(FORMATS)


@pytest.mark.parametrize("shape", SESSIONS)
@pytest.mark.parametrize("name", READERS)
def test_sessions_of_every_shape(name, shape):
    assert faults_of(name, as_received(name, ROLLOUTS[shape]), ground_truth_of(SESSIONS[shape])) == []


@SOME
@given(rng=st.randoms(use_true_random=False))
def test_sessions_of_any_shape(rng):
    forest = grow(rng)
    assume(all(prompt for prompt, _, _ in forest.ground_truth))  # no engine answers an empty prompt
    made = of_forest(forest)
    wrong = {name: faults(reader(as_received(name, made)), forest.ground_truth) for name, reader in READERS.items()}
    assert not any(wrong.values()), wrong


def dropped(rows):
    return rows[1:]


def doubled(rows):
    return [*rows, rows[0]]


def flipped(rows):
    at = rows[0].mask.index(1)
    return [rows[0]._replace(mask=[*rows[0].mask[:at], 0, *rows[0].mask[at + 1 :]]), *rows[1:]]


def context_trained(rows):
    return [Trained(ids, [1] * len(ids), logprobs) for ids, _, logprobs in rows]


def shifted(rows):
    return [Trained(ids, [*mask[1:], 0], [*logprobs[1:], 0.0]) for ids, mask, logprobs in rows]


def other_logprob(rows):
    at = rows[0].mask.index(1)
    return [rows[0]._replace(logprobs=[*rows[0].logprobs[:at], -9.0, *rows[0].logprobs[at + 1 :]]), *rows[1:]]


def other_context(rows):
    return [rows[0]._replace(token_ids=[rows[0].token_ids[0] + 1, *rows[0].token_ids[1:]]), *rows[1:]]


def logprob_of_context(rows):
    return [rows[0]._replace(logprobs=[-1.0, *rows[0].logprobs[1:]]), *rows[1:]]


def too_short(rows):
    return [rows[0]._replace(mask=rows[0].mask[:-1]), *rows[1:]]


def as_floats(rows):
    return [rows[0]._replace(token_ids=list(map(float, rows[0].token_ids))), *rows[1:]]


def too_precise(rows):
    at = rows[0].mask.index(1)
    return [rows[0]._replace(logprobs=[*rows[0].logprobs[:at], -0.1, *rows[0].logprobs[at + 1 :]]), *rows[1:]]


@pytest.mark.parametrize(
    "broken",
    [
        dropped,
        doubled,
        flipped,
        context_trained,
        shifted,
        other_logprob,
        other_context,
        logprob_of_context,
        too_short,
        as_floats,
        too_precise,
    ],
)
@pytest.mark.parametrize("shape", ["linear", "thrown-away", "respliced"])
def test_the_checker_detects_errors_of_a_writer(shape, broken):
    rows = READERS["native"](as_received("native", ROLLOUTS[shape]))
    assert faults(rows, ground_truth_of(SESSIONS[shape])) == []
    assert faults(broken(rows), ground_truth_of(SESSIONS[shape]))


def test_the_checker_detects_a_context_that_is_trained_again(monkeypatch):
    honest = FORMATS["trl"]

    def greedy(made):
        written = honest.write(made)
        for row in written["rows"]:
            row["env_mask"] = [int(one < 0.0) for one in row["logprobs"]]
            row["prompt_ids"], row["completion_ids"] = [], row["prompt_ids"] + row["completion_ids"]
            row["env_mask"] = [1] * (len(row["completion_ids"]) - len(row["env_mask"])) + row["env_mask"]
            row["logprobs"] = [0.0] * (len(row["completion_ids"]) - len(row["logprobs"])) + row["logprobs"]
        return written

    monkeypatch.setitem(FORMATS, "trl", honest._replace(write=greedy))
    rows = READERS["trl"](as_received("trl", ROLLOUTS["thrown-away"]))
    assert any("too often" in one for one in faults(rows, ground_truth_of(SESSIONS["thrown-away"])))
