"""A browser for a module's tests, and a proxy whose sessions they look at. Both run in the module's own event loop."""

import asyncio
import contextlib
import shutil
from typing import Any, NamedTuple

import pytest_asyncio
from playwright.async_api import async_playwright

from tests.api.viewer.scenes import EPISODES, crowd, lively, long
from tests.proxy.kit import proxied
from tests.support.material import require
from tests.support.waiting import PATIENCE
from tokencache.testing import SimulatedEngine

UI = "/tokencache/ui/"
CLOSE_SECONDS = 30
"""A Chromium that got too little CPU may never answer that it has closed."""


class Looked(NamedTuple):
    """A page, the errors of its scripts, and the addresses that it asked."""

    page: Any
    errors: list[str]
    requests: list[str]


def chromium():
    """Debian's browser, or another of its kind; Playwright's own is not downloaded."""
    return require("Chromium", next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None))


async def closed(what):
    """Close a tab or the browser; one that does not answer is left to the end of Playwright's driver."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            await what.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser():
    path = chromium()
    async with async_playwright() as driver:
        found = await driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        await closed(found)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig():
    """A proxy with a session of every kind of turn, a long one, and three hundred that are empty."""
    async with proxied(SimulatedEngine(episodes=EPISODES, seed=3)) as made:
        await crowd(made.store, 300)
        await long(made.store)
        await lively(made)
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def look(browser, rig):
    """Opens a page in a fresh tab; at the end nothing must have gone wrong in it, and nothing been asked of another host."""
    opened = []

    async def open_page(at="", url=None, **settings):
        context = await browser.new_context(viewport={"width": 1440, "height": 900}, **settings)
        page = await context.new_page()
        page.set_default_timeout(1000 * PATIENCE)
        seen = Looked(page, [], [])
        page.on("pageerror", lambda error: seen.errors.append(str(error)))
        page.on("console", lambda message: seen.errors.append(message.text) if "Content Security" in message.text else None)
        page.on("request", lambda request: seen.requests.append(request.url))
        opened.append((context, seen, url or rig.url))
        await page.goto((url or rig.url) + UI + at)
        return page

    yield open_page
    for context, seen, url in opened:
        await closed(context)
        assert not seen.errors
        assert seen.requests
        assert all(asked.startswith(url + "/tokencache/") for asked in seen.requests)
