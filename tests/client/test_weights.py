"""Announcing and updating the weights with either client: whatever happens in between, nothing stays held."""

import asyncio
import contextlib
import time

import pytest

from tests.client.both import KINDS
from tests.proxy.kit import proxied
from tokencache.client import AnswerError, AsyncClient, Client, EnginePauseError, NotFoundError, WeightsConflictError
from tokencache.client.operations import ProxyAddress
from tokencache.client.protocol import Pause, ServerResponse
from tokencache.client.weight_operations import cancel, finish, planned
from tokencache.testing import SimulatedEngine

DOWN = ServerResponse(503, b'{"error": {"message": "the store failed: gone", "type": "store_error"}}')
ENDED = ServerResponse(409, b'{"error": {"message": "no such update", "type": "weights_conflict", "param": null, "code": 409}}')
DONE = ServerResponse(200, b'{"version": "8", "phase": "ready", "update": 2, "engines": []}')
PROXY = ProxyAddress("http://proxy/", None)


class Updating:
    """An update by either client, as an asynchronous context manager."""

    def __init__(self, context):
        self.context = context
        self.blocking = not hasattr(context, "__aenter__")

    async def __aenter__(self):
        return await (asyncio.to_thread(self.context.__enter__) if self.blocking else self.context.__aenter__())

    async def __aexit__(self, *raised):
        return await (asyncio.to_thread(self.context.__exit__, *raised) if self.blocking else self.context.__aexit__(*raised))


@pytest.fixture
async def rig():
    async with proxied(SimulatedEngine(dev_mode=True)) as made:
        yield made


@pytest.fixture(params=KINDS)
async def client(request, rig):
    made = KINDS[request.param](rig.url)
    yield made
    closed = made.close()
    if asyncio.iscoroutine(closed):
        await closed


async def done(result):
    return await result if asyncio.iscoroutine(result) else result


async def called(method, *args, **named):
    """Call a method of either client without blocking the proxy, which runs in this event loop."""
    return await done(await asyncio.to_thread(method, *args, **named))


async def test_a_version_is_announced_and_read(rig, client):
    assert (await called(client.weights)).phase == "unknown"
    assert (await called(client.set_weights, 7)).version == "7"
    await called(client.set_weights, phase="updating", owner="one")
    with pytest.raises(WeightsConflictError, match="'one' is updating"):
        await called(client.set_weights, 8, owner="two")
    await called(client.set_weights, phase="updating", owner="one", mode="keep", clear_cache=True)
    update = (await rig.store.weights()).update
    assert (update.mode, update.clears_cache, update.paused) == ("keep", True, False)
    known = await called(client.set_weights, 8, owner="one", engines=[rig.up])
    assert [(engine.url, engine.version) for engine in known.engines] == [(rig.up, "8")]
    with pytest.raises(NotFoundError, match="no engine http://nowhere:1"):
        await called(client.set_weights, 8, engines=["http://nowhere:1"])


async def test_the_weights_are_replaced_while_the_engine_is_paused(rig, client):
    async with Updating(client.update_weights(3, mode="keep")):
        assert rig.engine.dev_mode.paused == "keep"
        assert (await called(client.weights)).phase == "updating"
    assert rig.engine.dev_mode.calls == ["pause keep", "update_weight_version 3", "resume"]
    known = await called(client.weights)
    assert (known.version, known.phase) == ("3", "ready")


async def test_an_error_while_the_weights_are_replaced_leaves_the_version_unknown_and_nothing_held(rig, client):
    await called(client.set_weights, 2)
    with pytest.raises(KeyError):
        async with Updating(client.update_weights(3)):
            raise KeyError
    assert not rig.engine.dev_mode.paused
    assert (await called(client.weights)).phase == "unknown"


async def test_a_cancelled_task_leaves_nothing_held(rig, client):
    paused = asyncio.Event()

    async def update():
        async with Updating(client.update_weights(3)):
            paused.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(update())
    await paused.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert not rig.engine.dev_mode.paused
    assert (await called(client.weights)).phase == "unknown"


async def test_a_task_that_is_cancelled_at_the_end_of_an_update_leaves_nothing_held(rig):
    """The proxy has not answered yet when the trainer is interrupted."""
    asked = asyncio.Event()
    async with AsyncClient(rig.url) as client:

        async def update():
            async with client.update_weights(3):
                request = client._transport.http.request

                async def lost(**arguments):
                    if arguments["url"].endswith("/finish"):
                        asked.set()
                        await asyncio.Event().wait()
                    return await request(**arguments)

                client._transport.http.request = lost

        task = asyncio.create_task(update())
        await asked.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert not rig.engine.dev_mode.paused
        assert (await client.weights()).phase == "unknown"


async def test_a_version_that_cannot_be_used_is_refused_before_the_engine_is_paused(rig, client):
    with pytest.raises(ValueError, match="default"):
        async with Updating(client.update_weights("default")):
            raise AssertionError("the engine was paused")
    assert not rig.engine.dev_mode.calls


async def test_two_trainers_do_not_update_at_once(client):
    async with Updating(client.update_weights(3, owner="one")):
        with pytest.raises(WeightsConflictError):
            async with Updating(client.update_weights(4)):
                raise AssertionError("both are updating")
        assert (await called(client.weights)).owner == "one"


async def test_a_trainer_that_starts_again_replaces_its_own_update(rig, client):
    first = Updating(client.update_weights(3, owner="run-7"))
    await first.__aenter__()
    async with Updating(client.update_weights(4, owner="run-7")):
        assert rig.engine.dev_mode.paused
        with pytest.raises(WeightsConflictError, match="announce their version"):
            await first.__aexit__(None, None, None)
    assert (await called(client.weights)).version == "4"
    assert not rig.engine.dev_mode.paused


def test_an_engine_without_development_mode_is_named():
    async def run():
        async with proxied() as rig:
            with Client(rig.url) as client, pytest.raises(EnginePauseError, match="VLLM_SERVER_DEV_MODE=1"):
                async with Updating(client.update_weights(3)):
                    raise AssertionError("it was paused")
            with Client(rig.url) as client:
                async with Updating(client.update_weights(3, mode="none")):
                    pass
                assert (await called(client.weights)).version == "3"

    asyncio.run(run())


def drive(steps, *responses):
    """Answer the requests of an operation in turn, without waiting. Returns its result."""
    left = list(responses)
    try:
        step = next(steps)
        while True:
            step = next(steps) if isinstance(step, Pause) else steps.send(left.pop(0))
    except StopIteration as ended:
        assert not left
        return ended.value


def test_the_end_of_an_update_is_repeated_while_the_store_is_away():
    assert drive(finish(PROXY, planned(8, {})), *[DOWN] * 11, DONE).version == "8"


def test_the_end_of_an_update_is_not_repeated_after_its_timeout():
    with pytest.raises(AnswerError, match="the store failed"):
        drive(finish(PROXY, planned(8, {"timeout": 0.0})), *[DOWN] * 4)
    with pytest.raises(WeightsConflictError):
        drive(finish(PROXY, planned(8, {})), ENDED)


def test_a_failed_cancellation_is_a_note_on_the_error():
    error = KeyError()
    drive(cancel(PROXY, planned(8, {}), error), ENDED)
    assert not hasattr(error, "__notes__")
    drive(cancel(PROXY, planned(8, {}), error), *[ServerResponse(0, b"ConnectError: refused")] * 4)
    assert "the proxy ends it by itself in" in error.__notes__[0]


def test_the_timeout_counts_from_the_beginning():
    before = time.monotonic()
    assert before + 10.0 <= planned(8, {"timeout": 10.0}).deadline <= time.monotonic() + 10.0
