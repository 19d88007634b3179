"""The routes of images and other media: what they return, to whom, and that a browser runs none of it."""

import pytest

from tests.media import BLUE, RED, put
from tests.proxy.kit import proxied, user

SESSIONS = "/tokencache/v1/sessions"


@pytest.fixture
async def rig():
    async with proxied() as made:
        await made.say("s", [user("hi")])
        yield made


async def answer(rig, path, **headers):
    async with rig.http.get(rig.url + path, headers=headers) as got:
        return got.status, got.headers, await got.read()


async def test_media_are_listed_and_returned_byte_for_byte(rig):
    assert await rig.get(f"{SESSIONS}/s/media") == {"session": "s", "media": []}
    red, blue = await put(rig.store, "s", RED, BLUE)
    listed = (await rig.get(f"{SESSIONS}/s/media"))["media"]
    assert listed == [
        {"sha256": red, "media_type": "image/png", "bytes": len(RED)},
        {"sha256": blue, "media_type": "image/png", "bytes": len(BLUE)},
    ]
    for sha256, content in ((red, RED), (blue, BLUE)):
        status, headers, body = await answer(rig, f"{SESSIONS}/s/media/{sha256}")
        assert (status, body, headers["Content-Type"]) == (200, content, "image/png")
        assert headers["Content-Disposition"] == f'attachment; filename="{sha256}.png"'


@pytest.mark.parametrize(
    ("declared", "answered"),
    [
        ("image/png", "image/png"),
        ("image/webp", "image/webp"),
        ("image/svg+xml", "application/octet-stream"),
        ("text/html", "application/octet-stream"),
        ("IMAGE/PNG", "application/octet-stream"),
        ("image/png\r\nSet-Cookie: a=b", "application/octet-stream"),
        ("", "application/octet-stream"),
    ],
)
async def test_no_browser_runs_a_medium(rig, declared, answered):
    (sha256,) = await put(rig.store, "s", b"<script>alert(1)</script>", media_type=declared)
    status, headers, body = await answer(rig, f"{SESSIONS}/s/media/{sha256}")
    assert (status, headers["Content-Type"], body) == (200, answered, b"<script>alert(1)</script>")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Content-Disposition"].startswith("attachment; ")
    assert "sandbox" in headers["Content-Security-Policy"]
    assert "Set-Cookie" not in headers


@pytest.mark.parametrize("name", ["0" * 64, "A" * 64, "..", "x"])
async def test_an_unknown_medium(rig, name):
    status, _, body = await answer(rig, f"{SESSIONS}/s/media/{name}")
    assert status == 404
    assert name in {"..", "x"} or b"has no medium" in body


async def test_media_of_another_session_are_not_returned(rig):
    await rig.say("other", [user("hi")])
    (sha256,) = await put(rig.store, "other", RED)
    assert (await answer(rig, f"{SESSIONS}/s/media/{sha256}"))[0] == 404
    assert (await answer(rig, f"{SESSIONS}/nope/media/{sha256}"))[0] == 404
    assert (await answer(rig, f"{SESSIONS}/nope/media"))[0] == 404


async def test_they_are_gone_with_their_session(rig):
    (sha256,) = await put(rig.store, "s", RED)
    async with rig.http.delete(f"{rig.url}{SESSIONS}/s") as deleted:
        assert deleted.status == 200
    assert (await answer(rig, f"{SESSIONS}/s/media/{sha256}"))[0] == 404


async def test_only_the_trainer_sees_them():
    async with proxied(admin_key="trainer") as rig:
        await rig.say("s", [user("hi")])
        (sha256,) = await put(rig.store, "s", RED)
        for path in (f"{SESSIONS}/s/media", f"{SESSIONS}/s/media/{sha256}"):
            assert (await answer(rig, path))[0] == 401
            assert (await answer(rig, path, Authorization="Bearer tcs-s"))[0] == 401
            assert (await answer(rig, path, Authorization="Bearer trainer"))[0] == 200
