"""Runs the demo: the same agents on the same engine, with and without the proxy, and compares the two.

Everything is real except the model: HTTP on loopback, the proxy as `tokencache serve` runs it, a harness that receives only text, a
tokenizer, a chat template. Then the proxy's exports are compared with the engine's ground truth, entry by entry.
"""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tokencache.config import Settings
from tokencache.demo import episodes, show, stages
from tokencache.demo.figures import DemoFigures, disagreements, measure, measure_exported
from tokencache.demo.stages import Stage, StageError
from tokencache.server.serve import serving
from tokencache.store.memory import MemoryStore
from tokencache.testing.harness import CallFailedError, ScriptedHarness

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

_SETTINGS: dict[str, Any] = {
    "upstream_key": None,
    "host": "127.0.0.1",
    "port": 0,
    "registered_only": False,
    "admin_key": None,
    "on_store_error": "fail",
}
"""Settings of the demo's private proxy. They override environment variables."""

_AT_ONCE = 8
"""Concurrent rollouts."""


async def run_demo(
    *, rollouts: int, turns: int, upstream: str | None, model: str, json_file: Path | None, console: Console | None = None
) -> bool:
    """Run the demo, print its figures, and write them to a file if one is named.

    `upstream` is the base URL of a real engine, to use instead of the simulated one. Its `model` is empty for the first that it serves.

    Returns:
        Whether all exports equal the engine's ground truth and, with the simulated engine, every turn extends the one before it.
    """
    if console is None:
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # so that the figures are also printed to a terminal without box drawing
        console = Console()
    key = os.environ.get("TOKENCACHE_UPSTREAM_KEY")
    stage: AbstractAsyncContextManager[Stage] = (
        stages.simulated(episodes.script(turns)) if upstream is None else stages.real(upstream, model, key)
    )
    try:
        async with stage as engine:
            return await _Demo(engine, rollouts, turns, console).play(json_file, strict=upstream is None)
    except (StageError, CallFailedError, aiohttp.ClientError, OSError) as why:
        console.print(f"[red]The demo failed:[/] {type(why).__name__}: {why}", highlight=False)
        return False


class _Demo:
    def __init__(self, stage: Stage, rollouts: int, turns: int, console: Console) -> None:
        self._stage = stage
        self._names = [f"rollout-{n:03}" for n in range(rollouts)]
        self._turns = turns
        self._console = console

    async def play(self, json_file: Path | None, *, strict: bool) -> bool:
        stage, console = self._stage, self._console
        show.opening(console, stage.name, len(self._names), self._turns)
        settings = Settings(**{"upstream": stage.url, **_SETTINGS})
        async with serving(settings, MemoryStore()) as (url, proxy):
            with _progress(console) as progress:
                await self._run("directly", progress, self._direct)
                await self._run("through tokencache", progress, lambda n, advance: self._proxied(url, settings.session_header, n, advance))
            level = (await proxy.engine.model(stage.model)).capability
            async with aiohttp.ClientSession() as client:
                exports = [await _export(client, url, name) for name in self._names]
        logs = [stage.ground_truth(f"direct-{name}") for name in self._names]
        if not all(turn.prompt and turn.completion for log in logs for turn in log):
            raise StageError(f"{stage.name} returns no token ids (return_token_ids), so there is nothing to compare")
        direct = sum(map(measure, logs), DemoFigures())
        proxied = sum(map(measure_exported, exports), DemoFigures())
        wrong = [line for name, export in zip(self._names, exports, strict=True) for line in self._check(name, export)]
        if json_file is not None:
            figures = {"direct": direct.as_json(), "proxied": proxied.as_json(), "verified_by_engine": not wrong}
            await asyncio.to_thread(json_file.write_text, json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        show.table(console, direct, proxied)
        show.verdict(console, wrong, proxied.turns, simulated=strict)
        if level.level != "exact":
            console.print(f"[yellow]The proxy could only record with this engine ({level.level}): {level.why}[/]", highlight=False)
        example = show.choose(logs)
        if example is not None:
            await show.drift_shown(console, example, stage.spell)
        return not wrong and (proxied.contiguous_turns == proxied.turns or not strict)

    def _check(self, name: str, export: dict[str, Any]) -> list[str]:
        return disagreements(export, self._stage.ground_truth(name), self._turns)

    async def _run(self, title: str, progress: Progress, play: Callable[[int, Callable[[], None]], Awaitable[Any]]) -> None:
        """Run all rollouts, some at a time."""
        bar: TaskID = progress.add_task(title, total=len(self._names) * self._turns)
        gate = asyncio.Semaphore(_AT_ONCE)

        async def one(n: int) -> None:
            async with gate:
                await play(n, lambda: progress.advance(bar))

        try:
            async with asyncio.TaskGroup() as group:
                for n in range(len(self._names)):
                    group.create_task(one(n))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _direct(self, n: int, advance: Callable[[], None]) -> None:
        body = {**self._stage.sampling, **self._stage.body}
        await self._harness(self._stage.url, {"X-Session-ID": f"direct-{self._names[n]}"}, body, n, advance)

    async def _proxied(self, url: str, header: str, n: int, advance: Callable[[], None]) -> None:
        await self._harness(url, {header: self._names[n]}, dict(self._stage.sampling), n, advance)

    async def _harness(self, url: str, headers: dict[str, str], body: dict[str, Any], n: int, advance: Callable[[], None]) -> None:
        harness = ScriptedHarness(
            f"{url}/v1",
            headers=headers,
            model=self._stage.model,
            tools=episodes.TOOLS,
            streaming=n % 2 == 1,
            extra={**body, "seed": n},  # without a seed, the simulated engine's ids depend on the order of calls
            on_turn=advance,
        )
        await harness.run(episodes.task(n), self._turns)


async def _export(client: aiohttp.ClientSession, url: str, session: str) -> dict[str, Any]:
    async with client.get(f"{url}/tokencache/v1/sessions/{session}/trajectories") as answer:
        found = await answer.json()
        if not answer.ok:
            raise CallFailedError(f"the proxy exports no trajectory of {session}: {found}")
        return dict(found)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TextColumn("turns"), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)
