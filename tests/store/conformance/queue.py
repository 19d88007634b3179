"""Checks of the queue of finished sessions."""

import asyncio
import random
import time
from collections.abc import Sequence
from typing import NamedTuple

from tests.store.conformance.support import name_of, same, true
from tokencache.store.base import QueueEntry, RemoveOutcome, Store

LONG = 600.0
"""Seconds of a lease that does not end during a check."""
HISTORIES, STEPS, SESSIONS, CONSUMERS = 5, 60, 6, 3
STEP_KINDS = ("lease", "lease", "lease", "again", "release", "extend", "offer", "remove")


async def _entries(store: Store, *sessions: str) -> list[QueueEntry]:
    """Return the entries of these sessions, in the queue's order."""
    return [entry for entry in await store.queue() if entry.session in sessions]


async def _ended(store: Store, session: str) -> None:
    """Wait until the lease of a session has ended."""
    while (await _entries(store, session))[0].leased:  # noqa: ASYNC110 - the store reports no end of a lease
        await asyncio.sleep(0.01)


async def check_offers(store: Store) -> None:
    """Sessions are queued in the order in which they were offered, each once; an offer of a new epoch replaces the old one."""
    a, b, c = (name_of(f"offer }}{{ ☕ {n}") for n in range(3))
    before = await store.queue_length()
    for session, at in ((b, 2.5), (a, 1.5), (c, 3.5), (b, 9.0)):
        await store.offer(session, "e1", at)
    wanted = [QueueEntry(a, "e1", 1.5), QueueEntry(b, "e1", 2.5), QueueEntry(c, "e1", 3.5)]
    same(await _entries(store, a, b, c), wanted, "entries")
    same(await store.queue_length(), before + 3, "length of the queue")
    await store.offer(a, "e2", 4.5)
    same([entry.epoch for entry in await _entries(store, a, b, c)], ["e1", "e1", "e2"], "entries after an offer of a new epoch")
    await store.withdraw(b, "e0")
    await store.withdraw(a, "e2")
    await store.withdraw(a, "e2")
    same([entry.session for entry in await _entries(store, a, b, c)], [b, c], "entries after one was withdrawn")
    for session in (b, c):
        await store.withdraw(session, "e1")
    same(await store.queue_length(), before, "length in the end")


async def check_leases(store: Store) -> None:
    """A delivery has all of its sessions or none. It can be leased again, extended, released and removed."""
    a, b, c, d1, d2 = (name_of(f"lease ☕ {n}") for n in range(5))
    for n, session in enumerate((a, b, c)):
        await store.offer(session, "e", float(n))
    same(await store.lease([a, name_of("missing")], d1, "one", LONG), False, "lease of a session that is not in the queue")
    same([entry.attempt for entry in await _entries(store, a)], [0], "a lease that failed has no effect")
    before = time.time()
    same(await store.lease([a, b], d1, "naïve", LONG), True, "lease")
    for entry in await _entries(store, a, b):
        same((entry.delivery, entry.consumer, entry.attempt, entry.leased, entry.epoch), (d1, "naïve", 1, True, "e"), "a leased entry")
        true(abs(entry.until - before - LONG) < LONG, "end of the lease")
    same(await store.lease([c, b], d2, "two", LONG), False, "lease of a session that is taken")
    same([entry.delivery for entry in await _entries(store, c)], [""], "the free session of that lease")
    same(await store.lease([a, b], d1, "naïve", LONG), True, "the same delivery again")
    same([entry.attempt for entry in await _entries(store, a, b)], [2, 2], "attempts")
    same((await store.extend(d1, 2 * LONG), await store.extend(d2, LONG)), (True, False), "extend")
    true((await _entries(store, a))[0].until > before + 1.5 * LONG, "end of an extended lease")
    same((await store.release(d1), await store.release(d1)), (True, False), "release")
    released = await _entries(store, a, b)
    same(
        [(entry.delivery, entry.consumer, entry.leased, entry.attempt) for entry in released], [("", "", False, 2)] * 2, "released entries"
    )
    same(await store.remove(d1), RemoveOutcome.EXPIRED, "remove of a released delivery")
    same(await store.lease([b, c], d2, "two", LONG), True, "lease of released and free sessions")
    same((await store.remove(d2), await store.remove(d2)), (RemoveOutcome.REMOVED, RemoveOutcome.REPEATED), "remove")
    same([entry.session for entry in await _entries(store, a, b, c)], [a], "entries that remain")
    same(await store.extend(d2, LONG), False, "extend of a removed delivery")
    await store.offer(b, "e", 5.0)
    same(await _entries(store, b), [], "a late offer of what was removed")
    await store.offer(b, "e2", 5.0)
    same(len(await _entries(store, b)), 1, "an offer of a new epoch")
    await store.withdraw(a, "e")
    await store.withdraw(b, "e2")
    same(await store.remove(name_of("never")), RemoveOutcome.EXPIRED, "remove of an unknown delivery")


async def check_expired_leases(store: Store) -> None:
    """When a lease ends, its sessions are free. A delivery that lost one to another consumer does not exist any more."""
    a, b, slow, fast, late = (name_of(f"expired-{n}") for n in range(5))
    for session in (a, b):
        await store.offer(session, "e", 1.0)
    same(await store.lease([a, b], slow, "slow", 0.02), True, "lease")
    await _ended(store, a)
    same(await store.extend(slow, 0.02), True, "extend of a lease that has ended, but whose sessions nobody took")
    await _ended(store, a)
    same(await store.lease([b], fast, "fast", LONG), True, "lease of a session whose lease has ended")
    done = (await store.extend(slow, LONG), await store.release(slow), await store.remove(slow))
    same(done, (False, False, RemoveOutcome.EXPIRED), "what the first consumer can do with its delivery")
    (entry,) = await _entries(store, b)
    same((entry.delivery, entry.consumer, entry.attempt), (fast, "fast", 2), "the session that was taken")
    same(await store.lease([a], late, "late", LONG), True, "lease of the other session")
    same((await store.remove(fast), await store.remove(late)), (RemoveOutcome.REMOVED, RemoveOutcome.REMOVED), "remove")
    same(await _entries(store, a, b), [], "entries in the end")


async def check_demands(store: Store) -> None:
    """What a consumer asked for replaces what it asked for before. It is kept until it is dropped."""
    one, two = (name_of(f"consumer ☕ {n}").encode() for n in range(2))
    for consumer, demand in ((one, b"\x00old"), (two, two), (one, one)):
        await store.put_demand(consumer.decode(), demand)
    same(sorted(demand for demand in await store.demands() if demand in {one, two, b"\x00old"}), sorted([one, two]), "demands")
    for _ in range(2):
        await store.drop_demand(one.decode())
    same([demand for demand in await store.demands() if demand in {one, two}], [two], "demands after one was dropped")
    await store.drop_demand(two.decode())


async def check_concurrent_leases(store: Store) -> None:
    """Of concurrent leases of one session, one succeeds."""
    sessions = [name_of("contended") for _ in range(5)]
    for session in sessions:
        await store.offer(session, "e", 1.0)
    wanted = [(name_of("d"), sessions[n % 5 : n % 5 + 2]) for n in range(40)]
    results = await asyncio.gather(*(store.lease(several, delivery, "c", LONG) for delivery, several in wanted))
    won = [(delivery, session) for (delivery, several), result in zip(wanted, results, strict=True) if result for session in several]
    true(won, "some lease succeeds")
    same(len({session for _, session in won}), len(won), "sessions that were leased, each once")
    for delivery in {delivery for delivery, _ in won}:
        await store.release(delivery)
    for session in sessions:
        await store.withdraw(session, "e")


class Held(NamedTuple):
    """A delivery that a consumer believes to have."""

    consumer: str
    sessions: tuple[str, ...]


class QueueModel:
    """What consumers may believe, and what must hold whatever they do: no session is held twice, and each is acknowledged once."""

    def __init__(self, sessions: Sequence[str]) -> None:
        self.offered, self.held, self.acknowledged = set(sessions), dict[str, Held](), list[str]()

    def lease(self, delivery: str, held: Held, *, done: bool) -> None:
        """A consumer tried to lease free or taken sessions; no lease ends by itself here."""
        taken = {session for name, other in self.held.items() if name != delivery for session in other.sessions}
        free = not taken & set(held.sessions) and set(held.sessions) <= self.offered
        same(done, free, f"lease of {held.sessions}")
        if done:
            self.held[delivery] = held

    def release(self, delivery: str, *, done: bool) -> None:
        """A consumer gave a delivery back."""
        same(done, self.held.pop(delivery, None) is not None, f"release of {delivery}")

    def remove(self, delivery: str, outcome: RemoveOutcome) -> None:
        """A consumer acknowledged a delivery."""
        held = self.held.pop(delivery, None)
        same(outcome is RemoveOutcome.REMOVED, held is not None, f"remove of {delivery}")
        if held is not None:
            self.acknowledged += held.sessions
            self.offered -= set(held.sessions)

    def compare(self, entries: Sequence[QueueEntry]) -> None:
        """The queue holds what it should."""
        same(sorted(entry.session for entry in entries), sorted(self.offered), "sessions in the queue")
        believed = {session: (name, held.consumer) for name, held in self.held.items() for session in held.sessions}
        for entry in entries:
            same((entry.delivery, entry.consumer), believed.get(entry.session, ("", "")), f"who has {entry.session}")
        same(len(self.acknowledged), len(set(self.acknowledged)), "sessions acknowledged, each once")


async def _step(store: Store, model: QueueModel, sessions: Sequence[str], deliveries: list[str], chance: random.Random) -> None:
    """Do something that a consumer or a proxy could do."""
    delivery, consumer = chance.choice(deliveries), f"c{chance.randrange(CONSUMERS)}"
    match chance.choice(STEP_KINDS):
        case "lease":
            deliveries.append(name_of("d"))
            held = Held(consumer, tuple(chance.sample(sessions, chance.choice([1, 2]))))
            model.lease(deliveries[-1], held, done=await store.lease(held.sessions, deliveries[-1], consumer, LONG))
        case "again" if delivery in model.held:
            held = model.held[delivery]
            model.lease(delivery, held, done=await store.lease(held.sessions, delivery, held.consumer, LONG))
        case "extend":
            same(await store.extend(delivery, LONG), delivery in model.held, f"extend of {delivery}")
        case "release":
            model.release(delivery, done=await store.release(delivery))
        case "offer":
            await store.offer(chance.choice(sessions), "e", 9.0)  # an offer that is repeated, or late
        case "remove":
            model.remove(delivery, await store.remove(delivery))


async def check_queue_histories(store: Store) -> None:
    """In random histories of several consumers, no two hold one session, and each session is acknowledged once."""
    for seed in range(HISTORIES):
        chance = random.Random(seed)
        sessions = [name_of("history") for _ in range(SESSIONS)]
        model, deliveries = QueueModel(sessions), [name_of("d")]
        for n, session in enumerate(sessions):
            await store.offer(session, "e", float(n))
        for _ in range(STEPS):
            await _step(store, model, sessions, deliveries, chance)
            model.compare(await _entries(store, *sessions))
        for delivery in list(model.held):
            model.remove(delivery, await store.remove(delivery))
        for session in model.offered:
            await store.withdraw(session, "e")
