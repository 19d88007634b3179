"""The Redis store: sessions that all replicas of the proxy share, and that outlive them.

A session is *one* hash, so that it expires, is evicted, moves between cluster nodes and is deleted as one: a session
that lost a part of itself would match wrongly, a session that is gone is only a miss. Its fields:

===========================================  =========================================================================
`life` `created` `used` `sealed`             which life of the session this is; times; `1` if sealed
`turns` `incidents`                          how many there are; they are numbered from 1, in the order recorded
`calls`                                      the open calls, one behind the other
`#<turn id>`                                 the turn's number
`H<n>`                                       the turn's record, behind `+` if another turn continues it, else `-`
`T<n>`                                       base, lengths, delta and completion ids, raw
`L<n>`                                       log probabilities; read by export only; absent if there are none
`M<n>`                                       the context: messages, deflated; read by export only; absent if there is none
`=<key>`                                     the numbers of the turns found under that key
`I<n>`                                       an incident
`D<name>`                                    a document
===========================================  =========================================================================

Beside it stand `<prefix>:key:<hash>`, what an API key stands for, and `<prefix>:ping`. Everything has a time to live that
use renews. The sessions are listed by `SCAN`, not from a registry: nothing to write on the way of a call, nothing that
can say something else than the sessions themselves; the price is paid by who lists. A session's key is
`<prefix>:{<session>}`: in a Redis Cluster it lies in the slot of its name, and no command or script touches two slots. (The
client that is used here speaks to one node; for more of them put a cluster proxy before them.)

Every operation but the listing is one script or command, one round trip, and writes all or nothing. What does not answer
in time or at all is a `StoreError`. A connection that breaks is replaced and the operation sent once more,
if sending it twice does no harm: a commit that was done already is recognised by its call being closed.

Measured (Redis 6.2.14, `MEMORY USAGE … SAMPLES 0`, 200 turns of 200 new prompt and 200 completion tokens, 800 characters
of text each way, float32 log probabilities, two keys): 10.3 bytes per token, of which 4 are the id, 2 its share of log
probabilities and 1.2 the messages. `pytest tests/store/test_redis_size.py -s` measures it again.
"""

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, count
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar
from urllib.parse import unquote

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from tokencache.core.match import Hit
from tokencache.core.turn import Prefix, Tokens, Turn, rebuild
from tokencache.store import redis_lua
from tokencache.store.contract import (
    Begun,
    Binding,
    Entry,
    Incident,
    Join,
    OpenCall,
    SessionGoneError,
    SessionInfo,
    SessionSealedError,
    StoreError,
)
from tokencache.store.packing import Piece, pack, pack_keys, pack_tokens, text, unpack, unpack_tokens, untext

T = TypeVar("T")

CONNECTIONS = 64
PAGE = 1000
AT_ONCE = CONNECTIONS // 4
_GLOB = re.compile(rb"[*?\[\]\\]")
_FINAL = (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.BusyLoadingError)
_SCRIPTS = ("BEGIN", "FIND", "PREFIX", "COMMIT", "NOTE", "SESSION", "TURNS", "TOKENS", "CONTEXTS", "SEAL")


class RedisStore:
    """Sessions in Redis 6.2 or newer, or what speaks like it.

    Args:
        url: `redis://`, `rediss://` or `unix://`, as `redis.asyncio` reads it.
        prefix: what all keys begin with.
        ttl_seconds: after how many seconds an unused session is forgotten.
        timeout_seconds: how long any one operation may take.
        client: use this one instead of connecting to `url`; it is closed with the store.

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
        client: Redis | None = None,
    ) -> None:
        self._prefix = text(prefix)
        self._ttl = max(1, int(ttl_seconds * 1000))
        self._timeout = timeout_seconds
        self._redis = client if client is not None else _connect(url)
        self._secrets = _secrets_of(url, self._redis.connection_pool.connection_kwargs)
        self._scripts = {name: self._redis.register_script(getattr(redis_lua, name)) for name in _SCRIPTS}

    async def open(self) -> None:
        """See `Store.open`."""
        await self.ping()
        pipeline = self._redis.pipeline(transaction=False)
        for script in self._scripts.values():
            pipeline.script_load(script.script)
        await self._ask("open", pipeline.execute)

    async def close(self) -> None:
        """See `Store.close`."""
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()

    async def ping(self) -> None:
        """See `Store.ping`."""
        await self._ask("ping", lambda: self._redis.set(self._prefix + b":ping", b"1", ex=60))

    async def begin(
        self, session: str, call: str, keys: Sequence[bytes], *, asked: bytes = b"", replica: str = "", join: Join = "never"
    ) -> Begun:
        """See `Store.begin`."""
        reply = await self._run("BEGIN", session, self._ttl, secrets.token_hex(8), text(call), *pack_keys(keys))
        if reply == 0:
            raise SessionSealedError(session)
        with self._reading(session):
            return Begun(reply[0].decode(), _hits(reply[1:], len(keys)))

    async def find(self, session: str, keys: Sequence[bytes]) -> list[list[Hit]]:
        """See `Store.find`."""
        reply = await self._run("FIND", session, *pack_keys(keys))
        with self._reading(session):
            return _hits(reply, len(keys))

    async def prefix(self, session: str, turn: str) -> Prefix:
        """See `Store.prefix`."""
        reply = await self._run("PREFIX", session, _field(turn))
        with self._reading(session):
            line: dict[str, tuple[Turn, Tokens]] = {}
            at: str | None = turn
            for piece in map(unpack_tokens, reply):
                if at is not None:
                    line[at] = (_lengths(at, piece), piece.tokens)
                    at = piece.base
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
        kept = chain.from_iterable((_document(name), data) for name, data in documents.items())
        packed = [len(entries), *chain.from_iterable(map(_pack_entry, entries)), len(documents), *kept, *map(pack, incidents)]
        await self._end("commit", session, life, call, packed)

    async def settle(self, session: str, life: str, call: str, incidents: Sequence[Incident] = ()) -> None:
        """See `Store.settle`."""
        await self._end("settle", session, life, call, [0, 0, *map(pack, incidents)])

    async def note(self, session: str, incidents: Sequence[Incident]) -> None:
        """See `Store.note`."""
        await self._run("NOTE", session, self._ttl, secrets.token_hex(8), *map(pack, incidents), again=False)

    async def sessions(self) -> AsyncIterator[SessionInfo]:
        """See `Store.sessions`."""
        start = self._prefix + b":{"
        ask = partial(self._redis.scan, match=_GLOB.sub(rb"\\\g<0>", start) + b"*}", count=PAGE)
        seen: set[bytes] = set()  # SCAN may say a key twice
        cursor = 0
        while True:
            page: Any = await self._ask("sessions", partial(ask, cursor), again=True)
            cursor = int(page[0])
            fresh = [key for key in page[1] if key not in seen]
            seen.update(fresh)
            for at in range(0, len(fresh), AT_ONCE):
                for info in await asyncio.gather(*(self.session(_unescape(key[len(start) : -1])) for key in fresh[at : at + AT_ONCE])):
                    if info is not None:
                        yield info
            if cursor == 0:
                return

    async def session(self, session: str) -> SessionInfo | None:
        """See `Store.session`."""
        reply = await self._run("SESSION", session)
        if not reply:
            return None
        created, used, sealed, turns, calls, *incidents = reply
        with self._reading(session):
            said = tuple(unpack(incident, Incident) for incident in incidents)
            return SessionInfo(session, float(created), float(used), sealed is not None, int(turns or 0), _open_calls(calls or b""), said)

    async def turns(self, session: str) -> list[Turn]:
        """See `Store.turns`."""
        reply = await self._run("TURNS", session)
        with self._reading(session):
            return [unpack(head[1:], Turn) for head in reply]

    async def tokens(self, session: str, turns: Sequence[str]) -> dict[str, Tokens]:
        """See `Store.tokens`."""
        reply = await self._run("TOKENS", session, *map(_field, turns))
        if len(reply) < 2 * len(turns):
            raise KeyError(turns[len(reply) // 2])
        with self._reading(session):
            return {turn: unpack_tokens(reply[2 * n], reply[2 * n + 1]).tokens for n, turn in enumerate(turns)}

    async def contexts(self, session: str, turns: Sequence[str]) -> dict[str, bytes]:
        """See `Store.contexts`."""
        reply = await self._run("CONTEXTS", session, *map(_field, turns))
        if len(reply) < len(turns):
            raise KeyError(turns[len(reply)])
        return dict(zip(turns, reply, strict=True))

    async def seal(self, session: str) -> bool:
        """See `Store.seal`."""
        return bool(await self._run("SEAL", session, self._ttl))

    async def delete(self, session: str) -> bool:
        """See `Store.delete`."""
        return bool(await self._ask("delete", lambda: self._redis.unlink(self._key(session))))

    async def documents(self, session: str, names: Sequence[str]) -> list[bytes | None]:
        """See `Store.documents`."""
        if not names:
            return []
        found: Any = await self._ask("documents", lambda: self._redis.hmget(self._key(session), [*map(_document, names)]), again=True)
        return list(found)

    async def forget(self, session: str, name: str) -> bool:
        """See `Store.forget`."""
        return bool(await self._ask("forget", lambda: self._redis.hdel(self._key(session), _document(name))))

    async def bind_key(self, key: str, binding: Binding) -> None:
        """See `Store.bind_key`."""
        await self._ask("bind_key", lambda: self._redis.set(self._binding(key), pack(binding), px=self._ttl), again=True)

    async def binding_of_key(self, key: str) -> Binding | None:
        """See `Store.binding_of_key`."""
        held: Any = await self._ask("binding_of_key", lambda: self._redis.getex(self._binding(key), px=self._ttl), again=True)
        with self._reading(key):
            return None if held is None else unpack(held, Binding)

    def _key(self, session: str) -> bytes:
        return b"%s:{%s}" % (self._prefix, _escape(session))

    def _binding(self, key: str) -> bytes:
        return b"%s:key:%s" % (self._prefix, text(key))

    async def _end(self, operation: str, session: str, life: str, call: str, packed: Sequence[bytes | int]) -> None:
        attempts = count()
        send = lambda: self._send("COMMIT", session, self._ttl, text(life), text(call), next(attempts), *packed)  # noqa: E731
        if await self._ask(operation, send, again=True) == 0:
            raise SessionGoneError(session)

    async def _run(self, script: str, session: str, *args: bytes | str | int, again: bool = True) -> Any:
        return await self._ask(script.lower(), lambda: self._send(script, session, *args), again=again)

    def _send(self, script: str, session: str, *args: bytes | str | int) -> Awaitable[Any]:
        return self._scripts[script](keys=[self._key(session)], args=args)

    async def _ask(self, operation: str, send: Callable[[], Awaitable[T]], *, again: bool = False) -> T:
        """Await what `send` sends, in time; `again` allows to send it twice."""
        try:
            async with asyncio.timeout(self._timeout):
                try:
                    return await send()
                except exceptions.ConnectionError as why:
                    if not again or isinstance(why, _FINAL):
                        raise
                return await send()
        except (TimeoutError, exceptions.TimeoutError):
            self._fail(operation, f"no answer within {self._timeout:g} s")
        except (exceptions.RedisError, OSError) as why:
            if "READONLY" in str(why) or isinstance(why, exceptions.ReadOnlyError):  # no longer the primary: look anew who is
                await self._redis.connection_pool.disconnect(inuse_connections=False)
            self._fail(operation, str(why) or type(why).__name__)

    def _fail(self, operation: str, why: str) -> NoReturn:
        for secret in self._secrets:
            why = why.replace(secret, "***")
        raise StoreError(f"redis: {operation}: {why}") from None

    @contextmanager
    def _reading(self, session: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, IndexError, TypeError) as why:
            raise StoreError(f"redis: session {session} is torn: {why}") from None


def _connect(url: str) -> Redis:
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=None,  # every operation has its own time limit, waiting for a connection included
            socket_timeout=None,
            socket_connect_timeout=None,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),  # only `_ask` knows what may be sent twice
            protocol=2,
        )
    except (ValueError, TypeError):
        raise ValueError("the store's URL cannot be read; wanted: redis://[user:password@]host[:port][/db] or unix://path") from None
    return Redis(connection_pool=pool)


def _secrets_of(url: str, settings: dict[str, Any]) -> list[str]:
    """What must not stand in a message: the password, as it is and as it stands in the URL."""
    password = settings.get("password")
    written = url.partition("://")[2].rpartition("@")[0].partition(":")[2]
    return [secret for secret in (password, written) if secret]


def _escape(session: str) -> bytes:
    """Write a session's name so that all of it, and nothing else, is the key's hash tag."""
    return text(session).replace(b"%", b"%25").replace(b"}", b"%7D")


def _unescape(name: bytes) -> str:
    return unquote(name, errors="surrogatepass")


def _field(turn: str) -> bytes:
    return b"#" + text(turn)


def _document(name: str) -> bytes:
    return b"D" + text(name)


def _pack_entry(entry: Entry) -> list[bytes | int]:
    turn = entry.turn
    parent = b"" if turn.parent is None else _field(turn.parent)
    keys = [b"=" + key for key in entry.keys]
    packed = pack_tokens(turn, entry.tokens)
    return [_field(turn.id), parent, pack(turn), packed, entry.tokens.logprobs, entry.context, len(keys), *keys]


def _hits(flat: Sequence[Any], count: int) -> list[list[Hit]]:
    found: list[list[Hit]] = [[] for _ in range(count)]
    for position, head in zip(flat[::2], flat[1::2], strict=True):
        found[position].append(Hit(unpack(head[1:], Turn), head[:1] == b"+"))
    return found


def _open_calls(packed: bytes) -> tuple[OpenCall, ...]:
    calls = []
    while packed:
        stop = 22 + int(packed[17:22])
        calls.append(OpenCall(untext(packed[22:stop]), float(packed[:17])))
        packed = packed[stop:]
    return tuple(calls)


def _lengths(turn: str, piece: Piece) -> Turn:
    """As much of a turn as `rebuild` needs."""
    return Turn(
        id=turn,
        call="",
        match="root",
        base=piece.base,
        shared=piece.shared,
        prompt_tokens=piece.prompt_tokens,
        completion_tokens=piece.completion_tokens,
    )
