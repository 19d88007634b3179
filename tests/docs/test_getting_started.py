"""The programs on the page "Getting started" run as they are written, against a simulated engine."""

import asyncio
import re
import sys

from typer.testing import CliRunner

from tests.docs.reference import DOCS
from tests.proxy.kit import proxied
from tokencache.cli import app
from tokencache.testing import SimulatedEngine

PAGE = (DOCS / "getting-started.md").read_text()


def program(language, contains):
    return next(text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if contains in text)


async def run(source, url, *arguments):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", source.replace("http://127.0.0.1:8100", url), *arguments, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0
    return printed.decode()


def without_names(printed):
    """The lines without ids and times, which are others each time."""
    lines = re.sub(r"\b[0-9a-f]{16}\b|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "…", printed).splitlines()
    return [line.strip() for line in lines if line.strip()]


async def test_two_turns_are_recorded_shown_and_fetched_as_one_sequence():
    two_turns = re.search(r"<<'EOF'\n(.*?)EOF\n", program("bash", "two_turns.py"), re.DOTALL)[1]
    async with proxied(SimulatedEngine()) as rig:
        assert (await run(two_turns, rig.url, "rollout-2")).count("model: ") == 2
        turns = await rig.turns("rollout-2")
        assert [turn["match"] for turn in turns] == ["root", "continue"]
        shown = await asyncio.to_thread(CliRunner().invoke, app, ["show", "rollout-2", "--proxy", rig.url])
        printed = re.search(r"^    session rollout-2 .*?(?=^\S)", PAGE, re.DOTALL | re.MULTILINE)[0]
        assert without_names(shown.output) == without_names(printed)
        tokens, trained, weight = (await run(program("python", "tokencache.client"), rig.url)).split()
        assert int(tokens) > int(trained) == sum(turn["completion_tokens"] for turn in turns)
        assert float(weight) == 1.0
        assert (await run(two_turns, rig.url, "again")).count("model: ") == 2
