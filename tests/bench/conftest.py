"""The mock engine within the test's own loop; it keeps its requests."""

import asyncio
import contextlib

import pytest

from bench import mock
from bench.floor import SESSION
from bench.relay import listening, pool


class RecordingEngine(mock.Server):
    """The mock engine, which keeps its requests."""

    asked: list[tuple[bytes, bytes]]

    def _serve(self, body):
        self.asked.append((self.path, body))
        super()._serve(body)


@pytest.fixture
async def asked(monkeypatch):
    monkeypatch.setattr(RecordingEngine, "asked", [], raising=False)
    return RecordingEngine.asked


@pytest.fixture
async def engine(asked):
    server = await asyncio.get_running_loop().create_server(RecordingEngine, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


@pytest.fixture
async def serve(engine):
    """Serves a program of the bench in front of the engine; its `ask` makes a call within a session."""
    async with contextlib.AsyncExitStack() as opened:

        async def serve(program, **more):
            session = await opened.enter_async_context(pool())
            served = program(engine, session, **more)
            runner = await listening(0, served.handle)
            opened.push_async_callback(runner.cleanup)

            async def ask(body, rollout="s"):
                url, headers = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/chat/completions", {SESSION: rollout} if rollout else {}
                async with session.post(url, data=body, headers=headers) as answer:
                    return answer.status, await answer.read()

            served.ask = ask
            return served

        yield serve
