"""A prompt that is too long, with the proxy as Gym's model server: an empty completion, as Gym's own server answers."""

import json

import pytest

from tests.proxy.kit import EPISODES, HEADER, proxied, user
from tests.system.nemo.gym_agent import RESPONSES, Agent
from tests.system.nemo.gym_requests import CHAT, HI
from tests.system.nemo.test_gym_requests import ask_gym
from tests.system.nemo.worker import TOKEN_FIELDS
from tokencache.testing import Fault, SimulatedEngine

MESSAGES = "/v1/messages"
LONG = "word " * 4000
REFUSAL = "This model's maximum context length is 2000 tokens. However, your prompt contains at least 2001 input tokens."


@pytest.fixture
async def rig():
    async with proxied(SimulatedEngine(episodes=EPISODES, seed=7, max_model_len=2000), return_token_id_information=True) as made:
        yield made


def asking(path, text, *, stream=False):
    conversation = {"input": [user(text)]} if path == RESPONSES else {"messages": [user(text)]}
    return {"model": "sim", "stream": stream, **conversation} | ({"max_tokens": 100} if path == MESSAGES else {})


async def answer_to(rig, path, body, session="s"):
    """Status and text of an answer."""
    async with rig.http.post(rig.url + path, json=body, headers={HEADER: session} if session else {}) as answer:
        return answer.status, await answer.text()


def ending(path, text, *, stream):
    """How a reply ended, and its text."""
    if not stream:
        answer_json = json.loads(text)
    elif path == RESPONSES:
        answer_json = json.loads(text.strip().rpartition("data: ")[2])["response"]
    else:
        answer_json = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    if path == RESPONSES:
        return answer_json["incomplete_details"]["reason"], [part["text"] for item in answer_json["output"] for part in item["content"]]
    if path == MESSAGES and stream:
        words = [event["delta"]["text"] for event in answer_json if event["type"] == "content_block_delta" and event["delta"]["text"]]
        return next(event["delta"]["stop_reason"] for event in answer_json if event["type"] == "message_delta"), words
    if path == MESSAGES:
        return answer_json["stop_reason"], [block["text"] for block in answer_json["content"]]
    if stream:
        choices = [choice for chunk in answer_json for choice in chunk["choices"]]
        return choices[-1]["finish_reason"], [c["delta"]["content"] for c in choices if c["delta"].get("content")]
    return answer_json["choices"][0]["finish_reason"], [answer_json["choices"][0]["message"]["content"]]


EMPTY = {
    (CHAT, False): ("length", [None]),
    (CHAT, True): ("length", []),
    (RESPONSES, False): ("max_output_tokens", [""]),
    (RESPONSES, True): ("max_output_tokens", [""]),
    (MESSAGES, False): ("max_tokens", [""]),
    (MESSAGES, True): ("max_tokens", []),
}


async def refused(rig, session="s"):
    """The session's incidents, which must all be refusals answered this way."""
    info = await rig.info(session)
    assert info["complete"]
    assert {(incident["kind"], incident["hole"]) for incident in info["incidents"]} == {("engine-refused", False)}
    assert all("context length" in incident["detail"] and "finish reason 'length'" in incident["detail"] for incident in info["incidents"])
    return len(info["incidents"])


@pytest.mark.parametrize(("path", "stream"), EMPTY)
async def test_a_first_prompt_that_is_too_long(rig, path, stream):
    status, text = await answer_to(rig, path, asking(path, LONG, stream=stream))
    assert status == 200
    assert ending(path, text, stream=stream) == EMPTY[path, stream]
    assert not any(name in text for name in TOKEN_FIELDS if name != "prompt_token_ids")
    assert await refused(rig) == 1
    assert await rig.turns() == []


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_refusal_within_the_engine_s_stream(rig, path):
    """vLLM detects some errors of a request only after its 200."""
    rig.engine.faults.append(Fault.error_event(0, REFUSAL, status=400))
    status, text = await answer_to(rig, path, asking(path, "hi", stream=True))
    assert status == 200
    assert ending(path, text, stream=True) == EMPTY[path, True]
    assert REFUSAL not in text
    assert await refused(rig) == 1
    assert await rig.turns() == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", ["chat", "responses"])
async def test_a_rollout_that_grows_too_long_ends_and_keeps_its_turns(rig, dialect, stream):
    """The prompt with exact ids is refused. A plain rendering is not tried: it might fit, and would not continue the rollout."""
    agent = Agent(rig, dialect, stream)
    for _ in range(2):
        await agent.turn()
    asked = len(rig.engine.requests)
    agent.history[-1] |= {"output" if dialect == "responses" else "content": LONG}
    last = (await agent.turn())[-1]
    assert not set(TOKEN_FIELDS) & set(last)
    assert len(rig.engine.requests) == asked + 1
    assert await refused(rig) == 1
    assert [turn["match"] for turn in await rig.turns()] == ["root", "continue"]
    (sequence,) = (await rig.check())["sequences"]
    assert len(sequence["turns"]) == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "refusal",
    [
        "max_tokens must be at least 1, got -3.",
        "max_tokens=5000 cannot be greater than max_model_len=2000. Please request fewer output tokens.",
        "Input length (2001) exceeds model's maximum context length (2000).",
        "The decoder prompt (length 2001) is longer than the maximum model length of 2000. Make sure that `max_model_len` is no smaller.",
    ],
)
async def test_the_error_texts_of_vllm(rig, refusal, stream):
    rig.engine.faults.append(Fault.answer(400, json.dumps({"error": {"message": refusal, "type": "BadRequestError", "code": 400}})))
    status, text = await answer_to(rig, CHAT, asking(CHAT, "hi", stream=stream))
    assert (status, ending(CHAT, text, stream=stream)) == (200, EMPTY[CHAT, stream])


@pytest.mark.parametrize(("status", "refusal"), [(400, "'tools' must be a list"), (500, "context length"), (404, "max_tokens")])
async def test_every_other_refusal_is_passed_on(rig, status, refusal):
    rig.engine.faults.append(Fault.answer(status, json.dumps({"error": {"message": refusal, "code": status}})))
    found = await answer_to(rig, CHAT, asking(CHAT, "hi"))
    assert found[0] == status
    assert refusal in found[1]


@pytest.mark.parametrize("role", [True, False])
async def test_other_calls_get_the_engine_s_refusal(role):
    """Without the option, or without a session, it is the engine's 400."""
    engine = SimulatedEngine(episodes=EPISODES, seed=7, max_model_len=2000)
    async with proxied(engine, return_token_id_information=role) as rig:
        status, text = await answer_to(rig, CHAT, asking(CHAT, LONG), session="" if role else "s")
    assert status == 400
    assert "context length" in text


async def test_gym_s_own_classes_accept_it_and_its_own_server_answers_the_same(rig):
    """If nemo-gym is installed."""
    questions = [{"path": path, "body": asking(path, "hi", stream=stream), "refusal": REFUSAL} for path, stream in EMPTY]
    for (path, stream), own in zip(EMPTY, ask_gym(questions), strict=True):
        assert ending(path, own["answer"], stream=stream) == EMPTY[path, stream]
    ours = [{"validate": path, "body": json.loads((await answer_to(rig, path, asking(path, LONG)))[1])} for path in (CHAT, RESPONSES)]
    assert [found["status"] for found in ask_gym(ours)] == [200, 200]


def test_gym_s_own_server_refuses_and_forwards_as_the_table_lists():
    (own,) = ask_gym([{"path": CHAT, "body": {"messages": [HI]}, "refusal": "'tools' must be a list"}])
    assert own["status"] == 500  # Gym's server raises: a client of the proxy gets the engine's 400
