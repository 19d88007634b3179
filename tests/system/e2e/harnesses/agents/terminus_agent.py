"""Terminus-2, harbor's own agent, in a terminal on this machine instead of a container. usage: terminus_agent.py TASK"""

import asyncio
import os
import shutil
import types
from pathlib import Path

from harbor.agents.terminus_2.terminus_2 import Terminus2
from harbor.environments.base import ExecResult
from harbor.models.agent.context import AgentContext
from tools import TASKS

LOGS = Path(os.environ["TMPDIR"]) / "logs"


class ThisMachine:
    """The part of a harbor environment that the agent uses."""

    session_id = "here"
    default_user = None
    task_env_config = types.SimpleNamespace()
    env_paths = trial_paths = types.SimpleNamespace(agent_dir=LOGS)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None, **_):
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_shell(command, stdout=pipe, stderr=pipe, executable="/bin/bash")
        out, err = await process.communicate()
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode)

    async def upload_file(self, source, target):
        shutil.copy(source, target)

    download_file = upload_file

    async def is_dir(self, path, user=None):
        return Path(path).is_dir()  # noqa: ASYNC240 - a script

    async def is_file(self, path, user=None):
        return Path(path).is_file()  # noqa: ASYNC240 - a script


async def main():
    LOGS.mkdir()
    agent = Terminus2(
        logs_dir=LOGS,
        model_name=os.environ["LITELLM_MODEL"],
        api_base=os.environ["HOSTED_VLLM_API_BASE"],
        parser_name="json",
        max_turns=12,
        record_terminal_session=False,
        model_info={"max_input_tokens": 100_000, "max_output_tokens": 8192, "input_cost_per_token": 0, "output_cost_per_token": 0},
    )
    environment = ThisMachine()
    await agent.setup(environment)
    await agent.run(TASKS[0], environment, AgentContext())


asyncio.run(main())
