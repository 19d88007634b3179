"""Starts, measures and stops the measured processes (CPU and memory from the kernel's accounts)."""

import contextlib
import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.client import Client

ROOT = Path(__file__).parent.parent
_CHILDREN_SECONDS = 1.0


class Process(NamedTuple):
    """A running server. Its figures include its child processes, which are its workers."""

    name: str
    port: int
    pid: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def family(self) -> list[int]:
        """The process and all its descendants."""
        found = [self.pid]
        for pid in found:
            for listed in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    found += map(int, listed.read_text().split())
        return found

    def cpu(self) -> float:
        """CPU seconds used so far, all threads of the family."""
        return sum(map(cpu_seconds, _family(self)))

    def waited(self) -> float:
        """Seconds that its main threads were ready to run without a core."""
        return sum(map(waited, _family(self)))

    def peak(self) -> int:
        """Peak of resident memory since the start or `forget_peak`, in bytes, children included (shared pages count in each)."""
        peaks = (re.search(r"VmHWM:\s+(\d+)", _read(f"/proc/{pid}/status")) for pid in self.family())
        return sum(int(found[1]) * 1024 for found in peaks if found)

    def forget_peak(self) -> None:
        for pid in self.family():
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")

    def pin(self, cores: set[int]) -> None:
        """Restricts all of its threads to these cores."""
        for pid in self.family():
            for task in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(int(task.name), cores)


_known: dict[int, tuple[float, list[int]]] = {}


def _family(process: Process) -> list[int]:
    """The family, looked up once a second: a measurement of microseconds must not walk /proc."""
    now = time.monotonic()
    seen = _known.get(process.pid)
    if seen is None or now - seen[0] > _CHILDREN_SECONDS:
        seen = _known[process.pid] = (now, process.family())
    return seen[1]


def cpu_seconds(pid: int) -> float:
    """CPU seconds used so far by one process, all threads. Nanoseconds from schedstat if the kernel has it, else ticks."""
    try:
        return sum(int(p.read_text().split()[0]) for p in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
    except (OSError, ValueError, IndexError):
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def waited(pid: int | str) -> float:
    """Seconds that a process's main thread was ready to run without a core; 0 if the kernel does not count them."""
    fields = _read(f"/proc/{pid}/schedstat").split()
    return int(fields[1]) / 1e9 if fields else 0.0


def _read(file: str) -> str:
    """A file of /proc; empty if its process has ended."""
    with contextlib.suppress(OSError):
        return Path(file).read_text()
    return ""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def running(
    name: str,
    command: Callable[[int], Sequence[str]],
    ready: str | None = None,
    *,
    seconds: float = 120.0,
    env: Mapping[str, str] | None = None,
) -> Iterator[Process]:
    """Runs a server while the context is open.

    `command` gets the port to listen on; `ready` is a path that answers 200 when the server can be used (None: a listening socket is
    enough); `seconds`: how long that may take.

    Raises:
        RuntimeError: The server did not start; the message has the end of its log.
    """
    port = free_port()
    with tempfile.NamedTemporaryFile("w", prefix=f"bench-{name}-", suffix=".log", delete=False) as log:
        started = subprocess.Popen(
            command(port), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}
        )
    process = Process(name, port, started.pid, Path(log.name))
    try:
        _await(process, started, ready, seconds)
        yield process
    finally:
        started.terminate()
        try:
            started.wait(10)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
        process.log.unlink(missing_ok=True)


def _await(process: Process, started: "subprocess.Popen[Any]", ready: str | None, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and started.poll() is None:
        with contextlib.suppress(OSError), contextlib.closing(Client(process.port)) as client:
            if ready is None or client.get(ready).status == 200:
                return
        time.sleep(0.01)
    raise RuntimeError(f"{process.name} did not start:\n{process.log.read_text()[-3000:]}")
