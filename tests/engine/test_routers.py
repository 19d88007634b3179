"""A router is recognized by its list of engines, and by nothing else."""

import pytest

from tokencache.engine.routers import is_router
from tokencache.engine.upstream import EngineResponse

ENGINES = b'{"urls":["http://10.0.0.7:8000"]}'
NO_ROUTE = EngineResponse(404, b'{"detail":"Not Found"}')


class Server:
    """Answers these paths, and no other."""

    def __init__(self, answers):
        self.answers = answers

    async def get(self, path):
        return self.answers.get(path, NO_ROUTE)


@pytest.mark.parametrize(
    ("path", "body"), [("/list_workers", ENGINES), ("/workers", b'{"workers":[{"url":"grpc://e","load":0}],"total":1}')]
)
async def test_a_list_of_engines(path, body):
    assert await is_router(Server({path: EngineResponse(200, body)}))


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, ENGINES),
        (401, b'{"error":"no key"}'),
        (200, b"<html>workers</html>"),
        (200, b'{"urls":[]}'),
        (200, b'{"urls":["a","b"]}'),
        (200, b'{"urls":[7]}'),
        (200, b'{"workers":["http://e"]}'),
        (200, b"[]"),
        (200, b"\xff"),
    ],
)
async def test_anything_else_is_none(status, body):
    assert not await is_router(Server({"/list_workers": EngineResponse(status, body), "/workers": EngineResponse(status, body)}))
    assert not await is_router(Server({}))
