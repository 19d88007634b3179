"""Runs the tests on mutants: small faults in the code, made one by one in a copy of it.

    python -m tests.mutants                            all mutants of `mutants.toml`; fails if one is not found
    python -m tests.mutants --near                     the same, but only with the files of the tests that are known to find them
    python -m tests.mutants --only NAME NAME           some of them
    python -m tests.mutants --list                     which tests find which mutant
    python -m tests.mutants --all-finders NAME         all tests of its package that find a mutant
    python -m tests.mutants --tests-from REVISION      in the code and with the tests of another commit

The copy has the files of a commit (`HEAD`), so commit what you want to test. For each mutant, the tests that found it before run first
(`tests` in the list; `--write` writes them there). If they pass, the files of these tests run, then the tests of the package, then all.
At the end, all tests that failed run in a copy without a fault: one that fails there too proves nothing.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple
from xml.etree import ElementTree as ET

from tests.mutants.mutants import FILE, Mutant, exists, read

ROOT = Path(__file__).parents[2]
REPORT, LOG = "report.xml", "pytest.log"
OPTIONS = ["-p", "no:cacheprovider", "--ignore=tests/mutants", f"--junitxml={REPORT}", "-o", "junit_family=xunit1"]
LIMIT, LIMIT_OF_ALL = 900.0, 5400.0
"""Seconds for one run of pytest, and for a run of all tests."""
RUNNING = set[int]()
"""The process groups of the runs of pytest."""


class Result(NamedTuple):
    """What became of a mutant.

    Attributes:
        mutant: the mutant.
        outcome: `found`, `survived`, `timed out`, `crashed` (no test failed, but pytest ended early), `flaky` (tests failed, and passed
            when they ran again, so the machine may be the cause), or `outdated` (the code has changed).
        tests: the tests that failed.
        seconds: how long the tests ran.
    """

    mutant: Mutant
    outcome: str
    tests: Sequence[str] = ()
    seconds: float = 0.0


class Tree:
    """A copy of the files of a commit, in which one mutant at a time is tested."""

    def __init__(self, revision: str, folder: Path) -> None:
        self._folder = folder
        self._python = folder / ".venv/bin/python"
        # The path is also that of the processes that tests start. A test that waits in vain for a mutant does so for seconds only.
        self._environment = {"TOKENCACHE_TEST_PATIENCE": "30", **os.environ, "PYTHONPATH": str(folder)}
        folder.mkdir()
        archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "x"], cwd=folder, input=archive, check=True)
        (folder / ".venv").symlink_to(ROOT / ".venv")
        asked = [self._python, "-c", "import tokencache; print(tokencache.__file__)"]
        answer = subprocess.run(asked, cwd="/", env=self._environment, check=True, capture_output=True, text=True).stdout
        if not Path(answer).is_relative_to(folder):
            sys.exit(f"the tests would not use the copy, but {answer}")

    def test(self, mutant: Mutant, stages: Sequence[Sequence[str]], *options: str) -> Result:
        """Run one stage of tests after the other on a mutant, until a test fails."""
        started, path = time.monotonic(), self._folder / mutant.path
        source = path.read_text() if path.exists() else ""
        mutated = mutant.applied(source)
        if mutated is None:
            return Result(mutant, "outdated")
        outcome, failed = "survived", list[str]()
        _write(path, mutated)
        try:
            for stage in stages:
                outcome, failed = self._find(stage, options)
                if outcome != "survived":
                    break
        finally:
            _write(path, source)
        return Result(mutant, outcome, failed, time.monotonic() - started)

    def _find(self, tests: Sequence[str], options: Sequence[str]) -> tuple[str, list[str]]:
        there = [test for test in tests if exists(test, self._folder)]
        if tests and not there:
            return "survived", []
        for _ in range(2):
            code, failed = self.run([*options, *there])
            if failed and (again := self.run(failed)[1]):
                return "found", again
            if code == 0:
                return "survived", []
            if not failed:
                break
        else:
            return "flaky", []
        if code is None:
            return "timed out", []
        print((self._folder / LOG).read_text(errors="replace")[-2000:], file=sys.stderr)
        return "crashed", []

    def run(self, arguments: Sequence[str]) -> tuple[int | None, list[str]]:
        """Run pytest. Returns its exit code (`None` after the time limit), and the ids of the tests that failed."""
        all_tests = all(argument.startswith("-") for argument in arguments)
        workers = ["--numprocesses=auto", "--maxprocesses=8", "--dist=worksteal"] if all_tests else ["--numprocesses=0"]
        command = [self._python, "-m", "pytest", *OPTIONS, *workers, *arguments]
        report = self._folder / REPORT
        report.unlink(missing_ok=True)
        with (
            (self._folder / LOG).open("wb") as log,
            subprocess.Popen(
                command, cwd=self._folder, env=self._environment, start_new_session=True, stdout=log, stderr=subprocess.STDOUT
            ) as pytest,
        ):
            RUNNING.add(pytest.pid)
            try:
                pytest.wait(LIMIT_OF_ALL if all_tests else LIMIT)
            except subprocess.TimeoutExpired:
                os.killpg(pytest.pid, signal.SIGKILL)
                return None, []
            finally:
                RUNNING.discard(pytest.pid)
        return pytest.returncode, _failed(report) if report.exists() else []


def _failed(report: Path) -> list[str]:
    """Return the ids of the tests that failed. A file that cannot be imported is none: then the mutant is no good one."""
    cases = ET.parse(report).iter("testcase")  # noqa: S314 - pytest wrote it
    failed = [case for case in cases if {"failure", "error"} & {outcome.tag for outcome in case}]
    return [f"{case.get('file')}::{case.get('name')}" for case in failed if case.get("file")]


def _write(path: Path, source: str) -> None:
    path.write_text(source)
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):  # it may have the same time and size
        compiled.unlink()


def _stages(mutant: Mutant, *, near: bool) -> list[list[str]]:
    """Return the tests to run on a mutant, from the likely ones to all (`[]`); with `near` only the likely ones."""
    files = list(dict.fromkeys(test.partition("::")[0] for test in mutant.tests))
    return [*([mutant.tests] if mutant.tests != files else []), files, *([] if near else [[mutant.folder], []])]


def _test_all(mutants: Sequence[Mutant], trees: Sequence[Tree], *, near: bool) -> Iterator[Result]:
    free = SimpleQueue[Tree]()
    for tree in trees:
        free.put(tree)

    def test(mutant: Mutant) -> Result:
        tree = free.get()
        try:
            return tree.test(mutant, _stages(mutant, near=near), "-x")
        finally:
            free.put(tree)

    with ThreadPoolExecutor(len(trees)) as pool:
        yield from pool.map(test, mutants)


def _proven(result: Result, clean: set[str]) -> Result:
    """Return a result without the tests that fail without a fault, too."""
    tests = [test for test in result.tests if test not in clean]
    return result._replace(tests=tests, outcome="survived" if result.tests and not tests else result.outcome)


def _write_tests(results: Sequence[Result]) -> None:
    """Write the tests that found mutants into the list."""
    text = FILE.read_text()
    for result in results:
        if result.outcome == "found":
            tests = ", ".join(f'"{test}"' for test in dict.fromkeys(test.partition("[")[0] for test in result.tests))
            text = re.sub(rf'(^name = "{result.mutant.name}"$.*?^tests = )\[.*?\]$', rf"\1[{tests}]", text, flags=re.DOTALL | re.MULTILINE)
    FILE.write_text(text)


def _table(results: Sequence[Result]) -> str:
    lines = ["| mutant | file | what would be lost | found by |", "|---|---|---|---|"]
    for result in results:
        by = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in result.tests) or f"**{result.outcome}**"
        lines.append(f"| {result.mutant.name} | `{result.mutant.file}` | {result.mutant.lost} | {by} |")
    return "\n".join(lines)


def _run(mutants: Sequence[Mutant], revision: str, folder: Path, *, jobs: int, near: bool) -> list[Result]:
    results = []
    for result in _test_all(mutants, [Tree(revision, folder / f"{job}") for job in range(jobs)], near=near):
        results.append(result)
        print(f"{result.mutant.name}: {result.outcome} ({result.seconds:.0f} s) {' '.join(result.tests)}", file=sys.stderr, flush=True)
    found = sorted({test for result in results for test in result.tests})
    code, clean = Tree(revision, folder / "clean").run(found) if found else (0, [])
    if code not in {0, 1}:
        sys.exit(f"the tests that failed do not run without a fault: pytest ends with {code}")
    return [_proven(result, set(clean)) for result in results]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--near", action="store_true", help="run only the tests that are known to find a mutant, and those of their files")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="test only these")
    parser.add_argument("--jobs", type=int, default=1, help="number of mutants that are tested at once")
    parser.add_argument("--list", action="store_true", help="print which tests find which mutant, and test none")
    parser.add_argument("--all-finders", metavar="NAME", help="print all tests of a mutant's package that find it")
    parser.add_argument("--tests-from", metavar="REVISION", default="HEAD", help="the commit with the code and the tests")
    parser.add_argument("--write", action="store_true", help="write the tests that found mutants into the list")
    options = parser.parse_args()

    listed = {mutant.name: mutant for mutant in read()}
    if unknown := {*options.only, *filter(None, [options.all_finders])} - listed.keys():
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    if options.list:
        print(_table([Result(mutant, "not tested", mutant.tests) for mutant in listed.values()]))
        return 0
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))

    def stop(*_: object) -> None:
        for group in list(RUNNING):
            os.killpg(group, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    try:
        if options.all_finders:
            mutant = listed[options.all_finders]
            results = [Tree(options.tests_from, folder / "0").test(mutant, [[mutant.folder]])]
        else:
            mutants = [listed[name] for name in options.only or listed]
            results = _run(mutants, options.tests_from, folder, jobs=options.jobs, near=options.near)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.write:
        _write_tests(results)
    print(_table(results))
    found = sum(result.outcome == "found" for result in results)
    print(f"\n{found} of {len(results)} mutants were found by the tests of {options.tests_from}.")
    return int(found < len(results))


if __name__ == "__main__":
    sys.exit(main())
