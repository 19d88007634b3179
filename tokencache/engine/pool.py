"""The pool: the engines that serve one model, and which of them a call goes to.

A session keeps to one engine, so that its prefix is still in that engine's cache: each session has an order of preference over
the engines, by rendezvous hashing (highest random weight: Thaler and Ravishankar, 1998, doi:10.1109/90.663936), and goes to the
first that serves. Nothing is remembered for it: all replicas of the proxy come to the same order, and an engine that goes or comes
moves only its own sessions.

Sessions are served by engines of one *kind*: what the probe found is the same, and template and tokenizer write the same ids. Where
engines differ, those serve that can do most, then those of the larger number, then the first that was named; the others are
named loudly and left alone. An engine that is out keeps its vote for as long as it does not come back as something else: a
session does not change over to a lesser engine because a better one is being restarted.

Engines come and go while the pool is open (`add`, `drain`, `remove`). A drained engine takes no new calls, whatever their session:
any other engine of its kind can go on with its sessions, at the price of a cold prefix cache. No call is ever ended by that: what is
under way on an engine that is drained or removed runs to its end.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import xxhash

from tokencache import metrics
from tokencache.engine.health import Kind, Watch
from tokencache.engine.model import Engine, Model
from tokencache.engine.probe import LEVELS
from tokencache.errors import EngineError

log = logging.getLogger(__name__)

_UNAVAILABLE = 503


def preference(session: str, urls: Sequence[str]) -> list[int]:
    """Order engines for a session: places in `urls`, the preferred one first.

    The same whatever order the URLs are given in, and among those that remain if one is taken away.
    """
    weights = [xxhash.xxh3_64_intdigest(f"{session}\0{url}".encode()) for url in urls]
    return sorted(range(len(urls)), key=lambda place: (-weights[place], urls[place]))


class Pool:
    """Engines under watch; with one there is nothing to choose. `make` makes the engine at a base URL."""

    def __init__(self, make: Callable[[str], Engine], urls: Sequence[str]) -> None:
        self._make = make
        self.watches = [Watch(make(url), self._changed, alone=len(urls) == 1) for url in urls]
        self._tasks: dict[Watch, asyncio.Task[None]] = {}
        self._removed: list[Engine] = []
        self._told: dict[str, str] = {}
        self._turns = itertools.count()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Connect, and watch while the context is open."""
        for watch in self.watches:
            await self._begin(watch)
        try:
            yield
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for engine in (*(watch.engine for watch in self.watches), *self._removed):
                await engine.upstream.close()

    async def _begin(self, watch: Watch) -> None:
        await watch.engine.upstream.open()
        self._tasks[watch] = asyncio.create_task(watch.keep())

    def find(self, url: str) -> Watch | None:
        """The engine with that base URL."""
        return next((watch for watch in self.watches if watch.url == url), None)

    async def add(self, url: str) -> None:
        """Let an engine take calls: a new one, or one that was drained. It gets some once it was probed."""
        if (known := self.find(url)) is not None:
            if known.draining:
                known.draining = False
                log.info("engine %s: takes calls again", known.url)
                self._changed()
            return
        for watch in self.watches:
            if watch.alone:
                await watch.has_peers()
        made = Watch(self._make(url), self._changed, alone=not self.watches)
        await self._begin(made)
        self.watches.append(made)
        log.info("engine %s: added", made.url)

    def drain(self, url: str) -> None:
        """Let an engine take no new calls."""
        watch = self.find(url)
        if watch is not None and not watch.draining:
            watch.draining = True
            log.info("engine %s: drained, it takes no new calls; %d are under way", watch.url, watch.engine.upstream.under_way)
            self._changed()

    async def remove(self, url: str) -> None:
        """Watch an engine no more; its connections are closed when no call is under way on them (`close_removed`)."""
        watch = self.find(url)
        if watch is None:
            return
        self.watches.remove(watch)
        self._removed.append(watch.engine)
        task = self._tasks.pop(watch)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        metrics.ENGINE_UP.labels(watch.url).set(0)
        log.info("engine %s: removed; %d calls are under way", watch.url, watch.engine.upstream.under_way)
        self._changed()

    async def close_removed(self) -> None:
        """Close the connections to removed engines on which no call is under way any more."""
        for engine in [engine for engine in self._removed if not engine.upstream.under_way]:
            self._removed.remove(engine)
            await engine.upstream.close()

    def serves(self, watch: Watch) -> bool:
        """Whether an engine answers and is of the kind that sessions are served by."""
        return watch.ready and not watch.odd and not watch.draining and (watch.kind is not None or len(self.watches) == 1)

    @property
    def ready(self) -> bool:
        """Whether there is an engine that serves."""
        return any(map(self.serves, self.watches))

    def order(self, session: str | None) -> list[Engine]:
        """The engines that a call may go to, the preferred one first; never none.

        Without a session they take turns. While none serves those are named that may come back: who asks finds out.

        Raises:
            EngineError: there is no engine that takes calls.
        """
        taking = self._taking()
        if len(taking) == 1:
            return [taking[0].engine]
        usable = [watch for watch in taking if self.serves(watch)]
        usable = usable or [watch for watch in taking if not watch.odd]
        if session is None:
            first = next(self._turns) % len(usable)
            places = [*range(first, len(usable)), *range(first)]
        else:
            places = preference(session, [watch.url for watch in usable])
        return [usable[place].engine for place in places]

    def _taking(self) -> list[Watch]:
        """The engines that are not drained; at least one.

        Raises:
            EngineError: there is none.
        """
        taking = [watch for watch in self.watches if not watch.draining]
        if not taking:
            what = "every engine is being drained" if self.watches else "no engine is known yet"
            how = 'add one with POST /tokencache/v1/engines {"url": "http://HOST:PORT"}, or start tokencache with --upstream URL'
            raise EngineError(f"{what}: {how}", status=_UNAVAILABLE, reached=False)
        return taking

    async def model(self, name: str = "") -> Model:
        """Return a model of the first engine that serves, for questions that belong to no session.

        Raises:
            EngineError: the engine cannot be reached, or refuses the model.
        """
        taking = self._taking()
        serving = next((watch for watch in taking if self.serves(watch)), taking[0])
        return await serving.engine.model(name)

    @property
    def later_system(self) -> bool:
        """Whether templates took a system message behind the first one (`Capability.later_system`): of engines that are away, too."""
        return all(watch.kind.capability["later_system"] for watch in self.watches if watch.kind is not None)

    def lost(self, engine: Engine, why: EngineError) -> None:
        """An engine could not be connected to: it is out, at once."""
        for watch in self.watches:
            if watch.engine is engine:
                watch.out(str(why))

    def _changed(self) -> None:
        """Settle which kind serves, and say loudly who does not."""
        known = [watch for watch in self.watches if watch.kind is not None and not watch.draining]
        if not known:
            return
        kinds = [watch.kind for watch in known]
        serving = max(kinds, key=lambda kind: (_rank(kind), kinds.count(kind), -kinds.index(kind)))
        versions: dict[str, list[str]] = {}
        for watch in known:
            differences = watch.kind.differences(serving) if watch.kind and serving else []
            watch.odd = bool(differences)
            self._tell(watch.url, f"NOT USED, for it differs from the engines that serve: {'; '.join(differences)}" if differences else "")
            if watch.version and not differences:
                versions.setdefault(watch.version, []).append(watch.url)
        mixed = "; ".join(f"{version}: {', '.join(urls)}" for version, urls in sorted(versions.items()))
        self._tell("", f"engines of different versions serve together ({mixed})" if len(versions) > 1 else "")

    def _tell(self, whom: str, what: str) -> None:
        if what and self._told.get(whom) != what:
            log.warning("%s%s", f"engine {whom}: " if whom else "", what)
        self._told[whom] = what

    def why_not(self, watch: Watch) -> str:
        """Say why an engine does not serve; `""` if it does."""
        return "it is drained: it takes no new calls" if watch.draining else self._told.get(watch.url, "") or watch.engine.error


def _rank(kind: Kind | None) -> int:
    level = kind.capability.get("level") if kind is not None else None
    return LEVELS.index(level) if level in LEVELS else -1
