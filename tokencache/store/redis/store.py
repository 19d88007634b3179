"""The Redis store: each operation is a script or a command."""

import hashlib
import os
import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from redis import exceptions
from redis.asyncio import Redis

from tokencache.core.incidents import Incident, sealed_early
from tokencache.core.match import Hit
from tokencache.core.media import StoredMedium
from tokencache.core.outcome import Outcome
from tokencache.core.session import REWARDS_KEPT, LabelChanges, Labels, Reward, SessionSettings
from tokencache.core.turn import Prefix, Tokens, Turn
from tokencache.core.weights import WeightsState
from tokencache.store import base, pruning
from tokencache.store.encoding import milliseconds_of, pack, pack_keys, text, unpack, unpack_prefix, unpack_tokens, untext
from tokencache.store.redis import fields, queue_scripts, scripts
from tokencache.store.redis.answers import WrongAnswerError, check
from tokencache.store.redis.capacity import PAGE, CapacityWatch, run_id, scan
from tokencache.store.redis.connections import Backend, SingleServer, connect
from tokencache.store.redis.fields import Decoding, document_field, media_field, turn_field
from tokencache.store.redis.forks import Forks
from tokencache.store.redis.retries import RetryingClient

SCHEMA = 1
"""Version of the stored form. A database with another version is refused and not changed."""
Argument = bytes | str | int
_JOIN_CODES = {"never": "n", "orphaned": "l", "any": "a"}
"""How the script BEGIN encodes `Join`."""
_REMOVE_OUTCOMES = {
    queue_scripts.REMOVED: base.RemoveOutcome.REMOVED,
    queue_scripts.REPEATED: base.RemoveOutcome.REPEATED,
    queue_scripts.EXPIRED: base.RemoveOutcome.EXPIRED,
}
AT_ONCE = 250
"""Number of sessions whose states are read in one round trip."""
HASHES = {
    script: hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
    for name, script in (*vars(scripts).items(), *vars(queue_scripts).items())
    if name.isupper() and isinstance(script, str)
}
"""SHA-1 of each script, by which a server runs a script that it has seen before. Otherwise the script is sent in a second round trip."""


class Cursor(NamedTuple):
    """A place in a walk over the sessions of all primaries.

    Attributes:
        primaries: number of primaries when the walk began.
        primary: the one that is listed now.
        scan: cursor of its SCAN.
        server: its run id; `b""` if it does not report it. The cursor means nothing to another server.
    """

    primaries: int
    primary: int = 0
    scan: int = 0
    server: bytes = b""

    @property
    def packed(self) -> bytes:
        """The cursor as bytes."""
        return b"%d %d %d %s" % self

    @classmethod
    def read(cls, packed: bytes) -> Self:
        """Decode a cursor. Raises `CursorError` if it is none."""
        found = re.fullmatch(rb"(\d{1,9}) (\d{1,9}) (\d{1,20}) (\w*)", packed)
        if found is None or int(found[2]) >= int(found[1]):
            raise base.CursorError("it is not a cursor of this store")
        return cls(int(found[1]), int(found[2]), int(found[3]), found[4])


class RedisStore:
    """Sessions in Redis 6.2 or newer, or Valkey: one server, Sentinels or a cluster. `Store` documents the methods.

    Args:
        url: see `tokencache.store.redis.url`.
        prefix: start of all keys.
        ttl_seconds: delete a session that has not been used for this long.
        timeout_seconds: how long one operation may take.
        tombstone_seconds: how long a deleted session refuses late calls.
        max_sessions: refuse new sessions at this number. 0 sets no limit.
        max_bytes: refuse new sessions while a server uses this many bytes. 0 means nine tenths of its `maxmemory`.
        may_evict: accept a server that deletes sessions when its memory is full.
        client: used instead of connecting to `url`, and closed with the store.

    Raises:
        ValueError: the URL cannot be read.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "tokencache",
        ttl_seconds: float = 7 * 86400,
        timeout_seconds: float = 5.0,
        tombstone_seconds: float = 3600.0,
        max_sessions: int = 0,
        max_bytes: int = 0,
        may_evict: bool = False,
        client: Redis | None = None,
    ) -> None:
        self._keys = fields.Keys(prefix)
        self._offers = 0
        self._ttl = max(1, int(ttl_seconds * 1000))
        self._tombstone = max(1, int(tombstone_seconds * 1000))
        connected: tuple[Backend, Sequence[str]] = connect(url, timeout_seconds) if client is None else (SingleServer(client), ())
        self._backend, passwords = connected
        self._client = RetryingClient(self._backend, timeout_seconds, ("GET", self._keys.schema), passwords)
        self._forks = Forks(self._script, self._command, self.states, self._keys, self._ttl)
        self._capacity = CapacityWatch(
            self._client, self._backend, self._keys.pattern, max_sessions=max_sessions, max_bytes=max_bytes, may_evict=may_evict
        )

    async def open(self) -> None:
        await self.ping()
        await self._capacity.open()

    async def close(self) -> None:
        await self._capacity.close()
        await self._client.close()
        await self._backend.close()

    async def ping(self) -> None:
        held = await self._client.call("ping", lambda _: self._send(scripts.CHECK_SCHEMA, [self._keys.schema], str(SCHEMA)))
        if held != str(SCHEMA).encode():
            raise base.StoreError(
                f"redis: the stored form is {held.decode(errors='replace')[:20]!r}, but this version of tokencache reads form {SCHEMA}. "
                "Run the version that wrote it, or use another database (docs/store.md)"
            )

    async def usage(self) -> base.StoreUsage:
        return self._capacity.usage

    async def secret(self, known: bytes = b"") -> bytes:
        return bytes(await self._script("secret", scripts.SET_ONCE, [self._keys.secret], known or secrets.token_bytes(32)))

    async def define(self, session: str, settings: SessionSettings, labels: Labels, *, exist_ok: bool = False, adopt: bool = False) -> bool:
        args: list[Argument] = [
            self._ttl,
            secrets.token_hex(8),
            int(bool(self._capacity.full)),
            "a" if adopt else "j" if exist_ok else "n",
            settings.digest,
            pack(settings) if settings else b"",
            *fields.pack_labels(labels.changes),
        ]
        reply = await self._script("define", scripts.DEFINE, [self._keys.session(session)], *args)
        if reply == scripts.EXISTS:
            raise base.SessionExistsError(session)
        if reply == scripts.NO_CAPACITY:
            raise base.StoreFullError(self._capacity.full)
        if not isinstance(reply, int):
            with Decoding(session):
                raise base.SettingsConflictError(session, settings.differences(fields.unpack_settings(reply[0])))
        return reply == scripts.CREATED

    async def settings(self, session: str) -> SessionSettings | None:
        reply = await self._script("settings", scripts.SETTINGS, [self._keys.session(session)])
        with Decoding(session):
            return fields.unpack_settings(reply[0]) if reply else None

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
        named = text(call)
        args: list[Argument] = [
            self._ttl,
            os.urandom(8).hex(),
            int(bool(self._capacity.full)),
            _JOIN_CODES[join],
            fingerprint,
            text(replica),
            named,
            settings,
            *pack_keys(keys),
        ]
        reply = await self._client.call("begin", lambda _: self._send(scripts.BEGIN, [self._keys.session(session)], *args, call=named))
        if isinstance(reply, int):
            raise {
                scripts.SEALED: base.SessionSealedError(session),
                scripts.FINISHED: base.SessionFinishedError(session),
                scripts.DELETED: base.SessionDeletedError(session),
                scripts.FULL: base.StoreFullError(self._capacity.full),
            }[reply]
        with Decoding(session):
            if len(reply) == 1:
                raise base.SettingsChangedError(fields.unpack_settings(reply[0]))
            return fields.unpack_begun(reply, len(keys))

    async def mark_orphaned(self, session: str, call: str) -> bool:
        keys, args = [self._keys.session(session)], (self._ttl, text(call))
        return bool(await self._client.call("mark_orphaned", lambda lost: self._send(scripts.MARK_ORPHANED, keys, *args, int(lost))))

    async def mark_wanted(self, session: str, call: str, *, given_up: bool = False) -> None:
        flag = fields.GIVEN_UP if given_up else fields.WANTED
        await self._script("mark_wanted", scripts.MARK_WANTED, [self._keys.session(session)], self._ttl, text(call), flag)

    async def heartbeat(self, replica: str, seconds: float) -> None:
        await self._forks.keep_now_and_then()
        await self._command("heartbeat", "SET", self._keys.replica(replica), b"1", "PX", max(1, int(seconds * 1000)))

    async def live_replicas(self, replicas: Sequence[str]) -> set[str]:
        if not replicas:
            return set()
        held = await self._command("live_replicas", "MGET", *map(self._keys.replica, replicas))
        with Decoding("of the replicas"):
            return {replica for replica, heartbeat in zip(replicas, held, strict=True) if heartbeat is not None}

    async def find(self, session: str, keys: Sequence[bytes]) -> list[list[Hit]]:
        reply = await self._script("find", scripts.FIND, [self._keys.session(session)], *pack_keys(keys))
        with Decoding(session):
            return fields.unpack_hits(reply, len(keys))

    async def prefix(self, session: str, turn: str) -> Prefix:
        line = await self._script("prefix", scripts.PREFIX, [self._keys.session(session)], turn_field(turn))
        await self._forks.follow_line(line)
        with Decoding(session):
            return unpack_prefix(turn, line)

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
        stored = chain.from_iterable(zip(map(document_field, documents), documents.values(), strict=True))
        figures = sum(map(attrgetter("turn.completion_tokens"), entries)), milliseconds_of(entries), text(engine) if engine else b""
        needed = fields.turns_referred_to(entries)
        packed = [len(needed), *needed, len(entries), *chain.from_iterable(map(fields.pack_entry, entries)), len(documents), *stored]
        await self._end("commit", session, epoch, call, [*figures, *packed, *map(pack, incidents)])

    async def settle(self, session: str, epoch: str, call: str, incidents: Sequence[Incident] = ()) -> None:
        await self._end("settle", session, epoch, call, [0, 0, b"", 0, 0, 0, *map(pack, incidents)])

    async def add_incidents(self, session: str, incidents: Sequence[Incident]) -> None:
        head: list[Argument] = [self._ttl, secrets.token_hex(8)]
        tail: list[Argument] = [secrets.token_hex(4), *map(pack, incidents)]
        await self._client.call(
            "add_incidents", lambda lost: self._send(scripts.ADD_INCIDENTS, [self._keys.session(session)], *head, int(lost), *tail)
        )

    async def sessions(self) -> AsyncIterator[base.SessionInfo]:
        seen: set[str] = set()
        page = base.Page([], b"")
        while True:
            try:
                page = await self.page(page.cursor, PAGE)
            except base.CursorError:  # another server has taken over: list again what it has
                page = base.Page([], b"")
                continue
            for info in page.sessions:
                if info.id not in seen:
                    seen.add(info.id)
                    yield info
            if not page.cursor:
                break

    async def page(self, cursor: bytes, limit: int) -> base.Page:
        at = Cursor.read(cursor) if cursor else None
        after, keys = await self._client.call("page", lambda _: _read_page(self._backend, self._keys.pattern, at, limit))
        infos = await self.states([*map(self._keys.name, keys)])
        return base.Page([info for info in infos if info is not None], after)

    async def states(self, sessions: Sequence[str]) -> list[base.SessionInfo | None]:
        found: list[base.SessionInfo | None] = []
        for first in range(0, len(sessions), AT_ONCE):
            names = sessions[first : first + AT_ONCE]
            for name, reply in zip(names, await self._client.call("states", partial(self._read_states, names)), strict=True):
                with Decoding(name):
                    found.append(fields.unpack_session(name, reply))
        return found

    async def session(self, session: str) -> base.SessionInfo | None:
        reply = await self._script("session", scripts.SESSION, [self._keys.session(session)])
        with Decoding(session):
            return fields.unpack_session(session, reply)

    async def turns(self, session: str) -> list[Turn]:
        reply = await self._script("turns", scripts.TURNS, [self._keys.session(session)])
        with Decoding(session):
            return [unpack(head[1:], Turn) for head in reply]

    async def tokens(self, session: str, turns: Sequence[str]) -> dict[str, Tokens]:
        reply = await self._script("tokens", scripts.TOKENS, [self._keys.session(session)], *map(turn_field, turns))
        if len(reply) < 2 * len(turns):
            raise KeyError(turns[len(reply) // 2])
        await self._forks.follow(scripts.TOKENS, turns, reply, 2)
        with Decoding(session):
            return {turn: unpack_tokens(reply[2 * n], reply[2 * n + 1]).tokens for n, turn in enumerate(turns)}

    async def contexts(self, session: str, turns: Sequence[str]) -> dict[str, bytes]:
        reply = await self._script("contexts", scripts.CONTEXTS, [self._keys.session(session)], *map(turn_field, turns))
        if len(reply) < len(turns):
            raise KeyError(turns[len(reply)])
        await self._forks.follow(scripts.CONTEXTS, turns, reply, 1)
        with Decoding(session):
            return dict(zip(turns, reply, strict=True))

    async def share(self, session: str, source: str, turns: Sequence[Turn]) -> None:
        fork, other = [await self.session(name) for name in (session, source)]
        if fork is None or other is None:
            raise base.SessionGoneError(source if fork is not None else session)
        await self._forks.add(fork, other, turns)

    async def finish(self, session: str, outcome: Outcome | None = None) -> bool:
        given = (outcome.kind, pack(outcome)) if outcome is not None else ("", b"")
        reply = await self._script("finish", scripts.FINISH, [self._keys.session(session)], self._ttl, *given)
        if isinstance(reply, list):
            raise base.OutcomeConflictError(session, given[0], reply[1].decode())
        return bool(reply)

    async def seal(self, session: str, *, force: bool = False, at: float = 0.0) -> base.SealOutcome:
        keys, cut = [self._keys.session(session)], "1 0"  # finished, no open calls
        while True:  # until what the incident reports is what the script cuts off
            finished, calls = cut.split()
            incident = pack(sealed_early(finished=finished == "1", open_calls=int(calls), at=at))
            reply = await self._script("seal", scripts.SEAL, keys, self._ttl, cut, incident)
            if isinstance(reply, int):
                return base.SealOutcome.SEALED if reply else base.SealOutcome.MISSING
            if reply.decode() == cut:
                raise base.StoreError("redis: seal: the server answered something else than what has changed")
            cut = reply.decode()
            if not force:
                return base.SealOutcome.CALLS_IN_FLIGHT if cut.startswith("1") else base.SealOutcome.UNFINISHED

    async def set_labels(self, session: str, changes: LabelChanges) -> bool:
        keys, packed = [self._keys.session(session)], fields.pack_labels(changes)
        return bool(await self._script("set_labels", scripts.SET_LABELS, keys, self._ttl, *packed))

    async def add_reward(self, session: str, reward: Reward) -> bool:
        keys, rest = [self._keys.session(session)], (REWARDS_KEPT, pack(reward))
        return bool(await self._client.call("add_reward", lambda lost: self._send(scripts.ADD_REWARD, keys, self._ttl, int(lost), *rest)))

    async def rewards(self, session: str) -> list[Reward]:
        reply = await self._script("rewards", scripts.REWARDS, [self._keys.session(session)], REWARDS_KEPT)
        with Decoding(session):
            return [unpack(reward, Reward) for reward in reply]

    async def delete(self, session: str, *, reuse: bool = False) -> bool:
        keys, args = [self._keys.session(session)], (self._tombstone, int(reuse), 2 * self._ttl)
        deleted = await self._script("delete", scripts.DELETE, keys, *args, repeatable=False)
        if not isinstance(deleted, int):
            await self._forks.end(session, deleted)
        return bool(deleted)

    async def documents(self, session: str, names: Sequence[str]) -> list[bytes | None]:
        if not names:
            return []
        reply = await self._script("documents", scripts.DOCUMENTS, [self._keys.session(session)], *map(document_field, names))
        with Decoding(session):
            return [found for _, found in zip(names, reply or [None] * len(names), strict=True)]

    async def delete_document(self, session: str, name: str) -> bool:
        keys = [self._keys.session(session)]
        return bool(await self._script("delete_document", scripts.DELETE_DOCUMENT, keys, document_field(name), repeatable=False))

    async def put_media(self, session: str, epoch: str, medium: StoredMedium, content: bytes, *, limit: int) -> bool:
        args: list[Argument] = [self._ttl, text(epoch), media_field(medium.sha256), fields.pack_medium(medium), content, limit]
        stored = await self._script("put_media", scripts.PUT_MEDIA, [self._keys.session(session)], *args)
        if stored == scripts.NO_SESSION:
            raise base.SessionGoneError(session)
        return bool(stored == scripts.STORED)

    async def media(self, session: str, sha256: str) -> tuple[str, bytes] | None:
        reply = await self._script("media", scripts.MEDIA, [self._keys.session(session)], media_field(sha256))
        with Decoding(session):
            kinds = {medium.sha256: medium.media_type for medium in fields.unpack_media(reply[0])} if reply else {}
            return (kinds[sha256], reply[1]) if sha256 in kinds else None

    async def stored_media(self, session: str) -> list[StoredMedium]:
        reply = await self._script("stored_media", scripts.MEDIA, [self._keys.session(session)])
        with Decoding(session):
            return fields.unpack_media(reply[0]) if reply else []

    async def bind_key(self, key: str, binding: base.Binding) -> None:
        await self._command("bind_key", "SET", self._keys.binding(key), pack(binding), "PX", self._ttl)

    async def binding_of_key(self, key: str) -> base.Binding | None:
        held = await self._command("binding_of_key", "GETEX", self._keys.binding(key), "PX", self._ttl)
        with Decoding(key):
            return None if held is None else unpack(held, base.Binding)

    async def unbind_key(self, key: str) -> bool:
        return bool(await self._command("unbind_key", "UNLINK", self._keys.binding(key), repeatable=False))

    async def put_engine(self, entry: base.EngineEntry) -> None:
        await self._command("put_engine", "HSET", self._keys.engines, fields.engine_field(entry.url, entry.replica), pack(entry))

    async def drop_engine(self, url: str, replica: str = "") -> None:
        await self._command("drop_engine", "HDEL", self._keys.engines, fields.engine_field(url, replica))

    async def engines(self) -> list[base.EngineEntry]:
        held = await self._command("engines", "HVALS", self._keys.engines)
        with Decoding("engines"):
            return [unpack(entry, base.EngineEntry) for entry in held]

    async def weights(self) -> WeightsState:
        held = await self._command("weights", "HGET", self._keys.weights, "state")
        with Decoding("weights"):
            return WeightsState() if held is None else unpack(held, WeightsState)

    async def replace_weights(self, state: WeightsState) -> bool:
        return bool(await self._script("replace_weights", scripts.REPLACE_WEIGHTS, [self._keys.weights], state.revision, pack(state)))

    async def watch(self, session: str, seconds: float) -> None:
        await self._script("watch", queue_scripts.WATCH, [self._keys.watched], text(session), repr(float(seconds)))

    async def overdue(self) -> base.Overdue:
        now, names = await self._script("overdue", queue_scripts.OVERDUE, [self._keys.watched], base.MOST_OVERDUE)
        with Decoding("that are watched"):
            return base.Overdue(float(now), list(map(untext, names)))

    async def unwatch(self, session: str) -> None:
        await self._script("unwatch", queue_scripts.UNWATCH, [self._keys.watched], text(session))

    async def offer(self, session: str, epoch: str, at: float) -> None:
        await self._script("offer", queue_scripts.OFFER, self._keys.queue, text(session), text(epoch), f"{at:017.6f}")
        self._offers += 1
        if self._offers % pruning.EVERY == 0:
            await pruning.prune_queue(self, self._ttl / 1000)

    async def queue(self) -> list[base.QueueEntry]:
        now, held = await self._script("queue", queue_scripts.READ_QUEUE, self._keys.queue)
        with Decoding("in the queue"):
            entries = [fields.unpack_entry(*pair, float(now)) for pair in zip(held[::2], held[1::2], strict=True)]
        return sorted(entries, key=lambda entry: (entry.at, entry.session))

    async def queue_length(self) -> int:
        return int(await self._command("queue_length", "HLEN", self._keys.queue[0]))

    async def lease(self, sessions: Sequence[str], delivery: str, consumer: str, seconds: float) -> bool:
        tail: list[Argument] = [text(delivery), text(consumer), repr(float(seconds)), *map(text, sessions)]
        leased = await self._client.call("lease", lambda lost: self._send(queue_scripts.LEASE, self._keys.queue, int(lost), *tail))
        return bool(leased)

    async def extend(self, delivery: str, seconds: float) -> bool:
        return bool(await self._script("extend", queue_scripts.EXTEND, self._keys.queue, text(delivery), repr(float(seconds))))

    async def release(self, delivery: str) -> bool:
        keys = self._keys.queue
        return bool(await self._client.call("release", lambda lost: self._send(queue_scripts.RELEASE, keys, text(delivery), int(lost))))

    async def remove(self, delivery: str) -> base.RemoveOutcome:
        reply = await self._client.call(
            "remove", lambda lost: self._send(queue_scripts.REMOVE, self._keys.queue, text(delivery), int(lost), base.REMEMBER_SECONDS)
        )
        return _REMOVE_OUTCOMES[reply]

    async def withdraw(self, session: str, epoch: str) -> None:
        await self._script("withdraw", queue_scripts.WITHDRAW, self._keys.queue, text(session), text(epoch))

    async def put_demand(self, consumer: str, demand: bytes) -> None:
        await self._command("put_demand", "HSET", self._keys.demands, text(consumer), demand)

    async def drop_demand(self, consumer: str) -> None:
        await self._command("drop_demand", "HDEL", self._keys.demands, text(consumer))

    async def demands(self) -> list[bytes]:
        return list(await self._command("demands", "HVALS", self._keys.demands))

    async def _read_states(self, sessions: Sequence[str], _lost: bool) -> list[Any]:
        """Read the states of sessions in one round trip, or in two if a server has not seen the script."""
        keys = [self._keys.session(session) for session in sessions]
        try:
            found = await self._backend.batch([("EVALSHA", HASHES[scripts.SESSION], 1, key) for key in keys])
        except exceptions.NoScriptError:
            found = await self._backend.batch([("EVAL", scripts.SESSION, 1, key) for key in keys])
        return [check(scripts.SESSION, reply) for reply in found]

    async def _end(self, operation: str, session: str, epoch: str, call: str, packed: Sequence[bytes | int]) -> None:
        keys, named = [self._keys.session(session)], text(call)
        head: list[Argument] = [self._ttl, text(epoch), named]
        tail: list[Argument] = [os.urandom(4).hex(), *packed]
        ended = await self._client.call(operation, lambda lost: self._send(scripts.COMMIT, keys, *head, int(lost), *tail, call=named))
        if ended != scripts.ENDED:
            gone = base.SessionGoneError(session, deleted=ended == scripts.WAS_DELETED)
            raise base.TurnLostError(session) if ended == scripts.TURN_LOST else gone

    async def _command(self, operation: str, *command: Argument, repeatable: bool = True) -> Any:
        return await self._client.call(operation, lambda _: self._run(*command), repeatable=repeatable)

    async def _run(self, *command: Argument) -> Any:
        return check(str(command[0]), await self._backend.run(*command))

    async def _script(self, operation: str, script: str, keys: Sequence[bytes], *args: Argument, repeatable: bool = True) -> Any:
        return await self._client.call(operation, lambda _: self._send(script, keys, *args), repeatable=repeatable)

    async def _send(self, script: str, keys: Sequence[bytes], *args: Argument, call: bytes | None = None) -> Any:
        """Run a script. The two of a call, which is named then, share a connection: the answer must name the call, too."""
        run = self._backend.run if call is None else self._backend.run_shared
        try:
            answer = await run("EVALSHA", HASHES[script], len(keys), *keys, *args)
        except exceptions.NoScriptError:
            answer = await run("EVAL", script, len(keys), *keys, *args)
        answer = check(script, answer)
        if call is None:
            return answer
        if answer[0] != call:
            raise WrongAnswerError("the server answered another call")
        return answer[1]


async def _read_page(backend: Backend, pattern: bytes, at: Cursor | None, limit: int) -> tuple[bytes, list[bytes]]:
    """Read the cursor after a page, and the keys on it. It is done as a whole: after a failure there may be another server."""
    primaries = await backend.primaries()
    at = at or Cursor(len(primaries))
    if at.primaries != len(primaries):
        raise base.CursorError("the number of servers has changed")
    server = await run_id(primaries[at.primary])
    if at.server not in {b"", server}:
        raise base.CursorError("another server has taken over")
    following, keys = await scan(primaries[at.primary], at.scan, pattern, limit)
    if int(following):
        return at._replace(scan=int(following), server=server).packed, keys
    rest = primaries[at.primary + 1 :]
    return Cursor(at.primaries, at.primary + 1, 0, await run_id(rest[0])).packed if rest else b"", keys
