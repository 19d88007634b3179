"""What harnesses do to replies, through the whole proxy: rewritten, interrupted, found again by handle or id, or refused."""

import contextlib
import json
import re

import aiohttp
import pytest

from tests.proxy.kit import CHAT, HEADER, TOOLS, echo, proxied, results, user
from tests.proxy.test_client_gone import settled
from tokencache.core.rules import RULES, Leniency
from tokencache.dialects import untranslated
from tokencache.proxy.harness_profile import HarnessProfiles
from tokencache.proxy.response import Response
from tokencache.testing import SimulatedEngine

CALL = '<tool_call>\n{"name": "Bash", "arguments": {"command": "cd /w && ls", "timeout": "5"}}\n</tool_call>'
EPISODES = {
    "work": [f"<think>\nhm\n</think>\n\nLook.\n{CALL}", "<think>\nok\n</think>\n\nDone."],
    "long": ["<think>\nwell\n</think>\n\nOne, two, three, four, five, six, seven, eight, nine ☕ ten.", "<think>\nok\n</think>\n\nYes."],
}
CLAUDE = Leniency(harness_rules=frozenset({"cd-prefix", "coerced-values"}))


@pytest.fixture
def lenient(monkeypatch):
    """Let every call of the test have this leniency."""

    def grant(leniency):
        monkeypatch.setattr(HarnessProfiles, "leniency", lambda self, harness: leniency)

    return grant


def as_claude_says(message):
    said = echo(message)
    said["tool_calls"][0]["function"]["arguments"] = json.dumps({"command": "ls", "timeout": 5})
    return said


@pytest.mark.parametrize("stream", [False, True])
async def test_ids_without_all_but_letters_and_digits_find_the_reply_after_its_context_moved(stream):
    """As OpenClaw sends them: the message with its context moves to the end with every call."""
    async with proxied(SimulatedEngine(episodes=EPISODES)) as rig:
        history, context = [user("EPISODE:work")], {"role": "user", "content": [{"type": "text", "text": "<context>none</context>"}]}
        for _ in range(3):
            message = await rig.say("s", [*history, context], tools=TOOLS, stream=stream)
            said = echo(message)
            for call in said.get("tool_calls", ()):
                call["id"] = re.sub("[^0-9A-Za-z]", "", call["id"])
            history += [said, *results(said)]
        turns = await rig.turns()
        assert [turn["match"] for turn in turns[:2]] == ["root", "resplice"]
        assert [anchor["turn"] for anchor in turns[1]["anchors"]] == [turns[0]["turn"]]
        first = rig.ground_truth()[0].completion_ids
        prompt = rig.ground_truth()[1].prompt_ids
        assert any(prompt[at : at + len(first)] == first for at in range(len(prompt))), "the reply's exact ids"
        await rig.check()


async def test_a_rewritten_call_is_continued_where_the_adapter_vouches_for_it(lenient):
    lenient(CLAUDE)
    async with proxied(SimulatedEngine(episodes=EPISODES)) as rig:
        asked = [user("EPISODE:work")]
        message = await rig.say("s", asked, tools=TOOLS)
        await rig.say("s", [*asked, as_claude_says(message), *results(message)], tools=TOOLS)
        turn = (await rig.turns())[-1]
        assert (turn["match"], turn["reason"]) == ("continue", "")
        assert {"cd-prefix", "coerced-values"} <= set(turn["forgiven"])
        await rig.check()


@pytest.mark.parametrize(
    "leniency", [Leniency(), Leniency(harness_rules=frozenset({"cd-prefix"})), Leniency(frozenset({"cd-prefix"}), CLAUDE.harness_rules)]
)
async def test_and_is_refused_where_it_does_not(lenient, leniency):
    lenient(leniency)
    async with proxied(SimulatedEngine(episodes=EPISODES)) as rig:
        asked = [user("EPISODE:work")]
        message = await rig.say("s", asked, tools=TOOLS)
        await rig.say("s", [*asked, as_claude_says(message), *results(message)], tools=TOOLS)
        turn = (await rig.turns())[-1]
        assert (turn["match"], turn["reason"]) == ("plain", "rewritten-reply")
        await rig.check()


async def test_a_rewritten_call_is_found_in_an_edited_context(lenient):
    lenient(CLAUDE)
    async with proxied(SimulatedEngine(episodes=EPISODES)) as rig:
        message = await rig.say("s", [user("EPISODE:work")], tools=TOOLS)
        await rig.say("s", [user("EPISODE:work, in short"), as_claude_says(message), *results(message)], tools=TOOLS)
        turn = (await rig.turns())[-1]
        assert (turn["match"], turn["reason"], len(turn["anchors"])) == ("resplice", "context-edited", 1)
        await rig.check()


async def test_what_a_codec_may_not_leave_out_is_rendered_plainly(lenient, monkeypatch):
    lenient(Leniency(off=frozenset({"billing-line"})))
    read = untranslated.read_chat

    async def leaving_out(*args, **kwargs):
        call = await read(*args, **kwargs)
        call.left_out = ("billing-line",)
        return call

    monkeypatch.setattr(untranslated, "read_chat", leaving_out)
    async with proxied(SimulatedEngine(episodes=EPISODES)) as rig:
        asked = [user("EPISODE:work")]
        message = await rig.say("s", asked, tools=TOOLS)
        await rig.say("s", [*asked, echo(message), *results(message)], tools=TOOLS)
        assert [(turn["match"], turn["reason"]) for turn in await rig.turns()] == [("root", ""), ("plain", "switched-off")]


def heard_of(got):
    chunks = [json.loads(event[6:]) for event in got.split(b"\n\n")[:-1] if event.startswith(b"data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


async def leave_having_heard(rig, characters, body):
    """Read a stream until so many characters of text have come, then leave; returns the text."""
    got, asked = b"", {"model": "sim", "stream": True, **body}
    async with rig.http.post(rig.url + CHAT, json=asked, headers={HEADER: "s"}) as answer:
        while len(heard_of(got).strip()) < characters:
            more = await answer.content.readany()
            assert more, "it ended"
            got += more
        answer.close()
    return heard_of(got)


@pytest.mark.parametrize("chunk_tokens", [1, 2, 3])
@pytest.mark.parametrize("characters", [1, 8, 25])
async def test_the_prefix_delivered_before_an_interrupt_continues_in_its_own_tokens(characters, chunk_tokens):
    async with proxied(SimulatedEngine(episodes=EPISODES, token_delay=0.002, chunk_tokens=chunk_tokens)) as rig:
        asked = {"messages": [user("EPISODE:long")]}
        heard = await leave_having_heard(rig, characters, asked)
        await settled(rig)
        rig.engine.token_delay = 0
        assert heard.strip()
        history = [*asked["messages"], {"role": "assistant", "content": heard}, user("[Request interrupted by user]")]
        await rig.say("s", history)
        first, second = await rig.turns()
        assert "aborted" in first["marks"]
        if second["match"] == "plain":
            assert second["reason"] == "interrupt-inside-token"
            assert chunk_tokens > 1
        else:
            assert second["match"] in {"continue", "resplice"}
            assert "interrupted" in second["forgiven"]
            prompt = rig.ground_truth("s")[-1].prompt_ids
            assert heard in rig.engine.tokenizer.decode(prompt)
            assert prompt[: first["prompt_tokens"]] == rig.ground_truth("s")[0].prompt_ids
            kept = second["anchors"][0]["end"] if second["anchors"] else first["prompt_tokens"] + first["completion_tokens"]
            sampled = rig.ground_truth("s")[0].completion_ids
            assert prompt[first["prompt_tokens"] : kept] == sampled[: kept - first["prompt_tokens"]]
            assert rig.engine.tokenizer.decode(sampled[: kept - first["prompt_tokens"]]).endswith(heard)
        await rig.say("s", [*history, {"role": "assistant", "content": "Yes."}, user("go on")])
        await rig.check(aborted=1)


@pytest.mark.parametrize("change", [lambda text: text[:-1], lambda text: text + "!", lambda _: "Something else"])
async def test_what_was_not_delivered_is_not_used(change):
    async with proxied(SimulatedEngine(episodes=EPISODES, token_delay=0.002)) as rig:
        asked = {"messages": [user("EPISODE:long")]}
        heard = await leave_having_heard(rig, 20, asked)
        await settled(rig)
        rig.engine.token_delay = 0
        assert heard
        await rig.say("s", [*asked["messages"], {"role": "assistant", "content": change(heard)}, user("go on")])
        turn = (await rig.turns())[-1]
        assert turn["match"] == "plain" or turn["anchors"], "a beginning may be shorter, never other"
        if turn["match"] == "plain":
            assert turn["reason"] in {"unrecognised-reply", "rewritten-reply", "interrupt-inside-token"}
        await rig.check(aborted=1)


def test_all_rules_have_names_that_an_adapter_can_write():
    assert all(rule.name.replace("-", "").isalpha() for rule in RULES.values())


async def test_a_client_that_leaves_before_the_last_text_has_not_received_the_whole(monkeypatch):
    """The engine has finished, and the harness is gone before the end reaches it: what came back is a beginning."""
    async with proxied(SimulatedEngine(episodes=EPISODES)) as rig:
        asked = {"messages": [user("EPISODE:long")]}
        with monkeypatch.context() as gone:
            gone.setattr(Response, "gone", True)
            async with rig.http.post(rig.url + CHAT, json={"model": "sim", "stream": True, **asked}, headers={HEADER: "s"}) as answer:
                got = b""
                with contextlib.suppress(aiohttp.ClientError):
                    while more := await answer.content.readany():
                        got += more
        await settled(rig)
        heard = heard_of(got)
        await rig.say("s", [*asked["messages"], {"role": "assistant", "content": heard}, user("go on")])
        first, second = await rig.turns()
        assert "aborted" in first["marks"]
        assert (second["match"], second["forgiven"].count("interrupted")) in {("continue", 1), ("resplice", 1)}


EDITS = {
    "other words": ("long", lambda said: said | {"content": said["content"].replace("three", "[REDACTED]")}),
    "cut": ("long", lambda said: said | {"content": said["content"][: len(said["content"]) // 3]}),
    "other words next to a call": ("work", lambda said: said | {"content": "See."}),
    "other arguments": ("work", lambda said: with_command(said, "pwd")),
}


def with_command(said, command):
    said["tool_calls"][0]["function"]["arguments"] = json.dumps({"command": command})
    return said


@pytest.mark.parametrize("moved", [False, True], ids=["same context", "the clock went on"])
@pytest.mark.parametrize("edit", EDITS)
async def test_an_edited_reply_is_called_rewritten(edit, moved):
    async with proxied(SimulatedEngine(episodes=EPISODES)) as rig:
        episode, change = EDITS[edit]
        asked = [{"role": "system", "content": "It is 13:40:01."}, user(f"EPISODE:{episode}")]
        message = await rig.say("s", asked, tools=TOOLS)
        asked[0]["content"] = "It is 13:41:07." if moved else asked[0]["content"]
        await rig.say("s", [*asked, change(echo(message)), *results(message)], tools=TOOLS)
        turn = (await rig.turns())[-1]
        assert (turn["match"], turn["reason"], turn["parent"]) == ("plain", "rewritten-reply", None)
        await rig.check()


@pytest.mark.parametrize("change", [lambda _: "Nothing like it.", lambda _: "", lambda text: f"{text[:12]} or not"])
async def test_a_message_of_the_harness_in_place_of_a_reply_is_not_called_rewritten(change):
    """It has few words of the reply, although it is in its place."""
    async with proxied(SimulatedEngine(episodes=EPISODES)) as rig:
        asked = [user("EPISODE:long")]
        said = echo(await rig.say("s", asked))
        await rig.say("s", [*asked, said | {"content": change(said["content"])}, user("go on")])
        turn = (await rig.turns())[-1]
        assert (turn["match"], turn["reason"]) == ("plain", "unrecognised-reply")


async def test_a_reply_that_is_like_a_recorded_one_elsewhere_is_not_called_rewritten():
    """It may be one that the store has lost: the agent says nearly the same again after the same words."""
    async with proxied(SimulatedEngine(episodes=EPISODES)) as rig:
        asked = [user("EPISODE:long")]
        said = echo(await rig.say("s", asked))
        again = said | {"content": said["content"].replace("ten", "eleven")}
        await rig.say("s", [user("Hello."), {"role": "assistant", "content": "Hi."}, *asked, again, user("go on")])
        assert (await rig.turns())[-1]["reason"] == "unrecognised-reply"


async def test_a_reply_of_another_session_is_not_called_rewritten():
    async with proxied(SimulatedEngine(episodes=EPISODES)) as rig:
        asked = [user("EPISODE:long")]
        said = echo(await rig.say("other", asked))
        await rig.say("s", [user("EPISODE:work")], tools=TOOLS)
        await rig.say("s", [*asked, said, user("go on")])
        assert (await rig.turns())[-1]["reason"] == "unrecognised-reply"


WRITE = '<tool_call>\n{"name": "write", "arguments": {"content": "%sx"}}\n</tool_call>'
LONG = {
    "id": ["<think>\nr\n</think>\n\n" + WRITE % "", "<think>\nok\n</think>\n\nDone."],
    "open": ["<think>\nr\n</think>\n\nGo " + "<think>" * 2000 + WRITE % "", "<think>\nok\n</think>\n\nDone."],
    "blank": ["<think>\nr\n</think>\n\n" + WRITE % (" " * 10_000), "<think>\nok\n</think>\n\nDone."],
}


@pytest.mark.parametrize("case", LONG)
async def test_a_long_repetition_that_no_rule_explains_is_refused_as_a_short_one(case):
    """The work is counted in `tests/core/test_linear_work.py`."""
    async with proxied(SimulatedEngine(episodes=LONG)) as rig:
        asked = [user(f"EPISODE:{case}")]
        said = echo(await rig.say("s", asked, tools=TOOLS))
        if case == "id":
            said["tool_calls"][0]["id"] = "a" * 20_000 + "-"
        else:
            said.pop("reasoning", None)
            said["content"] = said["content"][:100] + " [cut]" if said["content"] else None
            said["tool_calls"][0]["function"]["arguments"] = '{"content": "[cut]"}'
        await rig.say("s", [*asked, said, *results(said)], tools=TOOLS)
        turn = (await rig.turns())[-1]
        assert (turn["match"], turn["reason"]) == (("continue", "") if case == "id" else ("plain", "rewritten-reply"))
        await rig.check()
