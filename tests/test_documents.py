"""Documents against the code: commands that they show are commands, metrics and log lines that they list are there."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from tokencache import metrics
from tokencache.cli import app
from tokencache.config import Settings

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPERATIONS = (ROOT / "docs/operations.md").read_text()
COMMANDS = typer.main.get_command(app).commands


def commands(page):
    lines = re.findall(r"^    (?:\.venv/bin/)?(tokencache .*)$", page.read_text().replace("\\\n", " "), re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_documents_are_commands(page, monkeypatch):
    monkeypatch.setenv("TOKENCACHE_ADMIN_KEY", "a-long-random-secret")
    for _, name, *args in commands(page):
        with COMMANDS[name].make_context(name, list(args)) as context:
            given = {key: value for key, value in context.params.items() if value is not None}
        if name == "serve":
            Settings(**given)


def table(heading, header):
    """The first cells of a table in the operations page."""
    section = OPERATIONS.partition(f"\n## {heading}")[2].partition("\n## ")[0]
    rows = section.partition(f"| {header} |")[2].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows if row.startswith("|")]


def test_the_metrics_listed_are_those_that_there_are():
    listed = [re.match(r"`(\w+)(?:\{([\w, ]+)\})?`", row[0]).groups() for row in table("Metrics", "metric")]
    there = {
        family._name + ("_total" if family._type == "counter" else ""): tuple(family._labelnames)
        for family in metrics.REGISTRY._collector_to_names
    }
    assert {name: tuple(re.findall(r"\w+", labels or "")) for name, labels in listed} == there


def test_the_log_lines_listed_are_those_that_there_are():
    """A line is listed by its words. Values are `…` or KIND; the words between them are in texts of the program."""
    source = "\n".join(path.read_text() for path in sorted((ROOT / "tokencache").rglob("*.py")))
    missing = []
    for row in table("The log", "level"):
        for line in re.findall(r"`([^`]+)`", row[1]):
            words = [part.strip(" :") for part in re.split("…|KIND", line)]
            missing += [line for part in words if part and not re.search(rf"[\"'\s]{re.escape(part)}", source)]
    assert missing == []


def test_incidents_that_are_not_counted_are_those_that_are_found_on_reading():
    said = re.search(r"counted in `tokencache_incidents_total` \(but\s+(.*?), which", OPERATIONS)[1]
    assert set(re.findall(r"`([\w-]+)`", said)) == {"call-open", "torn-record"}


def test_decisions_are_listed_in_order():
    listed = re.findall(r"^\| \[\d+\]\((.*?)\)", (ROOT / "docs/decisions/README.md").read_text(), re.MULTILINE)
    assert listed == sorted(path.name for path in (ROOT / "docs/decisions").glob("0*.md"))
