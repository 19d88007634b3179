"""Compares the simulated engine with a real vLLM: the same requests, the same statuses, members, types, nulls and text."""

import re

import aiohttp
import pytest
from conftest import MAX_MODEL_LEN
from episodes import EPISODES
from rig.server import MODEL
from wire_table import ANSWERED, CHAT, CONVERSATIONS, OTHERS, REFUSED, WORDS_DIFFER, shape, stream_shape

from tokencache.testing import SimulatedEngine


@pytest.fixture
async def pair(vllm, tokenizer):
    """A client, and the URLs of a simulated engine and of the real one, with the same tokenizer and the same episodes."""
    if tokenizer != "own":
        pytest.skip("the simulated engine has the project's own tokenizer")
    spoken = {name: turns["turns"] if isinstance(turns, dict) else turns for name, turns in EPISODES.items()}
    engine = SimulatedEngine(episodes=spoken, model=MODEL, max_model_len=MAX_MODEL_LEN)
    async with engine.serve() as url, aiohttp.ClientSession() as http:
        yield http, url, vllm


async def both(pair, method, path, body):
    http, *urls = pair
    answers = []
    for url in urls:
        sent = {"json": body} if isinstance(body, dict) else {"data": body, "headers": {"Content-Type": "application/json"}}
        async with http.request(method, f"{url}{path}", **sent) as answer:
            answers.append((answer.status, answer.headers.get("Content-Type"), await answer.read(), answer))
    return answers


async def parsed(answer):
    status, kind, raw, response = answer
    return status, kind, await response.json(content_type=None) if raw else None


@pytest.mark.parametrize("name", ANSWERED)
async def test_same_answer(pair, name):
    answers = await both(pair, "POST", CHAT, {"model": MODEL, **ANSWERED[name]})
    simulated, real = [(*seen[:2], shape(seen[2], words=name not in WORDS_DIFFER)) for seen in [await parsed(answer) for answer in answers]]
    assert real[0] == 200
    assert simulated == real
    assert str(simulated) == str(real)  # members in the same order, too


USAGE = {"no-usage": {}, "usage": {"include_usage": True}, "all-usage": {"include_usage": True, "continuous_usage_stats": True}}


@pytest.mark.parametrize("usage", USAGE)
@pytest.mark.parametrize("name", ANSWERED)
async def test_same_stream(pair, name, usage):
    """The same kinds of chunks in the same order. (The choices of one call alternate arbitrarily: their order is not compared.)"""
    fields = {"stream": True, **({"stream_options": USAGE[usage]} if USAGE[usage] else {})}
    answers = await both(pair, "POST", CHAT, {"model": MODEL, **ANSWERED[name], **fields})
    assert answers[0][:2] == answers[1][:2] == (200, "text/event-stream; charset=utf-8")
    (kinds, texts), (real_kinds, real_texts) = (stream_shape(raw) for _, _, raw, _ in answers)
    if name in WORDS_DIFFER:  # other text, other chunks: the first and the last are the same in any case
        kinds, real_kinds = [[spoken(kind) for kind in (each[0], *each[-3:])] for each in (kinds, real_kinds)]
        texts = real_texts
    if "two" in name:
        kinds, real_kinds = sorted(kinds, key=str), sorted(real_kinds, key=str)
    assert texts == real_texts
    assert kinds == real_kinds
    assert str(kinds) == str(real_kinds)  # members in the same order, too


def spoken(kind):
    """A chunk's kind, independent of the text in it."""
    return kind if isinstance(kind, str) else kind | {"choices": [choice | {"delta": None} for choice in kind["choices"]]}


def first_complaint(seen):
    """The first of all reasons that pydantic gives for an invalid message: the simulated engine reports only one."""
    status, kind, body = seen
    message = re.sub(r"^\d+ validation errors?:\n", "", body["error"]["message"]).split("\n  {")[0]
    return status, kind, {"error": body["error"] | {"message": message}}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", REFUSED)
async def test_same_refusal(pair, name, stream):
    """Word for word. Errors of the engine itself arrive, when streamed, as an event of a 200."""
    body = {"model": MODEL, **REFUSED[name], **({"stream": True} if stream and name != "options-without-stream" else {})}
    simulated, real = await both(pair, "POST", CHAT, body)
    if real[0] == 200:
        assert stream
        assert simulated[:3] == real[:3]
    else:
        assert first_complaint(await parsed(simulated)) == first_complaint(await parsed(real))


@pytest.mark.parametrize("name", OTHERS)
async def test_same_elsewhere(pair, name):
    answers = await both(pair, *OTHERS[name])
    simulated, real = [(*seen[:2], shape(seen[2])) for seen in [await parsed(answer) for answer in answers]]
    if "error" in (real[2] or {}):
        simulated, real = first_complaint(simulated), first_complaint(real)
    assert simulated == real


@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_same_rendering(pair, name):
    """The same ids, from template and tokenizer of both."""
    messages, fields = CONVERSATIONS[name]
    answers = await both(pair, "POST", "/tokenize", {"model": MODEL, "messages": messages, **fields})
    simulated, real = [await parsed(answer) for answer in answers]
    assert real[0] == 200, real
    assert simulated == real


def test_the_table_is_long_enough():
    assert len(ANSWERED) + len(REFUSED) + len(OTHERS) >= 30
    assert len(CONVERSATIONS) >= 20
    assert set(ANSWERED) >= WORDS_DIFFER
