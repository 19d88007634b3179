"""Sends operations to Redis within a time limit, retries them where that is safe, and stops sending while the server does not respond.

A server can fail in three ways:

* It refuses, or no connection can be made. Nothing was done, so the operation is retried with growing delays until its time is over. If
  the server restarts or a replica takes over within that time, callers notice only a delay.
* Its reply is lost. It is unknown whether the operation was done, so only operations that may be done twice are sent again.
* It does not respond. Further operations fail at once, and a probe detects when the server responds again. So a frozen server does not
  cost every call its whole time limit.

An operation's time starts when it gets a connection. If thousands start at once, they queue for the connections in order. That wait does
not count, because it does not show that the server is slow.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NoReturn, TypeVar

from redis import exceptions

from tokencache.backoff import delays
from tokencache.store.base import StoreError
from tokencache.store.redis.answers import WrongAnswerError
from tokencache.store.redis.connections import MAX_CONNECTIONS, Backend
from tokencache.store.redis.shared import ConnectFailedError
from tokencache.store.redis.timeouts import Limit, LoopTimeouts
from tokencache.wakeup import end

T = TypeVar("T")

FIRST_DELAY, LONGEST_RETRY_DELAY, LONGEST_PROBE_DELAY = 0.01, 0.25, 5.0
_REFUSALS = (
    ConnectFailedError,
    exceptions.BusyLoadingError,
    exceptions.ReadOnlyError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
    exceptions.MaxConnectionsError,
    exceptions.RedisClusterException,
)
_REFUSAL_CODES = ("READONLY", "MASTERDOWN", "CLUSTERDOWN", "NOREPLICAS", "LOADING", "BUSY ")
"""Codes within the text of a script's error, which redis-py does not turn into an exception class."""
_FINAL = (exceptions.AuthenticationError, exceptions.AuthorizationError)
_LOST = (exceptions.ConnectionError, exceptions.TimeoutError)
_MOVING = "access a non local key"
"""Within the error of a script that removed a key and could not write it again, because its slot moves to another node."""


class RetryingClient:
    """Sends operations over a backend.

    Args:
        backend: connections to the database.
        timeout_seconds: time of an operation, including delays between attempts.
        probe: a command that tests whether the server responds.
        secrets: passwords, which must not appear in errors.
    """

    def __init__(self, backend: Backend, timeout_seconds: float, probe: Sequence[bytes | str], secrets: Sequence[str] = ()) -> None:
        self.timeout = timeout_seconds
        self._backend = backend
        self._probe_command = probe
        self._secrets = secrets
        self._timeouts = LoopTimeouts()
        self._queue = asyncio.Semaphore(MAX_CONNECTIONS)
        self._last_reply = 0.0
        self._probe: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Stop probing."""
        if self._probe is not None:
            await end(self._probe)

    async def call(self, operation: str, send: Callable[[bool], Awaitable[T]], *, repeatable: bool = True) -> T:
        """Send an operation and wait for its reply.

        Args:
            operation: its name, for errors.
            send: sends it. Receives whether it may have been done already.
            repeatable: whether it may be done twice.

        Raises:
            StoreError: it was refused, or there was no reply in time.
        """
        if self._probe is not None:
            self._check_responsive(operation, self._probe)
        async with self._queue:
            if self._probe is not None:  # since it was queued
                self._check_responsive(operation, self._probe)
            return await self._attempt(operation, send, repeatable)

    def _check_responsive(self, operation: str, probe: "asyncio.Task[None]") -> None:
        if not probe.done():
            self._fail(operation, f"not sent: the server does not respond (within {self.timeout:g} s)")

    async def _attempt(self, operation: str, send: Callable[[bool], Awaitable[T]], repeatable: bool) -> T:
        started, lost, why = time.monotonic(), False, ""
        waits: Iterator[float] | None = None
        try:
            async with Limit(self._timeouts, self.timeout) as limit:
                while True:
                    try:
                        reply = await send(lost)
                    except (exceptions.RedisError, exceptions.RedisClusterException, OSError) as error:
                        refused = isinstance(error, _REFUSALS) or any(code in str(error) for code in _REFUSAL_CODES)
                        uncertain = isinstance(error, _LOST) or _MOVING in str(error)
                        if isinstance(error, _FINAL) or not (refused or (repeatable and uncertain)):
                            raise
                        lost, why = lost or not refused, f": {error}"
                        if limit.expired():  # the library dropped the cancellation, see `tokencache.wakeup.end`
                            raise TimeoutError from error
                        await self._backend.reset()
                    else:
                        self._last_reply = time.monotonic()
                        return reply
                    waits = waits or delays(FIRST_DELAY, LONGEST_RETRY_DELAY)
                    await asyncio.sleep(next(waits))
        except TimeoutError:
            await self._backend.reset()
            probing = self._probe is not None and not self._probe.done()
            if self._last_reply < started and not probing:  # no operation got a reply since then: the server does not respond
                self._probe = asyncio.create_task(self._probe_until_reply())
            self._fail(operation, f"no answer within {self.timeout:g} s{why}")
        except (WrongAnswerError, ValueError, TypeError, AttributeError, LookupError) as error:
            await self._backend.reset()  # the connection may be out of step: its next answers would be those to earlier commands
            unreadable = f"the server answered something else than the client library can read ({type(error).__name__})"
            self._fail(operation, str(error) if isinstance(error, WrongAnswerError) else unreadable)
        except (exceptions.RedisError, exceptions.RedisClusterException, OSError) as error:
            self._fail(operation, str(error) or type(error).__name__)

    async def _probe_until_reply(self) -> None:
        for delay in delays(FIRST_DELAY, LONGEST_PROBE_DELAY):
            try:
                async with Limit(self._timeouts, self.timeout):
                    await self._backend.run(*self._probe_command)
            except exceptions.ResponseError:
                return  # an error is a reply
            except (exceptions.RedisError, exceptions.RedisClusterException, OSError, TimeoutError):
                pass
            else:
                return
            await self._backend.reset()
            await asyncio.sleep(delay)

    def _fail(self, operation: str, why: str) -> NoReturn:
        for secret in self._secrets:
            why = why.replace(secret, "***")
        raise StoreError(f"redis: {operation}: {why}") from None
