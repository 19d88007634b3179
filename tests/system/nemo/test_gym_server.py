"""The proxy as a model server of NeMo Gym's kind: what its agents receive and send back, and NeMo RL's check of the result."""

import contextlib
import json
import re

import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from pydantic import TypeAdapter

from tests.proxy.kit import CHAT, EPISODES, TOOLS, proxied, user
from tests.support.material import require_package
from tests.system.nemo.gym_agent import RESPONSES, Agent, bare, carrying
from tests.system.nemo.worker import TOKEN_FIELDS, Worker
from tests.trajectories.formats.readers import follow, read_nemo_gym, token_fields
from tokencache.core.context import whole_context
from tokencache.dialects.gym import take_out
from tokencache.testing import SimulatedEngine

DIALECTS = ["chat", "responses"]
DIFFERS = "echo-differs"


@pytest.fixture
async def rig():
    async with proxied(return_token_id_information=True) as made:
        yield made


def trained(output):
    """A rollout as NeMo RL reads it: its own check is in `follow`."""
    return follow(token_fields(entry) for entry in carrying(output))


async def kinds(rig, session="s"):
    return [incident["kind"] for incident in (await rig.info(session))["incidents"]]


async def matches(rig, session="s"):
    return [turn["match"] for turn in await rig.turns(session)]


@pytest.mark.parametrize("carries", [True, False], ids=["carries", "drops"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_rollout_is_one_line_for_nemo_rl(rig, dialect, stream, carries):
    row = trained(await Agent(rig, dialect, stream, carries).run())
    exported = await rig.check()
    (sequence,) = exported["sequences"]
    assert row == (sequence["token_ids"], sequence["loss_mask"], sequence["logprobs"])
    assert exported["complete"]
    assert await kinds(rig) == []
    assert await matches(rig) == ["root", "continue", "continue", "continue"]


@pytest.mark.parametrize("carries", [True, False], ids=["carries", "drops"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_same_in_front_of_nemo_rl_s_worker(dialect, stream, carries, monkeypatch):
    """A complete NVIDIA setup: Gym's agent, the proxy as its model server, NeMo RL's worker, the engine."""
    monkeypatch.setenv("TOKENCACHE_ENGINE", "nemo-rl")
    engine = SimulatedEngine(episodes=EPISODES, seed=7)
    eos = engine.tokenizer.id_of("<|im_end|>")
    async with (
        engine.serve() as up,
        Worker(up, eos, max_model_len=engine.max_model_len).serve() as worker,
        proxied(engine, upstream=worker, return_token_id_information=True) as rig,
    ):
        row = trained(await Agent(rig, dialect, stream, carries).run())
        exported = await rig.exported()
    (sequence,) = exported["sequences"]
    assert row == (sequence["token_ids"], sequence["loss_mask"], sequence["logprobs"])
    assert exported["complete"]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_ids_are_those_of_the_engine_s_log(rig, dialect):
    output = await Agent(rig, dialect).run()
    ground_truth = [(b.prompt_ids, b.completion_ids, b.logprobs) for b in rig.ground_truth()]
    assert [token_fields(entry) for entry in carrying(output)] == ground_truth


async def test_nemo_rl_refuses_what_was_tokenized_again(rig):
    """The same agent on the engine itself: its template strips, its tokenizer joins, and NeMo RL's check fails."""
    history = [user("EPISODE:demo")]
    calls = []
    for _ in range(4):
        _, answer = await rig.post(None, url=rig.up, messages=history, return_token_ids=True, logprobs=True)
        choice = answer["choices"][0]
        calls.append((answer["prompt_token_ids"], choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]))
        history += [choice["message"], *Agent._next_input([choice["message"]])]
    with pytest.raises(AssertionError, match="Non-contiguous"):
        follow(calls)


@pytest.mark.parametrize("stream", [False, True])
async def test_ids_that_an_agent_sends_back_change_neither_prompt_nor_record(stream):
    kept, sent = [], []
    for carries in (True, False):
        async with proxied(return_token_id_information=True) as rig:
            await Agent(rig, "chat", stream, carries).run()
            turns = {turn.id: turn for turn in await rig.store.turns("s")}
            contexts = await rig.store.contexts("s", list(turns))
            last = whole_context(list(turns)[-1], turns, contexts)
            words = named(json.dumps([json.loads(bytes(message)) for message in last.messages]))
            kept.append(([turn.prefix_hash for turn in turns.values()], words))
            sent.append(named(json.dumps([request["messages"] for request in rig.engine.requests[-4:]])))
    assert kept[0] == kept[1]
    assert sent[0] == sent[1]
    assert not any(name in sent[0] for name in TOKEN_FIELDS)


async def test_an_agent_that_sends_back_only_some(rig):
    agent = Agent(rig)
    for agent.carries in (True, False, False):
        await agent.turn()
    assert not any(name in json.dumps(rig.engine.requests) for name in TOKEN_FIELDS if name != "prompt_token_ids")
    assert not any("prompt_token_ids" in message for request in rig.engine.requests for message in request["messages"])
    assert await matches(rig) == ["root", "continue", "continue"]


def named(text):
    """A text with the n-th tool call's id in place of a random one."""
    ids = list(dict.fromkeys(re.findall(r"chatcmpl-tool-\w+", text)))
    return re.sub(r"chatcmpl-tool-\w+", lambda found: f"call {ids.index(found[0])}", text)


async def test_the_last_item_of_an_answer_carries_the_ids(rig):
    agent = Agent(rig, "responses")
    for _ in range(3):
        items = await agent.turn()
        assert [set(TOKEN_FIELDS) <= set(item) for item in items] == [False] * (len(items) - 1) + [True]
    assert [item["type"] for item in items] == ["reasoning", "message"]
    assert items[0]["summary"] == [{"type": "summary_text", "text": items[0]["content"][0]["text"]}]


async def test_an_answer_without_text_has_an_item_that_carries_the_ids():
    engine = SimulatedEngine(episodes={"demo": [""]}, seed=7)
    async with proxied(engine, return_token_id_information=True) as rig:
        (item,) = await Agent(rig, "responses").turn()
        assert (item["type"], [part["text"] for part in item["content"]]) == ("message", [""])  # Gym's converter writes it so
        assert token_fields(item)[1] == rig.ground_truth()[-1].completion_ids


async def test_every_choice_has_its_own_ids(rig):
    _, answer = await rig.post("s", messages=[user("EPISODE:demo")], n=2)
    carried_ids = [token_fields(choice["message"]) for choice in answer["choices"]]
    assert carried_ids == [(b.prompt_ids, b.completion_ids, b.logprobs) for b in sorted(rig.ground_truth(), key=lambda b: b.index)]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_only_with_the_option_and_only_within_a_session(dialect):
    async with proxied() as plain:
        assert not carrying(await Agent(plain, dialect).run(1))
    async with proxied(return_token_id_information=True) as rig:
        if dialect == "chat":  # the simulated engine has no Responses route of its own
            assert not carrying(await Agent(rig, dialect, session="").run(1))


async def test_all_three_or_none(rig):
    """Without log probabilities there is nothing to train: NeMo Gym refuses messages with only some of the members."""
    agent = Agent(rig)
    with without_logprobs(rig):
        (message,) = await agent.turn()
    assert not set(message) & set(TOKEN_FIELDS)
    assert await kinds(rig) == ["no-logprobs"]


@contextlib.contextmanager
def without_logprobs(rig):
    """A router that drops log probabilities."""
    take = rig.proxy.engine.upstream.send

    async def send(method, path, **more):
        body = json.loads(more["body"]) if more.get("body") else None
        if path == CHAT and body and body.get("kv_transfer_params") is None:
            body.pop("logprobs")
            more["body"] = json.dumps(body).encode()
        return await take(method, path, **more)

    rig.proxy.engine.upstream.send = send
    yield
    rig.proxy.engine.upstream.send = take


async def test_responses_are_stored_without_the_ids(rig):
    agent = Agent(rig, "responses", history=[user("EPISODE:demo")])
    items = await agent.turn()
    name = f"resp_{items[0]['id'].split('_')[1]}"
    assert (await rig.get(f"/s/s{RESPONSES}/{name}"))["output"] == [bare(item) for item in items]
    agent.history = agent.history[1 + len(items) :]
    await agent.turn(previous_response_id=name)
    assert trained(agent.output)
    assert await matches(rig) == ["root", "continue"]


WRONG = {
    "another prompt": lambda entry: entry["prompt_token_ids"].__setitem__(3, 1),
    "another generation": lambda entry: entry["generation_token_ids"].__setitem__(-1, 1),
    "parted elsewhere": lambda entry: entry["generation_token_ids"].insert(0, entry["prompt_token_ids"].pop()),
    "only some of them": lambda entry: entry.pop("prompt_token_ids"),
    "no ids": lambda entry: entry.__setitem__("prompt_token_ids", "all of them"),
    "none generated": lambda entry: entry.update(generation_token_ids=[]),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_ids_that_differ_from_the_served_ones_are_noted_and_never_used(rig, dialect, wrong):
    agent = Agent(rig, dialect)
    await agent.turn()
    WRONG[wrong](carrying(agent.history)[-1])
    await agent.turn()
    assert await kinds(rig) == [DIFFERS]
    (incident,) = (await rig.info())["incidents"]
    assert incident["detail"].startswith("messages 1:")
    exported = await rig.check()
    assert exported["complete"]
    assert await matches(rig) == ["root", "continue"]
    assert trained(agent.output).token_ids == exported["sequences"][0]["token_ids"]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_older_one_that_differs_is_noted_too(rig, dialect):
    agent = Agent(rig, dialect)
    await agent.run(3)
    carrying(agent.history)[0]["generation_token_ids"][0] += 1
    await agent.turn()
    assert await kinds(rig) == [DIFFERS]
    await rig.check()


async def test_log_probabilities_that_are_invalid_json_cause_no_error(rig):
    agent = Agent(rig)
    await agent.turn()
    carrying(agent.history)[-1]["generation_log_probs"][0] = float("nan")
    await agent.turn()
    assert await matches(rig) == ["root", "continue"]
    assert await kinds(rig) == []


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_rollout_that_splits_is_refused_by_nemo_rl_and_exported_as_two(rig, dialect):
    """An edited context is a separate line: NeMo RL asserts on the rollout, the export has two sequences, and each is contiguous."""
    agent = Agent(rig, dialect, history=[{"role": "system", "content": "Be brief."}, user("EPISODE:demo")])
    await agent.run(2)
    agent.history[0] = {"role": "system", "content": "Be brief, and kind."}
    await agent.turn()
    with pytest.raises(AssertionError, match="Non-contiguous"):
        trained(agent.output)
    assert await matches(rig) == ["root", "continue", "resplice"]
    assert await kinds(rig) == []  # the returned ids had been served, though in another line
    rows = read_nemo_gym(await rig.get("/tokencache/v1/sessions/s/trajectories?format=nemo-gym"))
    assert len(rows) == 2
    assert sum(sum(row.mask) for row in rows) == sum(len(entry.completion_ids) for entry in rig.ground_truth())


@pytest.mark.parametrize("path", ["/ng-rollout/7-2", "/ng-rollout/7-2/training-token-capture"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_gym_s_own_path_names_the_session(rig, dialect, path):
    output = await Agent(rig, dialect, base=rig.url + path, session="").run(2)
    exported = await rig.check("7-2")
    assert trained(output).token_ids == exported["sequences"][0]["token_ids"]
    assert await matches(rig, "7-2") == ["root", "continue"]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_clients_read_it(rig, dialect):
    agent = Agent(rig, dialect)
    if dialect == "chat":
        _, text = await agent.post(CHAT, {"model": "sim", "messages": agent.history})
        ChatCompletion.model_validate_json(text)
    else:
        _, text = await agent.post(RESPONSES, {"model": "sim", "input": agent.history})
        Response.model_validate_json(text)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_gym_s_own_classes_accept_it(rig, dialect):
    gym = require_package("nemo_gym", "nemo_gym.openai_utils")
    agent = Agent(rig, dialect)
    await agent.run(3)
    if dialect == "chat":
        TypeAdapter(list[gym.NeMoGymChatCompletionMessageParam]).validate_python(agent.history)
        _, text = await agent.post(CHAT, {"model": "sim", "messages": agent.history})
        read = gym.NeMoGymChatCompletion.model_validate_json(text).choices[0].message
        assert isinstance(read, gym.NeMoGymChatCompletionMessageForTraining)
    else:
        gym.NeMoGymResponseCreateParamsNonStreaming.model_validate({"input": agent.history})
        _, text = await agent.post(RESPONSES, {"model": "sim", "input": agent.history})
        read = gym.NeMoGymResponse.model_validate_json(text).output[-1]
        assert isinstance(read, gym.NeMoGymResponseOutputMessageForTraining)
    assert read.generation_token_ids == rig.ground_truth()[-1].completion_ids


@pytest.mark.parametrize(
    ("raw", "rest", "echo"),
    [
        (b'{"role":"user","content":"\\"prompt_token_ids\\""}', None, None),
        (b'{"role":"tool","content":[{"type":"text","prompt_token_ids":[1]}]}', None, None),
        (b'{"role": "a", "prompt_token_ids": null, "generation_token_ids": null}', b'{"role":"a"}', None),
        (b'{"prompt_token_ids": [1, 2],"role": "a", "generation_token_ids":[3],"routed_experts":"x"}', b'{"role":"a"}', (b"1,2", b"3")),
        (b'{"role":"a","generation_token_ids":[7],"generation_log_probs":[NaN]}', b'{"role":"a"}', (b"", b"7")),
    ],
)
def test_ids_are_taken_out_of_a_message(raw, rest, echo):
    bare_raw, found = take_out(raw)
    assert bare_raw == (rest or raw)
    assert (bare_raw is raw) is (rest is None)
    assert (found and (found.prompt, found.generation)) == echo


@pytest.mark.parametrize("required", [[1, 2, 3], [1], "all", [1.5], [-1]], ids=str)
async def test_a_prefix_that_the_prompt_will_not_have_is_refused(rig, required):
    """NVIDIA-NeMo/Gym #1545: agents that send their prefix themselves. Without it the call is not made."""
    agent = Agent(rig)
    await agent.turn()
    status, answer_json = await rig.post(messages=agent.history, required_prefix_token_ids=required)
    assert status == 400
    assert answer_json["error"]["param"] == "required_prefix_token_ids"
    assert "required_prefix_token_ids" in answer_json["error"]["message"]
    assert len(rig.ground_truth()) == 1
    info = await rig.info()
    assert (info["complete"], [one["kind"] for one in info["incidents"]]) == (True, ["call-refused"])
    await agent.turn()
    assert trained(agent.output)


async def test_a_prefix_without_a_reply_before_it_is_refused(rig):
    status, answer_json = await rig.post(messages=[user("EPISODE:demo")], required_prefix_token_ids=[1, 2, 3])
    assert (status, len(rig.ground_truth())) == (400, 0)
    assert "no recorded reply" in answer_json["error"]["message"]


def whole(entry):
    prompt, generation, _ = token_fields(entry)
    return prompt + generation


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"model": "sim", "input": "EPISODE:demo"}),
        ("/v1/messages", {"model": "sim", "max_tokens": 9, "messages": [user("EPISODE:demo")]}),
        ("/v1beta/models/sim:generateContent", {"contents": [{"role": "user", "parts": [{"text": "EPISODE:demo"}]}]}),
    ],
)
async def test_the_same_in_every_dialect(rig, path, body):
    status, answer_json = await rig.post(path=path, **body, required_prefix_token_ids=[1, 2, 3])
    assert (status, len(rig.ground_truth())) == (400, 0)
    assert "required_prefix_token_ids" in answer_json["error"]["message"]


@pytest.mark.parametrize("carries", [True, False], ids=["carries", "drops"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_prefix_that_is_recorded_is_honoured(rig, dialect, carries):
    """As Gym's `supply_prefix_token_ids` sends it: all ids up to the end of the last reply, or of an earlier one; or none."""
    agent = Agent(rig, dialect, carries=carries)
    *_, first = await agent.turn(required_prefix_token_ids=None)
    *_, second = await agent.turn(required_prefix_token_ids=whole(first))
    await agent.turn(required_prefix_token_ids=whole(second))
    await agent.turn(required_prefix_token_ids=whole(first))
    assert trained(agent.output)
    assert not any("required_prefix_token_ids" in request for request in rig.engine.requests)
    assert await matches(rig) == ["root", "continue", "continue", "continue"]


async def test_the_same_where_the_next_prompt_is_previewed(rig):
    agent = Agent(rig)
    _, (second,) = await agent.turn(), await agent.turn()
    asked = {"model": "sim", "messages": agent.history, "tools": TOOLS}
    status, preview = await rig.post(path="/tokenize", **asked, required_prefix_token_ids=whole(second))
    assert (status, preview["tokens"][: len(whole(second))]) == (200, whole(second))
    status, _ = await rig.post(path="/tokenize", **asked, required_prefix_token_ids=[1])
    assert status == 400
