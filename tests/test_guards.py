"""Guards of the structure: what was won is not lost without notice.

Each limit is today's figure. A change that lowers a figure lowers its limit; none is raised without a reason in its commit.
"""

import ast
import re
from pathlib import Path

import pytest

import tokencache
import tokencache_vllm
from bench import entries
from bench.call_path import measured
from tests.support.material import needs
from tests.support.redis_server import find_binary
from tests.support.syntax import parse
from tokencache.core.finish import FinishReason, ending
from tokencache.core.turn import Turn
from tokencache.dialects.anthropic import vocabulary as anthropic
from tokencache.dialects.gemini import vocabulary as gemini
from tokencache.dialects.responses import reply as responses
from tokencache.trajectories.formats import slime, verifiers
from tokencache.trajectories.formats.native import turn_object
from tokencache.trajectories.rollout import Reward

PACKAGE = Path(tokencache.__file__).parent
PACKAGES = (PACKAGE, Path(tokencache_vllm.__file__).parent)

# --- The path of a call.

WARM = {"product files": 74, "modules of proxy/": 19, "moves": 273, "frames above": 11}
STREAMED = {"product files": 77, "modules of proxy/": 19, "moves": 370, "frames above": 11}  # moves depend on how the chunks arrive


@pytest.mark.parametrize(("stream", "limits"), [(False, WARM), (True, STREAMED)], ids=["whole", "stream"])
async def test_the_path_of_a_call_gets_no_longer(stream, limits):
    least = (await measured(stream=stream)).figures()
    for _ in range(10):  # work in the background may add to a figure, and chunks may arrive in other parts
        if all(figure <= limits[name] for name, figure in least.items()):
            break
        more = (await measured(stream=stream)).figures()
        least = {name: min(figure, more[name]) for name, figure in least.items()}
    assert {name: figure for name, figure in least.items() if figure > limits[name]} == {}


ENTRIES = {"memory, 1 KB": 610, "stream, 1 KB": 904, "first call, 200 messages": 1339, "Redis, 1 KB": 699}
WITH_REDIS = [pytest.mark.redis, needs("redis-server", find_binary())]
SLACK = 1.02  # chunks may arrive in other parts, and other patch releases of Python call a function more or less


def least_entries(case, enough):
    """Count until a run enters no more than `enough`: work in the background may add to a figure."""
    least = entries.measured(entries.CASES[case], runs=1).python.total()
    for _ in range(20):
        if least <= enough:
            break
        least = min(least, entries.measured(entries.CASES[case], runs=1).python.total())
    return least


@pytest.mark.parametrize("case", [pytest.param(case, marks=WITH_REDIS if "Redis" in case else []) for case in ENTRIES])
def test_a_call_enters_no_more_functions(case):
    limit = SLACK * ENTRIES[case]
    assert least_entries(case, limit) <= limit


PLACEMENT = 13
"""Entries that placement by load may add to a call on one of several engines: 10 µs of CPU."""


def test_placement_by_load_costs_ten_microseconds():
    by_load, by_hash = "four engines, 1 KB", "four engines by the hash, 1 KB"
    by_the_hash = entries.measured(entries.CASES[by_hash]).python.total()
    assert least_entries(by_load, by_the_hash + PLACEMENT) - by_the_hash <= PLACEMENT


# --- Classes.

LINES, LINES_OF_A_CALL = 400, 300
LARGER = {  # lines of the classes above their limit
    "store/file/store.py FileStore": 518,
    "store/redis/store.py RedisStore": 443,
}


def sizes(name, source):
    return {f"{name} {node.name}": node.end_lineno - node.lineno + 1 for node in ast.walk(parse(source)) if isinstance(node, ast.ClassDef)}


def too_large(found):
    """The classes above their limit; and those that got smaller, whose limit must follow."""
    limits = {one: LARGER.get(one, LINES_OF_A_CALL if one.startswith("proxy/") else LINES) for one in found | LARGER}
    larger = {one: size for one, size in found.items() if size > limits[one]}
    return larger, {one: found.get(one, 0) for one, limit in LARGER.items() if found.get(one, 0) < limit}


def test_no_class_grows_beyond_its_limit():
    found = {}
    for package in PACKAGES:
        for path in package.rglob("*.py"):
            found |= sizes(path.relative_to(package).as_posix(), path.read_text())
    assert too_large(found) == ({}, {})


def test_a_large_class_is_found():
    large = sizes("proxy/new.py", "class Large:\n" + "    x = 1\n" * LINES_OF_A_CALL)
    assert too_large(LARGER | large) == ({"proxy/new.py Large": LINES_OF_A_CALL + 1}, {})
    assert too_large(LARGER | {"store/file/store.py FileStore": 399}) == ({}, {"store/file/store.py FileStore": 399})


# --- Modules.


def unnamed(package, text):
    """The modules and packages in a folder that the text of its `__init__` does not name."""
    packages = [path.name for path in package.iterdir() if (path / "__init__.py").exists()]
    return [
        name
        for name in [*packages, *(path.stem for path in package.glob("*.py"))]
        if name != "__init__" and not re.search(rf"`{name}/?`", text)
    ]


INITS = [init for package in PACKAGES for init in sorted(package.rglob("__init__.py"))]


@pytest.mark.parametrize("init", INITS, ids=lambda init: init.parent.relative_to(PACKAGE.parent).as_posix())
def test_each_package_names_its_modules(init):
    assert unnamed(init.parent, init.read_text()) == []


def test_a_module_without_a_name_is_found():
    text = (PACKAGE / "store/__init__.py").read_text()
    assert unnamed(PACKAGE / "store", text.replace("`memory_queue`", "")) == ["memory_queue"]


# --- A fact that several modules must know.

INTERNAL = {  # fields of a turn that no export has: how its tokens and messages are stored, and how echoes are judged
    "adapter_of", "base", "shared", "position_key", "judged", "foreign", "before", "handle", "cuts", "context_base",
    "context_shared", "media",
}  # fmt: skip
EXPORTED_AS = {"id": "turn", "applied_rules": "forgiven", "versions": "weight_versions"}


def test_each_field_of_a_turn_is_exported_or_internal():
    exported = turn_object(Turn(id="t", call="c", match="root"), Reward())
    fields = {EXPORTED_AS.get(name, name) for name in Turn.__struct_fields__}
    assert fields - set(exported) == INTERNAL


@pytest.mark.parametrize("table", [anthropic.FINISHED, gemini.FINISHED, responses.FINISHED, verifiers.FINISHED])
def test_each_finish_reason_is_written(table):
    assert set(table) == set(FinishReason)


@pytest.mark.parametrize("reason", FinishReason)
def test_each_finish_reason_has_an_end(reason):
    assert slime.STATUS[ending(reason, stopped=True)] in {"completed", "truncated", "aborted"}
