"""An agent built with Strands Agents. usage: strands_agent.py TASK…"""

from strands import Agent, tool
from strands.models.openai import OpenAIModel
from tools import INSTRUCTIONS, MODEL, TASKS, shell_tool, write_tool


@tool
def shell(command: str, note: str = "") -> str:
    """Run a shell command

    Args:
        command: the command
        note: a note
    """
    return shell_tool(command)


@tool
def write_file(path: str, content: str) -> str:
    """Write a file

    Args:
        path: where
        content: what
    """
    return write_tool(path, content)


agent = Agent(model=OpenAIModel(model_id=MODEL), tools=[shell, write_file], system_prompt=INSTRUCTIONS, callback_handler=None)
for task in TASKS:
    print(repr(str(agent(task))))
