"""An agent built with openai-agents. usage: openai_agents.py TASK…; $LAB_API is chat_completions or responses."""

import asyncio
import os

from agents import Agent, Runner, SQLiteSession, function_tool, set_default_openai_api
from tools import INSTRUCTIONS, MODEL, TASKS, shell_tool, write_tool


# with strict schemas, this library's default, the engine's grammar would write the calls
@function_tool(strict_mode=False)
def shell(command: str, note: str = "") -> str:
    """Run a shell command"""
    return shell_tool(command)


@function_tool(strict_mode=False)
def write_file(path: str, content: str) -> str:
    """Write a file"""
    return write_tool(path, content)


async def main():
    set_default_openai_api(os.environ["LAB_API"])
    agent = Agent(name="A", instructions=INSTRUCTIONS, model=f"openai/{MODEL}", tools=[shell, write_file])
    session = SQLiteSession("one")
    for task in TASKS:
        result = Runner.run_streamed(agent, task, session=session, max_turns=20)
        async for _ in result.stream_events():
            pass
        print(repr(result.final_output))


asyncio.run(main())
