"""The load generator: runs rollouts and reports how long each call took; README.md explains closed and open loop."""

import asyncio
import random
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple

import msgspec

from bench import client
from bench.mock import reply_of
from bench.stats import quantiles
from bench.talk import TURNS, Shape

CONNECTING = 128
_SHORT = 8
"""Tokens of the reply of a call before the clock starts."""
LATE_SECONDS = 120.0
"""How long calls in progress may take once the time is over."""
_NUMBER = re.compile(rb'"content": ?"(\d{8})')


class Answer(NamedTuple):
    """What counts of a `client.Answer`, whose times it has. `number`: the mock's of this answer, with which its text begins."""

    status: int
    ended: int
    pause: int = 0
    sent: int = 0
    number: bytes = b""
    error: str = ""


class Connection(asyncio.Protocol):
    """A connection that carries one call at a time."""

    _waiting: asyncio.Future[Answer] | None = None

    @classmethod
    async def open(cls, port: int) -> "Connection":
        return (await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port))[1]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def call(self, head: bytes, body: bytes) -> asyncio.Future[Answer]:
        self._answer = client.Answer()
        self._waiting = asyncio.get_running_loop().create_future()
        self.transport.writelines([head, body])
        return self._waiting

    def data_received(self, data: bytes) -> None:
        if self._waiting is not None and self._answer.add(data):
            got, number = self._answer, _NUMBER.search(self._answer.got)
            error = "" if got.status == 200 and number else got.body[:300].decode(errors="replace")
            self._settle(Answer(got.status, got.ended, got.pause, got.sent, number[1] if number else b"", error))

    def connection_lost(self, reason: Exception | None) -> None:
        self._settle(Answer(0, time.monotonic_ns(), error=f"connection lost: {reason or 'closed'}"))

    def _settle(self, answer: Answer) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. `rate`: calls per second, open loop; else `connections` rollouts at once, closed loop.

    `turns`: of each rollout; then another replaces it, or none (`once`). `warm_turn`: each rollout makes a short call before the clock
    starts. `warm_s`: warm-up time before the clock starts. `ramp_s`: the first calls are spread over it.
    """

    ports: list[int] = []
    sessions: bool = False
    name: str = "load"
    connections: int = 1
    rate: float = 0.0
    seconds: float = 2.0
    warm_s: float = 0.0
    once: bool = False
    warm_turn: bool = False
    ramp_s: float = 0.0
    turns: int = TURNS
    shape: Shape = Shape()


class Rollout:
    """A session: its conversation and its own connection."""

    def __init__(self, spec: Spec, number: int) -> None:
        self.spec = spec
        self.session = f"{spec.name}-{number}"
        self.talk = spec.shape.talk(self.session, 0 if spec.once else spec.turns)
        self.port = spec.ports[number % len(spec.ports)]
        self.turn = 0
        self.connection: Connection | None = None

    async def call(self, gate: asyncio.Semaphore, *, short: bool = False) -> Answer:
        """Makes the next call. A failure to connect counts as an answer that reports the error."""
        tokens = _SHORT if short else self.spec.shape.tokens
        body = self.talk.body({"model": "mock", "mock_tokens": tokens} if short else None)
        if self.connection is None or self.connection.transport.is_closing():
            try:
                async with gate:
                    self.connection = await Connection.open(self.port)
            except OSError as error:
                return Answer(0, time.monotonic_ns(), error=f"no connection: {error}")
        answer = await self.connection.call(client.head(self.session if self.spec.sessions else None, len(body)), body)
        self.turn += 1
        self.talk.add_turn(answer.number.decode() + reply_of(tokens).json_text.decode(), self.spec.shape.tail)
        return answer

    def close(self) -> None:
        if self.connection is not None:
            self.connection.transport.close()


class Generator:
    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.calls: list[tuple[int, Answer]] = []  # when it was due, its answer
        self.gate = asyncio.Semaphore(CONNECTING)
        self.tasks: set[asyncio.Task[None]] = set()
        self.rollouts = map(partial(Rollout, spec), count())
        self.stop = False
        self.under_way = self.peak = 0
        self.finished: deque[tuple[str, int]] = deque(maxlen=5)

    async def ask(self, rollout: Rollout, due: int) -> None:
        self.under_way += 1
        self.peak = max(self.peak, self.under_way)
        answer = await rollout.call(self.gate)
        self.under_way -= 1
        self.calls.append((due, answer))
        if answer.status == 200 and rollout.turn > 1:
            self.finished.append((rollout.session, rollout.turn))

    async def closed(self, rollout: Rollout) -> None:
        """Runs rollouts one after the other over one connection, each call after the answer to the previous one."""
        if self.spec.ramp_s:
            await asyncio.sleep(random.Random(rollout.session).uniform(0, self.spec.ramp_s))
        while not self.stop:
            for _ in range(self.spec.turns):
                await self.ask(rollout, time.monotonic_ns())
                if self.stop:
                    break
            if self.spec.once:
                break
            another = next(self.rollouts)
            another.port, another.connection, rollout.connection = rollout.port, rollout.connection, None
            rollout = another
        rollout.close()

    def open(self) -> threading.Thread:
        """Starts calls when they are due. A thread keeps the time: the loop's own timers have a resolution of milliseconds."""
        idle: deque[Rollout] = deque(islice(self.rollouts, int(self.spec.rate * self.spec.seconds / self.spec.turns) + 64))
        rng = random.Random(self.spec.name)
        loop = asyncio.get_running_loop()

        async def one(due: int) -> None:
            rollout = idle.pop() if idle else next(self.rollouts)  # the most recently used one: rollouts continue, few begin
            await self.ask(rollout, due)
            if rollout.turn < self.spec.turns and not self.stop:
                idle.append(rollout)
            else:
                rollout.close()

        def start(due: int) -> None:
            task = loop.create_task(one(due))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

        def arrivals() -> None:
            due = time.monotonic_ns()
            while not self.stop:
                due += int(rng.expovariate(self.spec.rate) * 1e9)
                time.sleep(max(0.0, (due - time.monotonic_ns()) / 1e9))
                loop.call_soon_threadsafe(start, due)

        clock = threading.Thread(target=arrivals, daemon=True)
        clock.start()
        return clock

    async def run(self, at_bounds: Callable[[], None]) -> dict[str, Any]:
        """Runs the load; `at_bounds` is called when the measured time begins and when it is over."""
        clock = self.open() if self.spec.rate else None
        if clock is None:
            rollouts = list(islice(self.rollouts, self.spec.connections))
            if self.spec.warm_turn:
                await asyncio.gather(*(rollout.call(self.gate, short=True) for rollout in rollouts))
            self.tasks |= {asyncio.create_task(self.closed(rollout)) for rollout in rollouts}
        await asyncio.sleep(self.spec.warm_s)
        at_bounds()
        begun, cpu = time.monotonic_ns(), time.process_time()
        if self.spec.once:
            await asyncio.wait(self.tasks, timeout=self.spec.seconds)
        else:
            await asyncio.sleep(self.spec.seconds)
        ended, used = time.monotonic_ns(), time.process_time() - cpu
        at_bounds()
        self.stop = True
        if clock is not None:
            await asyncio.to_thread(clock.join)
            await asyncio.sleep(0)  # the last calls started
        pending = (await asyncio.wait(set(self.tasks), timeout=LATE_SECONDS))[1] if self.tasks else set()
        for task in pending:
            task.cancel()
        return summary(self.calls, begun, ended, open_loop=self.spec.rate > 0) | {
            "late": len(pending),
            "generator_cpu_s": round(used, 4),
            "peak": self.peak,
            "sessions": list(self.finished) if self.spec.sessions else [],
        }


def summary(calls: list[tuple[int, Answer]], begun: int, ended: int, *, open_loop: bool) -> dict[str, Any]:
    """Figures of the calls that were answered in the measured time; in an open loop of those that were due in it, whenever answered."""
    inside = [(due, a) for due, a in calls if (begun <= due <= ended if open_loop else begun <= a.ended <= ended)]
    good = [(due, a) for due, a in inside if not a.error]
    done = sum(begun <= a.ended <= ended and not a.error for _, a in calls)
    window = (ended - begun) / 1e9
    found = {
        "calls": len(good),
        "window_s": round(window, 4),
        "calls_per_s": round(done / window, 2),
        "errors": len(inside) - len(good),
        "error_words": Counter(f"{a.status}: {a.error[:160]}" for _, a in inside if a.error).most_common(3),
        "latency_us": _spread([a.ended - due for due, a in good]),
    }
    if lags := [a.ended - a.sent for _, a in good if a.sent]:
        found |= {"pause_us": _spread([a.pause for _, a in good]), "lag_us": _spread(lags)}
    return found


def _spread(nanoseconds: list[int]) -> list[int]:
    """Percentiles 0 to 100 in whole microseconds."""
    return [round(value / 1e3) for value in quantiles(nanoseconds)]
