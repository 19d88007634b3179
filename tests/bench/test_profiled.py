"""Assignment of a sample to a package."""

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import profiled
from bench.processes import Process
from bench.profiled import (
    CLIENT,
    LOOP,
    NAMES,
    PACKAGES,
    PLANNING,
    READING,
    RECORDING,
    REST,
    SENDING,
    SERVER,
    binary,
    package_of,
    sampled,
    shares,
)
from bench.report import profile
from tests.support.material import needs, reason


@pytest.mark.parametrize(
    ("files", "name"),
    [
        (["uvloop/__init__.py", "asyncio/runners.py"], LOOP),
        (["asyncio/runners.py", "aiohttp/web_protocol.py", "aiohttp/http_writer.py"], SERVER),
        (["tokencache/proxy/call.py", "tokencache/engine/upstream.py", "aiohttp/client.py", "yarl/_url.py"], CLIENT),
        (["aiohttp/web_protocol.py", "tokencache/proxy/endpoints.py"], REST),
        (["tokencache/proxy/endpoints.py", "tokencache/dialects/chat/request.py"], READING),
        (["tokencache/proxy/call.py", "tokencache/core/match.py", "contextlib.py"], PLANNING),
        (["tokencache/proxy/recorder.py", "tokencache/core/ids.py"], RECORDING),
        (["tokencache/engine/drivers/vllm.py", "tokencache/core/ids.py"], SENDING),
        (["threading.py"], REST),
    ],
)
def test_a_sample_counts_for_the_innermost_frame_that_has_a_package(files, name):
    assert package_of(files) == name


def test_shares_follow_from_the_raw_lines_of_py_spy():
    found = shares(
        [
            "<module> (tokencache:6);run (uvloop/__init__.py:92);Runner.run (asyncio/runners.py:118) 6\n",
            "run (uvloop/__init__.py:92);impl.<locals>.<listcomp> (tokencache/dialects/chat/request.py:16) 3\n",
            "run (uvloop/__init__.py:92);f (tokencache/core/chain.py:1) 1\n",
        ]
    )
    assert {name: share for name, share in found.items() if share} == {LOOP: 0.6, READING: 0.3, PLANNING: 0.1}
    assert tuple(found) == NAMES
    with pytest.raises(RuntimeError, match="saw nothing"):
        shares([])


def test_every_path_in_the_table_exists():
    """A file that was renamed would silently count for another package."""
    for prefix in PACKAGES:
        package, _, rest = prefix.partition("/")
        folder = Path(next(iter(importlib.util.find_spec(package).submodule_search_locations)))
        assert list(folder.glob(f"{rest}*")), prefix


def test_the_table_shows_the_share_of_each_package():
    rows = [{"shape": "1 KB", "target": "relay", "cpu_us": 1200.0, "rooms_us": {LOOP: 200.0, SERVER: 1000.0}}]
    shown = profile(rows)
    assert shown.head == ["", "1 KB, relay"]
    assert shown.rows == [[LOOP, "200"], [SERVER, "1,000"], ["all", "1,200"]]


def test_without_py_spy_the_message_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(profiled, "binary", lambda: None)
    with pytest.raises(FileNotFoundError, match="make bench-others"):
        profiled.run_profile(None, [], 1.0)


@needs("py-spy", binary())
def test_py_spy_sees_what_a_busy_process_does(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "while True: sum(range(100))"]) as busy:
        process = Process("busy", 0, busy.pid, tmp_path)

        def until_it_worked():
            deadline = time.monotonic() + 30
            while process.cpu() < 1.5 and time.monotonic() < deadline:
                time.sleep(0.02)

        try:
            found = sampled(process, until_it_worked)
        except RuntimeError as error:
            if "permission" not in str(error).lower():
                raise
            pytest.skip(reason("permission to trace a process"))
        finally:
            busy.kill()
    assert found == {name: float(name == REST) for name in NAMES}
