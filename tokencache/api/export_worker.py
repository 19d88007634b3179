"""Runs large exports and comparisons in a separate process, so that they do not delay calls.

Building the lists of a long session holds Python's interpreter lock throughout, so a thread would compete with the event loop. One worker
process therefore runs large tasks. Small tasks run in a thread, because they take less time than sending them to the process.

The first large task starts the worker. The worker reads tasks from a pipe and exits when the pipe closes, which happens whenever the proxy
exits. It is a fresh interpreter and not a `multiprocessing` worker, because those import the main program's file again and outlive a
proxy that was killed.
"""

import asyncio
import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar

LARGE = 16_384
"""Number of tokens from which a task is large. Exporting fewer takes about 10 ms."""

_LENGTH_BYTES = 8
T = TypeVar("T")


class WorkerDiedError(Exception):
    """The worker process died twice on the same task: it was killed (out of memory?), or cannot be started."""


class ExportWorker:
    """Calls functions: small tasks in threads, large ones one at a time in another process."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._process: _Process | None = None

    async def run(self, tokens: int, work: Callable[..., T], *args: Any) -> T:
        """Call a function. `tokens` is how many it processes; for a large task the function and its arguments are pickled.

        Raises:
            WorkerDiedError: the worker process died twice.
            Exception: whatever the function raises.
        """
        if tokens < LARGE:
            return await asyncio.to_thread(work, *args)
        async with self._lock:
            try:
                return await self._send(work, args)
            except WorkerDiedError:  # something killed it; a new one may survive
                return await self._send(work, args)

    async def close(self) -> None:
        """Stop the worker process."""
        async with self._lock:
            await self._stop()

    async def _send(self, work: Callable[..., T], args: tuple[Any, ...]) -> T:
        if self._process is None:
            self._process = await asyncio.to_thread(_Process)
        call = asyncio.ensure_future(asyncio.to_thread(self._process.call, work, args))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:  # the client has disconnected: stop the task
            self._process.kill()
            await asyncio.gather(call, return_exceptions=True)
            await self._stop()
            raise
        except WorkerDiedError:
            await self._stop()
            raise

    async def _stop(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            await asyncio.to_thread(process.stop)


class _Process:
    """The worker process, seen from the proxy. All methods block, except `kill`."""

    def __init__(self) -> None:
        program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
        self._popen = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603

    def call(self, work: Callable[..., T], args: tuple[Any, ...]) -> T:
        """Call a function in the process. Raises `WorkerDiedError` if the process died."""
        to_process, from_process = self._popen.stdin, self._popen.stdout
        assert to_process is not None and from_process is not None  # noqa: S101, PT018 - both are pipes
        task = pickle.dumps((work, args), pickle.HIGHEST_PROTOCOL)
        try:
            _write(to_process, task)
            succeeded, result = pickle.loads(_read(from_process))  # noqa: S301 - it comes from our own process
        except (OSError, EOFError):
            raise WorkerDiedError("the process for large exports died") from None
        if not succeeded:
            raise result
        return result  # type: ignore[no-any-return]

    def kill(self) -> None:
        self._popen.kill()

    def stop(self) -> None:
        self._popen.kill()
        # Close the pipes and wait. If the process died while a task was written, the rest of the task causes `BrokenPipeError`.
        with contextlib.suppress(BrokenPipeError), self._popen:
            pass


def serve() -> None:
    """Run tasks from standard input until it closes; results go to the original standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the proxy, which lets calls finish
    with os.fdopen(os.dup(0), "rb") as tasks, os.fdopen(os.dup(1), "wb") as results:
        os.dup2(2, 1)  # anything printed goes to standard error
        while True:
            try:
                _write(results, _result_of(_read(tasks)))
            except (EOFError, BrokenPipeError):
                return


def _result_of(task: bytes) -> bytes:
    """Run a task. Returns, pickled, whether it succeeded, and its result or the exception that the proxy raises."""
    try:
        work, args = pickle.loads(task)  # noqa: S301 - it comes from our own proxy
        return pickle.dumps((True, work(*args)), pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001 - the proxy raises it
        failure = error
    try:
        return pickle.dumps((False, failure), pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 - an exception may hold anything
        return pickle.dumps((False, RuntimeError(f"{type(failure).__name__}: {failure}")), pickle.HIGHEST_PROTOCOL)


def _write(pipe: BinaryIO | Any, data: bytes) -> None:
    pipe.write(len(data).to_bytes(_LENGTH_BYTES, "big"))
    pipe.write(data)
    pipe.flush()


def _read(pipe: BinaryIO | Any) -> bytes:
    """Read what `_write` wrote. Raises `EOFError` if the other process is gone."""
    length = pipe.read(_LENGTH_BYTES)
    data: bytes = pipe.read(int.from_bytes(length, "big")) if len(length) == _LENGTH_BYTES else b""
    if not data:
        raise EOFError
    return data
