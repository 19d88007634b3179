"""Engines and proxies as separate processes: killed, frozen, stopped, and started again at the same address.

Tests wait for them by polling, never by a fixed sleep; their output goes to a file that a failed start shows. A `Program` is forked from a
process that has loaded it (`tests.support.forked`), unless a command prefix starts it elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, Self

import tokencache.cli
import tokencache.testing.engine
from tests.ports import free_port
from tests.support.forked import Forked
from tests.support.waiting import PATIENCE, block_until
from tokencache.testing.faults import ROUTE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_OK = 200
_STORE_TOO_SLOW = re.compile(r"tokencache: redis: .*within [\d.]+ s")
"""Why a start ended, as its last line."""


def ask(url: str, body: Any = None, method: str | None = None) -> tuple[int, Any]:
    """Requests JSON; status 0 if there is no answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)  # noqa: S310 - loopback
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:  # noqa: S310
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as why:
        with why:
            raw = why.read()
        return why.code, json.loads(raw) if raw.startswith(b"{") else raw.decode(errors="replace")
    except (OSError, ValueError):
        return 0, None


class Process:
    """One process, in an interpreter of its own if it is a Python program.

    `within` is a command prefix that starts it elsewhere, such as in another network namespace.
    """

    def __init__(self, name: str, command: Sequence[str], folder: Path, *, within: Sequence[str] = ()) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._command = [*within, *command]
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith("TOKENCACHE_")}
        self._running: subprocess.Popen[bytes] | Forked | None = None

    @property
    def alive(self) -> bool:
        return self._running is not None and self._running.poll() is None

    def start(self) -> Self:
        self._running = self._started()
        return self

    def _started(self) -> subprocess.Popen[bytes] | Forked:
        with self.log.open("ab") as log:
            return subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=self._environment)

    @property
    def starts_again(self) -> bool:
        """Whether a supervisor would start it again, now that it has ended."""
        return False

    def signal(self, which: signal.Signals) -> None:
        assert self._running is not None
        self._running.send_signal(which)

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kills it as a crash would; does nothing if it has ended already."""
        if self._running is not None:
            with contextlib.suppress(ProcessLookupError):
                self._running.kill()
            self._running.wait(PATIENCE)
            self._running = None

    def ended(self) -> int:
        """Waits until it has ended by itself; returns its exit code."""
        assert self._running is not None
        return self._running.wait(PATIENCE)

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        """Waits for it to be ready; raises an error at once if it ends, unless a supervisor starts it again."""

        def look() -> Any:
            if not self.alive and self.starts_again:
                self.start()
            if not self.alive:
                raise RuntimeError(f"{self.name} ended: {self.output()[-2000:]}")
            return condition()

        try:
            block_until(look, what)
        except TimeoutError as why:
            raise TimeoutError(f"{self.name}: {why}: {self.output()[-2000:]}") from None


class Program(Process):
    """A function that runs a program with the arguments of its command line."""

    def __init__(self, name: str, main: Callable[[], None], arguments: Sequence[str], folder: Path, *, within: Sequence[str] = ()) -> None:
        code = f"from {main.__module__} import {main.__name__} as main; main()"
        super().__init__(name, [sys.executable, "-c", code, *arguments], folder, within=within)
        self._main, self._arguments, self._elsewhere = main, arguments, bool(within)

    def _started(self) -> subprocess.Popen[bytes] | Forked:
        return super()._started() if self._elsewhere else Forked(self._main, self._arguments, self.log, self._environment)


class Engine(Program):
    """A simulated engine whose log outlives it; several may share the file."""

    def __init__(
        self, name: str, folder: Path, ground_truth: Path, *options: str, host: str = "127.0.0.1", port: int = 0, within: Sequence[str] = ()
    ) -> None:
        self.ground_truth = ground_truth
        self.url = f"http://{host}:{port or free_port(host)}"
        own = ["--host", host, "--port", self.url.rpartition(":")[2], "--journal", str(ground_truth), "--control"]
        super().__init__(name, tokencache.testing.engine.main, [*own, *options], folder, within=within)

    def ready(self) -> Self:
        self.wait(lambda: ask(f"{self.url}/v1/models")[0] == _OK, "an answer")
        return self

    def order_fault(self, words: str, **fault: Any) -> None:
        """Orders a fault for the next request that contains these words."""
        status, answer = ask(self.url + ROUTE, [fault | {"words": words}])
        assert status == _OK, answer

    def faults_happened(self) -> bool:
        """Whether requests have taken all ordered faults."""
        return bool(ask(self.url + ROUTE, [])[1] == {"waiting": 0})

    def clear_faults(self) -> None:
        """Removes the ordered faults that have not happened."""
        ask(self.url + ROUTE, method="DELETE")


class Proxy(Program):
    """One replica: `tokencache serve`."""

    def __init__(self, name: str, folder: Path, *options: str, host: str = "127.0.0.1", port: int = 0, within: Sequence[str] = ()) -> None:
        self.url = f"http://{host}:{port or free_port(host)}"
        own = ["serve", "--host", host, "--port", self.url.rpartition(":")[2]]
        super().__init__(name, tokencache.cli.main, [*own, *options], folder, within=within)

    def ready(self) -> Self:
        self.wait(lambda: ask(f"{self.url}/readyz")[0] == _OK, "its readiness")
        return self

    @property
    def starts_again(self) -> bool:
        """At its start it gives up if the store is slower than `--store-timeout`: a machine that was busy for that long is no fault."""
        return bool(_STORE_TOO_SLOW.match(self.output().rstrip().rpartition("\n")[2]))

    def gauge(self, name: str) -> int | None:
        """The value of a gauge without labels; `None` if it does not answer."""
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE) as answer:  # noqa: S310
            found = re.search(rf"^tokencache_{name} (\d+)", answer.read().decode(), re.MULTILINE)
            assert found is not None
            return int(found[1])
        return None

    def stop(self) -> None:
        """Asks it to finish the calls in progress and end."""
        self.signal(signal.SIGTERM)
