"""A harness disconnects at every possible point: what was sampled by then is recorded as cut short, or reported as missing."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

import pytest

from tests.support.pairwise import some
from tests.system.faults.dialects import DIALECTS
from tests.system.faults.harness import HEADER, Agent, LeftError

KINDS = pytest.mark.parametrize("dialect", some(DIALECTS, 1), ids=lambda dialect: dialect.name)
EVENTS = 24


@pytest.fixture
def stack(started):
    return started(engine=("--token-delay", "0.005"))


def raw_request(agent, words, *, stream):
    """A call as bytes; the agent's list of calls gets its mark, as a call without a reply."""
    body = json.dumps(agent.dialect.body([*agent.history, *agent.dialect.user(words)], stream=stream)).encode()
    head = f"POST {agent.dialect.path} HTTP/1.1\r\nHost: tokencache\r\nContent-Type: application/json\r\n"
    return f"{head}{HEADER}: {agent.session}\r\nContent-Length: {len(body)}\r\n\r\n".encode(), body


async def connect(url):
    at = urlsplit(url)
    return await asyncio.open_connection(at.hostname, at.port)


def hang_up(writer):
    writer.transport.abort()


@pytest.mark.whole
@KINDS
async def test_before_its_request_is_complete(stack, http, dialect):
    """There was no complete request, so nothing is sampled, and nothing is missing."""
    agent = Agent(f"early-{dialect.name}", dialect, http, stack.urls)
    assert await agent.turn()
    head, body = raw_request(agent, "never sent completely", stream=True)
    for sent in (head[:10], head[:-2], head, head + body[:1], head + body[: len(body) // 2], head + body[:-1]):
        _, writer = await connect(stack.urls[0])
        writer.write(sent)
        await writer.drain()
        hang_up(writer)
    assert await agent.turn()
    found = stack.check([agent])
    assert found.clean, found.words
    assert found.marked == {}
    assert [turn["match"] for sequence in stack.export(agent.session)["sequences"] for turn in sequence["turns"]] == ["root", "continue"]


@KINDS
async def test_after_each_event(stack, http, dialect):
    """After it has disconnected, its next call continues from what it had before, or repeats the request."""

    def leaving(at):
        def watch(events):
            if events == at:
                raise LeftError

        return watch

    agents = [Agent(f"event{at}-{dialect.name}", dialect, http, stack.urls) for at in range(1, EVENTS + 1)]
    assert all(await asyncio.gather(*(agent.turn() for agent in agents)))
    for at, agent in enumerate(agents, 1):
        agent.watch = leaving(at)
    received = await asyncio.gather(*(agent.turn() for agent in agents))
    left = [agent for agent, whole in zip(agents, received, strict=True) if whole is None]
    assert len(left) > EVENTS // 2
    for agent in agents:
        agent.watch = lambda _: None
    assert all(await asyncio.gather(*(agent.turn() for agent in agents)))
    found = stack.check(agents)
    assert found.clean, found.words
    for agent in left:
        turns = [turn for sequence in stack.export(agent.session)["sequences"] for turn in sequence["turns"]]
        assert len(turns) == 3 or agent.session in found.marked, "the received part of the reply is a turn, or is reported as missing"


@KINDS
@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
async def test_right_after_the_request_and_before_the_last_byte(stack, http, dialect, streams):
    """The proxy cannot know whether a reply that it sent was read to its end: it is recorded, and may be requested again."""
    agent = Agent(f"bytes-{dialect.name}-{streams}", dialect, http, stack.urls, streams)
    assert await agent.turn()
    agent.tries = 2

    async def all_but(last):
        """Makes the agent's next call by hand, and disconnects `last` bytes before its answer's end; `None`: at once."""
        mark = f"{agent.session}-{len(agent.asked)}"
        head, body = raw_request(agent, f"#{mark}# Go on, please.", stream=streams)
        reader, writer = await connect(stack.urls[0])
        writer.write(head + body)
        await writer.drain()
        if last is not None:
            whole = await _answer(reader)
            assert len(whole) > last
        hang_up(writer)

    agent.start_over()  # the call by hand begins a conversation, and the agent then makes the same call
    await all_but(None)
    assert await agent.turn()
    agent.start_over()
    await all_but(1)
    assert await agent.turn()
    found = stack.check([agent])
    assert found.clean, found.words


async def _answer(reader):
    """An HTTP answer up to its last byte, as far as a reader of bytes can detect it."""
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return await reader.readexactly(int(line.partition(b":")[2]) - 1)
    return await reader.readuntil(b"\r\n0\r\n\r")  # chunked: its last byte is a line feed
