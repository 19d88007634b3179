"""The text that a reply's ids have after the text that was served: proven by decoding, or refused."""

import pytest

from tokencache.core import ids
from tokencache.proxy.sampled_text import text_after


@pytest.mark.parametrize(
    ("tokens", "served", "stop", "after"),
    [
        (["One", " two"], "One two", "", ""),
        (["<think>", "One", " two"], "One two", "", ""),
        (["One", " two", " three"], "One two", "", None),
        (["One", " two", "\ufffd"], "One two", "", None),  # a part of a character that was not served
        (["One ", "STOP"], "One ", "STOP", "STOP"),
        (["One ", "ST", "OP now"], "One ", "STOP", "STOP now"),
        (["One ", "STOP", " now"], "One ", "STOP", None),  # the last token does not complete the stop string
        (["One ", "STOP"], "One STOP", "STOP", None),  # it was served
        (["One", " STOP"], "One ", "STOP", "STOP"),
        (["One", " STOP"], "One", "STOP", None),  # a blank was not served
        (["a", ">>"], "a", ">", ">>"),
        ([">", ">>"], ">", ">", None),  # either bracket may be the stop string
        (["One", "<call>", "One"], "One", "", None),  # a call was cut off, and nothing of it served
        (["One", "<call>", "One", "STOP"], "One", "STOP", None),
        (["<think>One</think>", "One", "STOP"], "One", "STOP", "STOP"),
        (["<think>One</think>", "One"], "One", "", ""),
        (["STOP"], "", "STOP", "STOP"),
        ([], "One", "", None),
    ],
)
async def test_where_the_served_text_ends(tokens, served, stop, after):
    async def read(packed):
        return "".join(tokens[token] for token in ids.unpack(packed))

    thought = "One" if tokens[:1] == ["<think>One</think>"] else ""
    assert await text_after(served, stop, ids.pack(range(len(tokens))), read, thought=thought) == after
