"""Ends a run that hangs: a limit for each test, one for the whole run, and a report of what hung.

A test that hangs for `faulthandler_timeout` seconds ends its worker (pytest does that); xdist reports the test as failed and
starts another worker. A run that takes longer than `run_limit` seconds is interrupted, with an exit code that is not 0. Before either, each
process prints the test that it runs and what its tasks wait for. Processes that tests left running are ended and fail the run.
"""

import asyncio
import contextlib
import gc
import inspect
import math
import os
import signal
import threading
import time
import uuid
from pathlib import Path

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

RUN_MARK = "TOKENCACHE_TEST_RUN"
"""An environment variable that the workers and all processes which tests start inherit. It names the run."""
SUMMARY_SECONDS = 60.0
"""How long a run that is interrupted has to end its workers and to print its summary."""
AGAIN_SECONDS = 5.0
"""Seconds between two interrupts of a run that goes on."""
GRACE_SECONDS = 10.0
"""How long the processes that tests started have to end after the last test."""
EXECVE_SECONDS = 1.0
"""How long a process may take to become another program."""


class Limits:
    """The limits of one process: the run's own, or a worker's."""

    def __init__(self, config):
        self.config = config
        self.is_worker = hasattr(config, "workerinput")
        self.ends_at = config.workerinput["run_ends_at"] if self.is_worker else time.monotonic() + float(config.getini("run_limit"))
        self.exceeded = self.interrupted = False
        self.left_over = []
        if not self.is_worker:
            self.run = os.environ[RUN_MARK] = uuid.uuid4().hex

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        node.workerinput["run_ends_at"] = self.ends_at

    def pytest_sessionstart(self):
        if not self.is_worker:
            if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell does that for what it starts in the background
                signal.signal(signal.SIGINT, signal.default_int_handler)
            _later(self.ends_at - time.monotonic() + 1, self._end_run)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        limit = float(item.config.getini("faulthandler_timeout")) or math.inf
        seconds = min(0.95 * limit, self.ends_at - time.monotonic())
        timer = _later(seconds, _print_tasks, item.nodeid, item.config.stash[fault_handler_stderr_fd_key])
        try:
            return (yield)
        finally:
            timer.cancel()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        if not self.is_worker:
            self.left_over = end_processes(self.run)
            if self.left_over and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        if self.exceeded:
            terminalreporter.section(f"interrupted: the run took longer than run_limit = {self.config.getini('run_limit')} s", red=True)
        if self.left_over:
            terminalreporter.section("failed: tests left these processes running", red=True)
            for command in self.left_over:
                terminalreporter.write_line(command)

    def pytest_keyboard_interrupt(self):
        self.interrupted = True

    def _end_run(self):
        self.exceeded = True
        _later(SUMMARY_SECONDS, self._end)
        self._interrupt()

    def _interrupt(self):
        """Interrupt the run, and again if it goes on: code that handles any exception may have swallowed the interrupt."""
        if not self.interrupted:
            os.kill(os.getpid(), signal.SIGINT)
            _later(AGAIN_SECONDS, self._interrupt)

    def _end(self):
        """The last resort: this process does not react to an interrupt."""
        end_processes(self.run, grace=0.0)
        os._exit(pytest.ExitCode.INTERRUPTED)


def _later(seconds, function, *arguments):
    timer = threading.Timer(max(seconds, 0.0), function, arguments)
    timer.daemon = True
    timer.start()
    return timer


def end_processes(run, grace=GRACE_SECONDS):
    """Kill what the workers of a run started and what does not end by itself; returns the command lines."""
    deadline = time.monotonic() + grace
    while (found := _processes(run)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return list(found.values())


def _processes(run):
    mark = f"{RUN_MARK}={run}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or belongs to another user
            if mark in _environment(folder).split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def _environment(process):
    """What a process was started with. It is empty for a moment while the process becomes another program (Linux, `execve`)."""
    until = time.monotonic() + EXECVE_SECONDS
    while not (found := (process / "environ").read_bytes()) and (process / "exe").exists() and time.monotonic() < until:
        time.sleep(0.001)
    return found


def _print_tasks(test, terminal):
    lines = [f"{test} hangs. Its tasks wait at:"]
    tasks = [thing for thing in gc.get_objects() if issubclass(type(thing), asyncio.Task)]  # `asyncio.all_tasks` needs a running loop
    for task in (task for task in tasks if not task.done()):
        lines += [f"  {task.get_name()}:", *(f"    {place}" for place in _waits(task.get_coro()))]
    os.write(terminal, "\n".join([*lines, ""]).encode())


def _waits(awaited):
    """The places of a coroutine and of what it awaits, outermost first."""
    while awaited is not None:
        if inspect.isasyncgen(held := next(iter(gc.get_referents(awaited)), None)):  # a step of it, which has no frame of its own
            awaited = held
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None) or getattr(awaited, "gi_frame", None)
        yield f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}" if frame else repr(awaited)
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None) or getattr(awaited, "gi_yieldfrom", None)
