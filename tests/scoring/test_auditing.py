"""An audit finds nothing where the weights are those that sampled, and names what is wrong where they are not."""

import asyncio
import json

import msgspec
import pytest
from typer.testing import CliRunner

from tests.scoring.kit import turn
from tokencache.cli import app
from tokencache.testing import SimulatedEngine

PROMPT = list(range(300, 340))
NEXT = list(range(400, 420))


def saved(path, *rollouts):
    """A file with the rollouts."""
    path.write_bytes(b"".join(msgspec.json.encode(rollout) + b"\n" for rollout in rollouts))
    return str(path)


async def audit(path, url, *options, code=0):
    arguments = ["audit", path, "--engine", url, "--json", *options]
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return json.loads(result.stdout)


def found(report):
    return {(finding["session"], finding["turn"]): finding["cause"] for finding in report["findings"]}


async def test_the_same_weights_have_no_difference(serve, tmp_path):
    _, url, recorder = await serve()
    rollouts = [await recorder.rollout(turn(PROMPT, version="v1"), turn(NEXT, version="v1")) for _ in range(3)]
    report = await audit(saved(tmp_path / "a.jsonl", *rollouts), url, "--version", "v1")
    assert (report["spans"], report["rollouts"], report["max"], report["findings"]) == (6, 3, 0.0, [])
    assert report["tokens"] == sum(sum(rollout.sequences[0].loss_mask) for rollout in rollouts)
    assert report["histogram"][0] == {"up_to": 0.0, "tokens": report["tokens"]}
    assert report["floor"] == {"max": 0.0, "mean": 0.0}


async def test_other_weights_under_the_same_label(serve, tmp_path):
    engine, url, recorder = await serve()
    rollout = await recorder.rollout(turn(PROMPT, version="v1"), turn(NEXT, version="v1"))
    engine.weights.loaded = "v2"
    report = await audit(saved(tmp_path / "a.jsonl", rollout), url, "--version", "v1", code=1)
    assert list(found(report).values()) == ["weights", "weights"]
    assert all(finding["mean"] > finding["limit"] == 0.0 for finding in report["findings"])


async def test_a_turn_on_a_stale_prefix(serve, tmp_path):
    engine, url, recorder = await serve()

    async def update():
        engine.weights.loaded = "v2"

    stale = await recorder.rollout(turn(PROMPT, version="v1"), update, turn(NEXT, version="v2"))
    fresh = await recorder.rollout(turn(NEXT, version="v2"), turn(NEXT, version="v2"))
    path = saved(tmp_path / "a.jsonl", stale, fresh)
    report = await audit(path, url, "--version", "v2", code=1)
    assert found(report) == {(stale.session, stale.sequences[0].turns[1].turn): "cache"}
    assert [(one["session"], one["reason"]) for one in report["not_audited"]] == [
        (stale.session, "version v1 sampled it, and the engine has v2")
    ]
    alone = await audit(saved(tmp_path / "b.jsonl", stale), url, "--version", "v2", code=1)
    assert list(found(alone).values()) == ["cache"]


async def test_a_salt_for_the_version_leaves_nothing_to_find(serve, tmp_path):
    engine, url, recorder = await serve()

    async def update():
        engine.weights.loaded = "v2"

    rollout = await recorder.rollout(
        turn(PROMPT, {"cache_salt": "v1"}, version="v1"), update, turn(NEXT, {"cache_salt": "v2"}, version="v2")
    )
    report = await audit(saved(tmp_path / "a.jsonl", rollout), url, "--version", "v2")
    assert (report["spans"], report["max"]) == (1, 0.0)


@pytest.mark.parametrize("how", ["overwritten", "replaced"])
async def test_an_adapter_that_was_replaced(serve, tmp_path, how):
    engine, url, recorder = await serve()
    engine.weights.adapters["policy"] = "/adapters/a"
    rollout = await recorder.rollout(turn(PROMPT, model="policy", version="policy@/adapters/a"))
    clean = await audit(saved(tmp_path / "a.jsonl", rollout), url, "--any-version")
    assert clean["max"] == 0.0
    if how == "overwritten":
        engine.weights.overwritten["/adapters/a"] = "b"
    else:
        engine.weights.adapters["policy"] = "/adapters/b"
    report = await audit(saved(tmp_path / "a.jsonl", rollout), url, "--any-version", code=1)
    assert list(found(report).values()) == ["adapter"]


@pytest.mark.parametrize("temperature", [0.7, 1.3])
async def test_processed_values_that_are_marked_raw(serve, tmp_path, temperature):
    _, _, processed = await serve(SimulatedEngine(seed=5, logprobs_mode="processed_logprobs"))
    _, url, raw = await serve()
    sampling = {"temperature": temperature}
    wrong = await processed.rollout(turn(PROMPT, sampling, version="v1"))
    right = await raw.rollout(turn(PROMPT, sampling, version="v1"))
    report = await audit(saved(tmp_path / "a.jsonl", wrong, right), url, "--version", "v1", code=1)
    assert list(found(report)) == [(wrong.session, wrong.sequences[0].turns[0].turn)]
    assert list(found(report).values()) == ["mode"]


async def test_other_weights_at_a_temperature_are_not_taken_for_another_mode(serve, tmp_path):
    engine, url, recorder = await serve()
    rollout = await recorder.rollout(turn(PROMPT, {"temperature": 0.7}, version="v1"))
    engine.weights.loaded = "v2"
    report = await audit(saved(tmp_path / "a.jsonl", rollout), url, "--version", "v1", code=1)
    assert list(found(report).values()) == ["weights"]


async def test_the_engines_own_label_is_used_and_default_is_none(serve, tmp_path):
    engine, url, recorder = await serve()
    path = saved(tmp_path / "a.jsonl", await recorder.rollout(turn(PROMPT, version="v1")))
    result = await asyncio.to_thread(CliRunner().invoke, app, ["audit", path, "--engine", url])
    assert result.exit_code == 1
    assert "does not report which version" in result.stderr
    engine.weights.label = "v1"
    assert (await audit(path, url))["spans"] == 1
    engine.weights.label = "v2"
    report = await audit(path, url, code=1)
    assert (report["spans"], report["not_audited"][0]["reason"]) == (0, "version v1 sampled it, and the engine has v2")


async def test_weights_that_change_during_the_audit(serve, tmp_path):
    engine, url, recorder = await serve()
    path = saved(tmp_path / "a.jsonl", await recorder.rollout(turn(PROMPT, version="v1")))
    engine.completions.clear()
    engine.weights.label = "v1"

    def fault(route, body):
        engine.weights.label = "v2" if len(engine.completions) > 3 else "v1"

    engine.choose_fault = fault
    result = await asyncio.to_thread(CliRunner().invoke, app, ["audit", path, "--engine", url])
    assert result.exit_code == 1
    assert "changed from version 'v1' to 'v2' meanwhile" in result.stderr


async def test_a_model_that_the_engine_does_not_serve_and_a_sequence_that_it_refuses(serve, tmp_path):
    _, url, recorder = await serve()
    rollout = await recorder.rollout(turn(PROMPT, version="v1"))
    path = saved(tmp_path / "a.jsonl", rollout)
    assert (await audit(path, url, "--version", "v1", "--model", "sim"))["max"] == 0.0
    report = await audit(path, url, "--version", "v1", "--model", "other", code=1)
    assert [one["reason"] for one in report["not_audited"]] == ["the engine does not serve the model other"]
    longer = await recorder.rollout(turn(PROMPT * 5, version="v1"))
    path = saved(tmp_path / "b.jsonl", rollout, longer)
    report = await audit(path, url, "--version", "v1", "--max-tokens-at-once", "200")
    assert (report["spans"], [one["session"] for one in report["not_audited"]]) == (1, [longer.session])
    assert "--max-tokens-at-once" in report["not_audited"][0]["reason"]


async def test_the_report_in_words(serve, tmp_path):
    engine, url, recorder = await serve()
    rollout = await recorder.rollout(turn(PROMPT, version="v1"), turn(NEXT))
    path = saved(tmp_path / "a.jsonl", rollout)
    engine.weights.loaded = "v2"
    result = await asyncio.to_thread(CliRunner().invoke, app, ["audit", path, "--engine", url, "--version", "v1"])
    assert result.exit_code == 1
    for words in ("noise of the engine itself: mean 0, max 0", "1 span: weights: the engine has other weights", "up to 1 "):
        assert words in result.stdout, result.stdout
    assert "not audited: 1 span: its version is not known (--any-version audits it)" in result.stdout
    assert f"{rollout.session}, turn {rollout.sequences[0].turns[0].turn}, tokens 0 to" in result.stdout
