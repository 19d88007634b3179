"""Prompts whose beginning is named by a hash, on a real vLLM with the plugin: by hand, and through the proxy."""

import base64
import hashlib
import json
from itertools import pairwise

import aiohttp
import pytest
from conftest import GroundTruth, proxying
from rig.agent import Agent
from rig.exported import generations, trajectory, turns
from rig.server import MODEL

from tests.support.plugin_engine import PluginEngine
from tokencache.core import ids as core_ids
from tokencache.dialects.completion_reader import hide_tokens
from tokencache.store.memory import MemoryStore
from tokencache_vllm.prefixes import MEMBER, MISS_HEADER, PROMPT_HEADER

pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")


def sha256(tokens):
    return hashlib.sha256(core_ids.pack(tokens)).hexdigest()


def named(prefix, tail, **members):
    prefixed = {"hash": sha256(prefix), "length": len(prefix)} if prefix else {}
    return {**prefixed, "tail": base64.b64encode(core_ids.pack(tail)).decode(), **members}


class Engine:
    def __init__(self, http, url):
        self.http, self.url = http, url
        self.events = []

    async def ask(self, messages, member=None, *, stream=False, **fields):
        """Status, headers, the ids of the prompt if they are returned, and the ids and log probabilities of the reply."""
        body = {
            "model": MODEL,
            "messages": messages,
            "return_token_ids": True,
            "logprobs": True,
            "max_tokens": 200,
            "temperature": 0,
            **fields,
        }
        if member is not None:
            body["kv_transfer_params"] = {MEMBER: member}
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body | {"stream": stream}) as answer:
            raw = await answer.read()
        self.events = [event + b"\n\n" for event in raw.split(b"\n\n") if event]
        if not stream or answer.status != 200:
            chunks = [json.loads(raw)]
        else:
            chunks = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith(b"data: {")]
        prompts = [chunk["prompt_token_ids"] for chunk in chunks if chunk.get("prompt_token_ids")]
        prompts += [core_ids.unpack(base64.b64decode(chunk["tokencache"]["prompt"])) for chunk in chunks if chunk.get("tokencache")]
        choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
        packed = [choice["tokencache"] for choice in choices if choice.get("tokencache")]
        if packed:
            assert not any(choice.get("token_ids") or choice.get("logprobs") for choice in choices)
            found = [[base64.b64decode(one[name]) for one in packed] for name in ("ids", "logprobs")]
            values = [value for some in found[1] for value in core_ids.unpack_logprobs(some)]
            return answer.status, answer.headers, prompts[0] if prompts else None, (core_ids.unpack(b"".join(found[0])), values)
        reply = [token for choice in choices for token in choice.get("token_ids") or ()]
        entries = [entry for choice in choices if choice.get("logprobs") for entry in choice["logprobs"]["content"]]
        return answer.status, answer.headers, prompts[0] if prompts else None, (reply, [entry["logprob"] for entry in entries])

    async def tail(self, messages):
        """The ids that follow the last reply, rendered."""
        ends = []
        for words in ("one", "two"):
            conversation = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": words}, messages[-1]]
            async with self.http.post(f"{self.url}/tokenize", json={"model": MODEL, "messages": conversation}) as answer:
                ends.append((await answer.json())["tokens"])
        same = next(at for at, (one, other) in enumerate(zip(*(end[::-1] for end in ends), strict=False)) if one != other)
        return ends[0][len(ends[0]) - same :][1:]  # without the reply's own end of turn


@pytest.fixture
async def engine(vision_server):
    async with aiohttp.ClientSession() as http:
        yield Engine(http, vision_server.url)


def opening(words):
    return [{"role": "user", "content": words}]


@pytest.mark.parametrize("stream", [False, True])
async def test_turns_that_name_the_one_before_use_its_exact_ids(engine, stream):
    messages = opening(f"EPISODE:see What do you see? {stream}")
    status, headers, prompt, (reply, logprobs) = await engine.ask(messages, {}, stream=stream)
    assert (status, headers[PROMPT_HEADER]) == (200, sha256(prompt))
    for turn in range(3):
        messages += [{"role": "assistant", "content": "…"}, {"role": "user", "content": f"And number {turn}?"}]
        prefix, tail = prompt + reply, await engine.tail(messages)
        prompt = prefix + tail
        status, headers, echo, (reply, logprobs) = await engine.ask(messages, named(prefix, tail), stream=stream)
        assert (status, headers.get(PROMPT_HEADER), echo) == (200, sha256(prompt), None)
        assert len(reply) == len(logprobs) > 0
        whole = await engine.ask(messages, named([], prompt, echo=True), stream=stream)
        assert whole[2] == prompt, "prefix and tail are the same prompt as the whole"
        short = [{"role": "user", "content": "any message"}]
        again = await engine.ask(short, named(prefix, tail, calls=2, packed=True), stream=stream)
        assert again[1][PROMPT_HEADER] == sha256(prompt)
        assert len(again[3][0]) == len(again[3][1]) > 0
        assert all(value <= 0 for value in again[3][1])
        assert (await engine.ask(short, named(prefix, tail, echo=True, packed=True), stream=stream))[2] == prompt
        if stream:
            hidden = [hide_tokens(event) for event in engine.events if b'"ids":' in event]
            assert sum(event is None for event in hidden) <= 2, "all chunks with tokens but the first and the last are plain"


async def test_a_prefix_that_the_server_does_not_have_is_a_miss(engine):
    status, headers, _, _ = await engine.ask(opening("EPISODE:see Hi."), named([1, 2, 3], [4]))
    assert (status, headers[MISS_HEADER]) == (400, "miss")
    assert PROMPT_HEADER not in headers


async def test_ids_out_of_vocabulary_and_media_are_refused(engine):
    status, headers, _, _ = await engine.ask(opening("EPISODE:see Hi."), named([], [2**30]))
    assert status == 400
    assert MISS_HEADER not in headers
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    status, *_ = await engine.ask([{"role": "user", "content": [image]}], named([], [1, 2]))
    assert status == 400


async def test_without_the_member_answers_are_vllms_own(engine):
    status, headers, prompt, _ = await engine.ask(opening("EPISODE:see Hello."))
    assert (status, PROMPT_HEADER in headers) == (200, False)
    assert prompt


TURNS = 5


@pytest.fixture
async def proxied(vision_server):
    async with proxying(vision_server.url, MemoryStore()) as found:
        (capability,) = {model.model: model for model in found.proxy.engine.capabilities}.values()
        assert (capability.prefixes, capability.prefixes_why) == (True, "")
        yield found


async def counted(proxied):
    """How many prompts were named by their prefix, sent whole, and missed by the engine."""
    async with proxied.http.get(f"{proxied.url}/metrics") as answer:
        lines = [line.split() for line in (await answer.text()).splitlines() if line.startswith("tokencache_prefixes_total{")]
    counts = {line[0].split('"')[1]: int(float(line[1])) for line in lines}
    return [counts.get(how, 0) for how in ("named", "whole", "missed")]


async def assert_exact(proxied, log, session):
    """In the engine's own log every turn extends the one before, and the export has exactly these ids."""
    logged = await log.read_new_episodes()
    assert len(logged) == TURNS
    for (prompt, sampled), (later, _) in pairwise(logged):
        assert later[: len(prompt) + len(sampled)] == prompt + sampled
    assert [turn["match"] for turn in await turns(proxied, session)] == ["root", *["continue"] * (TURNS - 1)]
    exported = await trajectory(proxied, session)
    assert (exported["complete"], exported["incidents"]) == (True, [])
    assert [(list(prompt), list(sampled)) for prompt, sampled, _ in generations(exported)] == logged


@pytest.mark.parametrize("manner", ["whole", "stream", "forgetful"])
@pytest.mark.parametrize("dialect", ["chat", "messages", "responses", "gemini"])
async def test_every_turn_of_a_session_is_exact(vision_server, proxied, dialect, manner):
    log, before = GroundTruth(proxied, vision_server), await counted(proxied)
    await log.read_new()
    talker = Agent(proxied.url, f"{dialect}-{manner}", forgetful=manner == "forgetful")
    talker.say("EPISODE:spoken please")
    for n in range(TURNS):
        await talker.turn(dialect, stream=manner == "stream" or (manner == "forgetful" and n % 2 == 1))
    await talker.close()
    await assert_exact(proxied, log, talker.session)
    assert [now - then for now, then in zip(await counted(proxied), before, strict=True)] == [TURNS - 1, 0, 0]


async def test_a_prefix_that_the_engine_never_kept_is_sent_whole(vision_server, proxied):
    """The first call of the session is made without the plugin."""
    before, messages, headers = await counted(proxied), opening("EPISODE:spoken please"), {"X-Tokencache-Session": "unkept"}
    for more in ({"truncate_prompt_tokens": -1}, {}, {}):
        body = {"model": MODEL, "messages": messages, **more}
        async with proxied.http.post(f"{proxied.url}/v1/chat/completions", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            said = (await answer.json())["choices"][0]["message"]
        calls = [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in said.get("tool_calls") or ()]
        messages += [said, *calls, *([] if calls else opening("go on"))]
    assert [turn["match"] for turn in await turns(proxied, "unkept")] == ["root", "continue", "continue"]
    assert [now - then for now, then in zip(await counted(proxied), before, strict=True)] == [1, 1, 1]


REQUESTS = {
    "rendered": {},
    "rendered, packed": {"packed": True},
    "ids": named([], [5, 6, 7]),
    "ids, packed": named([], [5, 6, 7], packed=True),
    "ids, echo": named([], [5, 6, 7], echo=True),
    "a miss": named([1, 2, 3], [4]),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", REQUESTS)
async def test_the_simulated_engine_answers_alike(engine, name, stream):
    """The same status, the same headers of the plugin, and the same members in every part of the answer."""
    simulated = PluginEngine(model=MODEL, prefixes=True)
    found = []
    async with simulated.serve() as url:
        for place in (engine.url, url):
            body = {"model": MODEL, "messages": opening("Say something."), "return_token_ids": True, "logprobs": True, "stream": stream}
            body |= {"max_tokens": 5, "ignore_eos": True, "kv_transfer_params": {MEMBER: REQUESTS[name]}}
            async with engine.http.post(f"{place}/v1/chat/completions", json=body) as answer:
                raw = await answer.read()
                headers = {header for header in (PROMPT_HEADER, MISS_HEADER) if header in answer.headers}
            parts = [json.loads(line.removeprefix(b"data: ")) for line in raw.split(b"\n\n") if line not in {b"", b"data: [DONE]"}]
            found.append((answer.status, headers, members_of(parts)))
    assert found[0] == found[1]
    assert found[0][0] == (400 if name == "a miss" else 200)


def members_of(parts):
    """The members of the choices that have a value, each kind of part once, and whether the prompt's ids are there."""
    kinds = []
    for part in parts:
        members = [sorted(name for name, value in choice.items() if value is not None) for choice in part.get("choices", ())]
        packed = [sorted(choice.get("tokencache") or ()) for choice in part.get("choices", ())]
        echo = sorted(part.get("tokencache") or ()), bool(part.get("prompt_token_ids"))
        kind = (sorted(part.get("error", ())), members, packed, echo)
        if kind not in kinds:
            kinds.append(kind)
    return kinds
