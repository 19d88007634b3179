"""What the tests of several integrations share: an engine that guesses, and harnesses."""

import openai

from tests.images import image
from tokencache.testing import SimulatedEngine


def guessing_engine():
    """An engine that guesses 1 in the first call of a rollout, 2 in the second, and so on. A seed of the request is added."""

    def script(request):
        return [f"<think>\nHm ☕.\n</think>\n\n  I guess {1 + len(request.body['messages']) // 2 + (request.body.get('seed') or 0)}"]

    engine = SimulatedEngine(seed=7)
    engine.replies.script = script
    return engine


def truth(engine):
    """The calls of sessions that the engine answered, by all their ids."""
    return {(*call.prompt_ids, *call.completion_ids): call for call in engine.ground_truth if call.session}


async def branching(session, sample):
    """A harness that asks twice with the same history, and goes on from the second reply."""
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as model:
        question = [{"role": "user", "content": "Guess."}]
        _, second = [await model.chat.completions.create(model="sim", messages=question, seed=seed) for seed in (1, 2)]
        said = {"role": "assistant", "content": second.choices[0].message.content}
        await model.chat.completions.create(model="sim", messages=[*question, said, {"role": "user", "content": "Again!"}])
    return 0.5


async def rewarding_a_part(session, sample):
    """A harness whose grader rewards the last row by itself, beside the rollout."""
    reward = await branching(session, sample)
    await session.set_reward(reward, sequences={(await session.trajectory()).sequences[-1].id: 9.0})


async def rewarding_its_only_row(session, sample):
    """A harness that asks once, and whose grader rewards the row by itself, beside the rollout."""
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as model:
        await model.chat.completions.create(model="sim", messages=[{"role": "user", "content": "Guess."}])
    await session.set_reward(0.5, sequences={(await session.trajectory()).sequences[0].id: 9.0})


async def without_reward(session, sample):
    """A harness that returns no reward."""
    await branching(session, sample)


async def failing(session, sample):
    """A harness that fails after its calls."""
    await branching(session, sample)
    raise RuntimeError("the harness broke")


async def looking(session, sample):
    """A harness that shows an image of the sample's width, and then another one and the first one again."""
    first, second = (image(shade, width=sample["width"] + shade) for shade in (0, 100))
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as model:
        messages = [{"role": "user", "content": [{"type": "text", "text": "Look."}, first]}]
        reply = await model.chat.completions.create(model="sim", messages=messages)
        again = {"role": "user", "content": [{"type": "text", "text": "And?"}, second, first]}
        await model.chat.completions.create(
            model="sim", messages=[*messages, reply.choices[0].message.model_dump(exclude_none=True), again]
        )
    return 1.0
