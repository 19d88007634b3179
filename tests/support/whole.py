"""Chooses what runs: all tests, or all but those that only repeat a kind in another combination.

Those carry the marker `whole`, or are combinations of independent parameters: of a test with several `parametrize` (or parameters of its
fixtures), the usual run has each value of each once. Parameters that depend on each other stand in one `parametrize` (`pairwise.cases`), or
the test carries the marker `product`.

`--whole tests/proxy,tests/core` runs the whole of these folders, `--whole tests` the whole of everything. `tests.support.changed` prints
what a change touches. Coverage is that of the usual run: the others repeat what it runs, and tracing takes two thirds of the time.
"""

import os
from collections import Counter, defaultdict

WHOLE = "TOKENCACHE_TESTS_WHOLE"
"""An environment variable: the folders of `--whole`, for tests that try more examples then (`profiles.examples`)."""
LEFT_OUT = "left_out"
"""Where a worker reports how many tests it left out."""


def add_options(parser):
    parser.addoption("--whole", default="", metavar="FOLDERS", help="folders, with commas between, whose tests marked `whole` run, too")


def pytest_configure(config):
    os.environ[WHOLE] = config.getoption("whole")


def runs_whole(file):
    """Whether the whole of a file runs: then its test has its largest case only, which contains the smaller ones."""
    return _within(file, _folders(os.environ.get(WHOLE, "")))


def pytest_collection_modifyitems(config, items):
    folders = _folders(config.getoption("whole"))
    marked = {item for item in items if item.get_closest_marker("whole")}
    repeats = marked | _combinations([item for item in items if item not in marked])
    left_out = {item for item in repeats if not _within(item.nodeid, folders)}
    for item in repeats - left_out:
        item.add_marker("no_cover")
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        if hasattr(config, "workeroutput"):
            config.workeroutput[LEFT_OUT] = len(left_out)
        items[:] = [item for item in items if item not in left_out]


def _folders(option):
    return [folder.rstrip("/") for folder in option.split(",") if folder]


def _within(test, folders):
    file = test.partition("::")[0]
    return any(file == folder or file.startswith(f"{folder}/") for folder in folders)


def _combinations(items):
    """The items that are not needed for each value of their tests' parameters to occur."""
    tests = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("product"):
            tests[item.nodeid.partition("[")[0]].append(item)
    found = set()
    for same in tests.values():
        needed = covering([frozenset(enumerate(item.callspec._idlist)) for item in same])  # an id for each `parametrize`
        found.update(item for place, item in enumerate(same) if place not in needed)
    return found


def covering(cases):
    """The places of some cases, sets of values, that together have each value: the next has most that are missing, then the rarest ones."""
    left, chosen, used = list(range(len(cases))), set(), Counter()
    missing = frozenset().union(*cases)
    while missing:
        best = max(left, key=lambda place: (len(cases[place] & missing), -sum(used[value] for value in cases[place])))
        left.remove(best)
        chosen.add(best)
        missing -= cases[best]
        used.update(cases[best])
    return chosen
