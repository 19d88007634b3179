"""`tokencache report`: shows the figures of a run."""

from collections.abc import Iterator
from typing import Annotated

import typer

from tokencache.client import RunReport
from tokencache.commands.completion import complete_run
from tokencache.commands.console import PROXY_URL, AdminKeyOption, JsonOption, ProxyOption, calling, plural, print_json, printable
from tokencache.trajectories.reports import PASSING, Distribution, GroupFigures

_NAMES = {"reward": "reward", "turns": "turns", "tokens": "sampled tokens", "length": "length, tokens"}
_PARTS = {"all": "seconds", "calls": "  in model calls", "between": "  between calls", "after": "  after the last call"}


def report_run(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="Id of the run. Without one, all sessions count.", show_default=False, autocompletion=complete_run
        ),
    ] = "",
    *,
    tag: Annotated[str, typer.Option("--tag", metavar="TAG", help="Only sessions with this tag.", show_default=False)] = "",
    passing: Annotated[
        float, typer.Option("--passing", metavar="REWARD", help="A rollout passes if its reward is at least this.")
    ] = PASSING,
    with_failed: Annotated[bool, typer.Option("--with-failed", help="Count failed rollouts in the distributions, too.")] = False,
    groups: Annotated[int, typer.Option("--groups", min=0, max=1000, metavar="N", help="Show the newest N groups.")] = 20,
    as_json: JsonOption = False,
    proxy: ProxyOption = PROXY_URL,
    admin_key: AdminKeyOption = None,
) -> None:
    """Show how the rollouts of a run end, and what they are worth.

    A run is the sessions with the tag run:ID. Failed rollouts are in no
    distribution and in no pass rate.

    tokencache report 7f3a9c21
    """
    with calling(proxy, admin_key) as client:
        found = client.report(run, tag=tag, passing=passing, with_failed=with_failed, limit=groups)
    if as_json:
        print_json(found)
        return
    for line in _lines(found):
        typer.echo(printable(line))


def _lines(found: RunReport) -> Iterator[str]:
    kinds = ", ".join(f"{kind} {count}" for kind, count in found.failures.items())
    counts = {"running": found.running, "expected": found.expected, "played again": found.retried, "without a reward": found.unrewarded}
    others = "".join(f", {count} {name}" for name, count in counts.items() if count)
    name = f"run {found.run}: " if found.run else f"tag {found.tag}: " if found.tag else ""
    yield f"{name}{plural(found.rollouts, 'rollout')}, {found.valid} valid, {found.failed} failed{f' ({kinds})' if kinds else ''}{others}"
    if found.pass_rate is not None:
        yield f"pass rate {found.pass_rate:.1%} ({found.passed} with {found.passing:g} or more)"
    rows = {_NAMES[name]: one for name, one in found.values.items()} | {_PARTS[name]: one for name, one in found.seconds.items()}
    if rows:
        yield _row("", ["mean", "std", "least", "median", "90 %", "most"])
    for title, row in rows.items():
        yield _row(title, _cells(row))
    if found.versions:
        yield "policy versions: " + ", ".join(f"{one.version} ({one.rollouts})" for one in found.versions)
    if found.compared:
        yield f"groups with equal rewards only, which have no advantage: {found.equal} of {found.compared}"
    named = [one for one in found.groups if one.group]
    yield from map(_group, named)
    if found.found > len(found.groups) and named:
        yield f"and {plural(found.found - len(found.groups), 'more group')} (--groups)"


def _row(title: str, cells: list[str]) -> str:
    return f"{title:<22}" + "".join(f"{cell:>10}" for cell in cells)


def _cells(one: Distribution) -> list[str]:
    return [f"{value:.4g}" for value in (one.mean, one.std, one.least, one.median, one.p90, one.most)]


def _group(one: GroupFigures) -> str:
    rate = "-" if one.pass_rate is None else f"{one.pass_rate:.0%}"
    reward = "-" if one.reward is None else f"{one.reward:.4g}"
    text = f"group {one.group}: {one.valid + one.failed} of {one.size} over, pass rate {rate}, reward {reward}"
    text += f", {one.failed} failed" * bool(one.failed)
    return f"{text}; {one.waits.removeprefix(f'group {one.group}: ')}" if one.waits else text
