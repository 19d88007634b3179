"""Prompts by hash through the proxy: what engines get, what harnesses get, and that a wrong cache never counts as the exact prompt."""

import json
import random

import pytest

from tests.proxy.kit import CHAT, EPISODES, TOOLS, echo, proxied, results, user
from tests.support.pairwise import seeds
from tests.support.plugin_engine import PluginEngine
from tests.support.plugin_engine.prefixes import PrefixFault
from tests.support.waiting import PATIENCE
from tokencache import metrics

WORDS = "many words of a long tool result " * 40


def remembering(**options):
    return PluginEngine(episodes=EPISODES, seed=7, prefixes=True, **options)


def transfer(engine, n=-1):
    """The member of a request that names its prompt."""
    return (engine.requests[n].get("kv_transfer_params") or {}).get("tokencache_prefix")


async def grow(rig, messages, session="s", **more):
    """Another turn of a conversation, with a long tool result after it."""
    messages.append(echo(await rig.say(session, messages, tools=TOOLS, **more)))
    messages += results(messages[-1], WORDS)


async def recorded_is_true(rig, session="s"):
    """Every recorded turn is a generation of the engine, id by id."""
    said = {(tuple(entry.prompt_ids), tuple(entry.completion_ids)) for entry in rig.engine.ground_truth}
    exported = await rig.exported(session)
    for sequence in exported["sequences"]:
        for turn in sequence["turns"]:
            start, end = turn["completion"]
            assert (tuple(sequence["token_ids"][:start]), tuple(sequence["token_ids"][start:end])) in said, turn
    return exported


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_do_not_grow_with_the_conversation(stream):
    async with proxied(remembering()) as rig:
        messages, sizes = [user("EPISODE:demo go")], []
        for _ in range(12):
            await grow(rig, messages, stream=stream)
            sizes.append(len(json.dumps(rig.engine.requests[-1])))
        assert max(sizes[3:]) < min(sizes[3:]) + 20 < 1000, "the first ones bring long results"
        assert all(set(transfer(rig.engine, n)) >= {"hash", "length", "tail"} for n in range(-11, 0))
        assert transfer(rig.engine)["calls"] == sum(len(message.get("tool_calls", ())) for message in messages[:-2])
        assert rig.engine.prefixes.misses == 1, "that of the probe"
        assert {turn["match"] for turn in (await rig.turns())[1:]} == {"continue"}
        exported = await rig.check()
        assert exported["complete"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_has_forgotten_gets_all_ids_once(stream):
    async with proxied(remembering()) as rig:
        messages = [user("EPISODE:demo go")]
        await grow(rig, messages, stream=stream)
        await grow(rig, messages, stream=stream)
        rig.engine.prefixes.kept.clear()
        await grow(rig, messages, stream=stream)
        assert "hash" in transfer(rig.engine, -2)
        assert transfer(rig.engine).keys() == {"tail", "calls", "echo", "packed"}
        await grow(rig, messages, stream=stream)
        assert "hash" in transfer(rig.engine)
        assert rig.engine.requests[-2]["kv_transfer_params"] != rig.engine.requests[-1]["kv_transfer_params"]
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue", "continue", "continue"]
        assert (await rig.info())["incidents"] == []
        await rig.check()


async def test_a_harness_sees_nothing_of_it():
    async with proxied(remembering()) as rig:
        for asked in (
            {},
            {"return_token_ids": True},
            {"logprobs": True},
            {"stream": True},
            {"stream": True, "return_token_ids": True},
            {"n": 2},
        ):
            name = f"s{asked}".translate(str.maketrans("", "", " {}':,"))
            messages = [user("EPISODE:demo go")]
            await grow(rig, messages, name)
            body = {"model": "sim", "messages": messages, "tools": TOOLS, **asked}
            async with rig.http.post(rig.url + CHAT, json=body, headers={"X-Tokencache-Session": name}) as answer:
                text = await answer.text()
                assert not [header for header in answer.headers if header.lower().startswith("x-tokencache-p")]
            assert "tokencache" not in text.replace(name, "")
            assert ('"prompt_token_ids":[' in text) is asked.get("return_token_ids", False)
            assert ('"token_ids":[' in text) is asked.get("return_token_ids", False)
            assert ('"logprob":' in text) is asked.get("logprobs", False)
            assert "hash" in transfer(rig.engine)
            await rig.check(name)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", [PrefixFault.OTHER_IDS, PrefixFault.NOT_THERE])
async def test_an_answer_to_another_prompt_is_not_used(fault, stream):
    async with proxied(remembering()) as rig:
        messages = [user("EPISODE:demo go")]
        await grow(rig, messages, stream=stream)
        rig.engine.prefixes.fault = fault
        await grow(rig, messages, stream=stream)
        exact = rig.engine.ground_truth[-1]
        assert exact.ids_supplied
        assert transfer(rig.engine) is None
        (incident,) = (await rig.info())["incidents"]
        assert (incident["kind"], incident["hole"]) == ("prefix-differs", False)
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue"]
        assert (await recorded_is_true(rig))["complete"]
        await grow(rig, messages, stream=stream)
        assert transfer(rig.engine) is None, "the engine was probed again, and failed"
        assert len(rig.engine.requests[-1]["messages"]) == len(messages) - 2
        assert (await recorded_is_true(rig))["complete"]


async def test_a_plugin_that_refuses_is_not_asked_again():
    async with proxied(remembering()) as rig:
        messages = [user("EPISODE:demo go")]
        await grow(rig, messages)
        rig.engine.prefixes.fault = PrefixFault.REFUSED
        await grow(rig, messages)
        await grow(rig, messages)
        assert transfer(rig.engine) is None
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue", "continue"]
        await rig.check()


async def test_a_refusal_for_another_reason_is_the_harnesss():
    async with proxied(remembering()) as rig:
        messages = [user("EPISODE:demo go")]
        await grow(rig, messages)
        status, said = await rig.post(messages=messages, tools=TOOLS, temperature=-1)
        assert status == 400
        assert "temperature" in said["error"]["message"]
        assert "hash" in transfer(rig.engine, -2)
        assert rig.engine.requests[-1]["messages"] == messages, "as the harness wrote it"


async def test_a_false_hash_is_found_by_comparing_ids(monkeypatch):
    """A plugin that uses other ids than it says: one of 256 answers has the ids, too."""
    monkeypatch.setattr("tokencache.engine.prefixes.ECHO_EVERY", 3)
    async with proxied(remembering()) as rig:
        messages = [user("EPISODE:demo go")]
        await grow(rig, messages)
        await grow(rig, messages)
        rig.engine.prefixes.fault = PrefixFault.FALSE_HASH
        for _ in range(3):
            await grow(rig, messages)
        incidents = [incident["kind"] for incident in (await rig.info())["incidents"]]
        assert "engine-disagrees" in incidents
        with pytest.raises(AssertionError):
            await recorded_is_true(rig)


@pytest.mark.parametrize("more", [{"echo": True}, {"add_generation_prompt": False}])
async def test_requests_that_the_plugin_would_refuse_are_as_without_it(more):
    async with proxied(remembering()) as rig:
        await rig.post(messages=[user("EPISODE:demo go")], **more)
        assert transfer(rig.engine) is None


@pytest.mark.parametrize("derenders", [False, True], ids=["stock", "scale-out"])
async def test_a_call_that_hides_its_reasoning_and_offers_tools_is_named_where_no_grammar_binds_it(derenders):
    async with proxied(remembering(derenders=derenders)) as rig:
        messages = [user("EPISODE:demo go")]
        for _ in range(3):
            await grow(rig, messages, include_reasoning=False)
        assert all("hash" in transfer(rig.engine, n) for n in (-2, -1))
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue", "continue"]
        await recorded_is_true(rig)


async def test_a_bound_call_gets_all_its_ids_by_the_route_that_binds_it():
    async with proxied(remembering(derenders=True)) as rig:
        messages = [user("EPISODE:demo go")]
        for more in ({}, {"tool_choice": "required"}, {}):
            await grow(rig, messages, include_reasoning=False, **more)
        (sent,) = rig.engine.generated
        assert sent["token_ids"] == rig.engine.ground_truth[-2].prompt_ids
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue", "continue"]
        assert (await recorded_is_true(rig))["incidents"] == []


async def test_what_is_saved_is_counted():
    def counted(name, **labels):
        return metrics.REGISTRY.get_sample_value(name, labels) or 0

    before = {how: counted("tokencache_prefixes_total", how=how) for how in ("named", "missed", "whole")}
    saved = counted("tokencache_prefix_saved_bytes_total")
    async with proxied(remembering()) as rig:
        messages = [user("EPISODE:demo go")]
        for _ in range(3):
            await grow(rig, messages)
        rig.engine.prefixes.kept.clear()
        await grow(rig, messages)
    after = {how: counted("tokencache_prefixes_total", how=how) - before[how] for how in before}
    assert after == {"named": 2, "missed": 1, "whole": 1}
    assert counted("tokencache_prefix_saved_bytes_total") > saved + 1000


@pytest.mark.parametrize("seed", seeds(1, 12))
async def test_whatever_the_cache_does_every_recorded_turn_is_the_engines(seed):
    """Sessions run side by side while the engine forgets, mixes up and loses what it keeps."""
    rng = random.Random(seed)
    async with proxied(remembering(derenders=True), hold=PATIENCE) as rig:
        kept = rig.engine.prefixes.kept
        talks = {f"s{n}": [user(f"EPISODE:{'demo' if n % 2 else 'talk'} {n}")] for n in range(4)}
        for _ in range(20):
            name = rng.choice([*talks])
            match rng.randrange(8):
                case 0:
                    kept.clear()
                case 1 if kept:
                    kept[rng.choice([*kept])] = rng.choice([*kept.values()])
                case 2 if kept:
                    wrong = kept[rng.choice([*kept])]
                    wrong[rng.randrange(len(wrong))] ^= 1
                case 3 if len(talks[name]) > 1:
                    talks[name] = talks[name][: -rng.choice([1, 2])] or talks[name]  # a branch
            if talks[name][-1]["role"] == "assistant":
                talks[name].append(user("go on"))
            await grow(rig, talks[name], name, stream=rng.random() < 0.5)
        for name in talks:
            if (await rig.turns(name)) if any(entry.session == name for entry in rig.engine.ground_truth) else []:
                exported = await recorded_is_true(rig, name)
                assert exported["complete"], exported["incidents"]


async def test_routed_experts_are_sent_only_if_they_are_kept(tmp_path):
    for folder, kept in ((None, 0), (tmp_path, 2)):
        async with proxied(remembering(routed_experts=(2, 2)), **({"experts": str(folder)} if folder else {})) as rig:
            messages = [user("EPISODE:demo go")]
            await grow(rig, messages)
            await grow(rig, messages)
            assert transfer(rig.engine).get("experts", False) is bool(kept)
            assert len([*tmp_path.rglob("*.npy")]) == kept
            assert (await rig.check())["complete"]
