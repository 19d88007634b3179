"""The prefix cache: its bound, what a turn's prefix replaces, and what a new prompt may begin with."""

import tracemalloc

from tokencache.core import ids
from tokencache.core.turn import Prefix
from tokencache.proxy.prefix_cache import PER_PREFIX, CachedPrefix, PrefixCache


class Store:
    """A store that has every prefix, and counts how often it is read."""

    def __init__(self):
        self.reads = 0

    async def prefix(self, session, turn):
        self.reads += 1
        return Prefix(ids.pack([1, 2, 3]), 1)


def prefix(tokens):
    return CachedPrefix(Prefix(ids.pack(tokens), 1), ids.Fragment.of(ids.pack(tokens)))


def cache(max_bytes):
    store = Store()
    return store, PrefixCache(store, max_bytes=max_bytes)


async def test_a_prefix_is_read_from_the_store_once():
    store, prefixes = cache(10_000)
    first = await prefixes.get("s", "a")
    assert await prefixes.get("s", "a") is first
    assert (store.reads, bytes(first.fragment)) == (1, b"1,2,3")


async def test_the_least_recently_used_prefix_is_dropped():
    store, prefixes = cache(2 * (PER_PREFIX + prefix([1, 2, 3]).fragment.size + 3 * ids.ID_BYTES))
    for turn in ("a", "b"):
        await prefixes.get("s", turn)
    await prefixes.get("s", "a")
    await prefixes.get("s", "c")
    assert store.reads == 3
    await prefixes.get("s", "a")
    assert store.reads == 3
    await prefixes.get("s", "b")
    assert store.reads == 4


async def test_one_prefix_is_kept_however_large_it_is():
    for max_bytes in (0, 1):
        store, prefixes = cache(max_bytes)
        prefixes.add("epoch", "a", "m", prefix([1, 2, 3]), instead_of=None)
        await prefixes.get("s", "a")
        assert store.reads == 0
        prefixes.add("epoch", "b", "m", prefix([4, 5, 6]), instead_of=None)
        await prefixes.get("s", "b")
        assert store.reads == 0
        await prefixes.get("s", "a")
        assert store.reads == 1


async def test_a_turn_replaces_its_parent():
    store, prefixes = cache(10_000)
    prefixes.add("epoch", "a", "m", prefix([1]), instead_of=None)
    longer = prefix([1, 2])
    prefixes.add("epoch", "b", "m", longer, instead_of="a")
    assert prefixes.nearby("epoch", "m", "a") == [("b", longer)]
    await prefixes.get("s", "a")
    assert store.reads == 1


def test_the_latest_turn_of_an_epoch_is_nearby():
    _, prefixes = cache(10_000)
    prefixes.add("one", "a", "m", prefix([1]), instead_of=None)
    prefixes.add("other", "b", "m", prefix([2]), instead_of=None)
    assert [turn for turn, _ in prefixes.nearby("one", "m", "b")] == ["b", "a"]
    assert [turn for turn, _ in prefixes.nearby("one", "m", None)] == ["a"]
    assert prefixes.nearby("third", "m", None) == prefixes.nearby("one", "judge", None) == []


def test_what_short_prefixes_take_is_counted():
    """Otherwise a hundred thousand short sessions take more than the limit."""
    _, prefixes = cache(10**6)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for i in range(500):
            kept = prefix([2000] * 20)
            assert bytes(kept.fragment)
            prefixes.add(f"epoch {i}", f"turn {i}", "m", kept, instead_of=None)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken < 1.25 * prefixes._prefixes.total
