"""The export worker: another process writes the same bytes, is replaced if it is killed, and exits when the proxy does."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from tests.core.forest import Forest
from tests.proxy.kit import proxied
from tests.support.waiting import PATIENCE
from tests.trajectories.rollouts import CREATED, SESSIONS
from tokencache.api.export_worker import LARGE, ExportWorker, WorkerDiedError
from tokencache.core import ids
from tokencache.store.base import Entry, SessionInfo
from tokencache.store.memory import MemoryStore
from tokencache.trajectories.formats.registry import FORMATS, export
from tokencache.trajectories.rollout import Records


def large(turns=20):
    """A session of one sequence with more tokens than are exported in this process."""
    forest, chances, parent = Forest(), random.Random(5), None
    size = LARGE // turns + 1
    for _ in range(turns):
        said = [chances.randrange(150_000) for _ in range(size)]
        parent = forest.add([chances.randrange(150_000)], said, parent, logprobs=ids.unpack_logprobs(ids.pack_logprobs([-0.5] * size)))
    return Records(SessionInfo("large", CREATED, CREATED, True, turns, (), ()), forest.turns, forest.tokens, {})


def written_by(worker, records):
    return worker.run(records.token_count, export, records, FORMATS["native"])


def process_of(worker):
    return worker._process._popen if worker._process else None


def gone(process):
    return process.returncode is not None


@pytest.fixture
async def worker():
    worker = ExportWorker()
    yield worker
    process = process_of(worker)
    await worker.close()
    assert process is None or gone(process)


async def test_a_large_rollout_is_written_in_another_process_to_the_same_bytes(worker):
    records = large()
    assert await written_by(worker, records) == export(records, FORMATS["native"])
    first = process_of(worker)
    assert first.pid != os.getpid()
    assert await asyncio.gather(*(written_by(worker, records) for _ in range(3))) == [export(records, FORMATS["native"])] * 3
    assert process_of(worker) is first


async def test_a_small_rollout_is_written_in_this_process(worker):
    assert await written_by(worker, SESSIONS["linear"]) == export(SESSIONS["linear"], FORMATS["native"])
    assert process_of(worker) is None


async def test_a_killed_process_is_replaced(worker):
    records = large()
    await written_by(worker, records)
    killed = process_of(worker)
    killed.kill()
    assert await written_by(worker, records) == export(records, FORMATS["native"])
    assert gone(killed)
    assert process_of(worker) is not killed


async def test_a_process_that_died_while_idle_is_replaced(worker):
    """The task is still in the buffer of the pipe when the pipe is closed."""
    await worker.run(LARGE, int, "1")
    dead = process_of(worker)
    dead.kill()
    await asyncio.to_thread(dead.wait)
    assert await worker.run(LARGE, int, "2") == 2
    assert process_of(worker) is not dead


async def test_a_task_that_kills_every_process_fails(worker):
    with pytest.raises(WorkerDiedError):
        await worker.run(LARGE, os.abort)
    assert await worker.run(LARGE, len, "abc") == 3


async def test_an_exception_of_the_task_is_raised_here_and_the_process_continues(worker):
    assert await worker.run(LARGE, int, "7") == 7
    process = process_of(worker)
    with pytest.raises(ValueError, match="invalid literal"):
        await worker.run(LARGE, int, "seven")
    assert await worker.run(LARGE, int, "8") == 8
    assert process_of(worker) is process


def refuse_with_a_lock():
    raise OSError(threading.Lock(), "no disk")


async def test_results_and_exceptions_that_cannot_be_pickled_are_reported_and_the_process_continues(worker):
    with pytest.raises(TypeError, match="cannot pickle"):
        await worker.run(LARGE, threading.Lock)
    process = process_of(worker)
    with pytest.raises(RuntimeError, match=r"OSError: .*no disk"):
        await worker.run(LARGE, refuse_with_a_lock)
    assert await worker.run(LARGE, int, "8") == 8
    assert process_of(worker) is process


async def test_a_task_that_prints_does_not_disturb_the_results(worker):
    assert await worker.run(LARGE, print, "this goes to standard error") is None
    assert await worker.run(LARGE, int, "8") == 8


async def test_cancelling_stops_the_task_and_the_next_one_runs(worker):
    await worker.run(LARGE, int, "1")
    process = process_of(worker)
    endless = asyncio.create_task(worker.run(LARGE, signal.pause))
    waiting = asyncio.create_task(worker.run(LARGE, int, "2"))
    await asyncio.sleep(0)  # both tasks have started
    endless.cancel()
    with pytest.raises(asyncio.CancelledError):
        await endless
    assert await waiting == 2
    assert gone(process)


async def test_the_process_exits_with_its_proxy_even_if_that_is_killed(worker):
    """A killed proxy closes nothing itself; the pipe closes."""
    program = """
import asyncio, os, signal
from tokencache.api.export_worker import LARGE, ExportWorker

async def main():
    worker = ExportWorker()
    await worker.run(LARGE, int, "1")
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    # Both processes share standard error, so it ends only when both have exited.
    killed = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program], capture_output=True, timeout=PATIENCE)
    assert (killed.returncode, killed.stderr) == (-signal.SIGKILL, b"")


async def test_an_export_over_http_is_the_same_and_no_process_is_left_when_the_proxy_stops():
    records, store, before = large(), MemoryStore(), children()
    async with proxied(store=store) as rig:
        begun = await store.begin("large", "call", [])
        await store.commit("large", begun.epoch, "call", [Entry(turn, records.tokens[turn.id]) for turn in records.turns])
        exported = await rig.get("/tokencache/v1/sessions/large/trajectories?drift=off")
        assert exported["sequences"] == msgspec.json.decode(export(records, FORMATS["native"]))["sequences"]
        assert len(children() - before) == 1
    assert children() == before


def children():
    """The processes that this one started and that still run."""
    return {pid for listing in Path("/proc/self/task").glob("*/children") for pid in listing.read_text().split()}
