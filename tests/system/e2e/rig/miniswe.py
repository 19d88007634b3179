"""Run mini-swe-agent, an unmodified real harness, against an OpenAI-compatible server."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rig.server import LIMIT_S, MODEL, REPOSITORY

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""The command with which the agent ends its task."""

WRITE_AND_LIST = [
    (
        "<think>\nA file is wanted. I write it first.\n</think>\n\nI write the file — naïve café ☕.\n"
        '<tool_call>\n{"name": "bash",  "arguments": {"command": "printf \'exact tokens\\\\n\' > answer.txt"}}\n</tool_call>'
    ),
    (
        "<think>\nNow see whether it is there, and what is in it.\n</think>\n\n"
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -1"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "bash", "arguments":  {"command": "cat answer.txt"}}\n</tool_call>'
    ),
    f'<think>\nAll there.\n</think>\n\nDone.  \n<tool_call>\n{{"name": "bash", "arguments": {{"command": "{SUBMIT}"}}}}\n</tool_call>',
]
"""An episode in which the agent writes `answer.txt`, inspects it with two calls at once, and submits."""


@dataclass(frozen=True)
class MiniRun:
    """The results of one run."""

    returncode: int
    output: str
    trajectory: dict

    @property
    def messages(self):
        return self.trajectory.get("messages", [])

    @property
    def exit_status(self):
        return self.trajectory.get("info", {}).get("exit_status")


def default_venv():
    """Where `install_miniswe.sh` installs it: `$TOKENCACHE_E2E_MINISWE`, or `.venv-miniswe` in the repository."""
    return Path(os.environ.get("TOKENCACHE_E2E_MINISWE") or REPOSITORY / ".venv-miniswe")


def run_miniswe(base_url, headers, task, cwd, env=None, *, api_key="none", model=MODEL, options=(), venv=None):
    """Gives `task` to the agent in directory `cwd` and waits until it is done; `base_url` ends in `/v1`.

    It gets an empty home and a separate environment (plus `env`), no telemetry, no price list, and proxy variables that make every call to
    other machines fail.
    """
    program = Path(venv or default_venv()) / "bin/mini"
    if not program.exists():
        raise FileNotFoundError(f"no mini-swe-agent at {program}: run tests/system/e2e/rig/install_miniswe.sh {program.parents[1]}")
    with tempfile.TemporaryDirectory(prefix="miniswe-") as scratch:
        trajectory = Path(scratch) / "trajectory.json"
        settings = {
            "model.model_kwargs.api_base": base_url,
            "model.model_kwargs.api_key": api_key,
            "model.model_kwargs.extra_headers": json.dumps(headers or {}),
            "model.cost_tracking": "ignore_errors",
        }
        command = [str(program), "-t", task, "-y", "--exit-immediately", "-m", f"hosted_vllm/{model}", "-o", str(trajectory)]
        command += ["-c", "mini.yaml"]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": scratch,
            "TMPDIR": scratch,
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": str(Path(scratch) / "mswea"),
            "MSWEA_SILENT_STARTUP": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_TELEMETRY": "False",
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
            "HTTP_PROXY": "http://127.0.0.1:9",
            "HTTPS_PROXY": "http://127.0.0.1:9",
            "NO_PROXY": "127.0.0.1,localhost",
            **(env or {}),
        }
        process = subprocess.Popen(
            [*command, *options],
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        recorded = json.loads(trajectory.read_text(encoding="utf-8")) if trajectory.exists() else {}
        return MiniRun(process.returncode, output.decode(errors="replace"), recorded)
