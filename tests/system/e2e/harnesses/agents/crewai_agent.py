"""A crew of one agent, built with CrewAI. usage: crewai_agent.py TASK…

It sends strict tools: a grammar holds calls to the members of these functions, in this order.
"""

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from tools import INSTRUCTIONS, MODEL, TASKS, shell_tool, write_tool


@tool("shell")
def shell(command: str) -> str:
    """Run a shell command"""
    return shell_tool(command)


@tool("write_file")
def write_file(content: str, path: str) -> str:
    """Write a file"""
    return write_tool(path, content)


agent = Agent(
    role="Assistant",
    goal="Do the task.",
    backstory=INSTRUCTIONS,
    llm=LLM(model=MODEL, custom_openai=True, stream=True, max_tokens=1000),
    tools=[shell, write_file],
)
crew = Crew(agents=[agent], tasks=[Task(description=task, expected_output="The task is done.", agent=agent) for task in TASKS])
print(repr(crew.kickoff().raw))
