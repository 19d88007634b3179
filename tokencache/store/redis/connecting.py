"""Connecting: to one server, to the primary that Sentinels name, or to a cluster.

The client library never sends anything again by itself: only who asks knows what may be done twice.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Connection, Redis, RedisCluster, Sentinel, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError
from redis.backoff import NoBackoff

from tokencache.store.redis.url import WANTED, Address, read_url

CONNECTIONS = 64

Run = Callable[..., Awaitable[Any]]
"""Sends one command, and returns its answer."""


class UnreachedError(exceptions.ConnectionError):
    """No connection could be made: nothing was sent."""


class Link(Protocol):
    """A way to the database."""

    run: Run

    async def primaries(self) -> list[Run]:
        """All servers that hold sessions: each sends a command to one of them."""

    async def look_anew(self) -> None:
        """Forget connections that are not in use: the server may have gone, or be the primary no more."""

    async def close(self) -> None:
        """Close all connections."""


class OneServer:
    """One server at a time, at a fixed place or where Sentinels say."""

    def __init__(self, client: Redis, sentinels: Sequence[Redis] = ()) -> None:
        self.run: Run = client.execute_command
        self._client = client
        self._sentinels = sentinels

    async def primaries(self) -> list[Run]:
        """See `Link.primaries`."""
        return [self.run]

    async def look_anew(self) -> None:
        """See `Link.look_anew`."""
        await self._client.connection_pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        """See `Link.close`."""
        await self._client.aclose()
        await self._client.connection_pool.disconnect()
        for sentinel in self._sentinels:
            await sentinel.aclose()


class Cluster:
    """The primaries of a cluster: the client follows `MOVED` and `ASK`, and reads the map of slots anew after a failure."""

    def __init__(self, client: RedisCluster) -> None:
        self.run: Run = client.execute_command
        self._client = client

    async def primaries(self) -> list[Run]:
        """See `Link.primaries`."""
        await self._client.initialize()
        return [node.execute_command for node in self._client.get_primaries()]

    async def look_anew(self) -> None:
        """Nothing to do: the client has seen the failure."""

    async def close(self) -> None:
        """See `Link.close`."""
        await self._client.aclose()


class _Reaching(Connection):
    """A connection that tells what was never sent from what may have been."""

    async def connect_check_health(self, *args: Any, **kwargs: Any) -> None:
        try:
            await super().connect_check_health(*args, **kwargs)
        except (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.BusyLoadingError):
            raise
        except (exceptions.ConnectionError, exceptions.TimeoutError) as why:
            raise UnreachedError(str(why)) from None


class _Primary(_Reaching):
    """A connection to the server that Sentinels name when it is made."""

    def __init__(self, *, sentinel: Sentinel, service: str, **options: Any) -> None:
        super().__init__(**options)
        self._sentinel, self._service = sentinel, service

    async def _connect(self) -> None:
        try:
            self.host, self.port = await self._sentinel.discover_master(self._service)
        except MasterNotFoundError:  # the library's words are a page long
            raise exceptions.ConnectionError(f"no Sentinel that answers names a primary for {self._service!r}") from None
        await super()._connect()  # type: ignore[no-untyped-call]


class _Socket(_Reaching, UnixDomainSocketConnection): ...


class _Secured(_Reaching, SSLConnection): ...


class _SecuredPrimary(_Primary, SSLConnection): ...


def connect(url: str, timeout_seconds: float) -> tuple[Link, tuple[str, ...]]:
    """Make a link, and say which words must not stand in errors. Nothing is sent before it is used.

    Raises:
        ValueError: the URL cannot be read. The message holds no password.
    """
    address = read_url(url)
    try:
        return _MAKERS[address.kind](address, timeout_seconds), address.secrets
    except (ValueError, TypeError, exceptions.RedisError, exceptions.RedisClusterException):
        raise ValueError(f"the store's URL has options that are unknown; wanted: {WANTED}") from None


def _server(address: Address, _timeout: float) -> Link:
    kind = _Socket if "path" in address.options else _Secured if address.tls else _Reaching
    return OneServer(_client(kind, address.options))


def _sentinels(address: Address, timeout: float) -> Link:
    patience = timeout / (len(address.places) + 1)  # one that does not answer leaves time for the others
    options = address.sentinel | {"ssl": address.tls, "socket_timeout": patience, "socket_connect_timeout": patience, "protocol": 2}
    sentinel = Sentinel(address.places, sentinel_kwargs=options | {"retry": Retry(NoBackoff(), 0)})  # type: ignore[no-untyped-call]
    kind = _SecuredPrimary if address.tls else _Primary
    return OneServer(_client(kind, address.options | {"sentinel": sentinel, "service": address.service}), sentinel.sentinels)


def _cluster(address: Address, timeout: float) -> Link:
    patience = timeout / 2  # the client must see that a node does not answer, or it would not look for another
    return Cluster(
        RedisCluster(
            startup_nodes=[ClusterNode(*place) for place in address.places],
            max_connections=16 * CONNECTIONS,
            ssl=address.tls,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            **{"socket_timeout": patience, "socket_connect_timeout": patience} | address.options,
        )
    )


_MAKERS: dict[str, Callable[[Address, float], Link]] = {"server": _server, "sentinel": _sentinels, "cluster": _cluster}


def _client(kind: type[Connection], options: dict[str, Any]) -> Redis:
    own = {"retry": Retry(NoBackoff(), 0), "socket_timeout": None, "socket_connect_timeout": None, "socket_keepalive": True, "protocol": 2}
    kind(**options | own)  # unknown options would show at the first operation only
    # every operation has its own time limit, waiting for a connection included
    pool = BlockingConnectionPool(connection_class=kind, max_connections=CONNECTIONS, timeout=None, **options | own)
    return Redis(connection_pool=pool)
