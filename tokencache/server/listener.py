"""The door: where harnesses' connections come in.

It is not the event loop's own server, for one reason: what happens when file descriptors run short. uvloop's server then takes
connections and closes them, without a word in any log. Here a connection that cannot be served is left in the kernel's queue,
where its harness waits; it is said once a minute; and nobody spins. Connections are let in only while there is a descriptor for
the engine's side of each, so that a call that was let in can be made.

Workers of one machine share a port by `SO_REUSEPORT`: each has a socket of its own, and the kernel deals connections out by a hash of
their addresses. One socket that all accept from is not dealt out evenly (docs/operations.md has figures), and a connection stays where it
was taken for as long as a harness keeps it.
"""

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Sequence

from aiohttp import web

from tokencache.net import keep_alive
from tokencache.server.descriptors import PER_STREAM, streams_that_fit

log = logging.getLogger(__name__)

BACKLOG = 4096
AT_ONCE = 64
"""Connections that are taken before others get their turn."""
PAUSE_SECONDS = 0.25
REMIND_SECONDS = 60.0
_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def bind(host: str, port: int, *, shared: bool = False) -> list[socket.socket]:
    """Take a port on all addresses of a host, without listening yet; port 0 takes a free one, the same on all of them.

    `shared`: others of this user may take it, too, and share what comes in once they listen.

    Raises:
        OSError: there is no such address, or the port is taken.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound: list[socket.socket] = []
    try:
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
        raise OSError(why.errno, f"cannot listen on {host or '*'} port {port}: {why.strerror}") from None
    return bound


class Door:
    """Lets connections in to an HTTP server from sockets that are bound; they are closed with it."""

    def __init__(self, server: web.Server, sockets: Sequence[socket.socket]) -> None:
        self._server, self._sockets = server, sockets
        self._loop = asyncio.get_running_loop()
        self._entering: set[asyncio.Task[None]] = set()
        self._later: asyncio.TimerHandle | None = None
        self._said = -REMIND_SECONDS
        self._room = streams_that_fit()

    def open(self) -> None:
        """Listen.

        Raises:
            OSError: another one listens there.
        """
        for sock in self._sockets:
            sock.listen(BACKLOG)
        self._go_on()

    def close(self) -> None:
        """Let nobody in any more; who is in stays."""
        if self._later is not None:
            self._later.cancel()
        for sock in self._sockets:
            self._loop.remove_reader(sock)
            sock.close()

    def _go_on(self) -> None:
        self._later = None
        if self._is_full():
            self._pause()
            return
        for sock in self._sockets:
            self._loop.add_reader(sock, self._knock, sock)

    def _knock(self, sock: socket.socket) -> None:
        for _ in range(AT_ONCE):
            try:
                accepted, _ = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as why:
                if why.errno not in _SHORT:
                    raise
                self._say(f"no connection can be accepted: {why.strerror}")
                self._pause()
                return
            entering = self._loop.create_task(self._enter(accepted))
            self._entering.add(entering)
            entering.add_done_callback(self._entering.discard)
            # Descriptors are numbered from below: while this number is small, so is the count.
            if accepted.fileno() >= self._room and self._is_full():
                self._pause()
                return

    async def _enter(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(self._server, accepted)
        except OSError as why:  # it has gone already
            log.debug("a connection ended as it began: %s", why)
            accepted.close()

    def _is_full(self) -> bool:
        full = len(self._server.connections) + len(self._entering) >= self._room
        if full:
            self._say(f"{self._room} connections are open, and each may need {PER_STREAM} of the files that this process may open")
        return full

    def _pause(self) -> None:
        for sock in self._sockets:
            self._loop.remove_reader(sock)
        self._later = self._loop.call_later(PAUSE_SECONDS, self._go_on)

    def _say(self, why: str) -> None:
        if time.monotonic() - self._said >= REMIND_SECONDS:
            self._said = time.monotonic()
            log.error("FULL: %s; others wait until one of them ends", why)
