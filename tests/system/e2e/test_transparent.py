"""Without a session, a proxied answer has the bytes of a direct one; within a session, nearly so.

Only what differs between two direct calls is masked: ids made up by the server, the time, and durations.
"""

import json
import re

import pytest
import pytest_asyncio
from conftest import DEFAULT_TOKENIZER, proxying
from rig.exported import generations, trajectory
from rig.harness import SESSION_HEADER, TOOLS
from rig.server import MODEL

from tokencache.store.memory import MemoryStore

pytestmark = pytest.mark.asyncio(loop_scope="module")

FOR_EACH = [
    (rb'"id":"chatcmpl-[0-9a-f]+"', b'"id":"X"'),
    (rb'"id":"cmpl-[0-9a-f]+"', b'"id":"X"'),
    (rb"chatcmpl-tool-[0-9a-f]+", b"chatcmpl-tool-X"),
    (rb'"id":"modelperm-[0-9a-f]+"', b'"id":"X"'),
    (rb'"created":\d+', b'"created":0'),
]
HI = [{"role": "user", "content": "EPISODE:agent please"}]
FREE = [{"role": "user", "content": "Say whatever you like ☕."}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def text(prompt="Once", **fields):
    return "POST", TEXT, {"model": MODEL, "prompt": prompt, "max_tokens": 12, "seed": 4, **fields}


def chat(messages=HI, **fields):
    return "POST", CHAT, {"model": MODEL, "messages": messages, "seed": 4, **fields}


REQUESTS = {
    "chat": chat(tools=TOOLS),
    "free": chat(FREE, max_tokens=30),
    "ids-and-logprobs": chat(tools=TOOLS, return_token_ids=True, logprobs=True, top_logprobs=2),
    "two": chat(FREE, n=2, max_tokens=12),
    "hidden-reasoning": chat(tools=TOOLS, include_reasoning=False),
    "stop": chat([{"role": "user", "content": "EPISODE:stops please"}], stop=["HALT"]),
    "text": text(),
    "text-two-of-two": text(["Once", "Twice upon"], n=2),
    "text-of-ids": text([5, 6, 7], logprobs=2),
    "text-with-ids": text(return_token_ids=True),
    "text-with-ids-and-logprobs": text([[5, 6], [7]], return_token_ids=True, logprobs=0),
    "text-hot": text(temperature="hot"),
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
TEXTS = ("text", "text-two-of-two", "text-of-ids", "text-with-ids", "text-with-ids-and-logprobs")
STREAMED = {
    f"{name}-stream": (*REQUESTS[name][:2], REQUESTS[name][2] | {"stream": True, "stream_options": {"include_usage": True}})
    for name in SAMPLING + TEXTS
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def proxied(servers):
    """One proxy for all tests, each with a session of its own."""
    async with proxying(servers.use(DEFAULT_TOKENIZER).url, MemoryStore()) as found:
        yield found


def by_choice(raw):
    """The events of a stream with several choices, sorted by choice: these alternate arbitrarily."""
    return b"\n\n".join(sorted(raw.split(b"\n\n"), key=lambda event: re.findall(rb'"choices":\[\{"index":(\d)', event)))


def masked(raw):
    for pattern, mask in FOR_EACH:
        raw = re.sub(pattern, mask, raw)
    return raw


async def both(proxied, request, **headers):
    """The answers through the proxy and directly."""
    return await exchange(proxied.http, proxied.url, request, **headers), await exchange(proxied.http, proxied.vllm, request)


async def exchange(http, url, request, **headers):
    method, path, body = request
    sent = {"json": body} if isinstance(body, dict) else {"data": body}
    if isinstance(body, bytes):
        headers["Content-Type"] = "application/json"
    async with http.request(method, f"{url}{path}", headers=headers, **sent) as answer:
        raw = await answer.read()
        kept = [(name.lower(), value) for name, value in answer.headers.items() if name.lower() != "date"]
        return answer.status, answer.reason, kept, masked(by_choice(raw) if "stream" in answer.content_type else raw)


OWN_WORDS = ("no-body", "no-json", "no-messages", "hot", "text-hot")
"""Requests that the proxy itself refuses within a session, with its own text."""
WITHIN = [name for name in REQUESTS | STREAMED if (REQUESTS | STREAMED)[name][1] in (CHAT, TEXT) and "own-ids" not in name]


@pytest.mark.parametrize("name", REQUESTS | STREAMED)
async def test_without_a_session_nothing_differs(proxied, name):
    request = (REQUESTS | STREAMED)[name]
    through, direct = await both(proxied, request)
    assert through == direct


@pytest.mark.parametrize("name", WITHIN)
async def test_first_call_of_a_session_has_the_same_answer(proxied, name):
    """What the proxy itself requests (ids, log probabilities, reasoning) is hidden from the harness."""
    request = (REQUESTS | STREAMED)[name]
    through, direct = await both(proxied, request, **{SESSION_HEADER: f"alike-{name}"})
    assert through[0] == direct[0]
    if direct[0] == 200:
        assert through[3] == direct[3]
        assert sorted(through[2]) == sorted(direct[2])
    elif name not in OWN_WORDS:
        assert through[3] == direct[3]
    else:
        assert through[3].startswith(b'{"error":{"message":')


@pytest.mark.parametrize("name", [name for name in STREAMED if name.startswith("text-with-ids")] + ["text-with-ids-and-logprobs"])
async def test_every_choice_of_a_text_completion_is_recorded(proxied, name):
    """With the ids and log probabilities that the engine itself returns to a direct client with the same seed."""
    method, path, body = (REQUESTS | STREAMED)[name]
    whole = body | {"stream": False, "stream_options": None, "return_token_ids": True, "logprobs": 0}
    _, _, _, raw = await exchange(proxied.http, proxied.vllm, (method, path, whole))
    direct_choices = {(*c["prompt_token_ids"], None, *c["token_ids"]): c["logprobs"]["token_logprobs"] for c in json.loads(raw)["choices"]}
    await exchange(proxied.http, proxied.url, (method, path, body), **{SESSION_HEADER: name})
    exported = await trajectory(proxied, name)
    assert exported["complete"]
    recorded = {(*prompt, None, *ids): list(logprobs) for prompt, ids, logprobs in generations(exported)}
    assert recorded.keys() == direct_choices.keys()
    for choice, logprobs in direct_choices.items():
        assert recorded[choice] == pytest.approx(logprobs, abs=1e-3)


async def test_refusals_leave_no_hole(proxied):
    """A refused call was never sampled: nothing is missing, even if the refusal is an event of a 200."""
    harness = proxied.harness("refused", stream=True, tools=TOOLS).say("EPISODE:agent please")
    await harness.turn()
    refused = ("too-much", "refused-late")
    for name in refused:
        body = harness.body() | {key: value for key, value in REQUESTS[name][2].items() if key != "messages"}
        await exchange(proxied.http, proxied.url, ("POST", CHAT, body), **{SESSION_HEADER: "refused"})
    await harness.turn()
    exported = await trajectory(proxied, "refused")
    assert exported["complete"]
    assert [incident["kind"] for incident in exported["incidents"]] == ["engine-refused"] * len(refused)
    assert harness.contiguous == (1, 1)
    assert len(exported["sequences"]) == 1
