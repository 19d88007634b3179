"""Scores and audits on a real vLLM whose weights change: exact where they are the same, found and named where they are not."""

import asyncio
import json

import aiohttp
import msgspec
import pytest
from conftest import proxying
from rig.model import make_adapter, make_model
from rig.server import MODEL
from typer.testing import CliRunner

from tests.scoring.kit import Recorder, turn
from tokencache.cli import app
from tokencache.client import AsyncClient
from tokencache.store.memory import MemoryStore

PROMPT = [300 + 7 * n % 400 for n in range(300)]
NEXT = [310 + 11 * n % 300 for n in range(20)]
LONG = {"ignore_eos": True}


class Weights:
    """The server, and what a trainer does to it."""

    def __init__(self, http, server, folder):
        self.http, self.server, self.url, self.folder = http, server, server.url, folder
        self.recorder = Recorder(self.post, MODEL)

    async def post(self, path, body=None):
        async with self.http.post(self.url + path, json=body) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json() if answer.content_type == "application/json" else None

    async def load(self, model):
        await self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(model)}})

    async def load_adapter(self, seed):
        make_adapter(self.folder / "adapter", seed=seed)
        await self.post("/v1/load_lora_adapter", {"lora_name": "policy", "lora_path": str(self.folder / "adapter"), "load_inplace": True})


@pytest.fixture
async def weights(weights_server, tmp_path):
    async with aiohttp.ClientSession() as http:
        made = Weights(http, weights_server, tmp_path)
        yield made
        await made.load(weights_server.model_dir)
        await made.post("/reset_prefix_cache")


async def run(*arguments, code=0):
    result = await asyncio.to_thread(CliRunner().invoke, app, [*map(str, arguments), "--max-requests-at-once", "1"])
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result.stdout


async def audit(weights, folder, *rollouts, version="", code=0):
    path = folder / "rollouts.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(rollout) + b"\n" for rollout in rollouts))
    options = ["--version", version] if version else ["--any-version"]
    return json.loads(await run("audit", path, "--engine", weights.url, "--json", *options, code=code))


async def test_sessions_of_a_proxy_have_the_scores_that_were_recorded(weights, tmp_path, figures):
    async with proxying(weights.url, MemoryStore()) as proxied:
        harness = proxied.harness("s", temperature=0.7).say("EPISODE:hello")
        await harness.turn()
        await harness.say("And now?").turn()
        report = json.loads(await run("audit", "s", "--engine", weights.url, "--any-version", "--json", "--proxy", proxied.url))
        assert (report["max"], report["floor"]["max"], report["findings"], report["not_audited"]) == (0.0, 0.0, [], [])
        assert report["spans"] == 2
        to = tmp_path / "s.jsonl"
        await run("score", "s", "--engine", weights.url, "--top", 3, "--to", to, "--proxy", proxied.url)
    (row,) = map(json.loads, to.read_text().splitlines())
    trained = [place for place, mask in enumerate(row["loss_mask"]) if mask]
    assert len(trained) == report["tokens"] > 20
    assert [row["score"][place] for place in trained] == [row["logprobs"][place] for place in trained]
    assert row["score_top_ids"][0] == []
    assert all(len(ids) == 3 for ids in row["score_top_ids"][1:])
    assert all(values == sorted(values, reverse=True) for values in row["score_top_logprobs"])
    figures.append(f"score and audit of {report['tokens']} tokens: {report['max']} off")


HINT = {"role": "user", "content": "Hint: the answer is in naïve ☕.txt, not in the README."}


def insert(at=None, message=HINT):
    return {"insert": [message]} | ({} if at is None else {"at": at})


async def forced(proxied, prompt, reply):
    """The log probabilities of a reply that the engine is forced to sample after a prompt, one token at a time."""
    found = []
    for n, token in enumerate(reply):
        body = {"model": MODEL, "prompt": prompt + reply[:n], "max_tokens": 1, "logprobs": 0, "allowed_token_ids": [token]}
        (choice,) = (await proxied.post("/v1/completions", {**body, "temperature": 1.0, "return_token_ids": True}))["choices"]
        assert choice["token_ids"] == [token]
        found += choice["logprobs"]["token_logprobs"]
    return found


async def test_scores_after_edited_messages_are_those_of_forced_decoding(weights, tmp_path, figures):
    """Without an edit they are what was recorded; with a hint, what the engine gives for the same ids when it decodes them."""
    async with proxying(weights.url, MemoryStore()) as proxied, AsyncClient(proxied.url) as client:
        harness = proxied.harness("s", temperature=0.7).say("EPISODE:hello")
        await harness.turn()
        await harness.say("And now?").turn()
        session, asked = client.session("s"), harness.messages
        recorded = (await session.score()).turns
        assert [(turn.refused, len(turn.token_ids) > 5) for turn in recorded] == [("", True)] * 2
        same = (await session.score([{"at": 1, "replace": [asked[1]]}], top=3)).turns
        for turn, before in zip(same, recorded, strict=True):
            assert (turn.edits, turn.refused) == ([0], "")
            assert turn.prompt_token_ids == before.prompt_token_ids
            assert turn.score == pytest.approx(turn.logprobs, abs=1e-5)
            assert {len(top) for top in (*turn.top_ids, *turn.top_logprobs)} == {3}
            assert all(
                turn.score[n] == values[ids.index(token)]
                for n, (token, ids, values) in enumerate(zip(turn.token_ids, turn.top_ids, turn.top_logprobs, strict=True))
                if token in ids
            )
        off = max(abs(a - b) for turn in recorded for a, b in zip(turn.score, turn.logprobs, strict=True))
        assert off <= 1e-5
        worst, changed = 0.0, 0.0
        for edit in (insert(at=1), insert(), insert(at=1, message={"role": "system", "content": HINT["content"]})):
            hinted = (await session.score([edit])).turns
            assert [turn.refused for turn in hinted] == ["", ""]
            first = [*asked[:2], HINT] if "at" not in edit else [asked[0], edit["insert"][0], asked[1]]
            rendered = await proxied.post("/tokenize", {"model": MODEL, "messages": first, "add_generation_prompt": True})
            assert hinted[0].prompt_token_ids == rendered["tokens"]
            assert hinted[1].token_ids == recorded[1].token_ids
            reply, prompt = hinted[0].token_ids, hinted[1].prompt_token_ids
            assert any(prompt[n : n + len(reply)] == reply for n in range(len(prompt))), "the first reply has its exact ids"
            if "at" in edit:  # the rest of the second prompt is as it was
                front = len(recorded[0].prompt_token_ids)
                assert prompt == hinted[0].prompt_token_ids + recorded[1].prompt_token_ids[front:]
            for turn in hinted:
                values = await forced(proxied, turn.prompt_token_ids, turn.token_ids)
                assert turn.score == pytest.approx(values, abs=1e-5)
                worst = max(worst, *(abs(a - b) for a, b in zip(turn.score, values, strict=True)))
                changed = max(changed, *(abs(a - b) for a, b in zip(turn.score, turn.logprobs, strict=True)))
        assert changed > 1e-3, "the hint changes the scores"
        to, edits = tmp_path / "hinted.jsonl", tmp_path / "edits.json"
        edits.write_text(json.dumps({"edits": [insert()]}))
        await run("score", "s", "--edit", edits, "--engine", weights.url, "--to", to, "--proxy", proxied.url)
        rows = [json.loads(line) for line in to.read_text().splitlines()]
        expected = (await session.score([insert()])).turns
        assert [row["score"][-len(turn.score) :] for row, turn in zip(rows, expected, strict=True)] == [turn.score for turn in expected]
    figures.append(
        f"without an edit: {off:.2g} off what was recorded; with a hint: {worst:.2g} off forced decoding, {changed:.2g} off the record"
    )


async def test_other_weights_a_stale_prefix_and_a_salt(weights, tmp_path, figures):
    other = make_model(weights.server.tokenizer_dir, tmp_path / "v2", change=0.001)

    async def update():
        await weights.load(other)

    async def back():
        await weights.load(weights.server.model_dir)

    recorder = weights.recorder
    salted = await recorder.rollout(
        turn(PROMPT, {**LONG, "cache_salt": "1"}, version="v1"), update, turn(NEXT, {**LONG, "cache_salt": "2"}, version="v2")
    )
    await back()
    stale = await recorder.rollout(turn(PROMPT, LONG, version="v1"), update, turn(NEXT, LONG, version="v2"))
    report = await audit(weights, tmp_path, salted, stale, version="v2", code=1)
    (finding,) = report["findings"]
    assert (finding["session"], finding["turn"], finding["cause"]) == (stale.session, stale.sequences[0].turns[1].turn, "cache")
    assert finding["mean"] > 1e-4
    assert [one["session"] for one in report["not_audited"]] == [salted.session, stale.session]
    figures.append(f"stale prefix, weights 0.001 apart: mean {finding['mean']:.2g}, max {finding['max']:.2g}")
    wrong = await audit(weights, tmp_path, salted, stale, version="v1", code=1)
    assert [found["cause"] for found in wrong["findings"]] == ["weights", "weights"]
    await back()
    assert (await audit(weights, tmp_path, salted, stale, version="v1"))["max"] == 0.0


async def test_an_adapter_that_was_replaced_in_place_or_overwritten(weights, tmp_path, figures):
    await weights.load_adapter(seed=1)
    rollout = await weights.recorder.rollout(turn(PROMPT, LONG, model="policy", version="policy@1"))
    assert (await audit(weights, tmp_path, rollout))["max"] == 0.0
    await weights.load_adapter(seed=2)
    replaced = await audit(weights, tmp_path, rollout, code=1)
    await weights.load_adapter(seed=1)
    assert (await audit(weights, tmp_path, rollout))["max"] == 0.0
    make_adapter(tmp_path / "adapter", seed=2)  # nobody calls the server: it reads the file again for each request
    overwritten = await audit(weights, tmp_path, rollout, code=1)
    for report in (replaced, overwritten):
        assert [found["cause"] for found in report["findings"]] == ["adapter"]
        figures.append(f"another adapter: mean {report['mean']:.2g}, max {report['max']:.2g}")
    assert replaced["max"] == overwritten["max"]
    await weights.post("/v1/unload_lora_adapter", {"lora_name": "policy"})
