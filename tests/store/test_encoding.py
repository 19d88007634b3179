"""The bytes in Redis outlive a release: the next release must read what one wrote."""

import pytest

from tokencache.core import ids
from tokencache.core.incidents import Incident
from tokencache.core.messages import Message
from tokencache.core.turn import Tokens, Turn
from tokencache.store.encoding import HEADER, Piece, pack, pack_keys, pack_tokens, unpack, unpack_tokens

TURN = Turn(
    id="0123456789abcdef",
    call="fedcba9876543210",
    match="continue",
    parent="aaaaaaaaaaaaaaaa",
    served=Message("assistant", "hello hello"),
    finish_reason="stop",
)
DEFLATED = (
    "7abbc7c0068a1603432363135333730bcbc4a4e494d4344834a5a5a62427255a5a989b999a181b191ae088b64434000df6261ce1be3a233527275f014c62094000"
)
WRITTEN = [
    (TURN, DEFLATED),
    (Incident("x"), "6d81a46b696e64a178"),
    (Incident("\ud800"), "6aab56cace84248098d2140b0303a55a00"),
]


@pytest.mark.parametrize(("record", "written"), WRITTEN, ids=["deflated", "plain", "json"])
def test_records_of_earlier_releases_are_read(record, written):
    assert unpack(bytes.fromhex(written), type(record)) == record
    assert unpack(pack(record), type(record)) == record
    assert pack(record)[:1] == bytes.fromhex(written)[:1]


def test_tokens_of_earlier_releases_are_read():
    written = bytes.fromhex("010002000000030000000100000004000000613132333435363738")
    turn = Turn(id="b", call="k", match="root", base="a", shared=2, prompt_tokens=3, completion_tokens=1)
    assert pack_tokens(turn, Tokens(b"1234", b"5678")) == written
    assert unpack_tokens(written, b"f") == Piece("a", 2, 3, 1, Tokens(b"1234", b"5678", b"f"))


@pytest.mark.parametrize(("token", "size"), [(0, 3), (151_935, 3), (2**24 - 1, 3), (2**24, 4), (2**31 - 1, 4), (-1, 4), (-(2**31), 4)])
@pytest.mark.parametrize("in_delta", [True, False])
def test_an_id_takes_three_bytes_if_all_of_its_turn_do(token, size, in_delta):
    turn = Turn(id="b", call="k", match="root", base="a", prompt_tokens=2, completion_tokens=2)
    tokens = [ids.pack([token, 258]), ids.pack([513, 65_536])][:: 1 if in_delta else -1]
    written = pack_tokens(turn, Tokens(*tokens))
    assert len(written) == HEADER.size + 1 + 4 * size
    assert unpack_tokens(written).tokens == Tokens(*tokens)


def test_readers_of_the_earlier_form_refuse_three_bytes():
    """They take what the header says for the length of the delta, of which too little is there."""
    turn = Turn(id="b", call="k", match="root", base="a", prompt_tokens=1, completion_tokens=1)
    written = pack_tokens(turn, Tokens(ids.pack([1]), ids.pack([2])))
    *_, delta = HEADER.unpack_from(written)
    assert delta > len(written)


@pytest.mark.parametrize("data", [b"", b"z", b"m", b"j", b"zzzz", b"x123", b"m\xc1", b"m\x81\xa4kind\x01", pack(TURN)[:-10]])
def test_invalid_bytes_are_refused(data):
    with pytest.raises(ValueError, match=r"unreadable|Expecting|invalid"):
        unpack(data, Turn)


@pytest.mark.parametrize("cut", [0, 5, 17, 20])
def test_incomplete_tokens_are_refused(cut):
    whole = pack_tokens(Turn(id="b", call="k", match="root", base="base", prompt_tokens=1), Tokens(b"1234", b""))
    with pytest.raises(ValueError, match=r"incomplete|missing"):
        unpack_tokens(whole[:cut])


def test_keys_are_two_arguments():
    assert pack_keys([]) == (b"", b"")
    assert pack_keys([b"c1", b"", b"r" * 300]) == (b"\x02\x00\x00\x00\x2c\x01", b"c1" + b"r" * 300)
