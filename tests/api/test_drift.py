"""Measures drift on a real proxy. The renderings of the simulated engine are the truth."""

import asyncio

import pytest

from tests.proxy.kit import EPISODES, THOUGHT, TOOLS, echo, proxied, results, user
from tests.support.waiting import PATIENCE, until
from tokencache.api import routes
from tokencache.api.drift import DriftMeter
from tokencache.api.export_worker import ExportWorker, WorkerDiedError
from tokencache.core.drift import Site, plain_rendering
from tokencache.testing import Fault, SimulatedEngine
from tokencache.trajectories.rollout import Records

DRIFT, ALL = "/tokencache/v1/sessions/s/drift", "/tokencache/v1/sessions/s/trajectories?drift=turns"


async def talk(rig, messages, turns=4, back=echo, **more):
    """Hold a conversation; returns the messages of each request."""
    asked = []
    for _ in range(turns):
        asked.append(list(messages))
        said = await rig.say("s", messages, **more)
        messages += [back(said), *results(said)]
    return asked


def faithful(said):
    """Send back exactly what was served."""
    return {key: value for key, value in said.items() if value}


async def rendered(rig, messages, **more):
    async with rig.http.post(
        rig.up + "/tokenize", json={"model": "sim", "messages": messages, "add_generation_prompt": True, **more}
    ) as answer:
        return (await answer.json())["tokens"]


def causes_of(turn):
    return {site["cause"] for site in turn["drift"]["sites"]}


async def test_the_sites_are_where_the_engines_own_rendering_differs():
    async with proxied() as rig:
        asked = await talk(rig, [user("EPISODE:demo")], tools=TOOLS)
        (sequence,) = (await rig.get(ALL))["sequences"]
        for turn, messages in zip(sequence["turns"], asked, strict=True):
            prompt, drift = sequence["token_ids"][: turn["completion"][0]], turn["drift"]
            response = plain_rendering(prompt, [Site(**{**site, "rendered": tuple(site["rendered"])}) for site in drift["sites"]])
            assert response == await rendered(rig, messages, tools=TOOLS)
            assert drift["rendered"] == len(response)
            assert drift["tokens"] == sum(site["end"] - site["start"] for site in drift["sites"])
        await rig.check()


async def test_the_causes_are_distinguished():
    """Thinking dropped by the harness or left out by the template, arguments, whitespace, other tokens for the same text."""
    async with proxied() as rig:
        await talk(rig, [user("EPISODE:demo")], tools=TOOLS)
        turns = (await rig.get(ALL))["sequences"][0]["turns"]
        causes = [causes_of(turn) for turn in turns]
        assert "retokenized" in causes[2] & causes[3]
        sure = [some - {"retokenized"} for some in causes]  # in which reply it begins is chance
        # After a new question the template itself leaves the thinking out.
        assert sure[:3] == [set(), *[{"reasoning-dropped", "args-json", "template"}] * 2]
        assert sure[3] == {"args-json", "template", "whitespace"}
        assert {site["turn"] for turn in turns for site in turn["drift"]["sites"]} == {turn["turn"] for turn in turns[:3]}


async def test_with_a_faithful_harness_only_tokenization_drifts():
    said = [f"{THOUGHT}First.", f"{THOUGHT}Second."]
    calls = [THOUGHT + '<tool_call>\n{"name": "bash", "arguments": {"cmd": "ls"}}\n</tool_call>', *said]
    for drift, causes in ((0.3, {"retokenized"}), (0.0, set())):
        async with proxied(SimulatedEngine(episodes={"plain": calls}, drift=drift)) as rig:
            await talk(rig, [user("EPISODE:plain")], turns=2, back=faithful, tools=TOOLS)
            turns = (await rig.get(ALL))["sequences"][0]["turns"]
            assert causes_of(turns[1]) == causes


async def test_the_text_only_cost_matches_the_engine_renderings():
    async with proxied() as rig:
        asked = await talk(rig, [user("EPISODE:demo")], tools=TOOLS)
        exported = await rig.get(ALL)
        (sequence,) = exported["sequences"]
        renderings = [await rendered(rig, messages, tools=TOOLS) for messages in asked]
        said = [sequence["token_ids"][slice(*turn["completion"])] for turn in sequence["turns"]]
        broken = [n for n in range(1, 4) if renderings[n][: len(renderings[n - 1] + said[n - 1])] != renderings[n - 1] + said[n - 1]]
        figures = exported["figures"]["drift"]
        assert broken
        assert figures["text_only_sequences"] == 1 + len(broken)
        assert figures["trainable_tokens_lost"] == sum(len(tokens) for tokens in said[broken[0] :])
        assert (figures["measured"], figures["drifted"], figures["unmeasured"]) == (3, 3, {})


async def test_an_edited_context_is_measured_too():
    async with proxied() as rig:
        messages = [user("EPISODE:talk")]
        await talk(rig, messages, turns=3)
        await rig.say("s", [{"role": "system", "content": "Be brief."}, *messages])
        exported = await rig.get(ALL)
        turn = exported["sequences"][-1]["turns"][0]
        assert turn["match"] == "resplice"
        assert {site["turn"] for site in turn["drift"]["sites"]} == {anchor["turn"] for anchor in turn["anchors"]}
        assert exported["figures"]["drift"]["measured"] == 3


async def test_the_default_measures_the_last_turn_of_each_sequence():
    async with proxied() as rig:
        await talk(rig, [user("EPISODE:talk")], turns=3)
        exported = await rig.exported()
        (sequence,) = exported["sequences"]
        assert [turn["drift"] is None for turn in sequence["turns"]] == [True, True, False]
        assert exported["figures"]["drift"]["measured"] == 1
        assert exported["figures"]["drift"]["text_only_sequences"] is None


async def test_a_prompt_rendered_by_the_engine_costs_no_request():
    async with proxied() as rig:
        await rig.say("s", [user("EPISODE:talk")])
        before = len(rig.engine.tokenizations)
        response = await rig.get(DRIFT)
        assert [(one["tokens"], one["at"], one["sites"]) for one in response["turns"].values()] == [(0, None, [])]
        assert len(rig.engine.tokenizations) == before


async def test_a_turn_is_measured_once_and_only_on_request():
    async with proxied() as rig:
        await talk(rig, [user("EPISODE:talk")], turns=3)
        before = len(rig.engine.tokenizations)
        exported = await rig.get("/tokencache/v1/sessions/s/trajectories?drift=off")
        assert exported["figures"]["drift"] is None
        assert len(rig.engine.tokenizations) == before
        first = await rig.get(DRIFT)
        asked = len(rig.engine.tokenizations)
        assert asked > before
        assert await rig.get(DRIFT) == first
        assert len(rig.engine.tokenizations) == asked


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault.answer(500, path="/tokenize"), "engine-away"),
        (Fault.close(path="/tokenize"), "engine-away"),
        (Fault.answer(400, '{"error": {"message": "no"}}', path="/tokenize"), "template-refuses"),
        (Fault.hang(path="/tokenize"), "time-limit"),
    ],
    ids=["500", "closed", "400", "hangs"],
)
async def test_an_engine_that_does_not_answer_is_a_reason_not_an_error(monkeypatch, fault, reason):
    if reason == "time-limit":
        monkeypatch.setattr(routes, "DRIFT_TIMEOUT", 0.5)
    async with proxied() as rig:
        await talk(rig, [user("EPISODE:talk")], turns=2)
        rig.engine.choose_fault = lambda route, _: fault if route == fault.path else None
        response = await rig.get(DRIFT)
        assert (len(response["turns"]), list(response["unmeasured"].values())) == (1, [reason])
        exported = await rig.exported()
        assert exported["complete"]
        assert exported["figures"]["drift"]["unmeasured"] == {reason: 1}
        rig.engine.choose_fault = None

        async def measured():
            return not (await rig.get(DRIFT))["unmeasured"]

        await until(measured)


async def test_a_worker_that_dies_is_a_reason_not_an_error(monkeypatch):
    async def die(*_):
        raise WorkerDiedError

    async with proxied() as rig:
        await talk(rig, [user("EPISODE:talk")], turns=2)
        with monkeypatch.context() as patch:
            patch.setattr(ExportWorker, "run", die)
            assert list((await rig.get(DRIFT))["unmeasured"].values()) == ["worker-died"]
        assert (await rig.exported())["figures"]["drift"]["unmeasured"] == {}


async def test_a_rendering_that_hangs_delays_no_call():
    async with proxied() as rig:
        messages = [user("EPISODE:talk")]
        await talk(rig, messages, turns=2)
        rig.engine.faults.append(Fault.hang(path="/tokenize"))
        before = len(rig.engine.tokenizations)
        measuring = asyncio.create_task(rig.get(DRIFT))

        async def asked():
            return len(rig.engine.tokenizations) > before

        await until(asked)
        await rig.say("s", messages)
        assert not measuring.done()
        measuring.cancel()
        await asyncio.gather(measuring, return_exceptions=True)


async def test_messages_that_are_not_kept_cannot_be_measured():
    async with proxied() as rig:
        await talk(rig, [user("EPISODE:talk")], turns=2)
        info, turns = await rig.store.session("s"), await rig.store.turns("s")
        records = Records(info, turns, await rig.store.tokens("s", [turn.id for turn in turns]), {})
        measured = await DriftMeter(rig.proxy.engine, ExportWorker(), timeout=PATIENCE).measure(records, "turns")
        assert measured.unmeasured == {turns[1].id: "not-kept"}


async def test_a_call_with_broken_arguments_is_measured():
    broken = '<think>\n\n</think>\n\n<tool_call>\n{"name": "bash", "arguments": {"cmd": "ls'
    async with proxied(SimulatedEngine(episodes={"broken": [broken, *EPISODES["talk"]]})) as rig:
        await talk(rig, [user("EPISODE:broken")], turns=2, tools=TOOLS)
        response = await rig.get(DRIFT)
        assert not response["unmeasured"]


async def test_an_unknown_mode_is_refused_with_the_known_ones():
    async with proxied() as rig:
        await rig.say("s", [user("EPISODE:talk")])
        async with rig.http.get(rig.url + DRIFT + "?drift=some") as answer:
            assert answer.status == 400
            assert "off, sequences, turns" in await answer.text()


async def test_drift_needs_the_key():
    async with proxied(admin_key="secret") as rig:
        await rig.say("s", [user("EPISODE:talk")])
        async with rig.http.get(rig.url + DRIFT) as answer:
            assert answer.status == 401
        assert (await rig.get(DRIFT, Authorization="Bearer secret"))["session"] == "s"
