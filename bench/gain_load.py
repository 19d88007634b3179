"""Measures what operators ask, on a real vLLM: `python -m bench.gain_load [--quick]`. Writes bench/out/gain-load-<time>.json.

*Load*: 32 sessions share a history of 8k or 32k tokens and talk on, each call after the reply to the one before. The model has one layer,
so the API server is the limit and not the engine process.

*Workload*: the calls of real agent programs, those of tests/system/corpus that use chat completions without images. The engine is made to
sample the recorded replies, a tenth of their tokens in two pieces (*drift*). What the program sent back in its later requests is unchanged,
but for the ids of calls, which are new. So direct calls lose what the program loses, and the engine's own tokenizing.
"""

import argparse
import contextlib
import itertools
import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.client import Client
from bench.gain_engine import CONFIG, MODEL, Engine, engines
from bench.gain_report import show
from bench.gain_rollout import DRIFT, OWN, PEERS, PLUGIN, STREAMED, TOOL, CallTarget, assembled, forced, history, opened
from bench.processes import ROOT
from bench.run import Run
from bench.stats import percentile
from tests.system.corpus.format import Call, Recording, read
from tests.system.corpus.replies import read_reply

SESSIONS = 32
LENGTHS = [8_000, 32_000]
SECONDS = 15.0
WARMING = 2
"""Calls of each session before the clock starts."""
REPLY = "<think>\nGo on.\n</think>\n\nDone."
ONE_LAYER = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128, "head_dim": 64}
ONE_LAYER |= {"num_attention_heads": 1, "num_key_value_heads": 1}
CORPUS = ROOT / "tests/system/corpus"


class Session:
    """One of the concurrent sessions: a shared history, then its own messages, over one connection."""

    def __init__(self, port: int, shared: bytes, name: str, say: list[int]) -> None:
        self.name, self._connection, self._messages = name, Client(port), shared
        self._rest = b"]," + json.dumps({"tools": [TOOL], **STREAMED, **forced(say)}).encode()[1:]
        self._add({"role": "user", "content": f"{name}: begin."})

    def _add(self, message: dict[str, Any]) -> None:
        self._messages += b"," + json.dumps(message).encode()

    def call(self) -> float:
        """Makes the next call; returns the seconds to the first event. `RuntimeError`: the answer is not a stream with the forced reply."""
        seen: list[int] = []
        body = b'{"messages":[' + self._messages + self._rest
        answer = self._connection.post(body, self.name, at_event=lambda: seen.append(time.monotonic_ns()))
        message, _ = assembled(answer.body)
        if not seen or message["content"] != "Done.":
            raise RuntimeError(f"port {self._connection.port} answered {answer.body[:1000]!r}")
        self._add(message)
        self._add({"role": "user", "content": "And now the next one, please, with all that you know."})
        return (seen[0] - answer.begun) / 1e9


def run_load(target: CallTarget, tokens: int, seconds: float) -> dict[str, Any]:
    """A closed loop: new sessions with a history of about `tokens`, for a time. Each makes some calls before the clock starts."""
    engine, messages = target.engine, history(target.engine, tokens)
    messages[0]["content"] = f"{target.name} {time.time_ns()}"  # no two runs share a block of the prefix cache
    shared, say = ",".join(map(json.dumps, messages)).encode(), engine.tokenizer.encode(REPLY)
    names = [f"{messages[0]['content']}-{n}".replace(" ", "-").replace(",", "") for n in range(SESSIONS)]
    sessions = [Session(target.process.port, shared, name, say) for name in names]
    sessions[0].call()
    with ThreadPoolExecutor(SESSIONS) as threads:
        for _ in range(WARMING):
            list(threads.map(Session.call, sessions))
        looked_up, cpu, begun = engine.prefix_cache(), target.cpu(), time.monotonic()

        def talk(session: Session) -> list[float]:
            seen = []
            while time.monotonic() < begun + seconds:
                seen.append(session.call())
            return seen

        firsts = sorted(itertools.chain.from_iterable(threads.map(talk, sessions)))
        took, used = time.monotonic() - begun, [now - then for now, then in zip(target.cpu(), cpu, strict=True)]
    queries, hits = (now - then for now, then in zip(engine.prefix_cache(), looked_up, strict=True))
    if target.name in OWN:
        for session in sessions:
            target.check_continued(session.name, WARMING)
    return {
        "target": target.name,
        "tokens": tokens,
        "calls": len(firsts),
        "calls_per_s": round(len(firsts) / took, 2),
        "ttft_p50_ms": round(percentile(firsts, 50) * 1e3, 1),
        "ttft_p99_ms": round(percentile(firsts, 99) * 1e3, 1),
        "api_cpu_ms": round(used[0] / len(firsts) * 1e3, 2),
        "front_cpu_ms": round(used[1] / len(firsts) * 1e3, 2),
        "found_cached": round(hits / queries, 4),
    }


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
        first = body["messages"][0]
        place, member = (first, "content") if isinstance(first["content"], str) else (first["content"][0], "text")
        place[member] = f"{self.name}\n{place[member]}"
        return body | {"model": MODEL} | forced(say)

    def served(self, call: Call, answer: str) -> None:
        """Notes the ids of calls in an answer. `RuntimeError`: it has other calls than the recorded one."""
        now = read_reply("chat", answer, stream=call.stream).served
        if len(now) != len(call.served):
            raise RuntimeError(f"{self.name}, call {call.call}: the recorded reply has {call.served}, this one {now}: {answer[:500]}")
        self._renamed.update((old, new) for (_, old), (_, new) in zip(call.served, now, strict=True))


def run_workload(target: CallTarget) -> list[dict[str, Any]]:
    """Plays all sessions, call after call; returns the tokens that were looked up and found, for each program."""
    engine, found = target.engine, []
    for recording in recordings():
        harness = recording.header.harness
        player = Player(f"{target.name} {harness}".replace(",", ""), engine)
        before = engine.prefix_cache()
        with contextlib.closing(Client(target.process.port)) as client:
            for call in recording.calls:
                answer = client.post(json.dumps(player.body(call)).encode(), player.name.replace(" ", "-"))
                player.served(call, answer.body.decode())
        queries, hits = (now - then for now, then in zip(engine.prefix_cache(), before, strict=True))
        found.append({"target": target.name, "harness": harness, "calls": len(recording.calls), "queries": queries, "hits": hits})
    return found


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m bench.gain_load", description="Measure how many calls vLLM's API server carries.")
    asked.add_argument("--quick", action="store_true", help="8k only, five seconds each")
    options = asked.parse_args()
    lengths, seconds = ([8_000], 5.0) if options.quick else (LENGTHS, SECONDS)
    run = Run()
    found: dict[str, Any] = {"load": [], "workload": [], "skipped": {}}
    run.say("starting vLLM, stock and with the plugin: about two minutes")
    with engines(found, CONFIG | ONE_LAYER, f"--max-num-seqs {SESSIONS}") as (stock, plugin):
        for name in (*OWN, *PEERS):
            try:
                with opened(name, plugin if name == PLUGIN else stock) as target:
                    for tokens in lengths:
                        run.say(f"{name}: {SESSIONS} sessions at {tokens:,} tokens")
                        found["load"].append(run_load(target, tokens, seconds))
                    if name in OWN:
                        run.say(f"{name}: recorded agents")
                        found["workload"] += run_workload(target)
            except (FileNotFoundError, RuntimeError) as why:
                if name not in PEERS:
                    raise
                found["skipped"][name] = str(why)
    found["seconds"] = run.seconds
    show(found, run.console)
    run.keep(found, "gain-load-", "; python -m bench.gain_report writes the page")


if __name__ == "__main__":
    main()
