"""Runs the program of docs/integrations/trl.md: TRL's own trainer, a real vLLM, and new weights at each step."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

import pytest
from conftest import proxying, trl_venv
from rig.examples import run_example
from rig.server import REPOSITORY, VllmServer, default_venv

from tokencache.client import AsyncClient
from tokencache.store.memory import MemoryStore
from tokencache.testing import SimulatedEngine

STEPS = 4
MAKE_MODEL = "import pathlib, sys; from examples.train_tiny_qwen3.model import make_model; make_model(pathlib.Path(sys.argv[1]))"


@pytest.fixture
def trl_python():
    """An interpreter with TRL."""
    venv = trl_venv()
    if not (venv / "bin/python").exists():
        pytest.skip(f"no TRL in {venv}: run tests/system/e2e/rig/install_trl.sh {venv} {default_venv()} {sys.prefix}")
    return venv / "bin/python"


@pytest.fixture
def server(servers, trl_python, tmp_path_factory):
    """A vLLM in development mode, which serves real weights as `policy`."""

    def start():
        model = tmp_path_factory.mktemp("model")
        subprocess.run([trl_python, "-c", MAKE_MODEL, model], check=True, cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": str(REPOSITORY)})
        options = ["--served-model-name", "policy", "--logprobs-mode", "processed_logprobs"]
        made = VllmServer(model, max_model_len=4096, scripted=False, workdir=tmp_path_factory.mktemp("vllm"), options=options)
        environment, command = made.environment, made.command
        made.environment = lambda: environment() | {"VLLM_SERVER_DEV_MODE": "1"}
        # a random model never ends its thinking, so the parser would leave no text to reward
        made.command = lambda: [word for word in command() if word not in {"--reasoning-parser", "qwen3"}]
        return made

    return servers.keep("policy", start)


async def test_trl_trains_on_exact_tokens_and_the_engine_has_its_weights(server, trl_python, tmp_path, figures, record_property):
    """TRL itself compares each recorded log probability with its own: they agree under the weights of each step."""
    (trl,) = trl_python.parents[1].glob("lib/python*/site-packages/trl-*.dist-info")
    record_property("trainer", " ".join(trl.stem.split("-")))
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    options = ["--model", server.model_dir, "--engine", server.url, "--weights", tmp_path / "weights", "--output", tmp_path / "output"]
    async with proxying(server.url, MemoryStore()) as proxied:
        program = ["examples/integrations/trl_grpo.py", *options, "--proxy", proxied.url, "--steps", STEPS, "--cpu"]
        output = await asyncio.to_thread(run_example, trl_python, *program, env=environment)
        async with AsyncClient(proxied.url) as client:
            left = await client.sessions()
    steps = [entry for entry in json.loads(output.splitlines()[-1]) if "reward" in entry]
    assert len(steps) == STEPS
    differences = [step["sampling/sampling_logp_difference/max"] for step in steps]
    figures.append(f"TRL: max |difference| of recorded log probabilities in {STEPS} steps: {max(differences):.1e}")
    assert max(differences) < 1e-3
    assert all(step["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3) for step in steps)
    assert all(step["grad_norm"] > 0 for step in steps), json.dumps(steps)
    assert all(0 < step["rewards/recorded_reward/mean"] < 1 for step in steps)
    assert not left  # delete=True


async def test_trl_leaves_failed_rollouts_out_of_their_groups(trl_python, tmp_path):
    """The step goes on, and the advantages are those of the valid rollouts alone. The engine is simulated."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    async with SimulatedEngine(logprobs_mode="processed_logprobs").serve() as engine, proxying(engine, MemoryStore()) as proxied:
        program = Path(__file__).parent / "rig" / "trl_failures.py"
        output = await asyncio.to_thread(run_example, trl_python, "-P", program, proxied.url, tmp_path, env=environment)
        async with AsyncClient(proxied.url) as client:
            outcomes = [state.outcome for state in await client.sessions()]
    assert sorted(outcomes) == ["harness"] * 4 + ["ok"] * 12
    steps = [json.loads(line) for line in output.splitlines() if line.startswith('{"rewards"')]
    assert len(steps) == 2
    for step in steps:
        assert sorted(step["rewards"], key=lambda one: (one is None, one)) == [0.0, 2.0, 3.0, 4.0, 6.0, 7.0, None, None]
        for start in (0, 4):
            rewards = step["rewards"][start : start + 4]
            valid = [one for one in rewards if one is not None]
            wanted = [0.0 if one is None else (one - mean(valid)) / (stdev(valid) + 1e-4) for one in rewards]
            assert step["advantages"][start : start + 4] == pytest.approx(wanted, abs=1e-4)
