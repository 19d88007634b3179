"""Chooses the engine for a call, among those of the group that serves its model (`groups`).

A session stays on one engine, so that its prefix stays in that engine's cache (`PlacementPolicy`):

`auto`    `none` if all engines are routers, as far as a probe can tell (`Capability.places`), otherwise `sticky`
`sticky`  the engine that the session's record names; a new session uses the one with the least load (`placement`)
`hash`    the first that serves of an order by rendezvous hashing (highest random weight: Thaler and Ravishankar, 1998,
          doi:10.1109/90.663936), which all replicas compute alike. If an engine is added or removed, only its own sessions move. Calls also
          use it while the store does not answer
`none`    as `hash`, and the engine chooses the rank: the URLs are routers, which place sessions themselves. Each has bindings of its own,
          so a session uses one router

A session that calls several models uses one engine of each group. Its record names them all, and its tokens are counted in each group by
themselves (`place`). An engine that is down still counts for its group until a probe finds another identity. So a session does not move to
an engine with a lower level because a better one restarts. A model that no group serves is refused, unless an engine was never probed yet.

Engines can be added, drained and removed while the pool is open. A drained engine takes no new calls. Another engine of its group continues
its sessions, with a cold prefix cache. Calls under way on an engine that is drained or removed run to their end.
"""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Literal

import xxhash

from tokencache import metrics
from tokencache.engine.groups import EngineGroup, group_engines, group_named
from tokencache.engine.health import EngineMonitor
from tokencache.engine.model import Endpoint, Engine, Model
from tokencache.engine.placement import Placement, place_of
from tokencache.errors import EngineError, HarnessError
from tokencache.recent import Recent
from tokencache.wakeup import end

log = logging.getLogger(__name__)

LIST_AGAIN_SECONDS = 10.0
"""Seconds after which engines are asked again what they serve, for a model that not all of them list."""
_MOST_NAMES = 1024
"""Names that no engine lists, for which it is known when the engines were asked last: clients choose them."""
PlacementPolicy = Literal["auto", "sticky", "hash", "none"]


def preference(session: str, keys: Sequence[str]) -> list[int]:
    """Order endpoints for a session: indices into their `keys`, the preferred one first.

    The order does not depend on the order of the keys. If one key is removed, the order of the others stays the same.
    """
    weights = [xxhash.xxh3_64_intdigest(f"{session}\0{key}".encode()) for key in keys]
    return sorted(range(len(keys)), key=lambda place: (-weights[place], keys[place]))


class Pool:
    """The engines and their monitors. `make` creates the engine at a base URL.

    Attributes:
        monitors: the monitors of the engines.
        groups: the engines that were probed, by the model that they serve.
        placement: the tokens that sessions hold on each engine.
        policy: which engine a session uses; never `auto`.
    """

    def __init__(self, make: Callable[[str], Engine], urls: Sequence[str], policy: PlacementPolicy = "auto") -> None:
        self._make, self._auto = make, policy == "auto"
        self.groups: dict[str, EngineGroup] = {}
        self.placement, self.policy = Placement(), "sticky" if policy == "auto" else policy
        self.monitors = [EngineMonitor(make(url), self._changed, alone=len(urls) == 1) for url in urls]
        self._tasks: dict[EngineMonitor, asyncio.Task[None]] = {}
        self._removed: list[Engine] = []
        self._logged: dict[str, str] = {}
        self._turns = itertools.count()
        self._listed: Recent[str, float] = Recent(_MOST_NAMES)
        """When the engines were asked last what they serve, in seconds of the monotonic clock: for a name, and `""` for those listed."""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Connect to the engines, and check them while the context is open."""
        for monitor in self.monitors:
            await self._start(monitor)
        try:
            yield
        finally:
            await end(*self._tasks.values())
            for engine in (*(monitor.engine for monitor in self.monitors), *self._removed):
                await engine.upstream.close()

    async def _start(self, monitor: EngineMonitor) -> None:
        await monitor.engine.upstream.open()
        self._tasks[monitor] = asyncio.create_task(monitor.run())

    def find(self, url: str) -> EngineMonitor | None:
        """Return the engine with that base URL."""
        for monitor in self.monitors:
            if monitor.url == url:
                return monitor
        return None

    async def add(self, url: str, at: float) -> None:
        """Add an engine, which takes calls after its first probe; or let a drained engine take calls again.

        `at` is when that was requested, Unix time in seconds.
        """
        if (known := self.find(url)) is not None:
            if known.draining:
                known.draining = False
                log.info("engine %s: takes calls again", known.url)
                self._changed()
            return
        for monitor in self.monitors:
            if monitor.alone:
                await monitor.gain_peers()
        made = EngineMonitor(self._make(url), self._changed, alone=not self.monitors)
        made.gone_at = at
        await self._start(made)
        self.monitors.append(made)
        log.info("engine %s: added", made.url)

    def drain(self, url: str) -> None:
        """Send no new calls to an engine."""
        monitor = self.find(url)
        if monitor is not None and not monitor.draining:
            monitor.draining = True
            log.info("engine %s: drained, it takes no new calls; %d are under way", monitor.url, monitor.engine.upstream.under_way)
            self._changed()

    async def remove(self, url: str) -> None:
        """Remove an engine; `close_removed` closes its connections when no call is under way on them."""
        monitor = self.find(url)
        if monitor is None:
            return
        self.monitors.remove(monitor)
        self._removed.append(monitor.engine)
        self._logged.pop(monitor.url, None)
        await end(self._tasks.pop(monitor))
        gauges = metrics.ENGINE_UP, metrics.ENGINE_LEVEL, metrics.ENGINE_KV, metrics.ENGINE_LIVE
        metrics.forget({"engine": monitor.url}, *gauges)
        log.info("engine %s: removed; %d calls are under way", monitor.url, monitor.engine.upstream.under_way)
        self._changed()

    async def close_removed(self) -> None:
        """Close the connections to removed engines without calls under way."""
        for engine in [engine for engine in self._removed if not engine.upstream.under_way]:
            self._removed.remove(engine)
            await engine.upstream.close()

    def serves(self, monitor: EngineMonitor) -> bool:
        """Whether an engine answers and belongs to the group that serves sessions."""
        usable = monitor.ready and not monitor.mismatched and not monitor.draining
        return usable and (monitor.identity is not None or len(self.monitors) == 1)

    def load(self, monitor: EngineMonitor, now: float) -> int:
        """Return the tokens that the sessions of all replicas hold on an engine, on all its ranks; see `Placement.load`."""
        return sum(self.placement.load(endpoint.key, now) for endpoint in monitor.engine.endpoints)

    @property
    def ready(self) -> bool:
        """Whether at least one engine serves."""
        return any(map(self.serves, self.monitors))

    def endpoints_of(self, call: str, session: str, bound: str | None, messages: Collection[bytes], model: str) -> Iterable[Endpoint]:
        """Return the endpoints that a call of a session may use, one on each engine, the preferred one first; none if none takes calls.

        Until the call has ended (`Placement.end`), its tokens count for the one that the caller got last.

        Args:
            call: id of the call.
            session: its session.
            bound: the endpoints that the session's record names (`rebound`); `""` if none, `None` if the store did not answer.
            messages: the messages of the call, raw.
            model: the name of the model that it requests.

        Raises:
            HarnessError: no engine serves the model.
        """
        if len(self.monitors) == 1 and not self.monitors[0].draining:
            taking = self.monitors
        else:
            taking, session = self._taking(model), self.place(session, model)
        if len(taking) == 1 and len(endpoints := taking[0].engine.endpoints) == 1:
            self.placement.begin(call, session, endpoints[0].key, 0, messages)
            return endpoints
        if self.policy == "sticky" and bound is not None:
            ordered = self._by_load(session, f"{bound} {self.placement.endpoint_of(session)}", taking)
        else:
            ordered = iter(self._by_hash(session, taking))
        return self._counting(call, session, messages, ordered)

    def _counting(self, call: str, session: str, messages: Collection[bytes], ordered: Iterator[Endpoint]) -> Iterator[Endpoint]:
        for endpoint in ordered:
            self.placement.begin(call, session, endpoint.key, 0, messages)
            yield endpoint

    def _by_load(self, session: str, bound: str, taking: Sequence[EngineMonitor]) -> Iterator[Endpoint]:
        """Return the first endpoint here that a session is bound to, then one on each other engine by their load when they are reached."""
        choose, left = self.placement.choose, list(taking)
        endpoints = _by_key(left)
        bound = next((key for key in bound.split(" ") if key in endpoints), "")
        home = endpoints.get(bound)
        if home is not None and self.serves(home[0]) and choose(session, bound, endpoints, time.monotonic()) == bound:
            left.remove(home[0])
            yield home[1]
        while left and (endpoints := _by_key(self._usable(left))):
            monitor, endpoint = endpoints[choose(session, bound, endpoints, time.monotonic())]
            left.remove(monitor)  # if an engine does not accept a call, its other ranks do not either
            yield endpoint

    def rebound(self, bound: str, at: str) -> str:
        """Return what the record of a session names after a call: the endpoint of the call, and those of other groups.

        Keys are separated by a space, which no URL contains. `bound` is what the record names; the result is `""` if that stays.
        """
        if not (self.placement.groups and bound):
            return at if at != bound else ""
        keys = bound.split(" ")
        group_of = {key: group.model for group in self.groups.values() for key in _by_key(group.monitors)}
        return "" if at in keys else " ".join([at, *[key for key in keys if group_of.get(key) not in {None, group_of.get(at)}]])

    def place(self, session: str, model: str) -> str:
        """Return the name under which the tokens of a session are counted in the group of a model."""
        if not self.placement.groups:
            return session
        group = group_named(self.groups.values(), model)
        return place_of(session, group.model) if group is not None else session

    async def check_model(self, name: str) -> None:
        """Check that a model may be served. If not all engines list it, they are asked again what they serve: adapters come and go.

        With one group, any name is passed on: its engine answers for itself. An engine that was never probed may serve what no other does.

        Raises:
            HarnessError: no engine serves it.
        """
        group, now = group_named(self.groups.values(), name), time.monotonic()
        if not self.groups or (group is not None and group.all_list(name)):
            return
        elsewhere = group is None and (self.placement.groups or any(monitor.identity is None for monitor in self.monitors))
        if not elsewhere and now - self._listed.get(name if group is None else "", -math.inf) < LIST_AGAIN_SECONDS:
            return
        if group is not None:
            self._listed[""] = now  # meanwhile, others use the engines that are known to list it
        await asyncio.gather(*[monitor.engine.list_models() for monitor in self.monitors if monitor.ready])
        self._listed[name] = now
        if self.placement.groups:
            self._group(name)

    async def list_models(self) -> dict[str, dict[str, Any]]:
        """Return the models of all groups: the entry of `/v1/models` of each, by its name. Engines that do not serve list none."""
        serving = [next(filter(self.serves, group.monitors), None) for group in self.groups.values()]
        listed = await asyncio.gather(*[monitor.engine.list_models() for monitor in serving if monitor is not None])
        entries: dict[str, dict[str, Any]] = {}
        for name, entry in [pair for found in listed for pair in found.items()]:
            entries.setdefault(name, entry)
        return entries

    def _group(self, name: str) -> EngineGroup | None:
        """Return the group of a model; `None` if an engine that was never probed may serve it.

        Raises:
            HarnessError: no engine serves it.
        """
        group = group_named(self.groups.values(), name)
        if group is None and all(monitor.identity is not None for monitor in self.monitors):
            served = ", ".join(name for group in self.groups.values() for name in group.names)
            message = f"The model `{name[:200]}` does not exist. Served here: {served}"
            raise HarnessError(message, status=HTTPStatus.NOT_FOUND, param="model", kind="NotFoundError")
        return group

    def order(self, session: str | None, model: str = "") -> list[Engine]:
        """Return the engines for a request that begins no call, the preferred one first; at least one.

        Requests without a session use them in turn, those of a session the engine of its last call here, then those of its hash. `model`
        is the name of the model that it requests; without one, the first group serves it.

        Raises:
            EngineError: there are no engines, or all engines of the model are drained or waiting.
            HarnessError: no engine serves the model.
        """
        taking = self._taking(model)
        if not taking:
            raise self.unavailable()
        if len(taking) == 1:
            return [taking[0].engine]
        ordered = self._in_turn(taking) if session is None else self._by_hash(session, taking)
        home = self._home(self.place(session or "", model), taking)
        return [endpoint.engine for endpoint in sorted(ordered, key=lambda endpoint: home is None or endpoint.engine is not home.engine)]

    def engine_of(self, session: str, model: str = "") -> Engine:
        """Return the engine for a request of a session that begins no call; see `order`. If all are drained or wait, one of these.

        Raises:
            EngineError: there are no engines.
            HarnessError: no engine serves the model.
        """
        monitors = self.monitors
        if len(monitors) == 1:
            return monitors[0].engine
        home = self._home(self.place(session, model), monitors)
        if home is not None and self.serves(home):
            return home.engine
        try:
            return self.order(session, model)[0]
        except EngineError:
            if not monitors:
                raise
            group = group_named(self.groups.values(), model)
            return (group.monitors if group is not None else monitors)[0].engine

    def _home(self, place: str, monitors: Sequence[EngineMonitor]) -> EngineMonitor | None:
        """Return the engine of a session's last call here."""
        at = self.placement.endpoint_of(place)
        found = _by_key(monitors).get(at)
        return found[0] if found is not None else None

    def _usable(self, taking: Sequence[EngineMonitor]) -> list[EngineMonitor]:
        """Return the engines that serve; if none does, those that may become available: calls try them."""
        return [monitor for monitor in taking if self.serves(monitor)] or [monitor for monitor in taking if not monitor.mismatched]

    def _in_turn(self, taking: Sequence[EngineMonitor]) -> list[Endpoint]:
        """Return the engines, which choose the rank, and begin with another one each time."""
        usable = self._usable(taking)
        first = next(self._turns) % len(usable)
        return [Endpoint.of(monitor.engine) for monitor in (*usable[first:], *usable[:first])]

    def _by_hash(self, session: str, taking: Sequence[EngineMonitor]) -> list[Endpoint]:
        """Return one endpoint of each engine, in the order in which every replica finds them."""
        usable = self._usable(taking)
        if self.policy == "none":
            endpoints = [Endpoint.of(monitor.engine) for monitor in usable]
        else:
            endpoints = [endpoint for monitor in usable for endpoint in monitor.engine.endpoints]
        chosen: dict[Engine, Endpoint] = {}
        for place in preference(session, [endpoint.key for endpoint in endpoints]):
            chosen.setdefault(endpoints[place].engine, endpoints[place])
        return list(chosen.values())

    def _taking(self, model: str = "") -> list[EngineMonitor]:
        """Return the engines of a model that take calls.

        Raises:
            HarnessError: no engine serves the model.
        """
        monitors = self.monitors
        unknown = [monitor for monitor in monitors if monitor.identity is None]
        if self.placement.groups or (self.groups and unknown):
            group = self._group(model)
            monitors = group.serving(model) if group is not None else unknown
        elif self.groups:
            (group,) = self.groups.values()
            monitors = group.serving(model)
        return [monitor for monitor in monitors if not (monitor.draining or monitor.mismatched)]

    def unavailable(self) -> EngineError:
        """Make the error of a request that no engine takes."""
        what = "every engine is being drained, or differs from those that serve" if self.monitors else "no engine is known yet"
        how = 'add one with POST /tokencache/v1/engines {"url": "http://HOST:PORT"}, or start tokencache with --upstream URL'
        return EngineError(f"{what}: {how}", status=HTTPStatus.SERVICE_UNAVAILABLE, reached=False)

    async def model(self, name: str = "") -> Model:
        """Return a model of an engine that serves it, for requests without a session.

        Raises:
            EngineError: no engine takes calls, the engine cannot be reached, or it refuses the model.
            HarnessError: no engine serves the model.
        """
        return await self.order(None, name)[0].model(name)

    @property
    def raw_logprobs(self) -> bool:
        """Whether an engine reports raw log probabilities (`logprob_kind`)."""
        return any(found.logprobs == "raw" for monitor in self.monitors for found in monitor.engine.capabilities)

    @property
    def later_system(self) -> bool:
        """Whether all templates accepted a later system message (`Capability.later_system`), including those of engines that are down."""
        return all(monitor.identity.capability["later_system"] for monitor in self.monitors if monitor.identity is not None)

    def mark_down(self, engine: Engine, why: EngineError) -> None:
        """Mark an engine down at once if a request failed because it is."""
        for monitor in self.monitors:
            if monitor.engine is engine and why.down:
                monitor.mark_down(str(why))

    def _changed(self) -> None:
        """Group the engines, decide whether the proxy places sessions, and log the groups and the engines that wait."""
        self.groups = group_engines(self.monitors)
        self.placement.groups = tuple(self.groups) if len(self.groups) > 1 else ()
        known = [monitor for monitor in self.monitors if monitor.identity is not None and not monitor.draining]
        if self._auto and known:
            self.policy = "none" if all(monitor.engine.places for monitor in known) else "sticky"
        waiting: dict[EngineMonitor, str] = {}
        mixed = []
        for group in self.groups.values():
            versions: dict[str, list[str]] = {}
            for monitor, differences in group.differences().items():
                if differences:
                    waiting[monitor] = f"it waits, because it differs from the engines that serve {group.model}: {'; '.join(differences)}"
                elif monitor.version:
                    versions.setdefault(monitor.version, []).append(monitor.url)
            if len(versions) > 1:
                mixed += [f"{version}: {', '.join(urls)}" for version, urls in sorted(versions.items())]
            if not waiting.keys().isdisjoint(group.monitors):
                newest = max(monitor.identified for monitor in group.monitors)
                for monitor in group.monitors:
                    monitor.update_identity(newest)
        for monitor in self.monitors:
            monitor.mismatched = monitor in waiting
            self._log(monitor.url, waiting.get(monitor, ""))
        self._log("", f"engines of different versions serve together ({'; '.join(mixed)})" if mixed else "")
        several = [f"{group.model} ({', '.join(monitor.url for monitor in group.monitors)})" for group in self.groups.values()]
        self._log("groups", f"several models are served: {'; '.join(several)}" if len(several) > 1 else "", level=logging.INFO)

    def _log(self, about: str, event: str, *, level: int = logging.WARNING) -> None:
        """Log an event of an engine (its URL), or of the pool, unless it is the same as the last one."""
        if event and self._logged.get(about) != event:
            log.log(level, "%s%s", f"engine {about}: " if "/" in about else "", event)
        self._logged[about] = event

    def why_unused(self, monitor: EngineMonitor) -> str:
        """Return the reason why an engine does not serve; `""` if it does."""
        if monitor.draining:
            return "it is drained: it takes no new calls"
        return self._logged.get(monitor.url, "") or monitor.engine.error


def _by_key(monitors: Sequence[EngineMonitor]) -> dict[str, tuple[EngineMonitor, Endpoint]]:
    """Return the endpoints of engines by their keys."""
    return {endpoint.key: (monitor, endpoint) for monitor in monitors for endpoint in monitor.engine.endpoints}
