"""`tokencache sessions`: lists the sessions of a proxy."""

import fnmatch
import time
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from tokencache.client import SessionState
from tokencache.commands.completion import complete_group, complete_harness, complete_session
from tokencache.commands.console import PROXY_URL, AdminKeyOption, PatternOption, ProxyOption, calling, plural, print_json
from tokencache.core.outcome import OutcomeKind


def list_sessions(  # noqa: PLR0917 - one parameter per option
    prefix: Annotated[
        str,
        typer.Argument(
            metavar="PREFIX", help="Only sessions whose names begin with this.", show_default=False, autocompletion=complete_session
        ),
    ] = "",
    pattern: PatternOption = "*",
    state: Annotated[str | None, typer.Option("--state", metavar="STATE", help="Only sessions that are open, finished or sealed.")] = None,
    group: Annotated[
        str | None, typer.Option("--group", metavar="NAME", help="Only sessions of this group.", autocompletion=complete_group)
    ] = None,
    tag: Annotated[str | None, typer.Option("--tag", metavar="TAG", help="Only sessions with this tag.")] = None,
    harness: Annotated[
        str | None, typer.Option("--harness", metavar="NAME", help="Only sessions of this harness.", autocompletion=complete_harness)
    ] = None,
    outcome: Annotated[
        str | None, typer.Option("--outcome", metavar="KIND", help="Only sessions with this outcome: ok, or a kind of failure.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, metavar="N", help="Print only the newest N; 0: all.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array with one object for each session.")] = False,
    proxy: ProxyOption = PROXY_URL,
    admin_key: AdminKeyOption = None,
) -> None:
    """List the sessions of a proxy, newest first.

    "calls" counts calls that have begun and not ended. A session is complete
    if no call is open and no reply of the model is missing. "outcome" is there
    if one failed: what failed.

    tokencache sessions run7-
    """
    with calling(proxy, admin_key) as client:
        listed = client.sessions(prefix, state=state, group=group, tag=tag, harness=harness, outcome=outcome)
    states = [one for one in listed if fnmatch.fnmatchcase(one.session, pattern)]
    states.sort(key=lambda one: (-one.created, one.session))
    shown = states[:limit] if limit else states
    if as_json:
        print_json(shown, indent=-1)
    else:
        for line in _table(shown, len(states)):
            typer.echo(line)


def _table(states: Sequence[SessionState], found: int) -> Iterator[str]:
    """Yield the lines of the table. Rich's tables take a minute for 100,000 rows."""
    groups = any(state.group for state in states)
    failures = any(state.outcome != OutcomeKind.OK for state in states)
    names = ["session", *(["group"] if groups else []), "state", "turns", "tokens", "calls", "incidents", "complete"]
    names += [*(["outcome"] if failures else []), "reward", "age"]
    left = 1 + groups
    now = time.time()
    rows = [[state.session, *([state.group] if groups else []), *_cells(state, now, outcome=failures)] for state in states]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    for state, cells in zip((None, *states), ([*names], *rows), strict=True):
        padded = [cell.ljust(width) if n < left else cell.rjust(width) for n, (cell, width) in enumerate(zip(cells, widths, strict=True))]
        if state is None:
            padded = [typer.style(cell, bold=True) for cell in padded]
        else:
            for column, color in _colors(state).items():
                at = names.index(column)
                padded[at] = typer.style(padded[at], fg=color)
        if states:
            yield "  ".join(padded)
    incomplete = sum(not state.complete for state in states)
    lost = sum(state.outcome != OutcomeKind.OK for state in states)
    older = f" of {found:,}" if found > len(states) else ""
    worthless = f", {incomplete} incomplete" * bool(incomplete) + f", {lost} failed" * bool(lost)
    yield plural(len(states), "session") + older + worthless


def _cells(state: SessionState, now: float, *, outcome: bool) -> list[str]:
    return [
        state.state,
        f"{state.turns:,}",
        f"{state.tokens:,}",
        str(len(state.open_calls)),
        str(len(state.incidents)),
        "yes" if state.complete else "no",
        *([state.outcome] if outcome else []),
        "-" if state.reward is None else f"{state.reward:.4g}",
        _age(now - state.created) if state.created else "-",
    ]


def _colors(state: SessionState) -> dict[str, str]:
    """Return the columns that have a color."""
    colors = {"complete": "green" if state.complete else "red"}
    if state.outcome != OutcomeKind.OK:
        colors["outcome"] = "red"
    if state.open_calls:
        colors["calls"] = "yellow"
    if state.incidents:
        colors["incidents"] = "red" if any(incident.hole for incident in state.incidents) else "yellow"
    return colors


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
