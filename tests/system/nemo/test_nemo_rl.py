"""Through the proxy to NeMo RL's worker: each turn extends the previous one, in the engine's own log, in every dialect."""

import asyncio
import json

import pytest
from aiohttp import web
from typer.testing import CliRunner

from tests.proxy.kit import CHAT, HEADER, TOOLS, echo, proxied, results, user
from tests.support.waiting import PATIENCE, until
from tests.system.nemo.agents import AGENTS, chat
from tests.system.nemo.kit import before_worker
from tests.system.nemo.worker import TOKEN_FIELDS, Worker, splice
from tokencache import cli
from tokencache.testing import SimulatedEngine

ASK = [user("EPISODE:demo")]
IN_ONE_LINE = ["root"] + ["continue"] * 3
VLLM = {"engine_kind": "vllm"}
TRAINERS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")


def episodes(worker):
    """The calls of harnesses: the proxy's own requests ask for no weight versions."""
    return [call for call in worker.calls if "return_weight_versions" in call]


async def found(rig):
    (capability,) = {model["model"]: model for model in (await rig.readiness())["engine"]["models"]}.values()
    return capability


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", AGENTS)
async def test_an_agent_with_tools(dialect, stream):
    async with before_worker() as (rig, worker):
        await AGENTS[dialect](rig, "s", 4, stream=stream)
        turns = await rig.turns()
        assert [turn["match"] for turn in turns] == IN_ONE_LINE
        assert {turn["dialect"] for turn in turns} == {dialect}
        assert [len(sequence["turns"]) for sequence in (await rig.check())["sequences"]] == [4]
        assert (await rig.info())["incidents"] == []
        asked, ground_truth = episodes(worker), rig.ground_truth()
        prefixes = [entry.prompt_ids + entry.completion_ids for entry in ground_truth]
        assert [call.get("required_prefix_token_ids") for call in asked] == [None, *prefixes[:-1]]
        assert not any("stream" in call or "stream_options" in call for call in asked)
        assert not any(message.keys() & set(TOKEN_FIELDS) for call in asked for message in call["messages"])


async def test_the_detected_driver_and_level():
    async with before_worker() as (rig, _):
        model = await found(rig)
        assert (model["model"], model["level"], model["driver"]) == ("sim", "exact", "nemo-rl")
        assert model["how"] == "required_prefix_token_ids begin the prompt"
        assert (model["version"], model["max_model_len"]) == ("unknown", rig.engine.max_model_len)
        assert model["stop_ids"] == [rig.engine.tokenizer.stop_id]
        assert model["logprobs"] == "raw"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("shown", [{}, {"logprobs": True, "top_logprobs": 2}, {"return_token_ids": True}], ids=str)
async def test_the_harness_gets_what_vllm_would_return(stream, shown):
    async with before_worker() as (rig, _):
        status, answer_json = await rig.post(messages=ASK, tools=TOOLS, stream=stream, **shown)
        assert status == 200
        (entry,) = rig.ground_truth()
        text = json.dumps(answer_json)
        assert "generation_token_ids" not in text
        assert "generation_log_probs" not in text
        choices = [choice for chunk in (answer_json if stream else [answer_json]) for choice in chunk["choices"]]
        ids = [token for choice in choices for token in choice.get("token_ids") or ()]
        values = [entry["logprob"] for choice in choices for entry in (choice.get("logprobs") or {"content": ()})["content"]]
        assert ids == (entry.completion_ids if "return_token_ids" in shown else [])
        assert values == (entry.logprobs if "logprobs" in shown else [])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_reply_that_was_cut_short_is_continued(stream):
    async with before_worker() as (rig, worker):
        message = await rig.say("s", ASK, tools=TOOLS, stream=stream, max_tokens=9)
        await rig.say("s", [*ASK, echo(message), *results(message)], tools=TOOLS, stream=stream)
        first, second = await rig.turns()
        assert (first["finish_reason"], second["match"]) == ("length", "continue")
        assert len(episodes(worker)[1]["required_prefix_token_ids"]) == first["prompt_tokens"] + 9
        await rig.check()


async def test_an_edited_context_is_respliced_up_to_the_last_reply():
    async with before_worker() as (rig, worker):
        opening = [{"role": "system", "content": "It is nine."}, *ASK]
        message = await rig.say("s", opening, tools=TOOLS)
        history = [*opening[1:], echo(message), *results(message)]
        await rig.say("s", [{"role": "system", "content": "It is ten."}, *history], tools=TOOLS)
        _, second = await rig.turns()
        assert second["match"] == "resplice"
        prefix = episodes(worker)[1]["required_prefix_token_ids"]
        first, entry = rig.ground_truth()
        assert prefix == entry.prompt_ids[: len(prefix)]
        assert prefix[-len(first.completion_ids) :] == first.completion_ids
        await rig.check()


async def test_ids_of_another_message_than_the_last_reply_are_not_sent():
    """An unknown reply follows the known one: the worker would cut there."""
    async with before_worker() as (rig, worker):
        message = await rig.say("s", ASK, tools=TOOLS)
        known = [*ASK, echo(message), *results(message)]
        await rig.say("s", [*known, {"role": "assistant", "content": "Nobody said this."}, user("And?")], tools=TOOLS)
        assert [(turn["match"], turn["reason"]) for turn in await rig.turns()][1:] == [("plain", "prefix-ends-before-last-reply")]
        assert "required_prefix_token_ids" not in episodes(worker)[1]
        await rig.say("s", known, tools=TOOLS)
        assert (await rig.turns())[-1]["match"] == "continue"
        await rig.check()


async def test_ids_that_a_harness_sends_are_not_forwarded():
    async with before_worker() as (rig, worker):
        message = await rig.say("s", ASK, tools=TOOLS)
        other = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-1.0]}
        messages = [*ASK, {**echo(message), **other}, *results(message)]
        status, _ = await rig.post(messages=messages, tools=TOOLS, required_prefix_token_ids=[9, 9])
        assert (status, len(rig.ground_truth())) == (400, 1)
        await rig.say("s", messages, tools=TOOLS)
        (entry, _), call = rig.ground_truth(), episodes(worker)[1]
        assert call["required_prefix_token_ids"] == entry.prompt_ids + entry.completion_ids
        assert not call["messages"][1].keys() & set(TOKEN_FIELDS)
        await rig.check()


# ---- routes that the worker does not have


async def test_the_worker_gets_no_requests_for_routes_it_lacks(monkeypatch):
    """Each 404 is a line in its log: missing routes are detected once, by the probe and the first look-up."""
    monkeypatch.setattr("tokencache.engine.health.CHECK_EVERY", 0.005)
    async with before_worker() as (rig, worker):
        looks = []
        connect = rig.proxy.upstream.connect

        async def counted():
            looks.append(1)
            await connect()

        monkeypatch.setattr(rig.proxy.upstream, "connect", counted)

        async def looked():
            return len(looks) > 10

        await until(looked)
        assert sorted(worker.unknown) == ["/detokenize", "/health", "/v1/models", "/version"]


async def test_the_model_is_listed_within_a_session():
    """Harnesses, and `tokencache run`, request it; the worker has no `/v1/models`, and the probe knows the name."""
    async with before_worker() as (rig, worker):
        seen = len(worker.unknown)
        for path, headers in (("/s/r1/v1/models", {}), ("/v1/models", {"Authorization": "Bearer tcs-r1"})):
            assert [model["id"] for model in (await rig.get(path, **headers))["data"]] == ["sim"]
        assert len(worker.unknown) == seen
        async with rig.http.get(rig.url + "/v1/models") as answer:  # without a session the worker itself answers
            assert answer.status == 404


async def test_codex_is_pointed_at_the_worker_without_a_model_named():
    async with before_worker() as (rig, _):
        asked = ["env", "codex", "--session", "r1", "--proxy", rig.url]
        shown = await asyncio.to_thread(CliRunner().invoke, cli.app, asked)
    assert shown.exit_code == 0, shown.output
    assert 'model = "sim"' in shown.output
    assert f"model_context_window = {rig.engine.max_model_len}" in shown.output


# ---- the trainer's sampling


async def test_a_harness_samples_as_the_trainer_does():
    async with before_worker() as (rig, worker):
        await rig.say("s", ASK, temperature=0.2, top_k=20)
        (turn,), (call,) = await rig.turns(), episodes(worker)
        assert {name: call[name] for name in TRAINERS} == TRAINERS
        assert {name: turn["sampling"][name] for name in TRAINERS} == TRAINERS
        assert turn["replaced"] == {"temperature": 0.2, "top_p": None, "top_k": 20}


class Warm(Worker):
    """A trainer that samples with another temperature."""

    def __init__(self, *given, **more):
        super().__init__(*given, temperature=0.7, top_p=0.9, **more)


async def test_a_trainers_own_sampling_is_named_in_the_policy():
    async with before_worker(Warm, sampling={"temperature": 0.7, "top_p": 0.9}) as (rig, _):
        await chat(rig, "s", 2, stream=False)
        assert [turn["match"] for turn in await rig.turns()] == IN_ONE_LINE[:2]
        await rig.check()


async def test_without_it_the_refusal_says_which_option_to_set():
    engine = SimulatedEngine()
    async with engine.serve() as up, Warm(up, 2).serve() as url, proxied(engine, upstream=url) as rig:

        async def refused():
            async with rig.http.get(rig.url + "/readyz") as answer:
                return answer.status == 503 and "--sampling" in (await answer.json())["engine"]["error"]

        await until(refused)
        async with rig.http.post(rig.url + CHAT, json={"messages": ASK}, headers={HEADER: "s"}) as answer:
            assert (answer.status, await answer.text()) == (500, "Internal Server Error")
        assert [incident["kind"] for incident in (await rig.info())["incidents"]] == ["engine-refused"]


# ---- workers that behave differently


class Ignores(Worker):
    """Does not know the field, like stock vLLM."""

    async def _prompt(self, body):
        return await forgetful(self, body, ())


async def test_a_worker_that_ignores_the_field_is_detected_at_once():
    async with before_worker(Ignores) as (rig, worker):
        model = await found(rig)
        assert (model["level"], model["why"]) == ("record", "supplied ids are ignored")
        await chat(rig, "s", 3, stream=True)
        assert [turn["reason"] for turn in await rig.turns()] == ["", "record-only", "record-only"]
        assert not any("required_prefix_token_ids" in call for call in episodes(worker))
        await rig.check()


class Changing(Worker):
    """Behaves correctly until `otherwise` is set, and then changes the prompts of episodes."""

    otherwise = None

    async def _prompt(self, body):
        right = await super()._prompt(body)
        supplied = body.get("required_prefix_token_ids") or any("prompt_token_ids" in message for message in body["messages"])
        if self.otherwise is None or not supplied or len(right) < 100:
            return right
        return await self.otherwise(self, body, right)


async def forgetful(worker, body, right):
    bare = [{name: value for name, value in message.items() if name not in TOKEN_FIELDS} for message in body["messages"]]
    return await worker._render(body | {"messages": bare})


async def at_the_wrong_end_of_turn(worker, body, right):
    last = max(i for i, message in enumerate(body["messages"]) if message["role"] == "assistant")
    shorter = await worker._render(body | {"messages": body["messages"][:last], "add_generation_prompt": False})
    return splice(body["required_prefix_token_ids"], shorter, await worker._render(body), worker.eos)


async def with_another_tail(worker, body, right):
    return [*right[:-1], right[0]]


async def shortened(worker, body, right):
    return right[-60:]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("otherwise", "detail"),
    [
        (forgetful, "used other ids than were sent"),
        (at_the_wrong_end_of_turn, "another tail after them"),
        (with_another_tail, "another tail after them"),
        (shortened, "cut the prompt"),
    ],
)
async def test_the_prompt_that_the_worker_used_is_recorded(otherwise, detail, stream):
    async with before_worker(Changing) as (rig, worker):
        message = await rig.say("s", ASK, tools=TOOLS, stream=stream)
        messages = [*ASK, echo(message), *results(message)]
        worker.otherwise = otherwise
        message = await rig.say("s", messages, tools=TOOLS, stream=stream)
        worker.otherwise = None
        last = (await rig.turns())[-1]
        assert (last["match"], last["reason"], last["marks"]) == ("plain", "engine-disagrees", ["engine-disagrees"])
        (incident,) = (await rig.info())["incidents"]
        assert incident["kind"] == "engine-disagrees"
        assert detail in incident["detail"]
        await rig.say("s", [*messages, echo(message), *results(message)], tools=TOOLS, stream=stream)
        assert (await rig.turns())[-1]["match"] != "continue"
        await rig.check()


# ---- waiting


class Slow(Worker):
    """Answers no episode until it is released, and then possibly with an error."""

    go: asyncio.Event
    status = 200

    async def _chat(self, request):
        if b"return_weight_versions" in await request.read():
            await self.go.wait()
            if self.status != 200:
                return web.json_response({"error": {"message": "no room", "type": "X", "param": None, "code": 400}}, status=400)
        return await super()._chat(request)


ASKS = {
    "chat": (CHAT, {"model": "sim", "messages": ASK, "stream": True}, b": keep-alive"),
    "messages": ("/v1/messages", {"model": "sim", "max_tokens": 300, "messages": ASK, "stream": True}, b"event: ping"),
    "responses": ("/v1/responses", {"model": "sim", "input": "EPISODE:demo", "stream": True}, b": "),
    "gemini": (
        "/v1beta/models/sim:streamGenerateContent?alt=sse",
        {"contents": [{"role": "user", "parts": [{"text": "EPISODE:demo"}]}]},
        b": ",
    ),
}


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("dialect", ASKS)
async def test_a_harness_that_streams_receives_keep_alives(dialect, status):
    path, body, sign = ASKS[dialect]
    async with before_worker(Slow, keep_alive=0.01) as (rig, worker):
        worker.go, worker.status = asyncio.Event(), status
        async with asyncio.timeout(PATIENCE), rig.http.post(rig.url + path, json=body, headers={HEADER: "s"}) as answer:
            assert (answer.status, answer.content_type) == (200, "text/event-stream")
            before = b""
            while sign not in before:
                before += await answer.content.readany()
            worker.go.set()
            rest = await answer.read()
        assert b"Let me look" not in before
        assert (b"Let me look" in rest, b"no room" in rest) == (status == 200, status == 400)
        assert [turn["dialect"] for turn in await rig.turns()] == [dialect] * (status == 200)
        info = await rig.info()
        assert [incident["kind"] for incident in info["incidents"]] == ["engine-refused"] * (status == 400)
        assert info["complete"]


async def test_a_refusal_before_any_keep_alive_has_its_own_status():
    async with before_worker(Slow) as (rig, worker):
        worker.go, worker.status = asyncio.Event(), 400
        worker.go.set()
        status, answer_json = await rig.post(messages=ASK, stream=True)
        assert (status, answer_json["error"]["message"]) == (400, "no room")


async def test_the_turn_is_stored_before_the_first_event_leaves():
    """A whole reply is known before any of it is sent: a client that receives its beginning may continue on another replica."""
    async with before_worker() as (rig, _):
        headers = {HEADER: "s"}
        async with rig.http.post(rig.url + CHAT, json={"model": "sim", "messages": ASK, "stream": True}, headers=headers) as answer:
            await answer.content.readany()
            assert len(await rig.turns()) == 1


# ---- the option


async def test_the_option_names_the_driver():
    async with before_worker(engine_kind="nemo-rl") as (rig, _):
        await chat(rig, "s", 2, stream=True)
        assert ((await found(rig))["driver"], [turn["match"] for turn in await rig.turns()]) == ("nemo-rl", IN_ONE_LINE[:2])


async def test_other_drivers_requests_are_not_tried_then():
    engine = SimulatedEngine()
    async with engine.serve() as up, Worker(up, engine.tokenizer.stop_id).serve() as url, proxied(engine, upstream=url, **VLLM) as rig:

        async def refused():
            async with rig.http.get(rig.url + "/readyz") as answer:
                return "500" in (await answer.json())["engine"]["error"]

        await until(refused)


async def test_text_around_a_reply_is_rendered():
    """The worker decodes no ids, so nothing is proven. It would also add its tail after the end of the message, without words in it."""
    found = {}
    for session, added, more in (
        ("restored", "four,", {}),
        ("words", "four, and then.", {}),
        ("continued", "four,", {"continue_final_message": True, "add_generation_prompt": False}),
    ):
        async with before_worker() as (rig, _):
            asked = [user("EPISODE:talk")]
            message = await rig.say(session, asked, stop=["four,"])
            said = {"role": "assistant", "content": message["content"] + added}
            await rig.say(session, [*asked, said], **more)
            found[session] = [turn["match"] for turn in await rig.turns(session)]
            await rig.check(session)
    assert found == {session: ["root", "plain"] for session in found}
