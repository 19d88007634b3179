"""One call as a state machine: its table of transitions, deferred cancellation, and random orders of events against a checker."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.waiting import PATIENCE
from tokencache.core.budget import Budget
from tokencache.dialects.chat.incremental import IncrementalParser
from tokencache.dialects.chat.request import read_chat
from tokencache.proxy.call import CallAttempt, CallRequest
from tokencache.proxy.call_states import DEFERRED, TERMINAL, TRANSITIONS, Event, IllegalTransitionError, State
from tokencache.proxy.dispatch import Services
from tokencache.proxy.response import Exchange, Response
from tokencache.store.base import BeginResult

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'


# The table


def test_every_state_is_in_the_table_and_can_be_reached():
    assert set(TRANSITIONS) == set(State)
    reached, todo = {State.NEW}, [State.NEW]
    while todo:
        for state in TRANSITIONS[todo.pop()].values():
            if state not in reached:
                reached.add(state)
                todo.append(state)
    assert reached == set(State)


def test_a_terminal_state_is_never_left():
    for state in State:
        left = {after for after in TRANSITIONS[state].values() if after is not state}
        assert bool(left) is (state not in TERMINAL), state


def test_a_cancellation_is_legal_in_every_state():
    for state in State:
        assert Event.CANCEL in TRANSITIONS[state], state


def test_a_call_is_written_at_most_once():
    """No way leads from a write back to a state in which a write can begin."""
    for state in State:
        after = TRANSITIONS[state].get(Event.STORE)
        if after is None:
            continue
        reached, todo = {after}, [after]
        while todo:
            for further in TRANSITIONS[todo.pop()].values():
                if further not in reached:
                    reached.add(further)
                    todo.append(further)
        assert not any(Event.STORE in TRANSITIONS[one] for one in reached), state


def test_an_open_call_can_always_be_written():
    """So that any mistake can still be recorded: `CallAttempt.__aexit__` relies on it."""
    open_states = set(State) - TERMINAL - DEFERRED - {State.NEW, State.OPENING, State.STORING}
    for state in open_states:
        assert Event.STORE in TRANSITIONS[state], state


def test_only_a_call_of_which_nothing_was_shown_is_orphaned_or_sent_again():
    assert not {Event.ORPHAN, Event.SEND, Event.NOT_TAKEN} & set(TRANSITIONS[State.STREAMING])


@given(st.lists(st.sampled_from(list(Event)), max_size=40))
def test_any_order_of_events_is_followed_or_refused(events):
    """An illegal event raises and changes nothing; a legal one does what the table says. A terminal state is entered at most once."""
    call, entered = a_call(Store()), 0
    for event in events:
        before = call.state
        try:
            call._advance(event)
        except IllegalTransitionError:
            assert event not in TRANSITIONS[before]
            assert call.state is before
            continue
        assert call.state is TRANSITIONS[before][event]
        entered += call.state in TERMINAL and before not in TERMINAL
        assert not (before in TERMINAL and call.state is not before)
    assert entered <= 1


# Deferred cancellation


class Store:
    """A ledger that answers when it is told to; `written` lists what it has taken."""

    keeps_experts = False

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
    response = Response(None, chat, Exchange("/", {}, None, 1.0))
    services = Services(None, store, None, None, 0, "continue", None, None)
    return CallAttempt(CallRequest("s", chat, response, b"", b""), services, Budget(), may_resample=False)


async def test_a_write_is_finished_before_the_call_is_cancelled():
    store = Store()
    call, after = a_call(store), []

    async def serve():
        async with call:
            await call.open("never")
            after.append("opened")

    task = asyncio.create_task(serve())
    await store.asked.wait()
    call.cancel(task)
    assert call.state is State.OPENING_CANCELLED
    store.answers.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert store.written == ["begun", "ended"]  # a call that was opened is closed again
    assert after == []
    assert call.state is State.STORED


async def test_a_cancelled_end_is_written_and_then_the_task_ends():
    store, ending = Store(), asyncio.Event()
    call, after = a_call(store), []

    async def serve():
        async with call:
            await call.open("never")
            store.answers.clear()
            store.asked = ending
            await call.close()
            after.append("closed")

    store.answers.set()
    task = asyncio.create_task(serve())
    await ending.wait()
    call.cancel(task)
    assert call.state is State.STORING_CANCELLED
    store.answers.set()
    await asyncio.wait({task})
    assert task.cancelled()
    assert (store.written, after) == (["begun", "ended"], [])
    assert call.state is State.STORED


async def test_outside_of_a_write_the_task_is_cancelled_at_once():
    store = Store()
    store.answers.set()
    call, opened = a_call(store), asyncio.Event()

    async def serve():
        async with call:
            await call.open("never")
            opened.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(serve())
    await opened.wait()
    call.cancel(task)
    assert call.state is State.ABANDONED
    with pytest.raises(asyncio.CancelledError):
        await task
    assert store.written == ["begun", "ended"]


async def test_a_write_that_fails_raises_its_own_error():
    store = Store()
    call = a_call(store)
    store.failure = ValueError("no store")

    async def serve():
        async with call:
            await call.open("never")

    task = asyncio.create_task(serve())
    await store.asked.wait()
    call.cancel(task)
    store.answers.set()
    with pytest.raises(ValueError, match="no store"):
        await task
    assert store.written == []
    assert call.state is State.UNOPENED


async def test_who_waits_for_a_call_is_woken_by_its_end_and_by_a_failed_end():
    for failure in (None, ValueError("no store")):
        store = Store()
        store.answers.set()
        call = a_call(store)
        async with call:
            await call.open("never")
            waiting = asyncio.create_task(call.until_ended())
            await asyncio.sleep(0)
            assert not waiting.done()
            store.failure = failure
            try:
                await call.close()
            except ValueError:
                assert call.state is State.LOST
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
        async with call:
            await call.open("never")
            call.show()

    with pytest.raises(IllegalTransitionError, match="open cannot show"):
        await serve()
    assert call.state is State.STORED
    assert [incident.kind for incident in incidents] == ["internal-error"]
