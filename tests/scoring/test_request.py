"""Replies with prompt log probabilities: what is read, and what is refused rather than guessed."""

import msgspec
import pytest

from tokencache.scoring.request import OtherIdsError, ScoringError, read_scores

IDS = [5, 6, 7]
ENTRIES = [
    None,
    {"6": {"logprob": -3.0, "rank": 9, "decoded_token": "a"}, "8": {"logprob": -0.5, "rank": 1}, "9": {"logprob": -1.0, "rank": 2}},
    {"7": {"logprob": -0.25, "rank": 1}, "1": {"logprob": -2.0, "rank": 2}},
]


def reply(entries=ENTRIES, ids=IDS):
    return msgspec.json.encode({"id": "x", "choices": [{"prompt_logprobs": entries, "prompt_token_ids": ids, "text": "a"}]})


def test_the_likeliest_are_in_order_and_the_own_token_is_not_counted_among_them():
    scores = read_scores(reply(), IDS, top=2)
    assert scores.logprobs == [0.0, -3.0, -0.25]
    assert scores.top_ids == [[], [8, 9], [7, 1]]
    assert scores.top_logprobs == [[], [-0.5, -1.0], [-0.25, -2.0]]
    assert read_scores(reply(), IDS, top=0)[:3] == ([0.0, -3.0, -0.25], [], [])


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        (reply(ids=[5, 6, 8]), OtherIdsError, "other prompt ids"),
        (reply([None, ENTRIES[1], {"8": {"logprob": -1.0}}], None), OtherIdsError, "token 7 at place 2"),
        (reply([None, ENTRIES[1], None]), OtherIdsError, "token 7"),
        (reply(None), ScoringError, "none"),
        (reply(ENTRIES[:2]), ScoringError, "2 for 3 tokens"),
        (b"{}", ScoringError, "cannot be read"),
        (b'{"choices": []}', ScoringError, "cannot be read"),
    ],
)
def test_what_cannot_be_trusted_is_refused(text, error, words):
    with pytest.raises(error, match=words):
        read_scores(text, IDS, top=0)
