"""The states of a call: the tables of its parties, and deferred cancellation."""

import asyncio
import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from tests.support.reading import read_chat
from tests.support.waiting import PATIENCE
from tokencache.core.session import Budget
from tokencache.dialects.chat.incremental import IncrementalParser
from tokencache.engine.placement import Placement
from tokencache.proxy.call import CallAttempt, CallRequest
from tokencache.proxy.call_states import (
    CLIENT,
    RECORD,
    REQUEST,
    SHOWN,
    TERMINAL,
    ClientEvent,
    ClientState,
    IllegalTransitionError,
    Party,
    RecordEvent,
    RecordState,
    RequestState,
    ShownEvent,
    ShownState,
    may_answer_with_status,
    may_be_orphaned,
    may_have_sampled,
    may_resample,
)
from tokencache.proxy.dispatch import Services
from tokencache.proxy.response import Exchange, Response
from tokencache.store.base import BeginResult

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'


TABLES = {"record": RECORD, "engine": REQUEST, "client": CLIENT, "shown": SHOWN}
BEGIN = {"record": RecordState.NEW, "engine": RequestState.IDLE, "client": ClientState.WAITING, "shown": ShownState.NOTHING}


# The tables


def reached_from(table, state):
    """The states that can follow a state, with itself."""
    reached, todo = {state}, [state]
    while todo:
        new = set(table[todo.pop()].values()) - reached
        reached |= new
        todo += new
    return reached


@pytest.mark.parametrize("party", TABLES)
def test_every_state_is_in_its_table_and_can_be_reached(party):
    table = TABLES[party]
    assert set(table) == set(type(BEGIN[party])) == reached_from(table, BEGIN[party])


def test_a_terminal_state_is_never_left():
    assert {state for state in RecordState if not RECORD[state]} == TERMINAL


def test_a_client_may_leave_in_every_state():
    assert all(ClientEvent.LEAVE in events for events in CLIENT.values())


def test_a_call_is_written_at_most_once_and_can_always_be_written():
    """Any mistake can still be recorded: `CallAttempt.fail` relies on it."""
    can_be_written = {state for state, events in RECORD.items() if RecordEvent.STORE in events}
    assert can_be_written == {RecordState.OPEN}
    assert RecordState.OPEN not in reached_from(RECORD, RECORD[RecordState.OPEN][RecordEvent.STORE])


def test_what_was_sampled_stays_known():
    """A piece that no engine takes does not make the call one of which nothing was sampled."""
    for state in reached_from(REQUEST, RequestState.BROKEN):
        assert may_have_sampled(state), state


def test_only_a_reply_of_which_nothing_was_shown_is_made_again():
    shown = reached_from(SHOWN, SHOWN[ShownState.NOTHING][ShownEvent.SHOW])
    assert not any(may_resample(state) for state in shown)
    assert all(may_resample(state) for state in set(ShownState) - shown)


def test_a_call_is_orphaned_only_while_an_engine_samples_and_nothing_was_shown():
    orphaned = {states for states in itertools.product(RecordState, RequestState, ClientState, ShownState) if may_be_orphaned(*states)}
    engines, clients = {RequestState.SAMPLING, RequestState.BROKEN, RequestState.CONTINUING}, {ClientState.WAITING, ClientState.OPENED}
    assert orphaned == set(itertools.product({RecordState.OPEN}, engines, clients, {ShownState.NOTHING}))
    assert all(ClientEvent.ORPHAN in CLIENT[client] for *_, client, _ in orphaned)


def test_an_error_is_a_response_of_its_own_until_the_head_was_sent():
    client = Party(CLIENT, ClientState.WAITING)
    assert may_answer_with_status(client.state)
    client.advance(ClientEvent.HEAD)
    assert not may_answer_with_status(client.state)


@given(st.data(), st.sampled_from(list(TABLES)))
def test_any_order_of_events_is_followed_or_refused(data, name):
    """An illegal event raises and changes nothing; a legal one does what the table says."""
    table, party = TABLES[name], Party(TABLES[name], BEGIN[name])
    for event in data.draw(st.lists(st.sampled_from(sorted({event for events in table.values() for event in events})), max_size=40)):
        before = party.state
        try:
            party.advance(event)
        except IllegalTransitionError:
            assert event not in table[before]
            assert party.state is before
        else:
            assert party.state is table[before][event]


# Deferred cancellation


class Store:
    """A ledger that answers when it is told to; `written` lists what it has taken."""

    keeps_experts, placement = False, Placement()

    def __init__(self):
        self.asked, self.answers, self.written = asyncio.Event(), asyncio.Event(), []
        self.failure = None

    async def _write(self, what):
        self.asked.set()
        await self.answers.wait()
        if self.failure is not None:
            raise self.failure
        self.written.append(what)

    async def begin(self, *_args, **_more):
        await self._write("begun")
        return BeginResult("epoch", [])

    async def settle(self, *_args, **_more):
        await self._write("ended")


def a_call(store):
    chat = read_chat(CHAT, IncrementalParser())
    exchange = Exchange("", CIMultiDict(), None, None, 0.0, "", token_ids=False, body=b"")
    response = Response(None, chat, exchange, None, None)
    services = Services(None, store, None, None, 0, "continue", None, None)
    return CallAttempt(CallRequest("s", chat, response, b"", b""), services, Budget(), may_resample=False)


@contextlib.asynccontextmanager
async def failing(call):
    """Ends the call if what is within raises."""
    try:
        yield
    except BaseException as why:
        await call.fail(why)
        raise


async def test_a_write_is_finished_before_the_call_is_cancelled():
    store = Store()
    call, after = a_call(store), []

    async def serve():
        async with failing(call):
            await call.open("never")
            after.append("opened")

    task = asyncio.create_task(serve())
    await store.asked.wait()
    call.cancel(task)
    assert (call.record.state, call.client.state) == (RecordState.OPENING, ClientState.LEFT)
    store.answers.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert store.written == ["begun", "ended"]  # a call that was opened is closed again
    assert after == []
    assert call.record.state is RecordState.STORED


async def test_a_cancelled_end_is_written_and_then_the_task_ends():
    store, ending = Store(), asyncio.Event()
    call, after = a_call(store), []

    async def serve():
        async with failing(call):
            await call.open("never")
            store.answers.clear()
            store.asked = ending
            await call.close()
            after.append("closed")

    store.answers.set()
    task = asyncio.create_task(serve())
    await ending.wait()
    call.cancel(task)
    assert (call.record.state, call.client.state) == (RecordState.STORING, ClientState.LEFT)
    store.answers.set()
    await asyncio.wait({task})
    assert task.cancelled()
    assert (store.written, after) == (["begun", "ended"], [])
    assert call.record.state is RecordState.STORED


async def test_outside_of_a_write_the_task_is_cancelled_at_once():
    store = Store()
    store.answers.set()
    call, opened = a_call(store), asyncio.Event()

    async def serve():
        async with failing(call):
            await call.open("never")
            opened.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(serve())
    await opened.wait()
    call.cancel(task)
    assert (call.record.state, call.client.state) == (RecordState.OPEN, ClientState.LEFT)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert store.written == ["begun", "ended"]


async def test_a_write_that_fails_raises_its_own_error():
    store = Store()
    call = a_call(store)
    store.failure = ValueError("no store")

    async def serve():
        async with failing(call):
            await call.open("never")

    task = asyncio.create_task(serve())
    await store.asked.wait()
    call.cancel(task)
    store.answers.set()
    with pytest.raises(ValueError, match="no store"):
        await task
    assert store.written == []
    assert call.record.state is RecordState.UNOPENED


async def test_who_waits_for_a_call_is_woken_by_its_end_and_by_a_failed_end():
    for failure in (None, ValueError("no store")):
        store = Store()
        store.answers.set()
        call = a_call(store)
        async with failing(call):
            await call.open("never")
            waiting = asyncio.create_task(call.until_ended())
            await asyncio.sleep(0)
            assert not waiting.done()
            store.failure = failure
            try:
                await call.close()
            except ValueError:
                assert call.record.state is RecordState.LOST
        await asyncio.wait_for(waiting, PATIENCE)
        await asyncio.wait_for(call.until_ended(), PATIENCE)


async def test_an_illegal_transition_closes_the_call_with_an_incident():
    """It raises, and the call is closed in the store like after any other internal error."""
    incidents = []

    class Noting(Store):
        async def settle(self, _begun, _session, _call, found, **more):
            incidents.extend(found)
            await super().settle()

    store = Noting()
    store.answers.set()
    call = a_call(store)

    async def serve():
        async with failing(call):
            await call.open("never")
            call.shown.advance(ShownEvent.FINISH)

    with pytest.raises(IllegalTransitionError, match="ShownState: what is nothing cannot finish"):
        await serve()
    assert call.record.state is RecordState.STORED
    assert [incident.kind for incident in incidents] == ["internal-error"]
