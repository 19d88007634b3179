"""Ids that a thinking budget forced are not trained, and the turn says so; an end of thinking that the policy chose stays its own."""

import contextlib
import json

import msgspec
import pytest

from tests.engine.intermediary import Intermediary
from tests.proxy.kit import CHAT, HEADER, proxied, user
from tokencache.testing import Fault, SimulatedEngine
from tokencache.trajectories.values import Trajectory
from tokencache.trajectories.verify import verify

LONG = "<think>\nOne two three four five six seven eight nine ten eleven twelve.\n</think>\n\nDone."
SHORT = "<think>\nOne.\n</think>\n\nDone."
BUDGET = 6


def made(text=LONG, **options):
    return SimulatedEngine(episodes={"thinks": [text, SHORT, SHORT]}, seed=7, **options)


def body(dialect, *, stream=False, budget=BUDGET, more=()):
    messages = [user("EPISODE:thinks"), *more]
    if dialect == "messages":
        thinking = {"type": "enabled", "budget_tokens": budget}
        return "/v1/messages", {"model": "sim", "max_tokens": 60, "messages": messages, "thinking": thinking, "stream": stream}
    return CHAT, {"model": "sim", "messages": messages, "thinking_token_budget": budget, "stream": stream}


async def ask(rig, dialect="chat", **more):
    path, sent = body(dialect, **more)
    async with rig.http.post(rig.url + path, json=sent, headers={HEADER: "s"}) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.read()


async def recorded(rig, turns=1):
    """Of the last turn: its record, its ids, mask and log probabilities. `verify` finds nothing wrong with the session."""
    exported = await rig.exported("s")
    assert verify(msgspec.convert(exported, Trajectory)) == []
    (sequence,) = exported["sequences"]
    turn = sequence["turns"][-1]
    assert len(sequence["turns"]) == turns
    start, end = turn["completion"]
    return turn, sequence["token_ids"][start:end], sequence["loss_mask"][start:end], sequence["logprobs"][start:end]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ["chat", "messages"])
async def test_the_forced_id_is_not_trained(dialect, stream):
    async with proxied(made()) as rig:
        await ask(rig, dialect, stream=stream)
        turn, ids, mask, logprobs = await recorded(rig)
        end = rig.engine.tokenizer.id_of("</think>")
        places = [place for place, token in enumerate(ids) if token == end]
        assert places[0] == BUDGET + 1
        assert len(places) == 2
        assert mask == [int(place != places[0]) for place in range(len(ids))]
        assert (logprobs[places[0]], turn["forced"], turn["marks"]) == (0.0, [[places[0], places[0] + 1]], ["forced"])
        assert turn["sampling"]["thinking_token_budget"] == BUDGET
        assert (await rig.info())["complete"]


@pytest.mark.parametrize("budget", [60, 30])
async def test_an_end_that_the_policy_chose_is_trained(budget):
    async with proxied(made(SHORT)) as rig:
        await ask(rig, budget=budget)
        turn, ids, mask, _ = await recorded(rig)
        assert rig.engine.tokenizer.id_of("</think>") in ids
        assert (set(mask), turn["forced"], turn["marks"]) == ({1}, [], [])


async def test_without_a_budget_nothing_is_asked():
    async with proxied(made()) as rig:
        asked = len(rig.engine.ground_truth)
        async with rig.http.post(
            rig.url + CHAT, json={"model": "sim", "messages": [user("EPISODE:thinks")]}, headers={HEADER: "s"}
        ) as answer:
            await answer.read()
        assert len(rig.engine.ground_truth) == asked + 1


async def test_the_ids_are_asked_once():
    async with proxied(made()) as rig:
        asked = len(rig.engine.ground_truth)
        for _ in range(3):
            await ask(rig)
        assert len(rig.engine.ground_truth) == asked + 2 + 3


async def test_a_conversation_goes_on_after_a_forced_end():
    async with proxied(made()) as rig:
        said = json.loads(await ask(rig))["choices"][0]["message"]
        reply = {"role": "assistant", "content": said["content"], "reasoning": said["reasoning"]}
        await ask(rig, more=[reply, user("and then?")])
        turn, _, mask, _ = await recorded(rig, turns=2)
        assert (turn["match"], set(mask)) == ("continue", {1})


@contextlib.asynccontextmanager
async def behind(change):
    async with made().serve() as up, Intermediary(up, change).serve() as url, proxied(made(), upstream=url) as rig:
        yield rig


async def test_an_engine_that_ignores_budgets():
    """Whether ids were forced is not known then, and the turn says so."""

    def change(_route, sent):
        return {name: value for name, value in sent.items() if name != "thinking_token_budget"}

    async with behind(change) as rig:
        await ask(rig)
        turn, _, mask, _ = await recorded(rig)
        assert (turn["marks"], turn["forced"], set(mask)) == (["budget-unproven"], [], {1})


async def test_an_engine_that_counts_otherwise():
    """The place has another id than the engine was seen to force."""

    def change(_route, sent):
        budget = sent.get("thinking_token_budget")
        return sent if budget is None or "allowed_token_ids" in sent else {**sent, "thinking_token_budget": budget + 1}

    async with behind(change) as rig:
        await ask(rig)
        turn, _, mask, _ = await recorded(rig)
        assert (turn["marks"], turn["forced"], set(mask)) == (["budget-unproven"], [], {1})


async def test_while_the_engine_cannot_answer_the_question_the_call_is_made():
    def change(_route, sent):
        return 503 if "allowed_token_ids" in sent and sent.get("thinking_token_budget", 0) > 1 else sent

    async with behind(change) as rig:
        await ask(rig)
        turn, *_ = await recorded(rig)
        assert turn["marks"] == ["budget-unproven"]


@pytest.mark.parametrize("fault", [Fault.abort(3), Fault.answer(500), Fault.answer(502)], ids=["aborted", "500", "502"])
async def test_a_bad_moment_of_the_engine_is_not_remembered(fault):
    engine = made()
    async with proxied(engine) as rig:
        left = [fault]
        engine.choose_fault = lambda _route, sent: left.pop() if left and "allowed_token_ids" in sent else None
        await ask(rig)
        turn, *_ = await recorded(rig)
        assert (turn["marks"], left) == (["budget-unproven"], [])
        await ask(rig)
        assert "forced" in (await rig.turns())[-1]["marks"]


@pytest.mark.parametrize("budget", [-1, None])
async def test_no_limit_is_no_budget(budget):
    async with proxied(made()) as rig:
        await ask(rig, budget=budget)
        turn, *_ = await recorded(rig)
        assert (turn["marks"], turn["forced"]) == ([], [])
