"""With `--figures`: what fails, at once; in the last lines what was skipped and why, the slowest tests, and where the time went."""

from collections import Counter
from pathlib import PurePosixPath

import pytest

from tests.support.whole import LEFT_OUT

SLOWEST = 10


class Figures:
    """Sums up a run. `limits` ends it, `whole` chooses its tests."""

    def __init__(self, config):
        self.config = config
        self.seconds = Counter()
        self.skipped = Counter()
        self.left_out = 0

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.duration
        self._count_skipped(report)
        if report.failed:  # a run takes up to an hour
            why = getattr(getattr(report.longrepr, "reprcrash", None), "message", f"{report.longrepr}").partition("\n")[0]
            self.config.get_terminal_writer().line(f"\n{report.when} of {report.nodeid} failed: {why}")

    def pytest_collectreport(self, report):
        self._count_skipped(report)  # a module that is skipped as a whole counts once

    def _count_skipped(self, report):
        if report.skipped and not hasattr(report, "wasxfail"):
            _, _, reason = report.longrepr
            self.skipped[reason.removeprefix("Skipped: ")] += 1

    def pytest_deselected(self, items):
        self.left_out = len(items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.left_out = max(self.left_out, getattr(node, "workeroutput", {}).get(LEFT_OUT, 0))

    def pytest_terminal_summary(self, terminalreporter):
        write = terminalreporter.write_line
        counts = {outcome: len(terminalreporter.stats.get(outcome, ())) for outcome in ("passed", "failed", "error", "skipped")}
        terminalreporter.section(", ".join(f"{outcome} {count}" for outcome, count in counts.items()))
        if self.left_out:
            write(f"{self.left_out:6} not run: they repeat a kind in another combination; `make test-all` runs them")
        for reason, count in self.skipped.most_common():
            write(f"{count:6} skipped: {reason}")
        write(f"the {SLOWEST} slowest tests:")
        for test, seconds in self.seconds.most_common(SLOWEST):
            write(f"{seconds:6.1f} s  {test}")
        write("seconds by folder, summed over the workers:")
        folders = Counter()
        for test, seconds in self.seconds.items():
            folders[folder_of(test)] += seconds
        for folder, seconds in folders.most_common():
            write(f"{seconds:6.0f} s  {folder}")


def folder_of(test):
    """`tests/proxy` for a test in `tests/proxy/kit/test_x.py`; the folders of `tests/system` are told apart."""
    parts = PurePosixPath(test.partition("::")[0]).parent.parts
    return "/".join(parts[: 3 if parts[1:2] == ("system",) else 2])
