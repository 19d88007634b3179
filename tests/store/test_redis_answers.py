"""A server that answers something else than it must: no answer becomes a secret, a turn, a success or an unexpected exception."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from tests.store.conformance import build, record
from tests.store.conformance.forks import fork
from tests.store.test_redis_faults import operations
from tests.support.waiting import PATIENCE
from tokencache.errors import TokencacheError
from tokencache.store.base import SessionGoneError, SettingsChangedError, StoreError
from tokencache.store.redis import RedisStore, answers, capacity, store
from tokencache.wakeup import end

ANSWERS = {
    "nil": b"$-1\r\n",
    "nil list": b"*-1\r\n",
    "empty list": b"*0\r\n",
    "list": b"*1\r\n$4\r\nPONG\r\n",
    "list of nil": b"*1\r\n$-1\r\n",
    "list of number": b"*1\r\n:0\r\n",
    "nested lists": b"*2\r\n*0\r\n*0\r\n",
    "hit at -1": b"*2\r\n:-1\r\n$4\r\n-mm\x80\r\n",
    "numbers": b"*16\r\n" + 16 * b":1\r\n",
    "nils": b"*16\r\n" + 16 * b"$-1\r\n",
    "0": b":0\r\n",
    "1": b":1\r\n",
    "7": b":7\r\n",
    "-1": b":-1\r\n",
    "empty": b"$0\r\n\r\n",
    "word": b"$4\r\nPONG\r\n",
    "31 bytes": b"$31\r\n" + 31 * b"s" + b"\r\n",
    "33 bytes": b"$33\r\n" + 33 * b"s" + b"\r\n",
    "queued": b"+QUEUED\r\n",
    "error": b"-ERR odd\r\n",
    "another call's": b"*2\r\n$5\r\nother\r\n:1\r\n",
    "error in a list": b"*2\r\n-ERR odd\r\n-ERR odd\r\n",
}
YES_NO = {
    *("mark_orphaned", "mark_wanted", "add_incidents", "finish", "seal", "set_labels", "add_reward", "delete"),
    *("delete_document", "put_media", "replace_weights", "offer", "lease", "extend", "release"),
}
COUNTS = {"unbind_key", "put_engine", "drop_engine", "queue_length", "put_demand", "drop_demand"}
ABSENT = {
    *("settings", "find", "prefix", "session", "states", "turns", "tokens", "contexts", "rewards", "documents", "media"),
    *("stored_media", "engines", "demands"),
}
"""Operations to which an empty list is an answer."""
ACCEPTED = {
    "nil": {"binding_of_key", "weights"},
    "nil list": {"binding_of_key", "weights"},
    "empty list": ABSENT,
    "list": {"contexts", "demands", "documents", "live_replicas"},
    "list of nil": {"documents", "live_replicas"},
    "0": YES_NO | COUNTS | {"define"},
    "1": YES_NO | COUNTS | {"define", "remove", "withdraw", "watch", "unwatch"},
    "7": COUNTS,
}
"""Operations that accept an answer, because a server that is right may give it to them. To all others it is wrong."""
DOCUMENTED = (TokencacheError, SessionGoneError, SettingsChangedError, KeyError)


@asynccontextmanager
async def server_that_answers(answer):
    """A server that gives the same answer to everything after a connection's greeting. Yields a store, and its connections."""
    greeted = []

    async def serve(reader, writer):
        greeted.append(writer)
        while line := await reader.readline():
            words = []
            for _ in range(int(line[1:])):
                size = int((await reader.readline())[1:])
                words.append((await reader.readexactly(size + 2))[:-2])
            writer.write(b"+OK\r\n" if words[0] in {b"CLIENT", b"SELECT"} else answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        made = RedisStore(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0", timeout_seconds=PATIENCE)
        yield made, greeted
        await made.close()


async def outcome(operation):
    """Run an operation. Returns its exception, `None` if it raised none."""
    async with asyncio.timeout(PATIENCE):
        (result,) = await asyncio.gather(operation(), return_exceptions=True)
    return result if isinstance(result, BaseException) else None


async def accepted(answer):
    """Run all operations. Returns the names of those that did not raise a `StoreError`, and what undocumented exceptions came."""
    async with server_that_answers(answer) as (made, _):
        outcomes = {name: await outcome(operation) for name, operation in operations(made, "e").items()}
    names = {name for name, why in outcomes.items() if not isinstance(why, StoreError)}
    shown = [str(why) for name, why in outcomes.items() if name not in names and name != "ping"]  # which shows the version of the form
    assert not any("PONG" in why or "sss" in why for why in shown)
    assert all(why.startswith("redis: ") for why in shown)
    return names, {name: why for name, why in outcomes.items() if why is not None and not isinstance(why, DOCUMENTED)}


@pytest.mark.parametrize("answer", ANSWERS)
async def test_only_what_a_server_may_say_is_accepted(answer):
    assert await accepted(ANSWERS[answer]) == (ACCEPTED.get(answer, set()), {})


async def test_without_the_check_wrong_answers_are_found(monkeypatch):
    """The campaign above fails for a store that believes what it is told."""
    monkeypatch.setattr(store, "check", lambda _, answer: answer)
    names, odd = await accepted(ANSWERS["nil"])
    assert {"secret", "add_incidents", "heartbeat"} <= names - ACCEPTED["nil"]
    assert odd
    assert "secret" in (await accepted(ANSWERS["list"]))[0]


async def test_every_script_and_command_has_a_form(monkeypatch, fake_store):
    met = set()
    for module in (store, capacity):
        monkeypatch.setattr(module, "check", lambda sent, answer: met.add(sent) or answers.check(sent, answer))
    made = fake_store()
    await made.open()
    begun = await made.begin("s", "k", [b"c1"])
    for operation in operations(made, begun.epoch).values():
        await asyncio.gather(operation(), return_exceptions=True)
    await record(made, "root", build("a"))
    for _ in range(2):
        session = await fork(made, "root", build("a").turn)
    await made._forks.keep()
    await made.delete("root")
    await made.delete(session)
    made._capacity._max_sessions = 1
    await made._capacity.check()
    await made.close()
    assert answers.FORMS.keys() - met <= {"INFO"}  # fakeredis has no report


@pytest.mark.parametrize("answer", ANSWERS)
async def test_a_store_does_not_open_on_a_server_that_is_none(answer):
    async with server_that_answers(ANSWERS[answer]) as (made, _):
        with pytest.raises(StoreError):
            await made.open()


@pytest.mark.parametrize("answer", [*ANSWERS, "report of words"])
async def test_the_check_of_the_capacity_survives_every_answer(answer):
    words = b"$24\r\nmaxmemory:x\r\nused_memory:\r\n"
    async with server_that_answers(ANSWERS.get(answer, words)) as (made, _):
        made._capacity._max_sessions = 1
        task = asyncio.create_task(made._capacity._try_to_check())
        await asyncio.wait({task}, timeout=PATIENCE)
        assert task.done()
        assert task.exception() is None
        await end(task)


async def test_a_connection_with_a_wrong_answer_is_not_used_again():
    """It may be out of step: the next answer would be that to an earlier command."""
    async with server_that_answers(ANSWERS["word"]) as (made, connections):
        for _ in range(3):
            with pytest.raises(StoreError, match="redis: secret: the server answered something else than 32 bytes: bytes of 4"):
                await made.secret()
        assert len(connections) == 3
