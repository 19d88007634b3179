"""A harness for the examples: a guessing game of several turns, in plain text. Needs openai."""

from collections.abc import Mapping
from typing import Any

import openai

from tokencache.client import AsyncSession

TURNS = 4


async def play(session: AsyncSession, sample: Mapping[str, Any]) -> float:
    """Run one rollout, and return its reward. `sample` has the number to guess as `secret`."""
    messages = [{"role": "user", "content": "Guess a number from 1 to 9."}]
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as model:
        for turn in range(TURNS):
            reply = await model.chat.completions.create(model=str(sample.get("model", "sim")), messages=messages)
            guess = int(reply.choices[0].message.content.split()[-1])
            if guess == sample["secret"]:
                return 1.0 - turn / TURNS
            hint = "Higher!" if guess < sample["secret"] else "Lower!"
            messages += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": hint}]
    return 0.0
