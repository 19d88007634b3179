"""Runs a harness in a session of its own and returns the rollout in a trainer's format.

The harness is a coroutine function that you write:

    async def play(session: AsyncSession, sample: Mapping[str, Any]) -> float | None:
        agent = await asyncio.create_subprocess_exec("my-agent", sample["task"], env={**os.environ, "OPENAI_API_KEY": session.key, ...})
        await agent.wait()
        return grade(sample)

`session` has the base URL and the key for the harness (`tokencache.client.Session`). The result is the reward. `None` if `play` stored
rewards itself (`session.set_reward`), or if the trainer computes them.
"""

import asyncio
import contextlib
import pkgutil
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from tokencache.batching.selection import Selection
from tokencache.client import AsyncClient, AsyncSession, OutcomeError, Trajectory
from tokencache.core.outcome import OutcomeKind
from tokencache.integrations.rows import RowPolicy, choose_rows
from tokencache.trajectories.lengths import ExportOptions

S = TypeVar("S")
Play: TypeAlias = Callable[[AsyncSession, Mapping[str, Any]], Awaitable[float | None]]
"""Runs the harness for one sample of the data set. Returns the reward."""


def load_play(play: Play | str) -> Play:
    """Return the function itself, or import it by its name, `package.module:function`.

    Raises:
        ValueError: there is no such function.
        TypeError: the name is not that of a function.
    """
    if not isinstance(play, str):
        return play
    try:
        found: Any = pkgutil.resolve_name(play)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"play: cannot import {play!r}: {error}. Write package.module:function") from error
    if not callable(found):
        raise TypeError(f"play: {play!r} is not a function. Write package.module:function")
    chosen: Play = found
    return chosen


async def play_and_finish(
    play: Callable[[AsyncSession, S], Awaitable[float | None]], session: AsyncSession, sample: S, seconds: float = 60.0
) -> None:
    """Run the harness, finish the session with its reward, and wait up to `seconds` for calls that are still in flight.

    If `play` raises, the session is finished as failed and stays on the proxy, and the exception is passed on. If `play` has finished the
    session itself, for example as failed, that stays.

    Raises:
        WaitTimeoutError: a call is still in flight after `seconds`.
        ClientError: the proxy refused a request.
    """
    try:
        reward = await play(session, sample)
    except BaseException as error:
        kind = OutcomeKind.CANCELED if isinstance(error, asyncio.CancelledError) else OutcomeKind.HARNESS
        with contextlib.suppress(OutcomeError):  # `play` said what failed
            await session.finish(failed=kind, detail=f"{type(error).__name__}: {error}")
        raise
    await session.finish(reward)
    await session.wait(timeout=seconds)


class FinishedRollout(NamedTuple):
    """A rollout that is over.

    Attributes:
        trajectory: in the native format.
        export: in the requested format.
        rows: which sequences are trained, and which are not.
        media: the bytes of the images in the rows that are trained, by digest.
    """

    trajectory: Trajectory
    export: dict[str, Any]
    rows: Selection
    media: Mapping[str, bytes]

    @property
    def kept(self) -> set[str]:
        """The ids of the sequences to train."""
        return {row.sequence.id for row in self.rows.kept}

    @property
    def dropped(self) -> list[dict[str, Any]]:
        """The sequences that are not trained: id, number of trainable tokens, and why."""
        return [
            {"sequence": one.row.sequence.id, "trainable_tokens": sum(one.row.sequence.loss_mask), "reason": one.reason}
            for one in self.rows.dropped
        ]


class Rollouts(msgspec.Struct, frozen=True, kw_only=True):
    """How to run rollouts.

    Attributes:
        play: runs the harness.
        rows: which rows of a rollout are trained (`tokencache.integrations.rows`).
        several: whether the trainer accepts several rows for each prompt.
        form: the export format of the trainer.
        harness: name of the harness adapter; `""` for none.
        timeout: seconds to wait for calls that are still in flight when `play` returns.
        images: whether the trainer gets the images of the rows. Otherwise rows with images are refused.
        delete: delete each session from the proxy once its rollout was fetched. If `False`, sessions stay until they expire.
    """

    play: Play
    rows: RowPolicy
    several: bool
    form: str
    harness: str = ""
    timeout: float = 60.0
    images: bool = False
    delete: bool = False

    async def run(
        self,
        client: AsyncClient,
        sample: Mapping[str, Any],
        *,
        sampling: Mapping[str, Any],
        group: str = "",
        lengths: ExportOptions | None = None,
    ) -> FinishedRollout:
        """Create a session, run the harness, finish and seal the session, and return the rollout.

        If `play` raises, the session is finished as failed and stays on the proxy, and the exception is passed on.

        Raises:
            RowsError: the rows do not fit the policy, or have images that the trainer does not get. The session stays on the proxy.
            WaitTimeoutError: a call is still in flight after `timeout`. The session stays on the proxy, unsealed.
            ClientError: the proxy refused a request.
        """
        session = await client.create(harness=self.harness, sampling=sampling, group=group)
        await play_and_finish(self.play, session, sample, self.timeout)
        await session.seal()
        limits = lengths or ExportOptions()
        trajectory = await session.trajectory(drift="off", **limits)
        chosen = choose_rows(trajectory, self.rows, several=self.several, images=self.images)
        wanted = {medium.sha256 for row in chosen.kept for medium in row.sequence.media if medium.sha256}
        finished = FinishedRollout(
            trajectory,
            await session.fetch(self.form, **limits),
            chosen,
            {sha256: await session.medium(sha256) for sha256 in sorted(wanted)},
        )
        if self.delete:
            await session.delete()
        return finished
