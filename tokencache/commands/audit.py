"""`tokencache audit`: compares recorded log probabilities with what an engine computes for the same tokens now."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from tokencache.client import ClientError
from tokencache.commands.console import (
    PROXY_URL,
    AdminKeyOption,
    JsonOption,
    PatternOption,
    ProxyOption,
    failed,
    output,
    plural,
    print_json,
    print_line,
)
from tokencache.commands.rollouts import (
    AtOnceOption,
    EngineKeyOption,
    EngineOption,
    RequestsOption,
    RolloutSource,
    TargetsArgument,
    check_targets,
    read_targets,
)
from tokencache.commands.sink import FileError
from tokencache.scoring.audit import MEANING, AuditedSpan, Cause
from tokencache.scoring.auditing import AuditRun, audit_rollouts
from tokencache.scoring.differences import BOUNDS, histogram
from tokencache.scoring.engine import REQUESTS_AT_ONCE, EngineLostError, ScoringEngine
from tokencache.scoring.request import ScoringError, default_tokens_at_once
from tokencache.trajectories.values import Trajectory

_SHOWN = 10
_BAR = 40


def audit_exports(
    targets: TargetsArgument = None,
    *,
    engine: EngineOption,
    everything: Annotated[bool, typer.Option("--all", help="Audit every session of the proxy.")] = False,
    pattern: PatternOption = "",
    version: Annotated[
        str,
        typer.Option("--version", metavar="VERSION", help="Version of the engine's weights, if it does not report it.", show_default=False),
    ] = "",
    any_version: Annotated[bool, typer.Option("--any-version", help="Audit all turns, whatever version sampled them.")] = False,
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="Model at the engine. The default is each turn's own.", show_default=False)
    ] = "",
    at_once: AtOnceOption = None,
    requests: RequestsOption = REQUESTS_AT_ONCE,
    as_json: JsonOption = False,
    engine_key: EngineKeyOption = None,
    proxy: ProxyOption = PROXY_URL,
    admin_key: AdminKeyOption = None,
) -> None:
    """Compare recorded log probabilities with recomputed ones.

    First the engine samples three replies and scores them: its own noise.
    Then each recorded turn is scored. If the mean difference of a turn is
    above the noise, the turn is named with the likely cause: other weights,
    a stale prefix cache, a replaced adapter, or log probabilities of another
    mode. The exit code is 1 if there is such a turn, or nothing to audit.

    A turn can be audited only with the weights that sampled it.

    tokencache audit rollouts.jsonl --engine http://gpu2:8000 --version 41
    """
    chosen = targets or []
    check_targets(chosen, everything=everything, pattern=pattern)
    if version and any_version:
        raise typer.BadParameter("--version and --any-version exclude each other", param_hint="--version")
    rollouts = _rollouts(read_targets(chosen, pattern or "*", proxy, admin_key))
    try:
        scoring = ScoringEngine(engine, engine_key, tokens_at_once=at_once or default_tokens_at_once(0), requests_at_once=requests)
        run, weights = asyncio.run(_run(scoring, rollouts, version, any_version=any_version, model=model or None))
    except (ClientError, FileError, EngineLostError, ScoringError, OSError) as error:
        raise failed(error) from None
    causes = run.causes(scoring)
    if as_json:
        print_json(_as_json(run, weights, causes))
    else:
        _print_report(output(), run, weights, causes)
    if causes or not run.results:
        raise typer.Exit(1)


def _rollouts(targets: Iterator[RolloutSource]) -> Iterator[Trajectory]:
    for target in targets:
        try:
            yield msgspec.convert(target.value, Trajectory)
        except ValueError as error:
            raise FileError(f"{target.where}: not a native rollout: {error}") from None


async def _run(
    engine: ScoringEngine, rollouts: Iterator[Trajectory], version: str, *, any_version: bool, model: str | None
) -> tuple[AuditRun, str]:
    """Audit, and return the result and the version of the engine's weights; `""` for every version."""
    console = Console(stderr=True)
    columns = (TextColumn("auditing"), TextColumn("{task.fields[amount]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=None, amount="")

        def step(run: AuditRun) -> None:
            progress.update(bar, amount=f"{plural(run.rollouts, 'rollout')}, {len(run.differences):,} tokens")

        async with engine:
            reported = await engine.weight_version()
            weights = "" if any_version else version or reported
            if not weights and not any_version:
                raise EngineLostError("the engine does not report which version of the weights it has: use --version, or --any-version")
            if weights and reported not in {"", weights}:
                console.print(f"the engine itself reports version {reported}", style="yellow", highlight=False, markup=False)
            run = await audit_rollouts(rollouts, engine, version=weights or None, model=model, step=step)
            if (now := await engine.weight_version()) != reported:
                raise EngineLostError(f"the engine's weights changed from version {reported!r} to {now!r} meanwhile: audit again")
            return run, weights


def _as_json(run: AuditRun, weights: str, causes: dict[int, Cause]) -> dict[str, Any]:
    return {
        "version": weights,
        "rollouts": run.rollouts,
        "spans": len(run.results),
        "tokens": len(run.differences),
        "floor": {"max": run.floor.max, "mean": run.floor.mean},
        "max": max(run.differences, default=0.0),
        "mean": sum(run.differences) / max(len(run.differences), 1),
        "histogram": [{"up_to": bound, "tokens": n} for bound, n in zip([*BOUNDS, None], histogram(run.differences), strict=True)],
        "findings": [_finding(run.results[place], cause) for place, cause in causes.items()],
        "not_audited": run.left_out,
    }


def _finding(result: AuditedSpan, cause: Cause) -> dict[str, Any]:
    return {
        **{name: getattr(result.span, name) for name in ("session", "sequence", "turn", "model", "version", "start", "end")},
        "cause": cause,
        "meaning": MEANING[cause],
        **{name: getattr(result.difference, name, None) for name in ("max", "mean", "bias", "first")},
        "limit": result.limit,
    }


def _print_report(console: Console, run: AuditRun, weights: str, causes: dict[int, Cause]) -> None:
    def line(words: str, style: str = "") -> None:
        print_line(console, words, style)

    line(f"noise of the engine itself: mean {run.floor.mean:.3g}, max {run.floor.max:.3g}")
    counts = f"{plural(run.rollouts, 'rollout')}, {plural(len(run.results), 'span')}, {len(run.differences):,} tokens"
    line(f"audited{f' version {weights}' if weights else ' every version'}: {counts}")
    if run.differences:
        _print_histogram(line, run)
    for reason, spans in Counter(one.reason for one in run.left_out).most_common():
        line(f"not audited: {plural(spans, 'span')}: {reason}", "yellow")
    if not run.results:
        line("NOTHING COULD BE AUDITED", "bold red")
    elif not causes:
        line("no difference above the noise", "green")
    for cause, count in Counter(causes.values()).most_common():
        line(f"{plural(count, 'span')}: {cause}: {MEANING[cause]}", "bold red")
        found = [run.results[place] for place, own in causes.items() if own is cause]
        for result in found[:_SHOWN]:
            line(_where(result))
        if len(found) > _SHOWN:
            line(f"  and {len(found) - _SHOWN} more: --json prints them")


def _where(result: AuditedSpan) -> str:
    """Name a span, and how large its difference is."""
    span, found = result.span, result.difference
    named = f" of version {span.version}" if span.version else ""
    where = f"  {span.session}, turn {span.turn}, tokens {span.start} to {span.end}{named}"
    return where if found is None else f"{where}: mean {found.mean:.3g} (noise: up to {result.limit:.3g}), max {found.max:.3g}"


def _print_histogram(line: Any, run: AuditRun) -> None:
    counts = histogram(run.differences)
    most = max(counts)
    line("difference of a token, absolute:")
    for place, count in enumerate(counts):
        name = "exactly 0" if not place else f"up to {BOUNDS[place]:g}" if place < len(BOUNDS) else f"above {BOUNDS[-1]:g}"
        line(f"  {name:>12} {count:>10,} {'#' * -(-_BAR * count // most)}".rstrip())
