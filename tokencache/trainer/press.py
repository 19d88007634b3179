"""The press: large rollouts are laid out in a process of their own, so that live calls need not wait for them.

Building the lists of a long session holds Python's lock for as long as it takes; a thread would only take turns with the
event loop. So the records of a large one go to one worker process, and come back as the bytes of an answer. It is started by
the first that is large and ends with the proxy. A small one is done sooner than it would be sent there.
"""

import asyncio
import contextlib
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import msgspec

from tokencache.core.ids import ID_BYTES
from tokencache.trainer.formats.registry import FORMATS
from tokencache.trainer.rollout import Records, rollout

LARGE = 16_384
"""Tokens from which on a rollout is large: to lay out fewer takes some 10 ms."""

_ENCODER = msgspec.json.Encoder()


class Press:
    """Writes rollouts; large ones one at a time, in another process."""

    def __init__(self) -> None:
        self._workers: ProcessPoolExecutor | None = None

    async def write(self, records: Records, name: str) -> bytes:
        """Write a session's rollout in the format of this name, as JSON.

        Raises:
            BrokenProcessPool: the worker died twice, of the same rollout it seems.
        """
        if sum(len(own.delta) + len(own.completion) for own in records.tokens.values()) < LARGE * ID_BYTES:
            return await asyncio.to_thread(write, records, name)
        with contextlib.suppress(BrokenProcessPool):  # killed, by whomever; another one may live
            return await self._send(records, name)
        await self.close()
        return await self._send(records, name)

    async def close(self) -> None:
        """End the worker."""
        if self._workers is not None:
            workers, self._workers = self._workers, None
            await asyncio.to_thread(workers.shutdown, cancel_futures=True)

    async def _send(self, records: Records, name: str) -> bytes:
        if self._workers is None:
            self._workers = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        return await asyncio.get_running_loop().run_in_executor(self._workers, write, records, name)


def write(records: Records, name: str) -> bytes:
    """Write a session's rollout in the format of this name, as JSON."""
    return _ENCODER.encode(FORMATS[name].write(rollout(records)))
