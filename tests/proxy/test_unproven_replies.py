"""A reply whose end cannot be proven is text; the replies before it keep their tokens, each up to where its client left."""

import pytest

from tests.proxy.kit import CHAT, TOOLS, proxied, user
from tests.proxy.test_added_text import STOP, occurs
from tests.proxy.test_client_gone import settled
from tests.proxy.test_complete_calls import call, read_until, said
from tokencache.proxy import planner
from tokencache.testing import SimulatedEngine

LONG = "<think>\nhm\n</think>\n\nOne, two, three, four, five, six, seven, eight, nine, ten."
SEARCH = f"<think>\nq\n</think>\n\n<search>café{STOP}\nthen I guess"
TWO = f"<think>\nx\n</think>\n\nLook.\n{call('ls  -la')}\n{call('cat a very long name of a file that takes many tokens')}"


def pieces(events):
    """The text of a stream, by events."""
    return [delta for event in events for choice in event["choices"] if (delta := choice["delta"].get("content"))]


def text(message):
    return {"role": "assistant", "content": message["content"]}


@pytest.mark.parametrize("seed", range(8))
async def test_the_reply_before_one_with_unproven_words_ends_where_its_client_left(seed):
    """The harness writes another text than the last token of its reply has beyond the stop string."""
    async with proxied(SimulatedEngine(episodes={"e": [LONG, SEARCH, "Done."]}, token_delay=0.002, seed=seed)) as rig:
        asked = [user("EPISODE:e")]
        events = await read_until(rig, CHAT, {"messages": asked}, lambda events: len("".join(pieces(events))) > 20)
        await settled(rig)
        heard = "".join(pieces(events)[:-3])  # the harness has not shown the last ones
        rig.engine.token_delay = 0
        asked += [{"role": "assistant", "content": heard}, user("go on")]
        searched = await rig.say("s", asked, stop=[STOP])
        await rig.say("s", [*asked, {"role": "assistant", "content": f"{searched['content']}{STOP}X"}, user("RESULT")], stop=[STOP])
        shown = rig.engine.tokenizer.decode(rig.ground_truth("s")[-1].prompt_ids)
        assert f"{heard}<|im_end|>" in shown
        await rig.check(aborted=1)


async def test_a_reply_before_two_that_cannot_be_cut_keeps_its_tokens(monkeypatch):
    """As with a template that writes nothing after each call."""

    async def no_end(*_):
        return ""

    monkeypatch.setattr(planner, "call_end", no_end)
    async with proxied(SimulatedEngine(episodes={"e": ["<think>\nhm\n</think>\n\nYes,  I do.", TWO, TWO, "Done."]})) as rig:
        asked = [user("EPISODE:e")]
        asked += [text(await rig.say("s", asked)), user("go on")]
        for _ in range(2):
            rig.engine.token_delay = 0.002
            body = {"messages": asked, "tools": TOOLS}
            events = await read_until(rig, CHAT, body, lambda events: len(said(events)) == 2 and said(events)[1]["function"]["arguments"])
            await settled(rig)
            one = said(events)[0]
            asked += [{"role": "assistant", "content": "Look.", "tool_calls": [one]}]
            asked += [{"role": "tool", "tool_call_id": one["id"], "content": "a.txt"}]
        rig.engine.token_delay = 0
        await rig.say("s", asked, tools=TOOLS)
        turn = (await rig.turns())[-1]
        assert (turn["match"], turn["reason"]) == ("resplice", "interrupt-inside-token")
        first = rig.ground_truth("s")[0]
        assert occurs(first.completion_ids, rig.ground_truth("s")[-1].prompt_ids)
        await rig.check(aborted=2)
