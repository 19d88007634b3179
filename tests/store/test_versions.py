"""Stores that an older version wrote open, have the same trajectories, and take further turns. `written` made them."""

import base64
import contextlib
import json
import sqlite3
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.proxy.kit import TOOLS, proxied
from tests.store.written import AGE, engine
from tokencache.store.file import FileStore
from tokencache.store.redis import RedisStore
from tokencache.trajectories.digest import digest_of

VERSIONS = sorted(Path(__file__).with_name("versions").iterdir())


async def opened(kind, version, folder, redis_url):
    """A copy of a version's store."""
    if kind == "file":
        with contextlib.closing(sqlite3.connect(folder / "store")) as db:
            db.executescript((version / "file.sql").read_text())
        return FileStore(f"file:{folder}/store", ttl_seconds=AGE)
    async with Redis.from_url(redis_url) as client:
        await client.flushall()
        for key, value in json.loads((version / "redis.json").read_text()).items():
            await client.restore(key, 0, base64.b64decode(value))
    return RedisStore(redis_url, ttl_seconds=AGE)


def differences(expected, found, at=""):
    """Where a value lacks what another has. Newer versions may have added members, and the digest is that of all members."""
    if isinstance(expected, dict) and isinstance(found, dict):
        return [line for name in expected if name != "digest" for line in differences(expected[name], found.get(name), f"{at}.{name}")]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        return [line for n, both in enumerate(zip(expected, found, strict=True)) for line in differences(*both, f"{at}[{n}]")]
    return [] if expected == found else [f"{at}: {found!r} instead of {expected!r}"]


@pytest.mark.parametrize("kind", ["file", pytest.param("redis", marks=pytest.mark.redis)])
@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
async def test_a_store_of_an_older_version_goes_on(redis_server, tmp_path, kind, version):
    expected = json.loads((version / "expected.json").read_text())[kind]
    async with proxied(engine(), await opened(kind, version, tmp_path, redis_server.url)) as rig:
        for session, trajectories in expected["trajectories"].items():
            assert not differences(trajectories, await rig.exported(session))
            assert digest_of(trajectories) == trajectories["digest"]
        (before,) = expected["trajectories"]["going"]["sequences"]
        await rig.say("going", expected["messages"], tools=TOOLS)
        (sequence,) = (await rig.exported("going"))["sequences"]
        assert sequence["token_ids"][: len(before["token_ids"])] == before["token_ids"]
        assert [turn["match"] for turn in sequence["turns"]] == ["root", "continue", "continue"]


def test_a_lost_member_is_found():
    assert differences({"a": [{"b": 1}]}, {"a": [{"c": 1}]}) == [".a[0].b: None instead of 1"]
