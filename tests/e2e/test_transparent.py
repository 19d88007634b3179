"""Without a session, a request through the proxy is answered with the bytes of a direct call; within one, nearly so.

Masked are only what differs between two direct calls: ids made up by the server, the time, and durations.
"""

import asyncio
import re
import statistics
import time

import pytest
from rig.exported import trajectory
from rig.harness import SESSION_HEADER, TOOLS
from rig.server import MODEL

FOR_EACH = [
    (rb'"id":"chatcmpl-[0-9a-f]+"', b'"id":"X"'),
    (rb'"id":"cmpl-[0-9a-f]+"', b'"id":"X"'),
    (rb"chatcmpl-tool-[0-9a-f]+", b"chatcmpl-tool-X"),
    (rb'"id":"modelperm-[0-9a-f]+"', b'"id":"X"'),
    (rb'"created":\d+', b'"created":0'),
]
HI = [{"role": "user", "content": "EPISODE:agent please"}]
FREE = [{"role": "user", "content": "Say whatever you like ☕."}]
CHAT = "/v1/chat/completions"


def chat(messages=HI, **fields):
    return "POST", CHAT, {"model": MODEL, "messages": messages, "seed": 4, **fields}


REQUESTS = {
    "chat": chat(tools=TOOLS),
    "free": chat(FREE, max_tokens=30),
    "ids-and-logprobs": chat(tools=TOOLS, return_token_ids=True, logprobs=True, top_logprobs=2),
    "two": chat(FREE, n=2, max_tokens=12),
    "hidden-reasoning": chat(tools=TOOLS, include_reasoning=False),
    "stop": chat([{"role": "user", "content": "EPISODE:stops please"}], stop=["HALT"]),
    "completion": ("POST", "/v1/completions", {"model": MODEL, "prompt": "Once", "max_tokens": 12, "seed": 4}),
    "own-ids": chat(kv_transfer_params={"prompt_token_ids": [5, 6, 7]}, max_tokens=5),
    "tokenize": ("POST", "/tokenize", {"model": MODEL, "messages": HI}),
    "detokenize": ("POST", "/detokenize", {"model": MODEL, "tokens": [5, 6, 7]}),
    "models": ("GET", "/v1/models", None),
    "version": ("GET", "/version", None),
    "health": ("GET", "/health", None),
    "head": ("HEAD", "/v1/models", None),
    "no-route": ("GET", "/no/such/route", None),
    "no-method": ("GET", CHAT, None),
    "options": ("OPTIONS", CHAT, None),
    "no-body": ("POST", CHAT, b""),
    "no-json": ("POST", CHAT, b"{not json"),
    "no-messages": ("POST", CHAT, {"model": MODEL}),
    "no-such-model": ("POST", CHAT, {"model": "nope", "messages": HI}),
    "hot": chat(temperature="hot"),
    "negative": chat(temperature=-1),
    "too-much": chat(max_tokens=10**6),
    "refused-late": chat(FREE, stream=True, logprobs=True, top_logprobs=99),
}  # fmt: skip
SAMPLING = ("chat", "free", "ids-and-logprobs", "two", "hidden-reasoning", "stop", "own-ids")
STREAMED = {
    f"{name}-stream": chat(**(REQUESTS[name][2] | {"stream": True, "stream_options": {"include_usage": True}})) for name in SAMPLING
}


def by_choice(raw):
    """The events of a stream with several choices, sorted by choice: these take turns as it comes."""
    return b"\n\n".join(sorted(raw.split(b"\n\n"), key=lambda event: re.findall(rb'"choices":\[\{"index":(\d)', event)))


def masked(raw):
    for pattern, mask in FOR_EACH:
        raw = re.sub(pattern, mask, raw)
    return raw


TRIES = 8


async def alike(proxied, request, same, **headers):
    """Ask directly and through the proxy; a busy vLLM joins tokens that wait to be sent into one chunk: then ask again."""
    for _ in range(TRIES):
        direct = await exchange(proxied.http, proxied.vllm, request)
        through = await exchange(proxied.http, proxied.url, request, **headers)
        if same(through, direct) or direct[0] != 200:
            break
    return through, direct


async def exchange(http, url, request, **headers):
    method, path, body = request
    sent = {"json": body} if isinstance(body, dict) else {"data": body}
    if isinstance(body, bytes):
        headers["Content-Type"] = "application/json"
    async with http.request(method, f"{url}{path}", headers=headers, **sent) as answer:
        raw = await answer.read()
        kept = [(name.lower(), value) for name, value in answer.headers.items() if name.lower() != "date"]
        return answer.status, answer.reason, kept, masked(by_choice(raw) if "stream" in answer.content_type else raw)


@pytest.mark.parametrize("name", REQUESTS | STREAMED)
async def test_without_a_session_nothing_differs(proxied, name):
    request = (REQUESTS | STREAMED)[name]
    through, direct = await alike(proxied, request, lambda a, b: a == b)
    assert through == direct


@pytest.mark.parametrize("name", [name for name in REQUESTS | STREAMED if (REQUESTS | STREAMED)[name][1] == CHAT and "own-ids" not in name])
async def test_first_call_of_a_session_is_answered_alike(proxied, name):
    """What the proxy asks for itself (ids, log probabilities, reasoning), the harness does not see."""
    request = (REQUESTS | STREAMED)[name]
    through, direct = await alike(proxied, request, lambda a, b: a[3] == b[3], **{SESSION_HEADER: "alike"})
    assert through[0] == direct[0]
    if direct[0] == 200:
        assert through[3] == direct[3]
        assert sorted(through[2]) == sorted(direct[2])
    elif name not in ("no-body", "no-json", "no-messages"):  # refused by the proxy itself, in its own words
        assert through[3] == direct[3]
    else:
        assert through[3].startswith(b'{"error": {"message": ')


async def test_refusals_leave_no_hole(proxied):
    """What was refused was never sampled: nothing is missing, even where the refusal comes as an event of a 200."""
    harness = proxied.harness("refused", stream=True, tools=TOOLS).say("EPISODE:agent please")
    await harness.turn()
    for name in ("hot", "too-much", "refused-late"):
        body = harness.body() | {key: value for key, value in REQUESTS[name][2].items() if key != "messages"}
        await exchange(proxied.http, proxied.url, ("POST", CHAT, body), **{SESSION_HEADER: "refused"})
    await harness.turn()
    exported = await trajectory(proxied, "refused")
    assert exported["complete"]
    assert [incident["kind"] for incident in exported["incidents"]] == ["engine-refused"] * 3
    assert harness.contiguous == (1, 1)
    assert len(exported["sequences"]) == 1


async def test_added_latency_is_small(proxied, figures):
    """No benchmark, `bench/` is one: only that a turn through the proxy takes about as long as one without it."""
    body = {"model": MODEL, "messages": FREE, "max_tokens": 1}

    async def median(url, **headers):
        took = []
        for _ in range(15):
            began = time.perf_counter()
            await exchange(proxied.http, url, ("POST", CHAT, body), **headers)
            took.append(time.perf_counter() - began)
            await asyncio.sleep(0)
        return statistics.median(took) * 1e3

    direct, relayed = await median(proxied.vllm), await median(proxied.url)
    session = await median(proxied.url, **{SESSION_HEADER: "quick"})
    figures.append(f"one token, median of 15: direct {direct:.1f} ms, relayed {relayed:.1f} ms, in a session {session:.1f} ms")
    assert session < direct + 50
