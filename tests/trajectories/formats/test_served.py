"""Every format over HTTP, for a session that a real proxy recorded, against the ground-truth log of the engine."""

import pytest

from tests.proxy.kit import TOOLS, echo, proxied, results, user
from tests.support.pairwise import some
from tests.trajectories.formats.readers import READERS, faults
from tokencache.trajectories.formats.registry import FORMATS


async def test_every_format_trains_what_the_engine_sampled():
    """Record a sequence with tools, a discarded answer, an edited system prompt, and a title call."""
    async with proxied() as rig:
        system = {"role": "system", "content": "You help."}
        messages = [system, user("look")]
        for _ in range(2):
            said = await rig.say("s", messages, tools=TOOLS)
            messages = [*messages, echo(said), *results(said)]
        await rig.say("s", messages, tools=TOOLS, temperature=0.5)
        said = await rig.say("s", messages, tools=TOOLS)
        messages = [{**system, "content": "You help, briefly."}, *messages[1:], echo(said), *results(said)]
        await rig.say("s", messages, tools=TOOLS)
        await rig.say("s", [user("a title")])
        ground_truth = [(b.prompt_ids, b.completion_ids, b.logprobs) for b in rig.ground_truth("s")]
        native = await rig.exported("s")
        assert len(ground_truth) == 6
        assert len(native["sequences"]) == 4
        for name in FORMATS:
            written = await rig.get(f"/tokencache/v1/sessions/s/trajectories?format={name}")
            assert faults(READERS[name](written), ground_truth) == [], name


@pytest.mark.parametrize("name", some(FORMATS, 4))
async def test_every_format_obeys_the_limits(name):
    async with proxied() as rig:
        messages = [user("look")]
        for _ in range(2):
            said = await rig.say("s", messages, tools=TOOLS)
            messages = [*messages, echo(said), *results(said)]
        first = rig.ground_truth("s")[0]
        longest = len(first.prompt_ids) + len(first.completion_ids)
        written = await rig.get(f"/tokencache/v1/sessions/s/trajectories?format={name}&max_length={longest}&overlong=cut")
        assert faults(READERS[name](written), [(first.prompt_ids, first.completion_ids, first.logprobs)]) == []


@pytest.mark.parametrize("query", ["max_length=0&overlong=cut", "max_length=9", "overlong=drop", "max_length=9&overlong=longest"])
async def test_wrong_limits_are_refused(query):
    async with proxied() as rig:
        await rig.say("s", [user("hi")])
        async with rig.http.get(f"{rig.url}/tokencache/v1/sessions/s/trajectories?{query}") as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["param"] in {"max_length", "overlong"}


@pytest.mark.parametrize("name", ["", "Verl", "parquet"])
async def test_an_unknown_format_is_refused_with_a_list(name):
    async with proxied() as rig:
        await rig.say("s", [user("hi")])
        async with rig.http.get(f"{rig.url}/tokencache/v1/sessions/s/trajectories", params={"format": name}) as answer:
            assert answer.status == 400
            said = (await answer.json())["error"]["message"]
    assert all(known in said for known in FORMATS)
