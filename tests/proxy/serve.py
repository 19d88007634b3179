"""`tokencache serve` as a process of its own, for tests of what happens to processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Served:
    """A process that serves; what it and its workers write to their log is kept."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log = ""
        self._more = asyncio.Condition()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for line in self.process.stderr:
            async with self._more:
                self.log += line.decode()
                self._more.notify_all()
        async with self._more:
            self._more.notify_all()

    async def said(self, pattern: str, times: int = 1) -> list[str]:
        """Wait until the log has something that often; what the pattern's group found."""
        async with asyncio.timeout(PATIENCE), self._more:
            await self._more.wait_for(lambda: len(re.findall(pattern, self.log)) >= times or self._reader.done())
        found = re.findall(pattern, self.log)
        assert len(found) >= times, f"{pattern!r} is not in the log:\n{self.log}"
        return found

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def end(self) -> None:
        """End it, at once: the second time that it is told."""
        try:
            async with asyncio.timeout(PATIENCE):
                while self.process.returncode is None:
                    self.signal(signal.SIGTERM)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self.process.wait(), 0.1)
        finally:
            if self.process.returncode is None:
                self.process.kill()
        await self.ended()

    async def ended(self) -> int:
        """Wait for its end; its exit code."""
        async with asyncio.timeout(PATIENCE):
            await self._reader
            return await self.process.wait()


@contextlib.asynccontextmanager
async def served(*options: str, files: int = 0, **environment: str) -> AsyncIterator[Served]:
    """Run `tokencache serve` with these options while the context is open; `files` is how many it may open."""
    limit = (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))) if files else None
    program = Path(sys.executable).with_name("tokencache")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TOKENCACHE_")}
    process = await asyncio.create_subprocess_exec(
        program, "serve", *options, stderr=asyncio.subprocess.PIPE, env={**kept, **environment}, preexec_fn=limit
    )
    one = Served(process)
    try:
        yield one
    finally:
        await one.end()
