"""As Gym's model server, the proxy sends vLLM what Gym's own server sends: checked with a stored table, and the package if installed.

`TOKENCACHE_NEMO_GYM_PYTHON` names an interpreter that has nemo-gym 0.7.0, if it is not this one.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.proxy.kit import EPISODES, HEADER, proxied
from tests.support.material import require
from tests.support.pairwise import some
from tests.support.waiting import PATIENCE
from tests.system.nemo.gym_requests import CASES, CHAT, HI, RESPONSES, SOUND, called, essential, function, tool
from tokencache.core.messages import digest
from tokencache.core.verdict import judge
from tokencache.dialects.chat.vocabulary import read_message
from tokencache.dialects.gym_request import with_reasoning
from tokencache.testing import SimulatedEngine

NAMES = [case.name for case in CASES]


def ask_gym(questions):
    """What Gym's own server sends and answers (`ask_gym`); skips if it is not installed."""
    here = sys.executable if importlib.util.find_spec("nemo_gym") else None
    python = require("nemo_gym", os.environ.get("TOKENCACHE_NEMO_GYM_PYTHON") or here)
    script = Path(__file__).with_name("ask_gym.py")
    asked = subprocess.run([python, script], input=json.dumps(questions), capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert asked.returncode == 0, asked.stderr[-2000:]
    return json.loads(asked.stdout)


@pytest.fixture(scope="module")
def from_gym():
    return dict(zip(NAMES, ask_gym([{"path": case.path, "body": case.body} for case in CASES]), strict=True))


@pytest.fixture
async def rig():
    async with proxied(SimulatedEngine(episodes=EPISODES, seed=7), return_token_id_information=True) as made:
        yield made


async def sent(rig, path, body, session="s"):
    """What the proxy sends for a request within a session, whether or not the engine accepts it."""
    before = len(rig.engine.requests)
    async with rig.http.post(rig.url + path, json=body, headers={HEADER: session} if session else {}) as answer:
        answer_text = await answer.text()
    assert len(rig.engine.requests) > before, answer_text
    return rig.engine.requests[-1]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_table_is_what_gym_sends(from_gym, case):
    found = from_gym[case.name]["sent"]
    assert (found and essential(found)) == case.sent


@pytest.mark.parametrize("case", some(CASES, 20), ids=NAMES)
async def test_the_proxy_sends_the_same(rig, case):
    assert essential(await sent(rig, case.path, case.body)) == (case.ours if case.why else case.sent)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_every_difference_is_one_and_has_its_reason(case):
    assert bool(case.why) == (case.ours is not None)
    assert not case.why or case.ours != case.sent


@pytest.mark.parametrize(
    ("path", "tools", "how"),
    [
        (CHAT, [tool(strict=True)], "without the option"),
        (RESPONSES, [function(strict=True)], "without the option"),
        (CHAT, [tool(strict=True)], "without a session"),
    ],
)
async def test_other_requests_are_not_changed(path, tools, how):
    metadata = {"chat_template_kwargs": '{"a": 1}', "extra_body": '{"top_k": 5}', "audio_data": SOUND}
    body = {"model": "sim", "tools": tools, "metadata": metadata, "messages" if path == CHAT else "input": [HI]}
    async with proxied(return_token_id_information=how == "without a session") as rig:
        found = await sent(rig, path, body, session="s" if how == "without the option" else "")
    assert found["tools"] == [tool(strict=True)]
    assert found["messages"] == [HI]
    assert not {"top_k", "chat_template_kwargs"} & set(found)
    assert path == RESPONSES or found["metadata"] == metadata


async def test_a_history_that_grows_is_parsed_alike(rig):
    """What was rewritten once stays rewritten while the history grows, with the same bytes as in a history that is parsed whole."""
    thinking = {"role": "assistant", "content": "<think>Hm.</think>\nYes."}
    grown = [HI]
    for _ in range(3):
        grown += [thinking, HI]
        one = await sent(rig, CHAT, {"messages": grown, "model": "sim", "tools": [tool(strict=True)]})
        other = await sent(rig, CHAT, {"messages": grown, "model": "sim", "tools": [tool(strict=True)]}, session=f"anew-{len(grown)}")
        assert one["messages"] == other["messages"]
        assert one["messages"][1] == {"role": "assistant", "content": "\nYes.", "reasoning": "Hm."}


texts = st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "a", "é", "<"]), max_size=8).map("".join)
parts = st.lists(texts.map(lambda text: {"type": "text", "text": text}), max_size=3)


@given(content=texts | parts, calls=st.booleans())
def test_a_reply_is_recognised_in_what_is_sent(content, calls):
    """Inline thinking that becomes a message's reasoning does not change its digest, or the verdict on it."""
    raw = json.dumps({"role": "assistant", "content": content, **({"tool_calls": [called()]} if calls else {})}).encode()
    came, sends = (read_message(json.loads(one)) for one in (raw, with_reasoning(raw)))
    assert digest(sends) == digest(came)
    assert judge(came, sends).supplied


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"extra_body": "{"}, "metadata.extra_body"),
        ({"extra_body": "[]"}, "metadata.extra_body"),
        ({"chat_template_kwargs": "x"}, "metadata.chat_template_kwargs"),
        ({"audio_path": "/etc/passwd"}, "metadata.audio_path"),
        ({"audio_data": SOUND, "audio_paths": "[]"}, "metadata.audio_paths"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_metadata_that_cannot_be_parsed_are_refused_by_name(rig, path, metadata, named):
    body = {"model": "sim", "metadata": metadata, "messages" if path == CHAT else "input": [HI]}
    async with rig.http.post(rig.url + path, json=body, headers={HEADER: "s"}) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == named
    assert not rig.engine.requests or rig.engine.requests[-1].get("metadata") != metadata


@pytest.mark.parametrize("role", [True, False])
async def test_strict_of_a_tool_of_messages(role):
    """Gym's server removes it from every dialect's tools; otherwise the codec decides whether it is forwarded."""
    asked = {"name": "bash", "strict": True, "input_schema": tool()["function"]["parameters"]}
    async with proxied(return_token_id_information=role) as rig:
        found = await sent(rig, "/v1/messages", {"model": "sim", "max_tokens": 9, "messages": [HI], "tools": [asked]})
    assert found["tools"][0]["function"].get("strict") is (None if role else True)


async def test_one_model_for_every_name():
    """As in Gym's server, by an alias."""
    async with proxied(return_token_id_information=True, model_aliases={"*": "sim"}) as rig:
        for named in ({"model": "policy_model"}, {}):
            assert (await sent(rig, CHAT, {"messages": [HI], **named}))["model"] == "sim"


@pytest.mark.parametrize("messages", [7, [7], None, "hi"])
async def test_audio_in_messages_that_cannot_be_parsed(rig, messages):
    body = {"model": "sim", "metadata": {"audio_data": SOUND}, "messages": messages}
    async with rig.http.post(rig.url + CHAT, json=body, headers={HEADER: "s"}) as answer:
        assert answer.status == 400
        assert "messages" in (await answer.json())["error"]["message"]
