"""A browser for a module's tests, and a proxy whose sessions they look at. Both run in the module's own event loop."""

import asyncio
import contextlib
import shutil
from typing import Any, NamedTuple

import pytest_asyncio
from playwright.async_api import async_playwright, expect

from tests.api.viewer.scenes import EPISODES, crowd, lively, long
from tests.proxy.kit import proxied
from tests.support.material import require
from tests.support.waiting import PATIENCE
from tokencache.testing import SimulatedEngine

UI = "/tokencache/ui/"
SIZE = {"width": 1440, "height": 900}
CLOSE_SECONDS = 30
"""A Chromium that got too little CPU may never answer that it has closed."""
expect.set_options(timeout=1000 * PATIENCE)


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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tabs(browser):
    """The window of a module's tests: to start another one costs as much as a test. Tabs keep nothing for each other (`look`)."""
    made = await browser.new_context(viewport=SIZE)
    yield made
    await closed(made)


@pytest_asyncio.fixture(loop_scope="module")
async def look(browser, tabs, rig):
    """Opens a page in a fresh tab; at the end nothing must have gone wrong in it, and nothing been asked of another host.

    A tab with settings has a window of its own.
    """
    opened = []

    async def open_page(at="", url=None, **settings):
        window = await browser.new_context(viewport=SIZE, **settings) if settings else tabs
        page = await window.new_page()
        page.set_default_timeout(1000 * PATIENCE)
        seen = Looked(page, [], [])
        page.on("pageerror", lambda error: seen.errors.append(str(error)))
        page.on("console", lambda message: seen.errors.append(message.text) if "Content Security" in message.text else None)
        page.on("request", lambda request: seen.requests.append(request.url))
        opened.append((window if settings else page, seen, url or rig.url))
        await forget(window, page, url or rig.url)
        await page.goto((url or rig.url) + UI + at)
        return page

    yield open_page
    for tab, seen, url in opened:
        await closed(tab)
        assert not seen.errors
        assert seen.requests
        assert all(asked.startswith(url + "/tokencache/") for asked in seen.requests)


async def forget(window, page, url):
    """Remove what earlier tabs kept for these pages."""
    await (await window.new_cdp_session(page)).send("Storage.clearDataForOrigin", {"origin": url, "storageTypes": "all"})
