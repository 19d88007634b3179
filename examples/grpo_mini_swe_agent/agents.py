"""Runs mini-swe-agent, unmodified: one agent for each line of JSON on standard input. Use the interpreter of its environment.

A line has `id`, `base_url`, `key`, `model`, `task` and `folder`. For each, a line with `id` and `exit_status` is written when the agent is
done. The agents run in threads of one process, because every start of Python and litellm takes seconds.
"""

import json
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

THREADS = 8


def run(line: str) -> dict[str, Any]:
    """Run one agent to its end. An agent that fails ends its rollout; it does not end the others."""
    rollout = json.loads(line)
    model = LitellmModel(
        model_name=f"hosted_vllm/{rollout['model']}",
        model_kwargs={"api_base": rollout["base_url"], "api_key": rollout["key"]},
        cost_tracking="ignore_errors",
    )
    # A tiny model cannot use the long prompts of mini.yaml. The agent, its tool, and its messages are the usual ones.
    agent = DefaultAgent(
        model,
        LocalEnvironment(cwd=rollout["folder"], env={"PATH": rollout["path"]}, timeout=5),
        system_template="You solve tasks with bash.",
        instance_template="{{task}}",
        step_limit=4,
        max_consecutive_format_errors=1,
    )
    try:
        status = agent.run(rollout["task"]).get("exit_status", "")
    except Exception as error:  # noqa: BLE001 - whatever a harness fails with, its rollout has a reward
        status = type(error).__name__
    return {"id": rollout["id"], "exit_status": status}


def main() -> None:
    """Run the agents until standard input ends."""
    lock = threading.Lock()
    reports, sys.stdout = sys.stdout, sys.stderr  # libraries print messages, from several threads

    def report(done: "Future[dict[str, Any]]") -> None:
        with lock:  # lines of several threads must not mix
            print(json.dumps(done.result()), file=reports, flush=True)

    with ThreadPoolExecutor(THREADS) as pool:
        for line in sys.stdin:
            pool.submit(run, line).add_done_callback(report)


if __name__ == "__main__":
    main()
