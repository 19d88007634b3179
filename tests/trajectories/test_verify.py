"""`verify` finds nothing wrong in a good export, and each of its checks can fail.

`BROKEN` is a table of changes to a good export: what is changed, which failure `verify` must report, and where. The last test makes random
changes to random rollouts.
"""

import copy
import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.forest import grow
from tests.core.settings import SOME
from tests.trajectories.rollouts import ROLLOUTS, of_forest, torn
from tokencache.trajectories.formats.native import native
from tokencache.trajectories.values import Trajectory
from tokencache.trajectories.verify import NOT_CHECKED, CheckFailure, around, verify


def exported(made):
    """A rollout as JSON values, as read from a file."""
    return msgspec.json.decode(msgspec.json.encode(native(made)))


def failures(trajectory):
    return verify(msgspec.convert(trajectory, Trajectory))


@pytest.mark.parametrize("name", ROLLOUTS)
def test_a_good_export_passes(name):
    assert failures(exported(ROLLOUTS[name])) == []


def test_torn_records_are_incomplete_and_fail_no_check():
    found = msgspec.convert(exported(torn()), Trajectory)
    assert verify(found) == []
    assert not found.complete


@SOME
@given(st.integers(0, 2**32))
def test_a_random_rollout_passes(seed):
    assert failures(exported(of_forest(grow(random.Random(seed))))) == []


# Helpers that change an export.


def sequence(t, n=0):
    return t["sequences"][n]


def turn(t, n=0, of=0):
    return t["sequences"][of]["turns"][n]


def set_in(where, **values):
    where.update(values)


def put(values, index, value):
    values[index] = value


def swapped(values, a, b):
    values[a], values[b] = values[b], values[a]


def link(t, **changes):
    """Link the answer of the sub-agent to the turn that received it."""
    t["links"].append({"kind": "delegation", "sources": ["t3"], "turn": "t4", "message": 3, "evidence": "equal", **changes})


def one_turn_less(t):
    """Remove the last turn together with its tokens."""
    gone = sequence(t)["turns"].pop()
    for name in ("token_ids", "loss_mask", "logprobs"):
        del sequence(t)[name][gone["prompt"][0] :]


def first_prompt(t, n=0, of=0):
    return turn(t, n, of)["prompt"]


def completion(t, n=0, of=0):
    return turn(t, n, of)["completion"]


FIRST = ROLLOUTS["linear"].sequences[0].turns[0].completion[0]
"""The first sampled token of the rollout `linear`."""

# Each entry: the rollout, the change, the check that must fail, a part of its message, the turn, the token.
BROKEN = {
    "an id is missing": ("linear", lambda t: sequence(t)["token_ids"].pop(), "aligned", "token ids", "", None),
    "a mask entry too many": ("linear", lambda t: sequence(t)["loss_mask"].append(0), "aligned", "mask entries", "", None),
    "a log probability is missing": ("linear", lambda t: sequence(t)["logprobs"].pop(), "aligned", "log probabilities", "", None),
    "a turn dropped": ("linear", lambda t: sequence(t)["turns"].pop(1), "aligned", "do not continue at token", "t2", None),
    "the last turn dropped": ("linear", lambda t: sequence(t)["turns"].pop(), "aligned", "its turns end at token", "", None),
    "no turns": ("linear", lambda t: sequence(t)["turns"].clear(), "aligned", "has no turn", "", None),
    "a range moved": ("linear", lambda t: put(first_prompt(t), 1, first_prompt(t)[1] - 1), "aligned", "do not continue", "t0", None),
    "a length changed": ("linear", lambda t: set_in(turn(t, 1), prompt_tokens=1), "aligned", "recorded were 1 and", "t1", None),
    "context is trained": ("linear", lambda t: put(sequence(t)["loss_mask"], 3, 1), "trained", "context token has loss mask 1", "t0", 3),
    "sampled is not": (
        "linear",
        lambda t: put(sequence(t)["loss_mask"], completion(t)[0], 0),
        "trained",
        "sampled token has loss",
        "t0",
        FIRST,
    ),
    "a mask of 2": ("linear", lambda t: put(sequence(t)["loss_mask"], completion(t)[0], 2), "trained", "loss mask 2", "t0", FIRST),
    "context has one": ("linear", lambda t: put(sequence(t)["logprobs"], 3, -0.5), "trained", "context token has log prob", "t0", 3),
    "positive": ("linear", lambda t: put(sequence(t)["logprobs"], completion(t)[0], 0.5), "trained", "log probability 0.5", "t0", FIRST),
    "no number": (
        "linear",
        lambda t: put(sequence(t)["logprobs"], completion(t)[0], math.nan),
        "trained",
        "log probability nan",
        "t0",
        FIRST,
    ),
    "infinite": (
        "linear",
        lambda t: put(sequence(t)["logprobs"], completion(t)[0], -math.inf),
        "trained",
        "log probability -inf",
        "t0",
        FIRST,
    ),
    "trained without": (
        "without-logprobs",
        lambda t: put(sequence(t)["loss_mask"], completion(t, 1)[0], 1),
        "trained",
        "sampled without log probabilities has loss mask 1",
        "t1",
        None,
    ),
    "the mark taken off": ("without-logprobs", lambda t: set_in(turn(t, 1), marks=[]), "trained", "sampled token has loss", "t1", None),
    "a prompt's id": (
        "linear",
        lambda t: put(sequence(t)["token_ids"], 5, 7),
        "hashes",
        "not the prompt from which it was sampled",
        "t0",
        0,
    ),
    "a sampled id": ("linear", lambda t: put(sequence(t)["token_ids"], FIRST, 7), "hashes", "not those that were sampled", "t0", FIRST),
    "an id beyond int32": ("linear", lambda t: put(sequence(t)["token_ids"], FIRST, 2**31), "hashes", "not an int32", "t0", None),
    "a hash": ("linear", lambda t: set_in(turn(t, 1), completion_hash="0" * 32), "hashes", "not those that were sampled", "t1", None),
    "two ids swapped": (
        "linear",
        lambda t: swapped(sequence(t)["token_ids"], FIRST, FIRST + 1),
        "hashes",
        "not those that were",
        "t0",
        FIRST,
    ),
    "two log probabilities of a turn swapped": (
        "linear",
        lambda t: swapped(sequence(t)["logprobs"], FIRST, FIRST + 1),
        "hashes",
        "the log probabilities of tokens",
        "t0",
        FIRST,
    ),
    "two log probabilities of two turns swapped": (
        "linear",
        lambda t: swapped(sequence(t)["logprobs"], completion(t)[0], completion(t, 1)[0]),
        "hashes",
        "the log probabilities of tokens",
        "t0",
        FIRST,
    ),
    "another log probability": (
        "linear",
        lambda t: put(sequence(t)["logprobs"], FIRST, math.nextafter(sequence(t)["logprobs"][FIRST], -9)),
        "hashes",
        "the log probabilities of tokens",
        "t0",
        FIRST,
    ),
    "another hash of log probabilities": (
        "linear",
        lambda t: set_in(turn(t, 1), logprobs_hash="0" * 32),
        "hashes",
        "the log probabilities of tokens",
        "t1",
        None,
    ),
    "a branch's context": (
        "thrown-away",
        lambda t: put(sequence(t, 1)["token_ids"], 4, 7),
        "lineage",
        "differs from the prefix of its parent t0 (sequence t0) here",
        "t1",
        4,
    ),
    "another parent": (
        "linear",
        lambda t: set_in(turn(t, 2), parent="t0"),
        "lineage",
        "follows turn t1, but its parent is t0",
        "t2",
        None,
    ),
    "an orphan": ("thrown-away", lambda t: set_in(turn(t, 0, 1), parent="t9"), "lineage", "t9 is in no sequence", "t1", None),
    "a root with a parent": ("linear", lambda t: set_in(turn(t, 1), match="root"), "lineage", "has match root and a parent", "t1", None),
    "a continue without": (
        "linear",
        lambda t: set_in(turn(t), match="continue"),
        "lineage",
        "has match continue and no parent",
        "t0",
        None,
    ),
    "an origin that is not there": ("respliced", lambda t: set_in(turn(t, 0, 1), origin="t9"), "lineage", "is in no sequence", "t2", None),
    "extends a disagreement": ("linear", lambda t: set_in(turn(t), marks=["engine-disagrees"]), "lineage", "is marked", "t1", None),
    "an anchor moved": (
        "respliced",
        lambda t: set_in(turn(t, 0, 1)["anchors"][0], start=turn(t, 0, 1)["anchors"][0]["start"] - 1),
        "anchors",
        "is not what turn t0 sampled",
        "t2",
        None,
    ),
    "an anchor that ends too late": (
        "respliced",
        lambda t: set_in(turn(t, 0, 1)["anchors"][1], end=10**6),
        "anchors",
        "ends after the prompt",
        "t2",
        None,
    ),
    "an anchor of an unknown turn": (
        "respliced",
        lambda t: set_in(turn(t, 0, 1)["anchors"][0], turn="t9"),
        "anchors",
        "in no sequence",
        "t2",
        None,
    ),
    "a link from an unknown turn": ("sub-agent", lambda t: link(t, sources=["t9"]), "links", "is in no sequence", "t9", None),
    "a link to an unknown turn": ("sub-agent", lambda t: link(t, turn="t9"), "links", "is in no sequence", "t9", None),
    "a link from no turn": ("sub-agent", lambda t: link(t, sources=[]), "links", "names no turn", "t4", None),
    "a link from a later turn": ("sub-agent", lambda t: link(t, sources=["t4"], turn="t3"), "links", "ended after turn t3", "t4", None),
    "a link to a message that is not there": ("sub-agent", lambda t: link(t, message=4), "links", "which has 4", "t4", None),
    "a sequence twice": ("linear", lambda t: t["sequences"].append(copy.deepcopy(sequence(t))), "once", "occurs 2 times", "t0", None),
    "an id": ("linear", lambda t: set_in(sequence(t), id="x"), "labels", "has id 'x', its turns show 't0'", "", None),
    "a start": ("linear", lambda t: set_in(sequence(t), start="plain"), "labels", "has start 'plain'", "", None),
    "an unknown start": (
        "linear",
        lambda t: (set_in(sequence(t), start="a"), set_in(turn(t), match="a")),
        "labels",
        "not one of",
        "",
        None,
    ),
    "a reason": ("unrecognized", lambda t: set_in(sequence(t, 1), reason=""), "labels", "its turns show 'rewritten-reply'", "", None),
    "a parent": ("thrown-away", lambda t: set_in(sequence(t, 1), parent=None), "labels", "has parent None", "", None),
    "root": ("thrown-away", lambda t: set_in(sequence(t, 1), root="t9"), "labels", "has root 't9'", "", None),
    "continued": ("thrown-away", lambda t: set_in(sequence(t, 1), continued=True), "labels", "has continued True", "", None),
    "tools": ("linear", lambda t: set_in(sequence(t), tools=0), "labels", "has tools 0", "", None),
    "a weight": ("thrown-away", lambda t: set_in(sequence(t, 1), weight=0.5), "figures", "has weight 0.5", "", None),
    "a weight that is no number": ("linear", lambda t: set_in(sequence(t), weight=math.nan), "figures", "has weight nan", "", None),
    "a count of tokens": ("linear", lambda t: set_in(sequence(t), trainable_tokens=1), "figures", "1 trainable tokens", "", None),
    "calls": ("choices", lambda t: set_in(t["figures"], calls=3), "figures", "calls are 3, the export has 2", "", None),
    "the last turn, cut clean": ("linear", one_turn_less, "figures", "turns are 3, the export has 2", "", None),
    "a sequence dropped": ("sub-agent", lambda t: t["sequences"].pop(0), "figures", "sequences are 3, the export has 2", "", None),
    "untrainable": ("without-logprobs", lambda t: set_in(t["figures"], untrainable_tokens=0), "figures", "untrainable", "", None),
    "masked": ("linear", lambda t: set_in(t["figures"], masked_tokens=0), "figures", "masked_tokens are 0", "", None),
    "trainable": ("linear", lambda t: set_in(t["figures"], trainable_tokens=0), "figures", "trainable_tokens are 0", "", None),
    "matches": ("linear", lambda t: set_in(t["figures"], matches={"root": 3}), "figures", "matches are", "", None),
    "forgiven": ("linear", lambda t: set_in(t["figures"], forgiven={}), "figures", "forgiven are {}", "", None),
    "incidents": ("aborted", lambda t: t["incidents"].pop(0), "figures", "incidents are", "", None),
    "complete with a hole": ("aborted", lambda t: set_in(t, complete=True), "complete", "complete is true, but incidents report", "", None),
    "incomplete without": ("linear", lambda t: set_in(t, complete=False), "complete", "no incident reports missing data", "", None),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_check_can_fail(name):
    which, change, check, words, where, token = BROKEN[name]
    trajectory = exported(ROLLOUTS[which])
    change(trajectory)
    found = [one for one in failures(trajectory) if one.check == check and words in one.words]
    assert found, "\n".join(map(str, failures(trajectory)))
    assert found[0].session == which
    if where:
        assert found[0].turn == where
    if token is not None:
        assert found[0].token == token


def test_a_forced_token_that_is_trained_is_found():
    changed = exported(ROLLOUTS["forced"])
    at = turn(changed)["completion"][0] + turn(changed)["forced"][0][0]
    sequence(changed)["loss_mask"][at] = 1
    assert "forced token has loss mask 1" in {failure.words for failure in failures(changed)}


def test_a_link_passes():
    trajectory = exported(ROLLOUTS["sub-agent"])
    link(trajectory)
    assert failures(trajectory) == []


def test_log_probabilities_moved_between_sequences():
    trajectory = exported(ROLLOUTS["sub-agent"])
    first, second = sequence(trajectory, 0)["logprobs"], sequence(trajectory, 1)["logprobs"]
    a, b = completion(trajectory)[0], completion(trajectory, of=1)[0]
    first[a], second[b] = second[b], first[a]
    assert [(one.check, one.sequence) for one in failures(trajectory)] == [
        ("hashes", sequence(trajectory, 0)["id"]),
        ("hashes", sequence(trajectory, 1)["id"]),
    ]


def test_an_older_export_without_hashes_of_log_probabilities_passes():
    trajectory = exported(ROLLOUTS["linear"])
    for one in sequence(trajectory)["turns"]:
        assert len(one.pop("logprobs_hash")) == 32
    assert failures(trajectory) == []
    swapped(sequence(trajectory)["logprobs"], FIRST, FIRST + 1)
    assert failures(trajectory) == [], "nothing in such an export shows it"
    assert any("logprobs_hash" in line for line in NOT_CHECKED)


def test_each_turn_with_a_hash_is_checked():
    trajectory = exported(ROLLOUTS["linear"])
    del turn(trajectory, 0)["logprobs_hash"]
    for n in (0, 1):
        swapped(sequence(trajectory)["logprobs"], completion(trajectory, n)[0], completion(trajectory, n)[0] + 1)
    assert [one.turn for one in failures(trajectory)] == ["t1"]


def test_a_turn_without_log_probabilities_has_no_hash_of_them():
    trajectory = exported(ROLLOUTS["without-logprobs"])
    assert [bool(one["logprobs_hash"]) for one in sequence(trajectory)["turns"]] == [
        "no-logprobs" not in one["marks"] for one in sequence(trajectory)["turns"]
    ]


def test_the_first_failure_is_nearest_to_the_cause():
    trajectory = exported(ROLLOUTS["linear"])
    trajectory["sequences"][0]["token_ids"][completion(trajectory, 1)[0] + 1] = 7
    first, *_ = failures(trajectory)
    assert (first.check, first.turn, first.sequence) == ("hashes", "t1", "t0")
    assert [one.turn for one in failures(trajectory)] == ["t1"], "failures that only follow from it are not reported"


def test_a_failure_shows_ten_tokens_on_either_side():
    trajectory = exported(ROLLOUTS["linear"])
    token_ids = trajectory["sequences"][0]["token_ids"]
    trajectory["sequences"][0]["loss_mask"][30] = 1
    (found,) = [one for one in failures(trajectory) if one.check == "trained"]
    before, here, after = token_ids[20:30], token_ids[30], token_ids[31:41]
    shown = f"… {' '.join(map(str, before))} [{here}] {' '.join(map(str, after))} …"
    assert found.around == shown
    assert str(found) == f"session linear, sequence t0, turn t0, token 30: context token has loss mask 1 (trained)\n    {shown}"


def test_tokens_around_a_range():
    numbers = list(range(100))
    assert around(numbers, 0, 1) == "[0] 1 2 3 4 5 6 7 8 9 10 …"
    assert around(numbers, 98, 100) == "… 88 89 90 91 92 93 94 95 96 97 [98 99]"
    assert around([1, 2, 3], 1, 1) == "1 [] 2 3"
    assert around(numbers, 20, 60).count(" 25 ") == 0
    assert "[20 21 22 … 57 58 59] 60 " in around(numbers, 20, 60)


def test_the_report_lists_what_an_export_cannot_show():
    assert any("engine" in line for line in NOT_CHECKED)
    assert any("template" in line for line in NOT_CHECKED)


# random changes to random rollouts


def _places(trajectory):
    return [(s, i) for s in trajectory["sequences"] for i in range(len(s["token_ids"]))]


def _change_token(t, rng):
    s, i = rng.choice(_places(t))
    s["token_ids"][i] += rng.choice([-1, 1, 1000])


def _flip_mask(t, rng):
    s, i = rng.choice(_places(t))
    s["loss_mask"][i] ^= 1


def _spoil_logprob(t, rng):
    s, i = rng.choice(_places(t))
    s["logprobs"][i] = rng.choice([1e-6, 0.5, math.nan, math.inf, -math.inf])


def _nudge_logprob(t, rng):
    s = rng.choice(t["sequences"])
    i = rng.choice([i for i, mask in enumerate(s["loss_mask"]) if mask])
    s["logprobs"][i] = math.nextafter(s["logprobs"][i], -math.inf)


def _swap_logprobs(t, rng):
    places = [(s["logprobs"], i) for s in t["sequences"] for i, mask in enumerate(s["loss_mask"]) if mask]
    (a, i), (b, j) = rng.sample(places, 2)
    a[i], b[j] = b[j], a[i]


def _drop_turn(t, rng):
    s = rng.choice(t["sequences"])
    gone = s["turns"].pop(rng.randrange(len(s["turns"])))
    if rng.random() < 0.5:  # also remove its tokens
        start, end = gone["prompt"][0], gone["completion"][1]
        for name in ("token_ids", "loss_mask", "logprobs"):
            del s[name][start:end]
        for later in s["turns"]:
            if later["prompt"][0] >= end:
                for span in (later["prompt"], later["completion"]):
                    span[:] = [at - (end - start) for at in span]
        if rng.random() < 0.5:
            t["sequences"] = [one for one in t["sequences"] if one["turns"]]


def _swap_turns(t, rng):
    turns = [(s["turns"], i) for s in t["sequences"] for i in range(len(s["turns"]))]
    (a, i), (b, j) = rng.sample(turns, 2)
    a[i], b[j] = b[j], a[i]


def _swap_tokens_of_sequences(t, rng):
    a, b = rng.sample(t["sequences"], 2)
    a["token_ids"], b["token_ids"] = b["token_ids"], a["token_ids"]


@SOME
@given(
    st.integers(0, 2**32),
    st.sampled_from(
        [
            _change_token,
            _flip_mask,
            _spoil_logprob,
            _nudge_logprob,
            _swap_logprobs,
            _drop_turn,
            _swap_turns,
            _swap_tokens_of_sequences,
        ]
    ),
)
def test_any_single_change_is_found(seed, change):
    rng = random.Random(seed)
    good = exported(of_forest(grow(rng)))
    trajectory = copy.deepcopy(good)
    try:
        change(trajectory, rng)
    except (IndexError, ValueError):  # nothing to change: no token, or only one sequence
        return
    if repr(trajectory) == repr(good):  # two equal sequences or log probabilities were swapped
        return
    found = failures(trajectory)
    assert found, change.__name__
    assert all(isinstance(one, CheckFailure) and str(one) for one in found)
