"""The store fails at the end of a call: until the trainer can see what is missing, the call stays open, so no trainer takes the session."""

import asyncio

import pytest

from tests.proxy.kit import proxied, user
from tests.support.waiting import until
from tokencache.store.base import StoreError
from tokencache.store.file import FileStore
from tokencache.store.memory import MemoryStore


class Watched(MemoryStore):
    """A memory store that accepts no turns, and notes after each other write whether the session looks complete."""

    def __init__(self):
        super().__init__()
        self.looks_complete = []

    async def commit(self, *args, **options):
        raise StoreError("commit is broken")

    async def settle(self, session, *args, **options):
        await super().settle(session, *args, **options)
        await self._note(session)

    async def add_incidents(self, session, *args, **options):
        await super().add_incidents(session, *args, **options)
        await self._note(session)

    async def _note(self, session):
        info = await self.session(session)
        self.looks_complete.append(not info.open_calls and not any(incident.hole for incident in info.incidents))


async def test_a_session_never_looks_complete_without_its_turn(monkeypatch):
    monkeypatch.setattr("tokencache.proxy.ledger.RETRY_SECONDS", 0.005)
    store = Watched()
    async with proxied(store=store) as rig:
        await rig.say("s", [user("EPISODE:talk")])

        async def closed():
            return not (await rig.info())["open_calls"]

        await until(closed)
    assert store.looks_complete == [False]


@pytest.mark.parametrize("policy", ["relay", "fail"])
async def test_a_call_that_was_opened_without_an_answer_is_closed(monkeypatch, policy):
    """Its session would never be ready for a consumer: its replica lives, so nobody else closes the call."""
    monkeypatch.setattr("tokencache.proxy.ledger.RETRY_SECONDS", 0.005)
    store = MemoryStore()
    async with proxied(store=store, on_store_error=policy, repeats="off") as rig:
        begin = store.begin

        async def loses_its_answer(*args, **more):
            store.begin = begin
            await begin(*args, **more)
            raise StoreError("slow")

        store.begin = loses_its_answer
        status, _ = await rig.post("s", messages=[user("EPISODE:talk")])
        assert status == (200 if policy == "relay" else 503)

        async def closed():
            return not (await rig.info())["open_calls"]

        await until(closed)
        info = await rig.info()
        assert [(one["kind"], one["hole"]) for one in info["incidents"]] == [("store-error", policy == "relay")]
        assert (info["outcome"], info["complete"]) == ("store", policy == "fail")


async def test_a_session_that_cannot_be_read_does_not_keep_others_from_being_saved(monkeypatch):
    """Its record is damaged, so the store fails for it alone, and for ever."""
    monkeypatch.setattr("tokencache.proxy.ledger.RETRY_SECONDS", 0.005)
    store = MemoryStore()
    async with proxied(store=store) as rig:
        begin, session = store.begin, store.session

        async def damaged(name, *args, **more):
            if name == "damaged":
                raise StoreError("the data of session damaged is damaged")
            return await (begin if args else session)(name, *args, **more)

        store.begin = store.session = damaged
        assert (await rig.post("damaged", messages=[user("EPISODE:talk")]))[0] == 200
        commit = store.commit

        async def fails(*_, **__):
            store.commit = commit
            raise StoreError("slow")

        store.commit = fails
        assert (await rig.post("s", messages=[user("EPISODE:talk")]))[0] == 200

        async def noted():
            info = await session("s")
            return [one.kind for one in info.incidents] == ["store-error"] and not info.open_calls

        await until(noted)
        store.begin, store.session = begin, session


async def test_a_session_that_cannot_be_read_does_not_keep_others_from_being_saved_at_the_end():
    class Damaged(MemoryStore):
        damaged = frozenset()

        async def settle(self, session, *args):
            if session in self.damaged:
                raise StoreError(f"the data of session {session} is damaged")
            await super().settle(session, *args)

        async def commit(self, *_, **__):
            raise StoreError("slow")

    store, names = Damaged(), ["a", "s", "b"]
    async with proxied(store=store) as rig:
        store.damaged = frozenset(names)
        for name in names:
            assert (await rig.post(name, messages=[user("EPISODE:talk")]))[0] == 200
        store.damaged = frozenset({"a", "b"})
        backlog = rig.proxy.ledger._backlog
        await backlog.close()
        assert sorted(backlog._waiting) == ["a", "b"]
        info = await store.session("s")
        assert ([one.kind for one in info.incidents], info.open_calls) == (["store-error"], ())


@pytest.mark.parametrize("policy", ["relay", "fail"])
@pytest.mark.parametrize("name", ["memory", "file"])
async def test_a_turn_that_was_stored_although_the_answer_was_lost_is_no_hole(monkeypatch, tmp_path, policy, name):
    """Under the strict policy no client received it: its harness has failed unless it comes back."""
    monkeypatch.setattr("tokencache.proxy.ledger.RETRY_SECONDS", 0.005)
    store = MemoryStore() if name == "memory" else FileStore(f"file:{tmp_path}/sessions.db")
    async with proxied(store=store, on_store_error=policy) as rig:
        commit = store.commit

        async def lost(*args, **more):
            store.commit = commit
            await commit(*args, **more)
            raise StoreError("no answer")

        store.commit = lost
        asked = [user("EPISODE:talk")]
        status, _ = await rig.post("s", messages=asked)
        await rig.proxy.ledger.settled()
        info = await rig.info()
        assert (info["complete"], info["turns"], info["open_calls"]) == (True, 1, [])
        assert (status, info["outcome"], len(info["incidents"])) == ((200, "ok", 0) if policy == "relay" else (503, "store", 1))
        await rig.say("s", asked)
        assert (await rig.info())["outcome"] == "ok"


async def test_a_call_that_the_store_did_not_open_does_not_mark_a_session_that_is_created_again():
    async with proxied() as rig:
        begin, send, reached, go = rig.store.begin, rig.proxy.upstream.send, asyncio.Event(), asyncio.Event()

        async def fails(*_, **__):
            rig.store.begin = begin
            raise StoreError("slow")

        async def slow(*args, **more):
            reached.set()
            await go.wait()
            return await send(*args, **more)

        rig.store.begin, rig.proxy.upstream.send = fails, slow
        call = asyncio.create_task(rig.post("s", messages=[user("EPISODE:talk")]))
        await reached.wait()
        async with rig.http.delete(f"{rig.url}/tokencache/v1/sessions/s?reuse=true") as answer:
            assert answer.status == 200
        async with rig.http.post(f"{rig.url}/tokencache/v1/sessions", json={"session": "s"}) as answer:
            assert answer.status == 201
        go.set()
        assert (await call)[0] == 200
        await rig.proxy.ledger.settled()
        info = await rig.info()
        assert (info["complete"], info["incidents"]) == (True, [])
        assert not rig.proxy.ledger._backlog._unopened
