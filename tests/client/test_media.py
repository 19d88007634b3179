"""Images of a session, fetched by either client."""

import pytest

from tests.client.both import Wrapped
from tests.media import BLUE, RED, described, put
from tests.proxy.kit import user
from tokencache.client import AnswerError, NotFoundError


async def test_media_are_fetched_with_their_bytes(rig, client):
    await rig.say("s", [user("hi")])
    wrapped = Wrapped(client.inner.session("s"))
    assert await wrapped.media() == []
    digests = await put(rig.store, "s", RED, BLUE)
    assert await wrapped.media() == [described(RED), described(BLUE)]
    assert [await wrapped.medium(digest) for digest in digests] == [RED, BLUE]


async def test_errors_name_what_is_missing(rig, client):
    missing = Wrapped(client.inner.session("nope"))
    with pytest.raises(NotFoundError, match="nope"):
        await missing.media()
    await rig.say("s", [user("hi")])
    with pytest.raises(NotFoundError, match="has no medium"):
        await Wrapped(client.inner.session("s")).medium("0" * 64)


async def test_bytes_that_are_not_those_of_the_digest_are_refused(rig, client, monkeypatch):
    await rig.say("s", [user("hi")])
    (digest,) = await put(rig.store, "s", RED)

    async def damaged(*_):
        return "image/png", BLUE

    monkeypatch.setattr(rig.store, "media", damaged)
    with pytest.raises(AnswerError, match="another SHA-256"):
        await Wrapped(client.inner.session("s")).medium(digest)
