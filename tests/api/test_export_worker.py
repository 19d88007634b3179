"""The press: another process writes the same bytes, is replaced if it is killed, and is gone when the proxy is."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.core.forest import Forest
from tests.proxy.kit import proxied
from tests.trajectories.rollouts import CREATED, SESSIONS
from tokencache.api.export_worker import LARGE, Press, WorkerDiedError, write
from tokencache.core import ids
from tokencache.store.base import Entry, SessionInfo
from tokencache.store.memory import MemoryStore
from tokencache.trajectories.rollout import Records


def large(turns=20):
    """A session of one line, of some more tokens than are laid out in this process."""
    forest, chances, parent = Forest(), random.Random(5), None
    size = LARGE // turns + 1
    for _ in range(turns):
        said = [chances.randrange(150_000) for _ in range(size)]
        parent = forest.add([chances.randrange(150_000)], said, parent, logprobs=ids.unpack_logprobs(ids.pack_logprobs([-0.5] * size)))
    return Records(SessionInfo("large", CREATED, CREATED, True, turns, (), ()), forest.turns, forest.tokens, {})


def process_of(press):
    return press._worker._process if press._worker else None


def gone(process):
    return process.returncode is not None


@pytest.fixture
async def press():
    press = Press()
    yield press
    process = process_of(press)
    await press.close()
    assert process is None or gone(process)


async def test_a_large_rollout_is_written_elsewhere_to_the_same_bytes(press):
    records = large()
    assert await press.write(records, "native") == write(records, "native")
    first = process_of(press)
    assert first.pid != os.getpid()
    assert await asyncio.gather(*(press.write(records, "native") for _ in range(3))) == [write(records, "native")] * 3
    assert process_of(press) is first


async def test_a_small_one_is_written_here(press):
    assert await press.write(SESSIONS["linear"], "native") == write(SESSIONS["linear"], "native")
    assert process_of(press) is None


async def test_a_worker_that_was_killed_is_replaced(press):
    records = large()
    await press.write(records, "native")
    killed = process_of(press)
    killed.kill()
    assert await press.write(records, "native") == write(records, "native")
    assert gone(killed)
    assert process_of(press) is not killed


async def test_a_worker_that_is_dead_before_it_is_asked_is_replaced(press):
    """What was written for it stands in the pipe's buffer when that is closed."""
    await press.run(LARGE, int, "1")
    dead = process_of(press)
    dead.kill()
    await asyncio.to_thread(dead.wait)
    assert await press.run(LARGE, int, "2") == 2
    assert process_of(press) is not dead


async def test_what_kills_every_worker_is_given_up(press):
    with pytest.raises(WorkerDiedError):
        await press.run(LARGE, os.abort)
    assert await press.run(LARGE, len, "abc") == 3


async def test_an_error_of_the_work_is_raised_here_and_the_worker_lives_on(press):
    assert await press.run(LARGE, int, "7") == 7
    worker = process_of(press)
    with pytest.raises(ValueError, match="invalid literal"):
        await press.run(LARGE, int, "seven")
    assert await press.run(LARGE, int, "8") == 8
    assert process_of(press) is worker


async def test_work_that_prints_does_not_disturb_the_answers(press):
    assert await press.run(LARGE, print, "this goes to standard error") is None
    assert await press.run(LARGE, int, "8") == 8


async def test_who_leaves_stops_the_work_and_the_next_is_served(press):
    await press.run(LARGE, int, "1")
    worker = process_of(press)
    endless = asyncio.create_task(press.run(LARGE, signal.pause))
    waiting = asyncio.create_task(press.run(LARGE, int, "2"))
    await asyncio.sleep(0)  # both have asked
    endless.cancel()
    with pytest.raises(asyncio.CancelledError):
        await endless
    assert await waiting == 2
    assert gone(worker)


async def test_the_worker_ends_with_its_proxy_however_that_ends(press):
    """A proxy that is killed closes nothing itself: the pipe does it."""
    program = """
import asyncio, os, signal
from tokencache.api.export_worker import LARGE, Press

async def main():
    press = Press()
    await press.run(LARGE, int, "1")
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    # Its standard error is the worker's, too: it can be read to its end only once both are gone.
    killed = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program], capture_output=True, timeout=30)
    assert (killed.returncode, killed.stderr) == (-signal.SIGKILL, b"")


async def test_over_http_it_is_the_same_and_nothing_is_left_when_the_proxy_stops():
    records, store, before = large(), MemoryStore(), children()
    async with proxied(store=store) as rig:
        begun = await store.begin("large", "call", [])
        await store.commit("large", begun.epoch, "call", [Entry(turn, records.tokens[turn.id]) for turn in records.turns])
        exported = await rig.get("/tokencache/v1/sessions/large/trajectories?drift=off")
        assert exported["sequences"] == msgspec.json.decode(write(records, "native"))["sequences"]
        assert len(children() - before) == 1
    assert children() == before


def children():
    """The processes that this one started and that are still there."""
    return {pid for told in Path("/proc/self/task").glob("*/children") for pid in told.read_text().split()}
