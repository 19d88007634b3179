"""Claude Code with two models on two real vLLMs: the calls of its small model go to the second one, in one session.

The engines' own logs are the reference. A sub-agent runs on what Claude Code calls "haiku", its small model, which settings map to ours.
"""

import json

import pytest
from checks import find_program
from conftest import proxying
from lab import CONTEXT, SESSION, read_generations, run_harness
from programs import Step, claude
from rig.exported import get_json, trajectory
from rig.model import make_model
from rig.server import MODEL, VllmServer, all_started
from structures import agent, looking, say, shell

from tests.support.waiting import until
from tokencache.store.memory import MemoryStore

SMALL = "small"
SMALL_AGENT = {"subagent_type": "general-purpose", "model": "haiku", "run_in_background": False}
EPISODES = {
    "claude-code_small": [
        say("\nSomebody else can look.\n", "  Sending one ☕.\n", agent("Agent", "claude-code_small-a", **SMALL_AGENT)),
        say("\nIt is back.\n", "", shell("Bash", "ls -1")),
        say("\nDone.\n", "\nNothing found ✅.  "),
    ],
    "claude-code_small-a": looking("Bash", 2),
}
SETTINGS = {"env": {"ANTHROPIC_DEFAULT_HAIKU_MODEL": SMALL, "ANTHROPIC_SMALL_FAST_MODEL": SMALL, "CLAUDE_CODE_SUBAGENT_MODEL": ""}}


@pytest.fixture
def two_models(servers, tmp_path_factory):
    """Servers of two models; the episodes are the same, so either could have answered any call."""
    servers.stop()
    made = []
    for name in (MODEL, SMALL):
        folder = tmp_path_factory.mktemp(name)
        model = make_model(servers.tokenizer_dir("own"), folder / "model")
        episodes = {episode: {"turns": turns} for episode, turns in EPISODES.items()}
        log = folder / "ground_truth.jsonl"
        made.append(VllmServer(model, episodes, max_model_len=CONTEXT, workdir=folder, ground_truth=log, name=name))
    with all_started(*made):
        yield made


async def test_the_small_models_calls_go_to_the_second_engine(two_models, tmp_path, figures):
    program, (large, small) = find_program("claude-code"), two_models
    async with proxying(f"{large.url},{small.url}", MemoryStore(), not_trainable=SMALL) as proxied:

        async def both_serve():
            async with proxied.http.get(f"{proxied.url}/readyz") as answer:  # 503 at first
                return [one["serves"] for one in (await answer.json()).get("engines", ())] == [True, True]

        await until(both_serve)
        before = len(await read_generations(small))
        steps = [Step(claude("EPISODE:claude-code_small Send one to look around.", "--settings", json.dumps(SETTINGS)))]
        run = await run_harness(program, steps, large, tmp_path, proxied.url)
        assert not run.ended[-1].returncode, run.output
        sampled = {MODEL: run.generations, SMALL: (await read_generations(small))[before:]}
        exported = await trajectory(proxied, SESSION)
        rows = (await get_json(proxied.http, f"{proxied.url}/tokencache/v1/sessions/{SESSION}/trajectories?format=trl"))["rows"]
    assert exported["complete"], exported["incidents"]
    recorded = {MODEL: [], SMALL: []}
    for sequence in exported["sequences"]:
        assert {turn["model"] for turn in sequence["turns"]} == {sequence["model"]}
        for turn in sequence["turns"]:
            start, end = turn["completion"]
            recorded[sequence["model"]].append((sequence["token_ids"][:start], sequence["token_ids"][start:end]))
            assert set(sequence["loss_mask"][start:end]) == {int(sequence["model"] == MODEL)}
    for model, generations in recorded.items():
        log = [(list(prompt), list(ids)) for prompt, ids in sampled[model]]
        assert generations
        assert all(one in log for one in generations)  # the proxy's own questions about the template are in the log, too
    found = [(sequence["model"], sequence["start"], len(sequence["turns"])) for sequence in exported["sequences"]]
    assert sorted(found) == [(SMALL, "root", 3), (MODEL, "root", 3)]
    model_of = {turn["turn"]: sequence["model"] for sequence in exported["sequences"] for turn in sequence["turns"]}
    (link,) = exported["links"]
    assert (link["kind"], [model_of[turn] for turn in link["sources"]], model_of[link["turn"]]) == ("delegation", [SMALL], MODEL)
    assert len(rows) == 1, "the small model is not trained"
    figures.append(f"Claude Code {program.version} with two models: {found}")
