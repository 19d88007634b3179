"""Plays the calls of real agent programs again, on a real vLLM, and reads how much of their prompts was in its prefix cache.

The requests are those of tests/system/corpus that use chat completions without images. The engine is made to sample the recorded replies
(`bench/forced.py`), a tenth of their tokens in two pieces (*drift*). What the program sent back in its later requests is unchanged, but for
the ids of calls, which are new. So direct calls lose what the program loses, and the engine's own tokenizing.
"""

import json
import random
import re
from typing import Any

import aiohttp

from bench.gain_engine import MODEL, Engine
from bench.gain_rollout import DRIFT
from bench.processes import ROOT
from tests.system.corpus.format import Call, Recording, read
from tests.system.corpus.replies import read_reply

CORPUS = ROOT / "tests/system/corpus"


def recordings() -> list[Recording]:
    """The sessions that can be played: chat completions, no images, no reply that was left."""
    found = [read(path) for path in sorted(CORPUS.glob("*.jsonl")) if "_images" not in path.name]
    return [one for one in found if one.header.dialect == "chat" and all(call.ended == "whole" for call in one.calls)]


class Player:
    """One session on one target; `name` is at the beginning of its prompts, so that two share no block of the prefix cache."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self._engine = name, engine
        self._rng = random.Random(0)
        self._renamed: dict[str, str] = {}

    def body(self, call: Call) -> dict[str, Any]:
        """The request of a call, for this engine: the recorded one, with the ids of calls as they were served now."""
        text = json.dumps(call.body)
        if self._renamed:
            text = re.sub("|".join(map(re.escape, self._renamed)), lambda found: self._renamed[found[0]], text)
        body: dict[str, Any] = json.loads(text)
        say = self._engine.tokenizer.resample(str(call.said), self._rng, DRIFT)
        for limit in ("max_tokens", "max_completion_tokens"):
            body.pop(limit, None)
        _mark(body["messages"][0], self.name)
        return body | {"model": MODEL, "temperature": 0, "max_tokens": len(say) + 8, "vllm_xargs": {"say": say}}

    def served(self, call: Call, answer: str) -> None:
        """Notes the ids of calls in an answer.

        Raises:
            RuntimeError: It has other calls than the recorded one.
        """
        now = read_reply("chat", answer, stream=call.stream).served
        if len(now) != len(call.served):
            raise RuntimeError(f"{self.name}, call {call.call}: the recorded reply has {call.served}, this one {now}: {answer[:500]}")
        self._renamed.update((old, new) for (_, old), (_, new) in zip(call.served, now, strict=True))


def _mark(message: dict[str, Any], name: str) -> None:
    content = message["content"]
    if isinstance(content, str):
        message["content"] = f"{name}\n{content}"
    else:
        content[0]["text"] = f"{name}\n{content[0]['text']}"


async def run_workload(target: str, engine: Engine, url: str) -> list[dict[str, Any]]:
    """Plays all sessions, call after call; returns the tokens that were looked up and found, for each program."""
    found = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as http:
        for recording in recordings():
            harness = recording.header.harness
            player = Player(f"{target} {harness}".replace(",", ""), engine)
            before = engine.prefix_cache()
            for call in recording.calls:
                headers = {"X-Tokencache-Session": player.name.replace(" ", "-")}
                async with http.post(url, json=player.body(call), headers=headers) as answer:
                    text = await answer.text()
                if answer.status != 200:
                    raise RuntimeError(f"{player.name}, call {call.call}: {answer.status} {text[:500]}")
                player.served(call, text)
            queries, hits = (now - then for now, then in zip(engine.prefix_cache(), before, strict=True))
            found.append({"target": target, "harness": harness, "calls": len(recording.calls), "queries": queries, "hits": hits})
    return found
