"""Trains two steps with TRL's own trainer; a harness breaks in each group. Prints what TRL received and computed, a JSON object a step.

usage: trl_failures.py PROXY FOLDER
"""

import itertools
import json
import sys
from pathlib import Path

import openai
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from examples.train_tiny_qwen3.model import make_model
from tokencache.integrations.trl import TrlRollouts, connect, recorded_reward

numbers = itertools.count()


async def play(session, prompt):
    number = next(numbers)
    if number % 4 == 1:
        raise RuntimeError("no such program")
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as client:
        await client.chat.completions.create(model="sim", messages=prompt, max_completion_tokens=16)
    return float(number % 8)


class Trainer(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        made = super()._generate_and_score_completions(inputs)
        print(json.dumps({"rewards": self.played["reward"], "advantages": made["advantages"].tolist()}))
        return made


def main(proxy, folder):
    make_model(folder / "model")
    prompts = [[{"role": "user", "content": f"Tell me something, number {n}."}] for n in range(4)]
    rollouts = TrlRollouts(proxy, play)

    def played(prompts, trainer):
        trainer.played = rollouts(prompts, trainer)
        return trainer.played

    options = {"model_init_kwargs": {"dtype": "float32"}, "bf16": False, "use_cpu": True, "save_strategy": "no", "report_to": "none"}
    trainer = Trainer(
        model=str(folder / "model"),
        args=GRPOConfig(output_dir=str(folder / "out"), max_steps=2, per_device_train_batch_size=8, num_generations=4, **options),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        rollout_func=played,
        reward_funcs=recorded_reward,
    )
    connect(trainer, folder / "weights", [])
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
