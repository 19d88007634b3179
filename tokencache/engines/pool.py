"""The pool: the engines that serve one model, and which of them a call goes to.

A session keeps to one engine, so that its prefix is still in that engine's cache: each session has an order of preference over
the engines, by rendezvous hashing (highest random weight: Thaler and Ravishankar, 1998, doi:10.1109/90.663936), and goes to the
first that serves. Nothing is remembered for it: all replicas of the proxy come to the same order, and an engine that goes or comes
moves only its own sessions.

Sessions are served by engines of one *kind*: what the probe found is the same, and template and tokenizer write the same ids. Where
engines differ, those serve that can do most, then those of the larger number, then the first that was named; the others are
named loudly and left alone. An engine that is out keeps its vote for as long as it does not come back as something else: a
session does not change over to a lesser engine because a better one is being restarted.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import xxhash

from tokencache.engines.engine import Engine, Model
from tokencache.engines.health import Kind, Watch
from tokencache.errors import EngineError

log = logging.getLogger(__name__)

_LEVELS = ("relay", "record", "exact")


def preference(session: str, urls: Sequence[str]) -> list[int]:
    """Order engines for a session: places in `urls`, the preferred one first.

    The same whatever order the URLs are given in, and among those that remain if one is taken away.
    """
    weights = [xxhash.xxh3_64_intdigest(f"{session}\0{url}".encode()) for url in urls]
    return sorted(range(len(urls)), key=lambda place: (-weights[place], urls[place]))


class Pool:
    """Engines under watch; with one there is nothing to choose."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.watches = [Watch(engine, self._changed, alone=len(engines) == 1) for engine in engines]
        self._told: dict[str, str] = {}
        self._turns = itertools.count()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Connect, and watch while the context is open."""
        for watch in self.watches:
            await watch.engine.upstream.open()
        tasks = [asyncio.create_task(watch.keep()) for watch in self.watches]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for watch in self.watches:
                await watch.engine.upstream.close()

    def serves(self, watch: Watch) -> bool:
        """Whether an engine answers and is of the kind that sessions are served by."""
        return watch.ready and not watch.odd and (watch.kind is not None or len(self.watches) == 1)

    @property
    def ready(self) -> bool:
        """Whether there is an engine that serves."""
        return any(map(self.serves, self.watches))

    def order(self, session: str | None) -> list[Engine]:
        """The engines that a call may go to, the preferred one first; never none.

        Without a session they take turns. While none serves those are named that may come back: who asks finds out.
        """
        if len(self.watches) == 1:
            return [self.watches[0].engine]
        usable = [watch for watch in self.watches if self.serves(watch)]
        usable = usable or [watch for watch in self.watches if not watch.odd]
        if session is None:
            first = next(self._turns) % len(usable)
            places = [*range(first, len(usable)), *range(first)]
        else:
            places = preference(session, [watch.url for watch in usable])
        return [usable[place].engine for place in places]

    async def model(self, name: str = "") -> Model:
        """Return a model of the first engine that serves, for questions that belong to no session.

        Raises:
            EngineError: the engine cannot be reached, or refuses the model.
        """
        serving = next((watch for watch in self.watches if self.serves(watch)), self.watches[0])
        return await serving.engine.model(name)

    @property
    def later_system(self) -> bool:
        """Whether templates took a system message behind the first one (`Capability.later_system`): of engines that are away, too."""
        return all(watch.kind.capability["later_system"] for watch in self.watches if watch.kind is not None)

    def lost(self, engine: Engine, why: EngineError) -> None:
        """An engine could not be connected to: it is out, at once."""
        next(watch for watch in self.watches if watch.engine is engine).out(str(why))

    def _changed(self) -> None:
        """Settle which kind serves, and say loudly who does not."""
        known = [watch for watch in self.watches if watch.kind is not None]
        if len(self.watches) == 1 or not known:
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
        return self._told.get(watch.url, "") or watch.engine.error


def _rank(kind: Kind | None) -> int:
    level = kind.capability.get("level") if kind is not None else None
    return _LEVELS.index(level) if isinstance(level, str) and level in _LEVELS else -1
