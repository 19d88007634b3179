"""Random orders of events drive real calls: clients that leave or retry, engines that fail, a slow or failing store, a seal.

Everything is recorded in a `Trace`, and `violations` lists what is wrong with it. Tests below show that it finds each kind of violation.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import aiohttp
import pytest

from tests.proxy.kit import CHAT, EPISODES, HEADER, proxied, user
from tests.support.pairwise import some
from tests.support.waiting import until
from tokencache.proxy.call import CallAttempt
from tokencache.proxy.call_states import (
    CLIENT,
    RECORD,
    REQUEST,
    SHOWN,
    TERMINAL,
    ClientEvent,
    ClientState,
    Party,
    RecordEvent,
    RecordState,
    RequestEvent,
    RequestState,
    ShownEvent,
    ShownState,
    may_have_sampled,
)
from tokencache.store.base import StoreError
from tokencache.store.memory import MemoryStore
from tokencache.testing import Fault, SimulatedEngine

if TYPE_CHECKING:
    from enum import StrEnum

SESSIONS = 120
RETRY = {"x-stainless-retry-count": "1"}


@dataclass
class Write:
    """A write to the store that ends a call; `result` is `started` until the store has answered."""

    call: str
    turns: int
    result: str = "started"


class Move(NamedTuple):
    """A transition of one party of a call."""

    party: str
    before: StrEnum
    event: StrEnum
    after: StrEnum


@dataclass
class Trace:
    """What happened: transitions of each call's parties, calls that the store did not open, writes, responses of
    each client, and calls that are open in the end."""

    moves: dict[str, list[Move]] = field(default_factory=lambda: defaultdict(list))
    refused: set[str] = field(default_factory=set)
    writes: list[Write] = field(default_factory=list)
    responses: dict[str, list[str]] = field(default_factory=dict)
    left_open: list[str] = field(default_factory=list)


TABLES = {"record": RECORD, "engine": REQUEST, "client": CLIENT, "shown": SHOWN}


def violations_of(call: str, moves: list[Move]) -> list[str]:
    """List what must never happen in one call and did."""
    found, ends = [], []
    # A client may have waited for an earlier attempt.
    states = {
        "record": RecordState.NEW,
        "engine": RequestState.IDLE,
        "shown": ShownState.NOTHING,
    }
    for party, before, event, after in moves:
        if before is not states.get(party, before) or TABLES[party][before].get(event) is not after:
            found.append(f"{call}: {party}: {before} → {event} → {after} is not in the table")
        states[party] = after
        if party == "record" and after in TERMINAL:
            ends.append(after)
        if party in {"engine", "shown"} and states["record"] is not RecordState.OPEN:
            found.append(f"{call}: {event}, while its record is {states['record']}")
        if party == "shown" and not may_have_sampled(states["engine"]):
            found.append(f"{call}: {event}, before an engine had it")
    if len(ends) != 1 or states["record"] is not ends[0]:
        found.append(f"{call}: {len(ends)} terminal states, and its record is {states['record']}")
    return found


def violations(trace: Trace) -> list[str]:
    """List what must never happen and did."""
    found = [violation for call, moves in trace.moves.items() for violation in violations_of(call, moves)]
    ended = Counter(write.call for write in trace.writes if write.turns and write.result == "done")
    found += [f"{call}: turns recorded {times} times" for call, times in ended.items() if times > 1]
    found += [f"{write.call}: a write was started and not finished" for write in trace.writes if write.result == "started"]
    found += [f"{write.call}: written, though the store refused the call" for write in trace.writes if write.call in trace.refused]
    for call, moves in trace.moves.items():
        stored = any(move.after is RecordState.STORED for move in moves)
        if stored and call not in trace.refused and not any(write.call == call for write in trace.writes):
            found.append(f"{call}: ended, and nothing was written")
    found += [f"{call}: still open" for call in trace.left_open]
    found += [f"{client}: {len(responses)} responses" for client, responses in trace.responses.items() if len(responses) != 1]
    return found


class WatchedStore(MemoryStore):
    """A memory store that takes its time, fails now and then, and records its writes; clients may leave meanwhile."""

    def __init__(self, trace: Trace, chance: random.Random) -> None:
        super().__init__()
        self.trace, self.chance, self.steady = trace, chance, False
        self.clients: dict[str, dict[str, asyncio.Task]] = {}

    async def _wait(self) -> None:
        for _ in range(self.chance.choice([0, 1, 2, 4])):
            await asyncio.sleep(self.chance.choice([0, 0.003, 0.006]))
        if not self.steady and self.chance.random() < 0.04:
            raise StoreError("a failure that was asked for")

    async def begin(self, session, call, keys, **more):
        try:
            self._leave(session)
            await self._wait()
            begun = await super().begin(session, call, keys, **more)
        except Exception:
            self.trace.refused.add(call)
            raise
        if begun.duplicate is not None:
            self.trace.refused.add(call)
        return begun

    def _leave(self, session: str) -> None:
        """Let the clients of a session leave, now and then, while the store is at work."""
        if not self.steady and self.chance.random() < 0.15:
            for name, client in self.clients.get(session, {}).items():
                if client.cancel():
                    self.trace.responses[name] = ["left"]

    async def _written(self, session, call, turns, work):
        write = Write(call, turns)
        self.trace.writes.append(write)
        try:
            self._leave(session)
            await asyncio.sleep(0.001)
            await self._wait()
            await work()
        except Exception:
            write.result = "failed"
            raise
        write.result = "done"

    async def commit(self, session, epoch, call, entries, incidents=(), **more):
        await self._written(session, call, len(entries), lambda: MemoryStore.commit(self, session, epoch, call, entries, incidents, **more))

    async def settle(self, session, epoch, call, incidents=()):
        await self._written(session, call, 0, lambda: MemoryStore.settle(self, session, epoch, call, incidents))


async def ask(rig, trace: Trace, name: str, session: str, *, stream: bool, headers: dict[str, str]) -> None:
    """Make a call as a client that notes each response it gets."""
    got = trace.responses.setdefault(name, [])
    body = {"model": "sim", "stream": stream, "messages": [user("EPISODE:talk")]}
    try:
        async with rig.http.post(rig.url + CHAT, json=body, headers={HEADER: session, **headers}) as answer:
            text = await answer.text()
    except aiohttp.ClientError:
        got.append("broken off")
        return
    if answer.content_type == "text/event-stream":
        ends = text.count("data: [DONE]")
        got += [f"stream {n}" for n in range(max(ends, 1))]
    else:
        json.loads(text)
        got.append(str(answer.status))


async def one_session(rig, trace: Trace, seed: int) -> None:
    """Make some calls in a session, in an order that the seed decides."""
    chance, session = random.Random(seed), f"s{seed}"
    stream = chance.random() < 0.5
    clients = rig.store.clients[session] = {}
    for n in range(chance.randint(1, 3)):
        name = f"{session}-{n}"
        headers = chance.choice([{}, {}, RETRY])
        clients[name] = asyncio.create_task(ask(rig, trace, name, session, stream=stream, headers=headers))
        await asyncio.sleep(chance.choice([0, 0, 0.002, 0.01]))
        if chance.random() < 0.25:
            rig.engine.faults.append(
                chance.choice([Fault.abort(chance.randint(0, 3)), Fault.answer(400, "{}"), Fault.answer(503, "{}"), Fault.cut(2)])
            )
        if chance.random() < 0.1:
            await MemoryStore.seal(rig.store, session, force=True)
    for name, client in clients.items():
        if chance.random() < 0.4:
            for _ in range(chance.choice([0, 1, 5, 20])):
                await asyncio.sleep(chance.choice([0, 0.001, 0.002]))
            if client.cancel():
                trace.responses[name] = ["left"]
    await asyncio.gather(*clients.values(), return_exceptions=True)


async def random_orders(monkeypatch, linger: float, *, continues: bool = False, all_end: bool = True) -> Trace:
    """Run many sessions, and return what happened; waits for the end of each call, if they all end."""
    trace, owners = Trace(), {}
    begin, advance = CallAttempt.__init__, Party.advance

    def begun(call: CallAttempt, *args, **more) -> None:
        begin(call, *args, **more)
        owners.update({getattr(call, name): (call.id, name) for name in TABLES})

    def traced(party: Party, event: StrEnum) -> None:
        before = party.state
        advance(party, event)
        if party in owners:  # an earlier request of the client may have begun no call
            call, name = owners[party]
            trace.moves[call].append(Move(name, before, event, party.state))

    monkeypatch.setattr(CallAttempt, "__init__", begun)
    monkeypatch.setattr(Party, "advance", traced)
    monkeypatch.setattr("tokencache.proxy.dispatch.FIRST_PAUSE", 0.005)
    monkeypatch.setattr("tokencache.proxy.ledger.RETRY_SECONDS", 0.02)
    store = WatchedStore(trace, random.Random(linger))
    engine = SimulatedEngine(episodes=EPISODES, token_delay=0.001, derenders=continues)
    async with proxied(engine, store, linger=linger, hold=0.1) as rig:
        for first in range(0, SESSIONS, 20):
            await asyncio.gather(*(one_session(rig, trace, seed) for seed in range(first, first + 20)))
        store.steady = True

        async def closed() -> bool:
            found = [await store.session(f"s{seed}") for seed in range(SESSIONS)]
            trace.left_open = [call.call for info in found if info is not None for call in info.open_calls]
            return not trace.left_open

        if all_end:
            with contextlib.suppress(TimeoutError):
                await until(closed)  # the proxy may notice only now that the last clients have left
    return trace


@pytest.mark.parametrize(("linger", "continues"), some([(0.05, True), (0, False), (0.05, False)], 1))
async def test_random_orders_of_events_violate_nothing(monkeypatch, linger, continues):
    trace = await random_orders(monkeypatch, linger, continues=continues)
    assert violations(trace) == []
    seen = {move.after for moves in trace.moves.values() for move in moves}
    wanted = {ClientState.LEFT, RequestState.QUEUED, ShownState.BEGUN, ShownState.ENDING, RecordState.UNOPENED}
    wanted |= {ClientState.ORPHANED} if linger else set()
    wanted |= {RequestState.BROKEN, RequestState.CONTINUING} if continues else set()
    assert seen >= wanted, "the orders are not varied enough"
    left_during = {after for moves in trace.moves.values() for after in states_when_left(moves)}
    assert left_during >= {RecordState.OPENING, RecordState.OPEN, RecordState.STORING}, "the clients are not varied enough"


def states_when_left(moves: list[Move]) -> list[StrEnum]:
    """The states of a call's record in which its client left."""
    record, found = RecordState.NEW, []
    for move in moves:
        record = move.after if move.party == "record" else record
        if move.event is ClientEvent.LEAVE:
            found.append(record)
    return found


# The checker finds what it looks for


def sound() -> Trace:
    """A call that went well, and one that the store refused."""
    trace = Trace(refused={"late"}, writes=[Write("call", 1, "done")], responses={"client": ["200"]})
    trace.moves["call"] = [
        Move("record", RecordState.NEW, RecordEvent.OPEN, RecordState.OPENING),
        Move("record", RecordState.OPENING, RecordEvent.OPENED, RecordState.OPEN),
        Move("engine", RequestState.IDLE, RequestEvent.SEND, RequestState.SAMPLING),
        Move("shown", ShownState.NOTHING, ShownEvent.SHOW, ShownState.BEGUN),
        Move("record", RecordState.OPEN, RecordEvent.STORE, RecordState.STORING),
        Move("record", RecordState.STORING, RecordEvent.WRITTEN, RecordState.STORED),
    ]
    trace.moves["late"] = [
        Move("record", RecordState.NEW, RecordEvent.OPEN, RecordState.OPENING),
        Move("record", RecordState.OPENING, RecordEvent.NOT_OPENED, RecordState.UNOPENED),
    ]
    return trace


def recorded_twice(trace):
    trace.writes.append(Write("call", 1, "done"))


def write_lost(trace):
    trace.writes[0].result = "started"


def written_after_a_refusal(trace):
    trace.writes.append(Write("late", 1, "done"))


def never_ended(trace):
    trace.moves["call"].pop()


def ended_twice(trace):
    trace.moves["call"].append(trace.moves["call"][-1])


def transition_out_of_the_table(trace):
    trace.moves["call"][3] = Move("shown", ShownState.NOTHING, ShownEvent.FINISH, ShownState.ENDING)


def shown_after_its_end(trace):
    trace.moves["call"].append(trace.moves["call"].pop(3))


def shown_before_it_was_sent(trace):
    del trace.moves["call"][2]


def sent_before_it_was_open(trace):
    trace.moves["call"].insert(0, trace.moves["call"].pop(2))


def nothing_written(trace):
    trace.writes.clear()


def left_open(trace):
    trace.left_open.append("call")


def two_responses(trace):
    trace.responses["client"].append("500")


def no_response(trace):
    trace.responses["client"].clear()


def test_a_sound_trace_has_no_violations():
    assert violations(sound()) == []


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (recorded_twice, "recorded 2 times"),
        (write_lost, "started and not finished"),
        (written_after_a_refusal, "refused the call"),
        (never_ended, "0 terminal states"),
        (ended_twice, "2 terminal states"),
        (shown_after_its_end, "while its record is stored"),
        (shown_before_it_was_sent, "before an engine had it"),
        (sent_before_it_was_open, "while its record is new"),
        (transition_out_of_the_table, "not in the table"),
        (nothing_written, "nothing was written"),
        (left_open, "still open"),
        (two_responses, "2 responses"),
        (no_response, "0 responses"),
    ],
)
def test_each_violation_is_found(spoil, words):
    trace = sound()
    spoil(trace)
    assert any(words in violation for violation in violations(trace))


async def test_a_broken_deferral_is_found(monkeypatch):
    """With a cancellation that does not wait for the store, the same orders of events violate something."""

    def at_once(call: CallAttempt, task: asyncio.Task) -> None:
        call.client.advance(ClientEvent.LEAVE)
        task.cancel()

    monkeypatch.setattr(CallAttempt, "cancel", at_once)
    found = violations(await random_orders(monkeypatch, 0, all_end=False))
    assert any("started and not finished" in violation for violation in found)
