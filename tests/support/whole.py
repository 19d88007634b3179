"""Chooses what runs: all tests, or all but those that only repeat a kind in another combination (`@pytest.mark.whole`).

`--whole tests/proxy,tests/core` runs the whole of these folders, `--whole tests` the whole of everything. `tests.support.changed` prints
what a change touches.
"""

import os

WHOLE = "TOKENCACHE_TESTS_WHOLE"
"""An environment variable: the folders of `--whole`, for tests that try more examples then (`profiles.examples`)."""
LEFT_OUT = "left_out"
"""Where a worker reports how many tests it left out."""


def add_options(parser):
    parser.addoption("--whole", default="", metavar="FOLDERS", help="folders, with commas between, whose tests marked `whole` run, too")


def pytest_configure(config):
    os.environ[WHOLE] = config.getoption("whole")


def pytest_collection_modifyitems(config, items):
    folders = [folder.rstrip("/") for folder in config.getoption("whole").split(",") if folder]
    left_out = [item for item in items if item.get_closest_marker("whole") and not _within(item.nodeid, folders)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        if hasattr(config, "workeroutput"):
            config.workeroutput[LEFT_OUT] = len(left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


def _within(test, folders):
    file = test.partition("::")[0]
    return any(file == folder or file.startswith(f"{folder}/") for folder in folders)
