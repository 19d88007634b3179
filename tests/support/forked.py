"""Runs programs in processes that are forked from one that has loaded them: a new interpreter would import for a second each time.

`tests.support.preloaded` is what that process loads. It starts with the first program of a test process, and ends after its last test.
"""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.support.preloaded"])


class Forked:
    """A process that runs `main` with these arguments, as `subprocess.Popen` would in an interpreter of its own; `log` gets its output."""

    def __init__(self, main: Callable[[], None], arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self._process = _SERVER.Process(target=_run, args=(main, list(arguments), str(log), dict(environment)), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, which: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, which)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, seconds: float) -> int:
        self._process.join(seconds)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(str(self._process), seconds)
        return code


def stop() -> None:
    """End the process that the programs are forked from, if there is one, and not the programs: one that is left fails the run."""
    server = multiprocessing.forkserver._forkserver
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
    server._stop()
    multiprocessing.resource_tracker._resource_tracker._stop()


def _run(main: Callable[[], None], arguments: list[str], log: str, environment: dict[str, str]) -> None:
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [main.__module__, *arguments]
    main()
