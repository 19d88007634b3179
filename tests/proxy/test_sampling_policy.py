"""A sampling policy: what is pinned is what is sent, whatever a harness asks for in whatever dialect; what it had asked is kept."""

import json
import os
import subprocess
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.proxy.kit import CHAT, HEADER, TOOLS, echo, proxied, results, user
from tests.support.waiting import PATIENCE
from tokencache.core.lineage import sequences
from tokencache.testing import SimulatedEngine

API = "/tokencache/v1"
SAY = "EPISODE:talk"
SERVER = {"temperature": 1.0, "top_p": 1, "max_tokens": 400}


async def key_for(rig, session="s", **more):
    async with rig.http.post(f"{rig.url}{API}/keys", json={"session": session, **more}) as answer:
        return answer.status, await answer.json()


async def ask(rig, path, body, key=None, session="s"):
    headers = {"Authorization": f"Bearer {key}"} if key else {HEADER: session}
    async with rig.http.post(rig.url + path, json=body, headers=headers) as answer:
        text = await answer.text()
        assert answer.status == 200, text
        return text


def calls_of(rig):
    """What the engine was asked by the harness: the probe asks for no weight versions."""
    return [body for body in [*rig.engine.requests, *rig.engine.completions] if "return_weight_versions" in body]


DIALECTS = {
    "chat": (CHAT, {"model": "sim", "messages": [user(SAY)], "temperature": 0.2, "top_p": 0.9, "max_tokens": 100}),
    "chat, long name": (
        CHAT,
        {"model": "sim", "messages": [user(SAY)], "temperature": 0.2, "top_p": 0.9, "max_completion_tokens": 100, "max_tokens": 7},
    ),
    "chat, stream": (
        CHAT,
        {"model": "sim", "messages": [user(SAY)], "temperature": 0.2, "top_p": 0.9, "max_tokens": 100, "stream": True},
    ),
    "messages": ("/v1/messages", {"model": "sim", "messages": [user(SAY)], "temperature": 0.2, "top_p": 0.9, "max_tokens": 100}),
    "responses": ("/v1/responses", {"model": "sim", "input": SAY, "temperature": 0.2, "top_p": 0.9, "max_output_tokens": 100}),
    "gemini": (
        "/v1beta/models/sim:generateContent",
        {
            "contents": [{"role": "user", "parts": [{"text": SAY}]}],
            "generationConfig": {"temperature": 0.2, "topP": 0.9, "maxOutputTokens": 100},
        },
    ),
    "completions": ("/v1/completions", {"model": "sim", "prompt": SAY, "temperature": 0.2, "top_p": 0.9, "max_tokens": 100}),
}


@pytest.mark.parametrize("name", DIALECTS)
async def test_in_every_dialect(name):
    path, body = DIALECTS[name]
    async with proxied(sampling=SERVER) as rig:
        await ask(rig, path, body)
        (sent,) = calls_of(rig)
        assert {name: sent[name] for name in SERVER} == SERVER
        assert "max_completion_tokens" not in sent
        (turn,) = await rig.turns()
        assert {name: turn["sampling"][name] for name in SERVER} == SERVER
        assert "max_completion_tokens" not in turn["sampling"]
        assert turn["replaced"] == {"temperature": 0.2, "top_p": 0.9, "max_tokens": 100}
        await rig.check()


async def test_only_what_differs_is_replaced():
    async with proxied(sampling={**SERVER, "seed": 7}) as rig:
        await rig.say("s", [user(SAY)], temperature=1, top_p=1.0, max_completion_tokens=400, seed=None)
        (turn,) = await rig.turns()
        assert turn["replaced"] == {"seed": None}
        assert turn["sampling"] == {**SERVER, "seed": 7}


async def test_a_session_wins_over_the_server_name_by_name():
    async with proxied(sampling=SERVER) as rig:
        status, said = await key_for(rig, "own", sampling={"temperature": 0.7, "seed": 11})
        assert (status, said["sampling"]) == (201, {"temperature": 0.7, "seed": 11})
        body = {"model": "sim", "messages": [user(SAY)]}
        await ask(rig, CHAT, body, key=said["key"])
        await ask(rig, CHAT, body, session="other")
        own, other = calls_of(rig)
        assert {name: own[name] for name in (*SERVER, "seed")} == {**SERVER, "temperature": 0.7, "seed": 11}
        assert {name: other[name] for name in SERVER} == SERVER
        assert "seed" not in other


async def test_without_a_policy_nothing_is_touched(rig):
    await rig.say("s", [user(SAY)], temperature=0.3, max_completion_tokens=50)
    (sent,), (turn,) = calls_of(rig), await rig.turns()
    assert (sent["max_completion_tokens"], "max_tokens" in sent, turn["replaced"]) == (50, False, {})
    assert turn["sampling"] == {"temperature": 0.3, "max_completion_tokens": 50}


async def test_outside_a_session_nothing_is_pinned():
    async with proxied(sampling=SERVER) as rig:
        await rig.post(None, messages=[user(SAY)], temperature=0.3)
        assert rig.engine.requests[-1] == {"model": "sim", "messages": [user(SAY)], "temperature": 0.3}


async def test_a_pin_changes_no_lineage():
    """A history that was begun under one policy is continued under another: what shapes no prompt is in no chain."""
    async with proxied(sampling={"max_tokens": 400}) as rig:
        _, said = await key_for(rig, "s", sampling={"temperature": 0.5, "seed": 1})
        messages = [user("EPISODE:demo")]
        first = await rig.say("s", messages, tools=TOOLS, temperature=0.9)
        messages += [echo(first), *results(first)]
        answer = json.loads(await ask(rig, CHAT, {"model": "sim", "messages": messages, "tools": TOOLS}, key=said["key"]))
        second = answer["choices"][0]["message"]
        await rig.say("s", [*messages, echo(second), *results(second)], tools=TOOLS)
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue", "continue"]
        turns = await rig.store.turns("s")
        assert len(sequences(turns, await rig.store.tokens("s", [turn.id for turn in turns]))) == 1
        await rig.check()


async def test_a_pinned_seed_answers_the_same_prompt_alike():
    async with proxied(SimulatedEngine(seed=1), sampling={"seed": 5}) as rig:
        for session in ("a", "b"):
            await rig.say(session, [user("Say something.")])
        (one,), (other,) = rig.ground_truth("a"), rig.ground_truth("b")
        assert (one.prompt_ids, one.completion_ids) == (other.prompt_ids, other.completion_ids)


@pytest.mark.parametrize("more", [{}, {"stream": True}], ids=["whole", "stream"])
async def test_a_pin_gives_way_where_the_prompt_leaves_less_room(more):
    """The engine gives what room is left, and the reply ends with `length`: it is no error."""
    async with proxied(SimulatedEngine(seed=1, max_model_len=60), sampling={"max_tokens": 50}) as rig:
        rig.engine.replies.script = lambda _: ["one two three four five six seven " * 20]
        await rig.say("s", [user("Go on and on, please, as long as you can.")], **more)
        (turn,) = await rig.turns()
        assert (turn["finish_reason"], turn["prompt_tokens"] + turn["completion_tokens"]) == ("length", 60)
        assert turn["sampling"]["max_tokens"] == 50
        assert turn["completion_tokens"] < 50


async def test_replacements_are_counted():
    async with proxied(sampling={"temperature": 1.0}) as rig:
        before = await counted(rig)
        await rig.say("s", [user(SAY)], temperature=0.5)
        await rig.say("t", [user(SAY)], temperature=1)
        assert await counted(rig) == before + 1


async def counted(rig):
    async with rig.http.get(rig.url + "/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
    found = (s for family in families if family.name == "tokencache_sampling_replaced" for s in family.samples)
    return sum(s.value for s in found if s.labels == {"name": "temperature"})


WRONG = [
    ({"temprature": 1}, "'temprature' cannot be pinned; these can: temperature, top_p"),
    ({"temperature": "1"}, "'temperature' must be a number from 0 to 2, not 1"),
    ({"temperature": -0.1}, "from 0 to 2"),
    ({"temperature": 2.5}, "from 0 to 2"),
    ({"temperature": True}, "'temperature' must be"),
    ({"temperature": None}, "'temperature' must be"),
    ({"top_p": 0}, "above 0, at most 1"),
    ({"top_k": 1.5}, "a whole number"),
    ({"top_k": -2}, "a whole number"),
    ({"min_p": 1.1}, "from 0 to 1"),
    ({"max_tokens": 0}, "a whole number from 1"),
    ({"max_completion_tokens": 5}, "cannot be pinned"),
    ({"seed": 2**63}, "of 64 bits"),
    ({"frequency_penalty": 3}, "from -2 to 2"),
    ({"repetition_penalty": 0}, "above 0"),
]


@pytest.mark.parametrize(("policy", "words"), WRONG)
async def test_a_wrong_policy_registers_no_key(rig, policy, words):
    status, said = await key_for(rig, sampling=policy)
    assert (status, said["error"]["param"]) == (400, "sampling")
    assert words in said["error"]["message"]


@pytest.mark.parametrize(
    ("way", "given", "words"),
    [
        ("option", '{"top_p": 7}', "'top_p' must be"),
        ("environment", "{", "Expecting property name"),
        ("option", "[1]", "valid dictionary"),
        pytest.param("environment", '{"top_p": 7}', "'top_p' must be", marks=pytest.mark.whole),
        pytest.param("option", "{", "Expecting property name", marks=pytest.mark.whole),
        pytest.param("environment", "[1]", "valid dictionary", marks=pytest.mark.whole),
    ],
)
def test_a_wrong_policy_prevents_the_start(way, given, words):
    option, environment = (["--sampling", given], {}) if way == "option" else ([], {"TOKENCACHE_SAMPLING": given})
    command = [sys.executable, "-c", "from tokencache.cli import main; main()", "serve", "--port", "0", *option]
    ended = subprocess.run(
        command, env=os.environ | environment | {"COLUMNS": "200"}, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert ended.returncode != 0
    assert words in ended.stderr
    assert "sampling" in ended.stderr.lower()
    assert "Traceback" not in ended.stderr
