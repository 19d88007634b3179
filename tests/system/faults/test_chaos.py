"""A small campaign: each of some kinds of disasters once. The large one is `make chaos`."""

from __future__ import annotations

import pytest

from tests.support.material import needs
from tests.support.redis_server import find_binary
from tests.system.faults.chaos import BREAKS, DERENDERS, Campaign, explanation, run_empty
from tests.system.faults.checker import Findings

pytestmark = needs("redis-server", find_binary())
KINDS = ("proxy-killed", "redis-killed", "redis-frozen", "redis-cut-off", "engine-killed", "engine-no-done")


@pytest.mark.whole
@pytest.mark.parametrize("turns", [60, 150])
async def test_nothing_is_lost_and_nothing_is_false(tmp_path, turns):
    campaign = Campaign(turns=turns, seed=6, kinds=KINDS, between=6)
    found = await campaign.run(tmp_path)
    assert found.clean, explanation(campaign, found)
    assert sum(len(agent.asked) for agent in campaign.agents) >= turns
    assert set(campaign.faults) >= set(KINDS)
    log = campaign.timeline.excerpt(())
    assert {kind: log.count(f" {kind} is over") for kind in KINDS} == {kind: campaign.faults[kind] for kind in KINDS}
    assert found.marked, "disasters leave holes, and sessions report them"
    assert found.recorded


@pytest.mark.whole
async def test_engines_break_off_replies_that_are_continued(tmp_path):
    """Killed, torn down, in error: a reply that goes on is one turn, whose pieces are what the engines sampled."""
    campaign = Campaign(turns=120, seed=6, kinds=BREAKS, between=4, engine=DERENDERS)
    found = await campaign.run(tmp_path)
    assert found.clean, explanation(campaign, found)
    assert set(campaign.faults) >= set(BREAKS)
    assert found.continued


@pytest.mark.whole
async def test_a_store_that_restarts_empty(tmp_path):
    found = await run_empty(6, tmp_path)
    assert found.clean, found.words
    assert found.gone, "nothing is left of a session that is over, so no trainer can mistake it for complete"
    assert found.beheaded


def test_a_hole_without_a_name_is_explained():
    """By what its session reports, and by what happened to it and to all."""
    campaign = Campaign(turns=1, seed=1)
    for session, words in (("", "redis-killed begins"), ("w1.2", "w1.2-0 received"), ("w3.1", "w3.1-0 received")):
        campaign.timeline.note(words, session)
    found = Findings(
        unnamed=["session w1.2: 9 tokens of chatcmpl-7 were sampled and not recorded"],
        incidents={"w1.2": ["torn-record : KeyError: 'a1'"], "w3.1": ["store-error c0ffee: the store failed"]},
    )
    words = explanation(campaign, found)
    assert [word in words for word in ("seed 1", "redis-killed begins", "w1.2-0 received", "KeyError: 'a1'")] == [True] * 4
    assert "w3.1" not in words
