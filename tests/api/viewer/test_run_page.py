"""The pages of runs in a browser, wide and on a small phone: what they show is what the report says, and each point opens its session."""

import re

import pytest
import pytest_asyncio
from playwright.async_api import expect

from tests.api.viewer.conftest import UI
from tests.api.viewer.scenes import RUN, run
from tests.api.viewer.test_pages import LOW_CONTRAST
from tests.proxy.kit import proxied
from tokencache.core.outcome import Outcome
from tokencache.core.session import Labels, SessionSettings
from tokencache.testing import SimulatedEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZES = pytest.mark.parametrize("width", [320, 1280])
REPORT = f"/tokencache/v1/runs/report?run={RUN}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig():
    """A proxy with a run, and one session of another."""
    async with proxied(SimulatedEngine()) as made:
        await run(made.store)
        await made.store.define("<b>odd</b>", SessionSettings(), Labels(tags=("run:<i>x</i> y",)))
        await made.store.finish("<b>odd</b>", Outcome("mine", "<b>broke</b>"))
        yield made


async def sized(look, at, width):
    page = await look(at)
    await page.set_viewport_size({"width": width, "height": 800})
    return page


@SIZES
async def test_a_run(rig, look, width):
    found = await rig.get(REPORT)
    page = await sized(look, "#/runs", width)
    await expect(page.get_by_role("link", name="runs")).to_have_attribute("aria-current", "page")
    row = page.locator(f"tr[data-run='{RUN}']")
    await expect(row.locator("[data-label='rollouts']")).to_have_text(str(found["rollouts"]))
    await row.get_by_role("link").click()
    await expect(page.locator("h1")).to_have_text(f"run {RUN}")
    for name in ("rollouts", "valid", "failed"):
        await expect(page.locator(f"[data-tile='{name}'] dd")).to_contain_text(str(found[name]))
    await expect(page.locator("[data-tile='reward'] dd")).to_contain_text(str(round(found["values"]["reward"]["mean"], 4)))
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert await page.evaluate(LOW_CONTRAST) == []


async def test_one_cell_for_each_expected_rollout(rig, look):
    found = await rig.get(REPORT)
    page = await look(f"#/run/{RUN}")
    cells = page.locator(".rollouts .cell")
    await expect(cells).to_have_count(found["rollouts"] + found["expected"])
    counts = {"failed": found["failed"], "running": found["running"], "passed": found["passed"], "expected": found["expected"]}
    for stage, count in counts.items():
        assert count
        await expect(page.locator(f".rollouts .s-{stage}")).to_have_count(count)
    assert await page.locator(".rollouts .s-running").first.evaluate("node => getComputedStyle(node).animationName") == "pulse"
    assert await page.locator(".rollouts .s-passed").first.evaluate("node => getComputedStyle(node).animationName") == "none"
    failed = next(one for group in found["groups"] for one in group["rollouts"] if one["stage"] == "failed")
    await page.locator(f".cell[data-session='{failed['session']}']").click()
    await expect(page.locator("h1")).to_contain_text(failed["session"])
    await page.go_back()
    await cells.first.focus()
    await page.keyboard.press("ArrowRight")
    await expect(cells.nth(1)).to_be_focused()


async def test_failed_rollouts_are_points_only_if_asked_for(rig, look):
    found = await rig.get(REPORT)
    page = await look(f"#/run/{RUN}")
    points = page.locator("[data-chart='sampled tokens'] .dot-point")
    await expect(points).to_have_count(found["valid"])
    await expect(page.locator("[data-chart='reward'] .dot-point")).to_have_count(found["values"]["reward"]["count"])
    mean = page.locator("[data-tile='sampled tokens'] dd")
    await expect(mean).to_contain_text(f"{found['values']['tokens']['mean']:.0f}")
    await page.get_by_role("button", name="with failed ones").click()
    await expect(points).to_have_count(found["valid"] + found["failed"])
    together = (await rig.get(f"{REPORT}&failed=true"))["values"]["tokens"]
    await expect(mean).to_contain_text(f"{together['mean']:.0f}")
    await expect(page).to_have_url(re.compile(r"failed=true"))
    opened = await points.first.get_attribute("href")
    await points.first.evaluate("node => node.click()")
    await expect(page).to_have_url(re.compile(re.escape(opened) + "$"))


async def test_groups_with_their_pass_rate(rig, look):
    page = await look(f"#/run/{RUN}")
    await page.get_by_label("A rollout passes if its reward is at least this").fill("0.3")
    await page.keyboard.press("Enter")
    found = await rig.get(f"{REPORT}&passing=0.3")
    await expect(page.locator("[data-tile='pass rate'] dd")).to_contain_text(f"{100 * found['pass_rate']:.0f} %")
    for group in found["groups"]:
        rate = "\u2013" if group["pass_rate"] is None else re.compile(f"^{100 * group['pass_rate']:.0f}(\\.\\d)? %$")
        await expect(page.locator(f"tr[data-group='{group['group']}'] [data-label='pass rate']")).to_have_text(rate)
    await page.keyboard.press("Escape")
    await page.locator("tr[data-group] a").first.click()
    await expect(page.locator("h1")).to_have_text(found["groups"][0]["group"])


@SIZES
async def test_a_group_page_is_readable(look, width):
    page = await sized(look, f"#/group/{RUN}-task-08", width)
    await expect(page.locator(".answers article")).to_have_count(4)
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert await page.evaluate(LOW_CONTRAST) == []


async def test_names_of_runs_stay_text(look):
    page = await look("#/runs")
    await page.get_by_role("link", name="<i>x</i> y").click()
    await expect(page.locator("h1")).to_have_text("run <i>x</i> y")
    await expect(page.locator("[data-tile='failed'] small")).to_have_text("mine 1")
    await expect(page.locator(".rollouts .cell")).to_have_attribute("title", re.compile("^<b>odd</b>\nfailed: mine: <b>broke</b>"))
    await expect(page.locator(".chart")).to_have_count(1)  # nothing is known beside that it ended
    await page.get_by_role("link", name="sessions", exact=True).click()
    await expect(page.locator("tbody .name a")).to_have_text(["<b>odd</b>"])


async def test_a_run_that_is_not_there(rig, look):
    page = await look("#/run/none")
    await expect(page.get_by_role("alert")).to_contain_text("no session is in run 'none'")
    await page.goto(rig.url + UI + "#/run")
    await expect(page.locator("h1")).to_have_text("All sessions")
    await page.goto(rig.url + UI + "#/tag/math")
    await expect(page.locator("h1")).to_have_text("tag math")
