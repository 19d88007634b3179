"""A taskset for verifiers with a harness of its own: a guessing game, played through tokencache.

`vf-eval guessing_verifiers …` finds it by the name of this module. Needs verifiers and openai.
"""

from collections.abc import Iterator

import openai
import verifiers.v1 as vf

from tokencache.integrations.verifiers import TokencacheEnv

__all__ = ["GuessingHarness", "GuessingTaskset", "TokencacheEnv"]


class GuessingTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def guessed(self, trace: vf.Trace) -> float:
        return float((trace.root_reply or str(trace.nodes[-1].message.content)).strip().endswith("7"))


class GuessingTaskset(vf.Taskset[GuessingTask, vf.TasksetConfig]):
    def load(self) -> Iterator[GuessingTask]:
        yield GuessingTask(vf.TaskData(name="seven", prompt="Guess a number from 1 to 9."), self.config.task)


class GuessingHarness(vf.Harness[vf.HarnessConfig]):
    """Asks three times. A real harness starts a program with `endpoint` and `secret` as base URL and API key."""

    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as model:
            for _ in range(3):
                reply = await model.chat.completions.create(model=ctx.model, messages=messages)
                messages += [{"role": "assistant", "content": reply.choices[0].message.content}, {"role": "user", "content": "Again!"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
