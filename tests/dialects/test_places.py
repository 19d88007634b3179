"""Places in a request, as errors name them."""

import pytest

from tokencache.dialects.json_io import bracketed, dotted

DEEP = ((((("messages", 3), "content"), 0), "source"), "data")


@pytest.mark.parametrize(
    ("place", "dots", "brackets"),
    [
        ("", "", ""),
        (("", "model"), "model", "model"),
        ("thinking.enabled", "thinking.enabled", "thinking.enabled"),
        (("tool_choice.tool", "name"), "tool_choice.tool.name", "tool_choice.tool.name"),
        (DEEP, "messages.3.content.0.source.data", "messages[3].content[0].source.data"),
        ((((("", "a"), 0), 1), "2"), "a.0.1.2", "a[0][1].2"),
    ],
)
def test_how_they_are_written(place, dots, brackets):
    assert dotted(place) == dots
    assert bracketed(place) == brackets
