"""Fills real disks of 32 MB, and prints what it saw as JSON: a script for `test_full_disk.py`, which runs it in a mount namespace."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec

from tests.proxy.kit import proxied, user
from tests.store.conformance import build
from tokencache.store.base import StoreError, StoreFullError
from tokencache.store.file import FileStore
from tokencache.testing import SimulatedEngine

LARGE = build("t", tail=range(60_000)).entry


async def refused(operation):
    """The error of an operation; `""` if there is none."""
    try:
        await operation
    except (StoreError, StoreFullError) as why:
        return str(why)
    return ""


async def fill(store, session, begun):
    """Add turns to a session until one is refused; returns their number and the error."""
    n = 0
    while True:
        entry = msgspec.structs.replace(LARGE, turn=msgspec.structs.replace(LARGE.turn, id=f"t{n}"))
        why = await refused(store.commit(session, begun.epoch, "k", [entry]))
        if why:
            return n, why
        n += 1


async def by_sessions(path):
    """Fill the disk with turns, and free it by deleting sessions, again and again."""
    store = FileStore(f"file:{path}/sessions.db")
    await store.open()
    rounds = []
    for n in range(4):
        begun = {name: await store.begin(f"{name}{n}", "k", []) for name in ("small", "large")}
        turns, why = await fill(store, f"large{n}", begun["large"])
        rounds.append({
            "turns": turns, "why": why, "ready": await refused(store.ping()), "new": await refused(store.begin("new", "k", [])),
            "finished": await store.finish(f"small{n}"), "settled": await refused(store.settle(f"large{n}", begun["large"].epoch, "k")),
            "deleted": await store.delete(f"large{n}"), "ready after": await refused(store.ping()),
        })  # fmt: skip
    await store.close()
    return rounds


async def by_others(path):
    """Another program fills the disk to its last byte, also while the store is closed."""
    store = FileStore(f"file:{path}/sessions.db")
    await store.open()
    begun = {n: await store.begin(f"s{n}", "k", []) for n in range(40)}
    for n in range(40):
        await store.commit(f"s{n}", begun[n].epoch, "k", [build("t", tail=range(9000)).entry])
    subprocess.run(["dd", "if=/dev/zero", f"of={path}/other", "bs=4096"], check=False, capture_output=True)  # noqa: ASYNC221
    found = {"why": (await fill(store, "s0", begun[0]))[1], "ready": await refused(store.ping()), "free": os.statvfs(path).f_bavail}
    await store.close()
    store = FileStore(f"file:{path}/sessions.db")
    await store.open()
    found |= {"finished": await store.finish("s1"), "deleted": [await store.delete(f"s{n}") for n in range(39)]}
    (path / "other").unlink()
    found |= {"ready after": await refused(store.ping()), "new": await refused(store.begin("new", "k", []))}
    found["kept"] = [info.id async for info in store.sessions()]
    await store.close()
    return found


async def by_calls(path):
    """What a trainer sees of it over HTTP."""
    store = FileStore(f"file:{path}/sessions.db")
    async with proxied(SimulatedEngine(episodes={"e": ["One.", "Two.", "Three."]}), store) as rig:
        for name in ("kept", "large"):
            await rig.say(name, [user("EPISODE:e")])
        await fill(store, "large", await store.begin("large", "k", []))
        found = {"ready": await rig.readiness(), "new": await rig.post("new", messages=[user("EPISODE:e")])}
        for method, route in (("POST", "kept/finish"), ("DELETE", "large")):
            async with rig.http.request(method, f"{rig.url}/tokencache/v1/sessions/{route}") as answer:
                found[method] = answer.status
        return found | {
            "ready after": (await rig.readiness())["store"],
            "new after": (await rig.post("new", messages=[user("EPISODE:e")]))[0],
        }


def seen(folder, scenario):
    """Run a scenario on a disk of its own."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", folder], check=True)
    return asyncio.run(scenario(folder))


if __name__ == "__main__":
    print(json.dumps({run.__name__: seen(Path(sys.argv[1]) / run.__name__, run) for run in (by_sessions, by_others, by_calls)}))
