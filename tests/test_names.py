"""Names of classes in the package: each public one is defined once."""

import ast
from collections import defaultdict
from pathlib import Path

from tests.support.syntax import parse

ROOT = Path(__file__).parents[1]
PACKAGES = ("tokencache", "vllm_plugin")


def public_classes(modules):
    """The modules that define each public class at their top level."""
    found = defaultdict(list)
    for name, source in modules:
        for node in parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(name)
    return found


def defined_twice(modules):
    return {name: places for name, places in public_classes(modules).items() if len(places) > 1}


def test_no_public_class_name_is_defined_twice():
    modules = [(str(path.relative_to(ROOT)), path.read_text()) for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
    assert defined_twice(modules) == {}


def test_a_second_definition_is_found():
    assert defined_twice([("a", "class Turn: ..."), ("b", "class Turn: ...\nclass _Turn: ..."), ("c", "class _Turn: ...")]) == {
        "Turn": ["a", "b"]
    }
