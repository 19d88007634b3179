"""The exchanges: what the client asks of the server, and in what order. See `asking` for what an exchange is."""

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from tokencache.adapters import served
from tokencache.adapters.load import load
from tokencache.client.access import Access, access_to, check_directory, launch_of
from tokencache.client.asking import Exchange, Pause, Request, ask, read, send
from tokencache.client.errors import ClientError, NotFoundError, SealedError, WaitTimeoutError
from tokencache.core.budget import Budget
from tokencache.store.base import Binding
from tokencache.trajectories.values import EngineState, SessionState, Trajectory

_BASE = "/tokencache/v1"
_FIRST_LOOK, _LAST_LOOK = 0.02, 1.0
"""Seconds between two looks at a session that is waited for: at first, and at most."""

_MISSING = 404


class FetchedTrajectory(msgspec.Struct, frozen=True):
    """A trajectory in the format that was asked for; `quiet` says that no call was open when it was fetched."""

    trajectory: Any
    quiet: bool


class _Sessions(msgspec.Struct):
    sessions: list[SessionState]


class _Engines(msgspec.Struct):
    engines: list[EngineState]


class _Key(msgspec.Struct):
    key: str
    id: str = ""


class Exchanges:
    """The exchanges with one server.

    All raise `AnswerError` (`NotFoundError`, `UnauthorizedError`, …) for what the server refuses, and `UnreachableError`.
    """

    def __init__(self, url: str, adapters: Path | None) -> None:
        self.url = url.rstrip("/")
        self._adapters = (adapters,) if adapters is not None else ()

    def create(
        self,
        name: str | None,
        *,
        harness: str,
        model: str | None,
        models: dict[str, str],
        sampling: dict[str, Any],
        tenant: str,
        budget: Budget | None,
        config_dir: Path | None,
    ) -> Exchange[Access]:
        """Register a key for a session, and prepare the harness if one is named."""
        adapter = load(harness, self._adapters) if harness else None
        if adapter is not None:
            check_directory(adapter, config_dir)
        session = name if name is not None else f"{harness or 'rollout'}-{secrets.token_hex(8)}"
        binding = msgspec.json.encode(
            Binding(session, harness, models, sampling, tenant=tenant, budget=Budget() if budget is None else budget)
        )
        registered = yield from ask(Request("POST", f"{_BASE}/keys", body=binding, repeatable=False), _Key)
        access = access_to(self.url, session, registered.key, registered.id)
        if adapter is None:
            return access
        served_model, context = yield from self._served(access.key, model)
        return dataclasses.replace(access, launch=launch_of(adapter, self.url, access, served_model, context, config_dir))

    def sessions(self, prefix: str = "") -> Exchange[list[SessionState]]:
        """List the sessions whose names begin so."""
        listed = yield from ask(Request("GET", f"{_BASE}/sessions"), _Sessions)
        return [state for state in listed.sessions if state.session.startswith(prefix)]

    def engines(self) -> Exchange[list[EngineState]]:
        """List the engines."""
        return (yield from ask(Request("GET", f"{_BASE}/engines"), _Engines)).engines

    def add_engine(self, url: str) -> Exchange[EngineState]:
        """Let an engine take calls."""
        return (yield from ask(Request("POST", f"{_BASE}/engines", body=msgspec.json.encode({"url": url})), EngineState))

    def drain_engine(self, url: str) -> Exchange[EngineState]:
        """Let an engine take no new calls."""
        return (yield from ask(Request("POST", f"{_BASE}/engines/drain", body=msgspec.json.encode({"url": url})), EngineState))

    def remove_engine(self, url: str, *, force: bool) -> Exchange[None]:
        """Take an engine out; that it was gone at a second try is a success of the first."""
        yield from _removed(f"{_BASE}/engines", {"url": url, "force": "true" if force else "false"})

    def finished(self) -> Exchange[list[str]]:
        """List the sessions that are sealed, and in which no call is open."""
        return [state.session for state in (yield from self.sessions()) if state.sealed and not state.open_calls]

    def state(self, name: str) -> Exchange[SessionState]:
        """Read a session's state."""
        return (yield from ask(Request("GET", _path(name)), SessionState))

    def seal(self, name: str) -> Exchange[None]:
        """Let a session take no more calls."""
        yield from ask(Request("POST", f"{_path(name)}/seal"), dict)

    def delete(self, name: str) -> Exchange[None]:
        """Forget a session; that it was gone at a second try is a success of the first."""
        yield from _removed(_path(name))

    def revoke(self, access: Access) -> Exchange[None]:
        """Let a session's key stand for nothing.

        Raises:
            ValueError: the session has none that was registered here.
        """
        if not access.key_id:
            raise ValueError(f"session {access.id!r} was taken up by its name: there is no key to revoke")
        yield from _removed(f"{_BASE}/keys/{access.key_id}")

    def discard(self, name: str) -> Exchange[None]:
        """Forget a session that may be gone already."""
        with contextlib.suppress(NotFoundError):
            yield from self.delete(name)

    def fetch(self, name: str, form: str, drift: str) -> Exchange[Any]:
        """Fetch a session's trajectory: a `Trajectory` if the format is `native`, else what the format's JSON holds."""
        return (yield from ask(_trajectory(name, form, drift), Trajectory if form == "native" else dict))

    def fetch_json(self, name: str, form: str, drift: str) -> Exchange[bytes]:
        """Fetch a session's trajectory as the JSON text that the server wrote: every digit and member of it."""
        return bytes((yield from ask(_trajectory(name, form, drift), msgspec.Raw)))

    def wait(self, name: str, *, turns: int, sealed: bool, timeout: float) -> Exchange[SessionState]:
        """Look at a session until no call is open, and what else is wanted is there.

        Raises:
            WaitTimeoutError: not in time.
            SealedError: it is sealed with fewer turns, so that they cannot come.
            NotFoundError: there is none, and neither turns nor a seal are waited for.
        """
        deadline, look = time.monotonic() + timeout, _FIRST_LOOK
        while True:
            try:
                state = yield from self.state(name)
            except NotFoundError:
                if not turns and not sealed:
                    raise
                state = None  # it begins with its first call
            if state is not None and not state.open_calls and state.turns >= turns and (state.sealed or not sealed):
                return state
            if state is not None and not state.open_calls and state.sealed and state.turns < turns:
                raise SealedError(f"session {name!r} is sealed with {state.turns} turns: {turns} cannot come any more")
            left = deadline - time.monotonic()
            if left <= 0:
                raise WaitTimeoutError(f"session {name!r}: waited {timeout:g} s for {_wish(turns, sealed=sealed)}; {_found(state)}")
            yield Pause(min(look, left))
            look = min(2 * look, _LAST_LOOK)

    def take(self, name: str, form: str, *, seal: bool, timeout: float) -> Exchange[FetchedTrajectory]:
        """Fetch a session that is over: sealed first if wanted, and when no call is open any more, or time is up."""
        if seal:
            yield from self.seal(name)
        try:
            yield from self.wait(name, turns=0, sealed=False, timeout=timeout)
            quiet = True
        except WaitTimeoutError:
            quiet = False
        return FetchedTrajectory(
            (yield from self.fetch(name, form, "off")), quiet
        )  # many rollouts, and an engine that has better things to do

    def _served(self, key: str, model: str | None) -> Exchange[tuple[str, int]]:
        """Find the model to name and its context in tokens, as `adapters.served.find` does."""
        models: Sequence[served.ListedModel] = ()
        try:
            models = (yield from ask(Request("GET", "/v1/models", key=key), served.Models)).data
        except ClientError:
            if model is None:
                raise
        return served.choose(models, model, self.url)


def _removed(path: str, params: dict[str, str] | None = None) -> Exchange[None]:
    request = Request("DELETE", path, params or {})
    answer, tries = yield from send(request)
    if answer.status != _MISSING or tries == 1:
        read(answer, request, dict)


def check_deletion(*, seal: bool, delete: bool) -> None:
    """Check what sessions are to be taken home with.

    Raises:
        ValueError: they are to be deleted and are not sealed.
    """
    if delete and not seal:
        raise ValueError("delete=True wants seal=True: a call that begins behind the trajectory would be lost")


def missing(names: Iterable[str]) -> NotFoundError:
    """The error for sessions that were to be taken and are not there."""
    return NotFoundError(f"there is no session {', '.join(map(repr, names))}; all others were handed over")


def _trajectory(name: str, form: str, drift: str) -> Request:
    return Request("GET", f"{_path(name)}/trajectories", {"format": form} | ({"drift": drift} if drift else {}))


def _path(name: str) -> str:
    return f"{_BASE}/sessions/{quote(name, safe='')}"


def _wish(turns: int, *, sealed: bool) -> str:
    wishes = ["no open call", *([f"at least {turns} turns"] if turns else []), *(["the seal"] if sealed else [])]
    return " and ".join(wishes)


def _found(state: SessionState | None) -> str:
    if state is None:
        return "no call has begun in it"
    calls = ", ".join(call.call for call in state.open_calls)
    seal = "is sealed" if state.sealed else "is not sealed"
    return f"it has {state.turns} turns and {f'open calls: {calls}' if calls else 'no open call'}, and {seal}"
