"""A real vLLM on CPU, as a context manager."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

MODEL = "tiny"
"""The name under which the model is served."""

START_SECONDS = 600
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # routes that load weights and clear the prefix cache
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


@contextlib.contextmanager
def vllm_server(folder: Path, *options: str) -> Iterator[str]:
    """Serves a model folder while the context is open; yields the server's URL. Its log is `vllm.log` in the folder.

    Args:
        folder: the model folder.
        options: further options of the server.

    Raises:
        RuntimeError: It did not start; the message has the end of the log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Not `vllm serve`: that command looks for a distribution named vllm, and this one is vllm-cpu (seen with 0.32.0).
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", str(folder), "--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager", "--max-model-len", "4096"]
    command += options
    log = folder / "vllm.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=os.environ | _ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(f"http://127.0.0.1:{port}/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"vLLM did not start:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.3)
        yield f"http://127.0.0.1:{port}"
    finally:
        _stop(process)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the server and the engine process that it started: they are in their own process group."""
    for ask, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 10)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, ask)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            break
    with contextlib.suppress(ProcessLookupError):  # an engine that outlived its server
        os.killpg(process.pid, signal.SIGKILL)
