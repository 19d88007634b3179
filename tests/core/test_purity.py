"""The core decides and does no I/O: what it may not import."""

import ast
from pathlib import Path

import pytest

import tokencache.core
from tests.support.syntax import parse

FORBIDDEN = {"asyncio", "aiohttp", "redis", "transformers", "tokenizers", "socket", "torch", "threading", "subprocess", "uvloop"}
FILES = sorted(Path(tokencache.core.__file__).parent.rglob("*.py"))


def imported(source: str) -> set[str]:
    names = set()
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {"." * node.level + (node.module or "")} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def impure(names: set[str]) -> list[str]:
    ours = [n for n in names if n.split(".")[0] == "tokencache" and n != "tokencache.core" and not n.startswith("tokencache.core.")]
    return sorted([n for n in names if n.split(".")[0] in FORBIDDEN or n.startswith(".")] + ours)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_core_is_pure(path):
    assert impure(imported(path.read_text())) == []


def test_every_module_is_looked_at_and_the_check_can_fail():
    assert {"messages.py", "match.py", "lineage.py"} <= {path.name for path in FILES}
    for line in (
        "import asyncio",
        "from tokencache.store import memory",
        "from tokencache import errors",
        "def f():\n import redis.asyncio",
    ):
        assert impure(imported(line))
    assert impure(imported("from tokencache.core import ids\nfrom tokencache.core.turn import Turn\nimport json")) == []
