"""Two agents of one session say the same short words: no prompt of one holds what the model said to the other."""

import msgspec
import pytest

from tests.proxy.kit import TOOLS, echo, proxied, user
from tokencache.core import evidence
from tokencache.testing import SimulatedEngine

Message = dict[str, object]
THOUGHT = "Secret thought of agent A."
EPISODES = {"a": [f"<think>\n{THOUGHT}\n</think>\n\nDone."], "b": ["<think>\nr\n</think>\n\nFine."]}
DONE = {"role": "assistant", "content": "Done."}


def call(name: str, cmd: str) -> Message:
    function = {"name": "bash", "arguments": f'{{"cmd": "{cmd}"}}'}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": name, "type": "function", "function": function}]}


def result(name: str, content: object = "ok") -> Message:
    return {"role": "tool", "tool_call_id": name, "content": content}


def parts(*texts: str) -> list[Message]:
    return [{"type": "text", "text": text} for text in texts]


ASKED = {"call": [call("call_a", "make"), result("call_a")], "user": [user("ok")]}
"""What agent A asks, in each case ending in "ok"."""
NEARLY = {
    "call": [
        [call("call_b", "rm -rf /"), result("call_b")],
        [call("call_b", "rm -rf /"), result("call_b", " ok\n")],
        [call("call_a", "make"), result("call_a", "ok\n")],
        [call("call_a", "make"), result("call_a", parts("ok", ""))],
        [call("functions.bash:0", "make"), result("functions.bash:0")],
        [result("call_b")],
        [user("ok")],
    ],
    "user": [
        [user(" ok")],
        [user("ok\n")],
        [user("ok\ufeff")],
        [{"role": "user", "content": parts("ok", "")}],
        [{**user("ok"), "name": "bob"}],
        [{"role": "system", "content": "ok"}],
        [call("call_b", "make"), result("call_b")],
    ],
}
"""What agent B has in their place."""


async def prompts_of_b(kind: str) -> list[str]:
    """Let both agents speak; what the model said to A, B's harness says itself. Returns the prompts of B's calls."""
    async with proxied(SimulatedEngine(episodes=EPISODES, seed=7)) as rig:
        await rig.say("s", [{"role": "system", "content": "Agent A."}, user("EPISODE:a"), *ASKED[kind]], tools=TOOLS)
        for nearly in NEARLY[kind]:
            own = [{"role": "system", "content": "Agent B."}, user("EPISODE:b"), *nearly, DONE, user("go")]
            await rig.say("s", own, tools=TOOLS)
        await rig.check("s")
        return [rig.engine.tokenizer.decode(entry.prompt_ids) for entry in rig.ground_truth("s")[1:]]


@pytest.mark.parametrize("kind", ASKED)
async def test_no_prompt_of_an_agent_holds_what_the_model_said_to_another(kind):
    prompts = await prompts_of_b(kind)
    assert len(prompts) == len(NEARLY[kind])
    assert not [prompt for prompt in prompts if THOUGHT in prompt]


@pytest.mark.parametrize("kind", ASKED)
async def test_evidence_that_ignores_how_a_message_is_written_is_convicted(kind, monkeypatch):
    exactly = evidence.preceding_hash

    def loosely(conversation, place):
        alike = (b"alike",) * place
        return exactly(msgspec.structs.replace(conversation, digests=alike, exacts=alike), place)

    monkeypatch.setattr(evidence, "preceding_hash", loosely)
    assert any(THOUGHT in prompt for prompt in await prompts_of_b(kind))


@pytest.mark.parametrize("kind", ASKED)
async def test_the_same_message_directly_before_is_evidence(kind):
    async with proxied(SimulatedEngine(episodes=EPISODES, seed=7)) as rig:
        start = [{"role": "system", "content": "Agent A."}, user("EPISODE:a"), *ASKED[kind]]
        said = await rig.say("s", start, tools=TOOLS)
        await rig.say("s", [{"role": "system", "content": "Edited."}, *start[1:], echo(said), user("on")], tools=TOOLS)
        last = (await rig.turns("s"))[-1]
        assert (last["match"], last["reason"], len(last["anchors"])) == ("resplice", "context-edited", 1)
        await rig.check("s")
