"""Plays harnesses with TRL's own rollout worker, and writes the rows that a trainer would get, once each task has some.

usage: trl_worker.py SPECIFICATION, a JSON object: `proxy` (URL), `tasks` (a list of harness and arguments), `seconds` to
wait for a row, and `rows`: the file to write, one JSON object for each row: `group`, `ids`, `mask`, `logprobs`, `reward`
"""

import functools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

from accelerate import PartialState
from openenv.core.harness import ResourceSessionFactory
from trl.experimental.async_grpo.openenv_harness import HarnessRolloutWorker

from tokencache.integrations.openenv import HarnessSessionFactory


def start(task, workspace):
    return task["arguments"]


def grade(task, workspace):
    return float((workspace / "done.txt").exists())


class SeveralHarnesses(ResourceSessionFactory):
    """The factory of each harness; a task names its own."""

    def __init__(self, url, harnesses, *, sampling):
        one = functools.partial(HarnessSessionFactory, url, start, grade, run="r", rows="all", sampling=sampling)
        self.factories = {name: one(harness=name) for name in harnesses}

    def create(self, task, seed=None, episode_id=None):
        return self.factories[task["harness"]].create(task, seed, episode_id)


def main(wanted):
    tasks = wanted["tasks"]
    PartialState()
    worker = HarnessRolloutWorker(
        model_name="tiny",
        dataset=[{"prompt": task} for task in tasks],
        reward_funcs=[],
        processing_class=SimpleNamespace(response_template="", pad_token_id=0),  # of use only if TRL itself samples
        eos_token_ids=[0],
        num_generations=1,
        max_inflight_tasks=len(tasks),
        harness_session_factory=functools.partial(SeveralHarnesses, wanted["proxy"], sorted({task["harness"] for task in tasks})),
    )
    samples, missing, later = [], {*range(len(tasks))}, False
    try:
        worker.start()
        while missing or not later:  # the rows of a group come together, so one of a later group ends them
            samples.append(worker.rollout_buffer.get(timeout=wanted["seconds"]))
            worker.check_health(wanted["seconds"])
            missing.discard(samples[-1].group_id)
            later = samples[-1].group_id >= len(tasks)
    finally:
        worker.stop()  # it may end its process in the middle of a row: from then on a read may wait for ever
    rows = [
        {
            "group": f"r-{sample.group_id}",
            "ids": sample.input_ids.tolist(),
            "mask": sample.completion_mask.tolist(),
            "logprobs": sample.old_log_probs.tolist(),
            "reward": sample.metrics["reward"],
        }
        for sample in samples
        if sample.group_id < len(tasks)
    ]
    Path(wanted["rows"]).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
