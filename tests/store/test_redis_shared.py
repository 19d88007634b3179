"""The connection that all calls share: answers reach those who asked, and what was sent is known when it breaks."""

import asyncio
import contextlib

import pytest
from redis import exceptions
from redis.asyncio import Connection

from tests.support.waiting import PATIENCE
from tokencache.store.redis.shared import ConnectFailedError, SharedConnection

OK = b"+OK\r\n"


class Server:
    """Answers the handshake of redis-py, and then as the test says.

    Attributes:
        writes: what arrived at once after that.
        connections: number of connections so far.
    """

    def __init__(self):
        self.writes, self.connections = [], 0
        self._arrived = asyncio.Event()

    async def arrives(self, times):
        async with asyncio.timeout(PATIENCE):
            while len(self.writes) < times:
                await self._arrived.wait()
                self._arrived.clear()

    def answer(self, data):
        self.writer.write(data)

    async def serve(self, reader, writer):
        self.connections += 1
        self.writer = writer
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 20):
                if b"SETINFO" in data:
                    writer.write(OK * data.count(b"SETINFO"))
                else:
                    self.writes.append(data)
                    self._arrived.set()
        writer.close()


@pytest.fixture
async def server():
    made = Server()
    async with await asyncio.start_server(made.serve, "127.0.0.1", 0) as listening:
        made.port = listening.sockets[0].getsockname()[1]
        yield made


@pytest.fixture
async def shared(server):
    made = SharedConnection(lambda: Connection(host="127.0.0.1", port=server.port, protocol=2))
    yield made
    await made.reset()


async def answer(shared, name):
    return await shared.run("GET", name)


def send(shared, *names):
    return [asyncio.create_task(answer(shared, name)) for name in names]


async def outcomes(tasks):
    async with asyncio.timeout(PATIENCE):
        return await asyncio.gather(*tasks, return_exceptions=True)


async def opened(shared, server):
    """Open the connection with a first command."""
    server.writes.clear()
    (first,) = send(shared, "first")
    await server.arrives(1)
    server.answer(OK)
    assert await outcomes([first]) == [b"OK"]
    server.writes.clear()


async def test_commands_of_one_round_are_one_write_on_one_connection(shared, server):
    await opened(shared, server)
    tasks = send(shared, "a", "b", "c")
    await server.arrives(1)
    assert [server.writes[0].count(b"GET"), server.connections] == [3, 1]
    server.answer(b"$1\r\nA\r\n-ERR no b\r\n*2\r\n$1\r\nC\r\n:1\r\n")
    a, b, c = await outcomes(tasks)
    assert (a, type(b), str(b), c) == (b"A", exceptions.ResponseError, "no b", [b"C", 1])


async def test_many_first_commands_open_one_connection(shared, server):
    tasks = send(shared, "a", "b", "c")
    await server.arrives(1)
    server.answer(OK * 3)
    assert await outcomes(tasks) == [b"OK"] * 3
    assert server.connections == 1


@pytest.mark.parametrize("rounds", [1, 2])
async def test_the_answer_to_a_cancelled_command_reaches_no_other(shared, server, rounds):
    """It is cancelled before or after it was written."""
    await opened(shared, server)
    a, b = send(shared, "a", "b")
    for _ in range(rounds):
        await asyncio.sleep(0)
    a.cancel()
    await server.arrives(1)
    server.answer(b"$1\r\nA\r\n$1\r\nB\r\n")
    assert await outcomes([b]) == [b"B"]


async def test_a_closed_connection_loses_what_was_sent(shared, server):
    await opened(shared, server)
    tasks = send(shared, "a", "b")
    await server.arrives(1)
    server.answer(b"$1\r\nA\r\n")
    server.writer.close()
    a, b = await outcomes(tasks)
    assert (a, type(b)) == (b"A", exceptions.ConnectionError)
    await opened(shared, server)
    assert server.connections == 2


async def test_what_was_not_written_yet_was_not_sent(shared, server):
    await opened(shared, server)
    (sent,) = send(shared, "sent")
    await server.arrives(1)
    (unsent,) = send(shared, "unsent")
    await asyncio.sleep(0)
    await shared.reset()
    assert [type(why) for why in await outcomes([sent, unsent])] == [exceptions.ConnectionError, ConnectFailedError]
    assert len(server.writes) == 1


async def test_no_connection_means_that_nothing_was_sent():
    async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
    shared = SharedConnection(lambda: Connection(host="127.0.0.1", port=port, protocol=2))
    (refused,) = await outcomes(send(shared, "a"))
    assert isinstance(refused, exceptions.ConnectionError)


@pytest.mark.parametrize("words", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"*2\r\n$1\r\nA\r\n?"], ids=["HTTP", "cut"])
async def test_what_is_not_redis_closes_the_connection(shared, server, words):
    await opened(shared, server)
    tasks = send(shared, "a", "b")
    await server.arrives(1)
    server.answer(words)
    assert {type(why) for why in await outcomes(tasks)} == {exceptions.ConnectionError}
    await opened(shared, server)
    assert server.connections == 2


async def test_an_answer_without_a_command_closes_the_connection(shared, server):
    await opened(shared, server)
    (task,) = send(shared, "a")
    await server.arrives(1)
    server.answer(b"$1\r\nA\r\n$1\r\nB\r\n")
    assert await outcomes([task]) == [b"A"]
    await opened(shared, server)
    assert server.connections == 2


async def test_an_answer_that_is_false_takes_its_place(shared, server):
    await opened(shared, server)
    tasks = send(shared, "a", "b")
    await server.arrives(1)
    server.answer(b"#f\r\n$1\r\nB\r\n")
    assert await outcomes(tasks) == [False, b"B"]
