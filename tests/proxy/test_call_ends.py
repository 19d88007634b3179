"""However a call ends, the session has exactly the incident and the outcome that follow: in each store, and after the proxy's restart."""

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import aiohttp
import pytest

from tests.proxy.kit import CHAT, EPISODES, HEADER, Rig, proxied, user
from tests.proxy.test_client_gone import leave_after
from tests.proxy.test_retries import gate, leave, settled
from tests.support.material import require
from tests.support.redis_server import RealRedis, find_binary
from tests.support.waiting import until
from tokencache.config import Settings
from tokencache.server.serve import serving
from tokencache.store.base import StoreError
from tokencache.store.file import FileStore
from tokencache.store.memory import MemoryStore
from tokencache.store.redis import RedisStore
from tokencache.testing import Fault, SimulatedEngine

ASK: dict[str, Any] = {"messages": [user("EPISODE:talk")]}
SESSION = "/tokencache/v1/sessions/s"


@pytest.fixture(scope="module")
def redis_url():
    require("redis-server", find_binary())
    with RealRedis() as server:
        yield server.url


@pytest.fixture(params=["memory", "file", pytest.param("redis", marks=pytest.mark.redis)])
def opened(request, tmp_path):
    """Opens the store, and opens it again after a restart; one in memory is gone by then."""
    if request.param == "memory":
        return MemoryStore
    if request.param == "file":
        return lambda: FileStore(f"file:{tmp_path}/sessions.db")
    url, prefix = request.getfixturevalue("redis_url"), secrets.token_hex(8)
    return lambda: RedisStore(url, prefix=prefix)


class Ended(NamedTuple):
    """How a session ends by `act`, after one good turn: further turns, its incidents (kind → whether it is a hole), its outcome.

    `settings` are those of the proxy.
    """

    act: Callable[[Rig], Awaitable[None]]
    turns: int
    incidents: dict[str, bool]
    outcome: str
    settings: dict[str, Any] = {}  # noqa: RUF012 - never changed


async def send(rig: Rig, **more: Any) -> None:
    with contextlib.suppress(aiohttp.ClientError):
        async with rig.http.post(rig.url + CHAT, json={"model": "sim", **ASK, **more}, headers={HEADER: "s"}) as answer:
            await answer.read()


def after(fault: Fault | None, **more: Any) -> Callable[[Rig], Awaitable[None]]:
    """Make a call, to which the fault happens."""

    async def act(rig: Rig) -> None:
        rig.engine.faults.append(fault)
        await send(rig, **more)

    return act


def failing(operation: str, *, after_it: bool = False) -> Callable[[Rig], Awaitable[None]]:
    """Make a call during which the store fails once; with `after_it` it has done the operation, and its answer is lost."""

    async def act(rig: Rig) -> None:
        works = getattr(rig.store, operation)

        async def fails(*args: Any, **more: Any) -> None:
            setattr(rig.store, operation, works)
            if after_it:
                await works(*args, **more)
            raise StoreError("a failure that was asked for")

        setattr(rig.store, operation, fails)
        await send(rig, temperature=0.5)
        await rig.proxy.ledger.settled()

    return act


async def gone(rig: Rig) -> None:
    rig.engine.token_delay = 0.05
    await leave_after(rig, 4)


async def unheard(rig: Rig) -> None:
    rig.engine.token_delay = 0.002
    await leave(rig)


async def unheard_at_once(rig: Rig) -> None:
    rig.engine.token_delay = 0.05
    await leave(rig)


async def left_while_stored(rig: Rig) -> None:
    go, call = gate(rig), asyncio.create_task(send(rig))
    await rig.engine.until(lambda: len(rig.ground_truth()) == 2 and bool(rig.ground_truth()[1].finish_reason))
    await until(lambda: rig.proxy._calls._calls and next(iter(rig.proxy._calls._calls.values())).record.state == "storing")
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await until(lambda: bool(rig.proxy.ledger._tasks))
    go.set()


async def in_flight(rig: Rig, path: str, method: str = "POST") -> None:
    go, call = gate(rig), asyncio.create_task(send(rig))
    await until(lambda: rig.proxy._calls._calls and next(iter(rig.proxy._calls._calls.values())).record.state == "storing")
    async with rig.http.request(method, rig.url + SESSION + path) as answer:
        assert answer.status == 200
    go.set()
    await call


async def sealed_in_flight(rig: Rig) -> None:
    await in_flight(rig, "/seal?force=true")


async def finished_in_flight(rig: Rig) -> None:
    await in_flight(rig, "/finish")


async def late(rig: Rig) -> None:
    await rig.store.finish("s")
    await send(rig)


STRICT, NOW = {"on_store_error": "fail"}, {"linger": 0}
LOST = {"store-error": True}
ENDS = {
    "400": Ended(after(Fault.answer(400, "{}")), 0, {"engine-refused": False}, "ok"),
    "500": Ended(after(Fault.answer(500, "{}")), 0, {"engine-refused": False}, "engine"),
    "503": Ended(after(Fault.answer(503, "{}")), 0, {"engine-refused": False}, "engine"),
    "closed": Ended(after(Fault.close()), 0, {"upstream-broke": True}, "engine"),
    "half": Ended(after(Fault.truncated_json()), 0, {"unreadable-reply": True, "no-token-ids": True}, "ok"),
    "cut": Ended(after(Fault.cut(4), stream=True), 1, {"upstream-broke": True}, "engine"),
    "error": Ended(after(Fault.error_event(4), stream=True), 1, {"engine-error": True}, "engine"),
    "refused-in-stream": Ended(after(Fault.error_event(0, status=400), stream=True), 0, {"engine-refused": False}, "ok"),
    "aborted": Ended(after(Fault.abort(3), stream=True), 1, {"engine-aborted": False}, "engine"),
    "broken-begin": Ended(failing("begin"), 0, LOST, "store"),
    "unanswered-begin": Ended(failing("begin", after_it=True), 0, LOST, "store"),
    "refused-begin": Ended(failing("begin"), 0, {"store-error": False}, "store", STRICT),
    "refused-unanswered-begin": Ended(failing("begin", after_it=True), 0, {"store-error": False}, "store", STRICT),
    "broken-commit": Ended(failing("commit"), 0, LOST, "store"),
    "unanswered-commit": Ended(failing("commit", after_it=True), 1, {}, "ok"),
    "refused-unanswered-commit": Ended(failing("commit", after_it=True), 1, {"store-error": False}, "store", STRICT),
    "refused-commit": Ended(failing("commit"), 0, LOST, "store", STRICT),
    "gone": Ended(gone, 1, {"client-gone": False}, "harness"),
    "unheard": Ended(unheard, 1, {}, "harness"),
    "unheard-at-once": Ended(unheard_at_once, 0, {"client-gone": False, "nothing-received": True}, "harness", NOW),
    "left-while-stored": Ended(left_while_stored, 1, {"client-gone": False}, "harness"),
    "sealed": Ended(sealed_in_flight, 1, {"sealed-early": True}, "canceled"),
    "finished": Ended(finished_in_flight, 1, {}, "ok"),
    "late": Ended(late, 0, {"late-call": False}, "ok"),
    "budget": Ended(send, 0, {"budget-spent": False}, "budget", {"max_calls": 1}),
    "choices": Ended(lambda rig: send(rig, n=3), 3, {}, "ok"),
}


async def found(rig: Rig) -> tuple[int, dict[str, bool], str, bool]:
    """What the session says, as a summary and as a trajectory."""
    info, exported = await rig.info(), await rig.exported()
    for name in ("outcome", "complete", "valid"):
        assert info[name] == exported[name]
    assert len(info["incidents"]) == len({one["kind"] for one in info["incidents"]})
    return info["turns"] - 1, {one["kind"]: one["hole"] for one in info["incidents"]}, info["outcome"], info["complete"]


@pytest.mark.parametrize("end", ENDS)
async def test_a_call_that_ends_so_leaves_exactly_that(opened, end, monkeypatch):
    monkeypatch.setattr("tokencache.proxy.ledger.RETRY_SECONDS", 0.005)
    act, turns, incidents, outcome, settings = ENDS[end]
    expected = turns, incidents, outcome, not any(incidents.values())
    async with proxied(SimulatedEngine(episodes=EPISODES), opened(), **settings) as rig:
        await rig.say("s", **ASK, temperature=0.5)
        await act(rig)
        await settled(rig)
        await rig.proxy.ledger.settled()
        assert await found(rig) == expected
    if opened is not MemoryStore:
        async with proxied(store=opened()) as rig:
            assert await found(rig) == expected


@pytest.mark.parametrize("opened", ["file", pytest.param("redis", marks=pytest.mark.redis)], indirect=True)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_in_progress_when_the_proxy_stops_is_recorded(opened, stream):
    async with proxied(SimulatedEngine(episodes=EPISODES)) as rig:
        async with serving(Settings(upstream=rig.up, port=0), opened(), drain_seconds=0.0) as (url, _):
            stopping = dataclasses.replace(rig, url=url)
            await stopping.say("s", **ASK)
            rig.engine.token_delay = 0.2
            call = asyncio.create_task(send(stopping, stream=stream))
            await until(lambda: len(rig.ground_truth()) == 2 and len(rig.ground_truth()[1].completion_ids) > 1)
        await call
    async with proxied(store=opened()) as rig:
        incidents = {"client-gone": False} if stream else {"client-gone": False, "nothing-received": True}
        assert await found(rig) == (int(stream), incidents, "harness", stream)
        assert not (await rig.info())["open_calls"]
