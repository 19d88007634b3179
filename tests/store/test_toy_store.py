"""A store from outside the package: it passes the conformance checks, and one line makes `--store` find it."""

import aiohttp
import pytest

from tests.proxy.kit import CHAT, EPISODES, HEADER, user
from tests.store.conformance import CHECKS
from tokencache.config import Settings
from tokencache.server.serve import serving
from tokencache.store import STORES, StoreOptions, open_store
from tokencache.store.base import SessionDeletedError
from tokencache.store.memory import MemoryStore
from tokencache.testing import SimulatedEngine


class ToyStore:
    """Keeps sessions in a memory store of its own and counts the operations."""

    def __init__(self, place, options):
        self.place, self.ttl_seconds = place, options.ttl_seconds
        self.operations = 0
        self._inner = MemoryStore(ttl_seconds=options.ttl_seconds)

    def __getattr__(self, name):
        self.operations += 1
        return getattr(self._inner, name)


@pytest.fixture
def registered(monkeypatch):
    """All that has to be added to the package: one line."""
    monkeypatch.setitem(STORES, "toy", lambda url, options: ToyStore(url.partition(":")[2], options))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_it_passes_the_checks(check):
    await check(ToyStore("", StoreOptions()))


def test_its_url_selects_it(registered):
    made = open_store("toy:shelf", StoreOptions(ttl_seconds=5))
    assert (type(made), made.place, made.ttl_seconds) == (ToyStore, "shelf", 5)


async def test_the_proxy_uses_it(registered):
    async with (
        SimulatedEngine(episodes=EPISODES).serve() as upstream,
        serving(Settings(upstream=upstream, port=0, store="toy:shelf")) as (url, proxy),
        aiohttp.ClientSession(url) as http,
    ):
        body = {"model": "sim", "messages": [user("EPISODE:demo")]}
        async with http.post(CHAT, json=body, headers={HEADER: "s"}) as reply:
            assert reply.status == 200
        assert isinstance(proxy.store, ToyStore)
        assert proxy.store.operations > 0
        assert len(await proxy.store.turns("s")) == 1
        await proxy.store.delete("s")
        with pytest.raises(SessionDeletedError):
            await proxy.store.begin("s", "late", [])


def test_an_unknown_scheme_is_an_error():
    with pytest.raises(ValueError, match=r"no store has the scheme 'toy'"):
        open_store("toy:shelf")
