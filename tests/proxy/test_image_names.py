"""An engine gets the pixels of an image once; later requests name it. No engine ever uses another image than the prompt's."""

import random

import pytest

from tests.images import image
from tests.proxy.kit import CHAT, TOOLS, echo, proxied, results, user
from tests.proxy.test_images import EPISODES, sha256, shown
from tests.support.plugin_engine import PluginEngine
from tests.support.waiting import PATIENCE
from tokencache.testing import Fault

ROUTES = pytest.mark.parametrize("route", ["plugin", "generate"])


def seeing(route="plugin", **options):
    mode = "plugin" if route == "plugin" else "stock"
    return PluginEngine(episodes=EPISODES, seed=7, images=mode, derenders=True, **options)


def pictures(messages):
    return [
        part for message in messages if isinstance(message["content"], list) for part in message["content"] if part["type"] == "image_url"
    ]


def sent(engine):
    """For each image of the last request: whether its pixels were sent."""
    bodies = engine.requests[-1:]
    if engine.generated and len(engine.generated[-1]["content_parts"]) > len(pictures(bodies[0]["messages"])):
        return [part["url"] is not None for part in engine.generated[-1]["content_parts"]]
    return [part["image_url"] is not None for part in pictures(bodies[0]["messages"])]


async def say(rig, messages, session="s", **more):
    """A call, after which the engine must have used exactly the images of the messages."""
    said = await rig.say(session, messages, tools=TOOLS, **more)
    assert rig.engine.images.used[-1] == [sha256(part) for part in pictures(messages)]
    return said


async def grow(rig, messages, *images, **more):
    """Another turn of a conversation, with these new images."""
    messages.append(echo(await say(rig, messages, **more)))
    messages += [*results(messages[-1]), shown("And this?", *images)]


@ROUTES
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_pixels_of_an_image_are_sent_once(route, stream):
    async with proxied(seeing(route)) as rig:
        messages = [shown("EPISODE:look go", image(1), image(2, width=60))]
        await grow(rig, messages, image(3), image(1), stream=stream)
        assert sent(rig.engine) == [True, True]
        await grow(rig, messages, image(4), stream=stream)
        assert sent(rig.engine) == [False, False, True, False]
        await grow(rig, messages, stream=stream)
        assert sent(rig.engine) == [False] * 4 + [True]
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue", "continue"]
        await rig.check()


@ROUTES
async def test_an_engine_that_has_lost_the_images_gets_them_again(route):
    async with proxied(seeing(route)) as rig:
        messages = [shown("EPISODE:look go", image(1), image(2, width=60))]
        await grow(rig, messages, image(3))
        rig.engine.images.kept.clear()
        await grow(rig, messages, image(4))
        assert sent(rig.engine) == [True] * 3
        await grow(rig, messages)
        assert sent(rig.engine) == [False, False, False, True]
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue", "continue"]
        assert (await rig.info())["incidents"] == []
        await rig.check()


@ROUTES
async def test_an_engine_that_keeps_no_images_gets_their_pixels_in_the_end(route):
    """vLLM with `--mm-processor-cache-gb 0`: after some misses, no request is sent twice."""
    engine = seeing(route)
    engine.images.keeps = False
    async with proxied(engine) as rig:
        for n in range(5):
            messages = [shown("EPISODE:see go", image(1))]
            await grow(rig, messages, image(2), session=f"s{n}")
            await say(rig, messages, session=f"s{n}")
            assert sent(engine) == [True, True]
        before = len(engine.requests) + len(engine.generated)
        await say(rig, [shown("EPISODE:see go", image(1))], session="last")
        assert len(engine.requests) + len(engine.generated) == before + 1


async def test_a_lost_image_is_sent_again_when_a_reply_goes_on():
    async with proxied(seeing(), hold=PATIENCE) as rig:
        messages = [shown("EPISODE:look go", image(1))]
        await grow(rig, messages, image(2))
        await grow(rig, messages, image(3))
        rig.engine.faults.append(Fault.abort(4))
        begun = len(rig.engine.ground_truth)

        def forget(*_):
            """When the rest of the reply is asked for."""
            if len(rig.engine.ground_truth) > begun:
                rig.engine.images.kept.clear()

        rig.engine.choose_fault = forget
        await say(rig, messages)
        assert "continued" in (await rig.turns())[-1]["marks"]


async def test_tenants_name_an_image_differently():
    async with proxied(seeing()) as rig:
        names = []
        for salt in ("one", "two", "one"):
            await say(rig, [shown("EPISODE:see go", image(1))], session=salt, cache_salt=salt)
            names += [part["uuid"] for part in pictures(rig.engine.requests[-1]["messages"])]
        assert names[0] == names[2] != names[1]
        assert all(sha256(image(1)) not in name for name in names)


async def test_after_an_update_of_the_weights_an_image_has_another_name():
    """So no embedding of older weights is used."""
    async with proxied(seeing()) as rig:
        names = []
        for version in ("1", "2"):
            async with rig.http.put(rig.url + "/tokencache/v1/weights", json={"version": version, "phase": "ready"}) as answer:
                assert answer.status == 200, await answer.text()
            await say(rig, [shown("EPISODE:see go", image(1))], session=version)
            names += [part["uuid"] for part in pictures(rig.engine.requests[-1]["messages"])]
        assert names[0] != names[1]


async def test_a_request_without_images_or_to_a_stock_engine_has_no_names():
    async with proxied(PluginEngine(episodes=EPISODES, seed=7, images="stock")) as rig:
        await rig.say("s", [shown("EPISODE:see go", image(1))])
        assert "uuid" not in pictures(rig.engine.requests[-1]["messages"])[0]
    async with proxied(seeing()) as rig:
        await rig.say("s", [user("EPISODE:see go")])
        assert rig.engine.requests[-1]["messages"] == [user("EPISODE:see go")]
        async with rig.http.post(rig.url + CHAT, json={"messages": [shown("EPISODE:see go", image(1))]}) as answer:
            assert answer.status == 200  # outside a session
        assert "uuid" not in pictures(rig.engine.requests[-1]["messages"])[0]


@pytest.mark.whole
@ROUTES
@pytest.mark.parametrize("seed", range(3))
async def test_random_sessions_on_an_engine_that_forgets(route, seed):
    """Several sessions share images; the engine forgets some of them at any time. `say` is the checker."""
    chance = random.Random(seed)
    async with proxied(seeing(route)) as rig:
        sessions = [[shown("EPISODE:look go", image(chance.randrange(3)))] for _ in range(3)]
        for _ in range(12):
            n = chance.randrange(3)
            await grow(rig, sessions[n], image(chance.randrange(4), width=chance.choice([28, 60])), session=f"s{n}")
            for name in [name for name in rig.engine.images.kept if chance.random() < 0.3]:
                del rig.engine.images.kept[name]
        for n in range(3):
            assert {turn["match"] for turn in await rig.turns(f"s{n}")} <= {"root", "continue"}


async def test_the_checker_finds_an_image_under_another_ones_name():
    """What vLLM does with a name that is not a hash of the pixels."""
    async with proxied(seeing()) as rig:
        await say(rig, [shown("EPISODE:see go", image(1))])
        (name,) = rig.engine.images.kept
        rig.engine.images.kept[name] = rig.engine.images.kept[name]._replace(pixels="another")
        with pytest.raises(AssertionError):
            await say(rig, [shown("EPISODE:see go", image(1))], session="t")
