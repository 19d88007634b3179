"""An agent built with Strands Agents. usage: strands_agent.py TASK…

With $LAB_EDITS it writes into its own history, after each task but the last, what Strands would write only in place of other replies.
"""

import os

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


def overwrite_answer(messages):
    messages[-1]["content"] = [{"text": "[blank text]"}]


def overwrite_name(messages):
    called = next(block["toolUse"] for message in messages for block in message["content"] if "toolUse" in block)
    called["name"] = "INVALID_TOOL_NAME"


EDITS = [overwrite_answer, overwrite_name] if "LAB_EDITS" in os.environ else []
agent = Agent(model=OpenAIModel(model_id=MODEL), tools=[shell, write_file], system_prompt=INSTRUCTIONS, callback_handler=None)
for number, task in enumerate(TASKS):
    print(repr(str(agent(task))))
    for edit in EDITS[number : number + 1]:
        edit(agent.messages)
