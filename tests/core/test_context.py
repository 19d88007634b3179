"""Contexts: a turn's messages are found again whole, and a conversation's text is kept once."""

import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.settings import MANY
from tokencache.core import context as contexts
from tokencache.core.context import Context, added_messages, pack_context, unpack_context, whole_context, whole_contexts
from tokencache.core.messages import Message
from tokencache.core.turn import Turn

Raw = msgspec.Raw


def message(n):
    return Raw(b'{"role":"user","content":"%d \\u2615"}' % n)


def turn(name, base=None, shared=0):
    return Turn(id=name, call=name, match="root", context_base=base, context_shared=shared, served=Message("assistant", f"reply {name} ☕"))


@MANY
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=12))
def test_every_context_is_put_together_again(steps):
    """Each turn shares a beginning with some turn before it, and adds its own."""
    turns, packed, wanted = {}, {}, []
    for n, (base, shared, new) in enumerate(steps):
        own = [message(100 * n + i) for i in range(new)]
        earlier = wanted[base % len(wanted)] if wanted and base else []
        kept = min(shared, len(earlier))
        name = f"t{n}"
        turns[name] = turn(name, f"t{base % len(wanted)}" if kept else None, kept)
        whole = Context(own) if kept else Context(own, Raw(b"[%d]" % n), {"m": Raw(b"1")}, {"k": n})
        packed[name] = pack_context(whole, turns[f"t{base % len(wanted)}"].served if kept and n % 2 else None)
        wanted.append([*earlier[:kept], *own])
    together = whole_contexts(list(turns.values()), packed)
    for n, messages in enumerate(wanted):
        whole = whole_context(f"t{n}", turns, packed)
        assert list(map(bytes, whole.messages)) == list(map(bytes, messages))
        first = n
        while turns[f"t{first}"].context_base:
            first = int(turns[f"t{first}"].context_base[1:])
        assert bytes(whole.tools) == b"[%d]" % first
        assert whole.kwargs == {"k": first}
        assert bytes(whole.members["m"]) == b"1"
        assert whole == together[f"t{n}"]
        assert list(added_messages(whole, turns[f"t{n}"])) == list(whole.messages)[turns[f"t{n}"].context_shared :]


LONG = "".join(f"line {n} of what was said ☕\n" for n in range(4000))
"""More than the 32 KiB that deflate looks back."""


@pytest.mark.parametrize("echoed", [None, Message("assistant", "said"), Message("assistant", LONG)])
@pytest.mark.parametrize("content", ["", "said", LONG, "".join(map(chr, range(0x4E00, 0x9000)))])
def test_contexts_of_every_size_are_read_again(content, echoed):
    context = Context([Raw(msgspec.json.encode({"role": "user", "content": content}))])
    assert unpack_context(pack_context(context, echoed), echoed) == context


def test_what_was_deflated_by_zlib_is_read():
    """Stores hold contexts of releases that did not have ISA-L: the format is deflate's, whoever writes it."""
    plain = b'{"messages":[{"role":"user","content":"hi"}]}'
    squeeze = zlib.compressobj(6, wbits=-15, zdict=contexts._dictionary(None))
    assert unpack_context(b"p" + squeeze.compress(plain) + squeeze.flush()) == Context([Raw(b'{"role":"user","content":"hi"}')])


def test_an_empty_context_needs_no_bytes():
    assert unpack_context(b"") == Context()


@pytest.mark.parametrize("torn", [b"x", b"exx", pack_context(Context([message(1)]))[:-3]])
def test_torn_bytes_are_reported(torn):
    with pytest.raises(ValueError, match="unreadable context"):
        unpack_context(torn)


def test_a_base_that_is_too_short_is_reported():
    turns = {"a": turn("a"), "b": turn("b", "a", 2)}
    with pytest.raises(ValueError, match="shares 2 of 1"):
        whole_context("b", turns, {"a": pack_context(Context([message(1)])), "b": b""})


def test_a_missing_base_is_reported():
    with pytest.raises(KeyError):
        whole_context("b", {"b": turn("b", "a", 1)}, {"b": b""})
