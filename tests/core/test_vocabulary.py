"""Incident kinds, reasons and turn marks: each says what it means, and the package names them only through their tables."""

import ast
from pathlib import Path

import pytest

import tokencache
from tests.support.syntax import parse
from tokencache.core.incidents import Incident, IncidentKind
from tokencache.core.reasons import NO_TAIL, Reason
from tokencache.core.turn import TurnMark

PACKAGE = Path(tokencache.__file__).parent
TABLES = {"core/incidents.py", "core/reasons.py", "core/turn.py"}
FREE = ("testing/", "demo/", "core/splice.py")  # made-up data; junctions have kinds of their own
NAMES = {str(name) for table in (IncidentKind, Reason, TurnMark) for name in table if "-" in name}


def literals(source):
    """Names of the tables that a module spells itself."""
    nodes = list(ast.walk(parse(source)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    found = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings)
    return sorted({node.value for node in found if isinstance(node.value, str) and node.value in NAMES})


@pytest.mark.parametrize("table", [IncidentKind, Reason, TurnMark])
def test_every_name_has_a_meaning(table):
    assert all(name == name.lower() and name.meaning and not name.meaning.endswith(".") for name in table)
    assert [name for name in table if name.name != name.upper().replace("-", "_")] == []


def test_every_kind_of_incident_has_an_action():
    assert [kind for kind in IncidentKind if not kind.action.endswith(".")] == []


def test_an_incident_is_a_hole_if_its_kind_is():
    assert IncidentKind.STORE_ERROR.incident("why", call="c", at=1.0) == Incident("store-error", "why", True, "c", "", 1.0)
    assert not IncidentKind.HELD.incident("why", at=1.0).hole
    assert not IncidentKind.INTERNAL_ERROR.incident("why", at=1.0, hole=False).hole


def test_reasons_for_a_missing_tail_are_reasons():
    assert set(Reason) > NO_TAIL


def test_only_the_tables_spell_names():
    modules = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    spelled = {name: literals(source) for name, source in modules.items() if name not in TABLES and not name.startswith(FREE)}
    assert {name: found for name, found in spelled.items() if found} == {}


def test_a_name_that_is_spelled_is_found():
    assert literals('"""engine-disagrees"""\nif kind == "store-error": pass') == ["store-error"]
