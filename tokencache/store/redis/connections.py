"""Connects to one Redis server, to the primary that Sentinels name, or to a cluster.

The client library's own retries are off, because only the caller knows which operations may be done twice.
"""

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Connection, Redis, RedisCluster, Sentinel, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.cluster import ClusterNode, PipelineCommand
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError
from redis.backoff import NoBackoff

from tokencache.store.redis.shared import ConnectFailedError, SharedConnection
from tokencache.store.redis.url import FORMS, Address, read_url

MAX_CONNECTIONS = 64

Run = Callable[..., Awaitable[Any]]
"""Sends one command and returns its reply."""


class Backend(Protocol):
    """Connections to the database.

    Attributes:
        run: sends a command over a connection of its own.
        run_shared: sends a command together with others, for commands that are frequent, short, and may be done twice.
    """

    run: Run
    run_shared: Run

    async def batch(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send commands together, in one round trip to each server. Returns their replies; raises the first error."""

    async def primaries(self) -> list[Run]:
        """Return all servers that hold sessions, each as a function that sends a command to it, always in the same order."""

    async def reset(self) -> None:
        """Drop idle connections and the shared one: the server may be gone, or no longer be the primary."""

    async def close(self) -> None:
        """Close all connections."""


class SingleServer:
    """One server at a time, at a fixed address or the one that Sentinels name."""

    def __init__(self, client: Redis, shared: SharedConnection | None = None, sentinels: Sequence[Redis] = ()) -> None:
        self.run: Run = client.execute_command
        self.run_shared: Run = self.run if shared is None else shared.run
        self._client = client
        self._shared = shared
        self._sentinels = sentinels

    async def batch(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """See `Backend.batch`."""
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return await pipeline.execute()

    async def primaries(self) -> list[Run]:
        """See `Backend.primaries`."""
        return [self.run]

    async def reset(self) -> None:
        """See `Backend.reset`."""
        if self._shared is not None:
            await self._shared.reset()
        await self._client.connection_pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        """See `Backend.close`."""
        await self.reset()
        await self._client.aclose()
        await self._client.connection_pool.disconnect()
        for sentinel in self._sentinels:
            await sentinel.aclose()


class _ImportingNode:
    """The node to which the slot of a key moves: `ASK` names it, and only what follows `ASKING` on the same connection is done there.

    redis-py sends both one after the other, each over the connection that is free then. Over two of them in turn, no command is ever done.
    """

    def __init__(self, node: ClusterNode) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    async def execute_command(self, *command: Any, **_options: Any) -> Any:
        """Send `ASKING` together with the command that follows it."""
        if command == ("ASKING",):
            return None
        both = [PipelineCommand(0, "ASKING"), PipelineCommand(1, *command)]
        await self._node.execute_pipeline(both)
        for answer in (command.result for command in both):
            if isinstance(answer, Exception):
                raise answer
        return answer


class _ClusterClient(RedisCluster):
    """Follows `ASK` with several connections, and to a node that has no slot yet, such as one that was just added."""

    def get_node(self, host: str | None = None, port: int | None = None, node_name: str | None = None) -> Any:
        """Return a node; by its name only when `ASK` names it."""
        if node_name is None:
            return super().get_node(host, port)
        node = super().get_node(node_name=node_name)
        if node is None:
            its_host, _, its_port = node_name.rpartition(":")
            node = ClusterNode(its_host, int(its_port), "primary", **self.connection_kwargs)
            self.nodes_manager.set_nodes(self.nodes_manager.nodes_cache, {node_name: node})
        return _ImportingNode(node)


class Cluster:
    """The primaries of a cluster. The client follows `MOVED` and `ASK`, and reads the slot map again after a failure."""

    def __init__(self, client: RedisCluster) -> None:
        self.run: Run = self._run
        self.run_shared: Run = self._run
        self._client, self._outdated = client, False

    async def _run(self, *command: Any) -> Any:
        with _closed_meanwhile():
            return await self._client.execute_command(*command)

    async def batch(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """See `Backend.batch`."""
        pipeline = self._client.pipeline()
        for command in commands:
            pipeline.execute_command(*command)
        with _closed_meanwhile():
            return await pipeline.execute()

    async def primaries(self) -> list[Run]:
        """See `Backend.primaries`. After a failure it reads the slot map again: the client does so for commands with a key only."""
        with _closed_meanwhile():
            await self._client.initialize()
            if self._outdated:
                await self._client.nodes_manager.initialize()
                self._outdated = False
        nodes = sorted(self._client.get_primaries(), key=lambda node: str(node.name))
        return [node.execute_command for node in nodes]

    async def reset(self) -> None:
        """See `Backend.reset`. The client itself closes connections."""
        self._outdated = True

    async def close(self) -> None:
        """See `Backend.close`."""
        await self._client.aclose()


@contextlib.contextmanager
def _closed_meanwhile() -> Iterator[None]:
    """Report a connection that the client closed for another call, for which uvloop raises a `RuntimeError`, as one that was lost."""
    try:
        yield
    except RuntimeError as why:
        raise exceptions.ConnectionError(str(why)) from None


class _Connection(Connection):
    """A connection that raises `ConnectFailedError` if it cannot connect, which differs from failures after something was sent."""

    async def connect_check_health(self, *args: Any, **kwargs: Any) -> None:
        try:
            await super().connect_check_health(*args, **kwargs)
        except (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.BusyLoadingError):
            raise
        except (exceptions.ConnectionError, exceptions.TimeoutError) as why:
            raise ConnectFailedError(str(why)) from None


class _PrimaryConnection(_Connection):
    """A connection to the server that Sentinels name when it is made."""

    def __init__(self, *, sentinel: Sentinel, service: str, **options: Any) -> None:
        super().__init__(**options)
        self._sentinel, self._service = sentinel, service

    async def _connect(self) -> None:
        try:
            self.host, self.port = await self._sentinel.discover_master(self._service)
        except MasterNotFoundError:  # the library's message is a page long
            raise exceptions.ConnectionError(f"no Sentinel that responds names a primary for {self._service!r}") from None
        await super()._connect()  # type: ignore[no-untyped-call]


class _SocketConnection(_Connection, UnixDomainSocketConnection): ...


class _TlsConnection(_Connection, SSLConnection): ...


class _TlsPrimaryConnection(_PrimaryConnection, SSLConnection): ...


def connect(url: str, timeout_seconds: float) -> tuple[Backend, tuple[str, ...]]:
    """Make a backend for a URL. Returns it, and its passwords, which must not appear in errors. It connects at its first use.

    Raises:
        ValueError: the URL cannot be read. The message contains no password.
    """
    address = read_url(url)
    make: Callable[[Address, float], Backend] = {"server": _server, "sentinel": _sentinels, "cluster": _cluster}[address.kind]
    try:
        return make(address, timeout_seconds), address.secrets
    except (ValueError, TypeError, exceptions.RedisError, exceptions.RedisClusterException):
        raise ValueError(f"the store's URL has unknown options; use {FORMS}") from None


def _server(address: Address, _timeout: float) -> Backend:
    kind = _SocketConnection if "path" in address.options else _TlsConnection if address.tls else _Connection
    return _single(kind, address.options)


def _sentinels(address: Address, timeout: float) -> Backend:
    each = timeout / (len(address.hosts) + 1)  # if one Sentinel does not respond, there must be time to query the others
    options = address.sentinel | {"ssl": address.tls, "socket_timeout": each, "socket_connect_timeout": each, "protocol": 2}
    sentinel = Sentinel(address.hosts, sentinel_kwargs=options | {"retry": Retry(NoBackoff(), 0)})  # type: ignore[no-untyped-call]
    kind = _TlsPrimaryConnection if address.tls else _PrimaryConnection
    return _single(kind, address.options | {"sentinel": sentinel, "service": address.service}, sentinel.sentinels)


def _cluster(address: Address, timeout: float) -> Backend:
    half = timeout / 2  # the client tries another node only after one has timed out
    return Cluster(
        _ClusterClient(
            startup_nodes=[ClusterNode(*host) for host in address.hosts],
            max_connections=16 * MAX_CONNECTIONS,
            reinitialize_steps=0,  # else every fifth slot that moved closes all connections, with the commands on them
            ssl=address.tls,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            **{"socket_timeout": half, "socket_connect_timeout": half} | address.options,
        )
    )


def _single(kind: type[Connection], options: dict[str, Any], sentinels: Sequence[Redis] = ()) -> SingleServer:
    own = {"retry": Retry(NoBackoff(), 0), "socket_timeout": None, "socket_connect_timeout": None, "socket_keepalive": True, "protocol": 2}
    kind(**options | own)  # raises for unknown options now, not at the first operation
    # No timeouts here: `retries` limits the time of each operation, including the time to get a connection from this pool.
    pool = BlockingConnectionPool(connection_class=kind, max_connections=MAX_CONNECTIONS, timeout=None, **options | own)
    return SingleServer(Redis(connection_pool=pool), SharedConnection(lambda: kind(**options | own)), sentinels)
