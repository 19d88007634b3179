"""NeMo Gym's token capture with harnesses that change what they were served: which rollouts Gym's own finalizer delivers, and with what.

Real model servers of nemo-gym 0.7.0; the engine is simulated, and samples most words in other tokens than a tokenizer would give.
docs/topologies/nemo-gym.md has these results as a table.
"""

import json
import os
import subprocess
from contextlib import AsyncExitStack

import pytest
from conftest import proxying
from rig.gym import POLICY, TOOLS, default_venv, gym_servers, model_server

from tests.support.redis_server import RealRedis
from tests.system.nemo.gym_agent import bare
from tests.system.nemo.main_layout import copy_with_main_names
from tokencache.store.memory import MemoryStore
from tokencache.testing import SimulatedEngine

pytestmark = [
    pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning"),
    pytest.mark.skipif(
        not default_venv().exists(), reason=f"NeMo Gym is not in {default_venv()}: tests/system/e2e/rig/install_nemo_gym.sh"
    ),
]


def called(word):
    arguments = {"name": "get_synonym_value", "arguments": {"synonym": word}}
    return f"<think>\nFirst {word}.\n</think>\n\nLooking at {word}.\n<tool_call>\n{json.dumps(arguments)}\n</tool_call>"


EPISODE = [*map(called, ("Skinny", "Invisible", "Climb")), "<think>\nEnough.\n</think>\n\nAll values are known, nothing is left to do.  "]
CHAT_TOOLS = [{"type": "function", "function": {name: tool[name] for name in ("name", "description", "parameters")}} for tool in TOOLS]
MESSAGES_TOOLS = [{"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]} for tool in TOOLS]

MASKED, DELIVERED = "masked", "delivered"
GYM_FILES = "TokenCaptureStore({!r})"
OUR_STORE = "CaptureSource({!r})"


@pytest.fixture
async def engine():
    async with SimulatedEngine(episodes={"gym": EPISODE}, seed=3, drift=0.9).serve() as url:
        yield url


@pytest.fixture
def nodes(tmp_path):
    """Starts model servers, each with a folder of its own; returns their URLs and a client."""

    async def start(stack, name, engine, capture, *, count=1, path=()):
        started = []
        for number in range(count):
            (tmp_path / f"node-{number}").mkdir()
            server = model_server(name, engine, model="sim", request_prompt_and_generation_token_ids=True)
            settings = {"enabled": True, "all_agents": True} | capture
            servers = gym_servers(tmp_path / f"node-{number}", server, agent=False, path=path, token_id_capture=settings)
            started.append(await stack.enter_async_context(servers))
        return [gym.urls[POLICY] for gym in started], started[0].http

    return start


def as_served(message):
    return message


def strips(message):
    return message | {"content": (message.get("content") or "").strip()}


def renames(message):
    calls = [call | {"id": f"call_{number}_{call['id'][-4:]}"} for number, call in enumerate(message.get("tool_calls") or ())]
    return message | ({"tool_calls": calls} if calls else {})


def drops_text(message):
    return message | ({"content": ""} if message.get("tool_calls") else {})


def rewrites(message):
    return message | {"content": (message.get("content") or "").upper()}


async def chat(urls, http, rollout, change):
    """A harness of chat completions that drops the ids, and changes each message so; returns its last text."""
    messages = [{"role": "user", "content": "EPISODE:gym please"}]
    for number in range(len(EPISODE)):
        url = f"{urls[number % len(urls)]}/ng-rollout/{rollout}/training-token-capture/v1/chat/completions"
        async with http.post(url, json={"model": "sim", "messages": messages, "tools": CHAT_TOOLS}) as answer:
            served = (await answer.json())["choices"][0]["message"]
        message = change({name: value for name, value in bare(served).items() if value is not None})
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in message.get("tool_calls") or ()]
        messages += [message, *results]
    return message["content"]


async def streamed_messages(urls, http, rollout):
    """A harness of streamed Messages that drops the thinking, as Claude Code may; returns its last text."""
    messages = [{"role": "user", "content": "EPISODE:gym please"}]
    for number in range(len(EPISODE)):
        url = f"{urls[number % len(urls)]}/ng-rollout/{rollout}/training-token-capture/v1/messages"
        body = {"model": "sim", "max_tokens": 4000, "stream": True, "messages": messages, "tools": MESSAGES_TOOLS}
        async with http.post(url, json=body) as answer:
            assert answer.content_type == "text/event-stream"
            events = [json.loads(line[5:]) async for line in answer.content if line.startswith(b"data:")]
        blocks = {event["index"]: event["content_block"] | {"json": ""} for event in events if event["type"] == "content_block_start"}
        for event in events:
            if event["type"] == "content_block_delta":
                block, delta = blocks[event["index"]], event["delta"]
                block["json"] += delta.get("partial_json", "")
                block["text"] = block.get("text", "") + delta.get("text", "")
        texts = [{"type": "text", "text": block["text"]} for block in blocks.values() if block["type"] == "text"]
        calls = [
            {"type": "tool_use", "id": block["id"], "name": block["name"], "input": json.loads(block["json"])}
            for block in blocks.values()
            if block["type"] == "tool_use"
        ]
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "1"} for call in calls]
        messages += [{"role": "assistant", "content": texts + calls}, *([{"role": "user", "content": results}] if results else [])]
    return "".join(text["text"] for text in texts)


FINALIZE = """
import asyncio, importlib, json, sys, warnings
from tokencache.integrations.nemo_gym.capture import CaptureSource, gym
from tokencache.integrations.nemo_gym.proving import ProvingSource

TokenCaptureStore = gym.TokenCaptureStore
finalize_rollout_token_capture = importlib.import_module(gym.__name__ + ".delivery").finalize_rollout_token_capture

async def main(result, names):
    for name in names:
        found, source = json.loads(result), eval(name)
        await finalize_rollout_token_capture(found, source)
        await source.close()
        print(json.dumps(found))

warnings.simplefilter("ignore")
asyncio.run(main(sys.argv[1], sys.argv[2:]))
"""


def finalized(rollout, text, source, place, path=()):
    """What Gym's finalizer makes of the rollout, with the ids of Gym's result: of this source, and of `ProvingSource` around it."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    output = [{"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": content}]
    result = json.dumps({"_ng_rollout_id": rollout, "response": {"model": "sim", "output": output}})
    plain = source.format(place)
    command = [str(default_venv() / "bin/python"), "-c", FINALIZE, result, plain, f"ProvingSource({plain})"]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=variables)
    return [outcome(json.loads(line)) for line in done.stdout.splitlines()]


def outcome(result):
    built = result["_ng_token_capture"]
    assert built["n_calls"] == len(EPISODE)
    if result.get("mask_sample"):
        return MASKED
    assert (built["chains"], built["delivered_fraction"]) == (1, 1.0)
    return DELIVERED


async def test_what_a_harness_changes_masks_the_rollout_unless_its_tokens_are_compared(engine, nodes, tmp_path):
    folder = str(tmp_path / "captures")
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(proxying(engine, MemoryStore()))
        urls, http = await nodes(stack, "tokencache_model", proxy.url, {"dir": folder})
        harnesses = {"as-served": as_served, "strips": strips, "renames": renames, "drops-text": drops_text, "rewrites": rewrites}
        texts = {name: await chat(urls, http, name, change) for name, change in harnesses.items()}
    assert {name: finalized(name, text, GYM_FILES, folder) for name, text in texts.items()} == {
        "as-served": [DELIVERED, DELIVERED],
        "strips": [MASKED, DELIVERED],
        "renames": [MASKED, DELIVERED],
        "drops-text": [MASKED, DELIVERED],
        "rewrites": [MASKED, MASKED],  # another history, and for tokencache, too
    }


async def test_without_exact_prefixes_no_comparison_of_tokens_helps(engine, nodes, tmp_path):
    folder = str(tmp_path / "captures")
    async with AsyncExitStack() as stack:
        urls, http = await nodes(stack, "vllm_model", engine, {"dir": folder})
        text = await chat(urls, http, "strips", strips)
    assert finalized("strips", text, GYM_FILES, folder) == [MASKED, MASKED]


@pytest.mark.parametrize("names", ["of 0.7.0", "of Gym's main branch"])
async def test_two_servers_without_a_shared_folder_capture_one_rollout(engine, nodes, tmp_path, names):
    path = []
    if names != "of 0.7.0":
        (site_packages,) = default_venv().glob("lib/python*/site-packages")
        path.append(copy_with_main_names(site_packages, tmp_path / "main"))
    with RealRedis() as redis:
        place = f"redis://127.0.0.1:{redis.port}/1"
        names = {"sink": "CaptureSink", "lineage_store": "CaptureResolver"}
        capture = {option: f"tokencache.integrations.nemo_gym.capture:{name}" for option, name in names.items()}
        capture |= {f"{option}_kwargs": {"url": place} for option in names} | {"rebuild_response": False}
        async with AsyncExitStack() as stack:
            proxy = await stack.enter_async_context(proxying(engine, MemoryStore()))
            urls, http = await nodes(stack, "tokencache_model", proxy.url, capture, count=2, path=path)
            texts = {
                "chat": await chat(urls, http, "chat", as_served),
                "messages": await streamed_messages(urls, http, "messages"),
                "strips": await chat(urls, http, "strips", strips),
            }
        assert {name: finalized(name, text, OUR_STORE, place, path) for name, text in texts.items()} == {
            "chat": [DELIVERED, DELIVERED],
            "messages": [DELIVERED, DELIVERED],
            "strips": [MASKED, DELIVERED],
        }
