"""Retries a call that no engine takes, so that an engine's restart does not end an agent's episode.

Engines of a training run go away and come back: they are restarted, or paused while their weights are replaced. Everything that makes a
session is in our store, so a call can wait, or go to another engine. There are two cases:

- *not taken*: no connection, or a refusal (503, 429) before any answer began. Nothing was sampled. `call.CallAttempt` asks each engine in
  the session's order; when all refused, `until_taken` waits with growing pauses and asks them again. Each attempt plans the call anew.
- *aborted*: the engine ended the reply itself (`finish_reason: "abort"`), and the client received nothing of it. What was sampled is
  recorded as a turn that is never continued, and `dedup.in_flight` makes the call again: a fresh sample on the same prompt. A client
  that received the beginning keeps it: a stream cannot be taken back, and no parser is known to go on within a message.

A streaming client receives keep-alive events meanwhile.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import aiohttp

from tokencache import metrics
from tokencache.backoff import delays
from tokencache.errors import EngineError

MAX_RESAMPLES = 4
"""How often an aborted call is made again: weights may change faster than a reply is sampled."""
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0
"""Seconds. Each pause is twice the one before, less up to half of it at random."""


class NotTakenError(Exception):
    """No engine took the call: the last engine's answer, or why there is none."""

    def __init__(self, message: str, *, answer: aiohttp.ClientResponse | None = None, error: EngineError | None = None) -> None:
        super().__init__(message)
        self.answer = answer
        self.error = error

    @property
    def retry_after(self) -> float:
        """Seconds that the engine asked to wait; 0 if it did not."""
        seconds = self.answer.headers.get("Retry-After", "") if self.answer is not None else ""
        return float(seconds) if seconds.isdecimal() else 0.0

    def close(self) -> None:
        """Release the answer's connection."""
        if self.answer is not None:
            self.answer.close()


class Taken(NamedTuple):
    """An engine's answer to a call that had to wait: for how many seconds, and why."""

    answer: aiohttp.ClientResponse
    waited: float
    why: str


async def until_taken(ask: Callable[[], Awaitable[aiohttp.ClientResponse]], refused: NotTakenError, seconds: float) -> Taken:
    """Ask the engines again, with growing pauses, until one takes the call.

    Args:
        ask: asks each engine once; raises `NotTakenError`.
        refused: why the first round failed.
        seconds: how long the call may wait; then the last refusal is returned as it is.

    Raises:
        EngineError: time is up, and no engine has answered; or an engine failed after it may have begun to sample.
    """
    started, why = time.monotonic(), ""
    pauses = delays(FIRST_PAUSE, LONGEST_PAUSE, jitter=0.5)
    while (left := seconds - (time.monotonic() - started)) > 0:
        why = str(refused)
        metrics.QUEUED_CALLS.labels("busy" if refused.answer is not None else "down").inc()
        refused.close()
        await asyncio.sleep(min(left, max(refused.retry_after, next(pauses))))
        try:
            return Taken(await ask(), time.monotonic() - started, why)
        except NotTakenError as again:
            refused = again
    if refused.answer is not None:
        return Taken(refused.answer, 0.0, why)
    assert refused.error is not None  # noqa: S101 - without an answer there is an error
    raise refused.error


async def pause_before_resample() -> None:
    """Wait a little before an aborted call is made again."""
    metrics.QUEUED_CALLS.labels("aborted").inc()
    await asyncio.sleep(next(delays(FIRST_PAUSE, LONGEST_PAUSE, jitter=0.5)))
