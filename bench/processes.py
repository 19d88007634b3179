"""Starts, measures and stops the measured processes (CPU and memory from the kernel's accounts)."""

import contextlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cachetools import TTLCache, cached

from bench.client import get
from tests.ports import free_port

ROOT = Path(__file__).parent.parent


@cached(TTLCache(1_000, 1.0))
def family(pid: int) -> list[int]:
    """A process and all its descendants, looked up once a second: a measurement of microseconds must not walk /proc."""
    found = [pid]
    for one in found:
        for listed in Path(f"/proc/{one}/task").glob("*/children"):
            found += map(int, _read(listed).split())
    return found


class Process(NamedTuple):
    """A running server. Its figures include its child processes, which are its workers."""

    name: str
    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cpu(self) -> float:
        """CPU seconds used so far, all threads of the family."""
        return sum(map(cpu_seconds, family(self.pid)))

    def waited(self) -> float:
        """Seconds that its main threads were ready to run without a core; 0 if the kernel does not count them."""
        return sum(int(one[1]) / 1e9 for pid in family(self.pid) if (one := _read(f"/proc/{pid}/schedstat").split()))

    def peak(self) -> int:
        """Peak of resident memory since the start or `forget_peak`, in bytes, children included (shared pages count in each)."""
        peaks = (re.search(r"VmHWM:\s+(\d+)", _read(f"/proc/{pid}/status")) for pid in family(self.pid))
        return sum(int(found[1]) * 1024 for found in peaks if found)

    def forget_peak(self) -> None:
        for pid in family(self.pid):
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")

    def pin(self, cores: set[int]) -> None:
        """Restricts all of its threads to these cores."""
        for task in (task for pid in family(self.pid) for task in Path(f"/proc/{pid}/task").glob("*")):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(task.name), cores)


def cpu_seconds(pid: int) -> float:
    """CPU seconds used so far by one process, all threads."""
    return sum(int(one[0]) for listed in Path(f"/proc/{pid}/task").glob("*/schedstat") if (one := _read(listed).split())) / 1e9


def _read(file: str | Path) -> str:
    """A file of /proc; empty if its process has ended."""
    with contextlib.suppress(OSError):
        return Path(file).read_text()
    return ""


@contextlib.contextmanager
def running(
    name: str, command: Callable[[int], Sequence[str]], ready: str, *, seconds: float = 120.0, env: Mapping[str, str] | None = None
) -> Iterator[Process]:
    """Runs a server while the context is open. `RuntimeError`: it did not start; the message has the end of its log.

    `command` gets the port to listen on; `ready` is a path that answers 200 when the server can be used; `seconds`: how long that may take.
    """
    port, until = free_port(), time.monotonic() + seconds
    with tempfile.NamedTemporaryFile(prefix=f"bench-{name}-", suffix=".log") as log:
        started = subprocess.Popen(
            command(port), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}
        )
        try:
            while not _answers(port, ready):
                if time.monotonic() > until or started.poll() is not None:
                    raise RuntimeError(f"{name} did not start:\n{Path(log.name).read_text()[-3000:]}")
                time.sleep(0.01)
            yield Process(name, port, started.pid)
        finally:
            started.terminate()
            try:
                started.wait(10)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


def _answers(port: int, path: str) -> bool:
    with contextlib.suppress(OSError):
        return get(port, path).status == 200
    return False
