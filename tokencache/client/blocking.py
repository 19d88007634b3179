"""The client for programs that block: `Client`, and the `Session` that it gives out."""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self, cast, overload

import httpx2

from tokencache.client.access import Access, access_to
from tokencache.client.asking import Exchange, Request, ServerResponse, T
from tokencache.client.errors import NotFoundError
from tokencache.client.exchanges import Exchanges, check_deletion, missing
from tokencache.core.budget import Budget
from tokencache.trajectories.values import EngineState, SessionState, Trajectory


class _Line:
    """Drives exchanges over a connection pool."""

    def __init__(self, url: str, admin_key: str | None, timeout: float) -> None:
        self._admin_key = admin_key
        self.http = httpx2.Client(base_url=url, timeout=timeout)

    def __call__(self, exchange: Exchange[T]) -> T:
        try:
            step = next(exchange)
            while True:
                if isinstance(step, Request):
                    step = exchange.send(self._send(step))
                else:
                    time.sleep(step.seconds)
                    step = next(exchange)
        except StopIteration as done:
            return cast("T", done.value)

    def _send(self, request: Request) -> ServerResponse:
        try:
            answer = self.http.request(
                request.method, request.path, params=request.params, content=request.body, headers=request.headers(self._admin_key)
            )
        except httpx2.TransportError as why:
            return ServerResponse(0, f"{type(why).__name__}: {why}".encode())
        return ServerResponse(answer.status_code, answer.content)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session(Access):
    """One rollout: how a harness gets in (`key`, `base_url`, `headers`, `env`, `launch`), and what a trainer does with it.

    Every method raises `NotFoundError` if there is no such session (it begins with its first call), and what `Client` raises.
    """

    _line: _Line = dataclasses.field(repr=False)
    _exchanges: Exchanges = dataclasses.field(repr=False)

    def state(self) -> SessionState:
        """Read its state: turns, open calls, incidents."""
        return self._line(self._exchanges.state(self.id))

    def wait(self, *, turns: int = 0, sealed: bool = False, timeout: float = 60.0) -> SessionState:
        """Wait until no call is open, at least `turns` turns are recorded and, if wanted, it is sealed; returns its state.

        `timeout` is in seconds. With `turns` or `sealed` the session need not have begun yet.

        Raises:
            WaitTimeoutError: that did not come in time.
            SealedError: it is sealed with fewer turns.
        """
        return self._line(self._exchanges.wait(self.id, turns=turns, sealed=sealed, timeout=timeout))

    def seal(self) -> None:
        """Let it take no more calls; those that are open may still end. May be done twice."""
        self._line(self._exchanges.seal(self.id))

    @overload
    def fetch(self, format: Literal["native"] = "native", *, drift: str = "") -> Trajectory: ...
    @overload
    def fetch(self, format: str, *, drift: str = "") -> Any: ...
    def fetch(self, format: str = "native", *, drift: str = "") -> Any:  # noqa: A002 - the route's own word
        """Fetch its trajectory as it is now; in another format than `native`, as the JSON object that this format is.

        `drift` says which turns' drift is measured first (docs/drift.md): `off`, `sequences` or `turns`; `""` leaves it to the
        server, which measures `sequences` for `native`: one rendering each by the engine.

        Raises:
            RefusedError: there is no such format; the message lists those that exist.
        """
        return self._line(self._exchanges.fetch(self.id, format, drift))

    def fetch_json(self, format: str = "native", *, drift: str = "") -> bytes:  # noqa: A002 - the route's own word
        """Fetch its trajectory as the JSON text that the server wrote, to be kept: every digit and member of it; `drift` as in `fetch`."""
        return self._line(self._exchanges.fetch_json(self.id, format, drift))

    def delete(self) -> None:
        """Forget it, tokens and all."""
        self._line(self._exchanges.delete(self.id))

    def revoke(self) -> None:
        """Let its key stand for nothing: from now on the server answers 401 to it. What is recorded stays.

        Raises:
            ValueError: it was taken up by its name, and has no key that was registered.
            NotFoundError: it was revoked already.
        """
        self._line(self._exchanges.revoke(self))


class Client:
    """A trainer's connection to a proxy.

    `url` is the proxy's base URL without `/v1`, `admin_key` the key it was started with (`--admin-key`), `timeout` how long to
    wait for one answer, in seconds, `adapters` a directory of your own harness adapters. May be used by several threads.

    Every method that asks the server raises `UnreachableError` if nobody answers, `UnauthorizedError` without the right key, and
    `AnswerError` or one of its kinds for what else the server refuses. What may be asked twice is tried four times.
    """

    def __init__(self, url: str, admin_key: str | None = None, *, timeout: float = 60.0, adapters: Path | None = None) -> None:
        self._line = _Line(url, admin_key, timeout)
        self._exchanges = Exchanges(url, adapters)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._line.http.close()

    def create(
        self,
        name: str | None = None,
        *,
        harness: str = "",
        model: str | None = None,
        models: Mapping[str, str] = MappingProxyType({}),
        sampling: Mapping[str, Any] = MappingProxyType({}),
        tenant: str = "",
        budget: Budget | None = None,
        config_dir: Path | None = None,
    ) -> Session:
        """Register an API key for a session, by default one with a random name.

        Args:
            name: the session's name: 1 to 200 of `A-Z a-z 0-9 . _ : @ + = -`.
            harness: the adapter (`tokencache harnesses`) whose habits are forgiven, and for which `env` and `launch` are made.
            model: the model that the harness is told to ask for; default: the one that is served. Only used with `harness`.
            models: names (shell patterns) that the harness may use for the model → the model that is served.
            sampling: sampling parameters that are used whatever the harness asks for.
            tenant: whose rollout it is; the engine's prefix cache is not shared between tenants (docs/threat-model.md).
            budget: after how much of it the session is ended (docs/budgets.md); what it leaves open is the server's.
            config_dir: where to write the harness's own configuration: a new directory, or one made here before. Without it
                variables that name it are left out.

        Raises:
            AdapterError: there is no such adapter, it cannot do without `config_dir`, or several models are served and none is
                named (`tokencache.adapters.load`).
            RefusedError: this is no name, or no sampling parameter.
        """
        access = self._line(
            self._exchanges.create(
                name,
                harness=harness,
                model=model,
                models=dict(models),
                sampling=dict(sampling),
                tenant=tenant,
                budget=budget,
                config_dir=config_dir,
            )
        )
        return self._session(access)

    def session(self, name: str) -> Session:
        """Take up a session by its name, whether or not it has begun. Its key is the one that names it, `tcs-NAME`."""
        return self._session(access_to(self._exchanges.url, name))

    def sessions(self, prefix: str = "") -> list[SessionState]:
        """List the sessions whose names begin with `prefix`."""
        return self._line(self._exchanges.sessions(prefix))

    def engines(self) -> list[EngineState]:
        """List the engines of the proxy."""
        return self._line(self._exchanges.engines())

    def add_engine(self, url: str) -> EngineState:
        """Let an engine take calls: a new one, or one that was drained. It gets some once it was probed (`EngineState.serves`).

        `url` is its base URL; a `/v1` at its end is taken off.
        """
        return self._line(self._exchanges.add_engine(url))

    def drain_engine(self, url: str) -> EngineState:
        """Let an engine take no new calls. Those under way run to their end; its sessions go on elsewhere.

        Raises:
            NotFoundError: there is no such engine.
        """
        return self._line(self._exchanges.drain_engine(url))

    def remove_engine(self, url: str, *, force: bool = False) -> None:
        """Take an engine out that is drained (`EngineState.drained`), or with `force` any; calls under way run to their end.

        Raises:
            NotFoundError: there is no such engine.
            EngineInUseError: it is not drained, or it is named by `--upstream`.
        """
        self._line(self._exchanges.remove_engine(url, force=force))

    @overload
    def iterate(
        self, names: Iterable[str] | None = None, *, seal: bool = True, delete: bool = True, timeout: float = 60.0
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
    ) -> Iterator[Any]: ...
    def iterate(
        self,
        names: Iterable[str] | None = None,
        *,
        format: str = "native",  # noqa: A002 - the route's own word
        seal: bool = True,
        delete: bool = True,
        timeout: float = 60.0,
    ) -> Iterator[Any]:
        """Take trajectories home, one after the other.

        Each session is sealed, waited for until no call is open, fetched and handed over. It is deleted when the next one is
        asked for, and not before: if the consumer fails with a trajectory in its hands, that one is still on the server. No
        drift is measured for it.

        Args:
            names: the sessions, all of them over as far as the trainer is concerned. `None`: those that are sealed already.
            format: as in `Session.fetch`.
            seal: seal each first. `delete` wants it: a call could begin behind the trajectory.
            delete: delete each once it was taken.
            timeout: how long to wait for a session's open calls, in seconds. Where one is open even then (its proxy may have died),
                the trajectory is handed over as it is, `complete` false, and the session is not deleted.

        Raises:
            NotFoundError: some of `names` are not there; raised at the end, all others have been handed over.
            ValueError: `delete` without `seal`.
        """
        check_deletion(seal=seal, delete=delete)
        return self._iterate(names, format, seal, delete, timeout)

    def _iterate(self, names: Iterable[str] | None, form: str, seal: bool, delete: bool, timeout: float) -> Iterator[Any]:
        absent = []
        for name in self._line(self._exchanges.finished()) if names is None else names:
            try:
                taken = self._line(self._exchanges.take(name, form, seal=seal, timeout=timeout))
            except NotFoundError:
                absent.append(name)
                continue
            yield taken.trajectory
            if delete and taken.quiet:
                self._line(self._exchanges.discard(name))
        if absent and names is not None:
            raise missing(absent)

    def _session(self, access: Access) -> Session:
        given = {field.name: getattr(access, field.name) for field in dataclasses.fields(access)}
        return Session(**given, _line=self._line, _exchanges=self._exchanges)
