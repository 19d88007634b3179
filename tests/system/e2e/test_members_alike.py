"""What the proxy adds to a request, or overrides in it, changes nothing else: a grid of requests, directly and in a session.

The engine offers derender, so the proxy asks for whole replies as streams, and sends calls whose grammar starts at once to `generate`.
"""

import json

import pytest
import pytest_asyncio
from conftest import proxying
from rig.exported import trajectory
from rig.harness import SESSION_HEADER, TOOLS
from rig.marks import marks_of
from rig.server import MODEL

from tests.support.pairwise import cases
from tokencache.store.memory import MemoryStore

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
AXES = {
    "form": {"whole": {}, "stream": {"stream": True}, "usage": {"stream": True, "stream_options": {"include_usage": True}}},
    "tokens": {
        "none": {},
        "ids": {"return_token_ids": True},
        "logprobs": {"logprobs": True},
        "all": {"return_token_ids": True, "logprobs": True, "top_logprobs": 2},
    },
    "reasoning": {"shown": {}, "hidden": {"include_reasoning": False}},
    "grammar": {
        "free": {},
        "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
        "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        "tools": {"tools": TOOLS},
        "required": {"tools": TOOLS, "tool_choice": "required"},
    },
    "thinking": {"on": {}, "off": {"chat_template_kwargs": {"enable_thinking": False}}},
    "who": {"free": "Say whatever you like ☕.", "scripted": "EPISODE:agent please"},
}
GRID = [case.values for case in cases(*map(list, AXES.values())) if not case.marks]
REFUSED = {
    "options": {"stream_options": {"include_usage": True}},
    "more-options": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "logprob-ids": {"logprob_token_ids": [5, 6]},
    "top-logprobs": {"top_logprobs": 2},
    "hidden-logprob-ids": {"logprob_token_ids": [5, 6], "include_reasoning": False},
    "prompt-logprobs": {"prompt_logprobs": 1, "stream": True},
    "reasoning": {"include_reasoning": None},
    "two-grammars": {"structured_outputs": {"choice": ["a"], "regex": "b"}, "include_reasoning": False},
    "no-tool": {"tool_choice": "required", "include_reasoning": False},
}


@pytest_asyncio.fixture(loop_scope="module")
async def proxied(scaled_out):
    async with proxying(scaled_out.url, MemoryStore()) as found:
        yield found


async def ask(proxied, url, body, session=""):
    headers = {SESSION_HEADER: session} if session else {}
    async with proxied.http.post(url + CHAT, json={"model": MODEL, **body}, headers=headers) as answer:
        return answer.status, await answer.read()


def said(raw, *, stream):
    """What a client has of a reply, whole or streamed, without what differs between two direct calls."""
    if not stream:
        body = json.loads(raw)
        found = {name: value for name, value in body.items() if name not in {"id", "created", "choices"}}
        message = body["choices"][0].pop("message")
        return found, body["choices"][0], words(message)
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in raw.split(b"\n\n") if event and b"[DONE]" not in event]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    calls = {}
    for part in (part for choice in choices for part in choice["delta"].get("tool_calls") or ()):
        call = calls.setdefault(part["index"], {"function": {"name": "", "arguments": ""}})["function"]
        for name, value in part["function"].items():
            call[name] += value or ""
    message = {name: "".join(choice["delta"].get(name) or "" for choice in choices) or None for name in ("content", "reasoning")}
    found = {
        "ids": [token for choice in choices for token in choice.get("token_ids") or ()],
        "logprobs": [entry for choice in choices for entry in (choice.get("logprobs") or {}).get("content") or ()],
        "ends": [(choice["finish_reason"], choice.get("stop_reason")) for choice in choices if choice["finish_reason"]],
        "prompt": [chunk["prompt_token_ids"] for chunk in chunks if chunk.get("prompt_token_ids")],
        "usage": [chunk["usage"] for chunk in chunks if chunk.get("usage")],
    }
    return found, words({**message, "tool_calls": list(calls.values())})


def without_details(found):
    """What `generate` does not say: the fingerprint, and how many of the tokens are reasoning."""
    usages = [usage for usage in [found[0].pop("usage")] for usage in (usage if isinstance(usage, list) else [usage])]
    counts = [{name: count for name, count in usage.items() if name != "completion_tokens_details"} for usage in usages]
    return {name: value for name, value in found[0].items() if name != "system_fingerprint"}, counts, *found[1:]


def words(message):
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"] or "{}")) for call in message.get("tool_calls") or ()]
    return {**message, "tool_calls": calls}


@pytest.mark.parametrize("names", GRID, ids="-".join)
async def test_a_session_gets_what_a_direct_client_gets(proxied, names):
    *more, who = [values[name] for values, name in zip(AXES.values(), names, strict=True)]
    body = {"messages": [{"role": "user", "content": who}], "seed": 4, "max_tokens": 40}
    for members in more:
        body |= members
    session = "-".join(names)
    (status, direct), (through_status, through) = await ask(proxied, proxied.vllm, body), await ask(proxied, proxied.url, body, session)
    assert through_status == status == 200
    stream = body.get("stream", False)
    one, other = said(through, stream=stream), said(direct, stream=stream)
    if "hidden" in names and not {"free", "tools"} & {names[3]}:
        one, other = without_details(one), without_details(other)
    assert one == other
    exported = await trajectory(proxied, session)
    assert exported["complete"]
    assert [marks_of(turn) for sequence in exported["sequences"] for turn in sequence["turns"]] == [[]]


@pytest.mark.parametrize("name", REFUSED)
async def test_what_a_direct_client_is_refused(proxied, name):
    body = {"messages": [{"role": "user", "content": "EPISODE:agent"}], "max_tokens": 5, **REFUSED[name]}
    direct, through = await ask(proxied, proxied.vllm, body), await ask(proxied, proxied.url, body, f"refused-{name}")
    assert direct[0] == 400
    assert through == direct
