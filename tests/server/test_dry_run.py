"""`tokencache serve --dry-run` describes a start and ends as the start would, without serving."""

import asyncio
import socket
import sys
from pathlib import Path

import pytest

from tests.ports import free_port
from tokencache.testing import SimulatedEngine


async def dry_run(*options):
    """Returns the exit code, the lines of the output, and what the log and the error message say."""
    command = [str(Path(sys.executable).with_name("tokencache")), "serve", "--dry-run", *map(str, options)]
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(*command, **pipes)
    output, errors = await process.communicate()
    return process.returncode, output.decode().splitlines(), errors.decode()


async def test_it_prints_what_would_be_started_and_what_the_probe_finds():
    port = free_port()
    async with SimulatedEngine(model="m7").serve() as url:
        code, lines, log = await dry_run(
            "--upstream",
            url,
            "--port",
            port,
            "--history",
            "follow",
            "--admin-key",
            "a-long-secret-key",
            "--public-url",
            "https://rl.example",
        )
    assert code == 0, log
    first, public, settings, adapters, engine, model = lines
    assert first.endswith(f"1 worker, would listen on 127.0.0.1 port {port}")
    assert public == "harnesses would reach it at https://rl.example"
    assert '"history": "follow"' in settings
    assert "secret" not in "".join(lines) + log
    assert "claude-code" in adapters
    assert engine == f"engine {url}: ready"
    assert "model=m7" in model
    assert "level=exact" in model


async def test_an_engine_that_is_down_is_no_error_as_at_a_start():
    code, lines, _ = await dry_run("--upstream", f"http://127.0.0.1:{free_port()}", "--port", 0)
    assert code == 0
    assert "NOT READY: " in lines[-1]


async def test_no_engine():
    code, lines, _ = await dry_run("--port", 0)
    assert (code, lines[-1]) == (0, "no engine yet (add one: POST /tokencache/v1/engines)")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--store", "file:/nowhere/at/all.db"], "/nowhere/at/all.db"),
        (["--adapters", "/nowhere"], "/nowhere: no such directory of adapters"),
    ],
)
async def test_what_a_start_would_refuse_is_refused(options, words):
    code, lines, errors = await dry_run("--port", 0, *options)
    assert (code, lines) == (1, [])
    assert words in errors
    assert "Traceback" not in errors


async def test_a_port_that_is_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, lines, errors = await dry_run("--port", taken.getsockname()[1])
    assert (code, lines) == (1, [])
    assert "in use" in errors
