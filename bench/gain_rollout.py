"""Runs sessions against a real engine and measures each call: time to first token, prefix cache hits, CPU by the content of its body.

The harness here is *faithful*: it sends back content, thinking and calls exactly as they were served. No real harness loses less, so
what the direct calls lose comes from the text alone: tokenizing again, and what the chat template omits.
"""

import contextlib
import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bench import client, targets
from bench.gain_engine import MODEL, Engine
from bench.processes import Process, cpu_seconds
from tokencache.core import ids
from tokencache.engine.prefixes import MEMBER, PromptHashes

_PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOL = {"type": "function", "function": {"name": "bash", "description": "Run a command.", "parameters": _PARAMETERS}}
DIRECT, PROXY, PLUGIN = OWN = "direct", "proxy", "proxy, plugin"
RERENDER, LITELLM = PEERS = "rerender", "litellm"
LONG, SHORT = (32, 16), (8, 8)
"""Tokens of thinking and of the call or answer: of a reply whose loss is measured, and of other replies."""
SMALL = 60
"""Tokens of a tool result, or of the user's message, before a measured call."""
DRIFT = 0.1
"""Share of the tokens that a drifting reply emits in two pieces."""
SETTLE_S = 0.02
PER_MESSAGE = 150
"""Tokens per message of a history: 32k tokens in some 200 messages, like agents' histories."""
STREAMED = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}}
ASKED = {"return_token_ids": True, "logprobs": True}
"""What the proxy requests in addition."""


def forced(say: list[int]) -> dict[str, Any]:
    """The members of a request that force the ids of the reply (`bench.forced`)."""
    return {"temperature": 0, "max_tokens": len(say) + 8, "vllm_xargs": {"say": say}}


class StreamedAnswer(NamedTuple):
    """A streamed answer: seconds and CPU accounts to its first event, the message that a harness builds of it, the engine's usage."""

    first: float
    at_first: list[float]
    message: dict[str, Any]
    usage: dict[str, Any]


@dataclass(frozen=True)
class CallTarget:
    """Where calls are sent. `front`: the program in front of the engine; None for the engine itself."""

    name: str
    engine: Engine
    front: Process | None = None

    @property
    def process(self) -> Process:
        """What answers the calls."""
        return self.front or self.engine.process

    def cpu(self) -> list[float]:
        """CPU seconds so far of the engine's API server (not of its engine process, which computes) and of the program in front of it."""
        return [cpu_seconds(self.engine.process.pid), self.front.cpu() if self.front else 0.0]

    def check_continued(self, session: str, least: int) -> int:
        """Returns the number of a session's turns. Raises the errors of `client.check_continued`."""
        return client.check_continued([self.process.port], session, least) if self.front else least


@contextlib.contextmanager
def opened(name: str, engine: Engine, *, tokenizer: bool = True) -> Iterator[CallTarget]:
    """A target: the engine itself, another program in front of it, or the proxy with the engine's tokenizer, or without one."""
    with contextlib.ExitStack() as stack:
        front = None
        if name in PEERS:
            os.environ["BENCH_TOKENIZER"] = str(engine.model_dir)
            peer = targets.litellm(engine.process, MODEL) if name == LITELLM else targets.program(engine.process, name)
            front = stack.enter_context(peer).processes[0]
        elif name != DIRECT:
            more = ["--tokenizer", str(engine.model_dir)] if tokenizer else []
            front = stack.enter_context(targets.serve(engine.process, "memory:", *more))
        yield CallTarget(name, engine, front)


def send_streamed(target: CallTarget, body: bytes, session: str | None = None) -> StreamedAnswer:
    """Sends a streamed call and reads all of it; clock and CPU accounts are read at the first event. `RuntimeError`: it is no stream."""
    seen: list[tuple[int, list[float]]] = []
    with contextlib.closing(client.Client(target.process.port)) as connection:
        answer = connection.post(body, session, at_event=lambda: seen.append((time.monotonic_ns(), target.cpu())))
    if not seen:
        raise RuntimeError(f"{target.name} answered {answer.body[:500]!r}")
    return StreamedAnswer((seen[0][0] - answer.begun) / 1e9, seen[0][1], *assembled(answer.body))


def assembled(stream: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """The message and the usage of a streamed chat completion."""
    content, reasoning, usage, calls = "", "", dict[str, Any](), list[dict[str, Any]]()
    for event in (json.loads(line[6:]) for line in stream.split(b"\n") if line.startswith(b"data: {")):
        usage = event.get("usage") or usage
        for delta in (choice["delta"] for choice in event["choices"]):
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning") or ""
            for piece in delta.get("tool_calls") or ():
                if piece["index"] == len(calls):
                    calls.append({"id": piece["id"], "type": "function", "function": {"name": "", "arguments": ""}})
                for name, value in (piece.get("function") or {}).items():
                    calls[piece["index"]]["function"][name] += value or ""
    more = {"reasoning": reasoning, "tool_calls": calls}
    return {"role": "assistant", "content": content.strip()} | {name: value for name, value in more.items() if value}, usage


def history(engine: Engine, tokens: int) -> list[dict[str, Any]]:
    """An agent's history of about this many tokens: thinking and a call, its result, and so on."""
    rng = random.Random(tokens)
    third = PER_MESSAGE // 3
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"bodies {tokens}"}]
    messages.append({"role": "user", "content": engine.words(rng, PER_MESSAGE)})
    for n in range(tokens // (2 * PER_MESSAGE)):
        call = {"name": "bash", "arguments": json.dumps({"command": engine.words(rng, third)})}
        calls = [{"id": f"call_{n}", "type": "function", "function": call}]
        messages.append({"role": "assistant", "content": "", "reasoning": engine.words(rng, third), "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": f"call_{n}", "content": engine.words(rng, PER_MESSAGE)})
    return messages


@dataclass
class Rollout:
    """A running session. `drift`: share of each reply's tokens that are not the tokenizer's; 0 for none.

    Rollouts with the same `seed` get the same text and produce the same replies.
    """

    target: CallTarget
    name: str
    seed: str
    tools: bool
    drift: float
    records: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        # The name is at the start: no two sessions share a block of the prefix cache.
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": f"{self.name}: you are a careful agent."}]
        self.tokens = 60  # of the history so far

    def words(self, tokens: int) -> str:
        """Text of about this many tokens."""
        return self.target.engine.words(self.rng, tokens).strip()

    def reply(self, sizes: tuple[int, int], *, calls: bool) -> str:
        """The text the model is to emit, exactly as the template would render it."""
        thought, rest = (self.words(size) for size in sizes)
        if calls:
            rest = f'<tool_call>\n{{"name": "bash", "arguments": {json.dumps({"command": rest}, ensure_ascii=False)}}}\n</tool_call>'
        return f"<think>\n{thought}\n</think>\n\n{rest}"

    def add_input(self, tokens: int) -> None:
        """Adds the next input: results of the open calls, or else a user message."""
        calls = self.messages[-1].get("tool_calls")
        message = {"role": "tool", "tool_call_id": calls[0]["id"]} if calls else {"role": "user"}
        self.messages.append(message | {"content": self.words(max(1, tokens))})

    def call(self, kind: str, mark: int, new_tokens: int, sizes: tuple[int, int], *, calls: bool) -> None:
        """One turn: input is added, the model replies, the accounts are read. `RuntimeError`: the reply is not the forced one."""
        self.add_input(new_tokens)
        engine, sampled_text = self.target.engine, self.reply(sizes, calls=calls)
        say = engine.tokenizer.resample(sampled_text, self.rng, self.drift)
        sent = json.dumps({"messages": self.messages, **STREAMED, **({"tools": [TOOL]} if self.tools else {}), **forced(say)}).encode()
        looked_up = engine.prefix_cache()
        time.sleep(SETTLE_S)  # background work of an earlier call must not count as this call's CPU
        before = self.target.cpu()
        answered = send_streamed(self.target, sent, self.name if self.target.front else None)
        queries, hits = (now - then for now, then in zip(engine.prefix_cache(), looked_up, strict=True))
        if bool(answered.message.get("tool_calls")) != calls or not answered.message.get("reasoning"):
            raise RuntimeError(f"the model should have replied {sampled_text!r}, but replied {answered.message!r}")
        self.messages.append(answered.message)
        self.tokens = answered.usage["total_tokens"]
        spent = {"queries": queries, "hits": hits, "prompt_tokens": answered.usage["prompt_tokens"]}
        api_cpu, proxy_cpu = (round((now - then) * 1e3, 2) for now, then in zip(answered.at_first, before, strict=True))
        times = {"ttft_ms": round(answered.first * 1e3, 2), "api_cpu_ms": api_cpu, "proxy_cpu_ms": proxy_cpu}
        self.records.append({"kind": kind, "mark": mark, **spent, **times})


def agent(rollout: Rollout, marks: list[int], repeats: int, sizes: tuple[int, int] = LONG) -> Iterator[None]:
    """A tool-using agent; at each mark some calls of its loop are measured, then the first call after another user message.

    It yields after each mark, so that several sessions can run side by side. `sizes`: of the replies that a measured call loses.
    """
    for mark in marks:
        rollout.call("grow", mark, (mark - rollout.tokens) // 2, SHORT, calls=True)
        rollout.call("grow", mark, mark - rollout.tokens, sizes, calls=True)
        for n in range(repeats):
            rollout.call("loop", mark, SMALL, sizes, calls=n < repeats - 1)
        rollout.call("follow-up", mark, SMALL, SHORT, calls=True)
        yield


def chat(rollout: Rollout, marks: list[int], repeats: int, sizes: tuple[int, int] = LONG) -> Iterator[None]:
    """User and assistant in turn, no tools; at each mark some calls are measured. It yields after each mark."""
    for mark in marks:
        rollout.call("grow", mark, mark - rollout.tokens, sizes, calls=False)
        for _ in range(repeats):
            rollout.call("chat", mark, SMALL, sizes, calls=False)
        yield


def asked(engine: Engine, body: dict[str, Any], path: str = client.CHAT) -> dict[str, Any]:
    """The answer to a request that is not streamed."""
    with contextlib.closing(client.Client(engine.process.port)) as connection:
        return json.loads(connection.post(json.dumps(body).encode(), path=path).body)


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
    """Measures what a call costs the engine's API server: a row for each length of the history, with so many calls of each body, in turn.

    `messages`: the call as a harness sends it, so the server validates every message, renders the template and tokenizes. `ids`: the same,
    plus the exact ids as the proxy sends them to a stock vLLM. `prefix`: as the proxy sends it to one with the plugin: the beginning of
    the prompt by its hash, the ids after it, and one message. The prefix cache always holds the whole prompt.
    """
    stock = CallTarget("direct", engine)
    receivers = {"messages": stock, "ids": stock, "prefix": CallTarget("plugin", plugin)}
    same = {"tools": [TOOL], **STREAMED, "max_tokens": 1, "temperature": 0}
    rows = []
    for mark in marks:
        messages = history(engine, mark)
        prompt = asked(engine, {"model": MODEL, "messages": messages, "tools": [TOOL]}, "/tokenize")["tokens"]
        exact = {**ASKED, "kv_transfer_params": {"prompt_token_ids": prompt}}
        bodies = {"messages": {"messages": messages}, "ids": {"messages": messages, **exact}, "prefix": named_body(plugin, same, prompt)}
        sent = {name: json.dumps({**same, **body}).encode() for name, body in bodies.items()}
        for name in ("ids", "prefix"):
            send_streamed(receivers[name], sent[name])  # now the prompt is cached
        seen: dict[str, list[float]] = {name: [] for name in sent}
        for _ in range(repeats):
            for name, body in sent.items():
                time.sleep(SETTLE_S)
                before = receivers[name].cpu()[0]
                seen[name].append(round((send_streamed(receivers[name], body).at_first[0] - before) * 1e3, 2))
        kinds = {name: {"api_cpu_ms": values} for name, values in seen.items()}
        rows.append({"mark": mark, "tokens": len(prompt), "messages": len(messages), "bodies": kinds})
    return rows
