"""An agent built with Google's ADK, its model through LiteLLM or by ADK's own Gemini client (`LAB_API`). usage: adk_agent.py TASK…"""

import asyncio
import os

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models import Gemini
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types
from tools import INSTRUCTIONS, MODEL, TASKS, shell_tool, write_tool


def shell(command: str, note: str = "") -> str:
    """Run a shell command"""
    return shell_tool(command)


def write_file(path: str, content: str) -> str:
    """Write a file"""
    return write_tool(path, content)


async def main():
    model = Gemini(model=os.environ["GEMINI_MODEL"]) if os.environ["LAB_API"] == "gemini" else LiteLlm(f"openai/{MODEL}")
    agent = LlmAgent(name="assistant", model=model, instruction=INSTRUCTIONS, tools=[shell, write_file])
    runner = InMemoryRunner(agent, app_name="lab")
    session = await runner.session_service.create_session(app_name="lab", user_id="user")
    streamed = RunConfig(streaming_mode=StreamingMode.SSE)
    for task in TASKS:
        message = types.Content(role="user", parts=[types.Part(text=task)])
        async for event in runner.run_async(user_id="user", session_id=session.id, new_message=message, run_config=streamed):
            if event.is_final_response():
                print(repr(event.content.parts))


asyncio.run(main())
