"""`tokencache weights`, against a proxy with the simulated engine."""

import asyncio
import json
import sys

import pytest

from tests.commands.test_commands import Shell
from tests.proxy.kit import proxied
from tokencache.testing import SimulatedEngine


@pytest.fixture
async def shell():
    async with proxied(SimulatedEngine(dev_mode=True)) as rig:
        yield Shell(rig)


async def test_a_version_is_set_and_shown(shell):
    assert "version   unknown" in (await shell("weights", "show")).stdout
    assert "version   7" in (await shell("weights", "set", "7")).stdout
    shown = (await shell("weights", "show")).stdout
    assert f"engine    {shell.rig.up}  7" in shown
    await shell("weights", "set", "--updating", "--owner", "me")
    assert "updating  by me; it ends by itself in" in (await shell("weights", "show")).stdout
    assert "'me' is updating the weights" in (await shell("weights", "set", "8", code=1)).stderr
    found = json.loads((await shell("weights", "set", "8", "--owner", "me", "--json")).stdout)
    assert (found["version"], [one["version"] for one in found["history"]]) == ("8", ["7", "8"])


async def update(shell, *args):
    """Run `tokencache weights update` as a process: it handles signals. Returns its exit code and errors."""
    words = [
        sys.executable,
        "-c",
        "from tokencache.cli import main; main()",
        "weights",
        "update",
        *args[:-1],
        *shell.options,
        "--",
        *args[-1],
    ]
    process = await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.PIPE)
    _, errors = await process.communicate()
    return process.returncode, errors.decode()


async def test_a_command_replaces_the_weights_while_the_engine_is_paused(shell, tmp_path):
    done = tmp_path / "done"
    assert await update(shell, "8", "--mode", "keep", [sys.executable, "-c", f"open({str(done)!r}, 'w')"]) == (0, "")
    assert done.exists()
    assert shell.rig.engine.dev_mode.calls == ["pause keep", "update_weight_version 8", "resume"]
    assert "version   8" in (await shell("weights", "show")).stdout


async def test_a_command_that_fails_leaves_the_version_unknown_and_the_engine_running(shell):
    await shell("weights", "set", "7")
    assert await update(shell, "8", [sys.executable, "-c", "raise SystemExit(3)"]) == (3, "")
    assert not shell.rig.engine.dev_mode.paused
    assert "version   unknown" in (await shell("weights", "show")).stdout
    code, errors = await update(shell, "8", ["no-such-program"])
    assert (code, "no-such-program cannot be started" in errors, shell.rig.engine.dev_mode.paused) == (1, True, "")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("set",), "give a VERSION, or --updating"),
        (("set", "7", "--updating"), "give a VERSION, or --updating"),
        (("update", "7", "--mode", "stop", "--", "true"), "'stop' is not one of abort, keep, wait, none"),
    ],
)
async def test_what_does_not_fit_together_is_refused(shell, args, words):
    assert words in (await shell("weights", *args, far=False, code=2)).stderr
