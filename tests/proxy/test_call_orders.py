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

import aiohttp
import pytest

from tests.proxy.kit import CHAT, EPISODES, HEADER, proxied, user
from tests.support.waiting import until
from tokencache.proxy.call import CallAttempt
from tokencache.proxy.call_states import TERMINAL, TRANSITIONS, Event, State
from tokencache.store.base import StoreError
from tokencache.store.memory import MemoryStore
from tokencache.testing import Fault, SimulatedEngine

SESSIONS = 120
RETRY = {"x-stainless-retry-count": "1"}


@dataclass
class Write:
    """A write to the store that ends a call; `result` is `started` until the store has answered."""

    call: str
    turns: int
    result: str = "started"


@dataclass
class Trace:
    """What happened: transitions of each call, calls that the store did not open, writes, responses of
    each client, and calls that are open in the end."""

    transitions: dict[str, list[tuple[State, Event, State]]] = field(default_factory=lambda: defaultdict(list))
    refused: set[str] = field(default_factory=set)
    writes: list[Write] = field(default_factory=list)
    responses: dict[str, list[str]] = field(default_factory=dict)
    left_open: list[str] = field(default_factory=list)


def violations(trace: Trace) -> list[str]:
    """List what must never happen and did."""
    found = []
    for call, moves in trace.transitions.items():
        state, ends = State.NEW, []
        for before, event, after in moves:
            if before is not state or TRANSITIONS[before].get(event) is not after:
                found.append(f"{call}: {before} → {event} → {after} is not in the table")
            if after in TERMINAL and before is not after:
                ends.append(after)
            state = after
        if len(ends) != 1 or state is not ends[0]:
            found.append(f"{call}: {len(ends)} terminal states, and its state is {state}")
    ended = Counter(write.call for write in trace.writes if write.turns and write.result == "done")
    found += [f"{call}: turns recorded {times} times" for call, times in ended.items() if times > 1]
    found += [f"{write.call}: a write was started and not finished" for write in trace.writes if write.result == "started"]
    found += [f"{write.call}: written, though the store refused the call" for write in trace.writes if write.call in trace.refused]
    for call, moves in trace.transitions.items():
        stored = moves[-1][2] is State.STORED
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


async def random_orders(monkeypatch, linger: float, *, all_end: bool = True) -> Trace:
    """Run many sessions, and return what happened; waits for the end of each call, if they all end."""
    trace = Trace()
    advance = CallAttempt._advance

    def traced(call: CallAttempt, event: Event) -> None:
        before = call.state
        advance(call, event)
        trace.transitions[call.id].append((before, event, call.state))

    monkeypatch.setattr(CallAttempt, "_advance", traced)
    monkeypatch.setattr("tokencache.proxy.dispatch.FIRST_PAUSE", 0.005)
    monkeypatch.setattr("tokencache.proxy.ledger.RETRY_SECONDS", 0.02)
    store = WatchedStore(trace, random.Random(linger))
    engine = SimulatedEngine(episodes=EPISODES, token_delay=0.001)
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


@pytest.mark.parametrize("linger", [0, 0.05])
async def test_random_orders_of_events_violate_nothing(monkeypatch, linger):
    trace = await random_orders(monkeypatch, linger)
    assert violations(trace) == []
    seen = {after for moves in trace.transitions.values() for _, _, after in moves}
    wanted = {State.OPENING_CANCELLED, State.STORING_CANCELLED, State.CANCELLED, State.QUEUED, State.STREAMING, State.UNOPENED}
    assert seen >= (wanted | {State.ORPHANED} if linger else wanted), "the orders are not varied enough"


# The checker finds what it looks for


def sound() -> Trace:
    """A call that went well, and one that the store refused."""
    trace = Trace(refused={"late"}, writes=[Write("call", 1, "done")], responses={"client": ["200"]})
    states = [State.NEW, State.OPENING, State.OPEN, State.SAMPLING, State.STREAMING, State.STORING, State.STORED]
    events = [Event.OPEN, Event.OPENED, Event.SEND, Event.SHOW, Event.STORE, Event.WRITTEN]
    trace.transitions["call"] = list(zip(states, events, states[1:], strict=False))
    trace.transitions["late"] = [(State.NEW, Event.OPEN, State.OPENING), (State.OPENING, Event.NOT_OPENED, State.UNOPENED)]
    return trace


def recorded_twice(trace):
    trace.writes.append(Write("call", 1, "done"))


def write_lost(trace):
    trace.writes[0].result = "started"


def written_after_a_refusal(trace):
    trace.writes.append(Write("late", 1, "done"))


def never_ended(trace):
    trace.transitions["call"].pop()


def ended_twice(trace):
    trace.transitions["call"].append((State.STORED, Event.FAILED, State.LOST))


def transition_out_of_the_table(trace):
    trace.transitions["call"][3] = (State.SAMPLING, Event.ORPHAN, State.STREAMING)


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
        call._advance(Event.CANCEL)
        task.cancel()

    monkeypatch.setattr(CallAttempt, "cancel", at_once)
    found = violations(await random_orders(monkeypatch, 0, all_end=False))
    assert any("started and not finished" in violation for violation in found)
