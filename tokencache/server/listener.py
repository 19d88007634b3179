"""Accepts connections from harnesses, as many as the limit of open files allows.

A streaming call needs two file descriptors: the harness's connection and the engine's. At start the soft limit, 1,024 on most machines, is
raised to the hard one, and the number of streams that fit is logged. Some descriptors are reserved for other uses: the store's connections
(64), logs, trainers, the proxy's own requests to engines.

This module replaces the event loop's own server, because uvloop's accepts connections and closes them without a log line when descriptors
run out. Here a connection that cannot be served waits in the kernel's queue, without using CPU, and this is logged once a minute. A
connection is accepted only if a descriptor for its engine's side is free, so every accepted call can be sent.

When one more arrives than fit, those that wait for their client are closed first, the longest idle before all others
(`http_guard.GuardedConnection.dispensable`): sockets that do nothing keep neither a harness nor a health check out.

Workers on one machine share a port by `SO_REUSEPORT`: each has a socket of its own, and the kernel distributes connections by a hash of
their addresses. One shared socket would distribute them unevenly (`workers` has figures), and a connection stays with its worker
for as long as the harness keeps it.
"""

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import time
from collections.abc import Iterator, Sequence
from itertools import islice

from aiohttp import web

from tokencache.net import keep_alive
from tokencache.server.http_guard import GuardedConnection

log = logging.getLogger(__name__)

RESERVED = 128
PER_STREAM = 2
FEW = 4096
"""A warning is logged if one process can serve fewer streams than this."""
BACKLOG = 4096
AT_ONCE = 64
"""Connections accepted, or closed to make room, before other tasks run."""
PAUSE_SECONDS = 0.25
REMIND_SECONDS = 60.0
CLOSING_SECONDS = 0.01
"""Until they are closed."""
_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def raise_file_limit() -> int:
    """Raise the limit of open files as far as allowed, and log how many streams fit. Returns that number."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit, streams = resource.getrlimit(resource.RLIMIT_NOFILE)[0], stream_capacity()
    if streams < FEW:
        log.warning(
            "ONLY %d STREAMS FIT AT A TIME: a process may open %d files, and a streaming call needs two. Further harnesses have to wait. "
            "Raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd, ulimits of compose)",
            streams,
            limit,
        )
    else:
        log.info("%d streams fit at a time: a process may open %d files", streams, limit)
    return streams


def stream_capacity() -> int:
    """Return how many streams the limit of open files allows; at least one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (limit - RESERVED) // PER_STREAM)


def bind(host: str, port: int, *, shared: bool = False) -> list[socket.socket]:
    """Bind a port on all addresses of a host, without listening. Port 0 picks a free one, the same on all addresses.

    With `shared`, other processes of this user may bind it too, and share its connections once they listen.

    Raises:
        OSError: there is no such address, or the port is in use.
    """
    bound: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            if address[1] == 0 and bound:
                address = (address[0], bound[0].getsockname()[1], *address[2:])  # noqa: PLW2901
            sock = socket.socket(family, kind, protocol)
            bound.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            keep_alive(sock)
            sock.setblocking(False)
            sock.bind(address)
    except OSError as why:
        for sock in bound:
            sock.close()
        raise OSError(why.errno, f"cannot listen on {host or '*'} port {port} (--host, --port): {why.strerror}") from None
    return bound


class Listener:
    """Accepts connections to an HTTP server on bound sockets. Closing it closes the sockets."""

    def __init__(self, server: web.Server, sockets: Sequence[socket.socket]) -> None:
        self._server, self._sockets = server, sockets
        self._loop = asyncio.get_running_loop()
        self._starting: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._logged = self._closing_logged = -REMIND_SECONDS
        self._capacity = stream_capacity()

    def open(self) -> None:
        """Listen. Raises `OSError` if another process listens there."""
        for sock in self._sockets:
            sock.listen(BACKLOG)
        self._resume()

    def close(self) -> None:
        """Accept no more connections. Open ones stay."""
        if self._timer is not None:
            self._timer.cancel()
        for sock in self._sockets:
            self._loop.remove_reader(sock)
            sock.close()

    def _resume(self) -> None:
        self._timer = None
        for sock in self._sockets:
            self._loop.add_reader(sock, self._accept, sock)

    def _accept(self, sock: socket.socket) -> None:
        full = f"{self._capacity} connections are open, and each may need {PER_STREAM} of the files that this process may open"
        room = self._capacity - len(self._server.connections) - len(self._starting)
        if room <= 0:
            self._pause(0.0 if self._starting else self._make_room() or self._log_full(full))  # those that start may be counted twice
            return
        for _ in range(min(AT_ONCE, room)):
            try:
                accepted, _ = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as why:
                if why.errno not in _SHORT:
                    raise
                self._pause(self._make_room() or self._log_full(f"no connection can be accepted: {why.strerror}"))
                return
            starting = self._loop.create_task(self._start(accepted))
            self._starting.add(starting)
            starting.add_done_callback(self._starting.discard)

    async def _start(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(self._server, accepted)
        except OSError as why:  # the client has disconnected already
            log.debug("a connection ended as it began: %s", why)
            accepted.close()

    def _make_room(self) -> float:
        """Close connections that wait for their clients. Returns the seconds until they are closed; 0 if there are none."""
        found = [(how, number, connection) for number, connection in enumerate(self._connections()) if (how := connection.dispensable)]
        quiet = (connection for _, _, connection in sorted(found) if not connection.has_unread())
        closed = list(islice(quiet, AT_ONCE))
        for connection in closed:
            connection.abort()
        if closed and time.monotonic() - self._closing_logged >= REMIND_SECONDS:
            self._closing_logged = time.monotonic()
            log.warning("FILES ARE SHORT: %d connections are closed that wait for their clients, of %d", len(closed), self._capacity)
        return CLOSING_SECONDS if closed else 0.0

    def _connections(self) -> Iterator[GuardedConnection]:
        return (connection for connection in self._server.connections if isinstance(connection, GuardedConnection))

    def _pause(self, seconds: float) -> None:
        for sock in self._sockets:
            self._loop.remove_reader(sock)
        self._timer = self._loop.call_later(seconds, self._resume)

    def _log_full(self, why: str) -> float:
        if time.monotonic() - self._logged >= REMIND_SECONDS:
            self._logged = time.monotonic()
            log.error("FULL: %s. Further connections wait until one of them closes", why)
        return PAUSE_SECONDS
