"""Measures how long the proxy's event loop serves nobody else, while clients send bodies of 1 MB: `python -m bench.pause [--places N]`.

A probe task runs once in each turn of the loop. Between two of its turns the loop is *paused*: everything that runs there has no `await`
that lets others run. A pause is counted in CPU seconds of the loop's thread, so other programs do not count. `p99`: longer pauses take 1 %
of the loop's busy time. So of 100 requests that arrive at a busy loop, one finds it in a longer pause.

Four rollouts at once make first calls, which the engine renders, and calls that continue them. Engine and clients are other processes.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from multiprocessing.synchronize import Event
from types import FrameType
from typing import NamedTuple

import uvloop

from bench.client import Client, take_turn
from bench.processes import Process
from bench.talk import Talk
from bench.targets import mock
from tokencache.config import Settings
from tokencache.server.serve import freeze_memory, serving
from tokencache.wakeup import end

SIZE, EACH = 1_000_000, 700
"""Bytes of a body, and of one message."""
_ROLLOUTS, _TURNS = 4, 4
_IDLE = 50e-6
"""CPU seconds of a turn of the loop in which nothing was served."""
_SAMPLED = 0.0005
"""Seconds between two looks at what runs (`--places`)."""


class Pause(NamedTuple):
    """A pause: CPU seconds, and what ran, with its CPU seconds."""

    seconds: float
    places: list[tuple[str, float]]


class Pauses(NamedTuple):
    """All pauses of a measurement, in CPU seconds, ascending; the longest with what ran; the number of calls that were answered."""

    seconds: list[float]
    longest: list[Pause]
    calls: int

    def above(self, part: float) -> float:
        """The pause of which longer ones take this part of the busy time."""
        left = part * sum(self.seconds)
        for seconds in reversed(self.seconds):
            left -= seconds
            if left < 0:
                return seconds
        return 0.0


class _Probe:
    """Notes the pauses; with `places`, also what runs in them. A signal shows it, which Python handles between two instructions."""

    def __init__(self, places: int) -> None:
        self._kept, self._ran = places, Counter[str]()
        self._seen = 0.0
        self.pauses: list[float] = []
        self.longest: list[Pause] = []

    async def run(self) -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now, ran = time.thread_time(), self._ran
            self._ran = Counter()
            if (pause := now - before) > _IDLE:
                self.pauses.append(pause)
                if self._kept:
                    self.longest = sorted([*self.longest, Pause(pause, ran.most_common(4))], reverse=True)[: self._kept]
            before = self._seen = time.thread_time()

    def look(self, _signal: int, frame: FrameType | None) -> None:
        now = time.thread_time()
        self._ran[_place(frame)] += now - self._seen
        self._seen = now

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        if not self._kept:
            yield
            return
        signal.signal(signal.SIGALRM, self.look)
        signal.setitimer(signal.ITIMER_REAL, _SAMPLED, _SAMPLED)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _place(frame: FrameType | None) -> str:
    """The innermost line of the proxy, and the function that it calls."""
    inner = frame.f_code.co_name if frame is not None else ""
    while frame is not None and "/tokencache/" not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return inner
    return f"{frame.f_code.co_filename.rpartition('/tokencache/')[2]}:{frame.f_lineno} {frame.f_code.co_name} ({inner})"


def _rollouts(port: int, size: int, each: int, ended: Event) -> None:
    """Make rollouts until the end: the client's process."""

    def one(thread: int) -> None:
        client = Client(port)
        for number in count():
            talk = Talk(f"pause {thread} {number}", size=size, messages=max(2, size // each // 2 * 2), own_system=True, mock_tokens=20)
            for _ in range(_TURNS):
                if ended.is_set():
                    client.close()
                    return
                take_turn(client, talk, f"pause-{thread}-{number}", 200)

    with ThreadPoolExecutor(_ROLLOUTS) as threads:
        list(threads.map(one, range(_ROLLOUTS)))


def measured(size: int = SIZE, *, each: int = EACH, seconds: float = 10.0, places: int = 0) -> Pauses:
    """Measure the pauses of the loop under bodies of so many bytes, with messages of `each`."""
    with mock() as engine:
        return uvloop.run(_measured(engine, size, each, seconds, places))


async def _measured(engine: Process, size: int, each: int, seconds: float, places: int) -> Pauses:
    async with serving(Settings(upstream=engine.url, port=0)) as (url, proxy):
        await proxy.engine.model()
        freeze_memory()
        start = multiprocessing.get_context("spawn")
        ended = start.Event()
        clients = start.Process(target=_rollouts, args=(int(url.rpartition(":")[2]), size, each, ended))
        clients.start()
        while len([info async for info in proxy.store.sessions()]) < _ROLLOUTS:  # noqa: ASYNC110 - another process begins
            await asyncio.sleep(0.05)
        probe = _Probe(places)
        with probe.looking():
            task = asyncio.create_task(probe.run())
            await asyncio.sleep(seconds)
            await end(task)
        ended.set()
        await asyncio.to_thread(clients.join)
        calls = sum([info.turns async for info in proxy.store.sessions()])
    return Pauses(sorted(probe.pauses), probe.longest, calls)


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m bench.pause", description=__doc__.partition("\n")[0])
    asked.add_argument("--seconds", type=float, default=10.0, metavar="S", help="measure for S seconds")
    asked.add_argument("--each", type=int, default=EACH, metavar="BYTES", help="length of a message")
    asked.add_argument("--places", type=int, default=0, metavar="N", help="list what ran in the N longest pauses; they take longer then")
    options = asked.parse_args()
    found = measured(each=options.each, seconds=options.seconds, places=options.places)
    p50, p99, longest = (1000 * seconds for seconds in (found.above(0.5), found.above(0.01), found.seconds[-1]))
    print(f"{SIZE} bytes in messages of {options.each}: p50 {p50:.2f} ms, p99 {p99:.2f} ms, longest {longest:.2f} ms; {found.calls} calls")
    for pause in found.longest:
        print(f"    {1000 * pause.seconds:.2f} ms: " + ", ".join(f"{place} {1000 * seconds:.2f}" for place, seconds in pause.places))


if __name__ == "__main__":
    main()
