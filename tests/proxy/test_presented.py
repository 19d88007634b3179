"""Within a session a harness sees what a direct client sees, to the byte, less the fields it did not ask for.

The simulated engine's generator is set back between the direct call and the one through the proxy, so that both are the
same generation; what is random (ids of tool calls) or a time is masked.
"""

import asyncio
import itertools
import json
import re
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.settings import SOME
from tests.proxy.kit import CHAT, EPISODES, HEADER, TOOLS, assembled, echo, proxied, results, user
from tests.support.leading import lead_to
from tests.support.pairwise import cases
from tests.support.reading import read_chat
from tokencache.dialects.chat.incremental import IncrementalParser
from tokencache.dialects.chat.reply import ChatReplyEncoder
from tokencache.dialects.sse import DONE, EventSplitter, data_of
from tokencache.testing import SimulatedEngine

ASKS = {
    "ids": [{}, {"return_token_ids": True}],
    "logprobs": [{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2}],
    "reasoning": [{}, {"include_reasoning": False}],
    "n": [{}, {"n": 2}],
    "tools": [{}, {"tools": TOOLS}],
}


def merged(parts):
    return {k: v for part in parts for k, v in part.items()}


COMBINATIONS = [merged(parts) for parts in itertools.product(*ASKS.values())]
USAGE = {
    "whole": {},
    "stream": {"stream": True},
    "usage": {"stream": True, "stream_options": {"include_usage": True}},
    "continuous": {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "continuous alone": {"stream": True, "stream_options": {"continuous_usage_stats": True}},
}
ENDS = [
    {"max_tokens": 1},
    {"max_tokens": 9},
    {"max_tokens": 40, "tools": TOOLS},
    {"stop": ["look"]},
    {"stop": "list", "include_stop_str_in_output": True},
    {"tools": TOOLS, "tool_choice": "none"},
    {"tools": TOOLS, "parallel_tool_calls": False},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"reasoning_effort": "none"},
    {"stream_interval": 5},
    {"return_tokens_as_token_ids": True, "logprobs": True},
    {"logprobs": True, "include_reasoning": False, "return_token_ids": True, "tools": TOOLS},
]
MASKED = re.compile(rb'"created":\d+|chatcmpl-tool-[0-9a-f]{16}|chatcmpl-abc(-[0-9a-f]{16})?')


async def answer_of(rig, url, body, session=None):
    """Status, headers and masked bytes of a call; the engine begins to generate from the same seed each time."""
    rig.engine._calls = itertools.count(1000)
    headers = {"X-Request-Id": "abc"} | ({HEADER: session} if session else {})
    async with rig.http.post(url + CHAT, json={"model": "sim", **body}, headers=headers) as answer:
        kept = {k.lower(): v for k, v in answer.headers.items() if k.lower() not in ("date", "content-length", "x-request-id")}
        return answer.status, kept, MASKED.sub(b"*", await answer.read())


PAIRS = [case.values for case in cases([*USAGE], *ASKS.values()) if not case.marks]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.whole)], ids=["pairs", "every combination"])
@pytest.mark.parametrize("usage", USAGE)
async def test_every_combination_is_what_a_direct_client_gets(rig, usage, every):
    for n, asked in enumerate(COMBINATIONS if every else [merged(parts) for kind, *parts in PAIRS if kind == usage]):
        body = {"messages": [user("EPISODE:demo")], **asked, **USAGE[usage]}
        direct = await answer_of(rig, rig.up, body)
        assert await answer_of(rig, rig.url, body, f"s{n}") == direct, body
        assert direct[0] == 200
        turns = await rig.turns(f"s{n}")
        assert [turn["match"] for turn in turns] == ["root"] * asked.get("n", 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_every_end_is_what_a_direct_client_gets(rig, stream):
    for n, asked in enumerate(ENDS):
        for hidden in ({}, {"include_reasoning": False}):
            body = {"messages": [user("EPISODE:demo")], **hidden, **asked, "stream": stream}
            assert await answer_of(rig, rig.url, body, f"s{n}{bool(hidden)}") == await answer_of(rig, rig.up, body), body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [{}, {"return_token_ids": True}, {"include_reasoning": False}, {"logprobs": True}])
async def test_a_continued_turn_is_what_a_direct_client_gets(rig, stream, asked):
    """The direct client is given the same exact prompt by hand."""
    body = {"messages": [user("EPISODE:demo")], "tools": TOOLS, "stream": stream, **asked}
    for _ in range(3):
        message = await rig.say("s", body["messages"], tools=TOOLS)
        through = await answer_of(rig, rig.url, body, "s")
        sent = rig.engine.requests[-1].get("kv_transfer_params")
        direct = await answer_of(rig, rig.up, body | ({"kv_transfer_params": sent} if sent else {}))
        assert through == direct
        body["messages"] = [*body["messages"], echo(message), *results(message)]
    assert {turn["match"] for turn in await rig.turns()} == {"root", "continue", "branch"}


REFUSED = [
    *({"n": 0}, {"temperature": -1}, {"top_logprobs": 3}, {"logprob_token_ids": [5]}, {"tools": []}, {"model": "x"}),
    {"stream_options": {"include_usage": True}},
]


@pytest.mark.parametrize("body", REFUSED)
async def test_an_engines_refusal_is_what_a_direct_client_gets(rig, body):
    body = {"messages": [user("hi")], **body}
    assert await answer_of(rig, rig.url, body, "s") == await answer_of(rig, rig.up, body)
    session = await rig.info()
    assert (session["complete"], session["turns"], session["open_calls"]) == (True, 0, [])
    assert [incident["kind"] for incident in session["incidents"]] == ["engine-refused"]


UNLIKE = re.compile(rb'"id":"[^"]*","type":"function"|\xef\xbf\xbd')
"""What derender itself writes otherwise (0.32): the ids of calls, and an incomplete character at the end."""


@pytest.fixture
async def gathering():
    """An engine with derender: the proxy requests whole replies as streams, so that it can continue them."""
    async with proxied(SimulatedEngine(episodes=EPISODES, seed=7, derenders=True)) as made:
        yield made


async def test_a_gathered_reply_is_what_a_direct_client_gets(gathering):
    for n, asked in enumerate([*map(merged, [parts for _, *parts in PAIRS]), *ENDS, {"return_prompt_text": True}]):
        body = {"messages": [user("EPISODE:demo")], **asked}
        answers = [await answer_of(gathering, url, body, session) for url, session in ((gathering.up, None), (gathering.url, f"s{n}"))]
        direct, through = [(status, headers, UNLIKE.sub(b"", said)) for status, headers, said in answers]
        assert through == direct, body


@pytest.mark.parametrize("body", REFUSED)
async def test_it_is_refused_what_a_direct_client_is_refused(gathering, body):
    body = {"messages": [user("hi")], **body}
    through, direct = await answer_of(gathering, gathering.url, body, "s"), await answer_of(gathering, gathering.up, body)
    assert through == direct
    assert direct[0] in {400, 404}
    assert not await gathering.turns()


async def test_unknown_members_go_on_as_they_came(rig):
    raw = b'{"messages":[{"role":"user","content":"hi","x-odd":[1.50]}],"temperature":1.0,"zz":{"a":1e2,"b":"\\u00fc"},'
    raw += b'"seed":12345678901234567890123}'
    async with rig.http.post(rig.url + CHAT, data=raw, headers={HEADER: "s", "Content-Type": "application/json", "X-Odd": "1"}) as answer:
        assert answer.status == 200
    added = {"return_token_ids": True, "return_weight_versions": True, "logprobs": True}
    assert rig.engine.requests[-1] == json.loads(raw) | added
    assert rig.engine.headers[-1]["X-Odd"] == "1"
    assert (await rig.turns())[0]["sampling"] == {"temperature": 1.0, "seed": 12345678901234567890123}


# wherever the network cuts


def presented(stream: bytes, asked: dict, cuts: list[int]) -> bytes:
    splitter, encoder = EventSplitter(), ChatReplyEncoder(read_chat(json.dumps({"messages": [], **asked}).encode(), IncrementalParser()))
    shown = b""
    for start, end in itertools.pairwise([0, *sorted(cuts), len(stream)]):
        for event in splitter.feed(stream[start:end]):
            data = data_of(event)
            shown += event if data is None else encoder.end() if data == DONE else encoder.chunk(event, data, 0)
    return shown + splitter.rest


@pytest.fixture(scope="module")
def streams():
    """Streams of the engine's, with ids and log probabilities, as a proxy gets them."""

    async def collect():
        async with proxied() as rig:
            made = []
            for more in ({}, {"n": 2}, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}):
                body = {
                    "messages": [user("EPISODE:demo")],
                    "tools": TOOLS,
                    "stream": True,
                    "return_token_ids": True,
                    "logprobs": True,
                    **more,
                }
                made.append((await answer_of(rig, rig.up, body))[2])
            return made

    return asyncio.run(collect())


@SOME
@given(data=st.data())
def test_chunks_may_be_cut_anywhere(streams, data):
    stream = data.draw(st.sampled_from(streams))
    asked = data.draw(st.sampled_from(COMBINATIONS[:24]))
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=40))
    assert presented(stream, asked, cuts) == presented(stream, asked, [])


def test_chunks_may_come_byte_by_byte(streams):
    for stream in streams:
        assert presented(stream, {}, list(range(1, len(stream)))) == presented(stream, {}, [])


@SOME
@given(st.lists(st.sampled_from([b"data: x", b"data:y", b": note", b"id: 1", b"\n", b"\r\n", b"\r", b"\n\n", b"\r\n\r\n"])), st.data())
def test_the_splitter_loses_nothing_and_does_not_mind_cuts(parts, data):
    stream = b"".join(parts)
    whole = EventSplitter()
    events = list(whole.feed(stream))
    assert b"".join(events) + whole.rest == stream
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=10))
    pieces = EventSplitter()
    again = [event for a, b in itertools.pairwise([0, *sorted(cuts), len(stream)]) for event in pieces.feed(stream[a:b])]
    assert (b"".join(again) + pieces.rest) == stream
    assert [data_of(e) for e in again] == [data_of(e) for e in events]


async def test_a_network_that_delivers_crumbs(rig):
    """A relay between proxy and engine forwards a few bytes at a time: neither the harness nor the ground-truth log shows a difference."""

    async def carry(reader, writer, step):
        while data := await reader.read(1 << 16):
            for at in range(0, len(data), step):
                writer.write(data[at : at + step])
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()

    async def wire(reader, writer):
        up = urlsplit(rig.up)
        there, back = await asyncio.open_connection(up.hostname, up.port)
        await asyncio.gather(carry(reader, back, 1 << 16), carry(there, writer, 3), return_exceptions=True)

    server = await asyncio.start_server(wire, "127.0.0.1", 0)
    await lead_to(rig.proxy.upstream, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    messages = [user("EPISODE:demo")]
    for _ in range(3):
        status, chunks = await rig.post("s", messages=messages, tools=TOOLS, stream=True)
        assert status == 200
        message = assembled(chunks)
        messages = [*messages, echo(message), *results(message)]
    exported = await rig.check()
    assert [t["match"] for s in exported["sequences"] for t in s["turns"]] == ["root", "continue", "continue"]
    await rig.proxy.upstream.close()
    server.close()
