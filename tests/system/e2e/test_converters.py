"""Compares our codecs with vLLM's: the same request directly to its /v1/messages or /v1/responses, and through a session.

It also compares the simulated engine with the real one, in what matters to codecs: the same request through a proxy in front of each.
"""

import asyncio
import json

import pytest
from conftest import MAX_MODEL_LEN, proxying
from dialect_shapes import course, differences, gemini_course, outline
from dialect_table import ENDS_OTHERWISE, GEMINI, MESSAGES, OTHER_PROMPTS, RESPONSES, SHOWN, THINKS_IN_TEXT, WORK
from episodes import EPISODES
from rig.server import MODEL

from tokencache.store.memory import MemoryStore
from tokencache.testing import SimulatedEngine

REQUESTS = {"messages": MESSAGES, "responses": RESPONSES}
ROUTES = {"messages": "/v1/messages", "responses": "/v1/responses"}
COUNTS = {"messages": "/v1/messages/count_tokens", "responses": "/v1/responses/input_tokens"}
DIALECTS = pytest.mark.parametrize("dialect", REQUESTS)
WHOLE = {"messages": "message", "responses": "response"}
"""The member of an event that holds a whole answer."""
TOO_LONG = {"messages": {"messages": [{"role": "user", "content": "word " * 40_000}]}, "responses": {"input": "word " * 40_000}}
LIMITS = {"messages": "max_tokens", "responses": "max_output_tokens"}


def request(dialect, name, **more):
    """A row's request; `more` gives defaults that the row may override."""
    return {"model": MODEL, LIMITS[dialect]: 1000, **more, **REQUESTS[dialect][name]}


async def send(http, url, path, body):
    async with http.post(f"{url}{path}", json=body) as answer:
        return answer.status, answer.content_type, await answer.text()


def body_of(answer):
    """The body of a JSON answer with status 200."""
    status, kind, raw = answer
    assert (status, kind) == (200, "application/json"), answer
    return json.loads(raw)


async def gathered(calls):
    """Several calls at once, as many as the engine runs concurrently."""
    gate = asyncio.Semaphore(8)

    async def one(call):
        async with gate:
            return await call

    return await asyncio.gather(*map(one, calls))


async def pairs(proxied, dialect, **more):
    """The answers to all rows whose answers are compared: name, through the proxy, directly."""
    urls = f"{proxied.url}/s/same", proxied.vllm
    asked = [(url, request(dialect, name) | more) for name in SHOWN[dialect] for url in urls]
    answers = await gathered(send(proxied.http, url, ROUTES[dialect], body) for url, body in asked)
    return zip(SHOWN[dialect], answers[::2], answers[1::2], strict=True)


@DIALECTS
async def test_the_same_prompts(proxied, ground_truth, dialect):
    """The engine's log has the same ids for both; both sides' counting routes return their number."""
    bodies = {name: request(dialect, name) | {LIMITS[dialect]: 1} for name in REQUESTS[dialect]}
    urls = f"{proxied.url}/s/same", proxied.vllm
    for body in bodies.values():
        for url in urls:
            body_of(await send(proxied.http, url, ROUTES[dialect], body))
    logged = [prompt for prompt, _ in await ground_truth.read_new_episodes()]
    ours, theirs = (dict(zip(bodies, prompts, strict=True)) for prompts in (logged[::2], logged[1::2]))
    differ = {name for name in bodies if ours[name] != theirs[name]}
    assert differ == {name for of, name in OTHER_PROMPTS if of == dialect}
    for url, prompts in zip(urls, (ours, theirs), strict=True):
        if (dialect, url) != ("responses", proxied.vllm):  # vLLM has no such route
            counted = await gathered(send(proxied.http, url, COUNTS[dialect], body) for body in bodies.values())
            found = [body_of(answer)["input_tokens"] for answer in counted]
            assert dict(zip(bodies, found, strict=True)) == {name: len(prompt) for name, prompt in prompts.items()}


@DIALECTS
async def test_the_same_answers(proxied, dialect):
    """The same members, text and reasons, except for the differences that the table lists."""
    differ = {}
    for name, *answers in await pairs(proxied, dialect):
        ours, theirs = ({WHOLE[dialect]: body_of(answer)} for answer in answers)
        differ[name] = differences(dialect, ours, theirs)
    assert "<think>" in str(differ.pop(THINKS_IN_TEXT[dialect]))
    assert differ == {name: [] for name in SHOWN[dialect] if name != THINKS_IN_TEXT[dialect]}


@DIALECTS
async def test_the_same_streams(proxied, dialect):
    """The same events in the same order, with the same text."""
    differ = {}
    for name, *answers in await pairs(proxied, dialect, stream=True):
        assert [answer[:2] for answer in answers] == [(200, "text/event-stream")] * 2
        ours, theirs = (course(raw) for _, _, raw in answers)
        if name == THINKS_IN_TEXT[dialect]:
            continue
        if name in ENDS_OTHERWISE[dialect]:
            kind = theirs[-1][1]["type"] = ENDS_OTHERWISE[dialect][name]
            theirs[-1] = (kind, theirs[-1][1])
        assert (name, [event for event, _ in ours]) == (name, [event for event, _ in theirs])
        differ[name] = [entry for (_, mine), (_, its) in zip(ours, theirs, strict=True) for entry in differences(dialect, mine, its)]
    assert differ == {name: [] for name in SHOWN[dialect] if name != THINKS_IN_TEXT[dialect]}


async def test_a_call_of_a_tool_that_was_not_offered_is_text(proxied):
    """Without tools vLLM removes the call from a whole answer and shows it nowhere; through the proxy nothing is lost."""
    body = {"model": MODEL, "max_tokens": 400, "messages": WORK}
    ours, theirs = [body_of(await send(proxied.http, url, "/v1/messages", body)) for url in (f"{proxied.url}/s/same", proxied.vllm)]
    assert "<tool_call>" in ours["content"][-1]["text"]
    assert ours["content"][-1]["text"].startswith(theirs["content"][-1]["text"])
    assert "tool_call" not in json.dumps(theirs)


@pytest.fixture
async def simulated(proxied, tokenizer):
    """A proxy in front of the simulated engine, with the same tokenizer and the same episodes."""
    if tokenizer != "own":
        pytest.skip("the simulated engine has the project's own tokenizer")
    spoken = {name: turns["turns"] if isinstance(turns, dict) else turns for name, turns in EPISODES.items()}
    engine = SimulatedEngine(episodes=spoken, model=MODEL, max_model_len=MAX_MODEL_LEN)
    async with engine.serve() as url, proxying(url, MemoryStore()) as found:
        yield found


async def on_both(simulated, proxied, path, bodies):
    """Answers to all bodies, by name: from the simulated engine and from the real one."""
    found = [await gathered(send(each.http, f"{each.url}/s/sim", path, body) for body in bodies.values()) for each in (simulated, proxied)]
    return zip(bodies, *found, strict=True)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@DIALECTS
async def test_the_simulated_engine(simulated, proxied, dialect, stream):
    """Codecs give the same result for its replies as for the real one's, including errors."""
    bodies = {name: request(dialect, name, stream=stream) for name in SHOWN[dialect]}
    bodies["too-long"] = bodies["text" if dialect == "messages" else "instructions"] | TOO_LONG[dialect]
    for name, ours, theirs in await on_both(simulated, proxied, ROUTES[dialect], bodies):
        assert (name, *ours[:2]) == (name, *theirs[:2])
        if theirs[0] != 200:
            assert json.loads(ours[2]) == json.loads(theirs[2])
            continue
        mine, its = [(course if stream else json.loads)(raw) for _, _, raw in (ours, theirs)]
        assert (name, outline({"said": mine})) == (name, outline({"said": its}))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_simulated_engine_in_gemini(simulated, proxied, stream):
    path = f"/v1beta/models/{MODEL}:" + ("streamGenerateContent" if stream else "generateContent")
    for name, *answers in await on_both(simulated, proxied, path, GEMINI):
        mine, its = [gemini_course(found if stream else [found]) for found in map(body_of, answers)]
        assert (name, outline(mine)) == (name, outline(its))


def test_the_table_is_long_enough():
    for dialect, requests in REQUESTS.items():
        assert len(requests) >= 30
        assert set(SHOWN[dialect]) <= set(requests)
