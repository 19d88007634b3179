"""The kind of log probabilities: the probe detects the mode in which a real vLLM was started."""

import asyncio
import json

import msgspec
import pytest
from conftest import MAX_MODEL_LEN, proxying
from episodes import EPISODES
from rig.model import make_model
from rig.server import MODEL, VllmServer
from typer.testing import CliRunner

from tests.scoring.kit import Recorder, turn
from tokencache.cli import app
from tokencache.engine.probe import Capability
from tokencache.store.memory import MemoryStore
from tokencache.testing import SimulatedEngine
from tokencache.testing.tokenizer import build_tokenizer

KINDS = {"raw_logprobs": "raw", "processed_logprobs": "processed"}
"""The suite's own server runs in the first one.

(`raw_logits` and `processed_logits` were tested on a real 0.32, too: see docs/sampling.md; two more server starts are not worth it here.)
"""


@pytest.fixture(params=KINDS, scope="module")  # so that each server starts once
def mode(request):
    return request.param


@pytest.fixture
def real(mode, servers, tmp_path_factory):
    """URL of a server in this mode."""

    if mode == "raw_logprobs":
        return servers.use("own").url

    def start():
        tokenizer = tmp_path_factory.mktemp("tokenizer")
        build_tokenizer().save(tokenizer)
        model = make_model(tokenizer, tmp_path_factory.mktemp("model"))
        folder = tmp_path_factory.mktemp("vllm")
        return VllmServer(model, EPISODES, max_model_len=MAX_MODEL_LEN, workdir=folder, options=["--logprobs-mode", mode])

    return servers.keep(mode, start).url


async def found(url) -> tuple[Capability, dict]:
    """What the proxy detects about an engine, and a turn that it records there."""
    async with proxying(url, MemoryStore()) as proxied:
        await proxied.harness("s", temperature=0.5, max_tokens=16).say("Say something.").turn()
        async with proxied.http.get(f"{proxied.url}/tokencache/v1/sessions/s/turns") as answer:
            (turn,) = (await answer.json())["turns"]
        return (await proxied.proxy.engine.model()).capability, turn


async def test_the_probe_detects_the_mode_of_real_and_simulated_engines(mode, real, figures):
    async with SimulatedEngine(model=MODEL, logprobs_mode=mode).serve() as simulated:
        for url in (real, simulated):
            capability, turn = await found(url)
            assert (capability.logprobs, turn["logprob_kind"]) == (KINDS[mode], KINDS[mode])
            assert ("raw-logprobs" in turn["marks"]) == (KINDS[mode] == "raw"), "the temperature was 0.5"
            figures.append(f"{mode} at {'vLLM' if url == real else 'the simulated engine'}: {capability.logprobs_seen}")


async def test_values_after_temperature_that_are_marked_as_the_models_own(mode, real, figures, tmp_path):
    async with proxying(real, MemoryStore()) as proxied:
        recorder = Recorder(proxied.post, MODEL)
        rollouts = [
            await recorder.rollout(turn([300 + n, 400, 500], {"temperature": 0.7, "top_p": top_p, "ignore_eos": True, "max_tokens": 16}))
            for n, top_p in enumerate((1.0, 0.9))
        ]
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(rollout) + b"\n" for rollout in rollouts))
    arguments = ["audit", str(path), "--engine", real, "--any-version", "--json"]
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    report = json.loads(result.stdout)
    assert [finding["cause"] for finding in report["findings"]] == ([] if KINDS[mode] == "raw" else ["mode", "mode"])
    assert result.exit_code == bool(report["findings"])
    figures.append(f"{mode}, temperature 0.7, audited as raw: mean {report['mean']:.2g}, max {report['max']:.2g}")
