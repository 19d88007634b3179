"""The export equals the engine's ground-truth log: every token, every log probability, each once, whatever harnesses do.

The checks are in `kit.Rig.check`. So that they cannot pass by never splicing, what happened is counted, too: most turns
must be continued token for token, and each way for a prompt to come about must have occurred.
"""

import asyncio
import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.core.settings import _COMMON
from tests.proxy.kit import EPISODES, TOOLS, Rig, echo, proxied, results, user
from tests.proxy.traffic import Harness
from tests.support.plugin_engine import PluginEngine
from tests.support.profiles import examples
from tokencache.testing import SimulatedEngine
from tokencache.testing.prompt import media_parts

KNOWN = {
    "",
    "unrecognised-reply",
    "rewritten-reply",
    "ambiguous-reply",
    "foreign-reply",
    "context-edited",
    "rendered-alike",
    "opener-unknown",
    "past-changes",
}
"""Reasons that such traffic gives; none of them is a failure of ours."""


NO_THOUGHT = "<think>\n\n</think>\n\n"
"""Stands in the template's generation prompt, or before a reply behind the last question, and is taken out once the reply is history."""


def with_pixels(engine, body):
    """A request with the pixels of the images that it only names, from the request that brought them."""
    if all(part.get("image_url", part) is not None for part in media_parts(body["messages"])):
        return body
    parts = [part for request in engine.requests for part in media_parts(request["messages"])]
    known = {part["uuid"]: part for part in parts if part.get("image_url") and "uuid" in part}
    messages = [
        message | {"content": [known[part["uuid"]] if "image_url" in part and part["image_url"] is None else part for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in body["messages"]
    ]
    return body | {"messages": messages}


def assert_faithful(rig: Rig, session: str, exported: dict) -> None:
    """What stands between and behind the model's own tokens is what the template writes for the harness's messages.

    But for `NO_THOUGHT`: a respliced history keeps it where it stood when the reply behind it was sampled.
    """
    engine = rig.engine
    bodies = {headers.get("X-Request-ID"): body for headers, body in zip(engine.headers, engine.requests, strict=True)}
    asked = {tuple(entry.prompt_ids): bodies[entry.request_id.removeprefix("chatcmpl-")] for entry in rig.ground_truth(session)}
    ends = {turn["turn"]: turn["prompt_tokens"] + turn["completion_tokens"] for s in exported["sequences"] for turn in s["turns"]}
    for sequence in exported["sequences"]:
        for turn in sequence["turns"]:
            prompt = sequence["token_ids"][: turn["completion"][0]]
            body = asked[tuple(prompt)]
            rendered = engine._render(with_pixels(engine, body), body.get("chat_template_kwargs") or {})
            if turn["match"] in {"root", "plain"}:
                assert prompt == rendered
                continue
            own = [(0, ends[turn["parent"]])] if turn["parent"] else [(a["start"], a["end"]) for a in turn["anchors"]]
            text, at = engine.tokenizer.decode(rendered).replace(NO_THOUGHT, ""), 0
            for (_, start), (end, _) in itertools.pairwise([*own, (len(prompt), 0)]):
                between = engine.tokenizer.decode(prompt[start:end]).removeprefix("<|im_end|>").replace(NO_THOUGHT, "")
                at = text.find(between, at)
                assert at >= 0, (turn, between)
                at += len(between)
            assert text.endswith(between)


async def let_loose(engine: PluginEngine, seed: int, sessions: int, steps: int, **settings):
    """Many harnesses at once; returns how the turns came about and what the harnesses did."""
    matches, reasons, did = Counter(), Counter(), Counter()
    async with proxied(engine, **settings) as rig:
        harnesses = [Harness(rig, f"s{i}", seed) for i in range(sessions)]
        await asyncio.gather(*(harness.run(steps) for harness in harnesses))
        assert (
            len(engine.ground_truth) - sum(len(rig.ground_truth(h.session)) for h in harnesses) < 40
        )  # the probe's own; the rest is checked
        for harness in harnesses:
            exported = await rig.check(harness.session)
            assert exported["complete"], exported["incidents"]
            if not engine.prefixes.offered:  # prompts by hash have no messages to compare with
                assert_faithful(rig, harness.session, exported)
            assert {incident["kind"] for incident in exported["incidents"]} <= {"engine-refused", "retry-joined"}
            turns = await rig.turns(harness.session)
            matches.update(turn["match"] for turn in turns)
            reasons.update(turn["reason"] for turn in turns)
            did.update(harness.did)
    return matches, reasons, did


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param({}, id="token by token", marks=pytest.mark.whole),
        pytest.param({"chunk_tokens": 3, "strict_arguments": True}, id="three at a time"),
    ],
)
async def test_many_sessions_of_every_kind_of_traffic(engine):
    matches, reasons, did = await let_loose(PluginEngine(seed=3, drift=0.4, **engine), seed=11, sessions=8, steps=16)
    assert set(reasons) <= KNOWN, reasons
    assert min(matches[kind] for kind in ("root", "continue", "branch", "resplice", "plain")) >= 4, matches
    assert matches["continue"] > 0.4 * matches.total(), matches
    assert matches["plain"] < 0.3 * matches.total(), (matches, reasons)
    assert min(did.values()) >= 1, did


@pytest.mark.whole
async def test_many_sessions_whose_prompts_are_named_by_a_hash():
    engine = PluginEngine(seed=3, drift=0.4, prefixes=True)
    matches, reasons, _ = await let_loose(engine, seed=11, sessions=8, steps=16)
    assert set(reasons) <= KNOWN, reasons
    assert matches["continue"] > 0.4 * matches.total(), matches
    assert engine.prefixes.hits > 0.8 * matches["continue"], "branches and edited histories begin elsewhere"


@hypothesis_settings(max_examples=examples(6), **_COMMON)
@given(seed=st.integers(0, 10**6), drift=st.sampled_from([0.0, 0.2, 1.0]))
def test_any_traffic(seed, drift):
    _, reasons, _ = asyncio.run(let_loose(PluginEngine(seed=seed, drift=drift), seed=seed, sessions=2, steps=10))
    assert set(reasons) <= KNOWN, reasons


@pytest.mark.parametrize("stream", [False, True])
async def test_a_plain_conversation_is_one_sequence(rig, stream):
    messages = [user("EPISODE:demo")]
    for _ in range(6):
        message = await rig.say("s", messages, tools=TOOLS, stream=stream)
        messages += [echo(message), *results(message)]
    exported = await rig.check()
    assert exported["complete"]
    assert [turn["match"] for turn in exported["sequences"][0]["turns"]] == ["root"] + ["continue"] * 5
    assert len(exported["sequences"]) == 1
    assert [entry.ids_supplied for entry in rig.ground_truth()] == [False] + [True] * 5
    spans = [turn[part] for turn in exported["sequences"][0]["turns"] for part in ("prompt", "completion")]
    assert [a[1] for a in spans[:-1]] == [b[0] for b in spans[1:]]


async def test_a_direct_conversation_drifts(rig):
    """The world without the proxy: the same harness, and the prompts do not go on from what was sampled."""
    messages, drifted = [user("EPISODE:demo")], 0
    for _ in range(4):
        _, said = await rig.post(None, messages=messages, tools=TOOLS)
        message = said["choices"][0]["message"]
        messages += [echo(message), *results(message)]
    entries = rig.engine.ground_truth[-4:]
    for before, after in itertools.pairwise(entries):
        prefix = before.prompt_ids + before.completion_ids
        drifted += after.prompt_ids[: len(prefix)] != prefix
    assert drifted == 3


async def test_the_same_words_in_two_sessions_never_share_tokens():
    """Sibling rollouts say the same with other tokens: each goes on from its own."""
    async with proxied(SimulatedEngine(episodes=EPISODES, drift=0.9)) as rig:
        names = [f"r{i}" for i in range(8)]

        async def roll(name):
            messages = [user("EPISODE:talk")]
            for _ in range(3):
                message = await rig.say(name, messages)
                messages += [{"role": "assistant", "content": message["content"]}, user("go on")]

        await asyncio.gather(*map(roll, names))
        firsts = set()
        for name in names:
            exported = await rig.check(name)
            assert [len(sequence["turns"]) for sequence in exported["sequences"]] == [3]
            firsts.add(tuple(rig.ground_truth(name)[0].completion_ids))
        assert len(firsts) > 1


async def test_truncated_calls_and_bad_arguments_do_not_end_a_conversation():
    """An old engine answers 400 to every turn after a call that is no JSON; with exact ids the session lives."""
    bad = '<think>\n\n</think>\n\n<tool_call>\n{"name": "bash", "arguments": {"cmd": oops}}\n</tool_call>'
    engine = SimulatedEngine(episodes={"bad": [bad, "<think>\n\n</think>\n\nI see."]}, strict_arguments=True)
    async with proxied(engine) as rig:
        messages = [user("EPISODE:bad")]
        message = await rig.say("s", messages, tools=TOOLS, stream=True)
        assert "oops" in message["tool_calls"][0]["function"]["arguments"]
        messages += [echo(message), *results(message, "no JSON")]
        assert (await rig.post(None, messages=messages, tools=TOOLS))[0] == 400
        assert (await rig.say("s", messages, tools=TOOLS, stream=True))["content"].strip() == "I see."
        exported = await rig.check()
        assert [len(sequence["turns"]) for sequence in exported["sequences"]] == [2]
