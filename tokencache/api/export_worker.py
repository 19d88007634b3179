"""The press: large rollouts are laid out in a process of their own, so that live calls need not wait for them.

Building the lists of a long session holds Python's lock for as long as it takes; a thread would only take turns with the
event loop. So the records of a large one go to one worker process, and come back as the bytes of an answer. A small one is
done sooner than it would be sent there.

The worker is started by the first that is large. It reads its work from a pipe, and ends when the pipe does: with the proxy,
however that ends. It is a fresh interpreter and not `multiprocessing`, whose workers run the main program's file again and
outlive a proxy that was killed.
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

import msgspec

from tokencache.core.ids import ID_BYTES
from tokencache.trajectories.formats.registry import FORMATS
from tokencache.trajectories.rollout import Records, rollout

LARGE = 16_384
"""Tokens from which on a rollout is large: to lay out fewer takes some 10 ms."""

_ENCODER = msgspec.json.Encoder()
_LENGTH = 8
T = TypeVar("T")


class WorkerDiedError(Exception):
    """The worker died twice over the same work: it was killed (for its memory?), or cannot be started."""


class Press:
    """Writes rollouts; large ones one at a time, in another process."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._worker: _Worker | None = None

    async def write(self, records: Records, name: str) -> bytes:
        """Write a session's rollout in the format of this name, as JSON.

        Raises:
            WorkerDiedError: the worker died twice, of this rollout it seems.
        """
        tokens = sum(len(own.delta) + len(own.completion) for own in records.tokens.values()) // ID_BYTES
        return await self.run(tokens, write, records, name)

    async def run(self, tokens: int, work: Callable[..., T], *args: Any) -> T:
        """Call a function that takes its time, on so many `tokens`; it and its arguments are pickled if they are many.

        Raises:
            WorkerDiedError: the worker died twice.
            Exception: whatever the function raises.
        """
        if tokens < LARGE:
            return await asyncio.to_thread(work, *args)
        async with self._turn:
            try:
                return await self._send(work, args)
            except WorkerDiedError:  # killed, by whomever; another one may live
                return await self._send(work, args)

    async def close(self) -> None:
        """End the worker."""
        async with self._turn:
            await self._end()

    async def _send(self, work: Callable[..., T], args: tuple[Any, ...]) -> T:
        if self._worker is None:
            self._worker = await asyncio.to_thread(_Worker)
        asked = asyncio.ensure_future(asyncio.to_thread(self._worker.ask, work, args))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:  # who asked has left: nobody will read the answer
            self._worker.kill()
            await asyncio.gather(asked, return_exceptions=True)
            await self._end()
            raise
        except WorkerDiedError:
            await self._end()
            raise

    async def _end(self) -> None:
        if self._worker is not None:
            worker, self._worker = self._worker, None
            await asyncio.to_thread(worker.end)


class _Worker:
    """The worker's process, from this side; its methods block, `kill` does not."""

    def __init__(self) -> None:
        program = f"import sys; sys.path[:] = {sys.path!r}; from tokencache.api.export_worker import serve; serve()"
        self._process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603

    def ask(self, work: Callable[..., T], args: tuple[Any, ...]) -> T:
        """Have work done.

        Raises:
            WorkerDiedError: the worker died over it.
        """
        there, back = self._process.stdin, self._process.stdout
        assert there is not None and back is not None  # noqa: S101, PT018 - both are pipes
        sent = pickle.dumps((work, args), pickle.HIGHEST_PROTOCOL)
        try:
            _write(there, sent)
            done, result = pickle.loads(_read(back))  # noqa: S301 - it comes from our own worker
        except (OSError, EOFError):
            raise WorkerDiedError("the process that lays out large rollouts died") from None
        if not done:
            raise result
        return result  # type: ignore[no-any-return]

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self._process.kill()
        # Closes the pipes and waits; what stands in one still, of work that it died over, cannot be written any more.
        with contextlib.suppress(BrokenPipeError), self._process:
            pass


def serve() -> None:
    """Work off what comes in over standard input until it ends; answers go to what was standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the proxy, which lets calls finish
    with os.fdopen(os.dup(0), "rb") as asked, os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # whatever prints, prints elsewhere
        while True:
            try:
                work, args = pickle.loads(_read(asked))  # noqa: S301 - it comes from our own proxy
            except EOFError:
                return
            try:
                answer = True, work(*args)
            except Exception as why:  # noqa: BLE001 - it is raised over there
                answer = False, why
            try:
                _write(answers, pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))
            except BrokenPipeError:
                return


def _write(pipe: BinaryIO | Any, data: bytes) -> None:
    pipe.write(len(data).to_bytes(_LENGTH, "big"))
    pipe.write(data)
    pipe.flush()


def _read(pipe: BinaryIO | Any) -> bytes:
    """Read what `_write` wrote.

    Raises:
        EOFError: the other side is gone.
    """
    length = pipe.read(_LENGTH)
    data: bytes = pipe.read(int.from_bytes(length, "big")) if len(length) == _LENGTH else b""
    if not data:
        raise EOFError
    return data


def write(records: Records, name: str) -> bytes:
    """Write a session's rollout in the format of this name, as JSON."""
    return _ENCODER.encode(FORMATS[name].write(rollout(records)))
