"""Defines the operations that collect trajectories (`protocol`): in a given order, as sessions finish, or from the queue."""

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Iterable
from typing import Any, Unpack, cast

import msgspec

from tokencache.client import session_operations
from tokencache.client.access import Access, access_to
from tokencache.client.errors import DeliveryExpiredError, NotFoundError, WaitTimeoutError
from tokencache.client.operations import ProxyAddress, sessions
from tokencache.client.protocol import BASE, Item, ItemSteps, Request, Steps, call, check_options, through_outages
from tokencache.client.session_operations import is_over, written
from tokencache.trajectories.lengths import ExportOptions
from tokencache.trajectories.values import DeliveryState, QueueState, SessionState, named

log = logging.getLogger(__name__)

LONGEST_POLL = 20.0
"""Seconds for which one request may wait for a session to finish."""
OUTAGE_SECONDS = 300.0
"""How long to wait for a proxy that responded before: it may be restarted while a trainer collects trajectories."""

_MOST = 10
"""Groups that a warning names."""


class _Finished(msgspec.Struct):
    finished: list[SessionState]
    unknown: list[str] = []


class _Taken(msgspec.Struct):
    deliveries: list[DeliveryState]
    stale: int = 0
    unknown_lag: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeliveryData:
    """Sessions that a consumer took from the queue.

    Attributes:
        id: its name in the queue.
        group: the group of its sessions; `""` if they have none.
        attempt: 1 at the first time; more if a consumer took the sessions before and did not acknowledge them.
        sessions: their states, sealed.
        missing: how many sessions fewer it has than `group_size`: the group had waited for `group_timeout`.
        valid: the names of those that are valid (docs/lifecycle.md).
        trajectories: one for each session, in the requested format.
    """

    id: str
    group: str
    attempt: int
    sessions: list[SessionState]
    missing: int
    valid: list[str]
    trajectories: list[Any]
    _held: set[str] = dataclasses.field(repr=False, compare=False)


def iterate(
    proxy: ProxyAddress,
    names: Iterable[str] | None = None,
    *,
    format: str = "native",  # noqa: A002 - the name of the query parameter
    seal: bool = False,
    delete: bool = False,
    force: bool = False,
    timeout: float = 60.0,
    **lengths: Unpack[ExportOptions],
) -> ItemSteps[Any]:
    """Return the trajectories of sessions in the given order, each as soon as the session is finished and has no call in flight.

    Nothing is sealed or deleted unless asked. A session is deleted when the next one is requested, so that the server still has a
    trajectory if the consumer fails while processing it. Drift is not measured. If the proxy stops responding or its store fails, requests
    are repeated for five minutes, or for `timeout` if that is less.

    Args:
        proxy: the proxy.
        names: the sessions. `None`: all sessions that are finished now and have no call in flight.
        format: see `Session.fetch`.
        seal: seal each session before it is fetched, so that the trajectory is final.
        delete: delete each session after it was processed.
        force: when the time is up, go on with a session that is not finished or has calls in flight. What `seal` then cuts is marked in
            the trajectory.
        timeout: how long to wait for each session, in seconds.
        lengths: see `Session.fetch`.

    Raises:
        WaitTimeoutError: a session was not finished in time, or had a call in flight.
        NotFoundError: some of `names` do not exist. Raised at the end, after all others have been returned.
        TypeError: `names` is a string. For one session, pass a list with its name.
    """
    _check_names(names)

    def steps() -> ItemSteps[Any]:
        absent = []
        wanted = names
        if wanted is None:
            listed = yield from sessions(proxy)
            wanted = [state.session for state in listed if is_over(state) and not state.open_calls]
        for name in wanted:
            session = access_to(proxy.url, name)
            try:
                yield from _until_finished(session, timeout, force=force)
                if seal:
                    yield from session_operations.seal(session, force=force)
                # Drift is not measured: for many rollouts that would take engine time from calls.
                found = yield from session_operations.fetch(session, format, drift="off", **lengths)
            except NotFoundError:
                absent.append(name)
                continue
            yield Item(found)
            if delete:
                with contextlib.suppress(NotFoundError):
                    yield from session_operations.delete(session)
        if absent and names is not None:
            raise _missing(absent)

    return through_outages(steps(), _longest_outage(timeout))


def _until_finished(session: Access, timeout: float, *, force: bool) -> Steps[None]:
    """Wait until a session is finished and has no call in flight; with `force`, go on when the time is up.

    Raises:
        WaitTimeoutError: it was not in time.
        NotFoundError: there is no such session.
    """
    yield from session_operations.state(session)
    try:
        yield from session_operations.wait(session, finished=True, timeout=timeout)
    except WaitTimeoutError as error:
        if not force:
            raise WaitTimeoutError(f"{error}. Finish it (session.finish), or pass force=True to take it as it is") from None


def as_completed(
    proxy: ProxyAddress,
    names: Iterable[str],
    *,
    format: str = "native",  # noqa: A002 - the name of the query parameter
    timeout: float | None = None,
    **lengths: Unpack[ExportOptions],
) -> ItemSteps[Any]:
    """Return the trajectories of sessions as they finish, each when it is finished and has no call in flight.

    Nothing is sealed or deleted. Drift is not measured. If the proxy stops responding or its store fails, requests are repeated for five
    minutes, or for `timeout` if that is less.

    Args:
        proxy: the proxy.
        names: the sessions.
        format: see `Session.fetch`.
        timeout: how long to wait for all of them together, in seconds; `None`: without end.
        lengths: see `Session.fetch`.

    Raises:
        WaitTimeoutError: some sessions did not finish in time. The message names them.
        NotFoundError: some of `names` do not exist: they were not created, or were deleted. Raised at the end, after all others.
        TypeError: `names` is a string. For one session, pass a list with its name.
    """
    _check_names(names)
    return through_outages(_as_completed(proxy, names, format, timeout, lengths), _longest_outage(timeout))


def _as_completed(proxy: ProxyAddress, names: Iterable[str], form: str, timeout: float | None, lengths: ExportOptions) -> ItemSteps[Any]:
    left, absent = dict.fromkeys(names), list[str]()
    deadline = None if timeout is None else time.monotonic() + timeout
    while left:
        remaining = math.inf if deadline is None else deadline - time.monotonic()
        patience = min(LONGEST_POLL, max(0.0, remaining))
        body = written({"sessions": list(left), "wait": patience})
        found = yield from call(Request("POST", f"{BASE}/wait", body=body, wait=patience), _Finished)
        if remaining <= 0 and not (found.finished or found.unknown):
            raise WaitTimeoutError(f"waited {timeout:g} s for sessions to finish: {named([*map(repr, left)])}")
        for name in (*found.unknown, *(state.session for state in found.finished)):
            left.pop(name, None)
        absent += found.unknown
        for state in found.finished:
            try:
                trajectory = yield from session_operations.fetch(access_to(proxy.url, state.session), form, drift="off", **lengths)
            except NotFoundError:
                absent.append(state.session)
            else:
                yield Item(trajectory)
    if absent:
        raise _missing(absent)


class FollowOptions(ExportOptions, total=False):
    """The options of `Client.follow` and `AsyncClient.follow`, besides `consumer`."""

    group_size: int
    min_group: int | None
    group_timeout: float | None
    format: str
    rewarded: bool
    lease: float
    timeout: float | None
    group: str | None
    tag: str | None
    harness: str | None
    max_lag: int | None


def follow(proxy: ProxyAddress, consumer: str, **options: Unpack[FollowOptions]) -> ItemSteps[DeliveryData]:
    """Take finished sessions from the queue. `Client.follow` documents the arguments."""
    check_options("follow", options, FollowOptions.__annotations__)
    return through_outages(_follow(proxy, consumer, options), _longest_outage(options.get("timeout")))


def _follow(proxy: ProxyAddress, consumer: str, options: FollowOptions) -> ItemSteps[DeliveryData]:
    asked: dict[str, Any] = {"consumer": consumer}
    for name in ("group_size", "min_group", "group_timeout", "rewarded", "lease", "group", "tag", "harness", "model", "max_lag"):
        if (value := options.get(name)) is not None:
            asked[name] = value
    form, timeout = options.get("format", "native"), options.get("timeout")
    names = ExportOptions.__annotations__.keys() - {"max_lag"}  # a delivery has passed it, and keeps all its sequences
    lengths = cast("ExportOptions", {name: options[name] for name in names if name in options})  # type: ignore[literal-required]
    held: set[str] = set()
    last = time.monotonic()
    left_behind = (0, 0)
    while True:
        left = math.inf if timeout is None else last + timeout - time.monotonic()
        patience = min(LONGEST_POLL, max(0.0, left))
        body = written({**asked, "wait": patience, "holding": sorted(held)})
        taken = yield from call(Request("POST", f"{BASE}/queue/take", body=body, wait=patience), _Taken)
        if left_behind != (left_behind := (taken.stale, taken.unknown_lag)):
            words = "consumer %s leaves ready sessions in the queue: %d lag more than %s policy versions, the lag of %d is not known"
            log.warning(words, consumer, taken.stale, asked.get("max_lag"), taken.unknown_lag)
        for delivery in taken.deliveries:
            try:
                fetched = yield from _fetched(proxy, delivery, form, lengths, held)
            except NotFoundError:  # somebody deleted a session since it was taken: the others of the delivery go back
                yield from _give_back(delivery.id)
                continue
            held.add(delivery.id)
            yield Item(fetched)
            last = time.monotonic()
        if not taken.deliveries and left <= patience:
            waiting = [str(group) for group in (yield from queue(proxy)).groups if group.waits]
            if waiting:
                log.warning(
                    "consumer %s ends after %g s without a delivery. It waited for %s", consumer, timeout, "; ".join(waiting[:_MOST])
                )
            return


def _fetched(proxy: ProxyAddress, delivery: DeliveryState, form: str, lengths: ExportOptions, held: set[str]) -> Steps[DeliveryData]:
    trajectories: list[Any] = []
    for state in delivery.sessions:
        trajectory = yield from session_operations.fetch(access_to(proxy.url, state.session), form, drift="off", **lengths)
        trajectories.append(trajectory)
    return DeliveryData(
        id=delivery.id,
        group=delivery.group,
        attempt=delivery.attempt,
        sessions=delivery.sessions,
        missing=delivery.missing,
        valid=delivery.valid,
        trajectories=trajectories,
        _held=held,
    )


def acknowledge(delivery: DeliveryData, *, delete: bool = True) -> Steps[None]:
    """Declare the delivery processed: its sessions leave the queue, and are deleted unless `delete` is false.

    Acknowledging again has no effect.

    Raises:
        DeliveryExpiredError: its lease ended, and another consumer took its sessions.
    """
    try:
        yield from call(Request("POST", f"{BASE}/queue/acknowledge", body=written({"deliveries": [delivery.id], "delete": delete})), dict)
    except DeliveryExpiredError:
        delivery._held.discard(delivery.id)  # noqa: SLF001 - this module's own
        raise
    delivery._held.discard(delivery.id)  # noqa: SLF001 - this module's own


def release(delivery: DeliveryData) -> Steps[None]:
    """Give the sessions of the delivery back to the queue: any consumer may take them at once."""
    yield from _give_back(delivery.id)
    delivery._held.discard(delivery.id)  # noqa: SLF001 - this module's own


def _give_back(delivery: str) -> Steps[None]:
    yield from call(Request("POST", f"{BASE}/queue/release", body=written({"deliveries": [delivery]})), dict)


def extend(delivery: DeliveryData, seconds: float) -> Steps[None]:
    """Let the delivery belong to this consumer for `seconds` from now on.

    Raises:
        DeliveryExpiredError: its lease ended, and another consumer took its sessions.
    """
    yield from call(Request("POST", f"{BASE}/queue/extend", body=written({"deliveries": [delivery.id], "lease": seconds})), dict)


def queue(_proxy: ProxyAddress) -> Steps[QueueState]:
    """Return how many sessions are in the queue, who took them, and what its groups wait for."""
    return (yield from call(Request("GET", f"{BASE}/queue"), QueueState))


def _longest_outage(timeout: float | None) -> float:
    return OUTAGE_SECONDS if timeout is None else min(OUTAGE_SECONDS, timeout)


def _check_names(names: object) -> None:
    """Check that names are not one string.

    Raises:
        TypeError: they are. Its characters would be taken as names; and it could be a prefix, as in `sessions`.
    """
    if isinstance(names, str | bytes):
        raise TypeError(f"names: {names!r} is a string, not a collection of names. For one session write [{names!r}]")


def _missing(names: Iterable[str]) -> NotFoundError:
    """Return the error for sessions that do not exist."""
    return NotFoundError(f"there is no session {', '.join(map(repr, names))}; all others were returned")
