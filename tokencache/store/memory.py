"""The memory store: plain dictionaries, for one process.

The reference for the contract: what it does is what Redis must do. Calls never wait inside, so each is atomic. Turns are
kept packed: as objects they would weigh more than their tokens.
"""

import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from types import MappingProxyType

import msgspec

from tokencache.core.match import Hit
from tokencache.core.turn import Prefix, Tokens, Turn, rebuild
from tokencache.store.base import (
    Begun,
    Binding,
    EngineEntry,
    Entry,
    Incident,
    Join,
    OpenCall,
    SessionDeletedError,
    SessionGoneError,
    SessionInfo,
    SessionSealedError,
    StoreFullError,
)
from tokencache.store.held import HeldSession
from tokencache.store.ttl_map import Fading


class MemoryStore:
    """Sessions in this process's memory; gone when it ends.

    Args:
        ttl_seconds: after how many seconds an unused session is forgotten.
        tombstone_seconds: for how long the calls of a deleted session are turned away.
        max_sessions: how many sessions there may be before new ones are refused; 0: no bound.
        max_bytes: how many bytes their records may take before new ones are refused; 0: no bound.
    """

    def __init__(
        self, *, ttl_seconds: float = 7 * 86400, tombstone_seconds: float = 3600.0, max_sessions: int = 0, max_bytes: int = 0
    ) -> None:
        self._max_sessions, self._max_bytes = max_sessions, max_bytes
        self._secret = b""
        self._sessions: Fading[HeldSession] = Fading(ttl_seconds)
        self._gone: Fading[bool] = Fading(tombstone_seconds)
        self._keys: Fading[Binding] = Fading(ttl_seconds)
        self._beats: dict[str, float] = {}
        self._engines: dict[tuple[str, str], EngineEntry] = {}

    async def open(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        """Nothing to release."""

    async def ping(self) -> None:
        """Memory can always be reached."""

    async def secret(self, known: bytes = b"") -> bytes:
        """See `Store.secret`."""
        self._secret = self._secret or known or secrets.token_bytes(32)
        return self._secret

    async def begin(
        self, session: str, call: str, keys: Sequence[bytes], *, asked: bytes = b"", replica: str = "", join: Join = "never"
    ) -> Begun:
        """See `Store.begin`."""
        held = self._sessions.get(session)
        if held is None:
            if session in self._gone:
                raise SessionDeletedError(session)
            self._make_sure_of_room()
            held = HeldSession()
        if held.sealed:
            raise SessionSealedError(session)
        self._sessions.put(session, held)
        twin = held.twin(call, asked, join)
        if twin is None:
            held.used = time.time()
            held.begun += held.calls.pop(call, None) is None
            held.calls[call] = OpenCall(call, held.used, asked, replica)
        found: list[list[Hit]] = [[] for _ in keys]
        for i, key in enumerate(keys):
            found[i] = held.hits(key)
            if found[i] and key[:1] == b"c":
                break
        return Begun(held.life, found, twin, held.begun, held.sampled, held.created)

    async def linger(self, session: str, call: str) -> bool:
        """See `Store.linger`."""
        held = self._sessions.get(session)
        if held is None or call not in held.calls:
            return False
        self._sessions.use(session)
        wanted = held.calls[call].wanted
        held.calls[call] = msgspec.structs.replace(held.calls[call], left=True, wanted=False)
        return wanted

    async def want(self, session: str, call: str, *, given_up: bool = False) -> None:
        """See `Store.want`."""
        held = self._sessions.get(session)
        if held is not None and call in held.calls:
            said = {"given_up": True} if given_up else {"wanted": True}
            held.calls[call] = msgspec.structs.replace(held.calls[call], **said)

    async def beat(self, replica: str, seconds: float) -> None:
        """See `Store.beat`."""
        self._beats[replica] = time.monotonic() + seconds

    async def living(self, replicas: Sequence[str]) -> set[str]:
        """See `Store.living`."""
        return {replica for replica in replicas if self._beats.get(replica, 0.0) > time.monotonic()}

    async def find(self, session: str, keys: Sequence[bytes]) -> list[list[Hit]]:
        """See `Store.find`."""
        held = self._sessions.get(session)
        return [held.hits(key) if held else [] for key in keys]

    async def prefix(self, session: str, turn: str) -> Prefix:
        """See `Store.prefix`."""
        held = self._sessions[session]
        line: dict[str, tuple[Turn, Tokens]] = {}
        at: str | None = turn
        while at is not None:
            record = held.turn(at)
            line[at] = (record, held.tokens[at])
            at = record.base
        return rebuild(line, turn)

    async def commit(
        self,
        session: str,
        life: str,
        call: str,
        entries: Sequence[Entry],
        incidents: Sequence[Incident] = (),
        *,
        documents: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """See `Store.commit`."""
        held = self._alive(session, life)
        for entry in entries:
            held.add(entry)
        held.keep(documents)
        held.end(call, incidents)

    async def settle(self, session: str, life: str, call: str, incidents: Sequence[Incident] = ()) -> None:
        """See `Store.settle`."""
        self._alive(session, life).end(call, incidents)

    async def note(self, session: str, incidents: Sequence[Incident]) -> None:
        """See `Store.note`."""
        held = self._sessions.use(session)
        if held is None:
            if session in self._gone:
                return
            held = self._sessions.put(session, HeldSession())
        held.incidents += incidents

    async def sessions(self) -> AsyncIterator[SessionInfo]:
        """See `Store.sessions`."""
        for name in self._sessions:
            info = await self.session(name)
            if info is not None:
                yield info

    async def session(self, session: str) -> SessionInfo | None:
        """See `Store.session`."""
        held = self._sessions.get(session)
        if held is None:
            return None
        calls, incidents = tuple(held.calls.values()), tuple(held.incidents)
        return SessionInfo(session, held.created, held.used, held.sealed, len(held.turns), calls, incidents)

    async def turns(self, session: str) -> list[Turn]:
        """See `Store.turns`."""
        held = self._sessions.get(session)
        return [held.turn(name) for name in held.turns] if held else []

    async def tokens(self, session: str, turns: Sequence[str]) -> dict[str, Tokens]:
        """See `Store.tokens`."""
        held = self._sessions[session]
        return {turn: held.tokens[turn] for turn in turns}

    async def contexts(self, session: str, turns: Sequence[str]) -> dict[str, bytes]:
        """See `Store.contexts`."""
        held = self._sessions[session]
        return {turn: held.contexts[turn] for turn in turns}

    async def seal(self, session: str) -> bool:
        """See `Store.seal`."""
        held = self._sessions.use(session)
        if held is not None:
            held.sealed = True
        return held is not None

    async def delete(self, session: str, *, reuse: bool = False) -> bool:
        """See `Store.delete`."""
        known = self._sessions.pop(session) is not None
        if reuse:
            self._gone.pop(session)
        elif known:
            self._gone.put(session, True)
        return known

    async def lift(self, session: str) -> None:
        """See `Store.lift`."""
        self._gone.pop(session)

    async def documents(self, session: str, names: Sequence[str]) -> list[bytes | None]:
        """See `Store.documents`."""
        held = self._sessions.get(session)
        return [held.documents.get(name) if held else None for name in names]

    async def forget(self, session: str, name: str) -> bool:
        """See `Store.forget`."""
        held = self._sessions.get(session)
        return held is not None and held.documents.pop(name, None) is not None

    async def bind_key(self, key: str, binding: Binding) -> None:
        """See `Store.bind_key`."""
        self._keys.put(key, binding)

    async def binding_of_key(self, key: str) -> Binding | None:
        """See `Store.binding_of_key`."""
        return self._keys.use(key)

    async def unbind_key(self, key: str) -> bool:
        """See `Store.unbind_key`."""
        return self._keys.pop(key) is not None

    async def put_engine(self, entry: EngineEntry) -> None:
        """See `Store.put_engine`."""
        self._engines[entry.url, entry.replica] = entry

    async def drop_engine(self, url: str, replica: str = "") -> None:
        """See `Store.drop_engine`."""
        self._engines.pop((url, replica), None)

    async def engines(self) -> list[EngineEntry]:
        """See `Store.engines`."""
        return list(self._engines.values())

    def _make_sure_of_room(self) -> None:
        if self._max_sessions and len(self._sessions) >= self._max_sessions:
            raise StoreFullError(f"there are {len(self._sessions)} sessions, and --max-sessions is {self._max_sessions}")
        if self._max_bytes and (held := sum(self._sessions[name].bytes for name in self._sessions)) >= self._max_bytes:
            raise StoreFullError(f"the records take {held} bytes, and --max-store-bytes is {self._max_bytes}")

    def _alive(self, session: str, life: str) -> HeldSession:
        held = self._sessions.get(session)
        if held is None or held.life != life:
            raise SessionGoneError(session)
        self._sessions.use(session)
        return held
