"""Conversations with images: every turn continues on exact ids, in every dialect, whatever happens to the images."""

import pytest

from tests.images import image
from tests.proxy.kit import CALL, THOUGHT, TOOLS, echo, proxied, results
from tokencache.testing import SimulatedEngine

EPISODES = {
    "look": [f"{THOUGHT}A cat.\n{CALL}", f"{THOUGHT}A dog  — naïve.", f"{THOUGHT}A house.\n{CALL}", "<think>\nok\n</think>\n\nYes."]
}


def seeing(**options):
    return SimulatedEngine(episodes=EPISODES, seed=7, images="plugin", **options)


def shown(text, *images):
    return {"role": "user", "content": [{"type": "text", "text": text}, *images]}


@pytest.fixture
async def rig():
    async with proxied(seeing()) as made:
        yield made


async def test_the_probe_finds_the_plugin(rig):
    (model,) = (await rig.get("/readyz"))["engines"][0]["models"]
    assert (model["images"], model["images_why"]) == ("plugin", "")
    assert [rig.engine.tokenizer.token(token) for token in model["placeholder_ids"]] == ["<|image_pad|>"]


async def talk(rig, turns=4, **more):
    """A conversation with an image in every message, also in tool results."""
    messages = [shown("EPISODE:look go", image(1), image(2, width=60))]
    for turn in range(turns):
        said = await rig.say("s", messages, tools=TOOLS, **more)
        messages += [echo(said)]
        for answer in results(said):
            picture = image(1 if turn == 1 else 10 + turn, height=28 * (turn + 1))
            messages.append(answer | {"content": [{"type": "text", "text": "See."}, picture]})
    return messages


@pytest.mark.parametrize("stream", [False, True])
async def test_every_turn_continues_and_names_its_images(rig, stream):
    await talk(rig, stream=stream)
    assert [turn["match"] for turn in await rig.turns()] == ["root", "continue", "continue", "continue"]
    exported = await rig.check()
    (sequence,) = exported["sequences"]
    pad = rig.engine.tokenizer.id_of("<|image_pad|>")
    inside = [at for medium in sequence["media"] for at in range(medium["start"], medium["start"] + medium["length"])]
    assert inside == [at for at, token in enumerate(sequence["token_ids"]) if token == pad]
    assert [medium["length"] for medium in sequence["media"]] == [1, 3, 1, 2, 3]
    assert {medium["modality"] for medium in sequence["media"]} == {"image"}
