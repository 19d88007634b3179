"""Runs a real vLLM on CPU as a context manager: `with VllmServer(model_dir, episodes) as server: server.url`."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.ports import free_port
from tests.support.waiting import PATIENCE

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[3]
MODEL = "tiny"
"""The name under which the model is served."""
DTYPE = os.environ.get("TOKENCACHE_E2E_DTYPE", "float32")
"""What the engine computes in."""
ENGINE_ARGS = shlex.split(os.environ.get("TOKENCACHE_E2E_ENGINE_ARGS", ""))
"""More options of the engine, after all others."""
LIMIT_S = 5 * PATIENCE
"""Seconds that an engine's start, a request, or a program may take: more than on any busy machine."""


def default_venv():
    """Where `install_vllm.sh` installs vLLM: `$TOKENCACHE_E2E_VLLM`, or `.venv-vllm` in the repository."""
    return Path(os.environ.get("TOKENCACHE_E2E_VLLM") or REPOSITORY / ".venv-vllm")


@contextlib.contextmanager
def all_started(*servers):
    """Starts several servers at once; stopped, those that still run, on exit."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
        with ThreadPoolExecutor() as pool:
            list(pool.map(VllmServer.__enter__, servers))
        yield servers


class VllmServer:
    """Starts on entry and is ready when that returns; stopped, with all its processes, on exit."""

    description = "vLLM 0.32 with a tiny model"
    starts = "fork"
    """How vLLM starts its other processes (`run_vllm.py`): with `spawn` each loads everything itself, as in a deployment."""

    def __init__(
        self,
        model_dir,
        episodes=None,
        port=None,
        *,
        venv=None,
        max_model_len=32768,
        scripted=True,
        workdir=None,
        options=(),
        ground_truth=None,
        variables=None,
        pace=0.0,
        name=MODEL,
    ):
        self.name = name
        self.model_dir = Path(model_dir).resolve()
        self.episodes = episodes or {}
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.venv = Path(venv or default_venv())
        self.max_model_len = max_model_len
        self.scripted = scripted
        self.workdir = Path(workdir or tempfile.mkdtemp(prefix="vllm-"))  # the caller removes it: the log stays readable
        self.log = self.workdir / "vllm.log"
        self.options = list(options)
        self.ground_truth = ground_truth  # a file: the engine logs every request's ids there, see ground_truth.py
        self.variables = variables or {}
        self.process = None
        self.set_pace(pace)

    def set_pace(self, seconds):
        """Set the minimum time of each step of a scripted model, from its next step on."""
        written = self.workdir / "pace.new"
        written.write_text(str(seconds), encoding="ascii")
        written.replace(self.workdir / "pace")

    def command(self):
        command = [str(self.venv / "bin/python"), str(HERE / "run_vllm.py"), self.starts]
        command += ["--model", str(self.model_dir), "--served-model-name", self.name, "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--dtype", DTYPE, "--enforce-eager", "--max-model-len", str(self.max_model_len), "--max-num-seqs", "16"]
        command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]
        processors = ["scripted_model:ScriptedModel"] * self.scripted + ["ground_truth:GroundTruthWriter"] * (self.ground_truth is not None)
        if processors:
            command += ["--logits-processors", *processors]
        return command + self.options + ENGINE_ARGS

    def environment(self):
        episodes = self.workdir / "episodes.json"
        episodes.write_text(json.dumps(self.episodes), encoding="utf-8")
        return os.environ | {
            "EPISODES": str(episodes),
            "PACE": str(self.workdir / "pace"),
            "GROUND_TRUTH": str(self.ground_truth),
            "PYTHONPATH": str(HERE),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",  # after its usual 5 s a client on a busy machine may be sending the next request
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            **self.variables,
        }

    def __enter__(self):
        if not (self.venv / "bin/python").exists():
            raise FileNotFoundError(f"no vLLM in {self.venv}: run {HERE / 'install_vllm.sh'} {self.venv}")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command(),
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_):
        self.stop()

    def _wait_until_healthy(self):
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"vLLM exited with {self.process.returncode} while starting:\n{self.tail()}")
            # not /health: the port was free a moment ago, and another server may have bound it since
            with contextlib.suppress(OSError), urllib.request.urlopen(self.url + "/v1/models", timeout=5) as answer:  # noqa: S310 - loopback
                if json.load(answer)["data"][0]["root"] == str(self.model_dir):
                    return
            time.sleep(0.3)
        raise TimeoutError(f"vLLM was not ready after {LIMIT_S:g} s:\n{self.tail()}")

    def stop(self):
        """Ends the server and the engine process it started: SIGTERM first, then SIGKILL. Signals only its own process group."""
        if self.process is None:
            return
        for ask, timeout_s in ((signal.SIGTERM, 20), (signal.SIGKILL, 10)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, ask)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
                break
        with contextlib.suppress(ProcessLookupError):  # an engine process that outlived its server
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process = None

    def kill(self):
        """Ends the server and its engine processes at once, as a crash of the machine would."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        self.process = None

    def tail(self, lines=40):
        """The last lines of the server's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
