"""Prompts that are named by a hash: their names, which engine gets them, and what the probe finds."""

import base64
import hashlib
import random

import msgspec
import pytest

from tests.proxy.kit import proxied
from tests.support.plugin_engine import PluginEngine
from tests.support.plugin_engine.prefixes import PrefixFault
from tests.support.reading import read_chat
from tokencache.core import ids
from tokencache.dialects.chat.incremental import IncrementalParser
from tokencache.engine.prefixes import ECHO_EVERY, MISS_HEADER, PROMPT_HEADER, PrefixUse, PromptHashes, PromptName, can_be_named, is_miss
from tokencache.engine.reply import Reply

PROMPT = ids.pack(range(100))
ENGINE = "http://engine"


def sha256(packed):
    return hashlib.sha256(packed).hexdigest()


def test_a_name_has_the_hash_of_the_beginning_and_the_ids_after_it():
    name = PromptHashes().name(PROMPT, 60, echo=False)
    tail = base64.b64encode(ids.pack(range(60, 100))).decode()
    named = {"hash": sha256(ids.pack(range(60))), "length": 60, "tail": tail, "calls": 2, "echo": False, "packed": True}
    assert name.member(2, packed=True) == named
    whole = {"tail": base64.b64encode(PROMPT).decode(), "calls": 0, "echo": True, "packed": False}
    assert PromptHashes().name(PROMPT, 0, echo=True).member(0, packed=False) == whole
    assert name.whole(PROMPT) == PromptHashes().name(PROMPT, 0, echo=False)


def test_a_hash_is_continued_from_that_of_an_earlier_prompt():
    hashes, rng = PromptHashes(), random.Random(1)
    prompts = [ids.pack(rng.choices(range(3), k=rng.randrange(1, 6))) for _ in range(4)]
    for _ in range(400):
        before = rng.choice(prompts)
        known = before + ids.pack(rng.choices(range(3), k=rng.randrange(3)))
        prompt = known + ids.pack(rng.choices(range(3), k=rng.randrange(1, 3)))
        prompts.append(prompt)
        name = hashes.name(prompt, ids.count(known), rng.choice([0, 1, ids.count(before), ids.count(prompt)]), echo=False)
        assert (name.prefix, name.digest) == (sha256(known), sha256(prompt))


def test_only_the_hash_of_the_whole_prompt_proves_it():
    name = PromptHashes().name(PROMPT, 60, echo=False)
    assert name.is_proven({PROMPT_HEADER: sha256(PROMPT)})
    for other in ({}, {PROMPT_HEADER: name.prefix}, {PROMPT_HEADER: ""}):
        assert not name.is_proven(other)
    assert PromptName().is_proven({}), "the engine renders, and reports the ids"
    assert is_miss({MISS_HEADER: "miss"})
    assert not is_miss({PROMPT_HEADER: "1"})


def test_one_of_256_prompts_is_compared_id_by_id():
    use = PrefixUse()
    echoed = [use.name(ENGINE, PROMPT, (40, 60), echo=False).echo for _ in range(3 * ECHO_EVERY)]
    assert [n for n, echo in enumerate(echoed) if echo] == [0, ECHO_EVERY, 2 * ECHO_EVERY]
    assert use.name(ENGINE, PROMPT, (40, 60), echo=True).echo


def named(use, engine=ENGINE, calls=64):
    """How many of some prompts are named by their prefix."""
    return sum(bool(use.name(engine, PROMPT, (40, 60), echo=False).prefix) for _ in range(calls))


def test_an_engine_that_misses_most_prefixes_is_rarely_asked_for_one():
    use = PrefixUse()
    for _ in range(8):
        use.noted(ENGINE, hit=False)
    assert named(use) == 64 // 16
    assert named(use, "http://another") == 64
    for _ in range(8):
        use.noted(ENGINE, hit=True)
    assert named(use) == 64


def test_some_misses_do_not_matter():
    use = PrefixUse()
    for n in range(100):
        use.noted(ENGINE, hit=n % 5 != 0)
    assert named(use) == 64


def test_a_prompt_without_a_known_beginning_or_without_a_tail_is_sent_whole():
    for last_reply in ((0, 0), (40, 100)):
        name = PrefixUse().name(ENGINE, PROMPT, last_reply, echo=False)
        assert (name.prefix, name.tail) == ("", PROMPT)


@pytest.mark.parametrize(
    ("more", "can"),
    [
        ({}, True),
        ({"echo": False, "add_generation_prompt": True}, True),
        ({"add_generation_prompt": False}, False),
        ({"echo": True}, False),
        ({"truncate_prompt_tokens": 5}, False),
    ],
)
def test_what_the_plugin_would_refuse_is_not_named(more, can):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}
    assert can_be_named(read_chat(msgspec.json.encode(body), IncrementalParser())) is can


def reply_with(packed):
    reply = Reply()
    reply.add(msgspec.json.encode({"choices": [{"index": 0, "delta": {"content": "x"}, "token_ids": None, "tokencache": packed}]}))
    return reply


def encoded(data):
    return base64.b64encode(data).decode()


def test_packed_ids_and_log_probabilities_are_read():
    values = [-0.1, -2.0]
    reply = reply_with({"ids": encoded(ids.pack([7, 8])), "logprobs": encoded(ids.pack_logprobs(values))})
    assert (list(reply.choices[0].ids), list(reply.choices[0].logprobs)) == ([7, 8], values)
    assert list(reply_with({"ids": encoded(ids.pack([7])), "logprobs": ""}).choices[0].logprobs) == []


@pytest.mark.parametrize(
    "packed",
    [{"ids": "AQA="}, {"ids": "", "logprobs": "eA=="}, {"ids": "", "logprobs": "ZgA="}, {"ids": "no base64"}, {"logprobs": ""}, []],
)
def test_what_is_packed_wrongly_is_unreadable(packed):
    reply = reply_with(packed)
    assert reply.unreadable == 1
    assert not reply.choices


def echo_with(packed):
    reply = Reply()
    reply.add(msgspec.json.encode({"choices": [{"index": 0}], "prompt_token_ids": None, "tokencache": packed}))
    return reply


def test_the_packed_ids_of_the_prompt_are_read():
    prompt = echo_with({"prompt": encoded(ids.pack([1, 22, 333]))}).prompt
    assert (prompt.known, prompt.packed, prompt.tokens, prompt.raw) == (True, ids.pack([1, 22, 333]), 3, b"[1,22,333]")
    assert not prompt.agreed


@pytest.mark.parametrize("packed", [{"prompt": "AQA="}, {"prompt": "no base64"}, {"prompt": [1]}, {}, []])
def test_a_prompt_that_is_packed_wrongly_is_unreadable(packed):
    reply = echo_with(packed)
    assert (reply.unreadable, reply.prompt.known) == (1, False)


@pytest.mark.parametrize(
    ("offered", "fault", "why"),
    [
        (True, None, ""),
        (False, None, "the plugin for prefixes is not active"),
        (True, PrefixFault.OTHER_IDS, ""),
        (True, PrefixFault.NOT_THERE, "the plugin for prefixes is not active"),
        (True, PrefixFault.REFUSED, "it refuses prompts by hash"),
    ],
)
async def test_the_probe_says_whether_an_engine_takes_them(offered, fault, why):
    engine = PluginEngine(prefixes=offered)
    engine.prefixes.fault = fault
    async with proxied(engine) as rig:
        (engine_state,) = (await rig.readiness())["engines"]
        (model,) = engine_state["models"]
        works = offered and fault is None
        assert model["prefixes"] is works
        assert (why in model["prefixes_why"]) if not works and why else True
        assert bool(model["prefixes_why"]) is not works
        assert model["level"] == "exact"
