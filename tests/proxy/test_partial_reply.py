"""How many tokens of an aborted turn spell what its harness had heard."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokencache.core import ids
from tokencache.core.turn import Turn
from tokencache.core.verdict import DeliveredPrefix
from tokencache.proxy.partial_reply import delivered_tokens

TURN = Turn(id="t", call="c", match="root")
STOP = 999


async def told(pieces, text, first, begun, after):
    """Ask, of a completion whose tokens read as these pieces."""

    async def read(packed):
        return b"".join(pieces[n] if n != STOP else b"<stop>" for n in ids.unpack(packed)).decode(errors="replace")

    completion = ids.pack(n if piece != b"<stop>" else STOP for n, piece in enumerate(pieces))
    return await delivered_tokens(DeliveredPrefix(TURN, text, first, begun, after, ()), completion, {STOP}, read)


THOUGHT = [b"<think>", b"hm", b"</think>"]


@pytest.mark.parametrize("together", [1, 4, 40, 300])
async def test_however_many_tokens_came_when_the_text_began(together):
    """An engine that lags says many tokens at once: where among them the text begins is found all the same."""
    words = [b"w%d " % n for n in range(together + 20)]
    heard = b"".join(words[: together + 9]).decode()
    assert await told([*THOUGHT, *words], heard, 0, 3 + together, 3 + together + 9) == 3 + together + 9


async def test_a_position_within_a_token_is_not_a_boundary():
    assert await told([*THOUGHT, b"one ", b"two"], "one t", 3, 4, 5) is None


async def test_half_a_character_is_not_a_boundary():
    coffee = "☕".encode()
    assert await told([*THOUGHT, b"a ", coffee[:1], coffee[1:]], "a ", 3, 4, 5) == 4
    assert await told([*THOUGHT, b"a ", coffee[:1], coffee[1:]], "a ☕", 3, 4, 6) == 6


@pytest.mark.parametrize("last", [b"a<", b"a" + "é".encode()[:1]])
async def test_the_same_words_in_the_thought_are_not_the_text(last):
    """The text ends within a token: no place is found, and not that of equal words shortly before."""
    assert await told([b"<think>", b"a", b"</think>", last], "a", 3, 4, 4) is None


async def test_two_places_are_none():
    """The text may begin at either of two tokens and end accordingly: nobody can say which was heard."""
    assert await told([b"a", b"a", b"a"], "aa", 0, 2, 3) is None


async def test_a_stop_id_after_the_whole_reply_belongs_to_it():
    assert await told([b"all", b"<stop>"], "all", 0, 1, 1) == 2


@given(st.lists(st.sampled_from(["a", "b", " ", "ab", "é", "☕"]), min_size=1, max_size=30), st.data())
async def test_the_found_prefix_is_the_delivered_one(words, data):
    pieces = [*THOUGHT, *(word.encode() for word in words)]
    end = data.draw(st.integers(1, len(words)))
    begun = data.draw(st.integers(1, end))
    heard = "".join(words[:end])
    assert await told(pieces, heard, 0, 3 + begun, 3 + end) in {None, 3 + end}
