"""GRPO with TRL on rollouts of any program that calls a model: here a conversation of two turns through the OpenAI client.

Start vLLM and the proxy first (docs/integrations/trl.md). Needs trl and openai.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import openai
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from tokencache.client import AsyncSession
from tokencache.integrations.trl import TrlRollouts, connect, recorded_reward


async def play(session: AsyncSession, prompt: list[dict[str, Any]]) -> float:
    """The harness: it gets a base URL, a key and the prompt. Returns the reward: the share of letters in the replies."""
    messages, said = list(prompt), ""
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as client:
        for question in ("Go on.", None):
            reply = await client.chat.completions.create(model="policy", messages=messages, max_completion_tokens=32)
            text = reply.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]
            said += text
    return sum(character.isalpha() for character in said) / max(len(said), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="the model that vLLM serves as `policy`")
    parser.add_argument("--engine", required=True, help="base URL of vLLM, without /v1")
    parser.add_argument("--proxy", required=True, help="base URL of tokencache, without /v1")
    parser.add_argument("--admin-key", help="the trainer's key of the proxy")
    parser.add_argument("--weights", type=Path, required=True, help="a folder that trainer and vLLM share: new weights are written there")
    parser.add_argument("--output", default="grpo-trl", help="folder of the trainer")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    options = parser.parse_args()

    prompts = [[{"role": "user", "content": f"Tell me something, number {n}."}] for n in range(16)]
    trainer = GRPOTrainer(
        model=options.model,
        args=GRPOConfig(
            output_dir=options.output,
            max_steps=options.steps,
            learning_rate=1e-3,
            per_device_train_batch_size=8,
            num_generations=4,
            temperature=1.0,
            model_init_kwargs={"dtype": "float32"},
            bf16=False,
            use_cpu=options.cpu,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        rollout_func=TrlRollouts(options.proxy, play, admin_key=options.admin_key, rows="main", delete=True),
        reward_funcs=recorded_reward,
    )
    connect(trainer, options.weights, [options.engine])
    trainer.train()
    print(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main()
