"""The two tools of the agents in this folder. Tasks are on the command line, the model's address is in the environment."""

import os
import subprocess
import sys
from pathlib import Path

MODEL = os.environ.get("OPENAI_MODEL", "")
TASKS = sys.argv[1:]
INSTRUCTIONS = "You are helpful."


def shell_tool(command):
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=False).stdout  # noqa: S602 - that is what agents do


def write_tool(path, content):
    Path(path).write_text(content, encoding="utf-8")
    return "ok"
