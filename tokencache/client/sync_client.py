"""The blocking client: `Client`, and the `Session` that it returns."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Self, Unpack, cast, overload

import httpx2

from tokencache.client.access import Access, access_to
from tokencache.client.errors import NotFoundError
from tokencache.client.operations import (
    FetchedTrajectory,
    Operations,
    Request,
    ServerResponse,
    SessionOptions,
    Steps,
    T,
    check_deletion,
    check_names,
    missing,
)
from tokencache.session_url import printable_url
from tokencache.trajectories.lengths import LengthOptions
from tokencache.trajectories.values import EngineState, SessionState, Trajectory


class _Transport:
    """Runs operations over a connection pool."""

    def __init__(self, url: str, admin_key: str | None, timeout: float) -> None:
        self.url = printable_url(url)
        self._admin_key = admin_key
        self.http = httpx2.Client(base_url=url, timeout=timeout)

    def run(self, steps: Steps[T]) -> T:
        try:
            step = next(steps)
            while True:
                if isinstance(step, Request):
                    step = steps.send(self._send(step))
                else:
                    time.sleep(step.seconds)
                    step = next(steps)
        except StopIteration as done:
            return cast("T", done.value)

    def _send(self, request: Request) -> ServerResponse:
        try:
            response = self.http.request(
                request.method, request.path, params=request.params, content=request.body, headers=request.headers(self._admin_key)
            )
        except httpx2.TransportError as error:
            return ServerResponse(0, f"{type(error).__name__}: {error}".encode(), self.url)
        return ServerResponse(response.status_code, response.content, self.url, response.headers.get("location", ""))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session(Access):
    """One rollout. Attributes for the harness: `key`, `base_url`, `headers`, `env`, `launch`. Methods for the trainer.

    A session begins with its first call. Before that, every method except `wait` and `revoke` raises `NotFoundError`. Methods also raise
    the exceptions of `Client`.
    """

    _transport: _Transport = dataclasses.field(repr=False)
    _operations: Operations = dataclasses.field(repr=False)

    def state(self) -> SessionState:
        """Return the state of the session: turns, open calls, incidents."""
        return self._transport.run(self._operations.state(self.id))

    def wait(self, *, turns: int = 0, sealed: bool = False, timeout: float = 60.0) -> SessionState:
        """Wait until no call is open, at least `turns` turns are recorded and, with `sealed`, the session is sealed. Returns its state.

        `timeout` is in seconds. With `turns` or `sealed` the session need not have begun yet.

        Raises:
            WaitTimeoutError: the conditions did not hold in time.
            SealedError: the session is sealed with fewer turns.
        """
        return self._transport.run(self._operations.wait(self.id, turns=turns, sealed=sealed, timeout=timeout))

    def seal(self) -> None:
        """Seal the session: it accepts no more calls. Open calls may still end. Sealing again has no effect."""
        self._transport.run(self._operations.seal(self.id))

    @overload
    def fetch(self, format: Literal["native"] = "native", *, drift: str = "", **lengths: Unpack[LengthOptions]) -> Trajectory: ...
    @overload
    def fetch(self, format: str, *, drift: str = "", **lengths: Unpack[LengthOptions]) -> Any: ...
    def fetch(self, format: str = "native", *, drift: str = "", **lengths: Unpack[LengthOptions]) -> Any:  # noqa: A002 - the name of the query parameter
        """Fetch the current trajectory. For formats other than `native` the result is the JSON object of the format.

        `drift` selects the turns whose drift is measured first (docs/drift.md): `off`, `sequences` or `turns`. `""` uses the default of
        the proxy: `sequences` for `native`, which costs the engine one rendering for each sequence, and `off` for other formats.

        `lengths` limits the length of sequences in tokens: `max_length` (of the whole sequence), `max_prompt_length` (before its first
        sampled token) and `max_response_length` (from there on). With a limit, `overlong` is required: it is `drop` to leave longer
        sequences out, `cut` to end them after the last whole turn that fits, or `mask` to keep them and train nothing of them.
        `figures.overlong` reports what was left out or masked (docs/formats.md).

        Raises:
            RefusedError: the format is unknown (the message lists all formats), or a limit is wrong.
        """
        return self._transport.run(self._operations.fetch(self.id, format, drift, lengths))

    def fetch_json(self, format: str = "native", *, drift: str = "", **lengths: Unpack[LengthOptions]) -> bytes:  # noqa: A002 - the name of the query parameter
        """Fetch the current trajectory as the JSON text that the proxy wrote, with every digit and member.

        For `drift` and `lengths`, see `fetch`.
        """
        return self._transport.run(self._operations.fetch_json(self.id, format, drift, lengths))

    def delete(self) -> None:
        """Delete the session with all its tokens."""
        self._transport.run(self._operations.delete(self.id))

    def revoke(self) -> None:
        """Revoke the session's key: from now on the proxy returns 401 to it. The recorded turns stay.

        Raises:
            ValueError: the session was opened by its name, so no key was registered.
            NotFoundError: the key was revoked already.
        """
        self._transport.run(self._operations.revoke(self))


class Client:
    """A connection to a proxy, for a trainer. Several threads may use it.

    Every method that sends a request raises `UnreachableError` if the proxy does not respond, `WrongServerError` if another program
    responds (for example the engine), `UnauthorizedError` without the right key, and another `AnswerError` if the proxy refuses.
    Requests that may be repeated are sent up to four times.

    Args:
        url: the base URL of the proxy, without `/v1`.
        admin_key: the key that the proxy was started with (`--admin-key`).
        timeout: how long to wait for one response, in seconds.
        adapters: a directory with harness adapters of your own.

    Raises:
        InvalidUrlError: the URL has no scheme or no host, or it ends with `/v1` or is the URL of a session.
    """

    def __init__(self, url: str, admin_key: str | None = None, *, timeout: float = 60.0, adapters: Path | None = None) -> None:
        self._operations = Operations(url, adapters)
        self._transport = _Transport(self._operations.url, admin_key, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._transport.http.close()

    def create(self, name: str | None = None, **options: Unpack[SessionOptions]) -> Session:
        """Register an API key for a session, by default one with a random name.

        Args:
            name: the session's name: 1 to 200 of `A-Z a-z 0-9 . _ : @ + = -`.
            harness: the adapter (`tokencache harnesses`) whose rules apply, and for which `env` and `launch` are prepared.
            model: the model that the harness requests. Default: the served one. Only used with `harness`.
            models: maps names (shell patterns) that the harness may use to the model that is served.
            sampling: sampling parameters that override those of the harness.
            tenant: the owner of the rollout. Tenants do not share the engine's prefix cache (docs/threat-model.md).
            budget: limits after which the session ends (docs/budgets.md). For limits that it does not set, those of the proxy apply.
            config_dir: where to write the configuration of the harness: a new directory, or one from an earlier call. Without it,
                variables that name it are left out.

        Raises:
            AdapterError: there is no such adapter, it needs `config_dir`, or several models are served and none is named
                (`tokencache.adapters.load`).
            RefusedError: the name or a sampling parameter is invalid.
        """
        return self._session(self._transport.run(self._operations.create(name, **options)))

    def session(self, name: str) -> Session:
        """Open a session by its name, whether or not it has begun. Its key contains that name, `tcs-NAME`. Sends no request."""
        return self._session(access_to(self._operations.url, name))

    def sessions(self, prefix: str = "") -> list[SessionState]:
        """List the sessions whose names begin with `prefix`."""
        return self._transport.run(self._operations.sessions(prefix))

    def engines(self) -> list[EngineState]:
        """List the engines of the proxy."""
        return self._transport.run(self._operations.engines())

    def add_engine(self, url: str) -> EngineState:
        """Add an engine, or let a drained one accept calls again. It gets calls after it has been probed (`EngineState.serves`).

        `url` is its base URL; a `/v1` at its end is removed.
        """
        return self._transport.run(self._operations.add_engine(url))

    def drain_engine(self, url: str) -> EngineState:
        """Send no new calls to an engine. Calls in progress continue; its sessions continue on other engines.

        Raises:
            NotFoundError: there is no such engine.
        """
        return self._transport.run(self._operations.drain_engine(url))

    def remove_engine(self, url: str, *, force: bool = False) -> None:
        """Remove an engine that is drained (`EngineState.drained`), or with `force` any engine. Calls in progress continue.

        Raises:
            NotFoundError: there is no such engine.
            EngineInUseError: it is not drained, or `--upstream` names it.
        """
        self._transport.run(self._operations.remove_engine(url, force=force))

    @overload
    def iterate(
        self,
        names: Iterable[str] | None = None,
        *,
        seal: bool = True,
        delete: bool = True,
        timeout: float = 60.0,
        **lengths: Unpack[LengthOptions],
    ) -> Iterator[Trajectory]: ...
    @overload
    def iterate(
        self,
        names: Iterable[str] | None = None,
        *,
        format: str,
        seal: bool = True,
        delete: bool = True,
        timeout: float = 60.0,
        **lengths: Unpack[LengthOptions],
    ) -> Iterator[Any]: ...
    def iterate(
        self,
        names: Iterable[str] | None = None,
        *,
        format: str = "native",  # noqa: A002 - the name of the query parameter
        seal: bool = True,
        delete: bool = True,
        timeout: float = 60.0,
        **lengths: Unpack[LengthOptions],
    ) -> Iterator[Any]:
        """Return the trajectories of sessions one after another.

        The client seals each session, waits until no call is open, then fetches and returns the trajectory. It deletes a session only when
        the next one is requested, so that the server still has a trajectory if the consumer fails while processing it. Drift is not
        measured.

        Args:
            names: the sessions, all of them finished from the trainer's view. `None`: all sessions that are sealed already.
            format: see `Session.fetch`.
            seal: seal each session first. `delete` needs it, because otherwise a call could begin after the fetch.
            delete: delete each session after it was processed.
            timeout: how long to wait for the open calls of a session, in seconds. If a call is still open then (its proxy may have died),
                the trajectory is returned as it is, with `complete` false, and the session is not deleted.
            lengths: see `Session.fetch`.

        Raises:
            NotFoundError: some of `names` do not exist. Raised at the end, after all others have been returned.
            TypeError: `names` is a string. For one session, pass a list with its name.
            ValueError: `delete` without `seal`.
        """
        check_names(names)
        check_deletion(seal=seal, delete=delete)
        take = functools.partial(self._operations.take, form=format, lengths=lengths, seal=seal, timeout=timeout)
        return self._iterate(names, delete, take)

    def _iterate(self, names: Iterable[str] | None, delete: bool, take: Callable[[str], Steps[FetchedTrajectory]]) -> Iterator[Any]:
        absent = []
        for name in self._transport.run(self._operations.finished()) if names is None else names:
            try:
                taken = self._transport.run(take(name))
            except NotFoundError:
                absent.append(name)
                continue
            yield taken.trajectory
            if delete and taken.idle:
                self._transport.run(self._operations.delete_if_present(name))
        if absent and names is not None:
            raise missing(absent)

    def _session(self, access: Access) -> Session:
        given = {field.name: getattr(access, field.name) for field in dataclasses.fields(access)}
        return Session(**given, _transport=self._transport, _operations=self._operations)
