"""An agent built with Agno. usage: agno_agent.py TASK…"""

from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from agno.models.openai import OpenAIChat
from tools import INSTRUCTIONS, MODEL, TASKS, shell_tool, write_tool


def shell(command: str, note: str = "") -> str:
    """Run a shell command"""
    return shell_tool(command)


def write_file(path: str, content: str) -> str:
    """Write a file"""
    return write_tool(path, content)


agent = Agent(
    model=OpenAIChat(id=MODEL),
    tools=[shell, write_file],
    instructions=INSTRUCTIONS,
    db=InMemoryDb(),
    session_id="one",
    add_history_to_context=True,
)
for task in TASKS:
    print(repr("".join(event.content or "" for event in agent.run(task, stream=True) if event.event == "RunContent")))
