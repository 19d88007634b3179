"""Messages, Responses and Gemini on a real vLLM, through the official clients: exact in each of them, and across them."""

import contextlib
import itertools

import anthropic
import openai
import pytest
from google.genai import errors
from rig.agent import Agent
from rig.exported import generations, trajectory, turns

pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")

DIALECTS = ("messages", "responses", "gemini")


@pytest.fixture
async def agents(proxied):
    """Makes agents that call the proxy, or without a session the engine."""
    async with contextlib.AsyncExitStack() as stack:

        def make(session, **manner):
            agent = Agent(proxied.url if session else proxied.vllm, session, **manner)
            stack.push_async_callback(agent.close)
            return agent

        yield make


def extends(later, earlier):
    """Whether a call's prompt starts with all ids of another call."""
    prompt, sampled = earlier
    return later[0][: len(prompt) + len(sampled)] == prompt + sampled


async def assert_one_line(proxied, ground_truth, agent, dialects):
    """In the engine's own log every turn extends the previous one, and each token that it sampled is exported once."""
    logged = await ground_truth.read_new_episodes()
    assert len(logged) == len(dialects)
    assert all(extends(later, earlier) for earlier, later in itertools.pairwise(logged))
    assert [reply.prompt_tokens for reply in agent.replies] == [len(prompt) for prompt, _ in logged]
    found = await turns(proxied, agent.session)
    assert [(turn["match"], turn["reason"]) for turn in found] == [("root", ""), *[("continue", "")] * (len(dialects) - 1)]
    assert [turn["dialect"] for turn in found] == list(dialects)
    exported = await trajectory(proxied, agent.session)
    assert exported["complete"]
    assert {incident["kind"] for incident in exported["incidents"]} <= {"engine-refused", "call-refused"}  # nothing was sampled there
    assert [(list(prompt), list(sampled)) for prompt, sampled, _ in generations(exported)] == logged


MANNERS = {"whole": ((False,), False), "stream": ((True,), False), "forgetful": ((True, False), True)}


@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_agent_with_tools(proxied, ground_truth, agents, dialect, manner):
    """Thoughts, text before calls, parallel calls, unusual spacing; the client's own objects are sent back, or all is rebuilt."""
    streams, forgetful = MANNERS[manner]
    agent = agents("line", forgetful=forgetful).say("EPISODE:spoken please")
    for n in range(6):
        await agent.turn(dialect, stream=streams[n % len(streams)])
    assert [len(reply.calls) for reply in agent.replies] == [2, 1, 1, 2, 0, 0]
    await assert_one_line(proxied, ground_truth, agent, [dialect] * 6)


@pytest.mark.parametrize("forgetful", [False, True], ids=["faithful", "forgetful"])
async def test_another_dialect_at_every_turn(proxied, ground_truth, agents, forgetful):
    """Canonical messages are independent of dialects: whichever dialect the earlier turns used, the next one finds them."""
    dialects = ["chat", "messages", "responses", "gemini", "messages", "gemini", "chat", "responses"]
    agent = agents("mixed", forgetful=forgetful).say("EPISODE:spoken please")
    for n, dialect in enumerate(dialects):
        await agent.turn(dialect, stream=n % 3 == 1)
    await assert_one_line(proxied, ground_truth, agent, dialects)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_counted_tokens_equal_the_prompt_that_is_sent(ground_truth, agents, dialect):
    """Before the first call, and within a conversation, where a fresh rendering would have other tokens."""
    agent, counted = agents("counted").say("EPISODE:spoken please"), []
    for n in range(4):
        counted.append(await agent.client(dialect).count(agent.history))
        await agent.turn(dialect, stream=n % 2 == 1)
    assert counted == [len(prompt) for prompt, _ in await ground_truth.read_new_episodes()]


async def test_responses_that_name_the_previous_one(proxied, ground_truth, agents):
    """Only what is new is sent; the earlier items are taken from the proxy's own records."""
    agent = agents("named").say("EPISODE:spoken please")
    client, previous = agent.client("responses"), openai.omit
    for n in range(5):
        new, agent.history = agent.history[-1:], agent.history[:-1]
        asked = client.request(new) | {"previous_response_id": previous}
        if n % 2:
            async with client.sdk.responses.stream(**asked) as events:
                answer = await events.get_final_response()
        else:
            answer = await client.sdk.responses.create(**asked)
        previous = answer.id
        agent.take(client.read(answer))
    await assert_one_line(proxied, ground_truth, agent, ["responses"] * 5)


@pytest.mark.parametrize("dialect", ["messages", "responses"])
async def test_directly_no_turn_extends_the_previous_one(ground_truth, agents, dialect):
    """The engine's own routes, for comparison: the client's objects are sent back unchanged, and still the tokens differ."""
    agent = agents(None).say("EPISODE:spoken please")
    for n in range(5):
        await agent.turn(dialect, stream=n % 2 == 1)
    logged = await ground_truth.read_new_episodes()
    assert len(logged) == 5
    assert not any(extends(later, earlier) for earlier, later in itertools.pairwise(logged))


MUCH = "word " * 40_000
WRONG = {
    "messages": {
        "model": {"model": "nope"},
        "length": {"messages": [{"role": "user", "content": MUCH}]},
        "tool": {"tools": [{"name": "bash", "input_schema": "none"}]},
    },
    "responses": {
        "model": {"model": "nope"},
        "length": {"input": MUCH},
        "tool": {"tools": [{"type": "function", "name": "bash", "parameters": "none"}]},
    },
    "gemini": {
        "model": {"model": "nope"},
        "length": {"contents": MUCH},
        "tool": {"config": {"tools": [{"function_declarations": [{"name": "bash", "parameters_json_schema": "none"}]}]}},
    },
}
SAID_OF_IT = {
    "messages": {
        "model": (anthropic.NotFoundError, "not_found_error", "`nope`"),
        "length": (anthropic.BadRequestError, "invalid_request_error", r"prompt is too long: \d+ tokens > 32768 maximum"),
        "tool": (anthropic.BadRequestError, "invalid_request_error", r"tools\.0\.input_schema"),
    },
    "responses": {
        "model": (openai.NotFoundError, "model_not_found", "`nope`"),
        "length": (openai.BadRequestError, "context_length_exceeded", "maximum context length is 32768"),
        "tool": (openai.BadRequestError, None, r"tools\[0\]\.parameters"),
    },
    "gemini": {
        "model": (errors.ClientError, "NOT_FOUND", "`nope`"),
        "length": (errors.ClientError, "INVALID_ARGUMENT", "maximum context length is 32768"),
        "tool": (errors.ClientError, "INVALID_ARGUMENT", "tools.*parameters"),
    },
}
"""The client's own exception class, the member that harnesses check, and the text for people."""


def by(why):
    """The member that harnesses check: the error's type in Messages, its code in Responses, its status in Gemini."""
    return why.body["error"]["type"] if isinstance(why, anthropic.APIError) else getattr(why, "status", None) or why.code


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_refusals_raise_the_clients_own_errors_and_the_session_continues(proxied, ground_truth, agents, dialect, stream):
    agent = agents("refused").say("EPISODE:spoken please")
    client = agent.client(dialect)
    await agent.turn(dialect, stream=stream)
    for what, (kind, word, message) in SAID_OF_IT[dialect].items():
        with pytest.raises(kind, match=message) as refused:
            await client.send(client.request(agent.history) | WRONG[dialect][what], stream=stream)
        assert (what, by(refused.value)) == (what, word)
    await agent.turn(dialect, stream=stream)
    await assert_one_line(proxied, ground_truth, agent, [dialect] * 2)
