"""The generated parts of the documentation are up to date, and every part that can be generated is on a page."""

import re

import pytest

from tests.docs import reference

FILES = dict(reference.files())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_page_is_up_to_date(path):
    assert path.read_text() == FILES[path], "run: .venv/bin/python -m tests.docs.reference"


def test_every_part_is_on_a_page():
    used = [name for text in FILES.values() for name in re.findall(r"<!-- generated: ([\w-]+) -->", text)]
    assert sorted(used) == sorted(reference.BLOCKS)


def test_a_part_that_differs_is_written_again():
    page = "before\n<!-- generated: metrics -->\nold\n<!-- end -->\nafter"
    assert "old" not in reference.updated(page)
    assert reference.updated(page).startswith("before\n")
    assert reference.updated(page).endswith("\nafter")


def test_an_unknown_part_is_an_error():
    with pytest.raises(KeyError):
        reference.updated("<!-- generated: nothing -->\n<!-- end -->")
