"""Delivers finished sessions to consumers, each exactly once as far as consumers acknowledge.

A session is in the queue from when it is finished until a consumer has acknowledged it. It is *ready* if it is sealed, or is finished and
has no call in flight. A consumer takes ready sessions as a *delivery*, which seals them, and belongs to it for a while (a lease). A
consumer that asks again without naming a delivery that it has (`Take.holding`) gets that delivery again: it has been restarted. The
deliveries of a consumer that does not come back are given to others when their leases end.

An acknowledgement that deletes the sessions first becomes a lease that belongs to no consumer. If the proxy or the store fails in between,
the sessions are not given out again: whoever looks at the queue after that lease has ended deletes the rest.

The store has the queue, and what each consumer asked for last (`demand`), so it does not matter which replica a consumer asks. A replica
that waits for a session to become ready is woken by what happens in its own process, and otherwise looks at the queue with growing pauses.
"""

import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from tokencache import metrics
from tokencache.api.demand import Candidate, Demands, Gathering, asks_for, group_state, is_ready, lacks_reward, read_demands, write_demand
from tokencache.api.listing import store_tag
from tokencache.api.reader import owed_incidents
from tokencache.api.requests import Acknowledge, Await, Deliveries, Extend, Take
from tokencache.backoff import delays
from tokencache.core.session import SessionStage
from tokencache.core.turn import Turn, TurnMark
from tokencache.core.weights import WeightsState
from tokencache.engine.announced_weights import AnnouncedWeights
from tokencache.errors import HarnessError
from tokencache.proxy.dedup.lost_calls import LostCalls
from tokencache.proxy.ledger import Ledger
from tokencache.recent import Recent
from tokencache.store.base import DamagedError, QueueEntry, RemoveOutcome, SealOutcome, SessionInfo, Store, read_states
from tokencache.store.clock import RECORD_CLOCK
from tokencache.trajectories.rollout import worth_object
from tokencache.trajectories.versions import LagLimit, VersionCounts, count_versions
from tokencache.wakeup import wait_for

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two looks at the queue."""
_CHUNK = 200
"""Sessions whose states are read at once."""
_MOST_COUNTED = 65_536
"""Sessions whose policy versions are remembered. They do not change while a session is in the queue."""
_MOST_FINISHED = 100
"""Finished sessions that one answer names."""
_STALE, _UNKNOWN = "stale", "unknown_lag"
"""Members of an answer that count sessions which a limit of lag left in the queue."""
_NOBODY = ""
"""The consumer of acknowledged sessions that are being deleted."""
_DELETING_SECONDS = 10.0
"""For so long nobody else deletes the sessions of an acknowledged delivery."""

T = TypeVar("T")


class TakenDelivery(NamedTuple):
    """Sessions that a consumer has taken.

    Attributes:
        id: its name in the queue.
        attempt: how often its sessions were given out, this time included.
        until: when the lease ends, as Unix time in seconds.
        sessions: their states.
        missing: how many sessions fewer it has than the consumer asked for.
    """

    id: str
    attempt: int
    until: float
    sessions: list[SessionInfo]
    missing: int

    @property
    def group(self) -> str:
        """The group of its first session."""
        return self.sessions[0].labels.group


class Takeable(NamedTuple):
    """What consumers could take.

    Attributes:
        sessions: those that somebody could take now.
        short: the groups that wait for further sessions.
    """

    sessions: set[str]
    short: set[str]


class _Sampled(NamedTuple):
    """The policy versions of the tokens that a session sampled of one model, or of all, and their number."""

    counts: VersionCounts
    tokens: int


class SessionQueue:
    """The queue of finished sessions, as consumers use it. `lost` closes the calls of replicas that are gone."""

    def __init__(self, ledger: Ledger, weights: AnnouncedWeights) -> None:
        self._ledger, self._store, self._weights = ledger, ledger.store, weights
        self.lost = LostCalls(ledger.store)
        self._sampled: Recent[str, dict[str, _Sampled]] = Recent(_MOST_COUNTED)

    async def take(self, asked: Take) -> tuple[list[TakenDelivery], dict[str, int]]:
        """Take ready sessions, or wait until there are some. Returns no delivery if the time is up.

        Returns also, with a limit of lag, how many ready sessions it left in the queue: `stale`, those that lag more; `unknown_lag`, those
        whose lag is not known.

        Raises:
            HarnessError: a delivery in `holding` is of another store, or `max_lag` is given and no policy version was ever announced.
        """
        await self._check(asked.holding)
        await self._limit(asked, {})
        await self._store.put_demand(asked.consumer, write_demand(asked, RECORD_CLOCK.now()))
        for delivery in asked.holding:
            await self._store.extend(delivery, asked.wait + asked.lease)
        left: dict[str, int] = {}

        async def look() -> list[TakenDelivery]:
            return await self._take(asked, await self._limit(asked, left), left)

        return await self._until(asked.wait, look), left

    async def acknowledge(self, asked: Acknowledge) -> int:
        """Take deliveries out of the queue, and delete their sessions if that is asked. Returns the number of sessions deleted.

        The sessions are deleted first. So if that fails, the delivery is still there and can be acknowledged again.

        Raises:
            HarnessError: a delivery is of another store, or its sessions were given to another consumer. All others are acknowledged.
        """
        await self._check(asked.deliveries)
        expired, deleted = [], 0
        for delivery in dict.fromkeys(asked.deliveries):
            if asked.delete and await self._store.extend(delivery, _DELETING_SECONDS):
                deleted += await self._delete(delivery)
            if await self._store.remove(delivery) is RemoveOutcome.EXPIRED:
                expired.append(delivery)
        self._ledger.changed.notify()
        _refuse_expired(expired)
        return deleted

    async def release(self, asked: Deliveries) -> None:
        """Give deliveries back at once. Raises `HarnessError` if a delivery is of another store."""
        await self._check(asked.deliveries)
        for delivery in asked.deliveries:
            await self._store.release(delivery)
        self._ledger.changed.notify()

    async def extend(self, asked: Extend) -> None:
        """Extend the leases of deliveries.

        Raises:
            HarnessError: a delivery is of another store, or its sessions were given to another consumer. All others are extended.
        """
        await self._check(asked.deliveries)
        _refuse_expired([delivery for delivery in asked.deliveries if not await self._store.extend(delivery, asked.lease)])

    async def wait(self, asked: Await) -> tuple[list[SessionInfo], list[str]]:
        """Wait until some of the sessions are ready. Returns those that are, at most 100, and the names that do not exist."""
        states = await _states(self._store, asked.sessions)
        unknown = [name for name, info in states.items() if info is None]
        finished = [info for info in states.values() if info is not None and is_ready(info)]
        if unknown or finished or not asked.sessions:
            return finished[:_MOST_FINISHED], unknown

        async def look() -> list[SessionInfo]:
            names = [entry.session for entry in await self._store.queue() if entry.session in states]  # offered before it is finished
            found = await _states(self._store, names)
            return [info for info in found.values() if info is not None and await self._is_ready(info)]

        return (await self._until(asked.wait, look))[:_MOST_FINISHED], []

    async def counts(self) -> dict[str, Any]:
        """Count the sessions in the queue, those of each consumer, and those of each group that nobody has taken."""
        found = await self._candidates(await self._entries())
        free = [one for one in found if not one.entry.leased]
        return {
            "candidates": len(free),
            "ready": sum(is_ready(one.info) for one in free),
            "invalid": [await self._is_valid(one.info) for one in free].count(False),
            "taken": len(found) - len(free),
            "consumers": dict(Counter(one.entry.consumer for one in found if one.entry.leased)),
            "groups": await self._groups(free),
        }

    async def too_many(self, group: str, most: int) -> int:
        """Return how many sessions consumers could take, if that is too many to create another session of a group; otherwise 0.

        `most` or more are too many. But a group of which sessions wait always gets further ones: nobody could take it without them.
        """
        if await self._store.queue_length() < most:
            return 0
        ready, short = await self.takeable()
        return 0 if len(ready) < most or group in short else len(ready)

    async def takeable(self) -> Takeable:
        """Return what consumers could take now, as far as it is known what they ask for.

        Sessions that only wait for a reward count, because that needs no further session. Sessions that no consumer asked for count one by
        one, and their groups as short: perhaps somebody will ask for them.
        """
        entries = [entry for entry in await self._entries() if not entry.leased]
        ready = [one for one in await self._candidates(entries) if await self._is_ready(one.info)]
        demands = await self._demands()
        others = [one for one in ready if demands.concerning(one.info) is None]
        found = Takeable({one.info.id for one in others}, {one.info.labels.group for one in others})
        for asked in demands.living:
            gathering, limit = Gathering(asked), await self._limit(asked, {})
            fitting = [one for one in ready if asks_for(asked, one.info) and await self._fits(one.info, asked.model, limit, Counter())]
            chosen = [gathering.add(one) for one in fitting]
            chosen += gathering.overdue(await self._now(asked))
            found.sessions.update(one.info.id for members in chosen for one in members)
            found.short.update(gathering.short)
        return Takeable(found.sessions, found.short - {""})

    async def _groups(self, free: Sequence[Candidate]) -> list[dict[str, Any]]:
        """Describe the groups of sessions that nobody has taken (`GroupState`)."""
        members: dict[str, list[Candidate]] = {}
        for one in free:
            members.setdefault(one.info.labels.group, []).append(one)
        demands, now = await self._demands(), (await self._store.overdue()).now
        found = {group: group_state(group, several, demands, now) for group, several in members.items()}
        if short := {group for group, state in found.items() if group and state["short"]}:
            async for info in self._store.sessions():
                if info.state is SessionStage.OPEN and info.labels.group in short:
                    found[info.labels.group]["waits_for"].append(info.id)
        return list(found.values())

    async def _demands(self) -> Demands:
        """Read what consumers asked for. What is very old is deleted."""
        found = read_demands(await self._store.demands())
        for consumer in found.forgotten:
            await self._store.drop_demand(consumer)
        return found

    async def _now(self, asked: Take) -> float:
        """Read the store's clock, by which sessions are finished; 0 if the request has no limit of time."""
        return 0.0 if asked.group_timeout is None else (await self._store.overdue()).now

    async def _limit(self, asked: Take, left: dict[str, int]) -> LagLimit | None:
        """Return the limit of lag of a request. `left` is set to 0 then. Raises `HarnessError` as in `lag_limit`."""
        if asked.max_lag is None:
            return None
        left.update({_STALE: 0, _UNKNOWN: 0})
        return lag_limit(await self._weights.read(), asked.max_lag)

    async def _until(self, seconds: float, look: Callable[[], Awaitable[list[T]]]) -> list[T]:
        """Look until something is found, the time is up, or the proxy stops. Counts how long that took."""
        began = time.monotonic()
        try:
            for pause in delays(FIRST_PAUSE, LONGEST_PAUSE):
                change = self._ledger.changed.next
                found = await look()
                left = began + seconds - time.monotonic()
                if found or left <= 0 or self._ledger.changed.closed:
                    return found
                await wait_for(change, min(pause, left))
        finally:
            metrics.WAITED.labels("trainers").inc(time.monotonic() - began)
        raise AssertionError("delays never end")

    async def _take(self, asked: Take, limit: LagLimit | None, left: dict[str, int]) -> list[TakenDelivery]:
        entries = await self._entries()
        found = await self._take_again(asked, entries)
        gathering, free = Gathering(asked), [entry for entry in entries if not entry.leased]
        for first in range(0, len(free), _CHUNK):
            for one in await self._candidates(free[first : first + _CHUNK]):
                if len(found) >= asked.limit:
                    return found
                if await self._may_take(asked, one.info, limit, left):
                    found += await self._lease(gathering.add(one), asked)
        for members in gathering.overdue(await self._now(asked)):
            if len(found) < asked.limit:
                found += await self._lease(members, asked)
        return found

    async def _take_again(self, asked: Take, entries: Sequence[QueueEntry]) -> list[TakenDelivery]:
        """Take what the consumer took before and does not name."""
        own: dict[str, list[QueueEntry]] = {}
        for entry in entries:
            if entry.leased and entry.consumer == asked.consumer and entry.delivery not in asked.holding:
                own.setdefault(entry.delivery, []).append(entry)
        found: list[TakenDelivery] = []
        for delivery, repeated in own.items():
            if len(found) < asked.limit:
                found += await self._lease(await self._candidates(repeated), asked, delivery)
        return found

    async def _may_take(self, asked: Take, info: SessionInfo, limit: LagLimit | None, left: dict[str, int]) -> bool:
        """Whether a session is ready and passes the filters of a consumer. `left` counts the ready ones that only the limit stops."""
        if not asks_for(asked, info) or lacks_reward(asked, info) or not await self._is_ready(info):
            return False
        return await self._fits(info, asked.model, limit, left)

    async def _fits(self, info: SessionInfo, model: str, limit: LagLimit | None, left: dict[str, int]) -> bool:
        """Whether a session called a model (`""`: any), and passes a limit of lag. `left` counts those that only the limit stops."""
        if limit is None and not model:
            return True
        if info.epoch not in self._sampled:
            try:
                self._sampled[info.epoch] = _sampled_by_model(await self._store.turns(info.id))
            except DamagedError as why:
                _log_damaged(info.id, why)
                return False
        sampled = self._sampled[info.epoch].get(model)
        if sampled is None or limit is None:
            return sampled is not None
        lag = limit.lag(sampled.counts.versions, sampled.tokens)
        if lag is not None and lag <= limit.most:
            return True
        left[_UNKNOWN if lag is None else _STALE] += 1
        return False

    async def _lease(self, candidates: Sequence[Candidate], asked: Take, delivery: str = "") -> list[TakenDelivery]:
        """Lease sessions and seal them, as a new delivery or again. Returns it, or nothing if that is not possible any more."""
        if not candidates:
            return []
        delivery = delivery or f"{(await store_tag(self._store)).hex()}-{secrets.token_hex(8)}"
        names = [one.info.id for one in candidates]
        until = time.time() + asked.lease
        if not await self._store.lease(names, delivery, asked.consumer, asked.lease):
            return []
        for name in names:
            if await self._store.seal(name) is not SealOutcome.SEALED:  # it was deleted meanwhile, and perhaps created again
                await self._store.release(delivery)
                return []
        sealed = [info for info in await self._store.states(names) if info is not None]
        if not sealed:  # all were deleted since
            await self._store.release(delivery)
            return []
        now = RECORD_CLOCK.now()
        metrics.WAITED.labels("rollouts").inc(sum(max(0.0, now - one.entry.at) for one in candidates if not one.entry.attempt))
        missing = max(0, asked.group_size - len(sealed))
        return [TakenDelivery(delivery, 1 + max(one.entry.attempt for one in candidates), until, sealed, missing)]

    async def _candidates(self, entries: Sequence[QueueEntry]) -> list[Candidate]:
        """Read the sessions of entries. Entries of sessions that were deleted leave the queue."""
        found, states = [], await _states(self._store, [entry.session for entry in entries])
        for entry in entries:
            if (info := states.get(entry.session)) is not None and info.epoch == entry.epoch:
                found.append(Candidate(entry, info))
            elif entry.session in states:
                await self._store.withdraw(entry.session, entry.epoch)
        return found

    async def _entries(self) -> list[QueueEntry]:
        """Read the queue without what was acknowledged. Deletes sessions whose acknowledgement failed half-way."""
        entries = await self._store.queue()
        acknowledged = {entry.delivery: entry for entry in entries if entry.delivery and entry.consumer == _NOBODY}
        for delivery, entry in acknowledged.items():
            if not entry.leased and await self._store.extend(delivery, _DELETING_SECONDS):
                await self._delete(delivery)
                await self._store.remove(delivery)
        return [entry for entry in entries if entry.delivery not in acknowledged]

    async def _is_ready(self, info: SessionInfo) -> bool:
        """Whether a consumer may take a session. If it only waits for calls, those of replicas that are gone are closed."""
        if info.state is SessionStage.FINISHED and info.open_calls:
            await self.lost.close(info)  # it is ready when it is looked at again
        return is_ready(info)

    async def _is_valid(self, info: SessionInfo) -> bool:
        return bool(worth_object(info, await owed_incidents(self._ledger, info))["valid"])

    async def _delete(self, delivery: str) -> int:
        """Delete the sessions of a delivery, which nobody can take any more. Returns how many there were."""
        found = await self._candidates([entry for entry in await self._store.queue() if entry.delivery == delivery])
        if not found or not await self._store.lease([one.info.id for one in found], delivery, _NOBODY, _DELETING_SECONDS):
            return 0
        return sum([await self._ledger.delete(one.info.id) for one in found])

    async def _check(self, deliveries: Sequence[str]) -> None:
        """Check that ids of deliveries are of this store. Raises `HarnessError` if one is not (422)."""
        if not deliveries:
            return
        tag = (await store_tag(self._store)).hex()
        for delivery in deliveries:
            if not delivery.startswith(f"{tag}-"):
                message = f"delivery {delivery[:80]!r} is not of this store: the store was replaced, or the id is damaged"
                raise HarnessError(message, status=422, kind="unknown_delivery")


async def _states(store: Store, names: Sequence[str]) -> dict[str, SessionInfo | None]:
    """Read the states of sessions, without those whose data is damaged: they must not keep consumers from the others."""
    states, damaged = await read_states(store, names)
    for name, why in damaged.items():
        _log_damaged(name, why)
    return states


def _log_damaged(session: str, why: DamagedError) -> None:
    log.error("session %s stays in the queue: %s; delete it", session, why)


def _sampled_by_model(turns: Sequence[Turn]) -> dict[str, _Sampled]:
    """Count what was sampled of each model, and of all (`""`). What a fork shares was sampled in another session."""
    own = [turn for turn in turns if TurnMark.SHARED not in turn.marks]
    found = {"": own} | {model: [turn for turn in own if turn.model == model] for model in {turn.model for turn in turns}}
    return {model: _Sampled(count_versions(some), sum(turn.chosen_tokens for turn in some)) for model, some in found.items()}


def lag_limit(state: WeightsState, most: int) -> LagLimit:
    """Return a limit of lag behind the version that was announced last. Raises `HarnessError` if none was ever announced (422)."""
    if not state.revision:
        message = "max_lag needs the current policy version, and none was announced; announce it with client.set_weights(version)"
        raise HarnessError(message, status=422, kind="weights_unknown", param="max_lag")
    return LagLimit(most, state.current, state.history)


def _refuse_expired(expired: Sequence[str]) -> None:
    """Refuse what is asked of deliveries that do not exist any more. Raises `HarnessError` if there are some (409)."""
    if expired:
        named = ", ".join(delivery[:80] for delivery in expired)
        message = f"the lease of these deliveries ended, and their sessions were released or given to another consumer: {named}"
        raise HarnessError(message, status=409, kind="delivery_expired")
