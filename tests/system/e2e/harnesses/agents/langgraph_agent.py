"""An agent built with LangChain on LangGraph. usage: langgraph_agent.py TASK…"""

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from tools import INSTRUCTIONS, MODEL, TASKS, shell_tool, write_tool


@tool
def shell(command: str, note: str = "") -> str:
    """Run a shell command"""
    return shell_tool(command)


@tool
def write_file(path: str, content: str) -> str:
    """Write a file"""
    return write_tool(path, content)


model = ChatOpenAI(model=MODEL, streaming=True)
agent = create_agent(model, [shell, write_file], system_prompt=INSTRUCTIONS, checkpointer=InMemorySaver())
for task in TASKS:
    state = agent.invoke({"messages": [{"role": "user", "content": task}]}, {"configurable": {"thread_id": "one"}, "recursion_limit": 40})
    print(repr(state["messages"][-1].content))
