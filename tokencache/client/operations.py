"""Defines the operations on a proxy (`protocol`): the methods of `Client` and `AsyncClient` that concern no single session."""

import dataclasses
import secrets
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack
from urllib.parse import quote

import msgspec

from tokencache.adapters import models as served_models
from tokencache.adapters.load import load
from tokencache.backoff import delays
from tokencache.client.access import Access, access_to, check_directory, launch_of
from tokencache.client.errors import ClientError, InvalidUrlError, NoRoomError, RefusedError, TooManyReadyError
from tokencache.client.protocol import BASE, Pause, Request, Steps, call, check_options, send_delete
from tokencache.client.session_operations import listed, written
from tokencache.core.session import Budget, History, NewSession
from tokencache.session_url import check_proxy_url
from tokencache.trajectories.reports import PASSING, RunLine, RunReport
from tokencache.trajectories.values import Capacity, Conditions, EngineState, SessionState

_PAGE = 500
_MOST_LISTINGS = 3
"""How often all sessions are listed from the beginning, because the store refuses a cursor."""
_WAIT_AT_ONCE = 20
"""Seconds for which one request waits for room in the KV caches."""
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 5.0
"""Seconds between two attempts to create a session while too many are ready: the first and the longest pause."""


class SessionOptions(TypedDict, total=False):
    """The options of `Client.create` and `AsyncClient.create`."""

    harness: str
    model: str | None
    models: Mapping[str, str]
    sampling: Mapping[str, Any]
    tenant: str
    history: History | None
    budget: Budget | None
    deadline: float | None
    silent_for: float | None
    config_dir: Path | None
    group: str
    metadata: Mapping[str, Any]
    tags: Iterable[str]
    exist_ok: bool
    wait: float


class ForkOptions(TypedDict, total=False):
    """The options of `Client.fork` and `AsyncClient.fork`."""

    deadline: float | None
    silent_for: float | None
    group: str
    metadata: Mapping[str, Any]
    tags: Iterable[str]


class Filters(TypedDict, total=False):
    """The filters of `Client.sessions` and `AsyncClient.sessions`."""

    state: str | None
    group: str | None
    tag: str | None
    harness: str | None
    outcome: str | None
    since: float | None
    until: float | None


class SessionPage(msgspec.Struct):
    """A page of `GET sessions`. `cursor` leads to the next one; `None` on the last."""

    sessions: list[SessionState]
    cursor: str | None = None


class _Runs(msgspec.Struct):
    runs: list[RunLine]


class _Engines(msgspec.Struct):
    engines: list[EngineState]


class _Key(msgspec.Struct):
    key: str
    id: str = ""
    public_url: str = ""
    warnings: list[str] = []


class _Fork(_Key):
    session: str = ""


class ProxyAddress:
    """A proxy, by its URL.

    Attributes:
        url: its base URL.

    Raises:
        InvalidUrlError: the URL cannot be that of a proxy.
    """

    def __init__(self, url: str, adapters: Path | None) -> None:
        try:
            self.url = check_proxy_url(url)
        except ValueError as error:
            raise InvalidUrlError(str(error)) from None
        self.adapters = (adapters,) if adapters is not None else ()


def create(proxy: ProxyAddress, name: str | None = None, **options: Unpack[SessionOptions]) -> Steps[Access]:
    """Define a session and register an API key for it. `Client.create` documents the arguments."""
    check_options("create", options, SessionOptions.__annotations__)
    harness, config_dir = options.get("harness", ""), options.get("config_dir")
    adapter = load(harness, proxy.adapters) if harness else None
    if adapter is not None:
        check_directory(adapter, config_dir)
    session = name if name is not None else f"{harness or 'rollout'}-{secrets.token_hex(8)}"
    members: dict[str, Any] = {member: options[member] for member in NewSession.__struct_fields__ if options.get(member) is not None}  # type: ignore[literal-required]
    members |= {"session": session, "tags": listed(members.get("tags", ())), "budget": msgspec.to_builtins(members.get("budget", {}))}
    registered = yield from _register(Request("POST", f"{BASE}/keys", body=written(members), repeatable=False), options.get("wait", 0.0))
    for warning in registered.warnings:
        warnings.warn(warning, stacklevel=2)
    url = registered.public_url or proxy.url
    access = access_to(url, session, registered.key, registered.id)
    if adapter is None:
        return access
    served_model, context = yield from _served(proxy, access.key, options.get("model"))
    return dataclasses.replace(access, launch=launch_of(adapter, url, access, served_model, context, config_dir))


def fork(proxy: ProxyAddress, session: str, turn: str, name: str | None = None, **options: Unpack[ForkOptions]) -> Steps[Access]:
    """Fork a session after a turn. `Client.fork` documents the arguments."""
    members: dict[str, Any] = {member: value for member, value in options.items() if value is not None}
    members |= {"turn": turn, "tags": listed(options.get("tags", ()))} | ({} if name is None else {"session": name})
    path = f"{BASE}/sessions/{quote(session, safe='')}/fork"
    forked = yield from call(Request("POST", path, body=written(members), repeatable=False), _Fork)
    return access_to(forked.public_url or proxy.url, forked.session, forked.key, forked.id)


def _register(request: Request, seconds: float) -> Steps[_Key]:
    """Register a key. While too many sessions are ready, or the engines have no room, try again for so many seconds."""
    deadline = time.monotonic() + seconds
    for pause in delays(_FIRST_WAIT, _LONGEST_WAIT):
        try:
            wait = min(_WAIT_AT_ONCE, int(deadline - time.monotonic()))
            return (yield from call(msgspec.structs.replace(request, params={"wait": f"{wait}"}, wait=wait) if wait > 0 else request, _Key))
        except (TooManyReadyError, NoRoomError) as refusal:
            left = deadline - time.monotonic()
            if left <= 0:
                raise
            yield Pause(min(0.0 if isinstance(refusal, NoRoomError) else pause, left))
    raise AssertionError("delays never end")


def page(
    _proxy: ProxyAddress, prefix: str = "", *, limit: int = _PAGE, cursor: str | None = None, **filters: Unpack[Filters]
) -> Steps[SessionPage]:
    """Return one page of the sessions that match, at most `limit`, and the cursor of the next page."""
    parameters = {name: f"{value}" for name, value in filters.items() if value is not None}
    parameters |= {"limit": f"{limit}"} | ({"prefix": prefix} if prefix else {}) | ({"cursor": cursor} if cursor else {})
    return (yield from call(Request("GET", f"{BASE}/sessions", parameters), SessionPage))


def sessions(proxy: ProxyAddress, prefix: str = "", **filters: Unpack[Filters]) -> Steps[list[SessionState]]:
    """List the sessions whose names begin with `prefix`, and that match all filters.

    Args:
        proxy: the proxy.
        prefix: the beginning of their names.
        filters: `state` (`open`, `finished` or `sealed`), `group`, `tag`, `harness`, `outcome`, and `since` and `until` (last used, Unix
            seconds).
    """
    found: dict[str, SessionState] = {}
    cursor, listings = None, _MOST_LISTINGS
    while True:
        try:
            one = yield from page(proxy, prefix, cursor=cursor, **filters)
        except RefusedError:  # of a cursor: another server of the store has taken over, so list again what it has
            listings -= 1
            if cursor is None or not listings:
                raise
            found, cursor = {}, None
            continue
        found |= {state.session: state for state in one.sessions}
        cursor = one.cursor
        if cursor is None:
            return list(found.values())


def runs(_proxy: ProxyAddress) -> Steps[list[RunLine]]:
    """List the runs, the last used first. A run is the sessions with one tag `run:ID`."""
    return (yield from call(Request("GET", f"{BASE}/runs"), _Runs)).runs


def report(
    _proxy: ProxyAddress,
    run: str = "",
    *,
    tag: str = "",
    passing: float = PASSING,
    with_failed: bool = False,
    offset: int = 0,
    limit: int = 100,
) -> Steps[RunReport]:
    """Return the figures of a run, of all sessions with a tag, or of all sessions.

    Args:
        run: its id: that of the tag `run:ID`.
        tag: only sessions with this tag.
        passing: a rollout passes if its reward is at least this.
        with_failed: whether failed rollouts count in the distributions, too. Otherwise only valid ones do.
        offset: number of groups to skip.
        limit: number of groups to return, at most 1,000.

    Raises:
        NotFoundError: no session is in this run, or has this tag.
    """
    parameters = {"passing": f"{passing}", "failed": f"{with_failed}".lower(), "offset": f"{offset}", "limit": f"{limit}"}
    parameters |= {name: value for name, value in (("run", run), ("tag", tag)) if value}
    return (yield from call(Request("GET", f"{BASE}/runs/report", parameters), RunReport))


def capacity(_proxy: ProxyAddress) -> Steps[Capacity]:
    """Return how many sessions fit into the KV caches of the engines (`sessions_fit`), such as for the trainer's own semaphore."""
    return (yield from call(Request("GET", f"{BASE}/capacity"), Capacity))


def engines(_proxy: ProxyAddress) -> Steps[list[EngineState]]:
    """List the engines of the proxy."""
    return (yield from call(Request("GET", f"{BASE}/engines"), _Engines)).engines


def conditions(_proxy: ProxyAddress) -> Steps[Conditions]:
    """Return the conditions under which the proxy records now."""
    return (yield from call(Request("GET", f"{BASE}/conditions"), Conditions))


def add_engine(_proxy: ProxyAddress, url: str) -> Steps[EngineState]:
    """Add an engine, or let a drained one accept calls again. It gets calls after it has been probed (`EngineState.serves`).

    The proxy probes it before it answers, for at most 10 seconds. An engine with another model makes a group, which serves the calls that
    name this model: `EngineState.note` says so. One that serves a known model otherwise waits: `EngineState.error` says in what it differs.

    `url` is its base URL; a `/v1` at its end is removed.
    """
    return (yield from call(Request("POST", f"{BASE}/engines", body=written({"url": url})), EngineState))


def drain_engine(_proxy: ProxyAddress, url: str) -> Steps[EngineState]:
    """Send no new calls to an engine. Calls in progress continue; its sessions continue on other engines.

    Raises:
        NotFoundError: there is no such engine.
    """
    return (yield from call(Request("POST", f"{BASE}/engines/drain", body=written({"url": url})), EngineState))


def remove_engine(_proxy: ProxyAddress, url: str, *, force: bool = False) -> Steps[None]:
    """Remove an engine that is drained (`EngineState.drained`), or with `force` any engine. Calls in progress continue.

    Raises:
        NotFoundError: there is no such engine.
        EngineInUseError: it is not drained, or `--upstream` names it.
    """
    yield from send_delete(f"{BASE}/engines", {"url": url, "force": "true" if force else "false"})


def _served(proxy: ProxyAddress, key: str, model: str | None) -> Steps[tuple[str, int]]:
    """Find the model to name and its context in tokens, as `adapters.models.find` does."""
    models: Sequence[served_models.ListedModel] = ()
    try:
        models = (yield from call(Request("GET", "/v1/models", key=key), served_models.Models)).data
    except ClientError:
        if model is None:
            raise
    return served_models.choose(models, model, proxy.url)
