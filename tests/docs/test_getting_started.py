"""The programs on the page "Getting started" run as they are written, against a simulated engine."""

import asyncio
import re
import sys

from tests.docs.reference import DOCS
from tests.proxy.kit import proxied

PAGE = (DOCS / "getting-started.md").read_text()


def program(language, contains):
    return next(text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if contains in text)


async def run(source, url):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", source.replace("http://127.0.0.1:8100", url), stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0
    return printed.decode()


async def test_two_turns_are_recorded_and_fetched_as_one_sequence():
    two_turns = re.search(r"<<'EOF'\n(.*?)EOF\n", program("bash", "two_turns.py"), re.DOTALL)[1]
    async with proxied() as rig:
        assert (await run(two_turns, rig.url)).count("model: ") == 2
        turns = await rig.turns("rollout-1")
        assert [turn["match"] for turn in turns] == ["root", "continue"]
        tokens, trained, weight = (await run(program("python", "tokencache.client"), rig.url)).split()
        assert int(tokens) > int(trained) == sum(turn["completion_tokens"] for turn in turns)
        assert float(weight) == 1.0
