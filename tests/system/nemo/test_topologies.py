"""docs/topologies: the command line accepts every command of ours there, and every linked page exists."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from tokencache.cli import app
from tokencache.config import Settings

PAGES = sorted((Path(__file__).parents[3] / "docs/topologies").glob("*.md"))
COMMANDS = typer.main.get_command(app).commands


def commands(page):
    text = page.read_text().replace("\\\n", " ")
    return [shlex.split(line) for line in re.findall(r"^    (tokencache .*)$", text, re.MULTILINE)]


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "README"], ids=lambda page: page.stem)
def test_its_commands_are_commands(page):
    found = commands(page)
    assert any(command[1] == "serve" for command in found)
    for _, name, *args in found:
        with COMMANDS[name].make_context(name, list(args)) as context:
            given = {key: value for key, value in context.params.items() if value is not None}
        if name == "serve":
            Settings(**given)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_its_links_exist(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
