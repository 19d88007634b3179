"""Measures how long the proxy's event loop serves nobody else, while clients send bodies of 1 MB: `python -m bench.pause [--places N]`.

A probe task runs once in each turn of the loop. Between two of its turns the loop is *paused*. A pause is counted in CPU seconds of the
loop's thread, so other programs do not count. `p99`: longer pauses take 1 % of the loop's busy time. So of 100 requests that arrive at a
busy loop, one finds it in a longer pause. Four rollouts at once make first calls, which the engine renders, and calls that continue them.
"""

import argparse
import asyncio
import multiprocessing
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from multiprocessing.synchronize import Event
from traceback import walk_stack
from types import FrameType
from typing import NamedTuple

import uvloop

from bench.client import Client, take_turn
from bench.talk import Shape
from bench.targets import mock
from tokencache.config import Settings
from tokencache.server.serve import freeze_memory, serving
from tokencache.wakeup import end

SIZE = 1_000_000
_ROLLOUTS, _TURNS = 4, 4
_IDLE = 50e-6
"""CPU seconds of a turn of the loop in which nothing was served."""
_SAMPLED = 0.0005
"""Seconds between two looks at what runs (`--places`)."""


class Pause(NamedTuple):
    """A pause: CPU seconds, and what ran, with its CPU seconds."""

    seconds: float
    places: list[tuple[str, float]]


class _Probe:
    """Notes the pauses; with `places`, also what runs in them. A signal shows it, which Python handles between two instructions."""

    def __init__(self, places: int) -> None:
        self._ran, self._seen = Counter[str](), 0.0
        self.pauses: list[Pause] = []
        if places:
            signal.signal(signal.SIGALRM, self._look)
            signal.setitimer(signal.ITIMER_REAL, _SAMPLED, _SAMPLED)

    async def run(self) -> None:
        before = time.thread_time()
        try:
            while True:
                await asyncio.sleep(0)
                now, ran = time.thread_time(), self._ran
                self._ran = Counter()
                if (pause := now - before) > _IDLE:
                    self.pauses.append(Pause(pause, ran.most_common(4)))
                before = self._seen = time.thread_time()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _look(self, _signal: int, frame: FrameType | None) -> None:
        now = time.thread_time()
        self._ran[_place(frame)] += now - self._seen
        self._seen = now


def _place(frame: FrameType | None) -> str:
    """The innermost line of the proxy, and the function that it calls."""
    inner = frame.f_code.co_name if frame is not None else ""
    for one, line in walk_stack(frame) if frame is not None else ():
        _, ours, file = one.f_code.co_filename.rpartition("/tokencache/")
        if ours:
            return f"{file}:{line} {one.f_code.co_name} ({inner})"
    return inner


def _rollouts(port: int, shape: Shape, ended: Event) -> None:
    """Make rollouts until the end: the client's process."""

    def one(thread: int) -> None:
        client = Client(port)
        for number in count():
            talk = shape.talk(f"pause {thread} {number}", own_system=True)
            for _ in range(_TURNS):
                if ended.is_set():
                    client.close()
                    return
                take_turn(client, talk, f"pause-{thread}-{number}", shape.tail)

    with ThreadPoolExecutor(_ROLLOUTS) as threads:
        list(threads.map(one, range(_ROLLOUTS)))


async def measured(upstream: str, shape: Shape, seconds: float, places: int) -> tuple[list[Pause], int]:
    """The pauses of the loop under such conversations, ascending, with what ran if `places`; and the number of calls."""
    async with serving(Settings(upstream=upstream, port=0)) as (url, proxy):
        await proxy.engine.model()
        freeze_memory()
        start = multiprocessing.get_context("spawn")
        ended = start.Event()
        clients = start.Process(target=_rollouts, args=(int(url.rpartition(":")[2]), shape, ended))
        clients.start()
        while len([info async for info in proxy.store.sessions()]) < _ROLLOUTS:  # noqa: ASYNC110 - another process begins
            await asyncio.sleep(0.05)
        probe = _Probe(places)
        task = asyncio.create_task(probe.run())
        await asyncio.sleep(seconds)
        await end(task)
        ended.set()
        await asyncio.to_thread(clients.join)
        return sorted(probe.pauses), sum([info.turns async for info in proxy.store.sessions()])


def above(pauses: list[Pause], part: float) -> float:
    """The pause of which longer ones take this part of the busy time, in seconds; pauses ascend."""
    left = part * sum(pause.seconds for pause in pauses)
    for pause in reversed(pauses):
        left -= pause.seconds
        if left < 0:
            return pause.seconds
    return 0.0


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m bench.pause", description=__doc__.partition("\n")[0])
    asked.add_argument("--seconds", type=float, default=10.0, metavar="S", help="measure for S seconds")
    asked.add_argument("--each", type=int, default=700, metavar="BYTES", help="length of a message")
    asked.add_argument("--places", type=int, default=0, metavar="N", help="list what ran in the N longest pauses; they take longer then")
    options = asked.parse_args()
    shape = Shape(size=SIZE, messages=max(2, SIZE // options.each // 2 * 2), tokens=20, tail=200)
    with mock() as engine:
        pauses, calls = uvloop.run(measured(engine.url, shape, options.seconds, options.places))
    p50, p99, longest = (1000 * seconds for seconds in (above(pauses, 0.5), above(pauses, 0.01), pauses[-1].seconds))
    print(f"{SIZE} bytes in messages of {options.each}: p50 {p50:.2f} ms, p99 {p99:.2f} ms, longest {longest:.2f} ms; {calls} calls")
    for pause in reversed(pauses[len(pauses) - options.places :]):
        print(f"    {1000 * pause.seconds:.2f} ms: " + ", ".join(f"{place} {1000 * seconds:.2f}" for place, seconds in pause.places))


if __name__ == "__main__":
    main()
