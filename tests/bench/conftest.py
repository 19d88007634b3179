"""The mock engine within the test's own loop; it keeps its requests."""

import asyncio

import pytest

from bench import mock


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
