"""Tables that are written by hand name what the code has, and nothing else."""

import re

import pytest

from tests.docs.reference import DOCS
from tokencache.core.incidents import IncidentKind
from tokencache.core.reasons import Reason
from tokencache.core.turn import TurnMark
from tokencache.engine.drivers.registry import DRIVERS
from tokencache.trajectories.formats.registry import FORMATS


def first_column(page):
    """The names in the first column of a page's first table."""
    rows = re.search(r"^\|[^\n]*\n\|[-|: ]+\n((?:\|[^\n]*\n)+)", (DOCS / page).read_text(), re.MULTILINE)[1]
    return [name for row in rows.splitlines() for name in re.findall(r"`([\w-]+)`", row.split("|")[1])]


@pytest.mark.parametrize(("page", "names"), [("formats.md", FORMATS), ("drivers.md", DRIVERS)])
def test_the_table_names_what_the_registry_has(page, names):
    assert sorted(first_column(page)) == sorted(names)


def test_messages_that_the_troubleshooting_page_quotes_exist():
    source = "\n".join(path.read_text() for path in sorted((DOCS.parent / "tokencache").rglob("*.py")))
    quoted = re.findall(r'"([^"`]+)"', re.sub(r"`[^`]*`", "", (DOCS / "troubleshooting.md").read_text()))
    assert quoted
    assert [text for text in quoted if text not in source] == []


def test_names_after_incident_reason_and_mark_exist():
    """On every page: "incident `x`", "reason `x`" and "mark `x`" name one that exists."""
    known = {"incident": {*IncidentKind}, "reason": {*Reason}, "mark": {*TurnMark}}
    for page in sorted(DOCS.rglob("*.md")):
        for what, name in re.findall(r"(?<!finish )\b(incident|reason|mark)s? `([\w-]+)`", page.read_text()):
            assert name in known[what], f"{page.name}: {what} {name}"
