"""`tokencache sessions`: lists the sessions of a proxy."""

import fnmatch
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tokencache.client import Client, ClientError, SessionState
from tokencache.commands.console import PROXY_URL, AdminKeyOption, PatternOption, ProxyOption, failed, output, plural


def list_sessions(  # noqa: PLR0917 - one parameter per option
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Only sessions whose names begin with this.", show_default=False)] = "",
    pattern: PatternOption = "*",
    state: Annotated[
        str | None, typer.Option("--state", metavar="STATE", help="Only sessions that are open, finished or sealed.", show_default=False)
    ] = None,
    group: Annotated[str | None, typer.Option("--group", metavar="NAME", help="Only sessions of this group.", show_default=False)] = None,
    tag: Annotated[str | None, typer.Option("--tag", metavar="TAG", help="Only sessions with this tag.", show_default=False)] = None,
    harness: Annotated[
        str | None, typer.Option("--harness", metavar="NAME", help="Only sessions of this harness.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, metavar="N", help="Print only the newest N; 0: all.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array with one object for each session.")] = False,
    proxy: ProxyOption = PROXY_URL,
    admin_key: AdminKeyOption = None,
) -> None:
    """List the sessions of a proxy, newest first.

    "calls" counts calls that have begun and not ended. A session is complete
    if no call is open and no reply of the model is missing.

    tokencache sessions run7-
    """
    try:
        with Client(proxy, admin_key) as client:
            listed = client.sessions(prefix, state=state, group=group, tag=tag, harness=harness)
    except ClientError as error:
        raise failed(error) from None
    states = [one for one in listed if fnmatch.fnmatchcase(one.session, pattern)]
    states.sort(key=lambda one: (-one.created, one.session))
    shown = states[:limit] if limit else states
    if as_json:
        typer.echo(msgspec.json.encode(shown))
    else:
        _print_table(output(), shown, len(states))


def _print_table(console: Console, states: Sequence[SessionState], found: int) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("session", overflow="fold")
    groups = any(state.group for state in states)
    if groups:
        table.add_column("group", overflow="fold")
    for name in ("state", "turns", "tokens", "calls", "incidents", "complete", "reward", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    now = time.time()
    for state in states:
        missing = any(incident.hole for incident in state.incidents)
        table.add_row(
            Text(state.session),
            *([Text(state.group)] if groups else []),
            state.state,
            f"{state.turns:,}",
            f"{state.tokens:,}",
            Text(str(len(state.open_calls)), style="yellow" if state.open_calls else ""),
            Text(str(len(state.incidents)), style="red" if missing else "yellow" if state.incidents else ""),
            Text("yes", style="green") if state.complete else Text("no", style="red"),
            "-" if state.reward is None else f"{state.reward:.4g}",
            _age(now - state.created) if state.created else "-",
        )
    if states:
        console.print(table)
    incomplete = sum(not state.complete for state in states)
    older = f" of {found:,}" if found > len(states) else ""
    console.print(plural(len(states), "session") + older + (f", {incomplete} incomplete" if incomplete else ""), highlight=False)


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
