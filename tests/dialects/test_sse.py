"""Splitting a stream into events, and their data: the fast path equals the slow one."""

import re

from hypothesis import given
from hypothesis import strategies as st

from tokencache.dialects.sse import EventSplitter, data_of

events = st.text("ab:\n", max_size=40).map(str.encode)


@given(st.lists(events))
def test_events_end_at_the_first_blank_line(pieces):
    splitter, stream = EventSplitter(), b"".join(pieces)
    assert [event for piece in pieces for event in splitter.feed(piece)] == re.findall(rb"(?s).*?\n\n", stream)
    assert splitter.rest == re.sub(rb"(?s).*?\n\n", b"", stream)


@given(st.lists(st.sampled_from(["data: ", "data:", "x", " ", ": note", "\n", "\r", "\n\n"]), max_size=8).map("".join).map(str.encode))
def test_data_lines_are_joined(event):
    said = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    assert data_of(event) == (b"\n".join(said) if said else None)
