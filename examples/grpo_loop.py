"""A GRPO-like loop: groups of rollouts, rewards, advantages, and a loss on the sampled tokens. Plain numbers, no torch.

The engine is simulated; for a real one run `tokencache serve --upstream …`, and give the client its URL. Needs openai.
"""

import asyncio
import random
import statistics

import openai

from tokencache.batching import group_advantages
from tokencache.client import AsyncClient, AsyncSession, Trajectory
from tokencache.config import Settings
from tokencache.server.serve import serving
from tokencache.testing import SimulatedEngine

STEPS, GROUPS, ROLLOUTS, TURNS = 2, 3, 4, 4


async def play(session: AsyncSession, secret: int) -> None:
    """The agent: a guessing game of several turns, in plain text. Finishes its session with its reward."""
    messages = [{"role": "user", "content": "Guess a number from 1 to 9."}]
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as model:
        for turn in range(TURNS):
            reply = await model.chat.completions.create(model="sim", messages=messages)
            guess = int(reply.choices[0].message.content.split()[-1])
            if guess == secret:
                await session.finish(1.0 - turn / TURNS)
                return
            messages.append(reply.choices[0].message.model_dump(exclude_none=True))
            messages.append({"role": "user", "content": "Higher!" if guess < secret else "Lower!"})
    await session.finish(0.0)


def loss(rollout: Trajectory, advantage: float) -> float:
    """Policy gradient. A trainer recomputes the log probabilities on these ids and compares them with the recorded ones."""
    total = 0.0
    for one in rollout.sequences:  # several if the harness rewrote its history; their weights add up to 1
        sampled = [logprob for logprob, mask in zip(one.logprobs, one.loss_mask, strict=True) if mask] or [0.0]
        total -= advantage * one.weight * statistics.fmean(sampled)
    return total


async def main() -> None:
    chance, engine = random.Random(4), SimulatedEngine(logprobs_mode="processed_logprobs")
    engine.replies.script = lambda _request: [f"<think>\nHm.\n</think>\n\nI guess {chance.randint(1, 9)}"]
    async with engine.serve() as upstream, serving(Settings(upstream=upstream, port=0)) as (url, _), AsyncClient(url) as client:
        for step in range(STEPS):
            mean_rewards, losses = [], []
            for secret in chance.sample(range(1, 10), GROUPS):
                sessions = [await client.create(group=f"{step}-{secret}", sampling={"temperature": 1.0}) for _ in range(ROLLOUTS)]
                await asyncio.gather(*(play(session, secret) for session in sessions))
                group = [rollout async for rollout in client.iterate((one.id for one in sessions), seal=True, delete=True)]
                advantages = group_advantages(group)
                losses += [loss(rollout, advantages[rollout.session]) for rollout in group]
                mean_rewards.append(statistics.fmean(rollout.reward for rollout in group))
            print(f"step {step}: {len(losses)} rollouts, reward {statistics.fmean(mean_rewards):.2f}, loss {statistics.fmean(losses):+.4f}")


if __name__ == "__main__":
    asyncio.run(main())
