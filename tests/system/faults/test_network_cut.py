"""The network is cut between two namespaces: between proxy and Redis, and between proxy and engine (`cut`)."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.material import require
from tests.support.redis_server import find_binary

ROOT = Path(__file__).parents[3]
NEW = ["unshare", "--map-root-user", "--net", "--kill-child", "--fork"]
SESSIONS = ["cut-chat", "cut-messages", "cut-responses"]


@functools.cache
def can_cut():
    """Whether this machine lets a test cut a network of its own."""
    command = [*NEW, "ip", "link", "add", "here", "type", "veth", "peer", "name", "there"]
    return shutil.which(NEW[0]) is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def cut(tmp_path):
    require("redis-server", find_binary())
    require("network namespaces", can_cut())

    def run(which):
        command = [*NEW, sys.executable, "-m", "tests.system.faults.cut", which, str(tmp_path)]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr[-3000:]
        return json.loads(ended.stdout)

    return run


def test_between_proxy_and_redis(cut):
    found = cut("redis")
    assert found["clean"], found
    assert sorted(found["marked"]) == SESSIONS


@pytest.mark.whole
def test_between_proxy_and_engine(cut):
    found = cut("engine")
    assert found["clean"], found
    assert found["turns"] == 2 * len(SESSIONS)
