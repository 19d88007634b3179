"""Checks of pages and of states that are read together."""

from tests.store.conformance.support import build, name_of, raises, record, same, true
from tokencache.core.session import LabelChanges, Labels, Reward, SessionSettings
from tokencache.store.base import CursorError, Page, Store


async def _walk(store: Store, limit: int) -> list[str]:
    """Walk over all sessions and return their names. A walk that does not end is an error."""
    page, names = Page([], b""), list[str]()
    for _ in range(10_000):
        page = await store.page(page.cursor, limit)
        names += [info.id for info in page.sessions]
        if not page.cursor:
            return names
    raise AssertionError("the walk does not end")


async def check_pages(store: Store) -> None:
    """A walk returns every session that exists throughout, with the state that `session` returns."""
    mark = name_of("page")
    names = [f"{mark}-{n}-☕}}" for n in range(120)]
    for n, name in enumerate(names):
        await store.define(name, SessionSettings(tenant=str(n)), Labels(str(n)))
    for limit in (1, 7, 1000):
        same({name for name in await _walk(store, limit) if name.startswith(mark)}, set(names), f"a walk in pages of {limit}")
    page = await store.page(b"", 5)
    true(len(page.sessions) < len(names), "a page is not everything")
    for info in page.sessions:
        same(info, await store.session(info.id), "a session of a page")
    stays, found = set(names[::3]), set[str]()
    for name in set(names) - stays:
        await store.delete(name)
    while page.cursor:
        found |= {info.id for info in page.sessions}
        page = await store.page(page.cursor, 5)
        await store.begin(f"{mark}-new-{len(found)}", "k", [])
    found |= {info.id for info in page.sessions}
    same(stays - found, set(), "sessions that existed throughout and were not returned")
    for info in [info async for info in store.sessions() if info.id.startswith(mark)]:
        await store.delete(info.id)


async def check_foreign_cursor(store: Store) -> None:
    """A cursor that the store has not made is refused."""
    await record(store, name_of("cursor"), build("a"))
    async with raises(CursorError, "a cursor of another store"):
        await store.page(b"\xff\xfe no cursor", 5)


async def check_states(store: Store) -> None:
    """The states of many sessions are those that `session` returns, in the order given."""
    mark = name_of("states")
    names = [f"{mark}-{n}" for n in range(300)]
    for n, name in enumerate(names):
        if n % 3:
            await record(store, name, build("a", keys=(b"c",)))
        if n % 3 > 1:
            await store.add_reward(name, Reward(float(n), {"x": 1.0}))
            await store.set_labels(name, LabelChanges(f"g{n}"))
    await store.delete(names[1])
    found = await store.states(names)
    same(found, [await store.session(name) for name in names], "states")
    same([info is None for info in found[:4]], [True, True, False, True], "sessions that do not exist")
    same(await store.states([]), [], "no states")
    for name in names:
        await store.delete(name)
