"""Conversations with images through the proxy, on a real vLLM: by the engine's own log every turn extends the last.

Once with the plugin, and once on a stock vLLM, by `/inference/v1/generate`.
"""

import itertools

import pytest
from conftest import GroundTruth, proxying
from rig.agent import Agent
from rig.exported import generations, trajectory, turns
from rig.vision import png

from tokencache.store.memory import MemoryStore

pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")

TURNS = 5
PICTURES = [png(64, 64, 1), png(128, 96, 2), png(64, 64, 1), png(64, 160, 3), png(96, 64, 4)]
"""The third is the first again."""


@pytest.fixture(params=["plugin", "generate"])
def route(request):
    """How exact prompts with images are supplied."""
    return request.param


@pytest.fixture
def server(request, route):
    return request.getfixturevalue({"plugin": "vision_server", "generate": "stock_vision_server"}[route])


@pytest.fixture
async def proxied(server):
    async with proxying(server.url, MemoryStore()) as found:
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
    for (prompt, sampled), (later, _) in itertools.pairwise(logged):
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


@pytest.mark.parametrize("manner", ["whole", "stream", "forgetful"])
@pytest.mark.parametrize("dialect", ["chat", "messages", "responses", "gemini"])
async def test_every_turn_is_exact(server, route, proxied, agent, dialect, manner):
    """Images in questions and in tool results, several in one message, one of them twice."""
    capability = proxied.proxy.engine.capabilities[0]
    assert capability.images == route, capability.images_why
    log = GroundTruth(proxied, server)
    await log.read_new()
    talker = agent(f"{dialect}-{manner}", forgetful=manner == "forgetful")
    talker.pictures = list(PICTURES)
    talker.say("EPISODE:spoken please", png(64, 96, 7), png(96, 96, 8))
    for n in range(TURNS):
        await talker.turn(dialect, stream=manner == "stream" or (manner == "forgetful" and n % 2 == 1))
    await assert_exact(proxied, log, talker, len(PICTURES) + 2)
