"""An agent built with pydantic-ai. usage: pydantic_agent.py TASK…"""

import asyncio

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from tools import INSTRUCTIONS, MODEL, TASKS, shell_tool, write_tool

agent = Agent(OpenAIChatModel(MODEL), instructions=INSTRUCTIONS)


@agent.tool_plain(strict=False)
def shell(command: str, note: str = "") -> str:
    """Run a shell command"""
    return shell_tool(command)


@agent.tool_plain(strict=False)
def write_file(path: str, content: str) -> str:
    """Write a file"""
    return write_tool(path, content)


async def main():
    history = None
    for task in TASKS:
        result = await agent.run(task, message_history=history)
        history = result.all_messages()
        print(repr(result.output))


asyncio.run(main())
