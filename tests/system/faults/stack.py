"""A whole deployment on loopback: Redis, an engine with a persistent log, some replicas of the proxy, and a checker."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Self

from tests.support.redis_server import RealRedis
from tests.support.waiting import block_until
from tests.system.faults.checker import Findings, check
from tests.system.faults.processes import Engine, Proxy, ask
from tokencache.testing.ground_truth import read_ground_truth

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path
    from types import TracebackType

    from tests.system.faults.harness import Agent

_GONE, _OK = 404, 200
SESSIONS = "/tokencache/v1/sessions"


class Stack:
    """Start it with `with`; everything is stopped afterwards.

    Args:
        folder: for logs.
        replicas: how many proxies.
        redis: further arguments of `redis-server`.
        store: the URL of another Redis, started elsewhere.
        options: further options of `tokencache serve`.
        engine: further options of the engine.
        engines: how many engines.
    """

    def __init__(
        self,
        folder: Path,
        *,
        replicas: int = 2,
        redis: Sequence[str] = (),
        store: str = "",
        options: Sequence[str] = (),
        engine: Sequence[str] = (),
        engines: int = 1,
    ) -> None:
        self.folder, self.ground_truth = folder, folder / "ground_truth.jsonl"
        self.redis = RealRedis(*redis)
        self._store, self._options, self._replicas = store, options, replicas
        self.engines = [Engine(f"engine-{n}", folder, self.ground_truth, "--seed", str(n), *engine) for n in range(engines)]
        self.proxies: list[Proxy] = []

    @property
    def engine(self) -> Engine:
        return self.engines[0]

    @property
    def urls(self) -> list[str]:
        return [proxy.url for proxy in self.proxies]

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            if not self._store:
                stack.enter_context(self.redis)
            for engine in self.engines:
                stack.callback(engine.kill)
                engine.start()
            for n in range(self._replicas):
                proxy = self.replica(f"proxy-{n}")
                stack.callback(proxy.kill)
                self.proxies.append(proxy.start())
            self.ready()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def ready(self) -> None:
        """Waits until every engine answers, and every replica can write to the store."""
        for process in (*self.engines, *self.proxies):
            process.ready()

    def saved(self) -> None:
        """Waits until no replica has anything to write to the store that it could not."""
        block_until(lambda: all(proxy.gauge("unsaved") == 0 for proxy in self.proxies if proxy.alive), "all incidents to be saved")

    def recovered(self) -> None:
        """Waits until all are ready and have saved what they could not save before."""
        self.ready()
        self.saved()

    def replica(self, name: str, *options: str) -> Proxy:
        """Makes one more replica, not started."""
        upstream = ",".join(engine.url for engine in self.engines)
        return Proxy(
            name, self.folder, "--upstream", upstream, "--store", self._store or self.redis.url, "--log-level", "warning",
            *self._options, *options,
        )  # fmt: skip

    def info(self, session: str) -> dict[str, Any] | None:
        return self._asked(f"{SESSIONS}/{session}")

    def export(self, session: str) -> dict[str, Any] | None:
        return self._asked(f"{SESSIONS}/{session}/trajectories?drift=off")

    def check(self, agents: Iterable[Agent], *, memory_lost: bool = False, finish: bool = False) -> Findings:
        """Waits until the living replicas serve no call and have saved everything, exports the sessions, and compares all records.

        With `finish` the sessions are finished before, as a trainer does.
        """
        agents = list(agents)
        block_until(lambda: all(proxy.gauge("calls_in_flight") == 0 for proxy in self.proxies if proxy.alive), "the end of all calls")
        self.saved()
        living = next(proxy for proxy in self.proxies if proxy.alive)
        for session in {agent.session for agent in agents} if finish else ():
            status, answer = ask(f"{living.url}{SESSIONS}/{session}/finish", {"reward": 0.0})
            assert status in {_OK, _GONE}, (status, answer)
        exports = {session: self.export(session) for session in {agent.session for agent in agents}}
        return check(
            [one for agent in agents for one in agent.asked], read_ground_truth(self.ground_truth), exports, memory_lost=memory_lost
        )

    def _asked(self, path: str) -> Any:
        """The answer of any living replica; `None` for what does not exist."""
        for proxy in self.proxies:
            if proxy.alive:
                return self._at(proxy, path)
        raise RuntimeError("no replica lives")

    @staticmethod
    def _at(proxy: Proxy, path: str) -> Any:
        status, answer = ask(proxy.url + path)
        assert status in {_OK, _GONE}, (status, answer, proxy.output()[-1000:])
        return answer if status == _OK else None
