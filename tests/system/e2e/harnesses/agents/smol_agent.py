"""An agent built with smolagents. usage: smol_agent.py TASK…"""

from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from tools import MODEL, TASKS, shell_tool, write_tool


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


agent = ToolCallingAgent(tools=[shell, write_file], model=OpenAIServerModel(MODEL), max_steps=10)
for number, task in enumerate(TASKS):
    print(repr(agent.run(task, reset=number == 0)))
