"""Calls through the proxy: the level that its probe finds on each version, and the resulting sessions."""

import itertools

import pytest
from rig.exported import assert_exported, generations, get_json, trajectory, turns
from rig.harness import TOOLS

from tokencache import metrics
from tokencache_vllm.images import VERSIONS as IMAGE_VERSIONS
from tokencache_vllm.prefixes import VERSIONS as PREFIX_VERSIONS

TURNS = 5
IGNORED = "supplied ids are ignored"


def named_prompts():
    """How many exact prompts were named by a hash so far."""
    return metrics.REGISTRY.get_sample_value("tokencache_prefixes_total", {"how": "named"}) or 0


async def test_the_probe_finds_the_level_by_itself(proxied, case, row):
    (found,) = (await get_json(proxied.http, f"{proxied.url}/readyz"))["engine"]["models"]
    assert found["version"].startswith(case.version)
    assert found["tokenizes"] is True
    assert (found["level"], found["honours_ids"], found["why"]) == (("exact", True, "") if case.exact else ("record", False, IGNORED))
    assert found["prefixes"] is (case.plugin and case.number in PREFIX_VERSIONS), found["prefixes_why"]
    row.cells["level"] = f"`{found['level']}`"
    row.cells["prefixes"] = "yes" if found["prefixes"] else "no"


def test_the_plugin_logs_what_it_wrapped(server, case):
    logged_lines = [line.partition("tokencache: ")[2] for line in server.log.read_text().splitlines() if "tokencache: " in line]
    if not case.plugin:
        assert logged_lines == []
    elif case.native:
        images = [f"vLLM {case.version} now accepts tokencache_prompt: exact prompts with images"] * (case.number in IMAGE_VERSIONS)
        prefixes = ["accepts tokencache_prefix: prefixes by hash, 268435456 bytes kept"] * (case.number in PREFIX_VERSIONS)
        assert logged_lines == [f"vLLM {case.version} accepts prompt_token_ids by itself; nothing was changed", *images, *prefixes]
    else:
        (line,) = logged_lines
        assert line.startswith(f"vLLM {case.version} now accepts prompt_token_ids and required_prefix_token_ids; wrapped vllm.")
        assert line.endswith(".preprocess_chat")


async def test_without_the_plugin_a_required_prefix_is_ignored(proxied, case, row):
    if case.plugin and not case.native:
        pytest.skip("the plugin accepts it: test_direct.py")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    plain, given = [await proxied.post("/tokenize", {"messages": messages, **more}) for more in ({}, {"required_prefix_token_ids": [5]})]
    assert given == plain
    row.cells["prefix"] = "ignored"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("episode", ["agent", "talk", "odd", "free"])
async def test_chat(proxied, case, row, episode, stream):
    """Judged from the ids that the engine returned to the harness; then the export is compared with them."""
    words = "Say whatever you like." if episode == "free" else f"EPISODE:{episode} please"
    more = {"max_tokens": 30, "seed": 5} if episode == "free" else {}
    before = named_prompts()
    harness = proxied.harness(f"chat-{episode}-{stream}", stream=stream, tools=TOOLS, **more).say(words)
    for n in range(TURNS):
        await harness.turn(then=f"Go on, please: {n} ☕")
    row.count("chat, streamed" if stream else "chat", *harness.contiguous)
    assert named_prompts() - before == (TURNS - 1 if case.plugin and case.number in PREFIX_VERSIONS else 0)
    found = [(turn["match"], turn["reason"]) for turn in await turns(proxied, harness.session)]
    if case.exact:
        assert harness.contiguous == (TURNS - 1, TURNS - 1)
        assert found == [("root", ""), *[("continue", "")] * (TURNS - 1)]
        assert_exported(await trajectory(proxied, harness.session), harness.answered)
    else:
        assert harness.contiguous[0] < TURNS - 1
        assert "continue" not in {match for match, _ in found}
        assert_exported(await trajectory(proxied, harness.session), harness.answered, sequences=TURNS)


@pytest.mark.parametrize("dialect", ["messages", "responses"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_other_dialects(proxied, agents, ground_truth, case, row, *, dialect, stream):
    """Judged from the engine's own log: these dialects return no ids."""
    agent = agents(f"{dialect}-{stream}").say("EPISODE:spoken please")
    for _ in range(TURNS):
        await agent.turn(dialect, stream=stream)
    logged = [(prompt, sampled) for prompt, sampled in await ground_truth() if "EPISODE:" in await proxied.text(prompt)]
    extending = [later[0][: len(p) + len(s)] == p + s for (p, s), later in itertools.pairwise(logged)]
    row.count(dialect, sum(extending), len(extending))
    exported = await trajectory(proxied, agent.session)
    assert exported["complete"]
    assert sorted((list(p), list(s)) for p, s, _ in generations(exported)) == sorted(logged)
    assert len(logged) == TURNS
    assert all(extending) if case.exact else not all(extending)
