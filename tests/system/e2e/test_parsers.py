"""Every parser of vLLM 0.32 that this template suits: a session gets the replies that a direct client gets, whatever its prompt contains.

The parsers are vLLM's own classes, in its environment (`rig/parsers.py`). The rest of the engine is simulated, because a real one would
have to be started for each parser.
"""

import json
import os
import subprocess

import pytest
from rig.server import HERE, default_venv

from tests.proxy.kit import proxied, user
from tokencache.testing import SimulatedEngine, build_tokenizer, completion
from tokencache.testing.parser import ParsedText

REPLIES = [f"<think>\nThought {n}.\n</think>\n\nAnswer {n}." for n in ("one", "two", "three")]
CHOICE = {"structured_outputs": {"choice": ["yes", "no"]}}
READ_EARLIER_THOUGHTS = {
    **dict.fromkeys(("deepseek_r1", "ernie45", "holo2", "hy_v4", "minicpmv"), ""),
    **dict.fromkeys(("deepseek_v4", "glm45", "kimi_k2", "ling3", "minimax_m2", "minimax_m2_append_think"), ""),
    "step3": "begun",
}
"""Name → whether it does so although the generation prompt begins a thought."""
OTHERS = ("qwen3", "nemotron_v3", "step3p5", "mimo", "granite_thinking_parser", "deepseek_v3")
LATE_LINE_BREAK = {"deepseek_v4", "glm45", "kimi_k2", "ling3", "minimax_m2"}
"""Parsers that leave out the line break at the end of a thought in whole replies, but not in streams."""


class Parsers:
    """vLLM's parsers, in place of the simulated engine's."""

    def __init__(self, folder):
        build_tokenizer().save(folder)
        quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "CRITICAL"}
        self.process = subprocess.Popen(
            [str(default_venv().absolute() / "bin/python"), str(HERE / "parsers.py"), str(folder)],
            env=os.environ | quiet | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.prompt = []

    def ask(self, *command):
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert "error" not in answer if isinstance(answer, dict) else True, answer
        return answer

    def reasoning_is_over(self, prompt_ids, _tokenizer, **_more):
        self.prompt = list(prompt_ids)
        return self.ask("ended", self.prompt)

    def parse_reply(self, text, **_more):
        reasoning, content = self.ask("whole", self.prompt, text)
        return ParsedText(reasoning, content)

    def stream(self, **_more):
        return Stream(self, self.ask("stream", self.prompt))

    def close(self):
        self.process.stdin.close()
        self.process.wait(30)


class Stream:
    """A stream's parser."""

    called = False

    def __init__(self, parsers, number):
        self.parsers, self.number = parsers, number

    def feed(self, text, *, finished=False):
        reasoning, content = self.parsers.ask("feed", self.number, text, finished)
        found = {"content": content, "reasoning": reasoning}
        return {name: value for name, value in found.items() if value} or None


@pytest.fixture(scope="module")
def parsers(tmp_path_factory):
    made = Parsers(tmp_path_factory.mktemp("tokenizer"))
    yield made
    made.close()


@pytest.fixture(params=[*READ_EARLIER_THOUGHTS, *OTHERS])
async def rig(request, parsers, monkeypatch):
    parsers.ask("use", request.param)
    monkeypatch.setattr(completion, "reasoning_is_over", parsers.reasoning_is_over)
    monkeypatch.setattr(completion, "StreamParser", parsers.stream)
    monkeypatch.setattr(completion, "parse_reply", parsers.parse_reply)
    async with proxied(SimulatedEngine(episodes={"think": REPLIES}, seed=7), of_its_own_kind=True) as made:
        yield made


def said(message, name):
    """A reply without what no client can rely on."""
    reasoning = message["reasoning"].rstrip("\n") if name in LATE_LINE_BREAK else message["reasoning"]
    return reasoning, message["content"]


async def test_twelve_parsers_and_more(rig, request):
    name = request.node.callspec.params["rig"]
    found = (await rig.proxy.engine.model()).capability.earlier_thoughts
    assert (bool(found.closed), bool(found.begun)) == (name in READ_EARLIER_THOUGHTS, READ_EARLIER_THOUGHTS.get(name) == "begun")
    histories = {"s": [user("EPISODE:think")], None: [user("EPISODE:think")]}
    for stream in (True, True, False):
        through, direct = [await rig.say(session, history, stream=stream) for session, history in histories.items()]
        assert said(through, name) == said(direct, name)
        for history in histories.values():
            history += [{"role": "assistant", "content": direct["content"].strip()}, user("next")]
    bound = [await rig.say(session, history, **CHOICE) for session, history in histories.items()]
    assert said(bound[0], name) == said(bound[1], name)
    reason = ("plain", "earlier-thought") if name in READ_EARLIER_THOUGHTS else ("continue", "")
    turns = [(turn["match"], turn["reason"]) for turn in await rig.turns()]
    assert turns == [("root", ""), ("continue", ""), ("continue", ""), reason]
