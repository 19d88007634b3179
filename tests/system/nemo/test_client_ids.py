"""Token ids that clients send, as evidence: eight rollouts in one session, a store that was restarted, foreign ids."""

import asyncio

import pytest

from tests.proxy.kit import EPISODES, TOOLS, proxied, user
from tests.system.nemo.gym_agent import Agent, carrying
from tests.system.nemo.kit import before_worker
from tests.trajectories.formats.readers import follow, token_fields
from tokencache.testing import SimulatedEngine

THOUGHT = "<think>\nI count.\n</think>\n\n"
WORDS = [THOUGHT + words for words in ("One, two, three — naïve café.", "Second.", "Third, and more.", "Fourth.")]
UNRECORDED = "echo-unrecorded"
DIALECTS = ["chat", "responses"]


def engine_of(*episodes):
    return SimulatedEngine(episodes={"same": WORDS, **EPISODES}, seed=7)


def rollouts(rig, dialect="chat", n=8, **more):
    return [Agent(rig, dialect, history=[user("EPISODE:same")], **more) for _ in range(n)]


def trained(agent):
    return follow(token_fields(entry) for entry in carrying(agent.output))


async def lines(rig, session="s"):
    """Each sequence of a session as (ids, mask, log probabilities), sorted."""
    return sorted((s["token_ids"], s["loss_mask"], s["logprobs"]) for s in (await rig.exported(session))["sequences"])


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_eight_rollouts_with_the_same_text_in_one_session_are_distinguished(dialect):
    async with proxied(engine_of(), return_token_id_information=True) as rig:
        agents = rollouts(rig, dialect)
        for _ in WORDS:
            for agent in agents:
                await agent.turn()
        assert await lines(rig) == sorted(map(tuple, map(trained, agents)))
        exported = await rig.check()
        assert exported["complete"]
        assert exported["incidents"] == []
        assert exported["figures"]["matches"] == {"root": 8, "continue": 24}
        assert len({sequence["root"] for sequence in exported["sequences"]}) == 8
        assert all(sequence["root"] == sequence["id"] for sequence in exported["sequences"])


async def test_concurrent_ones_are_distinguished():
    """Calls whose replies carry ids are never joined as duplicates, even if they are equal (docs/retries.md)."""
    async with proxied(engine_of(), return_token_id_information=True) as rig:
        agents = rollouts(rig)
        await asyncio.gather(*(agent.run(len(WORDS)) for agent in agents))
        assert await lines(rig) == sorted(map(tuple, map(trained, agents)))
        await rig.check()


async def test_without_ids_equal_texts_are_not_distinguished_and_nothing_is_guessed():
    async with proxied(engine_of(), return_token_id_information=True) as rig:
        agents = rollouts(rig, n=3, carries=False)
        for _ in range(2):
            for agent in agents:
                await agent.turn()
        turns = await rig.turns()
        assert [(turn["match"], turn["reason"]) for turn in turns[3:]] == [("plain", "ambiguous-reply")] * 3
        assert len({sequence["root"] for sequence in (await rig.check())["sequences"]}) == 6


async def test_a_rollout_that_branches_is_one_rollout():
    async with proxied(engine_of(), return_token_id_information=True) as rig:
        one, other = rollouts(rig, n=2)
        for agent in (one, other, one, other):
            await agent.turn()
        one.history = [*one.history[:-2], user("another way")]
        await one.turn()
        sequences = (await rig.check())["sequences"]
        assert sorted(sequence["start"] for sequence in sequences) == ["branch", "root", "root"]
        branch = next(sequence for sequence in sequences if sequence["start"] == "branch")
        assert branch["root"] == branch["parent"]


async def test_another_text_is_not_a_turn_whatever_ids_it_carries():
    async with proxied(engine_of(), return_token_id_information=True) as rig:
        agents = rollouts(rig, n=2)
        for agent in agents:
            await agent.turn()
        carrying(agents[0].history)[-1]["content"] = "Four, five."
        await agents[0].turn()
        (_, _, third) = await rig.turns()
        assert (third["match"], third["reason"]) == ("plain", "unrecognised-reply")
        assert third["parent"] is None
        assert [incident["kind"] for incident in (await rig.check())["incidents"]] == ["echo-differs"]


async def restarted(dialect, episode, *, turns=2, more=2, edit=None, **agent):
    """A rollout whose store is lost after some turns: the agent, the turns and incidents recorded after that, and the export."""
    engine = engine_of()
    async with proxied(engine, return_token_id_information=True) as rig:
        one = Agent(rig, dialect, history=[user(f"EPISODE:{episode}")], **agent)
        await one.run(turns)
    engine.ground_truth.clear()
    async with proxied(engine, return_token_id_information=True) as rig:
        one.rig = rig
        if edit is not None:
            edit(one.history)
        await one.run(more)
        return one, await rig.turns(), (await rig.info())["incidents"], await rig.check()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("episode", ["same", "demo", "talk"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_after_a_restart_the_client_s_ids_begin_the_prompt(dialect, episode, stream):
    agent, turns, incidents, exported = await restarted(dialect, episode, stream=stream)
    assert [(turn["match"], turn["reason"]) for turn in turns] == [("resplice", "client-ids"), ("continue", "")]
    row = trained(agent)  # NeMo RL's own check
    (sequence,) = exported["sequences"]
    assert sequence["token_ids"] == row.token_ids
    start = sequence["turns"][0]["prompt"][1]
    assert sequence["loss_mask"] == [0] * start + row.mask[start:], "tokens that were not recorded here are context"
    assert [incident["kind"] for incident in incidents] == [UNRECORDED]
    assert "not recorded here" in incidents[0]["detail"]
    assert "begins with them" in incidents[0]["detail"]
    assert exported["complete"]


async def test_eight_rollouts_survive_a_restart():
    engine = engine_of()
    agents = rollouts(None)
    for turns in (2, 2):
        engine.ground_truth.clear()
        async with proxied(engine, return_token_id_information=True) as rig:
            for _ in range(turns):
                for agent in agents:
                    agent.rig = rig
                    await agent.turn()
            exported = await rig.check()
    assert exported["figures"]["matches"] == {"resplice": 8, "continue": 8}
    assert sorted(sequence["token_ids"] for sequence in exported["sequences"]) == sorted(trained(agent).token_ids for agent in agents)


async def test_a_retry_of_the_first_call_after_a_restart_gets_the_same_prompt():
    engine = engine_of()
    async with proxied(engine, return_token_id_information=True) as rig:
        agent = Agent(rig, history=[user("EPISODE:same")])
        await agent.run(2)
    engine.ground_truth.clear()
    async with proxied(engine, return_token_id_information=True) as rig:
        for _ in range(2):
            await rig.say("s", agent.history, tools=TOOLS)
        assert [turn["reason"] for turn in await rig.turns()] == ["client-ids", "client-ids"]
        await rig.check()


def _other_words(history):
    carrying(history)[-1]["content"] = "Nothing of the kind."


def _other_question(history):
    history[0]["content"] += " please"


def _other_generation(history):
    ids = carrying(history)[-1]["generation_token_ids"]
    ids[-3], ids[-2] = ids[-2], ids[-3]


def _other_prompt(history):
    carrying(history)[-1]["prompt_token_ids"][3] += 1


def _other_older(history):
    carrying(history)[0]["generation_token_ids"][0] += 1


def _half(history):
    for entry in carrying(history):
        entry.pop("prompt_token_ids")


def _other_thought(history):
    carrying(history)[0]["reasoning"] = "I never thought so."


@pytest.mark.parametrize("edit", [_other_words, _other_question, _other_generation, _other_prompt, _other_older, _half, _other_thought])
async def test_what_is_not_proven_is_not_used(edit):
    _, turns, incidents, exported = await restarted("chat", "same", more=1, edit=edit)
    assert [(turn["match"], turn["reason"]) for turn in turns] == [("plain", "client-ids-unproven")]
    assert [incident["kind"] for incident in incidents] == [UNRECORDED]
    assert "they are not used" in incidents[0]["detail"]
    assert exported["complete"]


async def test_the_same_in_front_of_nemo_rl_s_worker(monkeypatch):
    """A worker that cannot decode its own ids (it has no `/detokenize`): tokens that differ from its rendering cannot be proven."""
    async with before_worker(engine=engine_of(), return_token_id_information=True) as (rig, worker):
        agent = Agent(rig, history=[user("EPISODE:same")], session="one")
        await agent.run(2)
        agent.session = "two"
        worker.calls.clear()
        await agent.turn()
        (turn,) = await rig.turns("two")
        assert (turn["match"], turn["reason"]) == ("plain", "client-ids-unproven")
        assert "required_prefix_token_ids" not in worker.calls[-1]


async def test_ids_of_another_session_are_not_looked_up():
    """They are used as the client's, like those of another proxy; nothing of the other session is."""
    async with proxied(engine_of(), return_token_id_information=True) as rig:
        agent = Agent(rig, history=[user("EPISODE:same")], session="one")
        await agent.run(2)
        agent.session = "two"
        await agent.turn()
        (turn,) = await rig.turns("two")
        assert (turn["reason"], turn["parent"], turn["origin"], turn["anchors"]) == ("client-ids", None, None, [])
        assert trained(agent)
