"""Text that the engine's parser dropped: found when somebody looks at the session, counted once, and never guessed."""

import msgspec
import pytest

from tests.proxy.kit import CALL, THOUGHT, TOOLS, proxied, results, user
from tests.support.waiting import PATIENCE
from tokencache.api.lost_text import LostTextMeter
from tokencache.client import AsyncClient
from tokencache.core.lost_text import LostText
from tokencache.engine.template.renderer import EngineRenderer, RenderError
from tokencache.testing import SimulatedEngine

LATE = "And then I read the file — naïve café."
EPISODES = {"late": [f"{THOUGHT}Let me look.\n{CALL}\n{LATE}", f"{THOUGHT}All done ☕, nothing more."]}


@pytest.fixture
async def rig():
    async with proxied(SimulatedEngine(episodes=EPISODES, seed=7)) as made:
        yield made


async def talk(rig, session, *, stream=False):
    messages = [user("EPISODE:late")]
    reply = await rig.say(session, messages, stream=stream, tools=TOOLS)
    await rig.say(session, [*messages, reply, *results(reply)], stream=stream, tools=TOOLS)


async def changes(rig, session):
    async with AsyncClient(rig.url) as client:
        return await client.session(session).changes()


async def counted(rig):
    async with rig.http.get(f"{rig.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return {line.split('"')[1]: float(line.rpartition(" ")[2]) for line in lines if line.startswith("tokencache_lost_text_total{")}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_dropped_text_is_quoted_and_counted_once(rig, stream):
    before = await counted(rig)
    await talk(rig, "s", stream=stream)
    first, second = await changes(rig, "s")
    assert (first.lost, first.not_compared) == ([LATE], "")
    assert (second.lost, second.not_compared) == ([], "")
    assert await changes(rig, "s") == [first, second]
    after = await counted(rig)
    assert {name: after[name] - before.get(name, 0) for name in ("lost", "whole")} == {"lost": 1, "whole": 1}
    turn = await rig.get(f"/tokencache/v1/sessions/s/turns/{first.turn}")
    assert turn["lost"] == {"texts": [LATE], "unknown": ""}


async def test_an_engine_that_is_away_is_asked_again_later(rig, monkeypatch):
    await talk(rig, "s")

    async def fail(*_):
        raise RenderError("/detokenize: gone")

    with monkeypatch.context() as patched:
        patched.setattr(EngineRenderer, "read", fail)
        assert {change.not_compared for change in await changes(rig, "s")} == {"engine-away"}
    assert [change.lost for change in await changes(rig, "s")] == [[LATE], []]


async def test_a_hidden_thought_and_a_stop_string_are_not_lost(rig):
    text = await rig.say("s", [user("EPISODE:late")], include_reasoning=False, stop=["nothing"])
    assert text["content"]
    await rig.say("s", [user("EPISODE:late"), {"role": "assistant", "content": text["content"]}, user("go on")], stop=["nothing"])
    assert [(change.lost, change.not_compared) for change in await changes(rig, "s")] == [([], ""), ([], "")]


async def test_what_is_missing_of_a_reply_that_was_broken_off_was_not_dropped(rig):
    await talk(rig, "s")
    first, second = await rig.store.turns("s")
    tokens = await rig.store.tokens("s", [first.id, second.id])
    meter = LostTextMeter(rig.proxy.pool, timeout=PATIENCE)
    aborted = msgspec.structs.replace(first, marks=("aborted",))
    assert await meter.measure([aborted, second], tokens) == {first.id: LostText(unknown="broken-off"), second.id: LostText()}
