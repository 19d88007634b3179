"""Several models behind one proxy: a session spans them, and no id crosses from one to another."""

import asyncio
import contextlib

import msgspec
import pytest

from tests.ports import free_port
from tests.proxy.kit import EPISODES, HEADER, TOOLS, echo, proxied, results, user
from tests.proxy.test_engines_added import request
from tests.proxy.test_several_engines import Fleet, ready, serving
from tests.proxy.traffic import Harness
from tests.support import invariants
from tests.support.waiting import PATIENCE
from tokencache.batching.selection import select
from tokencache.client import AsyncClient
from tokencache.proxy import dispatch
from tokencache.proxy.dispatch import Dispatch
from tokencache.testing import Fault, SimulatedEngine
from tokencache.trajectories.values import Trajectory
from tokencache.trajectories.verify import verify

ASK = [user("EPISODE:demo")]
POLICY, JUDGE = "policy", "judge"


@pytest.fixture(autouse=True)
def _briskly(monkeypatch):
    monkeypatch.setattr(dispatch, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(dispatch, "LONGEST_PAUSE", 0.02)
    monkeypatch.setattr("tokencache.engine.health.CHECK_EVERY", 0.02)


def engine(model, seed=7, **more):
    return SimulatedEngine(episodes=EPISODES, seed=seed, model=model, **more)


@contextlib.asynccontextmanager
async def served(*models, hold=PATIENCE, **settings):
    """A proxy before an engine for each of these models, once all serve."""
    made = [engine(model, seed) for seed, model in enumerate(models)]
    async with Fleet(made) as fleet, proxied(upstream=",".join(fleet.urls), hold=hold, **settings) as rig:
        rig.engine = fleet
        await serving(rig, len(models))
        yield rig, fleet


async def play(rig, session, model, turns=2, messages=ASK):
    messages = list(messages)
    for _ in range(turns):
        message = await rig.say(session, messages, tools=TOOLS, model=model)
        messages += [echo(message), *results(message)]
    return messages


async def records(rig, session="s"):
    turns = await rig.store.turns(session)
    return turns, await rig.store.tokens(session, [turn.id for turn in turns])


async def test_a_session_spans_models_with_sequences_of_each():
    async with served(POLICY, JUDGE) as (rig, fleet):
        history = await play(rig, "s", POLICY)
        await play(rig, "s", JUDGE)
        await play(rig, "s", POLICY, 1, history)
        exported = await rig.check()
        found = {sequence["model"]: [turn["model"] for turn in sequence["turns"]] for sequence in exported["sequences"]}
        assert found == {POLICY: [POLICY] * 3, JUDGE: [JUDGE] * 2}
        assert [len({entry.session for entry in one.ground_truth if entry.session}) for one in fleet.engines] == [1, 1]
        assert exported["complete"]
        outline = await rig.get("/tokencache/v1/sessions/s/outline")
        assert [sequence["model"] for sequence in outline["sequences"]] == [POLICY, JUDGE]


async def test_a_reply_of_another_model_is_text():
    async with served(POLICY, JUDGE) as (rig, _):
        history = await play(rig, "s", POLICY)
        await play(rig, "s", JUDGE, 1, history)
        *_, last = await rig.turns()
        assert (last["match"], last["reason"], last["parent"], last["anchors"]) == ("plain", "other-model", None, [])
        await rig.check()


@pytest.mark.parametrize("member", ["output", "previous_response_id"])
async def test_a_handle_of_another_model_is_none(member):
    """The handle alone finds a reply anywhere in a session, even if its text was changed."""
    async with served(POLICY, JUDGE) as (rig, _):
        first = {"model": POLICY, "input": [{"role": "user", "content": "EPISODE:talk"}]}
        _, said = await rig.post("s", "/v1/responses", **first)
        follow = [{"role": "user", "content": "and?"}]
        body = {"input": [*first["input"], *said["output"], *follow]} if member == "output" else {member: said["id"], "input": follow}
        for model in (JUDGE, POLICY):
            status, answer = await rig.post("s", "/v1/responses", model=model, **body)
            assert status == 200, answer
        assert [(turn["model"], turn["match"]) for turn in await rig.turns()] == [(POLICY, "root"), (JUDGE, "plain"), (POLICY, "continue")]
        await rig.check()


async def say_without_model(rig, messages):
    status, said = await rig.post("s", messages=messages, tools=TOOLS, model=None)
    assert status == 200, said
    message = said["choices"][0]["message"]
    return [*messages, echo(message), *results(message)]


async def test_a_call_without_a_model_continues_no_other_models_reply():
    """The first group serves it; which one that is changes when the first engine comes up last, or is removed."""
    port = free_port()
    async with Fleet([engine(JUDGE)]) as fleet, proxied(upstream=f"http://127.0.0.1:{port},{fleet.urls[0]}", hold=PATIENCE) as rig:
        await serving(rig, 1)
        messages = await say_without_model(rig, await say_without_model(rig, ASK))
        async with engine(POLICY).serve(port=port):
            await serving(rig, 2)
            await say_without_model(rig, await say_without_model(rig, messages))
        assert [(turn["model"], turn["match"], turn["reason"]) for turn in await rig.turns()] == [
            (JUDGE, "root", ""),
            (JUDGE, "continue", ""),
            (POLICY, "plain", "other-model"),
            (POLICY, "continue", ""),
        ]


async def test_no_other_model_continues_a_broken_reply_of_a_call_without_a_model(monkeypatch):
    port, first = free_port(), iter([True])
    judge = engine(JUDGE, derenders=True)
    judge.choose_fault = lambda _, body: Fault.abort(5) if body.get("messages") == ASK and next(first, False) else None
    async with judge.serve() as up, proxied(upstream=f"http://127.0.0.1:{port},{up}", hold=PATIENCE) as rig:
        await serving(rig, 1)
        piece, policy = Dispatch.next_piece, engine(POLICY, derenders=True)
        async with contextlib.AsyncExitStack() as stack:

            async def with_policy(*args):
                await stack.enter_async_context(policy.serve(port=port))
                await serving(rig, 2)
                return await piece(*args)

            monkeypatch.setattr(Dispatch, "next_piece", with_policy)
            await say_without_model(rig, ASK)
        (turn,) = await rig.turns()
        assert (turn["model"], [part["engine"] for part in turn["pieces"]]) == (JUDGE, [up, up])


async def test_what_arrived_of_a_reply_is_kept_if_no_engine_of_its_model_is_left(monkeypatch):
    third, piece = engine("third", derenders=True), Dispatch.next_piece
    async with served(POLICY, JUDGE) as (rig, _), third.serve() as url:
        await request(rig, "POST", url=url, status=201)
        third.choose_fault = lambda _, body: Fault.abort(5) if body.get("messages") == ASK else None

        async def removed(*args):
            await request(rig, "DELETE", url=url, force="true")
            return await piece(*args)

        monkeypatch.setattr(Dispatch, "next_piece", removed)
        assert (await rig.post("s", messages=ASK, model="third"))[0] == 404
        assert [(turn["model"], turn["completion_tokens"]) for turn in await rig.turns()] == [("third", 5)]
        assert [incident["kind"] for incident in (await rig.exported())["incidents"]] == ["engine-aborted", "call-refused"]


class Wandering(Harness):
    """A harness that sends each call to any of the models."""

    async def call(self, messages):
        self.rig = Choosing(self.rig, self.rng.choice([POLICY, JUDGE]))
        try:
            return await super().call(messages)
        finally:
            self.rig = self.rig.rig


class Choosing:
    """A rig whose calls name a model."""

    def __init__(self, rig, model):
        self.rig, self._model = rig, model

    def post(self, *args, **body):
        return self.rig.post(*args, model=self._model, **body)


@pytest.mark.parametrize("seed", range(4))
async def test_no_ids_cross_whatever_harnesses_do(seed):
    """All that harnesses do, each call with another model: the engines have one vocabulary, so a false match would go unnoticed."""
    async with served(POLICY, JUDGE) as (rig, _):
        harnesses = [Wandering(rig, f"s{n}", seed) for n in range(2)]
        for harness in harnesses:
            harness.threads.append(harness.opening())
            for _ in range(14):
                await harness.step()
        matches = []
        for harness in harnesses:
            turns, tokens = await records(rig, harness.session)
            assert invariants.apart(turns) == []
            assert invariants.audit(turns, tokens) == []
            matches += [turn.match for turn in turns]
            assert {turn.model for turn in turns} == {POLICY, JUDGE}
            await rig.check(harness.session)
        assert {"continue", "plain"} <= set(matches)


CALLS = {
    "/v1/chat/completions": {"messages": ASK},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"max_tokens": 9, "messages": ASK},
    "/v1/messages/count_tokens": {"messages": ASK},
    "/v1/responses": {"input": "hi"},
    "/v1beta/models/nobody:generateContent": {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
}
ERRORS = {
    "/v1/messages": lambda said: (said["type"], said["error"]["type"]) == ("error", "not_found_error"),
    "/v1/messages/count_tokens": lambda said: (said["type"], said["error"]["type"]) == ("error", "not_found_error"),
    "/v1beta/models/nobody:generateContent": lambda said: (said["error"]["code"], said["error"]["status"]) == (404, "NOT_FOUND"),
}


@pytest.mark.parametrize("path", CALLS)
async def test_a_model_that_nobody_serves_is_refused_in_the_dialect_of_the_caller(path):
    async with served(POLICY, JUDGE) as (rig, fleet):
        status, said = await rig.post("s", path, **{"model": "nobody", **CALLS[path]} if "nobody" not in path else CALLS[path])
        message = said["error"]["message"]
        assert (status, "`nobody` does not exist" in message, f"{POLICY}, {JUDGE}" in message) == (404, True, True), said
        assert ERRORS.get(path, lambda said: said["error"].get("param") == "model")(said), said
        assert not [entry for entry in fleet.ground_truth if entry.session]
        assert (await rig.get("/tokencache/v1/sessions"))["sessions"] == [], "nothing was sampled, and nothing is missing"


async def test_without_a_session_the_model_decides_too():
    async with served(POLICY, JUDGE) as (rig, fleet):
        for model in (JUDGE, POLICY, JUDGE):
            assert (await rig.post(None, messages=ASK, model=model))[1]["model"] == model
        assert (await rig.post(None, messages=ASK, model="nobody"))[0] == 404
        assert [len([r for r in one.requests if r["messages"] == ASK]) for one in fleet.engines] == [1, 2]


@pytest.mark.parametrize("session", [None, "s"])
async def test_the_models_of_all_engines_are_listed(session):
    async with served(POLICY, JUDGE) as (rig, fleet):
        fleet.engines[0].weights.adapters["tuned"] = "/tuned"
        headers = {HEADER: session} if session else {}
        assert [one["id"] for one in (await rig.get("/v1/models", **headers))["data"]] == [POLICY, "tuned", JUDGE]
        await rig.say("s", ASK, model="tuned")  # it was loaded after the engine was probed
        assert [turn["model"] for turn in await rig.turns()] == ["tuned"]


@pytest.mark.parametrize("others", [[], [JUDGE]], ids=["alone", "beside another model"])
async def test_an_adapter_is_served_by_the_engines_that_list_it(others):
    async with served(POLICY, POLICY, *others, placement="hash") as (rig, fleet):
        fleet.engines[1].weights.adapters["tuned"] = "/tuned"
        for n in range(6):
            await rig.say(f"s{n}", ASK, model="tuned")
        assert {place for n in range(6) for place in fleet.asked(f"s{n}")} == {1}


async def test_an_adapter_that_more_engines_have_by_now_is_served_by_them_too(monkeypatch):
    """A trainer loads it into one engine after another, and the first calls arrive meanwhile."""
    monkeypatch.setattr("tokencache.engine.pool.LIST_AGAIN_SECONDS", 0)
    async with served(POLICY, POLICY, placement="hash") as (rig, fleet):
        for one in fleet.engines:
            one.weights.adapters["tuned"] = "/tuned"
            for n in range(20):
                await rig.say(f"s{n}", ASK, model="tuned")
        assert {place for n in range(20) for place in fleet.asked(f"s{n}")} == {0, 1}


class AnyName(SimulatedEngine):
    """Serves any name, as vLLM with `VLLM_SKIP_MODEL_NAME_VALIDATION=1`, and lists one. Counts how often it is asked for its list."""

    lists = 0

    def _served(self, body):
        return body.get("model") or self.model

    async def _models(self, http):
        self.lists += 1
        return await super()._models(http)


async def test_a_name_that_no_engine_lists_costs_no_request_in_each_call(monkeypatch):
    monkeypatch.setattr("tokencache.engine.pool.LIST_AGAIN_SECONDS", 1000)
    engines = [AnyName(episodes=EPISODES, model=POLICY) for _ in range(2)]
    async with Fleet(engines) as fleet, proxied(upstream=",".join(fleet.urls), placement="hash") as rig:
        await serving(rig, 2)
        for n in range(20):
            await rig.say(f"s{n}", ASK, model="any")  # both engines probe the name
        assert {place for n in range(20) for place in fleet.asked(f"s{n}")} == {0, 1}
        before = [one.lists for one in engines]
        for n in range(20):
            await rig.say(f"s{n}", ASK, model="any")
        assert [one.lists for one in engines] == before


async def test_an_adapter_of_another_base_model_has_the_name_and_not_the_replies():
    async with served(POLICY, JUDGE) as (rig, fleet):
        first, second = (one.weights.adapters for one in fleet.engines)
        first["tuned"] = "/tuned"
        history = await play(rig, "s", "tuned")
        second["tuned"] = first.pop("tuned")
        await rig.get("/v1/models")  # the engines are asked what they list
        await play(rig, "s", "tuned", 2, history)
        found = [(turn["model"], turn["match"], turn["reason"]) for turn in await rig.turns()]
        assert found == [("tuned", "root", ""), ("tuned", "continue", ""), ("tuned", "plain", "other-model"), ("tuned", "continue", "")]
        assert fleet.asked("s") == [0, 0, 1, 1]
        await rig.check()
        async with rig.http.post(f"{rig.url}/tokencache/v1/sessions/s/score", json={"edits": []}) as answer:
            assert [turn["refused"] for turn in (await answer.json())["turns"]] == ["not-scored"] * 2 + [""] * 2


async def test_a_session_keeps_to_one_engine_of_each_model():
    async with served(POLICY, POLICY, JUDGE, JUDGE) as (rig, fleet):
        for n in range(6):
            history = await play(rig, f"s{n}", POLICY)
            await play(rig, f"s{n}", JUDGE)
            await play(rig, f"s{n}", POLICY, 1, history)
            asked = fleet.asked(f"s{n}")
            assert (len({place for place in asked if place < 2}), len({place for place in asked if place > 1})) == (1, 1)
            bound = (await rig.store.session(f"s{n}")).engine.split(" ")
            assert {fleet.urls.index(key) for key in bound} == set(asked)
        assert {fleet.home(f"s{n}") for n in range(6)} == {0, 1}
        client = rig.proxy.pool.placement
        for n in range(6):
            await rig.http.post(f"{rig.url}/tokencache/v1/sessions/s{n}/finish", json={})
        assert not client.holdings(0.0)


async def test_a_model_whose_engine_is_gone_waits_for_it_and_never_uses_another():
    async with served(POLICY, JUDGE) as (rig, fleet):
        await fleet.stop(1)
        await serving(rig, 1)
        call = asyncio.create_task(rig.say("s", ASK, model=JUDGE))
        await rig.say("s", ASK, model=POLICY)
        assert not call.done()
        await fleet.start(1)
        await call
        await rig.check()


async def test_an_engine_that_was_never_seen_may_serve_the_model():
    """Engines take minutes to load: a call of the second model waits for its engine, also before it was ever probed."""
    port = free_port()
    async with Fleet([engine(POLICY)]) as fleet, proxied(upstream=f"{fleet.urls[0]},http://127.0.0.1:{port}", hold=PATIENCE) as rig:
        await serving(rig, 1)
        call = asyncio.create_task(rig.say("s", ASK, model=JUDGE))
        await rig.say("s", ASK, model=POLICY)
        async with engine(JUDGE).serve(port=port):
            await call
        assert not [entry for entry in fleet.ground_truth if entry.session and entry.session != "s"]


async def test_an_engine_that_never_answers_does_not_get_the_calls_of_an_adapter_that_others_have():
    """The adapter was loaded after they were probed, and the engine that nobody has seen might have it."""
    async with Fleet([engine(POLICY), engine(POLICY)]) as fleet:
        upstream = ",".join([*fleet.urls, f"http://127.0.0.1:{free_port()}"])
        async with proxied(upstream=upstream, hold=0) as rig:
            await serving(rig, 2)
            for one in fleet.engines:
                one.weights.adapters["tuned"] = "/tuned"
            await rig.say("s", ASK, model="tuned")
            assert [turn["model"] for turn in await rig.turns()] == ["tuned"]


async def test_an_engine_with_a_new_model_makes_a_group_and_says_so():
    async with served(POLICY, hold=0) as (rig, _), engine(JUDGE).serve() as url:
        assert (await rig.post("s", messages=ASK, model=JUDGE))[0] == 404
        said = await request(rig, "POST", url=url, status=201)
        assert (said["serves"], said["error"], said["group"]) == (True, "", JUDGE)
        assert "only engine that serves judge" in said["note"]
        await play(rig, "s", JUDGE)
        assert [engine["group"] for engine in (await ready(rig))["engines"]] == [POLICY, JUDGE]
        await request(rig, "DELETE", url=url, force="true")
        assert (await rig.post("s", messages=ASK, model=JUDGE))[0] == 404


async def test_an_engine_that_serves_a_model_otherwise_waits():
    async with (
        served(POLICY, JUDGE) as (rig, fleet),
        engine(JUDGE, honours_ids=False).serve() as url,
    ):
        said = await request(rig, "POST", url=url, status=201)
        assert (said["serves"], said["group"]) == (False, JUDGE)
        assert f"differs from the engines that serve {JUDGE}" in said["error"]
        await play(rig, "s", JUDGE)
        assert len(fleet.asked("s")) == 2


async def trainer_format(rig, form, **parameters):
    query = "&".join(f"{name}={value}" for name, value in {"format": form, **parameters}.items())
    return await rig.get(f"/tokencache/v1/sessions/s/trajectories?{query}")


async def test_a_model_that_is_not_trained_has_no_loss_and_no_row():
    async with served(POLICY, JUDGE, not_trainable=JUDGE) as (rig, _):
        await play(rig, "s", POLICY)
        await play(rig, "s", JUDGE)
        exported = await rig.exported()
        policy, judge = exported["sequences"]
        assert (judge["model"], judge["trainable_tokens"], judge["weight"], any(judge["logprobs"])) == (JUDGE, 0, 0.0, False)
        assert (policy["trainable_tokens"] > 0, policy["weight"]) == (True, 1.0)
        assert {mark for turn in judge["turns"] for mark in turn["marks"]} == {"not-trainable"}
        assert exported["figures"]["models"] is None
        everything = await trainer_format(rig, "verl")
        assert [row["response_ids"] for row in everything["outputs"]] == [policy["token_ids"][policy["turns"][0]["completion"][0] :]]
        assert everything["figures"]["models"]["dropped"] == {JUDGE: 1}
        chosen = await trainer_format(rig, "verl", model=JUDGE)
        assert [set(row["response_mask"]) for row in chosen["outputs"]] == [{0}]
        native = await trainer_format(rig, "native", model=POLICY)
        assert [sequence["model"] for sequence in native["sequences"]] == [POLICY]
        assert native["figures"]["models"]["dropped"] == {JUDGE: 1}
        selection = select([msgspec.convert(exported, Trajectory)])
        assert [row.sequence.model for row in selection.kept] == [POLICY]
        assert selection.dropped[0].reason == "the model judge is not trained"
        assert verify(msgspec.convert(exported, Trajectory)) == verify(msgspec.convert(native, Trajectory)) == []
        assert [row["names"] for row in (await ready(rig))["engines"]] == [[POLICY], [JUDGE]]
        assert [row["trainable"] for row in (await ready(rig))["engines"]] == [True, False]


async def test_what_a_trainer_announces_does_not_concern_a_model_that_is_not_trained():
    async with served(POLICY, JUDGE, not_trainable=JUDGE) as (rig, _):
        async with rig.http.put(rig.url + "/tokencache/v1/weights", json={"version": 3}) as answer:
            assert answer.status == 200
        async with rig.http.put(rig.url + "/tokencache/v1/weights", json={"phase": "updating", "owner": "t"}) as answer:
            assert answer.status == 200
        await play(rig, "s", JUDGE, 1)  # it waits for no update
        async with rig.http.put(rig.url + "/tokencache/v1/weights", json={"version": 4, "owner": "t"}) as answer:
            assert answer.status == 200
        await play(rig, "s", POLICY, 1)
        assert {turn["model"]: [span["version"] for span in turn["weight_versions"]] for turn in await rig.turns()} == {
            JUDGE: [],
            POLICY: ["4"],
        }
        assert (await rig.exported())["figures"]["versions"].keys() == {"4"}


async def test_the_queue_selects_by_model():
    async with served(POLICY, JUDGE, not_trainable=JUDGE) as (rig, _):
        for session, models in {"both": [POLICY, JUDGE], "one": [JUDGE]}.items():
            for model in models:
                await play(rig, session, model, 1)
            await rig.http.post(f"{rig.url}/tokencache/v1/sessions/{session}/finish", json={})

        async def taken(consumer, **more):
            async with rig.http.post(rig.url + "/tokencache/v1/queue/take", json={"consumer": consumer, "limit": 9, **more}) as answer:
                return [one["sessions"][0]["session"] for one in (await answer.json())["deliveries"]]

        assert await taken("a", model="nobody") == []
        assert await taken("a", model=JUDGE, limit=1) == ["both"]
        assert await taken("b", model=JUDGE) == ["one"]


async def test_a_consumer_gets_the_sequences_of_its_model():
    async with served(POLICY, JUDGE) as (rig, _), AsyncClient(rig.url) as client:
        for model in (POLICY, JUDGE):
            await play(rig, "s", model, 1)
        await client.session("s").finish(1.0)
        async for delivery in client.follow("trainer", model=JUDGE, format="native"):
            (trajectory,) = delivery.trajectories
            assert [sequence.model for sequence in trajectory.sequences] == [JUDGE]
            await delivery.acknowledge()
            break


async def test_an_answer_of_one_model_in_a_call_of_another_is_a_delegation():
    async with served(POLICY, JUDGE) as (rig, _):
        history = await play(rig, "s", POLICY, 1)
        verdict = await rig.say("s", [user("EPISODE:talk judge it")], model=JUDGE)
        await rig.say("s", [*history[:-1], {**history[-1], "content": verdict["content"]}], tools=TOOLS, model=POLICY)
        exported = await rig.exported()
        model_of = {turn["turn"]: turn["model"] for sequence in exported["sequences"] for turn in sequence["turns"]}
        (link,) = exported["links"]
        assert (link["kind"], [model_of[turn] for turn in link["sources"]], model_of[link["turn"]]) == ("delegation", [JUDGE], POLICY)
