"""A real vLLM with two data-parallel ranks: a session stays on one of them and finds its prefix there; directly, turns alternate."""

import re
from collections import Counter

import pytest
from conftest import proxying
from episodes import EPISODES
from rig.exported import assert_exported, get_json, trajectory
from rig.harness import SESSION_HEADER
from rig.model import make_model
from rig.server import MODEL, VllmServer

from tests.support.waiting import until
from tokencache.engine.ranks import RANK_HEADER
from tokencache.store.memory import MemoryStore

TURNS = 4
BLOCK = 128
"""Tokens in a block of vLLM's prefix cache on CPU."""
SERIES = re.compile(r'^vllm:prefix_cache_(queries|hits)_total\{engine="(\d+)".*\} (\S+)$', re.MULTILINE)


@pytest.fixture
def two_ranks(servers, tmp_path_factory):
    def start():
        model = make_model(servers.tokenizer_dir("own"), tmp_path_factory.mktemp("model"))
        options = ["--data-parallel-size", "2", "--enable-scale-out"]
        return VllmServer(model, EPISODES, max_model_len=4096, workdir=tmp_path_factory.mktemp("vllm"), options=options)

    return servers.keep("two ranks", start)


@pytest.fixture
async def before(two_ranks):
    async with proxying(two_ranks.url, MemoryStore()) as found:
        yield found


async def counted(proxied):
    """Tokens that were looked up and found in the prefix cache of each rank: (name, rank) → tokens."""
    async with proxied.http.get(f"{proxied.vllm}/metrics") as answer:
        return Counter({(name, int(rank)): float(value) for name, rank, value in SERIES.findall(await answer.text())})


async def looked_up(proxied, since, tokens):
    """What was counted since then, once these tokens were looked up: each rank reports its figures after the reply."""

    async def reported():
        return sum(value for (name, _), value in (await counted(proxied) - since).items() if name == "queries") >= tokens

    await until(reported)
    return await counted(proxied) - since


def conversation(harness, session):
    return harness.say(f"EPISODE:talk please. My number is {session}. " + f"I count {session}, {session} and {session}. " * 20)


async def test_a_sessions_prefix_is_found_on_its_rank(before, figures):
    (found,) = (await get_json(before.http, f"{before.url}/readyz"))["engine"]["models"]
    assert (found["level"], found["ranks"]) == ("exact", 2)
    warm = conversation(before.harness("warm"), "warm")
    for _ in range(TURNS):  # the proxy learns the template
        await warm.turn()
    sessions = [f"s{number}" for number in range(6)]
    hits, homes = {}, set()
    for how in ("directly", "by sessions"):
        start = await counted(before)
        for session in sessions:
            harness = conversation(before.direct() if how == "directly" else before.harness(session), f"{how} {session}")
            since = await counted(before)
            for _ in range(TURNS):
                await harness.turn()
            replies = harness.replies
            used = await looked_up(before, since, sum(len(reply.prompt) for reply in replies))
            ranks = {rank for rank in (0, 1) if used["queries", rank]}
            if how == "directly":
                assert ranks == {0, 1}
                continue
            (rank,) = ranks
            homes.add(rank)
            found_again = sum((len(reply.prefix) - 1) // BLOCK * BLOCK for reply in replies[:-1])  # the last id was not computed
            assert used["hits", rank] >= found_again > 0
            assert_exported(await trajectory(before, session), harness.answered)
        hits[how] = await counted(before) - start
        line = ", ".join(f"rank {rank}: {hits[how]['hits', rank]:.0f} of {hits[how]['queries', rank]:.0f}" for rank in (0, 1))
        figures.append(f"prefix hits, {len(sessions)} conversations of {TURNS} turns {how}: {line}")
    assert homes == {0, 1}
    again, directly = (sum(counts["hits", rank] for rank in homes) for counts in (hits["by sessions"], hits["directly"]))
    assert again > directly


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_rank_out_of_range_is_refused(before, stream):
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4, "stream": stream}
    for headers in ({SESSION_HEADER: "named"}, {}):
        url = before.url if headers else before.vllm
        async with before.http.post(f"{url}/v1/chat/completions", json=asked, headers={**headers, RANK_HEADER: "2"}) as answer:
            assert "data_parallel_rank 2 is out of range [0, 2)" in await answer.text()
            assert answer.status == (200 if stream else 400)  # vLLM begins the stream before it looks at the rank
