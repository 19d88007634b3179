"""Policy versions of a rollout: which sampled how many tokens, which is oldest, and limits of lag."""

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.forest import grow
from tests.core.settings import SOME
from tests.trajectories.rollouts import ROLLOUTS, of_forest
from tokencache.core.turn import Turn
from tokencache.core.weights import MIXED, Announced, in_order
from tokencache.trajectories.formats.native import native
from tokencache.trajectories.formats.reading import read_native
from tokencache.trajectories.limiting import limit_lag
from tokencache.trajectories.rollout import with_versions
from tokencache.trajectories.values import Trajectory
from tokencache.trajectories.verify import verify
from tokencache.trajectories.versions import LagLimit, count_versions

HISTORY = tuple(Announced(name, n, float(n)) for n, name in enumerate(("base", "step-9", "step-10"), 1))


def turn(tokens, *spans, source="trainer"):
    versions = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    return Turn(id="t", call="t", match="root", completion_tokens=tokens, versions=versions, version_source=source)


def read_back(made):
    return msgspec.json.decode(msgspec.json.encode(native(made)), type=Trajectory)


def test_tokens_are_counted_by_the_version_that_sampled_them():
    counts = count_versions([turn(9, ("7", 0, 4), ("8", 4, 9)), turn(3, ("8", 0, 3)), turn(5), turn(4, (MIXED, 0, 4))])
    assert (counts.versions, counts.mixed) == ({"7": 4, "8": 8}, 4)
    assert (counts.oldest, counts.newest) == ("7", "8")


def test_spans_of_older_records_are_read_too():
    assert count_versions([turn(4, ("7", 0, 4), source="")]).versions == {"7": 4}
    assert count_versions([turn(4, ("default", 0, 4), source="")]).versions == {}


@pytest.mark.parametrize(
    ("versions", "order"),
    [
        ((), []),
        (("10", "9"), ["9", "10"]),
        (("step-10", "base"), ["base", "step-10"]),
        (("step-10",), ["step-10"]),
        (("unheard-of",), ["unheard-of"]),
        (("unheard-of", "base"), []),
        (("9", "base"), []),
    ],
)
def test_the_order_of_versions_is_known_or_said_to_be_unknown(versions, order):
    assert in_order(versions, HISTORY) == order
    counts = count_versions([turn(1, (name, 0, 1)) for name in versions], HISTORY)
    assert (counts.oldest, counts.newest) == ((order[0], order[-1]) if order else ("", ""))


@pytest.mark.parametrize(
    ("versions", "tokens", "lag"),
    [
        ({"7": 4, "9": 1}, 5, 2),
        ({"11": 4}, 4, -2),
        ({}, 0, 0),
        ({"7": 4}, 5, None),
        ({"old": 5}, 5, None),
    ],
    ids=["oldest", "newer", "nothing", "uncertain", "unknown"],
)
def test_the_lag_is_that_of_the_oldest_token_and_of_all(versions, tokens, lag):
    assert LagLimit(3, "9").lag(versions, tokens) == lag


def labelled(seed, numbers):
    """A rollout of any shape; turn n was sampled by version `numbers[n]`, or it is mixed (-1), or nothing is known of it (-2)."""
    made = of_forest(grow(random.Random(seed)))
    number_of = {span.turn.id: numbers[n % len(numbers)] for n, span in enumerate(span for one in made.sequences for span in one.turns)}

    def as_sampled(span):
        number, tokens = number_of[span.turn.id], span.turn.completion_tokens
        name = MIXED if number == -1 else str(number)
        versions = [{"version": name, "start": 0, "end": tokens}] if number > -2 else []
        return msgspec.structs.replace(span, turn=msgspec.structs.replace(span.turn, versions=versions, version_source="trainer"))

    sequences = [msgspec.structs.replace(one, turns=[as_sampled(span) for span in one.turns]) for one in made.sequences]
    return msgspec.structs.replace(made, sequences=tuple(with_versions(one, ()) for one in sequences)), number_of


def trained(sequence, number_of):
    """The version of each trainable token, from the masks."""
    found = []
    for span in sequence.turns:
        found += [number_of[span.turn.id]] * sum(sequence.loss_mask[slice(*span.completion)])
    return found


@SOME
@given(st.integers(0, 10**6), st.lists(st.integers(-2, 9), min_size=1, max_size=12), st.integers(0, 9))
def test_a_limit_of_lag_leaves_exactly_the_sequences_that_are_certainly_young_enough(seed, numbers, most):
    made, number_of = labelled(seed, numbers)
    limited = limit_lag(made, LagLimit(most, "9"))
    young = [one for one in made.sequences if all(number >= 9 - most and number >= 0 for number in trained(one, number_of))]
    assert [one.id for one in limited.sequences] == [one.id for one in young]
    stale = limited.figures.stale
    assert stale.dropped + stale.unknown == len(made.sequences) - len(young)
    assert stale.trainable_tokens_lost == sum(one.trainable for one in made.sequences) - sum(one.trainable for one in young)
    counts = Counter(number for one in young for number in trained(one, number_of))
    assert Counter(limited.figures.versions) == Counter({str(number): n for number, n in counts.items()})
    assert limited.figures.oldest_version == (str(min(counts)) if counts else "")
    read = read_back(limited)
    assert not [failure for failure in verify(read) if failure.check == "figures"]
    assert native(read_native(msgspec.to_builtins(read)))["sequences"] == msgspec.to_builtins(native(limited)["sequences"])


def test_a_wrong_count_of_versions_is_found():
    (read,) = [read_back(ROLLOUTS["linear"])]
    assert read.figures.versions
    wrong = msgspec.structs.replace(read, figures=msgspec.structs.replace(read.figures, versions={"8": 1}))
    assert "versions" in "".join(failure.words for failure in verify(wrong) if failure.check == "figures")


def test_forced_tokens_count_for_no_version():
    (sequence,) = ROLLOUTS["forced"].sequences
    assert sequence.versions == {"7": sequence.trainable}
    assert sequence.trainable == sum(turn.chosen_tokens for turn in sequence.trained)
    assert len(sequence.trained) == 3
    assert limit_lag(ROLLOUTS["forced"], LagLimit(0, "7")).sequences == (sequence,)


def test_a_version_of_which_every_token_was_forced_does_not_count():
    """The weights changed where the thinking budget ended: nothing that is trained lags."""
    forced = msgspec.structs.replace(turn(9, ("7", 0, 4), ("8", 4, 9)), forced=((0, 4),))
    assert count_versions([forced]).versions == {"8": 5}
