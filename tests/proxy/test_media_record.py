"""The bytes of images in requests: stored once in a session, before the turn; what is not stored marks the turn."""

import hashlib
from types import SimpleNamespace

import msgspec
import pytest

from tests.images import image
from tests.proxy.kit import proxied, user
from tests.proxy.test_images import EPISODES, seeing, shown
from tests.support.plugin_engine import PluginEngine
from tests.support.waiting import until
from tokencache.dialects.chat.vocabulary import MessageReader
from tokencache.engine.images import png
from tokencache.proxy.media_record import MediaRecord
from tokencache.store.base import StoreError
from tokencache.store.memory import MemoryStore


class Counting(MemoryStore):
    """Counts the media that it is given, and what is stored when turns are."""

    def __init__(self):
        super().__init__()
        self.given, self.before_turns, self.fails = [], [], False

    async def put_media(self, session, epoch, medium, content, *, limit):
        if self.fails:
            raise StoreError("no space")
        self.given.append((session, medium.sha256))
        return await super().put_media(session, epoch, medium, content, limit=limit)

    async def commit(self, session, epoch, call, entries, incidents=(), **documents):
        self.before_turns.append(len(await self.stored_media(session)))
        await super().commit(session, epoch, call, entries, incidents, **documents)


@pytest.fixture
def store():
    return Counting()


def digest(shade, **size):
    return hashlib.sha256(png(size.get("width", 28), size.get("height", 28), shade)).hexdigest()


async def marks(rig):
    return ["media-not-kept" in turn["marks"] for turn in await rig.turns()]


async def test_each_content_is_stored_once_in_a_session_before_its_turn(store):
    async with proxied(seeing(), store=store) as rig:
        await rig.say("s", [shown("hi", image(1), image(2), image(1))])
        await rig.say("s", [shown("again", image(1), image(3))])
        await rig.say("t", [shown("hi", image(1))])
        expected = [("s", digest(1)), ("s", digest(2)), ("s", digest(3)), ("t", digest(1))]
        assert sorted(store.given) == sorted(expected)
        assert store.before_turns == [2, 3, 1]
        assert await marks(rig) == [False, False]
        for shade in (1, 2, 3):
            async with rig.http.get(f"{rig.url}/tokencache/v1/sessions/s/media/{digest(shade)}") as answer:
                assert (await answer.read(), answer.content_type) == (png(28, 28, shade), "image/png")
        (sequence, *_) = (await rig.exported("s"))["sequences"]
        stored = {medium["sha256"] for medium in (await rig.get("/tokencache/v1/sessions/s/media"))["media"]}
        assert {medium["sha256"] for medium in sequence["media"]} <= stored


async def test_a_conversation_without_images_costs_the_store_nothing(store):
    async with proxied(seeing(), store=store) as rig:
        await rig.say("s", [user("hi")])
    assert store.given == []


async def test_images_of_calls_that_the_engine_renders_are_stored_too(store):
    """An engine without exact prompts with images: the turns are `plain`."""
    async with proxied(PluginEngine(episodes=EPISODES, images="stock"), store=store) as rig:
        await rig.say("s", [shown("hi", image(1))])
        (turn,) = await rig.turns()
        assert (turn["match"], turn["reason"]) == ("plain", "media")
    assert store.given == [("s", digest(1))]


async def test_audio_is_stored_and_a_url_is_not(store):
    parts = [
        {"type": "text", "text": "hi"},
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}},
    ]
    raw = msgspec.json.encode({"role": "user", "content": parts})
    [read] = MessageReader().read([raw])
    call = SimpleNamespace(media={0: read.media}, raw_messages=[raw], media_parts=lambda: list(read.media))
    epoch = (await store.begin("s", "k", [])).epoch
    assert await MediaRecord(store, 100).keep("s", epoch, call)
    assert [medium.sha256 for medium in await store.stored_media("s")] == [hashlib.sha256(b"RIFF").hexdigest()]


async def test_a_session_that_is_gone_gets_nothing(store):
    raw = msgspec.json.encode(shown("hi", image(1)))
    [read] = MessageReader().read([raw])
    call = SimpleNamespace(media={0: read.media}, raw_messages=[raw], media_parts=lambda: list(read.media))
    assert not await MediaRecord(store, 10**6).keep("gone", "epoch", call)
    assert await store.session("gone") is None


async def test_beyond_the_limit_the_bytes_are_dropped_and_the_turn_says_so(store):
    size = len(png(28, 28, 1))
    async with proxied(seeing(), store=store, max_media_bytes=size) as rig:
        await rig.say("s", [shown("hi", image(1))])
        await rig.say("s", [shown("again", image(1), image(2))])
        await rig.say("s", [shown("third", image(2))])
        await rig.say("s", [shown("fourth", image(1))])
        assert await marks(rig) == [False, True, True, False]
        assert len(store.given) == 2, "a content that was refused is not sent again"
        sequences = (await rig.exported("s"))["sequences"]
        assert [len(sequence["media"]) for sequence in sequences] == [1, 2, 1, 1]
        assert (await rig.exported("s"))["complete"]


async def test_a_call_that_the_engine_refuses_stores_nothing(store):
    async with proxied(store=store) as rig:  # its model accepts no images
        status, _ = await rig.post("s", messages=[shown("hi", image(1))])
        assert status == 400
    assert store.given == []


async def test_a_limit_of_zero_stores_none(store):
    async with proxied(seeing(), store=store, max_media_bytes=0) as rig:
        await rig.say("s", [shown("hi", image(1))])
        assert await marks(rig) == [True]
        assert await store.stored_media("s") == []


async def test_a_store_that_fails_loses_no_turn(store):
    async with proxied(seeing(), store=store) as rig:
        store.fails = True
        await rig.say("s", [shown("hi", image(1))])
        store.fails = False
        await rig.say("s", [shown("again", image(1))])
        assert await marks(rig) == [True, False]
        assert [medium.sha256 for medium in await store.stored_media("s")] == [digest(1)]


async def test_with_a_strict_store_the_call_fails_and_ends(store, monkeypatch):
    monkeypatch.setattr("tokencache.proxy.ledger.RETRY_SECONDS", 0.005)
    async with proxied(seeing(), store=store, on_store_error="fail") as rig:
        store.fails = True
        status, body = await rig.post("s", messages=[shown("hi", image(1))])
        assert status == 503, body

        async def closed():
            return not (await rig.info())["open_calls"]

        await until(closed)
        info = await rig.info()
        assert ([one["kind"] for one in info["incidents"]], info["outcome"], info["complete"]) == (["store-error"], "store", False)


async def test_a_medium_that_is_stored_and_forgotten_at_once_is_kept(store, monkeypatch):
    """Other sessions have more contents than are remembered: that says nothing about what is stored."""
    monkeypatch.setattr("tokencache.proxy.media_record._REMEMBERED", 1)
    async with proxied(seeing(), store=store) as rig:
        await rig.say("s", [shown("hi", image(1), image(2))])
        assert await marks(rig) == [False]
        assert len(store.given) == 2
