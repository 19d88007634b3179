"""Defines the operations of the client as generators that do no I/O (the sans-I/O pattern: https://sans-io.readthedocs.io).

An operation yields a `Request` to send or a `Pause` to wait, receives the response to each request, and returns its result. `Client`
runs operations with blocking calls, `AsyncClient` with awaited ones; nothing else differs between the two.

A request is sent up to four times if the proxy does not respond or its store fails (503). Only the registration of a key is sent once,
because a repetition would register a second key.
"""

import contextlib
import dataclasses
import itertools
import secrets
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypedDict, TypeVar
from urllib.parse import quote

import msgspec

from tokencache.adapters import models as served_models
from tokencache.adapters.load import load
from tokencache.backoff import delays
from tokencache.client.access import Access, access_to, check_directory, launch_of
from tokencache.client.errors import (
    AnswerError,
    ClientError,
    InvalidUrlError,
    NotFoundError,
    SealedError,
    UnreachableError,
    WaitTimeoutError,
    WrongServerError,
    error_of,
    is_foreign,
)
from tokencache.core.budget import Budget
from tokencache.session_url import BASE_URL_ADVICE, check_proxy_url
from tokencache.store.base import Binding
from tokencache.trajectories.lengths import LengthOptions, parameters_of
from tokencache.trajectories.values import EngineState, SessionState, Trajectory

_BASE = "/tokencache/v1"
_RETRIES = 3
_FIRST_POLL, _LONGEST_POLL = 0.02, 1.0
"""Seconds between two requests for the state of a session: the first and the longest pause."""

_UNAVAILABLE, _REDIRECTION = 503, 300

T = TypeVar("T")


class Request(msgspec.Struct, frozen=True):
    """A request to send. `path` is relative to the URL of the proxy. `key` replaces the admin key in `Authorization`."""

    method: str
    path: str
    params: dict[str, str] = {}
    body: bytes = b""
    key: str | None = None
    repeatable: bool = True

    def __str__(self) -> str:
        """Method and path, for messages."""
        return f"{self.method} {self.path}"

    def headers(self, admin_key: str | None) -> dict[str, str]:
        """Return the headers to send."""
        key = self.key or admin_key
        return {"Authorization": f"Bearer {key}"} if key is not None else {}


class Pause(msgspec.Struct, frozen=True):
    """Time to wait, in seconds."""

    seconds: float


class ServerResponse(msgspec.Struct, frozen=True):
    """A response.

    Attributes:
        status: the HTTP status; 0 if there was no response.
        body: its body, or the reason why there was none.
        url: where the request was sent.
        location: where a redirection leads.
    """

    status: int
    body: bytes
    url: str = ""
    location: str = ""


Steps: TypeAlias = Generator[Request | Pause, ServerResponse, T]
"""The steps of an operation with a result of type `T`."""


class FetchedTrajectory(msgspec.Struct, frozen=True):
    """A trajectory in the requested format. `idle`: whether no call was open when it was fetched."""

    trajectory: Any
    idle: bool


class SessionOptions(TypedDict, total=False):
    """The options of `Client.create` and `AsyncClient.create`."""

    harness: str
    model: str | None
    models: Mapping[str, str]
    sampling: Mapping[str, Any]
    tenant: str
    budget: Budget | None
    config_dir: Path | None


class _Sessions(msgspec.Struct):
    sessions: list[SessionState]


class _Engines(msgspec.Struct):
    engines: list[EngineState]


class _Key(msgspec.Struct):
    key: str
    id: str = ""


class Operations:
    """The operations on one proxy.

    The constructor raises `InvalidUrlError` if the URL cannot be that of a proxy. All methods raise `AnswerError` (`NotFoundError`,
    `WrongServerError`, …) if the proxy refuses or another server answers, and `UnreachableError` if there is no response.
    """

    def __init__(self, url: str, adapters: Path | None) -> None:
        try:
            self.url = check_proxy_url(url)
        except ValueError as error:
            raise InvalidUrlError(str(error)) from None
        self._adapters = (adapters,) if adapters is not None else ()

    def create(
        self,
        name: str | None,
        *,
        harness: str = "",
        model: str | None = None,
        models: Mapping[str, str] = MappingProxyType({}),
        sampling: Mapping[str, Any] = MappingProxyType({}),
        tenant: str = "",
        budget: Budget | None = None,
        config_dir: Path | None = None,
    ) -> Steps[Access]:
        """Register a key for a session, and prepare the harness if one is named."""
        adapter = load(harness, self._adapters) if harness else None
        if adapter is not None:
            check_directory(adapter, config_dir)
        session = name if name is not None else f"{harness or 'rollout'}-{secrets.token_hex(8)}"
        binding = msgspec.json.encode(Binding(session, harness, dict(models), dict(sampling), tenant=tenant, budget=budget or Budget()))
        registered = yield from _call(Request("POST", f"{_BASE}/keys", body=binding, repeatable=False), _Key)
        access = access_to(self.url, session, registered.key, registered.id)
        if adapter is None:
            return access
        served_model, context = yield from self._served(access.key, model)
        return dataclasses.replace(access, launch=launch_of(adapter, self.url, access, served_model, context, config_dir))

    def sessions(self, prefix: str = "") -> Steps[list[SessionState]]:
        """List the sessions whose names begin with a prefix."""
        listed = yield from _call(Request("GET", f"{_BASE}/sessions"), _Sessions)
        return [state for state in listed.sessions if state.session.startswith(prefix)]

    def engines(self) -> Steps[list[EngineState]]:
        """List the engines."""
        return (yield from _call(Request("GET", f"{_BASE}/engines"), _Engines)).engines

    def add_engine(self, url: str) -> Steps[EngineState]:
        """Let an engine accept calls."""
        return (yield from _call(Request("POST", f"{_BASE}/engines", body=msgspec.json.encode({"url": url})), EngineState))

    def drain_engine(self, url: str) -> Steps[EngineState]:
        """Send no new calls to an engine."""
        return (yield from _call(Request("POST", f"{_BASE}/engines/drain", body=msgspec.json.encode({"url": url})), EngineState))

    def remove_engine(self, url: str, *, force: bool) -> Steps[None]:
        """Remove an engine."""
        yield from _delete(f"{_BASE}/engines", {"url": url, "force": "true" if force else "false"})

    def finished(self) -> Steps[list[str]]:
        """List the sessions that are sealed and have no open call."""
        return [state.session for state in (yield from self.sessions()) if state.sealed and not state.open_calls]

    def state(self, name: str) -> Steps[SessionState]:
        """Return the state of a session."""
        return (yield from _call(Request("GET", _path(name)), SessionState))

    def seal(self, name: str) -> Steps[None]:
        """Seal a session."""
        yield from _call(Request("POST", f"{_path(name)}/seal"), dict)

    def delete(self, name: str) -> Steps[None]:
        """Delete a session."""
        yield from _delete(_path(name))

    def delete_if_present(self, name: str) -> Steps[None]:
        """Delete a session that may be gone already."""
        with contextlib.suppress(NotFoundError):
            yield from self.delete(name)

    def revoke(self, access: Access) -> Steps[None]:
        """Revoke the key of a session.

        Raises:
            ValueError: the session has no key that was registered here.
        """
        if not access.key_id:
            raise ValueError(f"session {access.id!r} was opened by its name: there is no key to revoke")
        yield from _delete(f"{_BASE}/keys/{access.key_id}")

    def fetch(self, name: str, form: str, drift: str, lengths: LengthOptions) -> Steps[Any]:
        """Fetch the trajectory of a session: a `Trajectory` if the format is `native`, else the JSON object of the format."""
        return (yield from _call(_trajectory(name, form, drift, lengths), Trajectory if form == "native" else dict))

    def fetch_json(self, name: str, form: str, drift: str, lengths: LengthOptions) -> Steps[bytes]:
        """Fetch the trajectory of a session as the JSON text that the proxy wrote."""
        return bytes((yield from _call(_trajectory(name, form, drift, lengths), msgspec.Raw)))

    def wait(self, name: str, *, turns: int, sealed: bool, timeout: float) -> Steps[SessionState]:
        """Poll a session until no call is open and the other conditions hold.

        Raises:
            WaitTimeoutError: the conditions did not hold in time.
            SealedError: it is sealed with fewer turns, so more cannot come.
            NotFoundError: there is no such session, and no other condition was given.
        """
        deadline, polls = time.monotonic() + timeout, delays(_FIRST_POLL, _LONGEST_POLL)
        while True:
            try:
                state = yield from self.state(name)
            except NotFoundError:
                if not turns and not sealed:
                    raise
                state = None  # the session begins with its first call
            if state is not None and not state.open_calls:
                if state.turns >= turns and (state.sealed or not sealed):
                    return state
                if state.sealed and state.turns < turns:
                    raise SealedError(f"session {name!r} is sealed with {state.turns} turns: {turns} cannot come any more")
            left = deadline - time.monotonic()
            if left <= 0:
                wanted = _conditions(turns, sealed=sealed)
                raise WaitTimeoutError(f"session {name!r}: waited {timeout:g} s for {wanted}; {_described(state)}")
            yield Pause(min(next(polls), left))

    def take(self, name: str, form: str, lengths: LengthOptions, *, seal: bool, timeout: float) -> Steps[FetchedTrajectory]:
        """Fetch a finished session: seal it first if `seal` is set, and wait until no call is open or the time is up."""
        if seal:
            yield from self.seal(name)
        try:
            yield from self.wait(name, turns=0, sealed=False, timeout=timeout)
            idle = True
        except WaitTimeoutError:
            idle = False
        # Drift is not measured: for many rollouts that would take engine time from calls.
        return FetchedTrajectory((yield from self.fetch(name, form, "off", lengths)), idle)

    def _served(self, key: str, model: str | None) -> Steps[tuple[str, int]]:
        """Find the model to name and its context in tokens, as `adapters.models.find` does."""
        models: Sequence[served_models.ListedModel] = ()
        try:
            models = (yield from _call(Request("GET", "/v1/models", key=key), served_models.Models)).data
        except ClientError:
            if model is None:
                raise
        return served_models.choose(models, model, self.url)


def _call(request: Request, kind: type[T]) -> Steps[T]:
    """Send a request, repeatedly if necessary, and read the response."""
    return _read((yield from _send(request))[0], request, kind)


def _delete(path: str, params: dict[str, str] | None = None) -> Steps[None]:
    """Send a DELETE. A 404 at a later attempt counts as success: an earlier attempt succeeded and its response was lost."""
    request = Request("DELETE", path, params or {})
    response, attempts = yield from _send(request)
    try:
        _read(response, request, dict)
    except NotFoundError:
        if attempts == 1:
            raise


def _send(request: Request) -> Steps[tuple[ServerResponse, int]]:
    """Send a request until there is a response. Returns the response and the number of attempts."""
    response, attempts = (yield request), 1
    for pause in itertools.islice(delays(0.1, 1.5, factor=4.0), _RETRIES if request.repeatable else 0):
        if response.status not in {0, _UNAVAILABLE}:
            break
        yield Pause(pause)
        response, attempts = (yield request), attempts + 1
    if not response.status:
        reason = response.body.decode(errors="replace")
        raise UnreachableError(f"{request}: no answer, tried {attempts} times: {reason}. Does `tokencache serve` run at {response.url}?")
    return response, attempts


def _read(response: ServerResponse, request: Request, kind: type[T]) -> T:
    """Decode the body of a response.

    Raises:
        AnswerError: the proxy refused, or the body is not what tokencache returns.
        WrongServerError: the server is not tokencache.
    """
    own = request.path.startswith(_BASE)  # the proxy relays other paths to its engine
    if own and is_foreign(response.status, response.body):
        words = f"redirects to {response.location}" if response.location else _excerpt(response.body)
        message = f"{request}: {response.url} is not a tokencache proxy: it answered {response.status}: {words}. {BASE_URL_ADVICE}"
        raise WrongServerError(message, status=response.status)
    if response.status >= _REDIRECTION:
        raise error_of(response.status, response.body, str(request))
    try:
        return msgspec.json.decode(response.body, type=kind)
    except msgspec.MsgspecError as error:
        words = f"{request}: status {response.status}, but the body is not a response of tokencache: {error}"
        if own:
            raise WrongServerError(f"{words}. It came from {response.url}. {BASE_URL_ADVICE}", status=response.status) from None
        raise AnswerError(words, status=response.status) from None


def _excerpt(body: bytes) -> str:
    """Return the beginning of a body on one line."""
    return " ".join(body[:200].decode(errors="replace").split()) or "no body"


def check_names(names: object) -> None:
    """Check the names that `iterate` is given.

    A single string is refused, although it could be one name: `sessions` takes a prefix, and `iterate` seals and deletes.

    Raises:
        TypeError: they are one string. Its characters would be taken as names.
    """
    if isinstance(names, str | bytes):
        raise TypeError(f"names: {names!r} is a string, not a collection of names. For one session write [{names!r}]")


def check_deletion(*, seal: bool, delete: bool) -> None:
    """Check the arguments of `iterate`.

    Raises:
        ValueError: sessions are to be deleted without being sealed.
    """
    if delete and not seal:
        raise ValueError("delete=True needs seal=True: a call that begins after the export would be lost")


def missing(names: Iterable[str]) -> NotFoundError:
    """Return the error for sessions that do not exist."""
    return NotFoundError(f"there is no session {', '.join(map(repr, names))}; all others were returned")


def _trajectory(name: str, form: str, drift: str, lengths: LengthOptions) -> Request:
    parameters = {"format": form} | ({"drift": drift} if drift else {}) | parameters_of(lengths)
    return Request("GET", f"{_path(name)}/trajectories", parameters)


def _path(name: str) -> str:
    return f"{_BASE}/sessions/{quote(name, safe='')}"


def _conditions(turns: int, *, sealed: bool) -> str:
    conditions = ["no open call", *([f"at least {turns} turns"] if turns else []), *(["the seal"] if sealed else [])]
    return " and ".join(conditions)


def _described(state: SessionState | None) -> str:
    if state is None:
        return "no call has begun in it"
    calls = ", ".join(call.call for call in state.open_calls)
    seal = "is sealed" if state.sealed else "is not sealed"
    return f"it has {state.turns} turns and {f'open calls: {calls}' if calls else 'no open call'}, and {seal}"
