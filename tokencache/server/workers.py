"""Workers: several processes that serve one port, for a machine with more than one core.

`tokencache serve --workers N` is then a supervisor that serves nothing itself. It takes the port, so that nobody else does, and starts N
workers, each a fresh interpreter (`server.worker`) that listens there with a socket of its own; the kernel deals connections out. Any
worker serves any call, because all that matters is in the store. One that dies is started again, after a pause that grows
with each death. Told to stop, it tells them, and waits until they have drained.

A worker hears its supervisor over its standard input (its settings, then `stop`, then `now`) and says `ready` over its
standard output. Where that input ends, the supervisor is gone, and the worker stops as if it had been told to: none is left behind.

Not one listening socket that all accept from: of 1,000 connections that came at once one of two workers took 704, of four
workers one took 489; with a socket each (`SO_REUSEPORT`) it were 495 and 505, and a harness keeps its connection. The price: who knocked
at a worker that dies and was not let in yet is cut off like those whom it served.
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
from pathlib import Path
from typing import Any

from prometheus_client.multiprocess import mark_process_dead

from tokencache.backoff import delays
from tokencache.config import Settings
from tokencache.server.drain import Stop
from tokencache.server.listener import bind

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before a worker that died is started again; each is twice the one before, unless it had lived for `WELL` seconds."""
WELL = 60.0
MARGIN = 30.0
"""Seconds that a worker has beyond its time to drain, to write what is owed."""
_SCRATCH = Path("/dev/shm")  # noqa: S108 - a folder of its own is made there


class WorkerError(Exception):
    """The workers cannot be started; the message says why."""


async def supervise(settings: Settings) -> None:
    """Serve with several workers until SIGTERM or SIGINT.

    Raises:
        OSError: the address cannot be listened on, or there is no folder for metrics.
        WorkerError: a worker could not start.
    """
    stop = Stop()
    stop.on_signals()
    for sock in bind(settings.host, settings.port):  # with `shared` alone it would join whoever listens there already
        sock.close()
    held = bind(settings.host, settings.port, shared=True)  # never listened on: it keeps the port while workers come and go
    try:
        settings = settings.model_copy(update={"port": held[0].getsockname()[1]})
        with _scratch() as folder:
            workers = [_Worker(number, settings, folder, stop) for number in range(settings.workers)]
            log.info("%d workers share %s port %d", settings.workers, settings.host or "*", settings.port)
            await _until_one_fails([*(worker.keep() for worker in workers), _pass_on(stop, workers, settings.drain)])
            log.info("all workers have ended")
    finally:
        for sock in held:
            sock.close()


def _scratch() -> "tempfile.TemporaryDirectory[str]":
    """Make a folder for the workers' metrics, in memory where there is such a place; it is gone with the supervisor."""
    try:
        place = _SCRATCH if os.access(_SCRATCH, os.W_OK) else None
        return tempfile.TemporaryDirectory(prefix="tokencache-", dir=place, ignore_cleanup_errors=True)
    except OSError as why:
        raise OSError(why.errno, f"workers need a folder for their metrics, in /dev/shm or where TMPDIR says: {why.strerror}") from None


async def _until_one_fails(works: list[Coroutine[Any, Any, None]]) -> None:
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        *keepers, _ = tasks
        await asyncio.gather(*keepers)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pass_on(stop: Stop, workers: "list[_Worker]", drain: float) -> None:
    await stop.asked.wait()
    log.info("stopping: the workers are told; calls that are under way may finish")
    for worker in workers:
        worker.tell("stop")
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.at_once.wait(), drain + MARGIN)
    for worker in workers:
        worker.tell("now")
    await asyncio.sleep(MARGIN)
    for worker in workers:
        worker.kill()


class _Worker:
    """One worker's place: the process that is there, and the one after it."""

    def __init__(self, number: int, settings: Settings, folder: str, stop: Stop) -> None:
        self._number, self._settings, self._folder, self._stop = number, settings, folder, stop
        self._process: asyncio.subprocess.Process | None = None
        self._has_served = False

    def tell(self, word: str) -> None:
        """Tell the process that is there now."""
        if self._process is not None and self._process.returncode is None and self._process.stdin is not None:
            self._process.stdin.write(f"{word}\n".encode())

    def kill(self) -> None:
        """Kill the process that is there now, if one is: it was told to end, and had its time."""
        if self._process is not None and self._process.returncode is None:
            log.error("WORKER %d DOES NOT END: it is killed", self._number)
            self._process.kill()

    async def keep(self) -> None:
        """Keep a process there until it is told to stop.

        Raises:
            WorkerError: the first one did not come as far as to serve.
        """
        pauses = delays(FIRST_PAUSE, LONGEST_PAUSE)
        while not self._stop.asked.is_set():
            began = time.monotonic()
            code, why = await self._run()
            if self._stop.asked.is_set():
                return
            if not self._has_served:
                raise WorkerError(why or f"worker {self._number} ended before it served ({_said(code)}); what it wrote stands above")
            if time.monotonic() - began > WELL:
                pauses = delays(FIRST_PAUSE, LONGEST_PAUSE)
            pause = next(pauses)
            log.error(
                "WORKER %d DIED (%s)%s: its calls are lost, and marked on their sessions; another one is started in %g s",
                self._number,
                _said(code),
                f": {why}" if why else "",
                pause,
            )
            mark_process_dead(self._number, self._folder)  # type: ignore[no-untyped-call]  # what it had in flight is not
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.asked.wait(), pause)

    async def _run(self) -> tuple[int, str]:
        """Run one process to its end: its exit code, and why it did not serve, if it said so."""
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            f"import sys; sys.path[:] = {sys.path!r}; from tokencache.server.worker import main; main({self._number}, {self._has_served})",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": self._folder},
            start_new_session=True,  # Ctrl-C is for the supervisor: a worker that heard it twice would end at once
        )
        try:
            assert process.stdin is not None and process.stdout is not None  # noqa: S101, PT018 - both are pipes
            self.tell(base64.b64encode(pickle.dumps(self._settings)).decode())
            if self._stop.asked.is_set():  # while it was started
                self.tell("stop")
            why = ""
            async for line in process.stdout:
                word, _, rest = line.decode(errors="replace").strip().partition(" ")
                if word == "ready":
                    self._has_served = True
                    log.info("worker %d serves, process %d", self._number, process.pid)
                why = rest if word == "failed" else why
            return await process.wait(), why
        finally:
            if process.returncode is None:
                await self._end(process)
            self._process = None

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """End a process whose supervisor gives up."""
        self.tell("now")
        try:
            await asyncio.wait_for(process.wait(), MARGIN)
        except TimeoutError:
            self.kill()
            await process.wait()


def _said(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
