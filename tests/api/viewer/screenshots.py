"""The pictures of docs/viewer.md: `python -m tests.api.viewer.screenshots` makes them anew, in docs/images."""

import asyncio
import itertools
import time
from pathlib import Path

from playwright.async_api import async_playwright

from tests.api.viewer.conftest import UI, chromium
from tests.api.viewer.scenes import EPISODES, GROUP, RUN, crowd, group, lively, long, run
from tests.proxy.kit import proxied
from tokencache.testing import SimulatedEngine

IMAGES = Path(__file__).parents[3] / "docs/images"
SIZE = {"width": 1180, "height": 640}


async def pictures(rig, browser):
    async def shot(name, at, scheme="light", *keys, ready=".page *", under=None, size=SIZE):
        page = await browser.new_page(viewport=size, color_scheme=scheme)
        await page.goto(rig.url + UI + at)
        await page.wait_for_selector(ready)
        await page.wait_for_load_state("networkidle")
        for key in keys:
            await page.keyboard.press(key)
        if under is not None:
            await page.evaluate("under => document.querySelector(under).scrollIntoView()", under)
        await page.wait_for_load_state("networkidle")
        await page.screenshot(path=IMAGES / f"viewer-{name}.png")
        await page.close()

    response = await rig.get("/tokencache/v1/sessions/rollout-7/outline")
    by_start = {one["start"]: one["id"] for one in reversed(response["sequences"])}
    forgiven = next(turn["id"] for turn in response["turns"] if turn["forgiven"])
    drifts = ".drifts"
    await shot("sessions", "")
    await shot("group", f"#/group/{GROUP}", ready=".answers")
    await shot("run", f"#/run/{RUN}", ready=".chart")
    await shot("phone", f"#/session/rollout-7/sequence/{by_start['root']}", "dark", ready=".message", size={"width": 390, "height": 700})
    await shot("session", "#/session/rollout-7", ready=".turn-row")
    await shot("forgiven", f"#/session/rollout-7/turn/{forgiven}", ready=".pair", under="aside h3")
    await shot("tokens", f"#/session/rollout-7/sequence/{by_start['root']}?token=330", ready=drifts)
    await shot("resplice-dark", f"#/session/rollout-7/sequence/{by_start['resplice']}?token=200", "dark", ready=drifts)
    await shot("heat", f"#/session/rollout-7/sequence/{by_start['root']}?token=230", "light", "h", "Escape", ready=drifts)


async def main():
    async with proxied(SimulatedEngine(episodes=EPISODES, seed=3)) as rig, async_playwright() as driver:
        rig.store._clock.now = itertools.accumulate(itertools.cycle((3.0, 9.0, 1.0, 14.0)), initial=time.time() - 3600).__next__
        await run(rig.store)
        rig.store._clock.now = time.time
        await crowd(rig.store, 300)
        await long(rig.store)
        await group(rig)
        for name in ("math-17-b", "math-17-c", "math-17-d", "math-17-none"):
            await rig.store.finish(name)
        await lively(rig)
        browser = await driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        await pictures(rig, browser)
        await browser.close()


if __name__ == "__main__":
    asyncio.run(asyncio.wait_for(main(), 180))
