"""Any traffic with images: what is recorded is what the engine used, image by image."""

import asyncio
import base64
import copy
import hashlib
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.core.settings import _COMMON
from tests.images import image
from tests.proxy.kit import proxied
from tests.proxy.test_exactness import KNOWN, assert_faithful, with_pixels
from tests.proxy.traffic import Harness
from tests.support.plugin_engine import PluginEngine
from tests.support.profiles import examples
from tokencache.core.media import PlacedMedia

PICTURES = [image(1), image(2), image(3, width=60), image(4, height=84), image(5, width=90, height=60)]
"""The first two have the same ids."""


class SeeingHarness(Harness):
    """A harness that sends images in questions and results, and does to them what harnesses do."""

    def pictured(self, messages):
        for message in messages:
            if self.rng.random() < 0.5 and isinstance(message["content"], str):
                parts = [{"type": "text", "text": message["content"]}]
                for _ in range(self.rng.choice([1, 1, 2])):
                    parts.insert(self.rng.randrange(len(parts) + 1), copy.deepcopy(self.rng.choice(PICTURES)))
                message["content"] = parts
                self.did["pictures"] += len(parts) - 1
        return messages

    def opening(self):
        messages = super().opening()
        return [*messages[:-1], *self.pictured(messages[-1:])]

    def answers(self, message):
        return self.pictured(super().answers(message))

    def _prune(self, history):
        """Of all images only the last two stay."""
        places = [(message, part) for message in history if isinstance(message["content"], list) for part in message["content"]]
        old = [(message, part) for message, part in places if part["type"] == "image_url"][:-2]
        for message, part in old:
            message["content"][message["content"].index(part)] = {"type": "text", "text": "[an image was here]"}
        self.did["evicted"] += len(old)
        return history if old else None

    def _edit_middle(self, history):
        """Another image, perhaps of the same size, in the place of one."""
        found = [part for message in history[:-1] if isinstance(message["content"], list) for part in message["content"]]
        found = [part for part in found if part["type"] == "image_url"]
        if not found:
            return super()._edit_middle(history)
        self.rng.choice(found)["image_url"] = copy.deepcopy(self.rng.choice(PICTURES)["image_url"])
        self.did["replaced"] += 1
        return history


def sent_images(body):
    """The digests of the images in a request, in order."""
    parts = [part for message in body["messages"] if isinstance(message.get("content"), list) for part in message["content"]]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    return [hashlib.sha256(base64.b64decode(url.partition(",")[2])).hexdigest() for url in urls]


def wrong(turn, prompt, body, pad):
    """What is wrong with the recorded images of a turn, by the request and the prompt that the engine used."""
    found = []
    if [medium.sha256 for medium in turn.media] != sent_images(body):
        found.append("images")
    inside = [at for medium in turn.media for at in range(medium.start, medium.end)]
    if inside != [at for at, token in enumerate(prompt) if token == pad]:
        found.append("places")
    return found


async def let_loose(seed, sessions, steps, drift=0.4):
    """Many harnesses at once; returns how the turns came about, why, and what the harnesses did."""
    matches, reasons, did = Counter(), Counter(), Counter()
    engine = PluginEngine(seed=seed, drift=drift, images="plugin")
    pad = engine.tokenizer.id_of("<|image_pad|>")
    async with proxied(engine) as rig:
        harnesses = [SeeingHarness(rig, f"s{i}", seed) for i in range(sessions)]
        await asyncio.gather(*(harness.run(steps) for harness in harnesses))
        bodies = {headers.get("X-Request-ID"): body for headers, body in zip(engine.headers, engine.requests, strict=True)}
        for harness in harnesses:
            exported = await rig.check(harness.session)
            assert exported["complete"], exported["incidents"]
            assert {incident["kind"] for incident in exported["incidents"]} <= {"engine-refused", "retry-joined"}
            assert_faithful(rig, harness.session, exported)
            asked = {entry.request_id.removeprefix("chatcmpl-"): entry for entry in rig.ground_truth(harness.session)}
            of_call = {name.rpartition("-")[2]: name for name in asked}
            for turn in await rig.store.turns(harness.session):
                name = of_call[turn.call]
                assert wrong(turn, asked[name].prompt_ids, with_pixels(engine, bodies[name]), pad) == [], turn
            turns = await rig.turns(harness.session)
            matches.update(turn["match"] for turn in turns)
            reasons.update(turn["reason"] for turn in turns)
            did.update(harness.did)
    return matches, reasons, did


@pytest.mark.whole
async def test_many_sessions_with_images():
    matches, reasons, did = await let_loose(seed=5, sessions=6, steps=14)
    assert set(reasons) <= KNOWN, reasons
    assert min(matches[kind] for kind in ("root", "continue", "branch", "resplice", "plain")) >= 2, matches
    assert matches["continue"] > 0.4 * matches.total(), matches
    assert matches["plain"] < 0.3 * matches.total(), (matches, reasons)
    assert min(did[act] for act in ("pictures", "evicted", "replaced", "prune")) >= 1, did


@hypothesis_settings(max_examples=examples(6), **_COMMON)
@given(seed=st.integers(0, 10**6), drift=st.sampled_from([0.0, 0.2, 1.0]))
def test_any_traffic_with_images(seed, drift):
    _, reasons, _ = asyncio.run(let_loose(seed, sessions=2, steps=8, drift=drift))
    assert set(reasons) <= KNOWN, reasons


class _Turn(msgspec.Struct):
    media: tuple[PlacedMedia, ...]


@pytest.mark.parametrize("fault", ["order", "place", "one missing", "one more"])
def test_the_checker_can_fail(fault):
    body = {"messages": [{"role": "user", "content": [image(1), image(3, width=60)]}]}
    one, two = sent_images(body)
    right = (PlacedMedia("image", one, "image/png", 1, 1), PlacedMedia("image", two, "image/png", 3, 3))
    prompt = [0, 9, 0, 9, 9, 9, 0]
    assert wrong(_Turn(right), prompt, body, 9) == []
    media = {
        "order": (msgspec.structs.replace(right[0], sha256=two), msgspec.structs.replace(right[1], sha256=one)),
        "place": (right[0], msgspec.structs.replace(right[1], start=2)),
        "one missing": right[:1],
        "one more": (*right, right[1]),
    }[fault]
    assert wrong(_Turn(media), prompt, body, 9)
