"""The memory store: plain dictionaries, for one process.

The reference for the contract: what it does is what Redis must do. Calls never wait inside, so each is atomic. Turns are
kept packed: as objects they would weigh more than their tokens.
"""

import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from types import MappingProxyType

from tokencache.core.match import Hit
from tokencache.core.turn import Prefix, Tokens, Turn, rebuild
from tokencache.store.contract import Begun, Binding, Entry, Incident, OpenCall, SessionGoneError, SessionInfo, SessionSealedError
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
        self.calls: dict[str, float] = {}
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
        self.tokens[turn.id] = entry.tokens
        self.contexts[turn.id] = entry.context
        for key in entry.keys:
            known = self.index.get(key, ())
            self.index[key] = (*((known,) if isinstance(known, str) else known), turn.id) if known else turn.id
        if turn.parent is not None:
            self.continued.add(turn.parent)

    def end(self, call: str, incidents: Sequence[Incident]) -> None:
        self.calls.pop(call, None)
        self.incidents += incidents
        self.used = time.time()


class MemoryStore:
    """Sessions in this process's memory; gone when it ends."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._keys: dict[str, Binding] = {}

    async def open(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        """Nothing to release."""

    async def ping(self) -> None:
        """Memory can always be reached."""

    async def begin(self, session: str, call: str, keys: Sequence[bytes]) -> Begun:
        """See `Store.begin`."""
        held = self._sessions.get(session)
        if held is None:
            held = self._sessions[session] = _Session()
        if held.sealed:
            raise SessionSealedError(session)
        held.calls[call] = held.used = time.time()
        found: list[list[Hit]] = [[] for _ in keys]
        for i, key in enumerate(keys):
            found[i] = held.hits(key)
            if found[i] and key[:1] == b"c":
                break
        return Begun(held.life, found)

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
        calls = tuple(OpenCall(call, since) for call, since in held.calls.items())
        return SessionInfo(session, held.created, held.used, held.sealed, len(held.turns), calls, tuple(held.incidents))

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

    async def delete(self, session: str) -> bool:
        """See `Store.delete`."""
        return self._sessions.pop(session, None) is not None

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

    def _alive(self, session: str, life: str) -> _Session:
        held = self._sessions.get(session)
        if held is None or held.life != life:
            raise SessionGoneError(session)
        return held
