"""Retries a call that no engine accepts, so that an engine's restart does not end an agent's episode.

During a training run, engines are restarted, or paused while their weights are replaced. The whole state of a session is in the proxy's
store, so a call can wait, or use another engine. There are two cases:

- *not taken*: no connection, a refusal (503, 429) before any answer began, or a trainer updates the weights. Nothing was sampled.
  `call.CallAttempt` tries each engine in the session's order. If all refuse, `until_taken` waits with growing pauses and tries them
  again. Each attempt plans the call again.
- *aborted*: the engine ended the reply itself (`finish_reason: "abort"`), and the client received nothing of it. The sampled tokens are
  recorded as a turn that is never continued, and `dedup.in_flight` makes the call again: a new sample for the same prompt. If the client
  received the beginning, the call is not made again: a stream cannot be undone, and no parser is known to resume within a message.

Meanwhile a streaming client receives keep-alive events.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import aiohttp

from tokencache import metrics
from tokencache.backoff import delays
from tokencache.errors import EngineError, WeightsUpdatingError
from tokencache.wakeup import Wakeup, wait_for

MAX_RESAMPLES = 4
"""Maximum number of times that an aborted call is made again: weights may change faster than a reply is sampled."""
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0
"""Seconds. Each pause is twice the one before, reduced at random by up to half."""


class NotTakenError(Exception):
    """No engine took the call. Has the last engine's answer, or the error if there is none."""

    def __init__(self, message: str, *, answer: aiohttp.ClientResponse | None = None, error: EngineError | None = None) -> None:
        super().__init__(message)
        self.answer = answer
        self.error = error

    @property
    def kind(self) -> str:
        """The reason, as a label of metrics."""
        if isinstance(self.error, WeightsUpdatingError):
            return "updating"
        return "busy" if self.answer is not None else "down"

    @property
    def retry_after(self) -> float:
        """The engine's `Retry-After`, in seconds; 0 if it sent none."""
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


async def until_taken(
    ask: Callable[[], Awaitable[aiohttp.ClientResponse]], refused: NotTakenError, seconds: float, announced: Wakeup
) -> Taken:
    """Try the engines again, with growing pauses, until one takes the call.

    Args:
        ask: tries each engine once; raises `NotTakenError` if none takes the call.
        refused: the failure of the first round.
        seconds: how long the call may wait. After that, an answer that refuses the call is returned like any other.
        announced: wakes a call that waits for an update of the weights to end.

    Raises:
        EngineError: the time is over and no engine answered, or an engine failed after it may have begun to sample.
    """
    started, why = time.monotonic(), ""
    pauses, change = delays(FIRST_PAUSE, LONGEST_PAUSE, jitter=0.5), announced.next
    while (left := seconds - (time.monotonic() - started)) > 0:
        why = str(refused)
        metrics.QUEUED_CALLS.labels(refused.kind).inc()
        refused.close()
        pause = min(left, max(refused.retry_after, next(pauses)))
        if refused.kind == "updating":
            await wait_for(change, pause)
        else:
            await asyncio.sleep(pause)
        change = announced.next
        try:
            return Taken(await ask(), time.monotonic() - started, why)
        except NotTakenError as again:
            refused = again
    if refused.answer is not None:
        return Taken(refused.answer, 0.0, why)
    assert refused.error is not None  # noqa: S101 - without an answer there is an error
    raise refused.error


async def pause_before_resample() -> None:
    """Wait shortly before an aborted call is made again."""
    metrics.QUEUED_CALLS.labels("aborted").inc()
    await asyncio.sleep(next(delays(FIRST_PAUSE, LONGEST_PAUSE, jitter=0.5)))
