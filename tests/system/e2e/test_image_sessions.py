"""Conversations with images through the proxy, on a real vLLM: by the engine's own log every turn extends the last.

Once with the plugin, and once on a stock vLLM, by `/inference/v1/generate`.
"""

from itertools import pairwise

import pytest
from conftest import GroundTruth, proxying
from rig.agent import Agent
from rig.breaking_relay import BreakingRelay
from rig.exported import generations, trajectory, turns
from rig.marks import marks_of
from rig.vision import png

from tests.support.pairwise import cases
from tokencache.core import ids
from tokencache.store.memory import MemoryStore

pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")

TURNS = 5
PICTURES = [png(64, 64, 1), png(128, 96, 2), png(64, 64, 1), png(64, 160, 3), png(96, 64, 4)]
"""The third is the first again."""

ROUTES = ("plugin", "generate")
DIALECTS = ("chat", "messages", "responses", "gemini")
MANNERS = ("whole", "stream", "forgetful")


@pytest.fixture(params=ROUTES)
def route(request):
    """How exact prompts with images are supplied."""
    return request.param


@pytest.fixture
def server(request, route):
    return request.getfixturevalue({"plugin": "vision_server", "generate": "stock_vision_server"}[route])


@pytest.fixture
async def proxied(server, route):
    async with proxying(server.url, MemoryStore()) as found:
        assert route_of(found) == route
        yield found


@pytest.fixture
async def agent(proxied):
    agents = []

    def make(session, **manner):
        agents.append(Agent(proxied.url, session, **manner))
        return agents[-1]

    yield make
    for one in agents:
        await one.close()


async def assert_exact(proxied, log, agent, images):
    """In the engine's own log every turn extends the one before, and the export has these ids and all images."""
    logged = await log.read_new_episodes()
    assert len(logged) == TURNS
    for (prompt, sampled), (later, _) in pairwise(logged):
        assert later[: len(prompt) + len(sampled)] == prompt + sampled
    assert [(turn["match"], turn["reason"]) for turn in await turns(proxied, agent.session)] == [
        ("root", ""),
        *[("continue", "")] * (TURNS - 1),
    ]
    exported = await trajectory(proxied, agent.session)
    assert exported["complete"]
    assert exported["incidents"] == []
    assert [(list(prompt), list(sampled)) for prompt, sampled, _ in generations(exported)] == logged
    (sequence,) = exported["sequences"]
    media = sequence["media"]
    pad = sequence["token_ids"][media[0]["start"]]
    inside = [at for medium in media for at in range(medium["start"], medium["start"] + medium["length"])]
    assert inside == [at for at, token in enumerate(sequence["token_ids"]) if token == pad]
    assert len(media) == images


def route_of(proxied):
    """How exact prompts with images are supplied, or why they are not."""
    capability = proxied.proxy.engine.capabilities[0]
    return capability.images or capability.images_why


@pytest.mark.parametrize(("route", "dialect", "manner"), cases(ROUTES, DIALECTS, MANNERS), indirect=["route"])
async def test_every_turn_is_exact(server, proxied, agent, dialect, manner):
    """Images in questions and in tool results, several in one message, one of them twice."""
    log = GroundTruth(proxied, server)
    await log.read_new()
    talker = agent(f"{dialect}-{manner}", forgetful=manner == "forgetful")
    talker.pictures = list(PICTURES)
    talker.say("EPISODE:spoken please", png(64, 96, 7), png(96, 96, 8))
    for n in range(TURNS):
        await talker.turn(dialect, stream=manner == "stream" or (manner == "forgetful" and n % 2 == 1))
    await assert_exact(proxied, log, talker, len(PICTURES) + 2)


async def counted(proxied):
    """How many images were sent with their pixels, only named, and missed by the engine."""
    async with proxied.http.get(f"{proxied.url}/metrics") as answer:
        lines = [line.split() for line in (await answer.text()).splitlines() if line.startswith("tokencache_images_total{")]
    counts = {line[0].split('"')[1]: int(float(line[1])) for line in lines}
    return [counts.get(how, 0) for how in ("sent", "named", "missed")]


async def test_the_pixels_of_an_image_are_sent_once_and_again_if_the_engine_lost_them(server, proxied, agent):
    log, before = GroundTruth(proxied, server), await counted(proxied)
    await log.read_new()
    talker = agent("named")
    talker.pictures = list(PICTURES)
    talker.say("EPISODE:spoken please", png(64, 96, 7), png(96, 96, 8))
    counts = []
    for n in range(TURNS):
        if n == 3:
            async with proxied.http.post(f"{server.url}/reset_mm_cache") as answer:
                assert answer.status == 200
        await talker.turn("chat", stream=n % 2 == 1)
        counts.append([now - then for now, then in zip(await counted(proxied), before, strict=True)])
    assert counts[:3] == [[2, 0, 0], [4, 2, 0], [4, 7, 0]], "the third turn shows an image again"
    assert counts[3] == [10, 7, 5], "one image more, and all that were there"
    await assert_exact(proxied, log, talker, len(PICTURES) + 2)


@pytest.mark.parametrize(("how", "stream"), [("abort", True), ("lost", False)])
async def test_a_cut_reply_goes_on_with_the_same_images(vision_server, how, stream):
    """The rest is sampled after exactly the prompt and what had arrived, with the images in their places; the words are the same."""
    async with BreakingRelay(vision_server.url) as relay, proxying(relay.url, MemoryStore(), hold=60) as proxied:
        log, words = GroundTruth(proxied, vision_server), []
        await log.read_new()
        for end in (0, 1, 4, 20):
            talker = Agent(proxied.url, f"{how}-{end}" if end else "uncut")
            said = await talker.say("EPISODE:spoken please", png(64, 96, 7), png(96, 96, 8)).turn("chat", stream=stream)
            await talker.close()
            words.append((said.thought, said.text, [call[1:] for call in said.calls]))
            (turn,) = await proxied.proxy.store.turns(talker.session)
            (tokens,) = (await proxied.proxy.store.tokens(talker.session, [turn.id])).values()
            prompt, sampled = ids.unpack(tokens.delta), ids.unpack(tokens.completion)
            cuts = [end] if end else []
            expected = [(prompt + sampled[:start], sampled[start:stop]) for start, stop in pairwise([0, *cuts, len(sampled)])]
            assert await log.read_new_episodes() == expected
            assert (marks_of(turn), turn.again, len(turn.media)) == (["media", "continued"] if end else ["media"], "", 2)
        assert words == [words[0]] * 4
