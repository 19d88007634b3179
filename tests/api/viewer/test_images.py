"""Images in the viewer: thumbnails in the transcript, one box among the tokens, and nothing that a content policy would refuse."""

import pytest
from playwright.async_api import expect

from tests.images import image
from tests.proxy.kit import echo, proxied
from tests.proxy.test_images import EPISODES, shown
from tests.support.plugin_engine import PluginEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")
V1 = "/tokencache/v1/sessions/s"


def seeing():
    return PluginEngine(episodes=EPISODES, seed=7, images="plugin")


async def converse(rig):
    """Two turns: an image of 140 tokens beside a small one in the first message, a URL and an image in the third."""
    messages = [shown("EPISODE:look go", image(40, width=400, height=280), image(200))]
    said = await rig.say("s", messages)
    return await rig.say("s", [*messages, echo(said), shown("and?", image(90, height=56))])


async def test_messages_refer_to_their_images(browser):
    del browser
    async with proxied(seeing()) as rig:
        await converse(rig)
        (sequence,) = (await rig.exported())["sequences"]
        window = (await rig.get(f"{V1}/sequences/{sequence['id']}/messages"))["window"]
        digests = [part["id"] for message in window for part in message["message"]["parts"] if part["kind"] == "media"]
        assert digests == [medium["sha256"] for medium in sequence["media"]]
        assert [[part["kind"] for part in message["message"]["parts"]] for message in window if message["message"]["role"] == "user"] == [
            ["text", "media", "media"],
            ["text", "media"],
        ]
        assert (await rig.get(f"{V1}/sequences/{sequence['id']}"))["media"] == sequence["media"]


async def test_thumbnails_and_boxes(look):
    async with proxied(seeing()) as rig:
        await converse(rig)
        (sequence,) = (await rig.exported())["sequences"]
        large, small, tall = sequence["media"]
        page = await look(f"#/session/s/sequence/{sequence['id']}", url=rig.url)
        first = page.locator(".message").first
        await expect(first.locator("canvas")).to_have_count(2)
        await expect(first.locator("canvas").first).to_have_attribute("aria-label", f"image {large['sha256'][:12]}, 400 by 280")
        pixel = "canvas => [...canvas.getContext('2d').getImageData(5, 5, 1, 1).data]"
        assert await first.locator("canvas").first.evaluate(pixel) == [40, 215, 128, 255]
        assert await first.locator("canvas").nth(1).evaluate(pixel) == [200, 55, 128, 255]
        boxes = page.locator(".t.medium")
        await expect(boxes).to_have_text([f"image, {one['length']} token{'s' * (one['length'] > 1)}" for one in (large, small, tall)])
        await expect(page.locator(".t")).to_have_count(len(sequence["token_ids"]) - sum(one["length"] - 1 for one in sequence["media"]))
        await page.locator("#goto").fill(str(large["start"] + 2))
        await page.keyboard.press("Enter")
        await expect(page.locator(".t.current")).to_have_text(f"image, {large['length']} tokens")
        await page.keyboard.press("ArrowRight")
        await expect(page.locator(".t.current")).to_have_attribute("data-i", str(large["start"] + large["length"]))
        await page.keyboard.press("ArrowLeft")
        await expect(page.locator(".t.current")).to_have_attribute("data-i", str(large["start"]))


@pytest.mark.whole
async def test_an_image_that_is_not_stored_is_named(look):
    async with proxied(seeing(), max_media_bytes=0) as rig:
        await converse(rig)
        (sequence,) = (await rig.exported())["sequences"]
        page = await look(f"#/session/s/sequence/{sequence['id']}", url=rig.url)
        await expect(page.locator("figcaption").first).to_contain_text("its bytes are not stored")
        await expect(page.locator("canvas")).to_have_count(0)


@pytest.mark.whole
async def test_bytes_that_are_no_image_are_named(look):
    """The simulated engine does not decode images, as vLLM does."""
    async with proxied(seeing()) as rig:
        await converse(rig)
        (sequence,) = (await rig.exported())["sequences"]

        async def other(*_):
            return "image/png", b"<script>document.title = 'owned'</script>"

        rig.store.media = other
        page = await look(f"#/session/s/sequence/{sequence['id']}", url=rig.url)
        await expect(page.locator("figcaption").first).to_contain_text("cannot be shown")
        assert "owned" not in await page.title()
