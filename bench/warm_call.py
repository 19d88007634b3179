"""Makes calls of one session against the simulated engine in this process, and follows what the proxy's thread runs for the last one.

The proxy logs as `tokencache serve` does by default, but into nothing. Engine and client run in threads of their own. The client is asked
through a queue, and answers through a future. Both are C code, so what passes a question on is not counted.
"""

import asyncio
import contextlib
import inspect
import io
import json
import logging
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import tokencache
from bench.client import Client
from tests.support.plugin_engine import PluginEngine
from tokencache import logs
from tokencache.background import repeat
from tokencache.config import Settings
from tokencache.engine.pool import PlacementPolicy
from tokencache.server.serve import serving
from tokencache.store import open_store

PACKAGE = f"{Path(tokencache.__file__).parent}/"
_SETTLING_SECONDS = 0.5
"""Work in the background of the call before ends within it."""


class Talk(NamedTuple):
    """What is said: so many calls, of which the last one is followed.

    `messages`: of the first request, odd, with `size` bytes of content; `store`: a URL; `prefixes`: engines take prompts by hash.
    `token_seconds`: the engine's pause before each token. Without one, the chunks of a stream arrive together, in parts that differ.
    """

    calls: int = 4
    stream: bool = False
    messages: int = 1
    size: int = 0
    store: str = "memory:"
    prefixes: bool = False
    engines: int = 1
    placement: PlacementPolicy = "sticky"
    token_seconds: float = 0.0


_REPLY = "Done with this step."
_Asked = SimpleQueue[tuple[bytes, asyncio.Future[None]] | None]


async def follow_last_call(talk: Talk, follow: Callable[[FrameType, str, Any], object]) -> None:
    """Make the calls of a session, and follow the last one as `sys.setprofile` does. `RuntimeError`: a turn continued none."""
    store, loop = open_store(talk.store), asyncio.get_running_loop()
    with _logging():
        async with (
            _engines(talk) as upstream,
            serving(Settings(upstream=upstream, placement=talk.placement, port=0), store) as (url, proxy),
        ):
            await proxy.engine.model()
            while not all(map(proxy.pool.serves, proxy.pool.monitors)):  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(_SETTLING_SECONDS / 10)
            bodies = _Asked()
            client = threading.Thread(target=_answer, args=(int(url.rpartition(":")[2]), bodies, loop))
            client.start()
            each = "word " * (talk.size // talk.messages // 5)
            texts = [(("user", "assistant")[n % 2], f"EPISODE:steps {n} {each}") for n in range(talk.messages)]
            messages = [{"role": role, "content": text} for role, text in texts]
            try:
                for call in range(talk.calls):
                    body = json.dumps({"model": "sim", "messages": messages, "stream": talk.stream}).encode()
                    answered = loop.create_future()
                    if call == talk.calls - 1:
                        _stop_background()
                        await asyncio.sleep(_SETTLING_SECONDS)
                        sys.setprofile(follow)
                    bodies.put((body, answered))
                    await answered
                    sys.setprofile(None)
                    messages += [{"role": "assistant", "content": f"\n\n{_REPLY}"}, {"role": "user", "content": "go on"}]
            finally:
                bodies.put(None)
            client.join()
            matches = [turn.match for turn in await store.turns("path")]
            if matches[0] not in {"root", "plain"} or matches[1:] != ["continue"] * (talk.calls - 1):
                raise RuntimeError(f"the turns of the session match as {matches}")


def _stop_background() -> None:
    """Cancel the tasks that repeat a step: a stream lasts long enough that some of their steps would be counted."""
    for task in asyncio.all_tasks():
        waits: Any = task.get_coro()
        while inspect.iscoroutine(waits):
            if waits.cr_code is repeat.__code__:
                task.cancel()
            waits = waits.cr_await


@contextlib.contextmanager
def _logging() -> Iterator[None]:
    log, handler = logging.getLogger("tokencache"), logging.StreamHandler(io.StringIO())
    handler.setFormatter(logs.LineFormatter(messages=False))
    level = log.level
    log.setLevel(logging.INFO)
    try:
        with patch.multiple(log, handlers=[handler], propagate=False):
            yield
    finally:
        log.setLevel(level)


@contextlib.asynccontextmanager
async def _engines(talk: Talk) -> AsyncIterator[str]:
    """The simulated engines, in a thread of their own; yields their URLs as one upstream."""
    found = asyncio.Queue[str]()
    loop, done = asyncio.get_running_loop(), threading.Event()
    episodes = {"steps": [f"<think>\nOne step more.\n</think>\n\n{_REPLY}"] * talk.calls}

    async def serve() -> None:
        async with contextlib.AsyncExitStack() as opened:
            for _ in range(talk.engines):
                engine = PluginEngine(episodes=episodes, seed=1, prefixes=talk.prefixes, token_delay=talk.token_seconds)
                loop.call_soon_threadsafe(found.put_nowait, await opened.enter_async_context(engine.serve()))
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield ",".join([await found.get() for _ in range(talk.engines)])
    finally:
        done.set()
        thread.join()


def _answer(port: int, bodies: _Asked, loop: asyncio.AbstractEventLoop) -> None:
    """Post bodies, one after the other, over one connection. A head is sent with its body: read apart, they are more entries."""
    with contextlib.closing(Client(port)) as client:
        while (asked := bodies.get()) is not None:
            body, answered = asked
            try:
                client.post(body, path="/s/path/v1/chat/completions")
            except Exception as why:  # noqa: BLE001 - the one who asked raises it
                loop.call_soon_threadsafe(answered.set_exception, why)
            else:
                loop.call_soon_threadsafe(answered.set_result, None)
