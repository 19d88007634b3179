"""Counts what the proxy holds: for each stream that waits for its next event (`python -m bench.held [--places N]`), and for a token.

Python's own account (`tracemalloc`) is read while all clients are connected and nothing runs, and while each has a stream that continues a
session and of which the same number of events have arrived. The difference is nearly the same in each run, however busy the machine is.
"""

import argparse
import asyncio
import gc
import sys
import tracemalloc
from types import BuiltinFunctionType, CoroutineType, FunctionType, ModuleType
from typing import NamedTuple
from urllib.parse import urlsplit

import uvloop

from bench.client import Client, head, take_turn
from bench.talk import NEW, Shape
from bench.targets import mock
from tests.support.waiting import until
from tokencache import metrics
from tokencache.config import Settings
from tokencache.server.serve import serving
from tokencache.store.memory import MemoryStore

SHAPES = {"1 KB": Shape(messages=2, tokens=20, tail=200), "141 KB": Shape(size=141_000, messages=200, tokens=20, tail=200)}
_STREAMS = 16
_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType)
_ARRIVED = 20
"""Tokens that the engine sends of a reply of 1,000, one in each 20 ms."""


class Held(NamedTuple):
    """What a stream holds: bytes, live coroutines, and the lines that allocated most of it, with their bytes."""

    size: float
    coroutines: float
    places: list[tuple[str, float]]


def _warm(number: int, shape: Shape, port: int) -> tuple[Client, bytes]:
    """A client whose session has had some turns, and its next request, which is streamed."""
    client, session, talk = Client(port), f"held-{number}", shape.talk(f"held {number}")
    for _ in range(2):
        take_turn(client, talk, session, shape.tail)
    body = talk.body(talk.members | {"stream": True, "mock_tokens": 1_000, "mock_pace_ms": 20, "mock_halt": _ARRIVED})
    return client, head(session, len(body)) + body


def _begin(client: Client, sent: bytes) -> None:
    """Send the request, and read what the engine sends."""
    client.socket.sendall(sent)
    got = b""
    while b"w%03d" % (_ARRIVED - 1) not in got:  # the text of the last token that arrives
        if not (data := client.socket.recv(1 << 16)):
            raise ConnectionError(f"{got[:300]!r}")
        got += data


def held(shape: Shape, *, places: int = 0) -> Held:
    """Measure streams of such conversations."""
    with mock() as engine:
        return uvloop.run(_held(engine.url, shape, places))


async def _held(upstream: str, shape: Shape, places: int) -> Held:
    async with serving(Settings(upstream=upstream, port=0, keep_alive=3_600.0)) as (url, proxy):  # no event while it is measured
        await proxy.engine.model()
        tracemalloc.start()
        rollouts = [await asyncio.to_thread(_warm, number, shape, int(url.rpartition(":")[2])) for number in range(_STREAMS + 1)]
        try:
            first = rollouts.pop()  # for what the first stream imports and makes once
            await asyncio.to_thread(_begin, *first)
            first[0].close()
            await until(lambda: not metrics.REGISTRY.get_sample_value("tokencache_calls_in_flight"))
            await proxy.ledger.settled()
            idle, before = _coroutines(), _settled()
            for rollout in rollouts:
                await asyncio.to_thread(_begin, *rollout)
            traced, busy = _settled().compare_to(before, "lineno"), _coroutines()
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


def weigh(root: object) -> int:
    """Bytes of an object and of everything reachable from it, without code."""
    sizes, todo = dict[int, int](), [root]
    while todo:
        one = todo.pop()
        if id(one) not in sizes and not isinstance(one, _CODE):
            sizes[id(one)] = sys.getsizeof(one)
            todo += gc.get_referents(one)
    return sum(sizes.values())


async def stored(upstream: str, turns: int) -> dict[str, float]:
    """What a session of so many turns holds in the memory store."""

    def grow(port: int) -> None:
        talk = NEW.talk("counted")
        client = Client(port)
        for _ in range(turns):
            take_turn(client, talk, "counted", NEW.tail)
        client.close()

    store = MemoryStore()
    async with serving(Settings(upstream=upstream, port=0), store) as (url, _):
        before = weigh(store)
        await asyncio.to_thread(grow, urlsplit(url).port or 0)
        last = (await store.turns("counted"))[-1]
        tokens, size = last.prompt_tokens + last.completion_tokens, weigh(store) - before
        return {"turns": turns, "tokens": tokens, "stored_bytes": size, "bytes_per_token": round(size / tokens, 2)}


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m bench.held", description=__doc__.partition("\n")[0])
    asked.add_argument("--places", type=int, default=0, metavar="N", help="list the N lines that allocated most")
    options = asked.parse_args()
    for title, shape in SHAPES.items():
        found = held(shape, places=options.places)
        print(f"{title}: {found.size / 1024:.1f} KiB and {found.coroutines:.1f} coroutines a stream", flush=True)
        for place, amount in found.places:
            print(f"    {amount / 1024:7.1f} KiB  {place}")


if __name__ == "__main__":
    main()
