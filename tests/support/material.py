"""What tests need and `make install` does not install. A test without it is skipped: the reason says what is missing and what to do.

The reason is the same wherever the same thing is missing, so the last lines of a run count by it.
"""

import importlib.util
import warnings
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import pytest

Thing = TypeVar("Thing")

SHARED = Path(__file__).parents[3] / "shared"
"""Chat templates, tokenizers and recordings of others, which are not part of this repository."""

WHAT_TO_DO = {
    "../shared": "put the folder of that name, with real chat templates, tokenizers and recordings, beside the checkout",
    "redis-server": "run make install, or put it on PATH",
    "valkey-server": "run make install, or put it on PATH",
    "Chromium": "run tests/api/viewer/install_chromium.sh as root",
    "promtool": "install Prometheus (Debian: prometheus) and put it on PATH",
    "kubectl": "put it on PATH",
    "OpenSSH": "put ssh, ssh-keygen and sshd on PATH (Debian: openssh-client, openssh-server); root also needs the directory /run/sshd",
    "tmux": "put it on PATH; Harbor's Terminus-2 runs in it",
    "permission to trace a process": "run as root, or set kernel.yama.ptrace_scope to 0",
    "network namespaces": "permit user namespaces, and put unshare and ip (Debian: iproute2) on PATH",
    "mount namespaces": "permit user namespaces, and put unshare (Debian: util-linux) on PATH",
    "torch": "run make e2e, which has an environment with it",
    "verl": "run make integrations",
    "skyrl": "run make integrations",
    "verifiers": "run make integrations",
    "harbor": "run make integrations",
    "aiperf": "run make integrations",
    "dynamo": "run make integrations",
    "openenv": "run make integrations",
    "trl": "run make integrations",
    "wandb": "run make integrations",
    "mlflow": "run make integrations",
    "tensorboard": "run make integrations",
    "nemo_gym": "run make e2e-nemo, or name an interpreter that has it by TOKENCACHE_NEMO_GYM_PYTHON",
    "test data of NeMo RL": "name its file maybe_correct_merged_tokens_test_data.json by TOKENCACHE_NEMO_RL_VECTORS",
    "wheels of trainers": "run make consumers",
    "slime in the folder of the wheels": "put its repository into .consumers/slime (tests/trajectories/formats/test_published.py)",
    "prime-rl in the folder of the wheels": "put its repository into .consumers/prime-rl (tests/trajectories/formats/test_published.py)",
}


def reason(what: str) -> str:
    """Why a test is skipped."""
    return f"missing {what}: {WHAT_TO_DO[what]}"


def needs(what: str, there: object) -> pytest.MarkDecorator:
    """Mark tests that are skipped unless it is there."""
    return pytest.mark.skipif(not there, reason=reason(what))


def require(what: str, there: Thing | None) -> Thing:
    """Return it; skip the test if it is not there."""
    return there or pytest.skip(reason(what))


def require_package(name: str, module: str = "") -> ModuleType:
    """Import a package, or a module that needs it; skip the test, or the whole file, if it is not installed."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(reason(name), allow_module_level=True)
    with warnings.catch_warnings(action="ignore"):
        return importlib.import_module(module or name)
