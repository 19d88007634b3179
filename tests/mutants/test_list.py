"""The list of mutants fits the code of today. `python -m tests.mutants` runs the tests on them."""

import ast
from collections import Counter
from pathlib import Path

from tests.mutants.mutants import PACKAGES, exists, read

ROOT = Path(__file__).parents[2]
MUTANTS = read()


def test_there_are_sixty_of_all_packages():
    assert len(MUTANTS) == len({mutant.name for mutant in MUTANTS}) >= 60
    assert min(Counter(mutant.package for mutant in MUTANTS)[package] for package in PACKAGES) >= 12


def test_each_mutant_changes_the_code_in_one_place():
    unfit = []
    for mutant in MUTANTS:
        source = (ROOT / mutant.path).read_text()
        mutated = mutant.applied(source)
        if mutated is None:
            unfit.append(f"{mutant.name}: {mutant.path} contains {mutant.old!r} {source.count(mutant.old)} times, not once")
        elif ast.dump(ast.parse(mutated)) == ast.dump(ast.parse(source)):
            unfit.append(f"{mutant.name}: the code stays as it is")
    assert not unfit, "mend tests/mutants/mutants.toml:\n" + "\n".join(unfit)


def test_the_tests_that_find_a_mutant_exist():
    missing = [f"{mutant.name}: {test}" for mutant in MUTANTS for test in mutant.tests or ["none"] if not exists(test, ROOT)]
    assert not missing, "run `python -m tests.mutants --write --only …`, because these are gone:\n" + "\n".join(missing)
