"""Serves one port with several processes, for a machine with more than one core.

`tokencache serve --workers N` runs a supervisor that serves no requests. It binds the port, so that no other program does, and starts N
workers. Each is a fresh interpreter that listens on the port with a socket of its own; the kernel distributes the connections. Any worker
can serve any call, because the store holds everything that calls need. A worker that dies is restarted after a delay, which grows with
each death. On SIGTERM or SIGINT the supervisor stops the workers and waits until they have drained.

A worker reads its settings from standard input, then the commands `stop` and `now`. It writes `ready`, or `failed` with the reason, to
standard output, and `alive` every few seconds. A worker that serves is killed and replaced if its event loop stands still for two minutes:
the kernel still gives it connections, whose clients would wait for ever. If a worker's input ends, the supervisor is gone, and the worker
stops too, so that none is left running. It then deletes its metrics files, and the last worker their folder.

The workers do not share one listening socket, because that distributes connections unevenly: of 1,000 connections opened at once, one of
two workers accepted 704, and one of four accepted 489. With a socket each (`SO_REUSEPORT`) two workers accepted 495 and 505. A drawback:
if a worker dies, the connections in its queue are lost like those that it served.
"""

import asyncio
import base64
import contextlib
import logging
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from prometheus_client.multiprocess import mark_process_dead

from tokencache import logs, metrics
from tokencache.backoff import delays
from tokencache.config import Settings
from tokencache.engine.template.local import quieten
from tokencache.server.drain import StopSignal
from tokencache.server.listener import bind
from tokencache.server.serve import run
from tokencache.store.base import StoreError
from tokencache.wakeup import end, wait_for

log = logging.getLogger(__name__)

FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0
"""Seconds before a worker that died is restarted: the first and the longest delay. The delay doubles with each death, and starts again
after a worker has run for `STABLE_SECONDS`."""
STABLE_SECONDS = 60.0
ALIVE_SECONDS = 5.0
"""Seconds between two signs of life of a worker."""
MOST_MISSED = 24
"""Signs of life that may be missing in a row. Steps are counted and not seconds: after a pause of the whole machine none are missing."""
MARGIN = 30.0
"""Seconds that a worker has after its time to drain, to finish its writes to the store."""
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of its own is made there
_MAX_SETTINGS = 16 * 2**20
"""Bytes of the line with the settings."""
_START = """
import sys
sys.path[:] = {path!r}
from prometheus_client import values
values.ValueClass = values.MultiProcessValue(process_identifier=lambda: {number})
from tokencache.server.workers import serve_as_worker
serve_as_worker({number}, {restarted})
"""
"""Program of a worker. Its metrics files are named by its number, not its process id, so that its successor continues the counts. This must
be set before `tokencache.metrics` is imported, which creates the metrics."""


class WorkerError(Exception):
    """The workers cannot start. The message gives the reason."""


async def supervise(settings: Settings) -> None:
    """Serve with several workers until SIGTERM or SIGINT.

    Raises:
        OSError: the address is in use or does not exist, or there is no folder for metrics.
        WorkerError: a worker could not start.
    """
    stop = StopSignal()
    stop.on_signals()
    for sock in bind(settings.host, settings.port):  # fails if the port is in use; with `shared` it would share the port
        sock.close()
    held = bind(settings.host, settings.port, shared=True)  # never listened on: it keeps the port while workers restart
    try:
        settings = settings.model_copy(update={"port": held[0].getsockname()[1]})
        with _metrics_folder() as folder:
            workers = [_Worker(number, settings, folder, stop) for number in range(settings.workers)]
            log.info("%d workers share %s port %d", settings.workers, settings.host or "*", settings.port)
            await _until_one_fails([*(worker.keep_running() for worker in workers), _forward_stop(stop, workers, settings.drain)])
            log.info("all workers have ended")
    finally:
        for sock in held:
            sock.close()


def _metrics_folder() -> "tempfile.TemporaryDirectory[str]":
    """Make a folder for the workers' metrics, in memory if possible. It is deleted with the supervisor."""
    try:
        parent = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
        return tempfile.TemporaryDirectory(prefix="tokencache-", dir=parent, ignore_cleanup_errors=True)
    except OSError as why:
        raise OSError(why.errno, f"workers need a folder for their metrics, in /dev/shm or where TMPDIR says: {why.strerror}") from None


async def _until_one_fails(works: list[Coroutine[Any, Any, None]]) -> None:
    """Run the workers and, as the last item, a helper task. Returns when all workers have ended; raises if one fails."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        *workers, _ = tasks
        await asyncio.gather(*workers)
    finally:
        await end(*tasks)


async def _forward_stop(stop: StopSignal, workers: "list[_Worker]", drain: float) -> None:
    await stop.requested.wait()
    log.info("stopping: calls in progress may finish; waiting for the workers")
    for worker in workers:
        worker.send("stop")
    await wait_for(stop.at_once, drain + MARGIN)
    for worker in workers:
        worker.send("now")
    await asyncio.sleep(MARGIN)
    for worker in workers:
        worker.kill("DOES NOT STOP")


class _Worker:
    """One of the workers: its process, and the processes that replace it."""

    def __init__(self, number: int, settings: Settings, folder: str, stop: StopSignal) -> None:
        self._number, self._settings, self._folder, self._stop = number, settings, folder, stop
        self._process: asyncio.subprocess.Process | None = None
        self._has_served = False

    def send(self, command: str) -> None:
        """Send a command to the current process."""
        if self._process is not None and self._process.returncode is None and self._process.stdin is not None:
            self._process.stdin.write(f"{command}\n".encode())

    def kill(self, why: str) -> None:
        """Kill the current process if it still runs, and log why."""
        if self._process is not None and self._process.returncode is None:
            log.error("WORKER %d %s: it is killed", self._number, why)
            self._process.kill()

    async def keep_running(self) -> None:
        """Run the process, and restart it when it dies, until the supervisor stops.

        Raises:
            WorkerError: the first process ended before it served.
        """
        restarts = delays(FIRST_DELAY, LONGEST_DELAY)
        while not self._stop.requested.is_set():
            began = time.monotonic()
            code, why = await self._run()
            if self._stop.requested.is_set():
                return
            ending = f"signal {-code}" if code < 0 else f"exit code {code}"
            if not self._has_served:
                raise WorkerError(why or f"worker {self._number} ended before it served ({ending}); see its output above")
            if time.monotonic() - began > STABLE_SECONDS:
                restarts = delays(FIRST_DELAY, LONGEST_DELAY)
            delay = next(restarts)
            log.error(
                "WORKER %d DIED (%s)%s: its calls are lost, and marked as lost in their sessions. It is restarted in %g s",
                self._number,
                ending,
                f": {why}" if why else "",
                delay,
            )
            mark_process_dead(self._number, self._folder)  # type: ignore[no-untyped-call]  # drops its gauges
            await wait_for(self._stop.requested, delay)

    async def _run(self) -> tuple[int, str]:
        """Run one process to its end. Returns its exit code, and the reason if it reported a failure."""
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            _START.format(path=sys.path, number=self._number, restarted=self._has_served),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": self._folder},
            start_new_session=True,  # Ctrl-C must reach only the supervisor: a worker would count it as a second signal and stop at once
        )
        try:
            assert process.stdin is not None and process.stdout is not None  # noqa: S101, PT018 - both are pipes
            self.send(base64.b64encode(pickle.dumps(self._settings)).decode())
            if self._stop.requested.is_set():  # the signal arrived while the process started
                self.send("stop")
            why, missed, serves = "", 0, False
            while True:
                try:
                    async with asyncio.timeout(ALIVE_SECONDS):
                        line = await process.stdout.readline()
                except TimeoutError:
                    missed += serves
                    if missed == MOST_MISSED:
                        self.kill(f"HAS HUNG for {MOST_MISSED * ALIVE_SECONDS:g} s")
                    continue
                if not line:
                    return await process.wait(), why
                missed = 0
                word, _, rest = line.decode(errors="replace").strip().partition(" ")
                if word == "ready":
                    self._has_served = serves = True
                    log.info("worker %d serves, process %d", self._number, process.pid)
                why = rest if word == "failed" else why
        finally:
            if process.returncode is None:
                await self._end(process)
            self._process = None

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """End a process because the supervisor fails."""
        self.send("now")
        try:
            async with asyncio.timeout(MARGIN):
                await process.wait()
        except TimeoutError:
            self.kill("DOES NOT STOP")
            await process.wait()


def serve_as_worker(number: int, restarted: bool) -> None:
    """Serve as a worker under a supervisor, maybe in place of a process that died. Runs in the worker's process and ends it."""
    out = os.dup(1)
    os.set_blocking(out, False)
    os.dup2(2, 1)  # standard output is for the supervisor: all other output goes to standard error
    sys.exit(uvloop.run(_serve_worker(out, number, restarted=restarted)))


def _tell(out: int, words: str) -> None:
    """Write a line for the supervisor, unless it has ended because of another worker, or was stopped for hours and reads nothing."""
    with contextlib.suppress(BrokenPipeError, BlockingIOError):
        os.write(out, f"{words}\n".encode())


async def _serve_worker(out: int, number: int, *, restarted: bool) -> int:
    """Serve until the supervisor sends `stop`. Returns the exit code."""
    commands = asyncio.StreamReader(limit=_MAX_SETTINGS)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), os.fdopen(0, "rb", buffering=0))
    settings = pickle.loads(base64.b64decode(await commands.readline()))  # noqa: S301 - it comes from our own supervisor
    logs.set_up(settings.log_level, settings.log_format, several=True)
    if settings.tokenizer is not None:
        quieten()
    if restarted:
        metrics.WORKER_RESTARTS.inc()
    stop = StopSignal()
    obeying, living = asyncio.create_task(_obey(commands, stop)), asyncio.create_task(_show_life(out))
    try:
        await run(settings, stop, shared=True, ready=partial(_tell, out, "ready"))
    except (OSError, StoreError, ValueError) as why:
        _tell(out, f"failed {' '.join(str(why).split())}")
        return 1
    finally:
        if obeying.done():
            _delete_metrics(number)
        obeying.cancel()
        living.cancel()
    return 0


async def _show_life(out: int) -> None:
    """Show the supervisor that the event loop goes on."""
    while True:
        await asyncio.sleep(ALIVE_SECONDS)
        _tell(out, "alive")


def _delete_metrics(number: int) -> None:
    """Delete a worker's metrics in place of the supervisor, which is gone. Other workers may still add to theirs."""
    folder = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
    for file in folder.glob(f"*_{number}.db"):
        file.unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


async def _obey(commands: asyncio.StreamReader, stop: StopSignal) -> None:
    """Follow the supervisor's commands. The end of the input means that the supervisor is gone."""
    while command := (await commands.readline()).strip():
        stop.requested.set()
        if command == b"now":
            stop.at_once.set()
    if not stop.requested.is_set():
        log.error("THE SUPERVISOR IS GONE: this worker stops, too")
        stop.requested.set()
