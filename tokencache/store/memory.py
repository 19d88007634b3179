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
from tokencache.store.contract import (
    Begun,
    Binding,
    Entry,
    Incident,
    Join,
    OpenCall,
    SessionDeletedError,
    SessionGoneError,
    SessionInfo,
    SessionSealedError,
)
from tokencache.store.packing import pack, unpack


class _Session:
    def __init__(self) -> None:
        self.life = secrets.token_hex(8)
        self.created = self.used = time.time()
        self.sealed = False
        self.turns: dict[str, bytes] = {}
        self.tokens: dict[str, Tokens] = {}
        self.contexts: dict[str, bytes] = {}
        self.index: dict[bytes, tuple[str, ...] | str] = {}  # nearly always one turn
        self.continued: set[str] = set()
        self.calls: dict[str, OpenCall] = {}
        self.begun = self.sampled = 0
        self.incidents: list[Incident] = []
        self.documents: dict[str, bytes] = {}

    def turn(self, name: str) -> Turn:
        return unpack(self.turns[name], Turn)

    def hits(self, key: bytes) -> list[Hit]:
        found = self.index.get(key, ())
        return [Hit(self.turn(t), t in self.continued) for t in ((found,) if isinstance(found, str) else found)]

    def add(self, entry: Entry) -> None:
        turn = entry.turn
        self.turns[turn.id] = pack(turn)
        self.sampled += turn.completion_tokens
        self.tokens[turn.id] = entry.tokens
        self.contexts[turn.id] = entry.context
        for key in entry.keys:
            known = self.index.get(key, ())
            self.index[key] = (*((known,) if isinstance(known, str) else known), turn.id) if known else turn.id
        if turn.parent is not None:
            self.continued.add(turn.parent)

    def twin(self, asked: bytes, join: Join) -> OpenCall | None:
        """Find a call in flight that asks for the same, and tell it that it is wanted."""
        for name, one in self.calls.items():
            if asked and one.asked == asked and (join == "any" or (join == "left" and one.left)):
                self.calls[name] = msgspec.structs.replace(one, wanted=True)
                return self.calls[name]
        return None

    def end(self, call: str, incidents: Sequence[Incident]) -> None:
        self.calls.pop(call, None)
        self.incidents += incidents
        self.used = time.time()


class MemoryStore:
    """Sessions in this process's memory; gone when it ends."""

    def __init__(self, *, tombstone_seconds: float = 3600.0) -> None:
        self._tombstone = tombstone_seconds
        self._secret = secrets.token_bytes(32)
        self._sessions: dict[str, _Session] = {}
        self._gone: dict[str, float] = {}
        self._beats: dict[str, float] = {}
        self._keys: dict[str, Binding] = {}

    async def open(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        """Nothing to release."""

    async def ping(self) -> None:
        """Memory can always be reached."""

    async def secret(self) -> bytes:
        """See `Store.secret`."""
        return self._secret

    async def begin(
        self, session: str, call: str, keys: Sequence[bytes], *, asked: bytes = b"", replica: str = "", join: Join = "never"
    ) -> Begun:
        """See `Store.begin`."""
        held = self._sessions.get(session)
        if held is None:
            if self._is_gone(session):
                raise SessionDeletedError(session)
            held = self._sessions[session] = _Session()
        if held.sealed:
            raise SessionSealedError(session)
        twin = held.twin(asked, join)
        if twin is None:
            held.used = time.time()
            held.calls[call] = OpenCall(call, held.used, asked, replica)
            held.begun += 1
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
        held.calls[call] = msgspec.structs.replace(held.calls[call], left=True)
        return held.calls[call].wanted

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
        held.documents |= documents
        held.end(call, incidents)

    async def settle(self, session: str, life: str, call: str, incidents: Sequence[Incident] = ()) -> None:
        """See `Store.settle`."""
        self._alive(session, life).end(call, incidents)

    async def note(self, session: str, incidents: Sequence[Incident]) -> None:
        """See `Store.note`."""
        if session not in self._sessions and self._is_gone(session):
            return
        self._sessions.setdefault(session, _Session()).incidents.extend(incidents)

    async def sessions(self) -> AsyncIterator[SessionInfo]:
        """See `Store.sessions`."""
        for name in list(self._sessions):
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
        held = self._sessions.get(session)
        if held is not None:
            held.sealed = True
        return held is not None

    async def delete(self, session: str, *, reuse: bool = False) -> bool:
        """See `Store.delete`."""
        if self._sessions.pop(session, None) is None:
            return False
        if not reuse:
            self._gone[session] = time.monotonic() + self._tombstone
        return True

    async def lift(self, session: str) -> None:
        """See `Store.lift`."""
        self._gone.pop(session, None)

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
        self._keys[key] = binding

    async def binding_of_key(self, key: str) -> Binding | None:
        """See `Store.binding_of_key`."""
        return self._keys.get(key)

    async def unbind_key(self, key: str) -> bool:
        """See `Store.unbind_key`."""
        return self._keys.pop(key, None) is not None

    def _is_gone(self, session: str) -> bool:
        now = time.monotonic()
        while self._gone and next(iter(self._gone.values())) <= now:  # the oldest stands first
            del self._gone[next(iter(self._gone))]
        return session in self._gone

    def _alive(self, session: str, life: str) -> _Session:
        held = self._sessions.get(session)
        if held is None or held.life != life:
            raise SessionGoneError(session)
        return held
