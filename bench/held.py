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

from bench.client import Client, request, take_turn
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


def _warm(number: int, size: int, port: int) -> tuple[Client, bytes]:
    """A client whose session has had some turns, and its next request, which is streamed."""
    client, session = Client(port), f"held-{number}"
    talk = Talk(f"held {number}", size=size, messages=max(2, size // 700), mock_tokens=20)
    for _ in range(_WARM_TURNS):
        take_turn(client, talk, session, 200)
    paced = {"stream": True, "mock_tokens": _TOKENS, "mock_pace_ms": _PACE_MS, "mock_halt": _ARRIVED}
    return client, request(talk.body(talk.members | paced), session)


def _begin(client: Client, sent: bytes) -> None:
    """Send the request, and read what the engine sends."""
    client.socket.sendall(sent)
    got = b""
    while _LAST not in got:
        if not (data := client.socket.recv(1 << 16)):
            raise ConnectionError(f"{got[:300]!r}")
        got += data


def held(size: int, *, places: int = 0) -> Held:
    """Measure streams of conversations of so many bytes."""
    with mock() as engine:
        return uvloop.run(_held(engine, size, places))


async def _held(engine: Process, size: int, places: int) -> Held:
    async with serving(Settings(upstream=engine.url, port=0, keep_alive=_NEVER)) as (url, proxy):
        await proxy.engine.model()
        tracemalloc.start()
        rollouts = [await asyncio.to_thread(_warm, number, size, int(url.rpartition(":")[2])) for number in range(_STREAMS + 1)]
        try:
            first = rollouts.pop()  # for what the first stream imports and makes once
            await asyncio.to_thread(_begin, *first)
            first[0].close()
            await until(lambda: not metrics.REGISTRY.get_sample_value("tokencache_calls_in_flight"))
            await proxy.ledger.settled()
            idle, before = _coroutines(), _settled()
            for rollout in rollouts:
                await asyncio.to_thread(_begin, *rollout)
            after, busy = _settled(), _coroutines()
            traced = after.compare_to(before, "lineno")
        finally:
            tracemalloc.stop()
            for client, _ in rollouts:
                client.close()
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
