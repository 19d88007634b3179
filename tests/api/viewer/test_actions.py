"""The actions of a session in a browser: each asks first, and a refusal is shown as the proxy words it."""

import json

import pytest
import pytest_asyncio
from playwright.async_api import expect

from tests.api.viewer.scenes import EPISODES
from tests.proxy.kit import proxied, user
from tokencache.testing import SimulatedEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = "the-trainers-own"


@pytest_asyncio.fixture(loop_scope="module")
async def one(look):
    """A proxy with a session of one turn, and its page; the key was entered."""
    async with proxied(SimulatedEngine(episodes=EPISODES, seed=3), admin_key=KEY) as rig:
        await rig.say("s", [user("EPISODE:sub")])
        page = await look("#/session/s", url=rig.url)
        await page.locator("#ask-key").fill(KEY)
        await page.keyboard.press("Enter")
        await expect(page.locator(".turn-row")).to_have_count(1)
        yield rig, page
        await page.goto("about:blank")


def button(page, name):
    return page.get_by_role("group", name="Actions").get_by_role("button", name=name)


async def state(rig):
    info = await rig.store.session("s")
    return info and str(info.state)


@pytest.mark.whole
async def test_an_export_is_downloaded(one, tmp_path):
    rig, page = one
    for name in ("native", "verl"):
        await page.get_by_label("Export format").select_option(name)
        async with page.expect_download() as started:
            await button(page, "export").click()
        download = await started.value
        await download.save_as(tmp_path / download.suggested_filename)
        response = await rig.get(f"/tokencache/v1/sessions/s/trajectories?format={name}", Authorization=f"Bearer {KEY}")
        assert json.loads((tmp_path / f"s.{name}.json").read_bytes()) == response


@pytest.mark.whole
async def test_a_session_is_finished_and_sealed(one):
    rig, page = one
    dialog = page.locator("#confirm")
    await button(page, "finish").click()
    await expect(dialog).to_contain_text("Finish s?")
    await dialog.get_by_role("button", name="Cancel").click()
    await expect(dialog).to_be_hidden()
    assert await state(rig) == "open"
    await button(page, "finish").click()
    await dialog.get_by_role("button", name="Finish").click()
    await expect(page.locator(".head .badge").first).to_have_text("finished")
    await expect(button(page, "finish")).to_be_disabled()
    assert await state(rig) == "finished"
    await button(page, "seal").click()
    await dialog.get_by_role("button", name="Seal").click()
    await expect(page.locator(".head .badge").first).to_have_text("sealed")
    await expect(button(page, "seal")).to_be_disabled()
    await expect(page.locator(".head")).to_contain_text("complete")
    assert await state(rig) == "sealed"


@pytest.mark.whole
async def test_an_unfinished_session_is_sealed_only_by_force(one):
    rig, page = one
    dialog = page.locator("#confirm")
    await button(page, "seal").click()
    await expect(dialog.get_by_role("button")).to_have_text(["Seal", "Cancel"])
    await dialog.get_by_role("button", name="Seal").click()
    async with rig.http.post(f"{rig.url}/tokencache/v1/sessions/s/seal", headers={"Authorization": f"Bearer {KEY}"}) as refused:
        assert refused.status == 409
        await expect(dialog.get_by_role("alert")).to_have_text((await refused.json())["error"]["message"])
    await expect(dialog.get_by_role("button")).to_have_text(["Seal", "Seal by force", "Cancel"])
    assert await state(rig) == "open"
    await dialog.get_by_role("button", name="Seal by force").click()
    await expect(page.locator(".head .badge").first).to_have_text("sealed")
    await expect(page.locator(".head .b-incomplete")).to_be_visible()
    assert [incident.kind for incident in (await rig.store.session("s")).incidents] == ["sealed-early"]


@pytest.mark.whole
async def test_a_call_in_flight_is_named(one):
    rig, page = one
    begun = await rig.store.begin("s", "in-flight", ())
    await rig.store.finish("s")
    dialog = page.locator("#confirm")
    await button(page, "seal").click()
    await dialog.get_by_role("button", name="Seal").click()
    await expect(dialog.get_by_role("alert")).to_contain_text("in flight")
    assert await state(rig) == "finished"
    await rig.store.settle("s", begun.epoch, "in-flight")
    await dialog.get_by_role("button", name="Seal", exact=True).click()
    await expect(page.locator(".head .badge").first).to_have_text("sealed")
    assert not (await rig.store.session("s")).incidents


@pytest.mark.whole
async def test_a_session_is_deleted(one):
    rig, page = one
    dialog = page.locator("#confirm")
    await button(page, "delete").click()
    await expect(dialog).to_contain_text("Delete s?")
    await page.keyboard.press("Escape")
    assert await state(rig) == "open"
    await button(page, "delete").click()
    await dialog.get_by_role("button", name="Delete").click()
    await expect(page.locator("h1")).to_have_text("Sessions")
    await expect(page.get_by_text("No session yet.")).to_be_visible()
    assert await state(rig) is None


@pytest.mark.whole
async def test_a_refusal_is_shown(one):
    rig, page = one
    await button(page, "delete").click()
    await rig.store.delete("s")
    dialog = page.locator("#confirm")
    await dialog.get_by_role("button", name="Delete").click()
    await expect(dialog.get_by_role("alert")).to_have_text("there is no session 's'")
    await dialog.get_by_role("button", name="Cancel").click()
    await button(page, "export").click()
    await expect(page.locator(".actions").get_by_role("alert")).to_have_text("there is no session 's'")
