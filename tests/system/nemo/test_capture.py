"""Gym's capture on tokencache's stores: Gym's own conformance checks, clients that always differ, and servers that are killed."""

import asyncio
import importlib
import json
import random
import sys
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tests.support.redis_server import RealRedis
from tests.system.nemo.gym_rollouts import Rollout, Status, delivered, gym, resolution
from tokencache.errors import TokencacheError
from tokencache.integrations.nemo_gym.capture import CaptureError, CaptureResolver, CaptureSink, CaptureSource
from tokencache.integrations.nemo_gym.proving import ProvingSource

conformance = importlib.import_module(f"{gym.__name__}.conformance")
pytestmark = pytest.mark.ran_with(trainer="nemo-gym")
ROOT = resolution(Status.ROOT)


@pytest.fixture(scope="module")
def redis():
    with RealRedis() as server:
        yield f"redis://127.0.0.1:{server.port}/0"


@pytest.fixture(params=["memory", "file", "redis"])
def url(request, tmp_path):
    if request.param == "redis":
        return request.getfixturevalue("redis")
    return "memory:" if request.param == "memory" else f"file:{tmp_path / 'capture.db'}"


@asynccontextmanager
async def clients(url, count=1):
    """So many sinks, sources and resolvers, each a client of its own."""
    async with AsyncExitStack() as stack:
        made = [[kind(url) for _ in range(count)] for kind in (CaptureSink, CaptureSource, CaptureResolver)]
        for kind in made:
            for client in kind:
                stack.push_async_callback(client.close)
        yield made


@pytest.mark.parametrize("proving", [False, True], ids=["plain", "proving"])
async def test_gym_s_own_checks(url, proving):
    def source():
        return ProvingSource(CaptureSource(url)) if proving else CaptureSource(url)

    checked = [lambda: CaptureSink(url), source, lambda: CaptureResolver(url)]
    passed = await conformance.run_conformance(*checked, rollout_id=f"conformance-{proving}")
    assert len(passed) == 10
    assert passed[-1] == "begin_call_custody"


@pytest.mark.parametrize("deltas", [False, True], ids=["whole prompts", "delta records"])
async def test_a_call_that_another_client_recorded_is_the_parent_at_once(url, deltas):
    """320 calls of 16 rollouts at once: one client looks up the parent, another records the call."""
    calls = 20

    async def run(rollout, seed):
        order = random.Random(seed)
        for _ in range(calls):
            sink, resolver = order.sample(range(4), 2)
            before = rollout.tokens if rollout.calls else None
            found = await resolvers[resolver].resolve(rollout.name, rollout.items)
            assert found.status == (Status.ROOT if before is None else Status.RESOLVED)
            assert (found.match and list(found.match.cumulative_token_ids)) == before
            entry = rollout.record(found)
            await sinks[sink].begin_call(rollout.name, entry.model_call_id)
            await sinks[sink].put(entry)

    async with clients(url, 4) as (sinks, sources, resolvers):
        rollouts = [Rollout(f"busy-{deltas}-{number}", deltas=deltas) for number in range(16)]
        await asyncio.gather(*(run(rollout, seed) for seed, rollout in enumerate(rollouts)))
        for rollout in rollouts:
            snapshot = await sources[0].freeze(rollout.name)
            assert not snapshot.incomplete
            assert (len(snapshot.entries), delivered(snapshot.entries)) == (calls, rollout.tokens)
            assert await sources[1].drop(rollout.name, snapshot_id=snapshot.snapshot_id, version=snapshot.version)


async def test_two_records_for_one_call_make_the_rollout_incomplete_and_neither_is_a_parent(url):
    async with clients(url, 2) as (sinks, (source, _), (resolver, _)):
        rollout = Rollout("twice")
        first = rollout.record(ROOT)
        other, third = (first.model_copy(update={"generation_log_probs": [value, value]}) for value in (-0.5, -0.7))
        ended = await asyncio.gather(*(sink.put(entry) for sink, entry in zip(sinks, (first, other), strict=True)), return_exceptions=True)
        assert {type(end) for end in ended} <= {type(None), CaptureError}
        with pytest.raises(CaptureError, match="call twice-1 of rollout twice has another record"):
            await sinks[0].put(third)
        found = await resolver.resolve("twice", rollout.items)
        snapshot = await source.freeze("twice")
        assert snapshot.incomplete
        if ended == [None, None]:  # both were stored at the same time
            assert (found.status, snapshot.entries) == (Status.UNRESOLVED, ())


async def test_a_rollout_that_was_frozen_or_retired_accepts_no_call(url):
    async with clients(url) as ((sink,), (source,), (resolver,)):
        rollout = Rollout("over")
        await sink.put(rollout.record(ROOT))
        snapshot = await source.freeze("over")
        with pytest.raises(TokencacheError, match="over"):
            await sink.begin_call("over", "late")
        assert await source.drop("over", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        with pytest.raises(TokencacheError, match="over"):
            await sink.put(rollout.record(ROOT))
        assert (await resolver.resolve("over", rollout.items)).status == Status.UNRESOLVED
        gone = await source.freeze("over")
        assert (gone.entries, await source.drop("over", snapshot_id=gone.snapshot_id, version=gone.version)) == ((), False)


async def test_a_call_that_the_engine_refused_is_no_hole(url):
    async with clients(url) as ((sink,), (source,), _):
        await sink.put(Rollout("refused").record(ROOT))
        await sink.begin_call("refused", "long")
        await sink.record_engine_refusal("refused", model_call_id="long", code="context_length", parent_call_id=None)
        snapshot = await source.freeze("refused")
        assert (len(snapshot.entries), snapshot.incomplete) == (1, False)


async def test_a_rollout_id_that_gym_refuses_is_refused():
    with pytest.raises(ValueError, match="Invalid rollout id"):
        await CaptureSink("memory:").begin_call("../x", "c")


SERVER = """
import asyncio, json, sys
from tokencache.integrations.nemo_gym.capture import CaptureResolver, CaptureSink, gym

async def main(url):
    sink, resolver = CaptureSink(url), CaptureResolver(url)
    for line in sys.stdin:
        command, rollout, value = json.loads(line)
        if command == "resolve":
            found = await resolver.resolve(rollout, value)
            answer = [found.status.value, found.match and [found.match.model_call_id, found.match.cumulative_token_ids, found.match.digest]]
        else:
            answer = await sink.begin_call(rollout, value) if command == "begin" else await sink.put(gym.TokenEntry.model_validate(value))
        print(json.dumps(answer), flush=True)

asyncio.run(main(sys.argv[1]))
"""


class Server:
    """A process with a sink and a resolver, as a replica of Gym's model server has them."""

    def __init__(self, url):
        self.url = url

    async def start(self):
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        self.process = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVER, self.url, **pipes, limit=2**20)
        return self

    async def ask(self, *command):
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        return json.loads(await self.process.stdout.readline())

    async def kill(self):
        self.process.kill()
        await self.process.wait()


async def test_a_server_that_is_killed_loses_no_recorded_call_and_hides_no_lost_one(redis):
    """Three servers; three times, the one that has begun a call is killed and another takes its place."""
    killed = {"killed-1": 2, "killed-3": 1, "killed-4": 3}
    servers = await asyncio.gather(*(Server(redis).start() for _ in range(3)))
    order, rollouts = random.Random(5), [Rollout(f"killed-{number}") for number in range(6)]
    try:
        for call in range(5):
            for rollout in rollouts:
                status, match = await order.choice(servers).ask("resolve", rollout.name, rollout.items)
                assert (status, match and match[1]) == (("resolved", rollout.tokens) if call else ("root", None))
                found = gym.LineageResolution(Status(status), match=match and gym.LineageMatch(match[0], tuple(match[1]), match[2]))
                at = order.randrange(3)
                if killed.get(rollout.name) == call:
                    await servers[at].ask("begin", rollout.name, "lost")
                    await servers[at].kill()
                    servers[at] = await Server(redis).start()
                entry = rollout.record(found)
                await servers[at].ask("begin", rollout.name, entry.model_call_id)
                await servers[at].ask("put", rollout.name, entry.model_dump(mode="json"))
    finally:
        await asyncio.gather(*(server.kill() for server in servers))
    async with clients(redis) as (_, (source,), _):
        for rollout in rollouts:
            snapshot = await source.freeze(rollout.name)
            assert delivered(snapshot.entries) == rollout.tokens
            assert snapshot.incomplete == (rollout.name in killed)
