"""A label of an agent is recorded with its turns and shown, and decides nothing."""

import pytest

from tests.proxy.kit import CHAT, TOOLS, echo, proxied, results, user
from tokencache.client import AsyncClient

ONE = {"X-Claude-Code-Session-Id": "main", "X-Claude-Code-Agent-Id": "helper"}
OTHER = {"X-Claude-Code-Session-Id": "main"}


@pytest.fixture
async def rig():
    async with proxied() as made:
        yield made


async def say(rig, session, messages, headers):
    body = {"model": "sim", "messages": messages, "tools": TOOLS}
    async with rig.http.post(f"{rig.url}/s/{session}{CHAT}", json=body, headers=headers) as answer:
        assert answer.status == 200
        return (await answer.json())["choices"][0]["message"]


async def test_it_is_in_the_turn_the_export_and_the_outline(rig):
    first = [user("EPISODE:demo")]
    reply = await say(rig, "s", first, ONE)
    await say(rig, "s", [*first, echo(reply), *results(reply)], OTHER)
    await say(rig, "t", first, {})
    named = {"id": "helper", "parent": "main", "kind": ""}
    assert [turn["agent"] for turn in await rig.turns("s")] == [named, {"id": "main", "parent": "", "kind": ""}]
    assert [turn["agent"] for turn in await rig.turns("t")] == [None]
    assert (await rig.get("/tokencache/v1/sessions/s/outline"))["turns"][0]["agent"] == named
    async with AsyncClient(rig.url) as client:
        (sequence,) = (await client.session("s").trajectory()).sequences
        assert sequence.turns[0].agent.parent == "main"


async def test_it_proves_nothing(rig):
    """Another name continues a turn as well, the same name does not make a turn of another history."""
    first = [user("EPISODE:demo")]
    reply = await say(rig, "s", first, ONE)
    await say(rig, "s", [*first, echo(reply), *results(reply)], OTHER)
    await say(rig, "s", [*first, {**echo(reply), "content": "Not what was said.", "tool_calls": None}, user("go on")], ONE)
    assert [turn["match"] for turn in await rig.turns("s")] == ["root", "continue", "plain"]
