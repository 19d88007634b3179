"""Records what the tests ran with, and passed: vLLM, harness, trainer and Python, each with its version.

    TOKENCACHE_COMPATIBILITY=docs/compatibility.json make test e2e

adds to the file. A test belongs to a row by its marker `ran_with(trainer="verl")` (an installed package), or by
`record_property("harness", "Codex 0.150.0")`. A row with a failed test is not written, and removed if it was there.
"""

import importlib.metadata
import json
import platform
import time
from collections import Counter
from pathlib import Path

import tokencache

VARIABLE = "TOKENCACHE_COMPATIBILITY"
KINDS = ("vllm", "harness", "trainer")


def pytest_runtest_setup(item):
    for marker in item.iter_markers("ran_with"):
        item.user_properties += [(kind, f"{package} {importlib.metadata.version(package)}") for kind, package in marker.kwargs.items()]


class Compatibility:
    """Counts the tests of each row, and writes the file at the end."""

    def __init__(self, file):
        self._file = Path(file)
        self._passed, self._failed = Counter(), set()

    def pytest_runtest_logreport(self, report):
        properties = dict(report.user_properties)
        row = (*(properties.get(kind, "") for kind in KINDS), platform.python_version())
        if report.failed:
            self._failed.add(row)
        elif report.when == "call" and report.passed:
            self._passed[row] += 1

    def pytest_sessionfinish(self):
        known = json.loads(self._file.read_text())["rows"] if self._file.exists() else []
        rows = {tuple(row[name] for name in (*KINDS, "python")): row for row in known}
        for row, count in self._passed.items():
            names = dict(zip((*KINDS, "python"), row, strict=True))
            rows[row] = {**names, "tokencache": tokencache.__version__, "tests": count, "date": time.strftime("%Y-%m-%d", time.gmtime())}
        written = [rows[row] for row in sorted(rows) if row not in self._failed]
        self._file.write_text(json.dumps({"rows": written}, indent=1) + "\n")
