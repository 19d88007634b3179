"""A stream whose client receives the reply holds no more of the request than its record needs; how much in bytes, `tests/bench` counts."""

import contextlib
import dataclasses
import gc
import json
import sys

import pytest

from tests.proxy.kit import CHAT, EPISODES, HEADER, TOOLS, echo, proxied, user
from tests.proxy.test_contexts import contexts
from tests.support.reading import read_chat
from tests.support.waiting import until
from tokencache.dialects.chat.incremental import IncrementalParser
from tokencache.dialects.chat.request import LastMessages
from tokencache.request_memory import Holding
from tokencache.testing import Fault, SimulatedEngine

FIRST, NEXT = [user("EPISODE:talk " + "go on " * 500)], user("and then?")
LINE = len(json.dumps(NEXT))


@contextlib.asynccontextmanager
async def stalled(rig, messages, path=CHAT, **more):
    """A stream of which the client has received some text, and that does not end."""
    rig.engine.faults.append(dataclasses.replace(Fault.stall(), path=path))
    body = json.dumps({"model": "sim", "messages": messages, "stream": True, **more}).encode()
    async with rig.http.post(rig.url + path, data=body, headers={HEADER: "s", "Content-Type": "application/json"}) as answer:
        assert await answer.content.readany()
        yield body


async def test_only_the_new_messages_are_held():
    async with proxied() as rig:
        messages = [*FIRST, echo(await rig.say("s", FIRST)), NEXT]
        async with stalled(rig, messages):
            assert LINE < rig.proxy.request_memory.total < len(json.dumps([*messages[1:], {"model": "sim", "stream": True}]))
        await until(lambda: not rig.proxy.request_memory.total)


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS * 50, "stop": ["x"]}], ids=["messages", "tools"])
async def test_a_first_call_holds_its_messages_and_other_members(more):
    """They are recorded when it ends."""
    members = {"model": "sim", "stream": True, **more}
    async with proxied() as rig, stalled(rig, FIRST, **more) as body:
        assert rig.proxy.request_memory.total == sum(len(json.dumps(one)) for one in [*FIRST, *members.values()]) < len(body)


async def test_a_reply_that_may_be_continued_holds_the_whole_request():
    async with proxied(SimulatedEngine(episodes=EPISODES, derenders=True)) as rig, stalled(rig, FIRST) as body:
        assert rig.proxy.request_memory.total == len(body)


async def test_a_text_completion_holds_its_prompt():
    async with proxied() as rig, stalled(rig, [], "/v1/completions", prompt="go on " * 500) as body:
        assert rig.proxy.request_memory.total == len(body)


def test_no_part_of_a_released_request_keeps_the_body():
    asked = {"messages": [*FIRST, NEXT], "model": "sim", "tools": TOOLS, "chat_template_kwargs": {"a": 1}, "stop": ["x"]}
    body = json.dumps(asked).encode()
    before = sys.getrefcount(body)
    chat = read_chat(body, IncrementalParser())
    chat.release(1)
    assert (sys.getrefcount(body), chat.tool_count, chat.has_stop_strings) == (before, 1, True)


@pytest.mark.parametrize("first", ["messages", "tools"], ids="the {} first".format)
def test_no_member_of_a_call_is_held_twice(first):
    """Tools may have more bytes than the messages. A copy is the same object, unless it is a part of something longer."""
    parser, asked = IncrementalParser(), {"messages": FIRST, "tools": TOOLS, "chat_template_kwargs": {"a": 1}, "model": "sim"}
    for messages in (FIRST, [*FIRST, NEXT], [*FIRST, NEXT, NEXT]):
        chat = read_chat(json.dumps({first: None, **asked, "messages": messages}).encode(), parser, session="s")
        tools = chat.args.tools
        chat.release(len(messages) - 1)
        assert [name for name, value in chat.fields.items() if value.copy() is not value] == []
        assert chat.fields["tools"] is tools


@pytest.mark.parametrize("agrees", [True, False], ids=["the engine agrees", "the engine uses other ids"])
async def test_the_record_is_complete(agrees, monkeypatch):
    async with proxied(of_its_own_kind=True) as rig:
        monkeypatch.setattr(rig.proxy.ledger.prefixes, "nearby", lambda *_: ())  # as if other sessions had replaced its own
        first = [*FIRST, echo(await rig.say("s", FIRST, stream=True)), NEXT]
        rig.engine.honours_ids = agrees
        second = [*first, echo(await rig.say("s", first, stream=True)), NEXT]
        rig.engine.honours_ids = True
        await rig.say("s", second)
        turns = await rig.store.turns("s")
        assert [whole for whole, _ in await contexts(rig.store)] == [FIRST, first, second]
        assert ["engine-disagrees" in turn.marks for turn in turns] == [False, not agrees, False]


async def test_a_connection_without_a_request_holds_no_body():
    async with proxied() as rig:
        for stream in (False, True):
            await rig.say("s", FIRST, stream=stream)
        assert not [one for one in gc.get_objects() if isinstance(one, Holding) and one.body is not None]


def test_messages_that_were_released_cannot_be_read():
    messages = LastMessages(2, [b"c", b"d"])
    assert (len(messages), messages[2], messages[-1], messages[2:], messages[3:9], messages[1:1]) == (
        4,
        b"c",
        b"d",
        [b"c", b"d"],
        [b"d"],
        [],
    )
    for index in (0, -3, slice(1, 3), slice(None)):
        with pytest.raises(LookupError, match="released"):
            messages[index]
    with pytest.raises(LookupError, match="released"):
        list(messages)
    with pytest.raises(IndexError):
        messages[4]
