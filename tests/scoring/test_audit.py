"""What can be audited, why the rest cannot, and which cause explains a difference."""

import msgspec
import pytest

from tokencache.core.turn import TurnMark
from tokencache.scoring.audit import AuditedSpan, AuditSpan, Cause, causes, plan
from tokencache.scoring.differences import difference
from tokencache.trajectories.values import Figures, Sequence, Trajectory, TurnSpan

FIGURES = Figures(0, 0, 0, 0, 0, 0, {}, {}, {})
RAW = {"logprob_kind": "raw", "logprobs_hash": "00"}
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}


def spans(*parts):
    return [{"version": version, "start": start, "end": end} for version, start, end in parts]


def rollout(*turns):
    """A rollout of turns with two new prompt tokens and four sampled ones each."""
    made = [TurnSpan(turn=f"t{n}", prompt=(6 * n, 6 * n + 2), completion=(6 * n + 2, 6 * n + 6), **turn) for n, turn in enumerate(turns)]
    count = 6 * len(turns)
    values = [-float(n) for n in range(count)]
    ids, mask = list(range(count)), [0] * count
    sequence = Sequence(id="q", token_ids=ids, loss_mask=mask, logprobs=values, turns=made, start="root", weight=1.0)
    return Trajectory(session="s", complete=True, sequences=[sequence], figures=FIGURES)


def test_a_span_has_the_recorded_values_of_its_tokens():
    found, left_out = plan(rollout(RAW, {**RAW, "weight_versions": spans(("1", 0, 1), ("2", 1, 4))}), version="2")
    assert [(span.turn, span.start, span.end, span.at, span.recorded) for span in found] == [("t1", 1, 4, 9, [-9.0, -10.0, -11.0])]
    assert [(one.turn, one.start, one.end) for one in left_out] == [("t0", 0, 4), ("t1", 0, 1)]


@pytest.mark.parametrize(
    ("turn", "version", "reason"),
    [
        ({**RAW, "weight_versions": spans(("2", 0, 4))}, "2", ""),
        ({**RAW, "weight_versions": spans(("2", 0, 4))}, None, ""),
        ({**RAW}, None, ""),
        ({**RAW}, "2", "its version is not known (--any-version audits it)"),
        ({**RAW, "weight_versions": spans(("default", 0, 4))}, "2", "its version is not known (--any-version audits it)"),
        ({**RAW, "weight_versions": spans(("1", 0, 4))}, "2", "version 1 sampled it, and the engine has 2"),
        ({**RAW, "weight_versions": spans(("mixed", 0, 2), ("2", 2, 4))}, None, "which version sampled each token is not certain"),
        ({**RAW, "weight_versions": spans(("2", 0, 4)), "prompt_version": "1"}, "2", "its prompt was computed with version 1"),
        ({**RAW, "weight_versions": spans(("2", 0, 4)), "prompt_version": "2"}, "2", ""),
        ({**RAW, "marks": ["no-logprobs"]}, None, "it has no log probabilities"),
        ({"logprob_kind": "raw"}, None, "it has no log probabilities"),
        (
            {**RAW, "marks": ["stale-kv"]},
            None,
            f"it is marked stale-kv: {TurnMark.STALE_KV.meaning}",
        ),
        ({**RAW, "marks": ["media"]}, None, "its sequence has media, whose ids cannot be scored"),
        ({**RAW, "logprob_kind": "processed", "sampling": NEUTRAL}, None, ""),
        (
            {**RAW, "logprob_kind": "processed", "sampling": NEUTRAL | {"temperature": 0.5}},
            None,
            "its log probabilities are processed, and temperature is 0.5",
        ),
        ({**RAW, "logprob_kind": ""}, None, "its log probabilities are of an unknown kind, and temperature is not recorded"),
    ],
)
def test_what_cannot_be_audited_is_listed_with_the_reason(turn, version, reason):
    found, left_out = plan(rollout(turn), version=version)
    assert [one.reason for one in left_out] == ([reason] if reason else [])
    assert sum(span.end - span.start for span in found) + sum(one.end - one.start for one in left_out) == 4


def test_every_sampled_token_is_audited_or_listed():
    versions = spans(("1", 0, 1), ("mixed", 1, 2), ("2", 2, 3))
    found, left_out = plan(rollout({**RAW, "weight_versions": versions}, RAW, {}), version="1")
    places = [(one.turn, place) for one in [*found, *left_out] for place in range(one.start, one.end)]
    assert sorted(places) == [(f"t{n}", place) for n in range(3) for place in range(4)]


def test_forced_tokens_are_not_audited():
    """Their recorded values are 0.0, which no engine computes for them."""
    versions = spans(("1", 0, 2), ("2", 2, 4))
    found, left_out = plan(rollout({**RAW, "weight_versions": versions, "forced": [(1, 3)]}), version=None)
    assert [(span.start, span.end, span.version, span.recorded) for span in found] == [(0, 1, "1", [-2.0]), (3, 4, "2", [-5.0])]
    assert [(one.start, one.end, one.reason) for one in left_out] == [
        (1, 2, "a thinking budget forced these tokens"),
        (2, 3, "a thinking budget forced these tokens"),
    ]
    found, left_out = plan(rollout({**RAW, "forced": [(0, 4)]}), version=None)
    assert found == []
    assert [(one.start, one.end) for one in left_out] == [(0, 4)]


def test_a_masked_sequence_is_not_audited():
    made = rollout(RAW)
    masked = msgspec.structs.replace(made.sequences[0], overlong="masked", logprobs=[0.0] * 6)
    found, left_out = plan(msgspec.structs.replace(made, sequences=[masked]), version=None)
    assert found == []
    assert "masked its sequence" in left_out[0].reason


def result(off, *, version="2", model="m", created=5.0, history=False, mode=False, ids=True):
    span = AuditSpan(
        session="s", sequence="q", turn="t", model=model, version=version, start=0, end=1, at=0, recorded=[], sampling={}, kind="raw",
        created=created, history=history,
    )  # fmt: skip
    return AuditedSpan(span=span, difference=difference([-1.0], [-1.0 - off]) if ids else None, limit=0.01, mode=mode)


CLEAN = result(0.0)


@pytest.mark.parametrize(
    ("results", "cause"),
    [
        ([result(1.0, ids=False)], Cause.IDS),
        ([result(1.0, mode=True), CLEAN], Cause.MODE),
        ([result(1.0, history=True), CLEAN], Cause.CACHE),
        ([result(1.0, history=True), result(1.0, history=True)], Cause.CACHE),
        ([result(1.0, history=True), result(1.0)], Cause.WEIGHTS),
        ([result(1.0)], Cause.WEIGHTS),
        ([result(1.0, created=9.0), CLEAN], Cause.WEIGHTS),
        ([result(1.0, model="lora"), result(0.0, version="3")], Cause.ADAPTER),
        ([result(1.0, created=4.0), result(0.0, created=3.0), CLEAN], Cause.UNKNOWN),
    ],
)
def test_the_cause_of_the_first(results, cause):
    found = causes(results, ["lora"])
    assert found[0] is cause
    assert all(found.get(place) is None for place, one in enumerate(results) if one.clean)


def test_noise_is_no_finding():
    assert causes([result(0.005), result(-0.009)], []) == {}
