"""Counts what the proxy holds for each stream that waits for its next event: `python -m bench.held [--places N]`.

Python's own account (`tracemalloc`) is read while all clients are connected and nothing runs, and while each has a stream that continues a
session and of which the same number of events have arrived. The difference counts allocated bytes, not the memory of the process. So it
is nearly the same in each run, however busy the machine is. Client and engine do not count: the engine is a process of its own, and
clients keep nothing.
"""

import argparse
import asyncio
import gc
import tracemalloc
from types import CoroutineType
from typing import NamedTuple

import uvloop

from bench.client import Client, reply_text
from bench.processes import Process
from bench.talk import Talk
from bench.targets import mock
from tests.support.waiting import until
from tokencache import metrics
from tokencache.config import Settings
from tokencache.server.serve import serving

SIZES = {"1 KB": 1_000, "141 KB": 141_000}
_STREAMS = 16
_WARM_TURNS = 2
_PACE_MS, _TOKENS, _ARRIVED = 20, 1_000, 20
"""The engine sends the first so many tokens of a reply, one in each so many milliseconds."""
_LAST = b"w%03d" % (_ARRIVED - 1)
"""The text of the last token that arrives."""
_NEVER = 3_600.0
"""Seconds without an event until the proxy sends one: longer than the measurement."""


class Held(NamedTuple):
    """What a stream holds.

    Attributes:
        size: bytes.
        coroutines: live coroutines.
        places: the lines that allocated most of it, with their bytes.
    """

    size: float
    coroutines: float
    places: list[tuple[str, float]]


class _Rollout:
    """A session whose client has had some turns, and reads the beginning of another one."""

    def __init__(self, number: int, size: int, port: int) -> None:
        self._name, self._client = f"held-{number}", Client(port)
        self._talk = Talk(f"held {number}", size=size, messages=max(2, size // 700), mock_tokens=20)
        for _ in range(_WARM_TURNS):
            self._talk.add_turn(reply_text(self._client.post(self._talk.body(), self._name)), 200)
        self._talk.members |= {"stream": True, "mock_tokens": _TOKENS, "mock_pace_ms": _PACE_MS, "mock_halt": _ARRIVED}
        body = self._talk.body()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Tokencache-Session: {self._name}\r\nContent-Type: application/json\r\n"
        self._request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def begin(self) -> None:
        """Send the request, and read what the engine sends."""
        self._client.socket.sendall(self._request)
        got = b""
        while _LAST not in got:
            if not (data := self._client.socket.recv(1 << 16)):
                raise ConnectionError(f"{self._name}: {got[:300]!r}")
            got += data

    def close(self) -> None:
        """Leave the stream."""
        self._client.close()


def held(size: int, *, places: int = 0) -> Held:
    """Measure streams of conversations of so many bytes."""
    with mock() as engine:
        return uvloop.run(_held(engine, size, places))


async def _held(engine: Process, size: int, places: int) -> Held:
    async with serving(Settings(upstream=f"http://127.0.0.1:{engine.port}", port=0, keep_alive=_NEVER)) as (url, proxy):
        await proxy.engine.model()
        tracemalloc.start()
        rollouts = [await asyncio.to_thread(_Rollout, number, size, int(url.rpartition(":")[2])) for number in range(_STREAMS + 1)]
        try:
            first = rollouts.pop()  # for what the first stream imports and makes once
            await asyncio.to_thread(first.begin)
            first.close()
            await until(lambda: not metrics.REGISTRY.get_sample_value("tokencache_calls_in_flight"))
            await proxy.ledger.settled()
            idle, before = _coroutines(), _settled()
            for rollout in rollouts:
                await asyncio.to_thread(rollout.begin)
            after, busy = _settled(), _coroutines()
            traced = after.compare_to(before, "lineno")
        finally:
            tracemalloc.stop()
            for rollout in rollouts:
                rollout.close()
    grown = sum(place.size_diff for place in traced)
    lines = [(f"{place.traceback[0].filename}:{place.traceback[0].lineno}", place.size_diff / _STREAMS) for place in traced[:places]]
    return Held(grown / _STREAMS, (busy - idle) / _STREAMS, lines)


def _settled() -> tracemalloc.Snapshot:
    gc.collect()
    return tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(inclusive=False, filename_pattern=tracemalloc.__file__)])


def _coroutines() -> int:
    return sum(isinstance(one, CoroutineType) and one.cr_frame is not None for one in gc.get_objects())


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m bench.held", description=__doc__.partition("\n")[0])
    asked.add_argument("--places", type=int, default=0, metavar="N", help="list the N lines that allocated most")
    options = asked.parse_args()
    for title, size in SIZES.items():
        found = held(size, places=options.places)
        print(f"{title}: {found.size / 1024:.1f} KiB and {found.coroutines:.1f} coroutines a stream", flush=True)
        for place, amount in found.places:
            print(f"    {amount / 1024:7.1f} KiB  {place}")


if __name__ == "__main__":
    main()
