"""One worker of several: the server in a process of its own, under a supervisor (`server.workers`).

Its metrics stand in files that are named by its place, not by its process: who comes after it goes on counting where it ended.
"""

import asyncio
import base64
import logging
import os
import pickle
import sys
from typing import TYPE_CHECKING, TextIO

from prometheus_client import values

if TYPE_CHECKING:
    from tokencache.server.drain import Stop

log = logging.getLogger(__name__)

_LONGEST = 16 * 2**20
"""Bytes of the settings' line."""


def main(place: int, again: bool) -> None:
    """Serve as the worker of this place; `again`: another one died there."""
    values.ValueClass = values.MultiProcessValue(process_identifier=lambda: place)  # type: ignore[no-untyped-call]
    import uvloop  # noqa: PLC0415 - metrics are made when they are imported, and must know by then whose they are

    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)  # whatever prints, prints elsewhere
        sys.exit(uvloop.run(_work(out, again=again)))


async def _work(out: TextIO, *, again: bool) -> int:
    """Serve until told to stop; the exit code."""
    from tokencache import logs, metrics  # noqa: PLC0415
    from tokencache.engine.template.local import quieten  # noqa: PLC0415
    from tokencache.server.drain import Stop  # noqa: PLC0415
    from tokencache.server.serve import run  # noqa: PLC0415
    from tokencache.store.base import StoreError  # noqa: PLC0415

    words = asyncio.StreamReader(limit=_LONGEST)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(words), os.fdopen(0, "rb", buffering=0))
    settings = pickle.loads(base64.b64decode(await words.readline()))  # noqa: S301 - it comes from our own supervisor
    logs.set_up(settings.log_level, several=True)
    if settings.tokenizer is not None:
        quieten()
    if again:
        metrics.WORKER_RESTARTS.inc()
    stop = Stop()
    hearing = asyncio.create_task(_hear(words, stop))
    try:
        await run(settings, stop, shared=True, ready=lambda: print("ready", file=out))
    except (OSError, StoreError, ValueError) as why:
        print("failed", " ".join(str(why).split()), file=out)
        return 1
    finally:
        hearing.cancel()
    return 0


async def _hear(words: asyncio.StreamReader, stop: "Stop") -> None:
    """Do what the supervisor says; its end is its last word."""
    while word := (await words.readline()).strip():
        (stop.at_once if word == b"now" else stop.asked).set()
        if word == b"now":
            stop.asked.set()
    if not stop.asked.is_set():
        log.error("THE SUPERVISOR IS GONE: this worker stops, too")
        stop.asked.set()
