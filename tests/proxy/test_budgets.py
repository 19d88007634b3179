"""Budgets: an episode that used its calls, tokens or time is ended cleanly, in every dialect; what the model said stays as it was."""

import asyncio
import json

import anthropic
import openai
import pytest
from google import genai

from tests.proxy.kit import CHAT, HEADER, TOOLS, echo, proxied, results, user
from tests.support.waiting import PATIENCE
from tokencache.proxy.generated_replies import LAST_WORDS
from tokencache.proxy.ledger import ONE_BY_ONE
from tokencache.testing import Fault
from tokencache.testing.harness import ScriptedHarness

pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")

API = "/tokencache/v1"
SAY = "EPISODE:talk"
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
CALLS = {
    "chat": (CHAT, {"model": "sim", "messages": [user(SAY)], "tools": TOOLS}),
    "messages": ("/v1/messages", {"model": "sim", "messages": [user(SAY)], "max_tokens": 50}),
    "responses": ("/v1/responses", {"model": "sim", "input": SAY}),
    "gemini": ("/v1beta/models/sim:generateContent", {"contents": [{"role": "user", "parts": [{"text": SAY}]}]}),
    "completions": ("/v1/completions", {"model": "sim", "prompt": SAY}),
}


async def spent(rig, session="s"):
    found = [incident for incident in (await rig.info(session))["incidents"] if incident["kind"] == "budget-spent"]
    assert not any(incident["hole"] for incident in found)
    return [incident["detail"] for incident in found]


async def key_for(rig, session="s", **more):
    async with rig.http.post(f"{rig.url}{API}/keys", json={"session": session, **more}) as answer:
        return answer.status, await answer.json()


async def raw(rig, dialect, *, stream=False, **headers):
    path, body = CALLS[dialect]
    if dialect == "gemini":
        path = path.replace(":generateContent", ":streamGenerateContent?alt=sse") if stream else path
    else:
        body = {**body, "stream": stream}
    async with rig.http.post(rig.url + path, json=body, headers={HEADER: "s", **headers}) as answer:
        assert answer.status == 200
        assert answer.content_type == ("text/event-stream" if stream else "application/json")
        return await answer.text()


def asked(rig):
    return len(rig.engine.requests), len(rig.engine.completions)


@STREAMS
@pytest.mark.parametrize("dialect", CALLS)
async def test_the_episode_ends_in_the_dialects_own_words(dialect, stream):
    async with proxied(max_calls=1) as rig:
        await raw(rig, dialect, stream=stream)
        before = asked(rig)
        said = await raw(rig, dialect, stream=stream)
        assert LAST_WORDS in said
        assert asked(rig) == before  # nothing was sampled
        assert {"messages": '"end_turn"', "gemini": '"STOP"', "responses": '"completed"'}.get(dialect, '"stop"') in said
        assert await spent(rig) == ["1 calls: stopped call no. 1"]
        assert len(await rig.turns()) == 1
        info = await rig.info()
        assert (info["open_calls"], info["complete"]) == ([], True)
        await rig.check()


async def test_the_body_is_that_of_a_reply(rig):
    """Member for member what the engine would send, so that a strict reader takes it."""
    _, said = await key_for(rig, budget={"calls": 1})
    key = {"Authorization": f"Bearer {said['key']}"}
    for dialect in ("chat", "completions"):
        genuine = json.loads(await raw(rig, dialect))
        if dialect == "chat":
            await raw(rig, dialect, **key)
        ours = json.loads(await raw(rig, dialect, **key))
        assert set(ours) <= set(genuine)
        (choice,) = ours["choices"]
        assert set(choice) <= set(genuine["choices"][0])
        assert (choice["finish_reason"], choice.get("message", {}).get("tool_calls", [])) == ("stop", [])
        assert ours["object"] == genuine["object"]
        assert ours["model"] == genuine["model"]


async def test_every_requested_choice_is_returned():
    async with proxied(max_calls=1) as rig:
        await rig.say("s", [user(SAY)])
        _, whole = await rig.post("s", messages=[user(SAY)], n=3)
        assert [(choice["index"], choice["message"]["content"]) for choice in whole["choices"]] == [(i, LAST_WORDS) for i in range(3)]
        _, chunks = await rig.post("s", messages=[user(SAY)], n=3, stream=True, stream_options={"include_usage": True})
        ended = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"] == "stop"]
        assert ended == [0, 1, 2]
        assert chunks[-1]["usage"]["completion_tokens"] == 0
        _, absurd = await rig.post("s", messages=[user(SAY)], n=10**9)
        assert 0 < len(absurd["choices"]) < 1000


async def test_tokens():
    async with proxied(max_tokens=20) as rig:
        messages = [user("EPISODE:demo")]
        said = []
        for _ in range(4):
            message = await rig.say("s", messages, tools=TOOLS)
            said.append(message["content"])
            messages += [echo(message), *results(message)]
        turns = await rig.turns()
        sampled = [turn["completion_tokens"] for turn in turns]
        assert sum(sampled) >= 20
        assert sum(sampled[:-1]) < 20  # the call that went over it ran to its end
        assert said[len(turns) :] == [LAST_WORDS] * (4 - len(turns))
        assert (await spent(rig))[0] == f"20 tokens ({sum(sampled)} were sampled): stopped call no. 1"
        assert all(not turn["replaced"] for turn in turns)
        await rig.check()


async def test_seconds():
    async with proxied(max_seconds=3600) as rig:
        message = await rig.say("s", [user(SAY)])
        rig.store._sessions["s"].created -= 3601
        again = await rig.say("s", [user(SAY), echo(message), user("go on")], stream=True)
        assert again["content"] == LAST_WORDS
        assert (await rig.say("other", [user(SAY)]))["content"] != LAST_WORDS
        assert (await spent(rig))[0].startswith("3600 seconds (3601.")
        await rig.check()


async def test_calls_that_come_at_once_at_the_bound():
    async with proxied(max_calls=4) as rig:
        rig.engine.token_delay = 0.001
        said = await asyncio.gather(*(rig.say("s", [user(f"{SAY} {n}")], stream=n % 2 == 0) for n in range(10)))
        assert sum(message["content"] == LAST_WORDS for message in said) == 6
        assert len(rig.ground_truth("s")) == 4
        assert len(await spent(rig)) == 6
        await rig.check()


async def test_a_key_wins_over_the_server_limit_by_limit():
    async with proxied(max_calls=1, max_tokens=10**6) as rig:
        status, said = await key_for(rig, "own", budget={"calls": 2})
        assert (status, said["budget"]) == (201, {"calls": 2})
        _, free = await key_for(rig, "free", budget={"calls": 0, "tokens": 1})
        for key, calls in ((said["key"], 2), (free["key"], 1), ("tcs-usual", 1)):
            heard = []
            for _ in range(4):
                async with rig.http.post(rig.url + CHAT, json=CALLS["chat"][1], headers={"Authorization": f"Bearer {key}"}) as answer:
                    heard.append((await answer.json())["choices"][0]["message"]["content"] == LAST_WORDS)
            assert heard == [False] * calls + [True] * (4 - calls)
        assert (await spent(rig, "free"))[0].startswith("1 tokens")  # its calls have no limit


WRONG = [
    {"calls": -1}, {"calls": 1.5}, {"calls": True}, {"calls": "5"}, {"calls": 10**30}, {"seconds": -0.5}, {"tokens": {}},
    [5], 5, "x",
]  # fmt: skip


@pytest.mark.parametrize("budget", WRONG, ids=str)
async def test_a_wrong_budget_is_no_key(rig, budget):
    status, said = await key_for(rig, budget=budget)
    assert status == 400
    assert "budget" in said["error"]["message"]


async def test_a_harness_that_asks_for_ever_does_not_fill_the_record():
    async with proxied(max_calls=1) as rig:
        for _ in range(100):
            await rig.say("s", [user(SAY)])
        found = await spent(rig)
        assert len(found) == ONE_BY_ONE + 2
        assert found[-1].endswith("no. 64")
        assert len(await rig.turns()) == 1


async def test_a_name_that_is_used_again_has_its_own_failure():
    """Another process deleted the session before: the calls that were stopped then do not hide those of now."""
    async with proxied(max_calls=1) as rig:
        for _ in range(ONE_BY_ONE + 1):
            await rig.say("s", [user(SAY)])
        await rig.store.delete("s", reuse=True)
        for _ in range(2):
            await rig.say("s", [user(SAY)])
        assert await spent(rig) == ["1 calls: stopped call no. 1"]
        assert (await rig.info())["outcome"] == "budget"


async def test_a_larger_budget_lets_the_session_go_on():
    """What we said ourselves is no word of the model's: behind it a new line begins, and it is trained nowhere."""
    async with proxied(max_calls=1) as rig:
        messages = [user(SAY)]
        for _ in range(2):
            message = await rig.say("s", messages)
            messages += [echo(message), user("go on")]
        assert messages[3]["content"] == LAST_WORDS
        async with proxied(store=rig.store, upstream=rig.up, max_calls=9) as larger:
            assert (await larger.say("s", messages))["content"] != LAST_WORDS
        assert len(await rig.turns()) == 2
        await rig.check()


async def test_what_is_not_recorded_is_refused_where_it_would_have_to_be_counted():
    async with proxied(max_tokens=5) as rig:
        for path, body in (("/v1/completions", {"prompt": SAY, "echo": True}), ("/inference/v1/generate", {"token_ids": [1]})):
            status, said = await rig.post("s", path, **body)
            assert status == 400
            assert "budget" in said["error"]["message"]
        assert not rig.engine.completions
        status, _ = await rig.post(None, "/v1/completions", model="sim", prompt=SAY)  # no session, no budget
        assert status == 200


async def test_a_reply_that_the_engine_dropped_does_not_count_as_a_turn():
    """The call is made again, and counts twice in the store; it was let in once, and that is enough."""
    async with proxied(max_calls=1, hold=PATIENCE) as rig:
        rig.engine.faults.append(Fault.abort(2))
        assert (await rig.say("s", [user(SAY)]))["content"] != LAST_WORDS
        assert (await rig.say("s", [user(SAY)]))["content"] == LAST_WORDS


@STREAMS
async def test_the_scripted_harness(stream):
    """It would go on for ten turns; from the fourth on there is no call to answer, and nothing breaks."""
    async with proxied(max_calls=3) as rig:
        harness = ScriptedHarness(f"{rig.url}/v1", headers={HEADER: "s"}, tools=TOOLS, streaming=stream)
        episode = await harness.run("EPISODE:demo", 10)
        assert [reply["content"] == LAST_WORDS for reply in episode.replies] == [False] * 3 + [True] * 7
        assert all((reply["tool_calls"], reply["finish_reason"]) == ([], "stop") for reply in episode.replies[3:])
        exported = await rig.check()
        assert [turn["match"] for sequence in exported["sequences"] for turn in sequence["turns"]] == ["root", "continue", "continue"]


@STREAMS
async def test_openais_sdk(stream):
    async with proxied(max_calls=2) as rig, openai.AsyncOpenAI(base_url=f"{rig.url}/s/s/v1", api_key="none") as sdk:
        for last in (False, True):
            if stream:
                chunks = [chunk async for chunk in await sdk.chat.completions.create(model="sim", messages=[user(SAY)], stream=True)]
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
                reason = next(chunk.choices[0].finish_reason for chunk in reversed(chunks) if chunk.choices)
                async with sdk.responses.stream(model="sim", input=SAY) as said:
                    async for _ in said:
                        pass
                    response = await said.get_final_response()
            else:
                whole = await sdk.chat.completions.create(model="sim", messages=[user(SAY)])
                text, reason = whole.choices[0].message.content, whole.choices[0].finish_reason
                assert whole.choices[0].message.tool_calls in (None, [])
                response = await sdk.responses.create(model="sim", input=SAY)
            assert (text == LAST_WORDS, reason) == (last, "stop")
            assert (response.output_text == LAST_WORDS, response.status) == (last, "completed")
        assert len(await rig.turns()) == 2
        await rig.check()


@STREAMS
async def test_anthropics_sdk(stream):
    async with proxied(max_calls=1) as rig, anthropic.AsyncAnthropic(base_url=f"{rig.url}/s/s", api_key="none") as sdk:
        asking = {"model": "sim", "max_tokens": 400, "messages": [user(SAY)]}
        for last in (False, True):
            if stream:
                async with sdk.messages.stream(**asking) as said:
                    message = await said.get_final_message()
            else:
                message = await sdk.messages.create(**asking)
            assert (message.content[-1].text == LAST_WORDS, message.stop_reason) == (last, "end_turn")
        await rig.check()


@STREAMS
async def test_geminis_sdk(stream):
    async with proxied(max_calls=1) as rig:
        client = genai.Client(api_key="none", http_options={"base_url": f"{rig.url}/s/s"})
        try:
            for last in (False, True):
                if stream:
                    heard = [chunk async for chunk in await client.aio.models.generate_content_stream(model="sim", contents=SAY)]
                else:
                    heard = [await client.aio.models.generate_content(model="sim", contents=SAY)]
                text = "".join(chunk.text or "" for chunk in heard)
                assert (text == LAST_WORDS, heard[-1].candidates[0].finish_reason.name) == (last, "STOP")
        finally:
            await client.aio.aclose()
        await rig.check()


async def test_a_repetition_of_what_was_answered_costs_nothing():
    """The reply got lost on its way: the SDK asks again, and is not told that the budget is used up."""
    async with proxied(max_calls=1) as rig:
        first = json.loads(await raw(rig, "chat"))
        again = json.loads(await raw(rig, "chat", **{"x-stainless-retry-count": "1"}))
        assert again["choices"][0]["message"]["content"] == first["choices"][0]["message"]["content"]
        assert await spent(rig) == []
        assert LAST_WORDS in await raw(rig, "chat", **{"x-stainless-retry-count": "0"})


async def test_repetitions_that_get_a_recorded_reply_leave_the_budget_to_others():
    async with proxied(max_calls=3) as rig:
        messages = [user(SAY)]
        for _ in range(3):
            message = await rig.say("s", messages)
            for _ in range(2):
                async with rig.http.post(
                    rig.url + CHAT, json={"model": "sim", "messages": messages}, headers={HEADER: "s", "x-stainless-retry-count": "1"}
                ) as answer:
                    assert (await answer.json())["choices"][0]["message"]["content"] == message["content"]
            messages += [echo(message), user("go on")]
        assert await spent(rig) == []
        assert (await rig.say("s", messages))["content"] == LAST_WORDS
        assert await spent(rig) == ["3 calls: stopped call no. 1"]
        assert len(await rig.turns()) == 3
