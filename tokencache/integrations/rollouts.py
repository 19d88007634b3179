"""Plays rollouts, each in a session of its own, and goes on when some of them fail.

The harness is a coroutine function that you write:

    async def play(session: AsyncSession, sample: Mapping[str, Any]) -> float | None:
        agent = await asyncio.create_subprocess_exec("my-agent", sample["task"], env={**os.environ, "OPENAI_API_KEY": session.key, ...})
        await agent.wait()
        return grade(sample)

`session` has the base URL and the key for the harness (`tokencache.client.Session`). The result is the reward. `None` if `play` stored
rewards itself (`session.set_reward`), or if the trainer computes them.

A rollout that fails becomes a `FailedRollout`: its harness raised, the proxy says that it is not valid (`docs/lifecycle.md`), or the proxy
was not reached. What is wrong with the setup raises instead: settings that the proxy refuses, or rows that the trainer cannot take.
"""

import asyncio
import contextlib
import logging
import pkgutil
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec

from tokencache.client import (
    AsyncClient,
    AsyncSession,
    ClientError,
    InvalidUrlError,
    NoRoomError,
    OutcomeError,
    RefusedError,
    TooManyReadyError,
    Trajectory,
    UnauthorizedError,
    WaitTimeoutError,
    WrongServerError,
)
from tokencache.client.access import Access
from tokencache.client.operations import SessionOptions
from tokencache.client.protocol import Steps
from tokencache.client.session_operations import finish, listed
from tokencache.client.transport import awaited, blocking
from tokencache.core.outcome import OutcomeKind
from tokencache.core.strict_json import replace_surrogates
from tokencache.integrations.rows import NothingToTrainError
from tokencache.trajectories.reports import GROUP_SIZE, RETRY_OF, tag_of
from tokencache.trajectories.values import SessionState

log = logging.getLogger(__name__)

S = TypeVar("S")
T = TypeVar("T")
Play: TypeAlias = Callable[[AsyncSession, S], Awaitable[float | None]]
"""Runs the harness for one sample of the data set. Returns the reward."""

NO_PROXY, INCOMPLETE, UNTRAINABLE = "proxy", "incomplete", "untrainable"
"""Kinds of failures beside the outcomes of sessions: the proxy failed; turns are missing; nothing was sampled that may be trained."""
_WRONG_SETUP = (InvalidUrlError, WrongServerError, RefusedError, UnauthorizedError, TooManyReadyError, NoRoomError)


class FailedRollout(NamedTuple):
    """A rollout that nobody may train.

    Attributes:
        session: its name; `""` if none was created.
        kind: the outcome of the session, or `proxy`, `incomplete` or `untrainable`.
        detail: what happened, in words.
    """

    session: str
    kind: str
    detail: str

    def __str__(self) -> str:
        return f"session {self.session or 'none'}: {self.detail}"


class FailedRolloutError(RuntimeError):
    """A rollout failed, after its retries. Raised to frameworks that leave out a rollout which raises: verl, and TRL with OpenEnv."""


class TooManyFailuresError(RuntimeError):
    """More rollouts of a step failed than may. The message counts them by kind, with the newest of each.

    Attributes:
        failures: the failed rollouts.
    """

    def __init__(self, failures: Sequence[FailedRollout], rollouts: int, allowed: int) -> None:
        counted = Counter(one.kind for one in failures).most_common()
        newest = {one.kind: one for one in failures}
        kinds = "; ".join(f"{kind} {count} ({newest[kind]})" for kind, count in counted)
        super().__init__(f"{len(failures)} of {rollouts} rollouts failed, and {allowed} may (max_failures): {kinds}")
        self.failures = list(failures)


def new_run() -> str:
    """Return an id for a run that has none."""
    return secrets.token_hex(4)


def load_play(play: Play[Any] | str) -> Play[Any]:
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
    chosen: Play[Any] = found
    return chosen


class Rollouts(msgspec.Struct, Generic[S, T], frozen=True, kw_only=True):
    """How to play rollouts.

    Attributes:
        play: runs the harness.
        read: makes what the trainer gets of a valid rollout, from its sealed session and its trajectory.
        run: the id of the run. It begins the name of each group, and each session has the tag `run:ID`.
        options: options of `AsyncClient.create`, for all sessions.
        timeout: seconds to wait for calls that are still in flight when `play` returns.
        delete: delete each session from the proxy once its rollout was read. Failed ones stay. If `False`, all stay until they expire.
        retries: how often a rollout that failed is played again, in a new session whose metadata names the one before as `retry_of`.
        concurrency: how many rollouts are played at the same time.
        max_failures: how many rollouts of a step may fail, after their retries; `None`: all but one.
    """

    play: Play[S]
    read: Callable[[AsyncSession, Trajectory], Awaitable[T]]
    run: str
    options: SessionOptions = msgspec.field(default_factory=SessionOptions)
    timeout: float = 60.0
    delete: bool = False
    retries: int = 0
    concurrency: int = 64
    max_failures: int | None = None

    async def step(
        self, client: AsyncClient, samples: Sequence[tuple[str, S]], sampling: Mapping[str, Any], *, size: int = 0
    ) -> list[T | FailedRollout]:
        """Play the samples of a step, given as pairs of a group and a sample. Returns the rollouts in the same order.

        A failed rollout ends neither the step nor the other rollouts. `size` is how many rollouts each group has, if others may be played
        elsewhere; 0: those of the samples.

        Raises:
            TooManyFailuresError: more than `max_failures` failed. Rollouts that are still played are cancelled.
            ExceptionGroup: of errors as `one` raises them.
        """
        allowed = len(samples) - 1 if self.max_failures is None else self.max_failures
        failures: list[FailedRollout] = []
        places, sizes = asyncio.Semaphore(self.concurrency), Counter(group for group, _ in samples)

        async def play(group: str, sample: S) -> T | FailedRollout:
            async with places:
                done = await self.one(client, sample, group=group, sampling=sampling, size=size or sizes[group])
            if isinstance(done, FailedRollout):
                failures.append(done)
                if len(failures) > allowed:
                    raise TooManyFailuresError(failures, len(samples), allowed)
            return done

        try:
            async with asyncio.TaskGroup() as running:
                tasks = [running.create_task(play(group, sample)) for group, sample in samples]
        except ExceptionGroup as errors:
            too_many = [error for error in errors.exceptions if isinstance(error, TooManyFailuresError)]
            raise (too_many[-1] if too_many else errors) from None
        return [task.result() for task in tasks]

    async def one(self, client: AsyncClient, sample: S, *, group: str, sampling: Mapping[str, Any], size: int = 0) -> T | FailedRollout:
        """Play one rollout: create a session, run the harness, finish and seal the session, and read it. Again if it fails.

        If the task is cancelled, the session is finished as `canceled`. `size` is how many rollouts the group has, if that is known.

        Raises:
            RowsError: the rows do not fit the policy, or have images that the trainer does not get. The session stays on the proxy.
            ClientError: the setup is wrong, such as the settings of the session, or the proxy's key.
        """
        options: SessionOptions = {
            **self.options,
            "sampling": {**sampling, **self.options.get("sampling", {})},
            "group": f"{self.run}-{group}",
            "tags": [*listed(self.options.get("tags", ())), tag_of(self.run)],
            "metadata": {**({GROUP_SIZE: size} if size else {}), **self.options.get("metadata", {})},
        }
        for left in range(self.retries, -1, -1):
            done = await self._attempt(client, sample, options)
            if not isinstance(done, FailedRollout):
                return done
            again = bool(left) and done.kind != UNTRAINABLE
            log.warning("the rollout failed%s: %s: %s", ", and is played again" if again else "", done.kind, done)
            if not again:
                break
            options["metadata"] = {**options["metadata"], RETRY_OF: done.session}
        return done

    async def _attempt(self, client: AsyncClient, sample: S, options: SessionOptions) -> T | FailedRollout:
        session = None
        try:
            session = await client.create(**options)
            return await self._played(session, sample)
        except _WRONG_SETUP:
            raise
        except ClientError as error:
            return FailedRollout(session.id if session else "", NO_PROXY, str(error))
        except asyncio.CancelledError:
            if session is not None:
                with contextlib.suppress(ClientError):  # its outcome is known, or nothing can be told
                    await session.finish(failed=OutcomeKind.CANCELED, detail="the trainer cancelled the rollout before it was read")
            raise

    async def _played(self, session: AsyncSession, sample: S) -> T | FailedRollout:
        try:
            reward = await self.play(session, sample)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # the trainer cancels, and not the harness
            return await _failed(session, OutcomeKind.HARNESS, f"{type(error).__name__}: {error}")
        try:
            await session.finish(reward)
        except (RefusedError, TypeError, ValueError) as error:
            return await _failed(session, OutcomeKind.HARNESS, f"its reward was refused: {error}")
        try:
            await session.wait(timeout=self.timeout)
        except WaitTimeoutError as error:
            return await _failed(session, OutcomeKind.TIMEOUT, str(error))
        await session.seal()
        trajectory = await session.trajectory(drift="off")
        if not trajectory.valid:
            failed = trajectory.outcome != OutcomeKind.OK
            holes = ", ".join(sorted({incident.kind for incident in trajectory.incidents if incident.hole}))
            return FailedRollout(session.id, trajectory.outcome if failed else INCOMPLETE, trajectory.outcome_detail if failed else holes)
        try:
            done = await self.read(session, trajectory)
        except NothingToTrainError as error:
            return FailedRollout(session.id, UNTRAINABLE, str(error))
        if self.delete:
            await delete_read(session)
        return done


async def delete_read(session: AsyncSession) -> None:
    """Delete the session of a rollout that was read. If that fails, the session expires as all do, and the rollout is good all the same."""
    try:
        await session.delete()
    except ClientError as error:
        log.warning("session %r was read, and is not deleted: %s", session.id, error)


def scored(
    session: Access,
    reward: float | None,
    *,
    failed: str | None,
    detail: str,
    components: Mapping[str, float] | None = None,
    group: str = "",
    metadata: Mapping[str, Any] | None = None,
) -> Steps[SessionState]:
    """Finish the session of a rollout that a framework has scored. An outcome that it has already stays: a deadline passed before.

    If a score is refused, such as one that is not finite, the rollout has failed (`verifier`). Arguments and other errors are those of
    `Session.finish`.
    """
    try:
        return (yield from finish(session, reward, components=components, group=group, metadata=metadata, failed=failed, detail=detail))
    except OutcomeError:
        return (yield from finish(session, reward, components=components, group=group, metadata=metadata))
    except (RefusedError, TypeError, ValueError) as error:
        if reward is None and not components:
            raise
        failed, detail = failed or "verifier", detail or f"its reward was refused: {error}"
    return (yield from scored(session, None, failed=failed, detail=detail, group=group, metadata=metadata))


finish_scored, finish_scored_blocking = awaited(scored), blocking(scored)


async def _failed(session: AsyncSession, kind: OutcomeKind, detail: str) -> FailedRollout:
    """Finish a session as failed. If `play` has said what failed, that stays. It stays on the proxy, unsealed."""
    try:
        await session.finish(failed=kind, detail=detail)
    except OutcomeError:
        state = await session.state()
        return FailedRollout(session.id, state.outcome, state.outcome_detail)
    except ClientError as error:
        log.warning("session %r: its outcome is not stored: %s", session.id, error)
    return FailedRollout(session.id, kind.value, replace_surrogates(detail))
