"""Which ids a thinking budget forced, against an engine that is simulated one id at a time."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.profiles import examples
from tokencache.core import ids
from tokencache.core.forced import ThinkingMarks, forced_spans

START, END = 1, 2
MARKS = ThinkingMarks(ids.pack([START]), ids.pack([END]), ids.pack([END]))
PHRASE = ThinkingMarks(ids.pack([START]), ids.pack([END]), ids.pack([7, 8, END]))


def spans(prompt, completion, budget, marks=MARKS):
    return forced_spans(ids.pack(prompt), ids.pack(completion), budget, marks)


@pytest.mark.parametrize(
    ("prompt", "completion", "budget", "forced"),
    [
        ([9], [START, 5, 5, END, 5], 2, ((3, 4),)),
        ([9], [START, 5, END, 5, 5], 2, ()),  # the policy ended it one token before
        ([9], [START, END, 5], 0, ((1, 2),)),
        ([9, START], [5, 5, END, 5, END], 2, ((2, 3),)),  # the second is the policy's own
        ([9, START, 5, 5, 5], [END, 5], 2, ((0, 1),)),  # used up in the prompt
        ([9, START, 5, 5, 5], [5, END], 4, ((1, 2),)),
        ([START, 5, END, 9], [5, 5, 5, 5], 1, ()),
        ([9], [5, 5, START, 5, END, START, 5, END], 1, ((4, 5), (7, 8))),
        ([9], [START, 5, 5], 2, ()),  # the limit came first
        ([9], [5, 5, 5], 0, ()),
        ([9], [], 0, ()),
        ([9], [START, 5, 5, 5, END], 2, None),  # the place has another id: the engine counts otherwise
        ([9], [START, 5, START, 5, 5, END], 2, ((5, 6),)),  # another way would have expected an end before
        ([9], [START, 5, START, END, 5], 2, None),  # forced, or the policy's own after a second start
        ([9], [START, 5, START, END, 5], 9, ()),
    ],
)
def test_one_end_of_thinking(prompt, completion, budget, forced):
    assert spans(prompt, completion, budget) == forced


@pytest.mark.parametrize(
    ("completion", "budget", "forced"),
    [
        ([START, 5, 7, 8, END, 5], 1, ((2, 5),)),
        ([START, 5, 7, 8], 1, ((2, 4),)),  # cut within the phrase
        ([START, 5, 7, 8, END, 5], 2, ((3, 5),)),  # its first id was the policy's
        ([START, END, 5, 5, 5], 2, ()),  # the policy's own end; an engine that only knows the phrase would have forced it
        ([START, END, 7, 8, END], 1, None),  # the policy's phrase after its own end, or forced by an engine that only knows the phrase
        ([START, 5, 5, 5], 2, None),
    ],
)
def test_a_phrase_before_the_end_of_thinking(completion, budget, forced):
    assert spans([9], completion, budget, PHRASE) == forced


def engine(prompt, choices, budget, marks, *, restarts):
    """What an engine samples, one id at a time from the ids so far, and which of them it forced."""
    start, end, forced = (ids.unpack(one) for one in marks)
    made, places, queue, open_at = list(prompt), [], [], None
    for n, token in enumerate(prompt):
        open_at = n + 1 if token in start else None if token in end else open_at
    for choice in choices:
        if not queue and open_at is not None and len(made) - open_at >= budget:
            queue = list(forced)
        if queue:
            places.append(len(made) - len(prompt))
            token = queue.pop(0)
        else:
            token = choice
        made.append(token)
        if token in start and (open_at is None or restarts):
            open_at = len(made)
        elif token in end:
            open_at = None
    return made[len(prompt) :], places


TOKENS = st.lists(st.sampled_from([START, END, 5, 6, 7, 8]), max_size=14)


@settings(max_examples=examples(400))
@given(TOKENS, TOKENS, st.integers(0, 6), st.booleans(), st.sampled_from([MARKS, PHRASE]))
def test_what_is_claimed_is_what_the_engine_did(prompt, choices, budget, restarts, marks):
    completion, places = engine(prompt, choices, budget, marks, restarts=restarts)
    found = spans(prompt, completion, budget, marks)
    if found is None:
        assert restarts is False or marks is PHRASE or completion.count(START) + prompt.count(START) > 1
        return
    claimed = [place for start, end in found for place in range(start, end)]
    assert all(end <= start for (_, end), (start, _) in pairwise(found))
    assert claimed == places


@settings(max_examples=examples(200))
@given(st.lists(st.sampled_from([END, 5, 6]), max_size=14), st.integers(0, 6))
def test_one_thought_is_always_decided(choices, budget):
    completion, places = engine([9], [START, *choices], budget, MARKS, restarts=True)
    assert [place for start, end in spans([9], completion, budget) for place in range(start, end)] == places
