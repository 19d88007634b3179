"""Importing the package of trajectories loads no module that does I/O."""

import pkgutil
import subprocess
import sys

import pytest

import tokencache.trajectories
from tests.support.waiting import PATIENCE

FORBIDDEN = {"aiohttp", "asyncio", "httpx2", "redis"} | {f"tokencache.{name}" for name in ("adapters", "api", "client", "engine", "proxy")}
MODULES = [module.name for module in pkgutil.walk_packages(tokencache.trajectories.__path__, "tokencache.trajectories.")]


def loaded_by(module):
    """Import a module in a fresh interpreter; returns the forbidden modules that this loads."""
    program = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PATIENCE).stdout.split()
    return FORBIDDEN & set(loaded)


def test_trajectories_do_no_io():
    assert loaded_by(", ".join(MODULES)) == set()


@pytest.mark.parametrize("module", ["tokencache.client", "tokencache.api.reader"])
def test_the_check_can_fail(module):
    assert loaded_by(module)
