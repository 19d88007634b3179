"""A run always ends, says what hung, and leaves no process behind."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
CONFTEST = """
from tests.conftest import *
from tests.support import limits
limits.GRACE_SECONDS = 2.0
"""
HANGS = """
import asyncio
async def test_passes(): pass
async def test_hangs(): await waits_for_ever()
async def waits_for_ever(): await asyncio.Event().wait()
"""
LEAVES = """
import subprocess
def test_leaves(): subprocess.Popen(["sleep", "4321"])
"""
SKIPS = """
import pytest
@pytest.mark.parametrize("n", range(3))
def test_skips(n): pytest.skip("there is no moon")
@pytest.mark.whole
def test_whole(): pass
"""
FAILS = """
import pytest
def test_fails(): assert 1 + 1 == 3, "sums"
@pytest.mark.parametrize("n", range(3))
def test_skips(n): pytest.skip("there is no moon")
"""
COMBINES = """
import pytest
@pytest.fixture(params="xy")
def letter(request): return request.param
@pytest.mark.parametrize("n", range(3))
@pytest.mark.parametrize("m", [0, pytest.param(1, marks=pytest.mark.whole)])
def test_independent(n, m, letter): print(f"<{n}{letter}>")
@pytest.mark.product
@pytest.mark.parametrize("n", range(3))
def test_dependent(n, letter): pass
"""
COVERS = """
import pytest, usual
def test_one(): usual.one()
@pytest.mark.whole
def test_two(): usual.two()
"""
IN_BACKGROUND = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")
"""A command that starts another one as a shell starts what runs in the background: interrupts are ignored."""


@pytest.fixture
def run(tmp_path):
    """Run pytest on a file with the suite's own conftest; returns its exit code and output."""

    def run(source, *arguments, workers=1, by=()):
        (tmp_path / "conftest.py").write_text(CONFTEST)
        (tmp_path / "test_it.py").write_text(source)
        (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\nfaulthandler_exit_on_timeout = true\n")
        options = ["-q", "-p", "no:cacheprovider", f"-n{workers}", "--dist=worksteal", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTEST_ADDOPTS": ""}
        for name in [name for name in environment if name.startswith(("PYTEST_XDIST", "COV_CORE", "TOKENCACHE_COMPATIBILITY"))]:
            del environment[name]
        command = [*by, sys.executable, "-m", "pytest", *options, "test_it.py"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_test_that_hangs_fails_and_the_others_pass(run):
    code, output = run(HANGS, "-o", "faulthandler_timeout=5")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "test_it.py::test_hangs hangs. Its tasks wait at:" in output
    assert "test_it.py:5 waits_for_ever" in output
    assert "1 failed, 1 passed" in output


@pytest.mark.parametrize("by", [(), pytest.param(IN_BACKGROUND, marks=pytest.mark.whole)], ids=["terminal", "background"])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.whole)])
def test_a_run_ends_at_its_limit(run, workers, by):
    for limit in (3, 30, 300):  # it passes while the test hangs, unless this machine is so busy that the test has not begun
        code, output = run(HANGS, "-o", f"run_limit={limit}", workers=workers, by=by)
        assert code == pytest.ExitCode.INTERRUPTED
        assert f"interrupted: the run took longer than run_limit = {limit} s" in output
        if "test_it.py:5 waits_for_ever" in output:
            return
    pytest.fail(output)


def test_a_process_that_a_test_leaves_is_ended_and_fails_the_run(run):
    code, output = run(LEAVES, workers=0)
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "1 passed" in output
    assert "failed: tests left these processes running" in output
    assert "sleep 4321" in output


def test_the_last_lines_name_what_did_not_run(run):
    code, output = run(SKIPS, "--figures")
    assert code == pytest.ExitCode.OK
    assert "3 skipped: there is no moon" in output
    assert "1 not run" in output


def test_a_failure_is_shown_at_once(run):
    code, output = run(FAILS, "--figures")
    assert code == pytest.ExitCode.TESTS_FAILED
    shown = output.index("\ncall of test_it.py::test_fails failed: AssertionError: sums")
    assert shown < output.index("100%")


def test_whole_folders(run):
    code, output = run(SKIPS, "--whole", "test_it.py", workers=0)
    assert code == pytest.ExitCode.OK
    assert "1 passed, 3 skipped" in output


def test_coverage_is_that_of_the_usual_run(run, tmp_path):
    (tmp_path / "usual.py").write_text("def one():\n    return 1\n\ndef two():\n    return 2\n")
    code, output = run(COVERS, "--whole", "test_it.py", "--cov=usual", "--cov-report=term-missing:skip-covered", workers=0)
    assert code == pytest.ExitCode.OK
    assert "2 passed" in output
    assert re.search(r"usual\.py .* 5$", output, re.MULTILINE), "the line of the test that only repeats is missing"


def test_independent_parameters_occur_once_and_the_whole_run_combines_them(run):
    code, output = run(COMBINES, "-rP", workers=0)
    assert code == pytest.ExitCode.OK
    assert "9 passed, 9 deselected" in output
    assert {mark for mark in ("0x", "0y", "1x", "1y", "2x", "2y") if f"<{mark}>" in output} in ({"0x", "1y", "2x"}, {"0x", "1y", "2y"})
    assert "18 passed" in run(COMBINES, "--whole", "test_it.py", workers=0)[1]
