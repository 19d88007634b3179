"""Asking: each operation within its time, again where that does no harm, and not at all while the server does not answer.

Three things go wrong with a server. It may refuse, or not be reached: then nothing was done, and the operation is tried again with
growing pauses until its time is up, so that a server that restarts, or a replica that takes over, within that time costs nothing.
Its answer may be lost: then nobody knows what was done, and only what may be done twice is sent again. It may not answer at all:
then the next operations fail at once, and one probe at a time finds out when it answers again, so that a frozen server does not
cost every call all its time.

Time begins when an operation has its turn. Thousands that come at once stand in line for the connections there are, first come, first
served, and that they wait says nothing of the server; where it falls silent the line is told as soon as those in front are.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn, TypeVar

from redis import exceptions

from tokencache.backoff import delays
from tokencache.store.base import StoreError
from tokencache.store.redis.connecting import CONNECTIONS, Link, UnreachedError
from tokencache.store.redis.timeouts import Patience

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.25
LONGEST_REST = 5.0
_REFUSALS = (
    UnreachedError,
    exceptions.BusyLoadingError,
    exceptions.ReadOnlyError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
    exceptions.MaxConnectionsError,
    exceptions.RedisClusterException,
)
_WORDS = ("READONLY", "MASTERDOWN", "CLUSTERDOWN", "NOREPLICAS", "LOADING", "BUSY ")  # within a script's error these are only words
_FINAL = (exceptions.AuthenticationError, exceptions.AuthorizationError)
_LOST = (exceptions.ConnectionError, exceptions.TimeoutError)


class Asker:
    """Sends operations over a link; `probe` is a command that finds out whether anybody answers, `secrets` are kept out of errors.

    Attributes:
        timeout: seconds that an operation may take from its turn on, pauses included (`patience`).
    """

    def __init__(self, link: Link, timeout_seconds: float, probe: Sequence[bytes | str], secrets: Sequence[str] = ()) -> None:
        self.timeout = timeout_seconds
        self._link = link
        self._command = probe
        self._secrets = secrets
        self._patience = Patience()
        self._line = asyncio.Semaphore(CONNECTIONS)
        self._answered = 0.0
        self._probe: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Stop to probe."""
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)

    async def ask(self, operation: str, send: Callable[[bool], Awaitable[T]], *, again: bool = True) -> T:
        """Await what `send` sends, in time.

        Args:
            operation: its name, for errors.
            send: sends it; is told whether it may have been done already.
            again: whether it may be done twice.

        Raises:
            StoreError: it was refused, or not answered in time.
        """
        self._give_up_early(operation)
        async with self._line:
            self._give_up_early(operation)  # it may have fallen silent meanwhile
            return await self._asked(operation, send, again)

    def _give_up_early(self, operation: str) -> None:
        if self._probe is not None and not self._probe.done():
            self._fail(operation, f"not asked: it does not answer (within {self.timeout:g} s)")

    async def _asked(self, operation: str, send: Callable[[bool], Awaitable[T]], again: bool) -> T:
        started, lost, why = time.monotonic(), False, ""
        try:
            async with self._patience.limit(self.timeout):
                for pause in delays(FIRST_PAUSE, LONGEST_PAUSE):
                    try:
                        answer = await send(lost)
                    except (exceptions.RedisError, exceptions.RedisClusterException, OSError) as error:
                        refused = isinstance(error, _REFUSALS) or any(word in str(error) for word in _WORDS)
                        if isinstance(error, _FINAL) or not (refused or (again and isinstance(error, _LOST))):
                            raise
                        lost, why = lost or not refused, f": {error}"
                        await self._link.look_anew()
                    else:
                        self._answered = time.monotonic()
                        return answer
                    await asyncio.sleep(pause)
                raise AssertionError("pauses never end")
        except TimeoutError:
            await self._link.look_anew()
            if self._answered < started:  # nobody was answered meanwhile: it is the server, not the operation
                self._probe = asyncio.create_task(self._until_it_answers())
            self._fail(operation, f"no answer within {self.timeout:g} s{why}")
        except (exceptions.RedisError, exceptions.RedisClusterException, OSError) as error:
            self._fail(operation, str(error) or type(error).__name__)

    async def _until_it_answers(self) -> None:
        for pause in delays(FIRST_PAUSE, LONGEST_REST):
            try:
                async with self._patience.limit(self.timeout):
                    await self._link.run(*self._command)
            except exceptions.ResponseError:
                return  # a refusal is an answer
            except (exceptions.RedisError, exceptions.RedisClusterException, OSError, TimeoutError):
                pass
            else:
                return
            await self._link.look_anew()
            await asyncio.sleep(pause)

    def _fail(self, operation: str, why: str) -> NoReturn:
        for secret in self._secrets:
            why = why.replace(secret, "***")
        raise StoreError(f"redis: {operation}: {why}") from None
