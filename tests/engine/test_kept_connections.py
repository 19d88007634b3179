"""A kept connection that is closed when it is used again: another one is used. What the engine may have received is not repeated."""

import asyncio
import contextlib
import socket
import struct
import threading

import pytest
import uvloop

from tokencache.engine.upstream import Upstream, segmented_body
from tokencache.errors import EngineError

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset


class Server(threading.Thread):
    """An HTTP server in a thread of its own, so that it can close a connection while the client's event loop does not run.

    `read` has the bodies of the requests that it has received. `resets_after_reading` is the number of requests whose connection it resets.
    """

    def __init__(self, status="200 OK"):
        super().__init__(daemon=True)
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        self.status, self.read, self.resets_after_reading = status, [], 0
        self.connections = []

    def run(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listening.accept()
                serving = threading.Thread(target=self._serve, args=[connection], daemon=True)
                self.connections.append((connection, serving))
                serving.start()

    def _serve(self, connection):
        with connection.makefile("rb") as file, contextlib.suppress(OSError):
            while head := file.readline():
                length = 0
                while line := file.readline().strip().lower():
                    length = int(line.partition(b":")[2]) if line.startswith(b"content-length:") else length
                self.read.append((head.split()[1].decode(), file.read(length)))
                if self.resets_after_reading:
                    self.resets_after_reading -= 1
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    break
                connection.sendall(f"HTTP/1.1 {self.status}\r\nContent-Length: 2\r\n\r\nok".encode())
        connection.close()

    def close_all(self, *, reset):
        """Close the kept connections. The event loop of the client is blocked meanwhile, so that it does not notice."""
        while self.connections:
            connection, serving = self.connections.pop()
            with contextlib.suppress(OSError):  # it is closed
                if reset:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                connection.shutdown(socket.SHUT_RD)
            serving.join()


@contextlib.asynccontextmanager
async def connected(**options):
    server = Server(**options)
    server.start()
    upstream = Upstream(server.url)
    await upstream.open()
    try:
        yield server, upstream
    finally:
        await upstream.close()
        server.listening.close()
        server.close_all(reset=False)


async def post(upstream, path, body=b"{}"):
    answer = await upstream.send("POST", path, body=body)
    try:
        return await answer.read()
    finally:
        answer.close()


BODIES = {"small": b"{}", "in blocks": b"x" * 2**21, "in segments": segmented_body(b"a", b"x" * 2**17)}


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("body", BODIES)
async def test_a_connection_that_was_closed_meanwhile_is_not_used(reset, body):
    async with connected() as (server, upstream):
        await post(upstream, "/first")
        server.close_all(reset=reset)
        assert await post(upstream, "/second", BODIES[body]) == b"ok"
        assert [path for path, _ in server.read] == ["/first", "/second"]


def test_under_uvloop_too():
    uvloop.run(test_a_connection_that_was_closed_meanwhile_is_not_used(True, "small"))


async def test_what_it_may_have_received_is_not_sent_again():
    async with connected() as (server, upstream):
        await post(upstream, "/first")
        server.resets_after_reading = 1
        with pytest.raises(EngineError) as failed:
            await post(upstream, "/second")
        assert failed.value.reached
        assert [path for path, _ in server.read] == ["/first", "/second"]


async def test_several_connections_that_were_closed_together():
    async with connected() as (server, upstream):
        await asyncio.gather(*(post(upstream, "/first") for _ in range(5)))
        server.close_all(reset=True)
        assert await asyncio.gather(*(post(upstream, "/second") for _ in range(9))) == [b"ok"] * 9


@pytest.mark.parametrize(("status", "kept"), [("200 OK", True), ("400 Bad Request", True), ("429 Too Many", False), ("503 Not Now", False)])
async def test_a_connection_is_not_kept_after_an_answer_that_servers_close_it_after(status, kept):
    async with connected(status=status) as (server, upstream):
        for _ in range(3):
            await post(upstream, "/")
        assert len(server.connections) == (1 if kept else 3)
