"""Keeps sessions in this process's memory: the store for one process, and the reference implementation of `base.Store`.

No method awaits anything, so each is atomic. Turns are kept encoded: as objects they would take more memory than their tokens.
"""

import heapq
import math
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import MappingProxyType

import msgspec

from tokencache.core.incidents import Incident, sealed_early
from tokencache.core.match import Hit
from tokencache.core.media import StoredMedium
from tokencache.core.outcome import LatestTurn, Outcome
from tokencache.core.session import REWARDS_KEPT, LabelChanges, Labels, Reward, SessionSettings
from tokencache.core.turn import Prefix, Tokens, Turn, TurnMark
from tokencache.core.weights import WeightsState
from tokencache.recent import Expiring
from tokencache.store import base, pruning
from tokencache.store.clock import NOT_USED, ClockWatch, system_time
from tokencache.store.encoding import milliseconds_of, pack, pack_tokens, text, unpack, unpack_prefix, unpack_tokens, untext
from tokencache.store.memory_queue import MemoryQueue


class _Session:
    """A session in memory: its turns encoded, the index that finds them, its calls, and its size in bytes."""

    def __init__(self, now: float, settings: SessionSettings = SessionSettings(), labels: Labels = Labels()) -> None:  # noqa: B008 - immutable
        self.epoch = secrets.token_hex(8)
        self.created = self.used = now
        self.finished: float | None = None
        self.outcome: Outcome | None = None
        self.sealed = False
        self.settings, self.digest, self.labels = settings, settings.digest, labels
        self.rewards: deque[bytes] = deque(maxlen=REWARDS_KEPT)
        self.rewarded = 0
        self.turns: dict[str, bytes] = {}
        self.tokens: dict[str, tuple[bytes, bytes]] = {}  # ids (`pack_tokens`), log probabilities
        self.contexts: dict[str, bytes] = {}
        self.index: dict[bytes, list[str]] = {}
        self.continued: set[str] = set()
        self.calls: dict[str, base.OpenCall] = {}
        self.begun = self.sampled = self.call_ms = self.bytes = 0
        self.incidents: list[Incident] = []
        self.engine = ""
        self.documents: dict[str, bytes] = {}
        self.media: dict[str, tuple[str, bytes]] = {}
        self._latest: Turn | None = None  # the next call nearly always continues it; kept to avoid decoding it
        self._newest = (0.0, "")  # when the call that began last did, and its turn

    def turn(self, name: str) -> Turn:
        latest = self._latest
        return latest if latest is not None and latest.id == name else unpack(self.turns[name], Turn)

    def hits(self, key: bytes) -> list[Hit]:
        """Turns under a key, in the order recorded."""
        return [Hit(self.turn(turn), turn in self.continued) for turn in self.index.get(key, ())]

    def add(self, entry: base.Entry) -> None:
        turn, tokens = entry.turn, entry.tokens
        self.turns[turn.id] = packed = pack(turn)
        self.tokens[turn.id] = packed_tokens = pack_tokens(turn, tokens), tokens.logprobs
        self.contexts[turn.id], self._latest = entry.context, turn
        if turn.created >= self._newest[0]:
            self._newest = (turn.created, turn.id)
        self.bytes += sum(map(len, (packed, *packed_tokens, entry.context, *entry.keys)))
        self.sampled += turn.completion_tokens
        for key in entry.keys:
            self.index.setdefault(key, []).append(turn.id)
        if turn.parent is not None:
            self.continued.add(turn.parent)

    def share(self, source: "_Session", turns: Sequence[Turn]) -> None:
        """Record turns of another session; their tokens and contexts are the same objects."""
        for turn in turns:
            self.tokens[turn.id], self.contexts[turn.id] = (source.tokens[turn.id][0], b""), source.contexts[turn.id]
            self.turns[turn.id] = packed = pack(turn)
            self._newest = (0.0, turn.id)  # each turn of its own is newer
            self.bytes += len(packed)
            self.sampled += turn.completion_tokens
        self.continued |= {turn.parent for turn in turns if turn.parent is not None}
        self.begun += len({turn.call for turn in turns})
        history = {turn.id for turn in turns if TurnMark.NOT_IN_HISTORY not in turn.marks}
        for key, found in source.index.items():
            if kept := [turn for turn in found if turn in history]:
                self.index[key] = kept
                self.bytes += len(key)

    def line(self, turn: str) -> Iterator[bytes]:
        """The ids of a turn, of its base, and so on."""
        name: str | None = turn
        while name is not None:
            yield self.tokens[name][0]
            name = self.turn(name).base

    def join(self, call: str, fingerprint: bytes, join: base.Join) -> base.OpenCall | None:
        """Find an open call with this fingerprint that may be joined, and mark it as wanted. A call that is open joins none."""
        if call in self.calls or not fingerprint:
            return None
        for name, other in self.calls.items():
            joinable = join == "any" or (join == "orphaned" and other.orphaned)
            if joinable and other.fingerprint == fingerprint and not other.given_up:
                self.calls[name] = msgspec.structs.replace(other, wanted=True)
                return self.calls[name]
        return None

    def info(self, name: str) -> base.SessionInfo:
        """Return the state."""
        latest = self.turn(self._newest[1]) if self.turns else None
        return base.SessionInfo(
            id=name,
            created=self.created,
            used=self.used,
            sealed=self.sealed,
            turns=len(self.turns),
            open_calls=tuple(self.calls.values()),
            incidents=tuple(self.incidents),
            epoch=self.epoch,
            finished=self.finished,
            settings=self.settings,
            labels=self.labels,
            reward=unpack(self.rewards[-1], Reward) if self.rewards else None,
            rewards=self.rewarded,
            sampled=self.sampled,
            call_ms=self.call_ms,
            harness=self.settings.harness or (latest.harness if latest else ""),
            model=latest.model if latest else "",
            latest=LatestTurn.of(latest) if latest else None,
            outcome=self.outcome,
            engine=self.engine,
        )

    def end(self, call: str, incidents: Sequence[Incident], now: float) -> None:
        self.calls.pop(call, None)
        self.incidents += incidents
        self.used = now


class _Sessions(Expiring[str, _Session]):
    """Sessions by name, each for some time after it was used."""

    def epoch(self, name: str) -> str:
        """Return the epoch of a session, which may have expired; `""` if there is none."""
        entry = self._entries.get(name)
        return entry[1].epoch if entry is not None else ""


class MemoryStore(MemoryQueue):
    """Sessions in this process's memory. They are lost when the process ends. `Store` documents the methods.

    Args:
        ttl_seconds: delete a session that has not been used for this long.
        tombstone_seconds: how long a deleted session refuses late calls.
        max_sessions: refuse new sessions at this number. 0 sets no limit.
        max_bytes: refuse new sessions while the records take this many bytes. 0 sets no limit.
    """

    def __init__(
        self, *, ttl_seconds: float = 7 * 86400, tombstone_seconds: float = 3600.0, max_sessions: int = 0, max_bytes: int = 0
    ) -> None:
        super().__init__()
        self._ttl, self._offers = ttl_seconds, 0
        self._max_sessions, self._max_bytes = max_sessions, max_bytes
        self._secret = b""
        # An item's time to live starts when it is set, so each use sets it again.
        self._sessions = _Sessions(ttl_seconds, time.monotonic)
        self._tombstones: Expiring[str, bool] = Expiring(tombstone_seconds, time.monotonic)
        self._deleted: Expiring[str, bool] = Expiring(tombstone_seconds, time.monotonic)  # epochs
        self._bindings: Expiring[str, base.Binding] = Expiring(ttl_seconds, time.monotonic)
        self._alive_until: dict[str, float] = {}
        self._watch = ClockWatch("system", NOT_USED)
        self._engines: dict[tuple[str, str], base.EngineEntry] = {}
        self._weights = WeightsState()

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def ping(self) -> None:
        pass

    async def usage(self) -> base.StoreUsage:
        return base.StoreUsage.of(self._bytes(), self._max_bytes, len(self._sessions), self._max_sessions)

    async def secret(self, known: bytes = b"") -> bytes:
        self._secret = self._secret or known or secrets.token_bytes(32)
        return self._secret

    async def offer(self, session: str, epoch: str, at: float) -> None:
        await super().offer(session, epoch, at)
        self._offers += 1
        if self._offers % pruning.EVERY == 0:
            await pruning.prune_queue(self, self._ttl)

    async def define(self, session: str, settings: SessionSettings, labels: Labels, *, exist_ok: bool = False, adopt: bool = False) -> bool:
        held = self._sessions.get(session)
        if held is None:
            self._check_capacity()
            self._tombstones.pop(session, None)
            self._sessions[session] = _Session(self._clock.now(), settings, labels)
            return True
        if not exist_ok and not adopt:
            raise base.SessionExistsError(session)
        if adopt and not held.settings:
            held.settings, held.digest = settings, settings.digest
        if settings and settings != held.settings:
            raise base.SettingsConflictError(session, settings.differences(held.settings))
        held.labels = held.labels.changed(labels.changes)
        self._sessions.renew(session)
        return False

    async def settings(self, session: str) -> SessionSettings | None:
        held = self._sessions.get(session)
        return held.settings if held else None

    async def begin(
        self,
        session: str,
        call: str,
        keys: Sequence[bytes],
        *,
        fingerprint: bytes = b"",
        replica: str = "",
        join: base.Join = "never",
        settings: bytes = b"",
    ) -> base.BeginResult:
        held = self._sessions.get(session)
        if held is None:
            if session in self._tombstones:
                raise base.SessionDeletedError(session)
            self._check_capacity()
            held = _Session(self._clock.now())
        if held.sealed:
            raise base.SessionSealedError(session)
        if held.finished is not None:
            raise base.SessionFinishedError(session)
        if held.digest != settings:
            raise base.SettingsChangedError(held.settings)
        self._sessions[session] = held
        duplicate, now = held.join(call, fingerprint, join), self._clock.now()
        if duplicate is None:
            held.used = now
            held.begun += held.calls.pop(call, None) is None
            held.calls[call] = base.OpenCall(call, held.used, fingerprint, replica)
        found: list[list[Hit]] = [[] for _ in keys]
        for i, key in enumerate(keys):
            if key in held.index:
                found[i] = held.hits(key)
                if key[:1] == b"c":
                    break
        return base.BeginResult(held.epoch, found, duplicate, held.begun, held.sampled, now - held.created, held.engine)

    async def mark_orphaned(self, session: str, call: str) -> bool:
        held = self._sessions.get(session)
        if held is None or call not in held.calls:
            return False
        self._sessions.renew(session)
        wanted = held.calls[call].wanted
        held.calls[call] = msgspec.structs.replace(held.calls[call], orphaned=True, wanted=False)
        return wanted

    async def mark_wanted(self, session: str, call: str, *, given_up: bool = False) -> None:
        held = self._sessions.get(session)
        if held is not None and call in held.calls:
            self._sessions.renew(session)
            flag = {"given_up": True} if given_up else {"wanted": True}
            held.calls[call] = msgspec.structs.replace(held.calls[call], **flag)

    async def heartbeat(self, replica: str, seconds: float) -> None:
        self._watch.check(system_time())
        self._alive_until[replica] = time.monotonic() + seconds

    async def live_replicas(self, replicas: Sequence[str]) -> set[str]:
        return {replica for replica in replicas if self._alive_until.get(replica, -math.inf) > time.monotonic()}

    async def find(self, session: str, keys: Sequence[bytes]) -> list[list[Hit]]:
        held = self._sessions.get(session)
        return [held.hits(key) if held else [] for key in keys]

    async def prefix(self, session: str, turn: str) -> Prefix:
        return unpack_prefix(turn, self._sessions[session].line(turn))

    async def commit(
        self,
        session: str,
        epoch: str,
        call: str,
        entries: Sequence[base.Entry],
        incidents: Sequence[Incident] = (),
        *,
        documents: Mapping[str, bytes] = MappingProxyType({}),
        engine: str = "",
    ) -> None:
        held = self._use_epoch(session, epoch)
        if engine and held.finished is None and not held.sealed:
            held.engine = engine
        for entry in entries:
            held.add(entry)
        held.call_ms += milliseconds_of(entries)
        for document, data in documents.items():
            held.bytes += len(data) - len(held.documents.get(document, b""))
            held.documents[document] = data
        held.end(call, incidents, self._clock.now())

    async def settle(self, session: str, epoch: str, call: str, incidents: Sequence[Incident] = ()) -> None:
        self._use_epoch(session, epoch).end(call, incidents, self._clock.now())

    async def add_incidents(self, session: str, incidents: Sequence[Incident]) -> None:
        held = self._sessions.renew(session)
        if held is None:
            if session in self._tombstones:
                return
            held = self._sessions[session] = _Session(self._clock.now())
        held.incidents += incidents

    async def sessions(self) -> AsyncIterator[base.SessionInfo]:
        for name in list(self._sessions):
            info = await self.session(name)
            if info is not None:
                yield info

    async def page(self, cursor: bytes, limit: int) -> base.Page:
        try:
            after = untext(cursor)  # the name that the last page ended with; no session has an empty name
        except UnicodeDecodeError:
            raise base.CursorError("it is not a cursor of this store") from None
        names = heapq.nsmallest(limit, (name for name in self._sessions if name > after))
        infos = [info for info in await self.states(names) if info is not None]
        return base.Page(infos, text(names[-1]) if len(names) == limit else b"")

    async def states(self, sessions: Sequence[str]) -> list[base.SessionInfo | None]:
        return [await self.session(name) for name in sessions]

    async def session(self, session: str) -> base.SessionInfo | None:
        held = self._sessions.get(session)
        return held.info(session) if held else None

    async def turns(self, session: str) -> list[Turn]:
        held = self._sessions.get(session)
        return [held.turn(name) for name in held.turns] if held else []

    async def tokens(self, session: str, turns: Sequence[str]) -> dict[str, Tokens]:
        held = self._sessions[session]
        return {turn: unpack_tokens(*held.tokens[turn]).tokens for turn in turns}

    async def contexts(self, session: str, turns: Sequence[str]) -> dict[str, bytes]:
        held = self._sessions[session]
        return {turn: held.contexts[turn] for turn in turns}

    async def share(self, session: str, source: str, turns: Sequence[Turn]) -> None:
        held, other = self._sessions.renew(session), self._sessions.renew(source)
        if held is None or other is None:
            raise base.SessionGoneError(source if held is not None else session)
        if missing := [turn.id for turn in turns if turn.id not in other.turns]:
            raise KeyError(missing[0])
        held.share(other, turns)

    async def finish(self, session: str, outcome: Outcome | None = None) -> bool:
        held = self._sessions.get(session)
        if held is None:
            return False
        if outcome is not None and (held.sealed if held.outcome is None else held.outcome.kind != outcome.kind):
            raise base.OutcomeConflictError(session, outcome.kind, held.outcome.kind if held.outcome is not None else "")
        held.outcome, held.engine = held.outcome or outcome, ""
        held.finished = self._clock.now() if held.finished is None else held.finished
        self._sessions.renew(session)
        return True

    async def seal(self, session: str, *, force: bool = False, at: float = 0.0) -> base.SealOutcome:
        held = self._sessions.get(session)
        if held is None:
            return base.SealOutcome.MISSING
        if held.sealed:
            return base.SealOutcome.SEALED
        if held.finished is None or held.calls:
            if not force:
                return base.SealOutcome.UNFINISHED if held.finished is None else base.SealOutcome.CALLS_IN_FLIGHT
            held.incidents.append(sealed_early(finished=held.finished is not None, open_calls=len(held.calls), at=at))
        held.sealed, held.engine = True, ""
        self._sessions.renew(session)
        return base.SealOutcome.SEALED

    async def set_labels(self, session: str, changes: LabelChanges) -> bool:
        held = self._sessions.renew(session)
        if held is not None:
            held.labels = held.labels.changed(changes)
        return held is not None

    async def add_reward(self, session: str, reward: Reward) -> bool:
        held = self._sessions.renew(session)
        if held is not None:
            if len(held.rewards) == REWARDS_KEPT:
                held.bytes -= len(held.rewards[0])
            held.rewards.append(pack(reward))
            held.bytes += len(held.rewards[-1])
            held.rewarded += 1
        return held is not None

    async def rewards(self, session: str) -> list[Reward]:
        held = self._sessions.get(session)
        return [unpack(reward, Reward) for reward in held.rewards] if held else []

    async def delete(self, session: str, *, reuse: bool = False) -> bool:
        held = self._sessions.pop(session, None)
        if held is not None:
            self._deleted[held.epoch] = True
        if reuse:
            self._tombstones.pop(session, None)
        elif held is not None:
            self._tombstones[session] = True
        return held is not None

    async def documents(self, session: str, names: Sequence[str]) -> list[bytes | None]:
        held = self._sessions.get(session)
        return [held.documents.get(name) if held else None for name in names]

    async def delete_document(self, session: str, name: str) -> bool:
        held = self._sessions.get(session)
        if held is None or name not in held.documents:
            return False
        held.bytes -= len(held.documents.pop(name))
        return True

    async def put_media(self, session: str, epoch: str, medium: StoredMedium, content: bytes, *, limit: int) -> bool:
        held = self._use_epoch(session, epoch)
        if medium.sha256 not in held.media:
            if sum(len(stored) for _, stored in held.media.values()) + len(content) > limit:
                return False
            held.media[medium.sha256] = (medium.media_type, content)
            held.bytes += len(content)
        return True

    async def media(self, session: str, sha256: str) -> tuple[str, bytes] | None:
        held = self._sessions.get(session)
        return held.media.get(sha256) if held else None

    async def stored_media(self, session: str) -> list[StoredMedium]:
        held = self._sessions.get(session)
        return [StoredMedium(sha256, kind, len(content)) for sha256, (kind, content) in held.media.items()] if held else []

    async def bind_key(self, key: str, binding: base.Binding) -> None:
        self._bindings[key] = binding

    async def binding_of_key(self, key: str) -> base.Binding | None:
        binding = self._bindings.get(key)
        if binding is not None:
            self._bindings[key] = binding
        return binding

    async def unbind_key(self, key: str) -> bool:
        return self._bindings.pop(key, None) is not None

    async def put_engine(self, entry: base.EngineEntry) -> None:
        self._engines[entry.url, entry.replica] = entry

    async def drop_engine(self, url: str, replica: str = "") -> None:
        self._engines.pop((url, replica), None)

    async def engines(self) -> list[base.EngineEntry]:
        return list(self._engines.values())

    async def weights(self) -> WeightsState:
        return self._weights

    async def replace_weights(self, state: WeightsState) -> bool:
        if state.revision == self._weights.revision + 1:
            self._weights = state
        return self._weights == state

    def _check_capacity(self) -> None:
        if self._max_sessions and len(self._sessions) >= self._max_sessions:
            raise base.StoreFullError(f"there are {len(self._sessions)} sessions, and --max-sessions is {self._max_sessions}")
        if self._max_bytes and (used := self._bytes()) >= self._max_bytes:
            raise base.StoreFullError(f"the records take {used} bytes, and --max-store-bytes is {self._max_bytes}")

    def _bytes(self) -> int:
        return sum(held.bytes for held in self._sessions.values())

    def _use_epoch(self, session: str, epoch: str) -> _Session:
        held = self._sessions.renew(session) if self._sessions.epoch(session) == epoch else None
        if held is None:
            raise base.SessionGoneError(session, deleted=epoch in self._deleted)
        return held
