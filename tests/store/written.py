"""Writes what a version of tokencache stores, for the versions after it: `python -m tests.store.written FOLDER`.

    file.sql        a file store, as SQL
    redis.json      the keys of a Redis store, as DUMP writes them (base64)
    expected.json   of each store: its trajectories by session, and the messages of the harness that goes on

Run it with each release, in a folder of `tests/store/versions` with its name. `test_versions.py` opens all of them.
"""

import asyncio
import base64
import contextlib
import json
import sqlite3
import sys
import tempfile
from pathlib import Path

from redis.asyncio import Redis

from tests.proxy.kit import EPISODES, TOOLS, echo, proxied, results, user
from tests.support.redis_server import RealRedis
from tokencache.store.file import FileStore
from tokencache.store.redis import RedisStore
from tokencache.testing import SimulatedEngine

AGE = 100 * 365 * 86400
"""Seconds until the sessions expire."""


def engine() -> SimulatedEngine:
    return SimulatedEngine(episodes=EPISODES, seed=7)


async def played(store) -> dict[str, object]:
    """Play a finished rollout with two agents, and one that goes on; returns what is expected of the store."""
    async with proxied(engine(), store) as rig:
        for session in ("ended", "going"):
            messages = [user("EPISODE:demo")]
            for stream in (False, True):
                said = await rig.say(session, messages, tools=TOOLS, stream=stream)
                messages += [echo(said), *results(said)]
        await rig.say("ended", [user("Another agent.")])
        async with rig.http.post(f"{rig.url}/tokencache/v1/sessions/ended/finish", json={"reward": 0.5}) as answer:
            assert answer.status == 200
        return {"trajectories": {session: await rig.exported(session) for session in ("ended", "going")}, "messages": messages}


async def write(folder: Path) -> None:
    """Write all three files into an empty folder."""
    with tempfile.TemporaryDirectory() as stored:
        expected = {"file": await played(FileStore(f"file:{stored}/store", ttl_seconds=AGE))}
        with contextlib.closing(sqlite3.connect(f"{stored}/store")) as db:
            (folder / "file.sql").write_text("\n".join(db.iterdump()))
    with RealRedis() as server:
        expected["redis"] = await played(RedisStore(server.url, ttl_seconds=AGE))
        async with Redis.from_url(server.url) as client:
            dumped = {key.decode(): base64.b64encode(await client.dump(key)).decode() for key in sorted(await client.keys())}
    (folder / "redis.json").write_text(json.dumps(dumped, indent=0))
    (folder / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    made = Path(sys.argv[1])
    made.mkdir(parents=True)
    asyncio.run(write(made))
