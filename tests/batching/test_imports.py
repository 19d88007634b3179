"""Importing the package of batches loads nothing that does I/O, and numpy only for arrays."""

import subprocess
import sys

import pytest

from tests.support.waiting import PATIENCE

FORBIDDEN = {"aiohttp", "asyncio", "httpx2", "redis", "torch"} | {f"tokencache.{name}" for name in ("api", "client", "engine", "proxy")}


def loaded_by(module):
    program = f"import sys, {module}; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PATIENCE)
    return set(ran.stdout.split())


@pytest.mark.parametrize("module", ["tokencache.batching", "tokencache.batching.forest_check", "tokencache.batching.tensors"])
def test_no_module_does_io(module):
    assert not FORBIDDEN & loaded_by(module)


def test_only_arrays_need_numpy():
    assert "numpy" not in loaded_by("tokencache.batching, tokencache.batching.forest_check")
    assert "numpy" in loaded_by("tokencache.batching.tensors")


def test_the_check_can_fail():
    assert FORBIDDEN & loaded_by("tokencache.client")
