"""Tests the checker: a good run passes, and each way of spoiling one is found, under its own name."""

from __future__ import annotations

import asyncio
import copy
import random

import pytest

from tests.proxy.kit import proxied
from tests.system.faults.checker import UNKNOWN, check
from tests.system.faults.dialects import DIALECTS
from tests.system.faults.harness import Agent, Asked
from tokencache.testing import Fault, SimulatedEngine

HOLE = {"kind": "store-error", "detail": "", "hole": True, "call": "00c0ffee", "turn": "", "at": 1.0}


class Evidence:
    """The records of a run: three sessions in three dialects, the first with a fork and a second conversation."""

    def __init__(self, asked, ground_truth, exports):
        self.asked, self.ground_truth, self.exports = asked, ground_truth, exports

    @property
    def export(self):
        return self.exports["s-chat"]

    @property
    def sequence(self):
        return self.export["sequences"][0]

    @property
    def received(self):
        return next(one for one in self.asked if one.session == "s-chat")

    @property
    def entry(self):
        return next(entry for entry in self.ground_truth if entry.session == "s-chat")

    def found(self, **more):
        return check(self.asked, self.ground_truth, self.exports, **more)


async def play():
    async with proxied(SimulatedEngine(seed=3)) as rig:
        agents = []
        for n, dialect in enumerate(DIALECTS):
            agent = Agent(f"s-{dialect.name}", dialect, rig.http, [rig.url], streams=n % 2 == 0, rng=random.Random(n))
            agents.append(agent)
            for _ in range(4):
                assert await agent.turn()
        first = agents[0]
        there = first.remember()
        assert await first.turn()
        first.go_back(there)
        assert await first.turn("No, otherwise.")
        first.start_over()
        assert await first.turn("Another task.")
        exports = {agent.session: await rig.exported(agent.session) for agent in agents}
        return Evidence([one for agent in agents for one in agent.asked], rig.engine.ground_truth, exports)


@pytest.fixture(scope="module")
def played():
    return asyncio.run(play())


@pytest.fixture
def evidence(played):
    """A copy that a test may spoil."""
    return copy.deepcopy(played)


async def test_a_good_run_is_clean(evidence):
    found = evidence.found()
    assert found.clean, found.words
    assert (found.turns, found.recorded, found.marked) == (15, 15, {})
    matches = [turn["match"] for sequence in evidence.export["sequences"] for turn in sequence["turns"]]
    assert sorted(set(matches)) == ["branch", "continue", "root"]


def drop_last_turn(evidence):
    sequence = evidence.sequence
    turn = sequence["turns"].pop()
    for name in ("token_ids", "loss_mask", "logprobs"):
        del sequence[name][turn["prompt"][0] :]


def drop_sequence(evidence):
    evidence.export["sequences"].pop()


def drop_session(evidence):
    evidence.exports["s-chat"] = None


def another_id(evidence):
    start, _ = evidence.sequence["turns"][1]["completion"]
    evidence.sequence["token_ids"][start] += 1


def another_prompt(evidence):
    evidence.sequence["token_ids"][3] += 1


def another_logprob(evidence):
    start, _ = evidence.sequence["turns"][0]["completion"]
    evidence.sequence["logprobs"][start] -= 0.5


def masked_in(evidence):
    evidence.sequence["loss_mask"][0] = 1


def trained_twice(evidence):
    evidence.export["sequences"].append(copy.deepcopy(evidence.sequence))


def of_another_session(evidence):
    evidence.exports["s-chat"], evidence.exports["s-messages"] = evidence.exports["s-messages"], evidence.exports["s-chat"]


def cut_without_a_word(evidence):
    turn = evidence.sequence["turns"][-1]
    for name in ("token_ids", "loss_mask", "logprobs"):
        evidence.sequence[name].pop()
    turn["completion"][1] -= 1
    turn["completion_tokens"] -= 1


def without_a_reason(evidence):
    evidence.export["complete"] = False


def never_sampled(evidence):
    evidence.ground_truth.remove(evidence.entry)


def sampled_otherwise(evidence):
    evidence.entry.completion_ids[0] += 1


def words_of_another_call(evidence):
    evidence.received.marks = ("s-chat-99", evidence.received.mark)


def of_no_call(evidence):
    evidence.asked.remove(evidence.received)


def another_parent(evidence):
    branch = next(sequence for sequence in evidence.export["sequences"] if sequence["start"] == "branch")
    branch["turns"][0]["parent"] = evidence.sequence["turns"][-1]["turn"]


def sampled_and_forgotten(evidence):
    forgotten = copy.deepcopy(evidence.entry)
    forgotten.request_id = "chatcmpl-somebody"
    evidence.ground_truth.append(forgotten)


def forgotten_behind_another_mark(evidence):
    sampled_and_forgotten(evidence)
    evidence.export["complete"] = False
    evidence.export["incidents"].append(HOLE)


def a_failure_that_nobody_saw(evidence):
    gave_up = Asked("s-chat", ("s-chat-7",), ends=["500"])
    evidence.asked.insert(max(n for n, one in enumerate(evidence.asked) if one.session == "s-chat") + 1, gave_up)


def a_failure_that_nobody_had(evidence):
    evidence.export.update(outcome="engine", valid=False)


SPOILED = [
    (a_failure_that_nobody_saw, "misjudged"),
    (a_failure_that_nobody_had, "misjudged"),
    (drop_last_turn, "lost"),
    (drop_sequence, "lost"),
    (drop_session, "lost"),
    (another_id, "false"),
    (another_prompt, "false"),
    (another_logprob, "false"),
    (masked_in, "false"),
    (trained_twice, "false"),
    (of_another_session, "false"),
    (cut_without_a_word, "false"),
    (without_a_reason, "false"),
    (never_sampled, "false"),
    (sampled_otherwise, "false"),
    (words_of_another_call, "false"),
    (of_no_call, "false"),
    (another_parent, "false"),
    (drop_last_turn, "unmarked"),
    (sampled_and_forgotten, "unmarked"),
    (forgotten_behind_another_mark, "unnamed"),
]


@pytest.mark.parametrize(("spoil", "kind"), SPOILED, ids=[f"{spoil.__name__}-{kind}" for spoil, kind in SPOILED])
async def test_what_is_spoiled_is_found(evidence, spoil, kind):
    spoil(evidence)
    found = evidence.found()
    assert getattr(found, kind), found
    assert not found.clean


async def test_what_is_marked_missing_is_not_lost(evidence):
    forgotten = copy.deepcopy(evidence.entry)
    forgotten.request_id = f"chatcmpl-{HOLE['call']}"
    evidence.ground_truth.append(forgotten)
    evidence.received.received.text = "What no turn records."
    evidence.export["complete"] = False
    evidence.export["incidents"].append(HOLE)
    found = evidence.found()
    assert not found.lost
    assert not found.unmarked
    assert found.marked == {"s-chat": ["store-error"]}
    assert found.recorded == found.turns - 1


async def test_lost_memory_is_counted_separately_and_only_where_it_was_lost(evidence):
    drop_session(evidence)
    found = evidence.found(memory_lost=True)
    assert found.clean
    assert found.gone == ["s-chat"]
    evidence.received.received.text = "What no turn records."
    messages = evidence.exports["s-messages"]
    evidence.asked.remove(next(one for one in evidence.asked if one.session == "s-messages"))  # as if the first call's epoch had ended
    messages["sequences"][0]["turns"][0]["reason"] = UNKNOWN
    assert evidence.found(memory_lost=True).beheaded == ["s-messages"]
    assert evidence.found().lost


@pytest.fixture
async def continued():
    """A reply that was cut after nine tokens and continued."""
    async with proxied(SimulatedEngine(seed=3, derenders=True)) as rig:
        rig.engine.faults.append(Fault.abort(9))
        agent = Agent("s-chat", DIALECTS[0], rig.http, [rig.url])
        assert await agent.turn()
        return Evidence(agent.asked, copy.deepcopy(rig.engine.ground_truth), {"s-chat": await rig.exported("s-chat")})


def pieces_of(evidence):
    return evidence.sequence["turns"][0]["pieces"]


def cut_elsewhere(evidence):
    first, second = pieces_of(evidence)
    first["end"] = second["start"] = 8


def overlapping(evidence):
    pieces_of(evidence)[1]["start"] = 8


def without_last_piece(evidence):
    pieces_of(evidence).pop()


def piece_never_sampled(evidence):
    evidence.ground_truth.pop()


async def test_a_continued_reply_is_clean(continued):
    found = continued.found()
    assert found.clean, found.words
    assert (found.recorded, found.continued) == (1, 1)


@pytest.mark.parametrize("spoil", [cut_elsewhere, overlapping, without_last_piece, piece_never_sampled])
async def test_wrong_pieces_are_found(continued, spoil):
    spoil(continued)
    assert continued.found().false
