"""Bulk export: many sessions into one file, in order, a few fetched at a time, and all of it or nothing under the file's name.

Sessions are deleted only once the file is whole and on the disk, and only those that can bring nothing more: sealed before
they were fetched, with no call open. What could not be taken is counted, never passed over in silence.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from pathlib import Path

import msgspec

from tokencache.client import AsyncClient, NotFoundError
from tokencache.commands.files import Sink

AT_ONCE = 4
"""Sessions fetched at a time; so many rollouts are held in memory."""


class FetchedRollout(msgspec.Struct, frozen=True):
    """A rollout as it was fetched; `quiet` says that no call was open before that, `tokens` are those of all its sequences."""

    session: str
    rollout: bytes
    complete: bool
    quiet: bool
    tokens: int


class Export(msgspec.Struct, kw_only=True):
    """What is to be exported, and how far it has come.

    Attributes:
        names: the sessions, in the order in which they are written.
        exact: every one of them was asked for by name: one that is not there is an error.
        drift: which turns' drift is measured first; `""` leaves it to the proxy.
        taken, incomplete, passed: sessions written; of them, incomplete ones; incomplete ones left out (`complete_only`).
        gone: sessions that were deleted by others before they could be fetched.
        deleted, kept: sessions deleted in the end; those that were to be and are not, for a call is still open in them.
        whole: the file is, and has its name.
        partial: where an export that did not come to its end has left what it had.
    """

    names: Sequence[str]
    format: str
    drift: str = ""
    exact: bool = False
    seal: bool = False
    delete: bool = False
    complete_only: bool = False
    taken: list[str] = []
    incomplete: list[str] = []
    passed: list[str] = []
    gone: list[str] = []
    deleted: list[str] = []
    kept: list[str] = []
    tokens: int = 0
    size: int = 0
    whole: bool = False
    partial: Path | None = None

    async def run(self, client: AsyncClient, sink: Sink, step: Callable[[], None]) -> None:
        """Export; `step` is called after each session.

        Raises:
            ClientError: the proxy refuses, or nobody answers.
            FileError: the file cannot hold a rollout.
            OSError: the file cannot be written.
        """
        finished: list[str] = []
        try:
            async with aclosing(self._fetched(client)) as fetched:
                async for name, taken in fetched:
                    if taken is not None and self._write(taken, sink):
                        (finished if taken.quiet else self.kept).append(name)
                    elif taken is None:
                        self.gone.append(name)
                    step()
            sink.finish()
            self.whole = True
        except BaseException:  # interrupted, too
            self.partial = sink.leave()
            raise
        for name in finished if self.delete else ():
            with suppress(NotFoundError):  # somebody else was faster
                await client.session(name).delete()
            self.deleted.append(name)

    def _write(self, taken: FetchedRollout, sink: Sink) -> bool:
        if not taken.complete and self.complete_only:
            self.passed.append(taken.session)
            return False
        sink.write(taken.rollout)
        self.taken.append(taken.session)
        if not taken.complete:
            self.incomplete.append(taken.session)
        self.tokens += taken.tokens
        self.size += len(taken.rollout)
        return True

    async def _fetched(self, client: AsyncClient) -> AsyncGenerator[tuple[str, FetchedRollout | None], None]:
        """Fetch all sessions, some at once, and hand them out in their order; `None` for one that is gone."""
        left: Iterator[str] = iter(self.names)
        running: deque[tuple[str, asyncio.Task[FetchedRollout]]] = deque()
        try:
            while True:
                while len(running) < AT_ONCE and (name := next(left, None)) is not None:
                    running.append((name, asyncio.create_task(self._take(client, name))))
                if not running:
                    return
                name, task = running.popleft()
                try:
                    taken = await task
                except NotFoundError:
                    if self.exact:
                        raise
                    yield name, None
                else:
                    yield name, taken
        finally:
            for _, task in running:
                task.cancel()
            await asyncio.gather(*(task for _, task in running), return_exceptions=True)

    async def _take(self, client: AsyncClient, name: str) -> FetchedRollout:
        session = client.session(name)
        if self.seal or self.delete:
            await session.seal()
        state = await session.state()
        rollout = await session.fetch_json(self.format, drift=self.drift)
        told = msgspec.json.decode(rollout, type=_Told)
        complete = state.complete if told.complete is None else told.complete
        return FetchedRollout(name, rollout, complete, not state.open_calls, told.figures.trainable_tokens + told.figures.masked_tokens)


class _Figures(msgspec.Struct, frozen=True):
    trainable_tokens: int = 0
    masked_tokens: int = 0


class _Told(msgspec.Struct, frozen=True):
    """What most formats say of a rollout; those that do not say it leave it to the session's state."""

    complete: bool | None = None
    figures: _Figures = _Figures()
