"""Runs the example in which mini-swe-agent learns a task, as a reader would, and checks that the reward rises on exact tokens."""

import json
import os
import statistics

import pytest
from rig.examples import run_example
from rig.miniswe import default_venv

pytestmark = pytest.mark.skipif("TOKENCACHE_E2E_NO_MINISWE" in os.environ, reason="mini-swe-agent was not requested")


def test_the_reward_rises(idle_machine, trainer_python, tmp_path, figures):
    file, plot = tmp_path / "figures.json", tmp_path / "reward.png"
    agents = default_venv().absolute() / "bin/python"
    run_example(
        trainer_python, "-m", "examples.grpo_mini_swe_agent.train", "--agents-python", agents, "--json", file, "--plot", plot, timeout=600
    )
    steps = json.loads(file.read_text())
    rewards = [step["reward"] for step in steps]
    first, last = statistics.fmean(rewards[:4]), statistics.fmean(rewards[-6:])
    difference = max(step["max_difference"] for step in steps)
    figures.append(f"mini-swe-agent trained for {len(steps)} steps: reward {first:.2f} at first, {last:.2f} at last")
    figures.append(f"its log probabilities under the weights of each step: max |difference| {difference:.1e}")
    assert last > first + 0.15  # three runs rose by 0.39 to 0.46; standard error of such a rise: 0.06 to 0.09
    assert difference < 1e-3  # exact tokens, and the engine had the weights of the step
    assert all(step["complete"] == step["rollouts"] for step in steps)
    assert plot.read_bytes().startswith(b"\x89PNG")
