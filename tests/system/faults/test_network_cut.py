"""The network is cut between two namespaces: between proxy and Redis, and between proxy and engine (`cut`)."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.redis_server import find_binary

ROOT = Path(__file__).parents[3]
NEW = ["unshare", "--map-root-user", "--net", "--kill-child", "--fork"]
SESSIONS = ["cut-chat", "cut-messages", "cut-responses"]


@functools.cache
def why_not():
    """Why no network can be cut on this machine; empty if it can."""
    if find_binary() is None:
        return "no redis-server on this machine"
    try:
        command = [*NEW, "ip", "link", "add", "here", "type", "veth", "peer", "name", "there"]
        tried = subprocess.run(command, capture_output=True, check=False)
    except OSError as why:
        return f"no namespaces here: {why}"
    return "" if tried.returncode == 0 else f"no namespaces here: {tried.stderr.decode().strip()}"


@pytest.fixture
def cut(tmp_path):
    if why_not():
        pytest.skip(why_not())

    def run(which):
        command = [*NEW, sys.executable, "-m", "tests.system.faults.cut", which, str(tmp_path)]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 0, ended.stderr[-3000:]
        return json.loads(ended.stdout)

    return run


def test_between_proxy_and_redis(cut):
    found = cut("redis")
    assert found["clean"], found
    assert sorted(found["marked"]) == SESSIONS


def test_between_proxy_and_engine(cut):
    found = cut("engine")
    assert found["clean"], found
    assert found["turns"] == 2 * len(SESSIONS)
