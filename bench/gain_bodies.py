"""Measures what a call costs the engine's API server, by the content of its body; the prefix cache always holds the whole prompt.

`messages`: the call as a harness sends it, so the server validates every message, renders the template and tokenizes. `ids`: the same,
plus the exact ids as the proxy sends them to a stock vLLM. `prefix`: as the proxy sends it to one with the plugin: the beginning of the
prompt by its hash, the ids after it, and one message.
"""

import contextlib
import json
import random
import time
from typing import Any

from bench.client import Client
from bench.gain_engine import MODEL, Engine
from bench.gain_rollout import SETTLE_S, SMALL, STREAMED, TOOL, CallTarget, send_streamed
from bench.talk import text
from tokencache.core import ids
from tokencache.engine.prefixes import MEMBER, PromptHashes

PER_MESSAGE = 150
"""Tokens per message: 32k tokens in some 200 messages, like agents' histories."""
ASKED = {"return_token_ids": True, "logprobs": True}
"""What the proxy requests in addition."""


def history(engine: Engine, tokens: int) -> list[dict[str, Any]]:
    """An agent's history of about this many tokens: thinking and a call, its result, and so on."""
    rng = random.Random(tokens)

    def words(count: int) -> str:
        return engine.tokenizer.decode(engine.tokenizer.encode(text(rng, 8 * count))[:count])

    messages: list[dict[str, Any]] = [{"role": "system", "content": f"bodies {tokens}"}, {"role": "user", "content": words(PER_MESSAGE)}]
    for n in range(tokens // (2 * PER_MESSAGE)):
        call = {"name": "bash", "arguments": json.dumps({"command": words(PER_MESSAGE // 3)})}
        calls = [{"id": f"call_{n}", "type": "function", "function": call}]
        messages.append({"role": "assistant", "content": "", "reasoning": words(PER_MESSAGE // 3), "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": f"call_{n}", "content": words(PER_MESSAGE)})
    return messages


def named_body(engine: Engine, same: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
    """The members of a call whose prompt is as long as `prompt`, and named by a hash up to a reply that the engine has just sampled."""
    short = {"messages": [{"role": "user", "content": "Hello."}], **ASKED}
    known = prompt[: -SMALL - 1]
    first = {**same, "stream": False, "stream_options": None, **short, **named(ids.pack(known), 0)}
    with contextlib.closing(Client(engine.process.port)) as client:
        answer = json.loads(client.post(json.dumps(first).encode()).body)
    known += answer["choices"][0]["token_ids"]
    return {**short, **named(ids.pack(known + prompt[-SMALL:]), len(known), packs=True)}


def named(packed: bytes, known: int, *, packs: bool = False) -> dict[str, Any]:
    """The member of a request that names a prompt."""
    return {"kv_transfer_params": {MEMBER: PromptHashes().name(packed, known, echo=False).member(PER_MESSAGE, packed=packs)}}


def run_bodies(engine: Engine, plugin: Engine, marks: list[int], repeats: int) -> list[dict[str, Any]]:
    """A row for each length; the kinds of body are sent in turn, so that a disturbance affects all alike.

    Args:
        engine: a stock vLLM, which gets the first two kinds.
        plugin: one with the plugin, which gets the third.
        marks: lengths of the history, in tokens.
        repeats: calls of each kind.
    """
    stock, other = CallTarget("direct", engine), CallTarget("plugin", plugin)
    rows = []
    for mark in marks:
        messages = history(engine, mark)
        same = {"tools": [TOOL], **STREAMED, "max_tokens": 1, "temperature": 0}
        asked = json.dumps({"model": MODEL, "messages": messages, "tools": [TOOL]}).encode()
        with contextlib.closing(Client(engine.process.port)) as client:
            prompt = json.loads(client.post(asked, path="/tokenize").body)["tokens"]
        exact = {**ASKED, "kv_transfer_params": {"prompt_token_ids": prompt}}
        bodies: dict[str, dict[str, Any]] = {"messages": {"messages": messages}, "ids": {"messages": messages, **exact}}
        bodies["prefix"] = named_body(plugin, same, prompt)
        sent = {name: json.dumps({**same, **body}).encode() for name, body in bodies.items()}
        targets = {"messages": stock, "ids": stock, "prefix": other}
        for name in ("ids", "prefix"):
            send_streamed(targets[name], sent[name])  # now the prompt is cached
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in sent}
        for _ in range(repeats):
            for name, body in sent.items():
                time.sleep(SETTLE_S)
                before = targets[name].cpu()[0]
                answered = send_streamed(targets[name], body)
                seen[name].append((answered.first * 1e3, (answered.at_first[0] - before) * 1e3))
        kinds = {
            name: {
                "bytes": len(sent[name]),
                "ttft_ms": [round(wall, 2) for wall, _ in values],
                "api_cpu_ms": [round(cpu, 2) for _, cpu in values],
            }
            for name, values in seen.items()
        }
        rows.append({"mark": mark, "tokens": len(prompt), "messages": len(messages), "bodies": kinds})
    return rows
