"""An environment for Harbor that is a folder of this machine, for tests. It isolates nothing.

Harbor's paths (`/logs`, `/tests`, `/app`) are folders below that folder: they are rewritten in every command. What is typed into tmux is
not rewritten, so agents use paths relative to `/app`.
"""

import asyncio
import os
import re
import shutil
import tempfile
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

PATHS = re.compile(r"(?<![\w./-])/(?=(?:logs|tests|app|installed-agent)\b)")


class LocalEnvironment(BaseEnvironment):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.root = Path(tempfile.mkdtemp(prefix="harbor-"))

    @staticmethod
    def type():
        return "local"

    @property
    def capabilities(self):
        return EnvironmentCapabilities()

    def _validate_definition(self):
        pass

    async def start(self, force_build):
        for path in ("app", "logs/agent", "logs/verifier", "logs/artifacts", "tests"):
            (self.root / path).mkdir(parents=True)

    async def stop(self, delete):
        await self.exec("tmux kill-server")
        shutil.rmtree(self.root)

    def _path(self, path):
        return self.root / str(path).lstrip("/")

    async def upload_file(self, source_path, target_path):
        self._path(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, self._path(target_path))

    async def upload_dir(self, source_dir, target_dir):
        shutil.copytree(source_dir, self._path(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path, target_path):
        shutil.copy(self._path(source_path), target_path)

    async def download_dir(self, source_dir, target_dir):
        shutil.copytree(self._path(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        variables = {**os.environ, "TMUX_TMPDIR": str(self.root), **(self._merge_env(env) or {})}
        running = await asyncio.create_subprocess_exec(
            "bash",
            "-c",
            PATHS.sub(f"{self.root}/", command),
            cwd=self._path(cwd or "/app"),
            env={name: value for name, value in variables.items() if name != "TMUX"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await asyncio.wait_for(running.communicate(), timeout_sec)
        except TimeoutError:
            running.kill()
            await running.wait()
            raise
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=running.returncode)
