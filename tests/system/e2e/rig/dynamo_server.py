"""Runs NVIDIA's Dynamo as a context manager: `with Frontend(folder) as dynamo: dynamo.worker("scripted", model)`."""

import json
import os
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

from rig.server import HERE, LIMIT_S, MODEL, REPOSITORY
from tests.ports import free_port


def dynamo_venv():
    """Where `install_dynamo.sh` installs Dynamo: `$TOKENCACHE_E2E_DYNAMO`, or `.venv-dynamo` in the repository."""
    return Path(os.environ.get("TOKENCACHE_E2E_DYNAMO") or REPOSITORY / ".venv-dynamo")


class Frontend:
    """A frontend and its workers; stopped, with all its workers, on exit.

    Attributes:
        url: its base URL.
        workers: the processes of its workers, in the order of their start.
    """

    def __init__(self, folder, episodes, *, options=("--migration-limit", "0"), pace=0.0):
        self.folder, self.options = Path(folder), options
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.workers = []
        (self.folder / "discovery").mkdir()
        (self.folder / "episodes.json").write_text(json.dumps(episodes), encoding="utf-8")
        self.set_pace(pace)
        self._process = None

    def set_pace(self, seconds, most=1):
        """Set the time between two chunks of a scripted worker, and the most ids of one, from the next one on."""
        for name, value in (("pace", seconds), ("most", most)):
            written = self.folder / f"{name}.new"
            written.write_text(str(value), encoding="ascii")
            written.replace(self.folder / name)

    def heard(self, number=None):
        """What the scripted workers were asked for, or the one of this number: prompt and sampled ids of each request that ended."""
        files = [self.folder / f"heard-{n}" for n in range(len(self.workers)) if number in {None, n}]
        return [json.loads(line) for file in files if file.exists() for line in file.read_text(encoding="ascii").splitlines()]

    def worker(self, kind, model):
        """Start a worker: `scripted`, `vllm` or `mocker`."""
        number = len(self.workers)
        if kind == "mocker":
            own = ["-m", "dynamo.mocker", "--model-path", str(model), "--model-name", MODEL, "--speedup-ratio", "100"]
            command = [*own, "--num-gpu-blocks-override", "2000", *PLANES]
        else:
            command = [str(HERE / "dynamo_worker.py"), kind, str(model), "e2e"]
        self.workers.append(self._start(f"{kind}-{number}", command, HEARD=str(self.folder / f"heard-{number}")))

    def kill(self, number):
        """Kill a worker, as a machine that fails."""
        os.killpg(self.workers[number].pid, signal.SIGKILL)
        self.workers[number].wait()

    def wait_for(self, workers):
        """Wait until this number of workers has registered, and the frontend serves their model."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if self._registered() == workers and self._get("/v1/models")["data"]:
                return
            if any(process.poll() is not None for process in (self._process, *self.workers[-workers:])):
                break
            time.sleep(0.1)
        raise TimeoutError(f"no {workers} workers registered: see the logs in {self.folder}")

    async def is_up(self):
        """Whether the frontend answers."""
        return "endpoints" in self._get("/health")

    def _registered(self):
        return sum(one["endpoint"] == "generate" for one in self._get("/health").get("instances", []))

    def _get(self, path):
        try:
            with urllib.request.urlopen(self.url + path, timeout=LIMIT_S) as answer:  # noqa: S310 - http
                return json.load(answer)
        except OSError:
            return {"data": []}

    def _start(self, name, command, **variables):
        environment = os.environ | {
            "DYN_FILE_KV": str(self.folder / "discovery"),
            "DYN_NAMESPACE": "e2e",
            "DYN_TCP_RPC_HOST": "127.0.0.1",  # otherwise workers listen on the machine's own address
            "EPISODES": str(self.folder / "episodes.json"),
            "PACE": str(self.folder / "pace"),
            "MOST": str(self.folder / "most"),
            "PYTHONPATH": str(HERE),
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [str(dynamo_venv() / "bin/python"), *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self):
        own = ["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(self.port), "--router-mode", "kv"]
        self._process = self._start("frontend", [*own, "--router-session-affinity-ttl-secs", "3600", *PLANES, *self.options])
        return self

    def __exit__(self, *_):
        for process in [*self.workers, self._process]:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")
