"""A harness that does all that harnesses do to a history, at random, over HTTP.

It keeps conversations (*threads*) of one session as it sees them, text only, and knows nothing of tokens. Every step is
one call; what it did is counted, so that a test can say that it happened.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections import Counter
from typing import Any

from tests.proxy.kit import TOOLS, Rig, assembled, user

WORDS = (
    "ls",
    "go on",
    "why?",
    "naïve café ☕",
    "<|im_end|>\n<|im_start|>assistant\n",
    "</think>",
    '{"a": 1}',
    "  spaced  ",
    "",
    "🧑‍🚀\u0000\ufeff",
)
OTHER_TOOLS = [
    {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}},
    *TOOLS,
]


class Harness:
    """One session's agent program."""

    def __init__(self, rig: Rig, session: str, seed: int) -> None:
        self.rig, self.session = rig, session
        self.rng = random.Random(f"{seed}:{session}")
        self.did: Counter[str] = Counter()
        self.calls = 0
        self.tools = self.rng.choice([TOOLS, TOOLS, None])
        self.threads: list[list[dict[str, Any]]] = []
        self.others = 0

    def opening(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": f"You are agent {self.rng.randrange(3)}."}] if self.rng.random() < 0.7 else []
        return [*system, user(f"Task {self.rng.randrange(3)}: {self.rng.choice(WORDS)}")]

    async def run(self, steps: int) -> None:
        self.threads.append(self.opening())
        for _ in range(steps):
            if self.rng.random() < 0.15:  # sub-agents side by side
                await asyncio.gather(*(self.step() for _ in range(self.rng.randint(2, 3))))
                self.did["parallel"] += 1
            else:
                await self.step()

    async def step(self) -> None:
        act = self.rng.choices(
            ("go on", "retry", "rollback", "fork", "fresh", "edit system", "edit middle", "prune", "compact"), (30, 2, 3, 3, 2, 2, 3, 2, 1)
        )[0]
        at = self.rng.randrange(len(self.threads))
        history = copy.deepcopy(self.threads[at])
        changed = getattr(self, "_" + act.replace(" ", "_"))(history)
        if changed is None:
            act, changed = "go on", history
        self.did[act] += 1
        if act in {"fork", "fresh"} and len(self.threads) < 4:
            self.threads.append(changed)
            at = len(self.threads) - 1
        message = await self.call(changed)
        if message is None:
            return
        self.threads[at] = [*changed, self.echo(message), *self.answers(message)]

    # what a harness does to a history; None: not possible here

    def _go_on(self, history: list) -> list:
        return history

    def _retry(self, history: list) -> list | None:
        return self._rollback(history, last=True)

    def _rollback(self, history: list, *, last: bool = False) -> list | None:
        """Back to just before some reply: the same request again."""
        places = [i for i, m in enumerate(history) if m["role"] == "assistant"]
        return history[: places[-1] if last else self.rng.choice(places)] if places else None

    def _fork(self, history: list) -> list | None:
        """From some point on, other words."""
        back = self._rollback(history)
        return [*back, user(f"Rather: {self.rng.choice(WORDS)}")] if back and back[-1]["role"] == "user" else back

    def _fresh(self, _history: list) -> list:
        return self.opening()

    def _edit_system(self, history: list) -> list:
        self.others += 1
        edited = {"role": "system", "content": f"It is {self.others} o'clock."}
        return [edited, *(history[1:] if history[0]["role"] == "system" else history)]

    def _edit_middle(self, history: list) -> list | None:
        places = [i for i, m in enumerate(history[:-1]) if m["role"] in {"user", "tool"} and i]
        if not places:
            return None
        self.others += 1
        history[self.rng.choice(places)]["content"] = f"edited {self.others}"
        return history

    def _prune(self, history: list) -> list | None:
        """Old results of tools are put away, as compactions do."""
        old = [m for m in history[:-2] if m["role"] == "tool" and m["content"] != "[old]"]
        for message in old:
            message["content"] = "[old]"
        return history if old else None

    def _compact(self, history: list) -> list | None:
        """The beginning gives way to a summary; the last exchange stays."""
        places = [i for i, m in enumerate(history) if m["role"] == "user" and i]
        if len(places) < 2:
            return None
        self.others += 1
        return [user(f"Summary {self.others} of what was."), *history[places[-2] :]]

    # one call

    async def call(self, messages: list) -> dict[str, Any] | None:
        rng = self.rng
        body: dict[str, Any] = {"messages": messages, "stream": rng.random() < 0.5}
        if self.tools:
            body["tools"] = self.tools
        body |= self._odd_option()
        body |= rng.choice([{}, {}, {"return_token_ids": True}, {"logprobs": True}])
        for name in ("max_tokens", "stop", "n", "tool_choice", "chat_template_kwargs", "include_reasoning"):
            self.did[name] += name in body
        self.did["stream"] += body["stream"]
        self.calls += 1
        status, said = await self.rig.post(self.session, named=f"{self.session}-{self.calls}", **body)
        if body.get("temperature"):
            assert status == 400
            return None
        assert status == 200, said
        index = rng.randrange(body.get("n", 1))
        return assembled(said, index) if body["stream"] else said["choices"][index]["message"]

    def _odd_option(self) -> dict[str, Any]:
        """Now and then a call is not like the others."""
        options: list[tuple[float, dict[str, Any]]] = [
            (0.06, {"max_tokens": self.rng.randint(1, 25)}),
            (0.04, {"stop": [self.rng.choice(["file", "e", "in"])]}),
            (0.04, {"n": 2}),
            (0.03, {"tool_choice": "none"} if self.tools else {}),
            (0.02, {"chat_template_kwargs": {"enable_thinking": False}}),
            (0.02, {"tools": OTHER_TOOLS}),
            (0.02, {"temperature": -1.0}),
            (0.02, {"include_reasoning": False}),
            (0.75, {}),
        ]
        return self.rng.choices([option for _, option in options], [weight for weight, _ in options])[0]

    def echo(self, message: dict[str, Any]) -> dict[str, Any]:
        """What of a reply comes back, and how it is written down then."""
        rng = self.rng
        content = message.get("content") or None
        said: dict[str, Any] = {
            "role": "assistant",
            "content": rng.choice([str.strip, str.rstrip, str])(content) if content else rng.choice([None, ""]),
        }
        if content and rng.random() < 0.1:
            said["content"] = [{"type": "text", "text": content}]
        if (thought := message.get("reasoning")) and rng.random() < 0.3:
            said[rng.choice(["reasoning", "reasoning_content"])] = thought
        if message.get("tool_calls"):
            said["tool_calls"] = [
                {**c, "function": {**c["function"], "arguments": self._again(c["function"]["arguments"])}} for c in message["tool_calls"]
            ]
        if rng.random() < 0.04:
            said["content"] = "Not what the model said."
            self.did["rewritten"] += 1
        return said

    def _again(self, arguments: str) -> str:
        try:
            value = json.loads(arguments)
        except ValueError:
            return arguments
        return self.rng.choice([arguments, json.dumps(value, sort_keys=True), json.dumps(value, separators=(",", ":"))])

    def answers(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        calls = message.get("tool_calls") or ()
        after = [{"role": "tool", "tool_call_id": call["id"], "content": self.rng.choice(WORDS)} for call in calls]
        return after or [user(self.rng.choice(WORDS))]
