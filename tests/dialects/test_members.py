"""The table of request members."""

from pathlib import Path

import msgspec

from tokencache.dialects.chat.rendering import scope_of
from tokencache.dialects.members import RECORDED, ROWS

SAMPLING = Path(__file__).parents[2] / "docs/sampling.md"


def test_each_member_has_one_row():
    names = [row.name for row in ROWS]
    assert len(names) == len(set(names))


def test_the_digest_of_a_context_stays_that_of_stored_sessions():
    names = (
        "documents",
        "reasoning_effort",
        "chat_template_kwargs",
        "mm_processor_kwargs",
        "add_special_tokens",
        "chat_template",
        "tools",
    )
    fields = {name: msgspec.Raw(b'["%s"]' % name.encode()) for name in names}
    assert scope_of("m", fields).hex() == "a9df8c84d9a81070ae4a2536a083bdac"


def test_the_documentation_names_what_is_recorded():
    text = SAMPLING.read_text()
    guided = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
    penalties = ("frequency_penalty", "presence_penalty", "repetition_penalty")
    assert [name for name in RECORDED if name not in {*guided, *penalties} and f"`{name}`" not in text] == []
