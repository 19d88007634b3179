"""GRPO with a real harness: mini-swe-agent learns to solve a task on a real vLLM, through tokencache, on two CPU cores.

In each step groups of agents get a task each and call the policy through the proxy. Their folders are checked, the rewards are posted, and
the finished groups are taken from the proxy's queue. The policy is trained in plain torch on the exact tokens and their recorded log
probabilities, and its new weights are loaded into vLLM. Before each update the recorded log probabilities are compared with the policy's
own: they agree only if the tokens are exact and vLLM has the current weights. See README.md in this folder.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import statistics
import tempfile
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from examples.grpo_mini_swe_agent.policy import logprobs, make_policy
from examples.grpo_mini_swe_agent.task import Task, draw
from examples.train_tiny_qwen3.engine import MODEL, vllm_server
from tokencache.batching import at_least, group_advantages, row_advantages, select
from tokencache.batching.tensors import as_torch, pad
from tokencache.client import AsyncClient, Trajectory
from tokencache.config import Settings
from tokencache.server.serve import serving

STEPS, GROUPS, ROLLOUTS = 16, 4, 8
EPOCHS, LEARNING_RATE, CLIP = 2, 3e-4, 0.2  # with 6e-4, one of four runs ended at a reward of 0
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 80}
ENGINE_OPTIONS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
SAME = 1e-3
"""Log probabilities within this distance count as equal: two engines add up their float32 in different order."""


class Agents:
    """The process that runs the agents (`agents.py`), with the interpreter of mini-swe-agent's environment."""

    def __init__(self, process: asyncio.subprocess.Process, path: Path) -> None:
        self._input, self._output, self._path = process.stdin, process.stdout, path
        self._waiting: dict[str, asyncio.Future[str]] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, python: Path, folder: Path) -> AsyncIterator["Agents"]:
        """Run the process while the context is open."""
        # The policy writes the commands that are executed here. It finds no other programs than these.
        path = folder / "bin"
        path.mkdir()
        for program in ("bash", "sh", "cat", "ls"):
            (path / program).symlink_to(shutil.which(program) or program)
        environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1", "MSWEA_CONFIGURED": "true"}
        environment |= {"MSWEA_GLOBAL_CONFIG_DIR": str(folder / "mswea"), "LITELLM_TELEMETRY": "False"}
        script = str(Path(__file__).with_name("agents.py"))
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(str(python), script, stdin=pipe, stdout=pipe, env=environment)
        agents = cls(process, path)
        reader = asyncio.create_task(agents._read())
        try:
            yield agents
        finally:
            reader.cancel()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def run(self, **rollout: Any) -> str:
        """Run one agent to its end; returns its exit status."""
        self._waiting[rollout["id"]] = done = asyncio.get_running_loop().create_future()
        self._input.write(json.dumps(rollout | {"model": MODEL, "path": str(self._path)}).encode() + b"\n")
        return await done

    async def _read(self) -> None:
        try:
            async for line in self._output:
                done = json.loads(line)
                self._waiting.pop(done["id"]).set_result(done["exit_status"])
        finally:
            for one in self._waiting.values():
                one.set_exception(RuntimeError("the process of the agents has ended: its messages are above"))


async def play(client: AsyncClient, agents: Agents, task: Task, group: str, folder: Path) -> None:
    """Run one rollout, and post its reward."""
    session = await client.create(group=group, sampling=SAMPLING)
    task.prepare(folder / session.id)
    status = await agents.run(id=session.id, base_url=session.base_url, key=session.key, task=task.prompt, folder=str(folder / session.id))
    await session.finish(task.reward(folder / session.id), metadata={"exit_status": status})


async def collect(client: AsyncClient, agents: Agents, tasks: list[Task], step: int, folder: Path) -> list[Trajectory]:
    """Run all rollouts of a step, and take the groups from the queue as they finish."""
    trajectories: list[Trajectory] = []
    async with asyncio.TaskGroup() as running:
        for number, task in enumerate(tasks):
            for _ in range(ROLLOUTS):
                running.create_task(play(client, agents, task, f"step {step}, task {number}", folder))
        async for delivery in client.follow(consumer="trainer", group_size=ROLLOUTS):
            trajectories += delivery.trajectories
            await delivery.acknowledge(delete=True)
            if len(trajectories) == len(tasks) * ROLLOUTS:
                break
    return trajectories


def train(policy: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, trajectories: list[Trajectory]) -> float:
    """Take one step of GRPO. Returns the largest difference between a recorded log probability and the policy's own before it."""
    rows = select(trajectories, at_least(1)).kept
    batch = as_torch(pad(rows, row_advantages(rows, group_advantages(trajectories))))
    ids, mask = batch["token_ids"], batch["loss_mask"]
    recorded, advantages = batch["logprobs"][mask], batch["advantages"][mask]
    difference = 0.0
    for epoch in range(EPOCHS):
        now = logprobs(policy, ids, mask)
        if epoch == 0:
            difference = float((now.detach() - recorded).abs().max())
        ratio = (now - recorded).exp()
        loss = -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).sum() / len(rows)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    return difference


def load_weights(engine: str, policy: Qwen3ForCausalLM, folder: Path) -> None:
    """Load the policy's weights into vLLM, and clear its prefix cache, which was computed with the old ones."""
    policy.save_pretrained(folder)
    _post(f"{engine}/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
    _post(f"{engine}/reset_prefix_cache", {})


def _post(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60):
        pass


async def run(python: Path, engine: str, policy: Qwen3ForCausalLM, folder: Path, steps: int) -> list[dict[str, float]]:
    """Train for so many steps; returns the figures of each."""
    chance, found = random.Random(1), []
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
    async with (
        serving(Settings(upstream=engine, port=0)) as (url, _),
        AsyncClient(url) as client,
        Agents.start(python, folder) as agents,
    ):
        for step in range(steps):
            trajectories = await collect(client, agents, [draw(chance) for _ in range(GROUPS)], step, folder / f"step-{step}")
            difference = train(policy, optimizer, trajectories)
            load_weights(engine, policy, folder / "weights")
            figures = {
                "reward": statistics.fmean(one.reward or 0.0 for one in trajectories),
                "tokens": sum(one.figures.trainable_tokens for one in trajectories),
                "rollouts": len(trajectories),
                "complete": sum(one.complete for one in trajectories),
                "max_difference": difference,
            }
            found.append(figures)
            print(f"{step:4} {figures['reward']:8.2f} {figures['complete']:9} {figures['tokens']:8} {difference:18.1e}", flush=True)
    return found


def plot(steps: list[dict[str, float]], file: Path) -> None:
    """Draw the reward of each step."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only for --plot

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot([one["reward"] for one in steps], marker="o")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.02), title=f"{GROUPS} groups of {ROLLOUTS} mini-swe-agents a step")
    axes.grid(alpha=0.3)
    figure.savefig(file)


def main() -> None:
    """Run everything and print the figures of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents-python", type=Path, required=True, help="the interpreter of an environment with mini-swe-agent")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, help="draw the rewards to this file (.png or .svg; needs matplotlib)")
    options = parser.parse_args()
    torch.manual_seed(0)
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="grpo-") as name:
        folder = Path(name)
        policy = make_policy(folder / "model")
        with vllm_server(folder / "model", *ENGINE_OPTIONS) as engine:
            print("step   reward  complete   tokens   max |difference|")
            steps = asyncio.run(run(options.agents_python, engine, policy, folder, options.steps))
    if options.json is not None:
        options.json.write_text(json.dumps(steps, indent=1) + "\n", encoding="utf-8")
    if options.plot is not None:
        plot(steps, options.plot)


if __name__ == "__main__":
    main()
