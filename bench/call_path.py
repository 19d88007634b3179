"""Counts the product files that one warm chat call runs through, and the moves between them: `python -m bench.call_path [--files]`.

The call is the fourth turn of a session (memory store, one connection) against the simulated engine, once whole and once streamed. The
figures:

- product files: files of `tokencache/`, without `tokencache/testing/`, in which a function ran;
- modules of `proxy/`: those among them;
- moves: how often a function was called, or a coroutine resumed, in another product file than the one before;
- frames above: the most product functions that wait above a request to the engine, which is the one for a tail.

Only the thread of the proxy's event loop is counted. Engine and client run in threads of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import tokencache
from tokencache.config import Settings
from tokencache.server.serve import serving
from tokencache.store.memory import MemoryStore
from tokencache.testing import SimulatedEngine

if TYPE_CHECKING:
    from types import FrameType

PACKAGE = f"{Path(tokencache.__file__).parent}/"
WITHOUT = f"{PACKAGE}testing/"
UPSTREAM = "engine/upstream.py"
TURNS = 4
REPLIES = [f"<think>\nStep {n}.\n</think>\n\nDone with step {n}." for n in range(TURNS)]


class CallPath:
    """The product files that a thread runs through, in order; consecutive entries of one file count once."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.depth = 0

    def follow(self, frame: FrameType, event: str, _arg: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE) and not file.startswith(WITHOUT):
            name = file.removeprefix(PACKAGE)
            if not self.files or self.files[-1] != name:
                self.files.append(name)
                if name == UPSTREAM:
                    self.depth = max(self.depth, frames_above(frame))

    def figures(self) -> dict[str, int]:
        entered = set(self.files)
        proxy = [name for name in entered if name.startswith("proxy/")]
        return {"product files": len(entered), "modules of proxy/": len(proxy), "moves": len(self.files) - 1, "frames above": self.depth}


def frames_above(frame: FrameType) -> int:
    """Counts the product functions that wait for this one, and their coroutines."""
    count, above = 0, frame.f_back
    while above is not None:
        count += above.f_code.co_filename.startswith(PACKAGE)
        above = above.f_back
    return count


async def measured(*, stream: bool) -> CallPath:
    """Makes the calls and traces the last one."""
    path, found = CallPath(), asyncio.Queue[str]()
    loop, done = asyncio.get_running_loop(), threading.Event()

    async def serve_engine() -> None:
        async with SimulatedEngine(episodes={"steps": REPLIES}, seed=1).serve() as url:
            loop.call_soon_threadsafe(found.put_nowait, url)
            await asyncio.to_thread(done.wait)

    engine = threading.Thread(target=lambda: asyncio.run(serve_engine()))
    engine.start()
    try:
        store = MemoryStore()
        async with serving(Settings(upstream=await found.get(), port=0), store) as (url, _):
            client = http.client.HTTPConnection(urlsplit(url).netloc)
            messages = [{"role": "user", "content": "EPISODE:steps"}]
            for turn in range(TURNS):
                if turn == TURNS - 1:
                    await asyncio.sleep(0.5)  # let background work of the previous turn finish
                    sys.setprofile(path.follow)
                await asyncio.to_thread(ask, client, messages, stream=stream)
                sys.setprofile(None)
                served = REPLIES[turn].partition("</think>")[2]
                messages += [{"role": "assistant", "content": served}, {"role": "user", "content": "go on"}]
            client.close()
            matches = [turn.match for turn in await store.turns("path")]
            if matches != ["root"] + ["continue"] * (TURNS - 1):
                raise RuntimeError(f"the turns of the session match as {matches}")
    finally:
        done.set()
        engine.join()
    return path


def ask(client: http.client.HTTPConnection, messages: list[dict[str, Any]], *, stream: bool) -> None:
    body = json.dumps({"model": "sim", "messages": messages, "stream": stream})
    client.request("POST", "/s/path/v1/chat/completions", body, {"Content-Type": "application/json"})
    client.getresponse().read()


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m bench.call_path", description=__doc__.partition("\n")[0])
    asked.add_argument("--files", action="store_true", help="list the files and how often each was entered")
    options = asked.parse_args()
    for title, stream in (("whole reply", False), ("stream", True)):
        path = asyncio.run(measured(stream=stream))
        print(title)
        for name, figure in path.figures().items():
            print(f"  {name:20}{figure:4}")
        if options.files:
            for name, times in sorted(Counter(path.files).items()):
                print(f"    {name:38}{times:4}")


if __name__ == "__main__":
    main()
