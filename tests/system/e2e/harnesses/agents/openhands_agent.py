"""An agent built with the OpenHands SDK. usage: openhands_agent.py TASK…"""

import os

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.terminal import TerminalTool
from tools import TASKS

llm = LLM.load_from_env()
agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name), Tool(name=FileEditorTool.name)])
conversation = Conversation(agent=agent, workspace=os.getcwd(), visualizer=None)  # noqa: PTH109
for task in TASKS:
    conversation.send_message(task)
    conversation.run()
