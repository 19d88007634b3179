"""The pages in a browser: headless Chromium against a real proxy.

The fixture `look` also checks each page: no script error, no violation of its content policy, and no request to another host.
"""

import json
import re

import msgspec
import pytest
from playwright.async_api import expect

from tests.api.test_admission import admitting, refused
from tests.api.viewer.conftest import UI
from tests.api.viewer.scenes import EPISODES, HOSTILE, delegating, group, lively
from tests.proxy.kit import CALL, TOOLS, proxied, user
from tests.support.leading import lead_to
from tokencache.core.context import Context, Raw, pack_context
from tokencache.core.session import LabelChanges, Labels, Reward, SessionSettings
from tokencache.store.base import Entry
from tokencache.testing import SimulatedEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")

OUTLINE = "/tokencache/v1/sessions/{}/outline"


async def outline(rig, session="rollout-7"):
    return await rig.get(OUTLINE.format(session))


async def sequence_of(rig, start, session="rollout-7"):
    return next(one for one in (await outline(rig, session))["sequences"] if one["start"] == start)


async def number(page, selector):
    return await page.locator(selector).count()


async def test_sessions_with_their_counts_filter_and_paging(rig, look):
    page = await look()
    await expect(page.locator("tbody tr")).to_have_count(100)
    await expect(page.get_by_text("302 sessions")).to_be_visible()
    await expect(page.get_by_role("button", name="live")).to_have_text(re.compile("live ?30"))
    row = page.locator("tr[data-session='rollout-7']")
    await expect(row).to_contain_text("incomplete")
    await expect(row).to_contain_text("upstream-broke")
    await expect(row.locator(".b-failed")).to_have_text("engine")
    await expect(row.locator("[data-label='turns']")).to_have_text("11")
    await page.get_by_role("button", name="next").click()
    await expect(page.locator(".pager")).to_contain_text(re.compile("101.200 of 302"))
    await page.keyboard.press("/")
    await page.keyboard.type("batch-0001")
    await expect(page.locator("tbody tr")).to_have_count(10)
    await expect(page.get_by_text("10 of 302 sessions")).to_be_visible()
    await page.get_by_role("button", name="live").click()
    await expect(page.locator("tbody tr")).to_have_count(1)
    await expect(page.locator("tbody tr")).to_contain_text("batch-00010")
    await page.locator("#filter").fill("nothing like it")
    await expect(page.get_by_text("No session matches.")).to_be_visible()
    await page.locator("#filter").fill("turn:3")
    await expect(page.get_by_role("alert")).to_contain_text("There is no filter turn. The filters are group, tag,")
    await page.locator("#filter").fill("turns:many")
    await expect(page.get_by_role("alert")).to_contain_text("turns must be a number")
    await page.get_by_role("button", name="all").click()
    await page.locator("#filter").fill("outcome:engine turns:>10")
    await expect(page.locator("tbody .name a")).to_have_text(["rollout-7"])
    await expect(page.locator("#wrong")).to_be_empty()


@pytest.mark.whole
async def test_sessions_are_sorted_and_filtered(look):
    async with proxied(SimulatedEngine(episodes=EPISODES, seed=3)) as rig:
        await group(rig)
        await lively(rig)
        page = await look(url=rig.url)
        names = page.locator("tbody .name a")
        await expect(names.first).to_have_text("rollout-7")
        await page.get_by_role("button", name="reward").click()
        await expect(names).to_have_text(["math-17-a", "math-17-b", "math-17-c", "rollout-7", "math-17-none", "math-17-d"])
        await expect(page.get_by_role("columnheader", name="reward")).to_have_attribute("aria-sort", "descending")
        await page.get_by_role("button", name="reward").click()
        await expect(names.first).to_have_text("math-17-c")
        await page.locator("tr[data-session='math-17-a']").get_by_role("button", name="two words").click()
        await expect(page.locator("#filter")).to_have_value('tag:"two words"')
        await expect(names).to_have_text(["math-17-c", "math-17-b", "math-17-a", "math-17-d"])
        await page.get_by_role("button", name="finished").click()
        await expect(names).to_have_text(["math-17-a"])
        row = page.locator("tr[data-session='math-17-a']")
        for label, text in {"group": "math-17", "reward": "1", "harness": "claude-code", "model": "sim", "turns": "2"}.items():
            await expect(row.locator(f"[data-label='{label}']")).to_contain_text(text)
        await page.reload()
        await expect(names).to_have_text(["math-17-a"])  # the address holds the filter, the state and the order
        await page.locator("#filter").fill("group:math-17 none")
        await page.get_by_role("button", name="all").click()
        await expect(names).to_have_text(["math-17-none"])
        await page.goto("about:blank")


@pytest.mark.whole
async def test_a_tag_with_blanks_and_quotes_is_a_term_of_the_filter(look):
    async with proxied(SimulatedEngine(episodes=EPISODES, seed=3)) as rig:
        for session, tag in (("one", 'say "hi" twice'), ("two", "say")):
            await rig.store.define(session, SessionSettings(), Labels(tags=(tag,)))
        page = await look(url=rig.url)
        for _ in range(2):  # it replaces the term
            await page.locator("tr[data-session='one']").get_by_role("button", name='say "hi" twice').click()
            await expect(page.locator("#filter")).to_have_value('tag:"say ""hi"" twice"')
            await expect(page.locator("tbody .name a")).to_have_text(["one"])
        await page.goto("about:blank")


@pytest.mark.whole
async def test_a_group_compared(look):
    async with proxied(SimulatedEngine(episodes=EPISODES, seed=3)) as rig:
        await group(rig)
        page = await look("#/", url=rig.url)
        await page.locator("tr[data-session='math-17-a']").get_by_role("link", name="math-17", exact=True).click()
        await expect(page.locator("h1")).to_have_text("math-17")
        await expect(page.locator("tbody .name a")).to_have_text(["math-17-a", "math-17-b", "math-17-c", "math-17-d", "math-17-none"])
        await expect(page.locator("[data-tile='reward'] dd")).to_contain_text("0.1667± 0.6236, from -0.5 to 13 of 4 sessions rewarded")
        await expect(page.locator(".note").first).to_contain_text("math-17-none")
        await expect(page.locator("tr[data-session='math-17-a'] [data-label='advantage']")).to_have_text("0")  # the only one that is over
        await expect(page.locator(".answers article")).to_have_count(4)
        await expect(page.locator(".answers [data-session='math-17-b'] pre")).to_have_text("The answer is 8.")
        first = page.locator(".parting").first
        await expect(first).to_be_hidden()
        await page.get_by_text("Where their tokens part").click()
        await expect(first.locator("p").first).to_contain_text("message 1 (assistant), sampled in turn 0: 2 ways")
        second = page.locator(".parting .parting")
        await expect(second).to_contain_text("message 3 (assistant), sampled in turn 1: 2 ways")
        await expect(second.locator("li", has_text="equal to the end").locator("ins")).to_contain_text("7.")
        link = second.get_by_role("link", name="math-17-b")
        token = int((await link.get_attribute("href")).rpartition("=")[2])
        await link.click()
        await expect(page.locator(".t.current")).to_have_attribute("data-i", str(token))
        await expect(page.locator(".t.current")).to_have_text("8")
        await page.goto("about:blank")


@pytest.mark.whole
async def test_the_reward_and_the_labels_of_a_session(look):
    async with proxied(SimulatedEngine(episodes=EPISODES, seed=3)) as rig:
        await rig.say("s", [user("EPISODE:sub")])
        (turn,) = await rig.store.turns("s")
        await rig.store.add_reward("s", Reward(0.5, {"tests": 0.25}, {turn.id: 0.125}, {turn.id: 0.0625}))
        await rig.store.set_labels("s", LabelChanges("a/b <i>", {"task": {"id": "<b>7</b>"}}, ("first",)))
        page = await look("#/session/s", url=rig.url)
        await expect(page.locator("[data-tile='reward'] dd")).to_have_text("0.5tests 0.25")
        await page.get_by_text("metadata").click()
        await expect(page.locator(".metadata pre")).to_contain_text('"id": "<b>7</b>"')
        await expect(page.get_by_role("link", name="first")).to_have_attribute("href", "#/?filter=tag%3Afirst")
        await page.goto(rig.url + UI + "#/session/s?tab=sequences")
        await expect(page.locator("tbody [data-label='reward']")).to_have_text("0.0625")
        await page.goto(rig.url + UI + f"#/session/s/turn/{turn.id}")
        await expect(page.locator("aside .facts-list")).to_contain_text("0.125")
        await page.get_by_role("link", name="a/b <i>").click()
        await expect(page.locator("h1")).to_have_text("a/b <i>")
        await page.get_by_text("Where their tokens part").click()
        await expect(page.get_by_text("There is only one session.")).to_be_visible()
        await page.goto("about:blank")


@pytest.mark.whole
async def test_counts_are_live(look, browser):
    async with proxied(SimulatedEngine(episodes=EPISODES)) as rig:
        page = await look(url=rig.url)
        await expect(page.get_by_text("No session yet.")).to_be_visible()
        await rig.say("new-one", [user("EPISODE:sub")])
        await expect(page.locator("tr[data-session='new-one'] [data-label='turns']")).to_have_text("1")
        await rig.say("new-one", [user("EPISODE:sub")])
        await expect(page.locator("tr[data-session='new-one'] [data-label='turns']")).to_have_text("2")
        await page.goto("about:blank")


@pytest.mark.whole
async def test_a_session_is_walked_by_keys(rig, look):
    page = await look()
    await expect(page.locator("tbody a").first).to_be_visible()
    await page.keyboard.press("j")
    await expect(page.locator("tbody a").first).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.locator("h1")).to_have_text("rollout-7")
    await expect(page.locator(".turn-row")).to_have_count(11)
    await page.keyboard.press("ArrowDown")
    await page.keyboard.press("ArrowDown")
    await page.keyboard.press("ArrowDown")
    await page.keyboard.press("Enter")
    await expect(page.locator("aside h2")).to_have_text("Turn 2")
    await page.keyboard.press("Escape")
    await expect(page.locator("aside h2")).to_have_count(0)
    await page.keyboard.press("u")
    await expect(page.locator("h1")).to_have_text("Sessions")
    await page.keyboard.press("?")
    await expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()


@pytest.mark.whole
async def test_a_session_in_figures_and_as_a_tree(rig, look):
    exported = await rig.exported("rollout-7")
    page = await look("#/session/rollout-7")
    figures = exported["figures"]
    for name, value in [
        ("calls", figures["calls"]), ("sequences", figures["sequences"]), ("trainable tokens", figures["trainable_tokens"]),
        ("masked tokens", f"{figures['masked_tokens']:,}"), ("incidents", 1), ("applied rules", sum(figures["forgiven"].values())),
    ]:  # fmt: skip
        await expect(page.locator(f"[data-tile='{name}'] dd")).to_contain_text(str(value))
    await expect(page.locator("[data-tile='drift avoided'] dd")).to_contain_text(re.compile(r"[\d,]+ tokensin 5 of 5 last prompts"))
    await expect(page.locator(".mix li")).to_have_text(["2 root", "6 continue", "1 branch", "2 resplice"])
    rows = page.locator(".turn-row")
    await expect(rows.nth(1)).to_contain_text("discarded")
    await expect(rows.nth(1)).to_have_class(re.compile("dim"))
    await expect(rows.nth(2).locator(".b-branch")).to_have_text("branch")
    await expect(rows.nth(7).locator(".b-resplice")).to_have_text("resplice")
    await expect(rows.nth(7)).to_contain_text("context-edited")
    await expect(rows.nth(9).locator(".b-resplice")).to_have_text("resplice")
    await expect(rows.nth(10)).to_contain_text("upstream-broke")
    assert await number(page, ".turn-row:nth-child(7) .edge.dashed")  # the resplice takes its context from an earlier turn
    lanes = [await rows.nth(n).locator("circle").get_attribute("cx") for n in range(11)]
    assert lanes[0] == lanes[2] == lanes[10] != lanes[1]


@pytest.mark.whole
async def test_a_recognized_rewriting_side_by_side(rig, look):
    turns = (await outline(rig))["turns"]
    page = await look(f"#/session/rollout-7/turn/{turns[2]['id']}")
    echo = page.locator(".echo")
    await expect(echo).to_have_count(1)
    await expect(echo.locator(".b-rule")).to_have_text(["cd-prefix", "coerced-values", "reasoning-dropped", "whitespace"])
    arguments = echo.locator(".pair", has=page.locator("h4", has_text="arguments"))
    await expect(arguments.get_by_role("group", name="as served").locator("del")).to_have_text(["cd /work/repo && ", '"', '"'])
    await expect(arguments.get_by_role("group", name="as it came back").locator("pre")).to_have_text(
        '{"command": "python -m pytest -q tests/test_api.py", "timeout": 120}'
    )
    await expect(page.locator(".facts-list")).to_contain_text("turn 0")
    await page.locator("aside").get_by_role("link", name="turn 0").first.click()
    await expect(page.locator("aside h2")).to_have_text("Turn 0")


@pytest.mark.whole
async def test_why_a_rollout_split(rig, look):
    page = await look("#/session/rollout-7")
    await page.locator(".turn-row").nth(9).locator("a.row").click()
    panel = page.locator("aside")
    await expect(panel).to_contain_text("context-edited")
    await expect(panel.locator(".echo[data-verdict='foreign']")).to_contain_text("the prompt does not hold its exact tokens")
    await expect(panel.locator(".echo[data-verdict='foreign'] ins")).to_contain_text(["2"])
    await expect(panel.locator(".echo[data-verdict='equivalent']")).to_contain_text("the prompt holds its exact tokens")


async def test_what_changed_and_which_answers_returned_and_which_calls_failed(look):
    async with proxied(SimulatedEngine(episodes=EPISODES, seed=3)) as rig:
        await delegating(rig)
        page = await look("#/session/delegating", url=rig.url)
        rows = page.locator(".turn-row")
        await expect(rows.locator(".no")).to_have_text(["0", "1", "✕", "2", "3"])
        await expect(rows.nth(2)).to_contain_text("engine-refusedfailed call: 500: ")
        await expect(rows.nth(3).locator(".b-link")).to_have_text("delegation ← 1")
        await expect(page.locator(".edge.link")).to_have_count(3)  # from the helper, past the call that failed, to the turn with its answer
        await expect(page.locator("[data-tile='incidents']")).to_have_class("tile-notice")
        await expect(page.locator("[data-tile='incidents'] dd")).to_have_text("11 call failed")
        await rows.nth(4).locator("a.row").click()
        change = page.locator("aside .change")
        await expect(change).to_have_text("compared with turn 2: message 0, system, differs: 13:40:01. → 13:41:07.")
        await page.get_by_text("message 0, whole").click()
        await expect(page.get_by_role("group", name="content now").locator("ins")).to_have_text(["41", "07"])
        await change.get_by_role("link", name="turn 2").click()
        await expect(page.locator("aside .change")).to_have_text("compared with turn 0: 1 new message: tool")
        await page.goto("about:blank")


async def test_text_that_a_parser_dropped(look):
    late = "And then I read the file."
    async with proxied(SimulatedEngine(episodes={"late": [f"{CALL}\n{late}"]}, seed=3)) as rig:
        await rig.say("late", [user("EPISODE:late")], tools=TOOLS)
        page = await look("#/session/late", url=rig.url)
        await expect(page.locator("[data-tile='lost to the parser'] dd")).to_have_text(f"{len(late)} charactersin 1 turn")
        await page.locator(".turn-row a.row").click()
        await expect(page.locator("aside .lost")).to_have_text(late)
        await expect(page.locator("aside .b-mark")).to_have_text("lost-text")
        await page.goto("about:blank")


async def test_how_the_harness_names_an_agent(look):
    async with proxied(SimulatedEngine(episodes=EPISODES, seed=3)) as rig:
        headers = {"X-Claude-Code-Session-Id": "main", "X-Claude-Code-Agent-Id": "helper"}
        body = {"model": "sim", "messages": [user("EPISODE:task")]}
        async with rig.http.post(rig.url + "/s/named/v1/chat/completions", json=body, headers=headers) as answer:
            assert answer.status == 200
        page = await look("#/session/named", url=rig.url)
        await expect(page.locator(".turn-row .b-agent")).to_have_text("sub-agent")
        await page.locator(".turn-row a.row").click()
        await expect(page.locator("aside")).to_contain_text("helper, started by main (as the harness says)")
        await page.goto("about:blank")


@pytest.mark.whole
async def test_incidents_sequences_and_applied_rules(rig, look):
    page = await look("#/session/rollout-7?tab=incidents")
    row = page.locator("tbody tr")
    await expect(row).to_have_count(1)
    await expect(row).to_contain_text("upstream-broke")
    await expect(row).to_contain_text("data is missing")
    await row.get_by_role("link", name="turn 10").click()
    await expect(page.locator("aside h2")).to_have_text("Turn 10")
    await page.get_by_role("navigation", name="Parts").get_by_role("link", name="sequences").click()
    await expect(page.locator("tbody .badge")).to_have_text(["root", "branch", "root", "resplice", "resplice"])
    await page.get_by_role("navigation", name="Parts").get_by_role("link", name="applied rules").click()
    await expect(page.locator("tbody tr")).to_have_count(9)
    await expect(page.locator("tbody tr").first).to_contain_text("cd-prefix")


@pytest.mark.whole
async def test_tokens_have_colours_and_cards(rig, look):
    one = await sequence_of(rig, "root")
    exported = (await rig.exported("rollout-7"))["sequences"][0]
    page = await look(f"#/session/rollout-7/sequence/{one['id']}")
    await expect(page.locator("#t0")).to_be_visible()
    first = exported["turns"][0]["completion"][0]
    expected = {"sampled": sum(exported["loss_mask"][:512]), "prompt": exported["turns"][0]["prompt"][1]}
    for kind, many in expected.items():
        assert await number(page, f".block:has(#t0) .t.k-{kind}") == many
    await page.locator(f"#t{first}").scroll_into_view_if_needed()
    await page.locator(f"#t{first}").hover()
    card = page.locator("#card")
    await expect(card).to_contain_text(str(exported["token_ids"][first]))
    await expect(card).to_contain_text("1: trained here")
    await expect(card).to_contain_text(f"{exported['logprobs'][first]:.4f}")
    await expect(card).to_contain_text("turn 0")
    await page.locator("#t0").hover()
    await expect(card).to_contain_text('"<|im_start|>"')
    await expect(card).to_contain_text("none: mask 0")


@pytest.mark.whole
async def test_the_tokens_of_one_character_are_shown_together(rig, look):
    one = await sequence_of(rig, "root")
    page = await look(f"#/session/rollout-7/sequence/{one['id']}")
    piece = page.locator(".t", has_text=re.compile("^ ?🙂$")).first
    await piece.scroll_into_view_if_needed()
    await piece.hover()
    await expect(page.locator("#card")).to_contain_text(re.compile(r"one character in \d tokens"))
    assert await number(page, ".t:text-is('·')")
    assert not await number(page, ".t:has-text('\ufffd')")


@pytest.mark.whole
async def test_heat_and_moving_through_a_sequence(rig, look):
    one = await sequence_of(rig, "root")
    exported = (await rig.exported("rollout-7"))["sequences"][0]
    page = await look(f"#/session/rollout-7/sequence/{one['id']}")
    await expect(page.locator("#t0")).to_be_visible()
    starts = [turn["completion"][0] for turn in exported["turns"]]
    await page.keyboard.press("]")
    await expect(page.locator(".t.current")).to_have_attribute("data-i", str(starts[0]))
    await page.keyboard.press("]")
    await expect(page.locator(".t.current")).to_have_attribute("data-i", str(starts[1]))
    await page.keyboard.press("ArrowLeft")
    await expect(page.locator(".t.current")).to_have_attribute("data-i", str(starts[1] - 1))
    await expect(page.locator(".t.current")).to_have_class(re.compile("k-tail"))
    assert page.url.endswith(f"?token={starts[1] - 1}")
    likely = min(range(len(exported["logprobs"][:500])), key=lambda i: exported["logprobs"][i])

    async def color(token):
        return await page.locator(f"#t{token}").evaluate("node => getComputedStyle(node).backgroundColor")

    before = await color(likely)
    await page.keyboard.press("h")
    await expect(page.get_by_role("button", name="heat")).to_have_attribute("aria-pressed", "true")
    assert await color(likely) != before
    assert await color(0) == "rgba(0, 0, 0, 0)"


@pytest.mark.whole
async def test_where_a_plain_rendering_differs(rig, look):
    measured = await rig.get("/tokencache/v1/sessions/rollout-7/drift?drift=sequences")
    one = await sequence_of(rig, "root")
    last = (await rig.exported("rollout-7"))["sequences"][0]["turns"][-1]["turn"]
    sites = measured["turns"][last]["sites"]
    page = await look(f"#/session/rollout-7/sequence/{one['id']}")
    await expect(page.locator(".tools .drifts")).to_have_text(f"a plain rendering differs in {len(sites)} places")
    await expect(page.locator(".minimap .ticks rect")).to_have_count(len(sites))
    site = next(site for site in sites if site["rendered"] and site["end"] > site["start"])
    await page.locator("#goto").fill(str(site["start"]))
    await page.keyboard.press("Enter")
    node = page.locator(f"#t{site['start']}")
    await expect(node).to_have_class(re.compile("differs"))
    text = rig.engine.tokenizer.decode(site["rendered"])
    await expect(page.locator("#card .site")).to_contain_text(site["cause"])
    await expect(page.locator("#card .site .quoted")).to_have_text(re.compile(re.escape(text.strip())))
    await page.keyboard.press("n")
    following = next(other["start"] for other in sites if other["start"] > site["start"])
    await expect(page.locator(".t.current")).to_have_attribute("data-i", str(following))


@pytest.mark.whole
async def test_anchors_of_a_resplice_and_the_context_of_a_branch(rig, look):
    one = await sequence_of(rig, "resplice")
    anchors = (await rig.exported("rollout-7"))["sequences"][one["number"]]["turns"][0]["anchors"]
    page = await look(f"#/session/rollout-7/sequence/{one['id']}?token={anchors[0]['start']}")
    await expect(page.locator(f"#t{anchors[0]['start']}")).to_have_class(re.compile("k-anchor"))
    await expect(page.locator(f"#t{anchors[0]['end']}")).to_have_class(re.compile("k-prompt"))
    await expect(page.locator("#card")).to_contain_text("turn 0")
    await expect(page.locator(".legend")).to_contain_text("anchor")
    thrown = await sequence_of(rig, "branch")
    await page.goto(rig.url + UI + f"#/session/rollout-7/sequence/{thrown['id']}")
    await expect(page.locator(".t.k-earlier").first).to_be_visible()
    await expect(page.locator("h1")).to_have_text("Sequence 1")


@pytest.mark.whole
async def test_a_hundred_thousand_tokens_and_two_hundred_turns(rig, look):
    long = await outline(rig, "long")
    page = await look("#/session/long")
    folds = page.get_by_role("button", name=re.compile("turns that continue"))
    await expect(folds).to_have_text([re.compile("turns 1\u2013118: 118 turns.*29,500 tokens"), re.compile("turns 122\u2013199: 78 turns")])
    await expect(page.locator(".turn-row")).to_have_count(7)
    await folds.first.click()
    await expect(page.locator(".turn-row")).to_have_count(7 - 1 + 118)
    await page.goto(rig.url + UI + f"#/session/long/turn/{long['turns'][150]['id']}")
    await expect(page.locator(".turn-row.chosen")).to_contain_text("149")  # a turn that is chosen is never folded
    await expect(page.locator(".turn-row")).to_have_count(201)
    await expect(page.locator("[data-tile='trainable tokens'] dd")).to_contain_text("50,250")
    await page.goto(rig.url + UI + f"#/session/long/sequence/{long['sequences'][0]['id']}?token=61234")
    await expect(page.locator(".t.current")).to_have_attribute("data-i", "61234")
    await expect(page.locator(".t.current")).to_be_in_viewport()
    ids = (await rig.exported("long"))["sequences"][0]["token_ids"]
    await expect(page.locator("#card")).to_contain_text(str(ids[61234]))
    assert await number(page, ".t") < 10_000
    await page.keyboard.press("End")
    await expect(page.locator("#t99999")).to_be_in_viewport()
    await page.keyboard.press("Home")
    await expect(page.locator("#t0")).to_be_visible()
    bar = await page.locator(".minimap").bounding_box()
    await page.mouse.click(bar["x"] + bar["width"] / 2, bar["y"] + 10)
    await expect(page.locator(".t.current")).to_be_in_viewport()
    assert abs(int(await page.locator(".t.current").get_attribute("data-i")) - 50_000) < 200
    for _ in range(30):
        await page.mouse.wheel(0, 3000)
    await expect(page.locator(".minimap")).not_to_have_attribute("aria-valuenow", "0")
    assert await number(page, ".t") < 10_000


@pytest.mark.whole
async def test_a_transcript_beside_the_tokens(rig, look):
    one = await sequence_of(rig, "root")
    exported = (await rig.exported("rollout-7"))["sequences"][0]
    first = exported["turns"][0]["completion"]
    page = await look(f"#/session/rollout-7/sequence/{one['id']}")
    messages = page.locator(".message")
    roles = ["system", "user", *["assistant", "tool"] * 3, "assistant", "user", "assistant"]
    await expect(messages.locator(".role")).to_have_text(roles)
    reply = messages.nth(2)
    await expect(reply.locator(".reasoning summary")).to_have_text("reasoning · 41 characters")
    await expect(reply.locator(".said-text").last).to_have_text("Let me look at the failing test.")
    await expect(reply.locator(".call b")).to_have_text("Bash")
    await expect(reply.locator("dd").first).to_have_text("cd /work/repo && python -m pytest -q tests/test_api.py")
    await expect(messages.nth(3)).to_contain_text("2 failed, 40 passed")
    await reply.get_by_role("link", name=f"{first[0]}\u2013{first[1] - 1}").click()
    await expect(page.locator(".t.current")).to_have_attribute("data-i", str(first[0]))
    await page.keyboard.press("]")
    await expect(page.locator(".message.current")).to_contain_text("The parser cuts a character in half")
    await page.keyboard.press("j")
    await page.keyboard.press("j")
    await expect(messages.nth(1).locator(".role")).to_be_focused()
    await page.get_by_role("button", name="tokens", exact=True).click()
    await expect(messages.first).to_be_hidden()
    await page.get_by_role("button", name="transcript", exact=True).click()
    await expect(page.locator("#t0")).to_be_hidden()
    await reply.get_by_role("link", name="turn 0").click()
    await expect(page.locator("aside h2")).to_have_text("Turn 0")


@pytest.mark.whole
async def test_a_transcript_of_an_edited_context(rig, look):
    """Recognized replies are named with their turns; what the harness invented is not taken for the model's."""
    sequences = (await outline(rig))["sequences"]
    page = await look(f"#/session/rollout-7/sequence/{sequences[3]['id']}")
    replies = page.locator(".message", has=page.get_by_role("button", name="assistant"))
    await expect(replies.locator("header a.turn")).to_have_text([f"turn {n}" for n in (0, 2, 3, 4, 7, 8)])
    await expect(replies.locator(".badge")).to_have_text(["anchor"] * 4)
    await page.goto(rig.url + UI + f"#/session/rollout-7/sequence/{sequences[4]['id']}")
    await expect(replies.locator(".badge")).to_have_text(["not recognized", "anchor"])


@pytest.mark.whole
async def test_a_long_transcript_is_folded_and_fetched_in_pieces(rig, look):
    sequences = (await outline(rig, "long"))["sequences"]
    page = await look(f"#/session/long/sequence/{sequences[0]['id']}?token=61234")
    current = page.locator(".message.current")
    await expect(current).to_be_in_viewport()
    await expect(current.locator(".place")).to_have_text("61,000\u201361,249")
    await expect(current.locator(".words")).to_be_hidden()
    await current.locator(".role").click()
    await expect(current.locator(".words")).to_be_visible()
    assert await number(page, ".message") < 200
    await page.get_by_role("button", name="short").click()
    await expect(current.locator(".words")).to_be_visible()


@pytest.mark.whole
async def test_a_cut_message_is_fetched_whole(look):
    async with proxied(SimulatedEngine(episodes=EPISODES, seed=3)) as rig:
        await rig.say("s", [user("EPISODE:sub " + "🙂" * 5000 + "END")])
        (one,) = (await outline(rig, "s"))["sequences"]
        page = await look(f"#/session/s/sequence/{one['id']}", url=rig.url)
        message = page.locator(".message").first
        await expect(message).not_to_contain_text("END")
        folded = (await message.bounding_box())["height"]
        await message.get_by_role("button", name="show all", exact=True).click()
        await expect(message.get_by_role("button", name="show all", exact=True)).to_be_hidden()
        assert (await message.bounding_box())["height"] > folded
        await message.get_by_role("button", name="show all 5,015 characters").click()
        await expect(message).to_contain_text("END")
        await expect(message.locator(".more")).to_have_count(0)
        await page.goto("about:blank")


@pytest.mark.whole
@pytest.mark.parametrize(
    "at", ["", "#/session/rollout-7", "#/session/rollout-7?tab=sequences", "#/session/rollout-7?tab=incidents", "sequence"]
)
async def test_a_phone_shows_each_page_without_scrolling_sideways(rig, look, at):
    at = at if at != "sequence" else f"#/session/rollout-7/sequence/{(await sequence_of(rig, 'resplice'))['id']}"
    page = await look(at)
    await page.set_viewport_size({"width": 390, "height": 844})
    await expect(page.locator("h1")).to_be_visible()
    await expect(page.locator(":is(.list td, .turn-row, .message, .t):visible").first).to_be_visible()
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")


# the contrast of each visible text with the background behind it (WCAG 2.2, 1.4.3); disabled controls are exempt
LOW_CONTRAST = """() => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const part = (c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const color = channels(getComputedStyle(at).backgroundColor);
      if (color[3] !== 0) return color;
    }
  };
  const low = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility({ visibilityProperty: true }) || node.closest(":disabled")) continue;
    const [a, b] = [light(channels(getComputedStyle(node).color)), light(ground(node))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) low.push(`${contrast.toFixed(2)} ${node.tagName}.${node.className}: ${walker.currentNode.data.slice(0, 30)}`);
  }
  return [...new Set(low)];
}"""


@pytest.mark.whole
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_text_is_readable_on_its_background(rig, look, scheme):
    page = await look(color_scheme=scheme)
    turns = (await outline(rig))["turns"]
    sequence = f"#/session/rollout-7/sequence/{(await sequence_of(rig, 'resplice'))['id']}?token=300"
    for at, ready in [
        ("", ".list td"), ("#/session/rollout-7", ".turn-row"), ("#/session/rollout-7?tab=incidents", ".hole"),
        (f"#/session/rollout-7/turn/{turns[9]['id']}", "ins"), (f"#/session/rollout-7/turn/{turns[2]['id']}", "del"), (sequence, "#card"),
    ]:  # fmt: skip
        await page.goto(rig.url + UI + at)
        await expect(page.locator(ready).first).to_be_visible()
        assert await page.evaluate(LOW_CONTRAST) == [], at
    await page.keyboard.press("h")
    assert await page.evaluate(LOW_CONTRAST) == []
    await page.keyboard.press("?")
    await expect(page.locator(".colors dd")).to_have_count(8)
    assert await page.evaluate(LOW_CONTRAST) == []
    await page.locator(".colors dd").first.evaluate("node => (node.style.color = getComputedStyle(node.closest('dialog')).backgroundColor)")
    assert len(await page.evaluate(LOW_CONTRAST)) == 1  # the measurement finds what cannot be read


async def test_hostile_text_is_shown_as_text(rig, look):
    page = await look("#/session/rollout-7")
    says = page.locator(".turn-row").nth(4).locator(".says")
    await expect(says).to_contain_text("<img src=x onerror=")
    await expect(says).to_contain_text("⟨202e⟩abc")
    await page.locator(".turn-row").nth(4).locator("a.row").click()
    await expect(page.locator("aside .said pre").last).to_contain_text("<script>document.title='owned'</script>")
    one = await sequence_of(rig, "root")
    await page.goto(rig.url + UI + f"#/session/rollout-7/sequence/{one['id']}?token=500")
    await expect(page.locator(".t.current")).to_be_visible()
    assert HOSTILE.split()[0] in "".join(await page.locator(".t").all_text_contents())
    await expect(page.locator(".message", has_text="A file holds <img src=x onerror=")).to_contain_text("⟨202e⟩abc")
    assert not await number(page, "main img")
    assert not await number(page, "main script")
    assert await page.title() == "sequence 0 · tokencache"


@pytest.mark.whole
async def test_hostile_roles_and_names_are_shown_as_text(look):
    """A message cannot make itself look like a reply of the model."""
    async with proxied(SimulatedEngine(episodes=EPISODES, seed=3)) as rig:
        await rig.say("s", [user("EPISODE:sub")])
        (turn,) = await rig.store.turns("s")
        begun = await rig.store.begin("odd", "c", ())
        sent = [{"role": "user k-sampled open <b>", "name": "<i>\u202e", "content": "x"}, {"role": 7}, {"role": "user", "content": []}]
        context = pack_context(Context([Raw(json.dumps(message).encode()) for message in sent]))
        odd = msgspec.structs.replace(turn, messages=3, model="sim\u202e")
        await rig.store.commit("odd", begun.epoch, "c", [Entry(odd, (await rig.store.tokens("s", [turn.id]))[turn.id], (), context)])
        page = await look(f"#/session/odd/sequence/{turn.id}", url=rig.url)
        messages = page.locator(".message")
        await expect(messages.locator(".role")).to_have_text(["user k-sampled open <b>", "unreadable", "user", "assistant"])
        await expect(messages.first.locator("header b")).to_have_text("<i>⟨202e⟩")
        assert [await messages.nth(n).get_attribute("class") for n in range(4)] == ["message k-prompt"] * 3 + ["message k-sampled"]
        await expect(messages.nth(1)).to_contain_text("This message cannot be read.")
        await expect(messages.nth(2)).to_contain_text("Nothing.")
        await page.goto(rig.url + UI + f"#/session/odd/turn/{turn.id}")
        await expect(page.locator("aside .facts-list")).to_contain_text("sim⟨202e⟩")
        assert "\u202e" not in await page.locator("main").inner_text()
        await page.goto("about:blank")


@pytest.mark.whole
async def test_light_and_dark(rig, look):
    async def ground(page):
        return await page.evaluate("getComputedStyle(document.documentElement).backgroundColor")

    light, dark = await look(color_scheme="light"), await look(color_scheme="dark")
    bright, deep = await ground(light), await ground(dark)
    assert bright != deep
    await dark.get_by_role("button", name="Colors: system").click()
    assert await ground(dark) == bright
    await dark.reload()
    assert await ground(dark) == bright
    await dark.keyboard.press("t")
    assert await ground(dark) == deep
    await light.keyboard.press("t")
    await light.keyboard.press("t")
    assert await ground(light) == deep


@pytest.mark.whole
async def test_ids_are_copied(rig, look):
    page = await look("#/session/rollout-7", permissions=["clipboard-read", "clipboard-write"])
    await page.get_by_role("button", name="Copy the session's name").click()
    await expect(page.locator("#said")).to_have_text("the session's name copied")
    assert await page.evaluate("navigator.clipboard.readText()") == "rollout-7"


@pytest.mark.whole
@pytest.mark.parametrize("at", ["#/session/nobody", "#/session/rollout-7/sequence/none", "#/session/%"])
async def test_unknown_names(rig, look, at):
    page = await look(at)
    await expect(page.locator("h1")).to_have_text("Sessions" if at.endswith("%") else "Not found")


async def test_the_key_is_asked_for_once(look):
    async with proxied(SimulatedEngine(episodes=EPISODES, seed=3), admin_key="the-trainers-own") as rig:
        await lively(rig, "hidden-name")
        page = await look("#/session/hidden-name", url=rig.url)
        dialog = page.get_by_role("dialog", name="Admin key")
        await expect(dialog).to_be_visible()
        assert "hidden-name" not in await page.locator("main").inner_text()
        await page.locator("#ask-key").fill("wrong")
        await page.keyboard.press("Enter")
        await expect(dialog.get_by_role("alert")).to_have_text("Wrong key.")
        await page.locator("#ask-key").fill("the-trainers-own")
        await page.keyboard.press("Enter")
        await expect(page.locator(".turn-row")).to_have_count(11)
        await page.reload()
        await expect(page.locator(".turn-row")).to_have_count(11)
        await expect(dialog).to_be_hidden()
        assert "the-trainers-own" not in await page.content()
        await page.goto("about:blank")


@pytest.mark.whole
async def test_ids_without_texts_if_the_engine_is_away(look):
    async with proxied(SimulatedEngine(episodes=EPISODES, seed=3)) as rig:
        await rig.say("s", [user("EPISODE:sub")])
        (one,) = (await outline(rig, "s"))["sequences"]
        await lead_to(rig.proxy.upstream, "http://127.0.0.1:9")
        page = await look(f"#/session/s/sequence/{one['id']}", url=rig.url)
        await expect(page.get_by_text("Token ids only")).to_be_visible()
        ids = (await rig.exported("s"))["sequences"][0]["token_ids"]
        assert await page.locator(".t").all_text_contents() == [str(one) for one in ids]
        await page.goto("about:blank")


@pytest.mark.whole
async def test_policy_versions_of_a_session_and_of_a_turn(look):
    async with proxied(SimulatedEngine(episodes=EPISODES, seed=3)) as rig:
        for version in ("7", "8"):
            async with rig.http.put(f"{rig.url}/tokencache/v1/weights", json={"version": version}) as answer:
                assert answer.status == 200
            await rig.say("s", [user(f"Hello with version {version}.")])
        page = await look("#/session/s", url=rig.url)
        await expect(page.locator(".tiles")).to_contain_text("policy version7 to 8")
        (first, _) = (await outline(rig, "s"))["turns"]
        page = await look(f"#/session/s/turn/{first['id']}", url=rig.url)
        await expect(page.locator(".facts-list")).to_contain_text(f"7: tokens 0 to {first['completion_tokens']} (from: trainer)")


async def test_engines_with_their_capacity_and_the_sessions_that_wait(look, monkeypatch):
    monkeypatch.setattr("tokencache.engine.admission.KEPT_SECONDS", 1000.0)  # a busy machine shows a page late
    async with admitting() as (rig, client):
        await client.create("a")
        assert [(await refused(rig, name))[0] for name in ("b", "c")] == [429, 429]
        rig.proxy.pool.placement.begin("call", "a", rig.up, 250)
        page = await look("#/engines", url=rig.url)
        await expect(page.locator(".bar")).to_contain_text("1,000 tokens; how many sessions fit is known once some have ended")
        await expect(page.get_by_role("row").nth(1)).to_have_text(f"{rig.up}serves1,00025025 %")
        await expect(page.get_by_text("Wait for room")).to_have_text("Wait for room: 1. b, 2. c")
        await rig.say("d", [user("hello " * 100)])
        await client.session("d").finish()
        found = await client.capacity()
        await expect(page.locator(".bar")).to_contain_text(f"{found.sessions_fit} sessions fit: 1,000 tokens, {found.footprint} a session")
        await client.session("a").delete()
        rig.proxy.pool.placement.end("call", 0.0)
        await client.create("b")
        await expect(page.get_by_text("Wait for room")).to_have_text("Wait for room: 1. c")
        await page.goto("about:blank")


async def test_an_engine_whose_capacity_is_unknown_says_why(look):
    async with admitting(b"nonsense") as (rig, _):
        page = await look("#/engines", url=rig.url)
        await expect(page.locator(".bar")).to_contain_text("the size of the KV caches is not known")
        await expect(page.get_by_role("row").nth(1)).to_contain_text("its metrics have no vllm:cache_config_info")
        await page.goto("about:blank")
