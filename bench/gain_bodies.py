"""Measures what a call costs the engine's API server, by the content of its body; the prefix cache always holds the whole prompt.

`messages`: the call as a harness sends it, so the server validates every message, renders the template and tokenizes. `ids`: the same,
plus the exact ids as the proxy sends them to a stock vLLM. `prefix`: as the proxy sends it to one with the plugin: the beginning of the
prompt by its hash, the ids after it, and one message.
"""

import contextlib
import json
import time
from typing import Any

from bench.client import CHAT, Client
from bench.gain_engine import MODEL, Engine
from bench.gain_rollout import PER_MESSAGE, SETTLE_S, SMALL, STREAMED, TOOL, CallTarget, history, send_streamed
from tokencache.core import ids
from tokencache.engine.prefixes import MEMBER, PromptHashes

ASKED = {"return_token_ids": True, "logprobs": True}
"""What the proxy requests in addition."""


def asked(engine: Engine, body: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
    """The answer to a request that is not streamed."""
    with contextlib.closing(Client(engine.process.port)) as client:
        return json.loads(client.post(json.dumps(body).encode(), path=path).body)


def named(packed: bytes, known: int, *, packs: bool = False) -> dict[str, Any]:
    """A request of one message that names a prompt, of which so many tokens are known."""
    name = PromptHashes().name(packed, known, echo=False).member(PER_MESSAGE, packed=packs)
    return {"messages": [{"role": "user", "content": "Hello."}], **ASKED, "kv_transfer_params": {MEMBER: name}}


def named_body(engine: Engine, same: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
    """A call whose prompt is as long as `prompt`, and named by a hash up to a reply that the engine has just sampled."""
    known = prompt[: -SMALL - 1]
    first = asked(engine, {**same, "stream": False, "stream_options": None, **named(ids.pack(known), 0)})
    known += first["choices"][0]["token_ids"]
    return named(ids.pack(known + prompt[-SMALL:]), len(known), packs=True)


def run_bodies(engine: Engine, plugin: Engine, marks: list[int], repeats: int) -> list[dict[str, Any]]:
    """A row for each length; the kinds of body are sent in turn, so that a disturbance affects all alike.

    Args:
        engine: a stock vLLM, which gets the first two kinds.
        plugin: one with the plugin, which gets the third.
        marks: lengths of the history, in tokens.
        repeats: calls of each kind.
    """
    stock, other = CallTarget("direct", engine), CallTarget("plugin", plugin)
    targets = {"messages": stock, "ids": stock, "prefix": other}
    same = {"tools": [TOOL], **STREAMED, "max_tokens": 1, "temperature": 0}
    rows = []
    for mark in marks:
        messages = history(engine, mark)
        prompt = asked(engine, {"model": MODEL, "messages": messages, "tools": [TOOL]}, "/tokenize")["tokens"]
        exact = {**ASKED, "kv_transfer_params": {"prompt_token_ids": prompt}}
        bodies = {"messages": {"messages": messages}, "ids": {"messages": messages, **exact}, "prefix": named_body(plugin, same, prompt)}
        sent = {name: json.dumps({**same, **body}).encode() for name, body in bodies.items()}
        for name in ("ids", "prefix"):
            send_streamed(targets[name], sent[name])  # now the prompt is cached
        seen: dict[str, list[float]] = {name: [] for name in sent}
        for _ in range(repeats):
            for name, body in sent.items():
                time.sleep(SETTLE_S)
                before = targets[name].cpu()[0]
                seen[name].append(round((send_streamed(targets[name], body).at_first[0] - before) * 1e3, 2))
        kinds = {name: {"api_cpu_ms": values} for name, values in seen.items()}
        rows.append({"mark": mark, "tokens": len(prompt), "messages": len(messages), "bodies": kinds})
    return rows
