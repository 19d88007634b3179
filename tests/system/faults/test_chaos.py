"""A small campaign: a hundred and fifty turns, and some kinds of disasters. The large one is `make chaos`."""

from __future__ import annotations

from tests.support.material import needs
from tests.support.redis_server import find_binary
from tests.system.faults.chaos import BREAKS, DERENDERS, Campaign, report, run_empty

pytestmark = needs("redis-server", find_binary())
KINDS = ("proxy-killed", "redis-killed", "redis-frozen", "redis-cut-off", "engine-killed", "engine-no-done")


async def test_nothing_is_lost_and_nothing_is_false(tmp_path):
    campaign = Campaign(turns=150, seed=6, kinds=KINDS, between=6)
    found = await campaign.run(tmp_path)
    assert found.clean, f"{report(campaign, found)}\n{found.words}"
    assert sum(len(agent.asked) for agent in campaign.agents) >= 150
    assert set(campaign.faults) >= set(KINDS)
    assert found.marked, "disasters leave holes, and sessions report them"
    assert found.recorded > found.turns // 3


async def test_engines_break_off_replies_that_are_continued(tmp_path):
    """Killed, torn down, in error: a reply that goes on is one turn, whose pieces are what the engines sampled."""
    campaign = Campaign(turns=120, seed=6, kinds=BREAKS, between=4, engine=DERENDERS)
    found = await campaign.run(tmp_path)
    assert found.clean, f"{report(campaign, found)}\n{found.words}"
    assert set(campaign.faults) >= set(BREAKS)
    assert found.continued


async def test_a_store_that_restarts_empty(tmp_path):
    found = await run_empty(6, tmp_path)
    assert found.clean, found.words
    assert found.gone, "nothing is left of a session that is over, so no trainer can mistake it for complete"
    assert found.beheaded
